//! Scrapes metrics with Debian's Prometheus, and asks it for what it has seen.

use std::fs;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::Command;
use std::time::Instant;

use guest::Terminal;
use guest::build::debian;

use super::heard;
use crate::command::{Running, World};
use crate::host::cache;
use crate::shell::COMMAND_LIMIT;

/// A running Prometheus; killed when dropped.
pub struct Prometheus {
    port: u16,
    running: Running,
}

impl Prometheus {
    /// Starts one in `world` that scrapes these targets (`127.0.0.1:9464`) each second. It keeps
    /// its data there.
    ///
    /// # Panics
    /// If it cannot be had or started.
    pub fn start(world: &World, targets: &[&str]) -> Self {
        let program = heard(
            "prometheus",
            debian::fetch("prometheus", &cache(), &Terminal::new()),
        );
        let program: PathBuf = program.join("usr/bin/prometheus");
        let config = world.path("prometheus.yml");
        let text = format!(
            "global: {{scrape_interval: 1s}}\n\
             scrape_configs: [{{job_name: exotrace, static_configs: [{{targets: {targets:?}}}]}}]\n"
        );
        heard("prometheus.yml", fs::write(&config, text));
        let port = free_port();
        let mut command = Command::new(program);
        command
            .arg(format!("--config.file={}", config.display()))
            .arg(format!(
                "--storage.tsdb.path={}",
                world.path("prometheus").display()
            ))
            .arg(format!("--web.listen-address=127.0.0.1:{port}"));
        let running = world.spawn(&mut command);
        Self { port, running }
    }

    /// Waits until a query has a result that `is_enough`, and returns its series: labels and value.
    ///
    /// # Panics
    /// If it never has.
    pub fn wait_for(
        &self,
        query: &str,
        is_enough: impl Fn(&[(serde_json::Value, f64)]) -> bool,
    ) -> Vec<(serde_json::Value, f64)> {
        let begin = Instant::now();
        let mut last = String::new();
        while begin.elapsed() < COMMAND_LIMIT {
            if let Some(answer) = self.ask(query) {
                let series = series(&answer);
                if is_enough(&series) {
                    return series;
                }
                last = answer.to_string();
            }
            // Its own interval is a second.
            std::thread::sleep(std::time::Duration::from_millis(100));
        }
        panic!(
            "{query}: Prometheus has only {last}\n{}",
            self.running.printed().1
        );
    }

    fn ask(&self, query: &str) -> Option<serde_json::Value> {
        let encoded: String = query.bytes().map(|byte| format!("%{byte:02x}")).collect();
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).ok()?;
        let request = format!("GET /api/v1/query?query={encoded} HTTP/1.0\r\n\r\n");
        stream.write_all(request.as_bytes()).ok()?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).ok()?;
        serde_json::from_str(answer.split_once("\r\n\r\n")?.1).ok()
    }
}

fn series(answer: &serde_json::Value) -> Vec<(serde_json::Value, f64)> {
    let found = answer["data"]["result"].as_array().into_iter().flatten();
    let one = |series: &serde_json::Value| {
        let value = series["value"][1].as_str()?.parse().ok()?;
        Some((series["metric"].clone(), value))
    };
    found.filter_map(one).collect()
}

/// Returns a port of this host that nobody listens at now.
///
/// # Panics
/// If there is none.
pub fn free_port() -> u16 {
    let listener = heard("a port", TcpListener::bind("127.0.0.1:0"));
    heard("a port", listener.local_addr()).port()
}

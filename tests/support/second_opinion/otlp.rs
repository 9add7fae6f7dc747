//! Receives OTLP with OpenTelemetry's own definitions.

use std::process::Command;

use serde_json::Value;

use super::{Package, prometheus::free_port};
use crate::command::{Running, World};
use crate::shell::COMMAND_LIMIT;

const DEFINITIONS: Package = Package {
    requirements: &["opentelemetry-proto==1.45.2", "grpcio==1.85.3"],
    entry: "second-opinion-otlp-1.45.2",
};
const RECEIVER: &str = "tests/support/second_opinion/otlp_receiver.py";

/// A running receiver; killed when dropped.
pub struct Receiver {
    http: u16,
    grpc: u16,
    running: Running,
}

impl Receiver {
    /// Starts a receiver in `world`. By HTTP it answers so many requests with a status first.
    ///
    /// # Panics
    /// If it cannot be started.
    pub fn start(world: &World, refusals: Option<(u16, u32)>) -> Self {
        let (http, grpc) = (free_port(), free_port());
        let mut receiver = Self {
            running: Self::run(world, http, grpc, refusals),
            http,
            grpc,
        };
        receiver.wait_for("a receiver", |lines| !lines.is_empty());
        receiver
    }

    fn run(world: &World, http: u16, grpc: u16, refusals: Option<(u16, u32)>) -> Running {
        let mut command = Command::new(DEFINITIONS.installed().join("bin/python3"));
        command.arg(crate::data::source(RECEIVER));
        command.args([http.to_string(), grpc.to_string()]);
        if let Some((status, times)) = refusals {
            command.args([status.to_string(), times.to_string()]);
        }
        world.spawn(&mut command)
    }

    /// Returns the URL for OTLP over HTTP.
    pub fn http(&self) -> String {
        format!("http://127.0.0.1:{}", self.http)
    }

    /// Returns the URL for OTLP over gRPC.
    pub fn grpc(&self) -> String {
        format!("grpc://127.0.0.1:{}", self.grpc)
    }

    /// Waits until the requests that were received are enough, and returns them: `kind` (`logs`,
    /// `spans` or `metrics`), `path` and `message`.
    ///
    /// # Panics
    /// If they never are; `what` names what is waited for.
    pub fn wait_for(&mut self, what: &str, is_enough: impl Fn(&[Value]) -> bool) -> Vec<Value> {
        let mut found = Vec::new();
        self.running.wait_until(what, COMMAND_LIMIT, |stdout, _| {
            // The last line may not be whole.
            let lines = stdout
                .lines()
                .map_while(|line| serde_json::from_str(line).ok());
            found = lines.collect();
            is_enough(&found)
        });
        found
    }
}

/// Returns all records of a kind in requests, each with the attributes of its resource as
/// `resource`, and attributes as objects.
pub fn records(requests: &[Value], kind: &str) -> Vec<Value> {
    let [resources, scopes, items] = match kind {
        "logs" => ["resourceLogs", "scopeLogs", "logRecords"],
        "spans" => ["resourceSpans", "scopeSpans", "spans"],
        _ => ["resourceMetrics", "scopeMetrics", "metrics"],
    };
    let mut found = Vec::new();
    let list = |of: &Value| of.as_array().cloned().unwrap_or_default();
    for request in requests.iter().filter(|request| request["kind"] == kind) {
        for resource in list(&request["message"][resources]) {
            for scope in list(&resource[scopes]) {
                for mut item in list(&scope[items]) {
                    item["attributes"] = attributes(&item["attributes"]);
                    item["resource"] = attributes(&resource["resource"]["attributes"]);
                    found.push(item);
                }
            }
        }
    }
    found
}

/// Returns attributes as an object of their values.
pub fn attributes(list: &Value) -> Value {
    let pairs = list.as_array().into_iter().flatten();
    let pairs = pairs.filter_map(|pair| {
        let value = pair["value"].as_object()?.values().next()?;
        Some((pair["key"].as_str()?.to_owned(), value.clone()))
    });
    Value::Object(pairs.collect())
}

//! What exports cost: `cargo bench-exports`.
//!
//! The first turns count the events a second that a trace writes as a table in Parquet, and as
//! lines of JSON in the same run. Events have four arguments that do not repeat, and no stacks.
//! `rendering` is from events in memory to bytes. `whole` has in addition the reading of the lines
//! that a machine sends.
//!
//! The last ones are a thousand machines, whose recorded streams go to one collector of
//! OpenTelemetry over HTTP. It is a sink of this process, and then one that is away: the counts
//! must be whole in both.

use std::error::Error;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The number of events of each turn.
const EVENTS: usize = 4_000_000;
/// The number of turns; the best counts.
const TURNS: usize = 3;
/// The number of machines, and of the events of each.
const FLEET: (usize, usize) = (1000, 500);

fn main() -> Result<(), Box<dyn Error>> {
    println!("{EVENTS} events      rendering/s        whole/s  bytes/event");
    for table in [false, true] {
        let mut best: Option<(f64, f64, u64)> = None;
        for _ in 0..TURNS {
            let told = exotrace::measured::trace(table, EVENTS)?;
            let events = EVENTS as f64;
            let rendering = events / told.rendering.as_secs_f64();
            let whole = events / (told.rendering + told.parsing).as_secs_f64();
            if best.is_none_or(|(known, ..)| rendering > known) {
                best = Some((rendering, whole, told.bytes / EVENTS as u64));
            }
        }
        let (rendering, whole, bytes) = best.ok_or("no turns")?;
        let name = if table { "parquet" } else { "json" };
        println!("{name:>14} {rendering:>16.0} {whole:>14.0} {bytes:>12}");
    }
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let address = listener.local_addr()?;
    let received = Arc::new(AtomicU64::new(0));
    let count = received.clone();
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let count = count.clone();
            std::thread::spawn(move || sink(stream, &count));
        }
    });
    let away = TcpListener::bind("127.0.0.1:0")?.local_addr()?;
    let (machines, events) = FLEET;
    println!("{machines} machines, {events} events each");
    println!("     collector     handed over/s        taken/s      taken    dropped  most MiB");
    for (name, address) in [("takes", address), ("is away", away)] {
        let told = exotrace::measured::fleet(&format!("http://{address}"), machines, events);
        let told = told.map_err(|error| error.to_string())?;
        let all = (machines * events) as u64;
        if told.taken + told.dropped != all {
            return Err(format!("{all} events, but {told:?}").into());
        }
        let handed = all as f64 / told.handing.as_secs_f64();
        let taken = told.taken as f64 / told.whole.as_secs_f64();
        let (took, dropped, most) = (told.taken, told.dropped, most_memory()?);
        println!("{name:>14} {handed:>17.0} {taken:>14.0} {took:>10} {dropped:>10} {most:>9}");
    }
    let bytes = received.load(Ordering::Relaxed);
    println!("{} bytes a log", bytes / (machines * events) as u64);
    Ok(())
}

/// Takes requests of one connection and counts the bytes of their bodies.
fn sink(stream: TcpStream, bytes: &AtomicU64) -> std::io::Result<()> {
    let mut input = BufReader::new(stream.try_clone()?);
    let (mut output, mut length) = (stream, 0);
    loop {
        let mut line = String::new();
        if input.read_line(&mut line)? == 0 {
            return Ok(());
        }
        let line = line.trim().to_lowercase();
        if let Some(number) = line.strip_prefix("content-length: ") {
            length = number.parse().unwrap_or(0);
        }
        if line.is_empty() {
            let body = std::io::copy(&mut input.by_ref().take(length), &mut std::io::sink())?;
            bytes.fetch_add(body, Ordering::Relaxed);
            output.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")?;
        }
    }
}

/// Returns the most memory that this process has had so far, in MiB.
fn most_memory() -> Result<u64, Box<dyn Error>> {
    let status = fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find(|line| line.starts_with("VmHWM:"));
    let number = line.and_then(|line| line.split_whitespace().nth(1));
    Ok(number.ok_or("no VmHWM")?.parse::<u64>()? >> 10)
}

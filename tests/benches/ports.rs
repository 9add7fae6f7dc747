//! The number of events a second that reach a reader on the host through the port `trace`, and
//! their bound: `cargo bench-ports`.
//!
//! The first turn is the port alone: a thread makes lines as fast as it can, and a reader takes
//! them from the device's log over a Unix socket. The second is a Linux guest whose program does
//! little but system calls, with entry and return of one of them traced, and a reader on the
//! machine's socket. The same calls untraced are the baseline. The third is the micro guest, which
//! only calls the traced function: the maximum of one vCPU. Nothing may be dropped in any of them.

use std::error::Error;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use support::command::{Running, World};
use support::shell::{COMMAND_LIMIT, snapshot_folder};
use trace_devices::port::{EventLog, EventReader};
use trace_devices::trace_line::{LINE_BYTES, LineKind, TraceLine};

/// The number of lines of the port's own turn.
const LINES: u64 = 1_000_000;
/// The number of lines that are put into the log at once, as a device takes them from its rings.
const BATCH: u64 = 500;
/// The number of entries of the logs.
const ENTRIES: usize = 1 << 20;
/// The number of calls of the guest's turn; each is an entry and a return.
const CALLS: u64 = 100_000;
const NAME: &str = "ports";
const FUNCTION: &str = "__x64_sys_getppid";

type Fallible<T> = Result<T, Box<dyn Error>>;

/// Returns the lines a second through log and socket.
fn port_alone() -> Fallible<f64> {
    let log = EventLog::new(LINE_BYTES, ENTRIES);
    let (mut here, mut there) = UnixStream::pair()?;
    let mut reader = log.reader();
    let sender = std::thread::spawn(move || -> std::io::Result<u64> {
        let mut sent = 0;
        while sent < LINES * LINE_BYTES as u64 {
            reader.wait(Duration::from_millis(100));
            let bytes = reader.read(1 << 16);
            here.write_all(&bytes)?;
            sent += bytes.len() as u64;
        }
        Ok(reader.dropped())
    });
    let begin = Instant::now();
    let producer = std::thread::spawn({
        let log = log.clone();
        move || {
            for batch in 0..LINES / BATCH {
                // No more than fits: only lines that arrive count.
                while log.counts().waiting > ENTRIES as u64 / 2 {
                    std::thread::yield_now();
                }
                let lines = (0..BATCH).map(|n| {
                    let ticks = batch * BATCH + n;
                    let line = TraceLine {
                        kind: LineKind::Entry,
                        pc: 0xffff_ffff_8100_0000,
                        ticks,
                        pid: 57,
                        arguments: [ticks, 1, 2, 3],
                    };
                    line.to_bytes()
                });
                let lines: Vec<_> = lines.collect();
                log.push(lines.iter().map(|line| line.as_slice()));
            }
        }
    });
    let (mut taken, mut buffer) = (0, vec![0; 1 << 16]);
    while taken < LINES * LINE_BYTES as u64 {
        match there.read(&mut buffer)? {
            0 => return Err(format!("the port has ended after {taken} bytes").into()),
            count => taken += count as u64,
        }
    }
    let took = begin.elapsed().as_secs_f64();
    producer.join().map_err(|_| "the producer panicked")?;
    let dropped = sender.join().map_err(|_| "the sender panicked")??;
    match (dropped, log.counts().lost) {
        (0, 0) => Ok(LINES as f64 / took),
        lost => Err(format!("lost: {lost:?}").into()),
    }
}

/// Returns the seconds that the guest's program takes for its calls.
fn run_calls(machine: &mut Running, number: u32) -> f64 {
    let end = format!("done{number}=0");
    let begin = Instant::now();
    machine.type_line(&format!("syscount {CALLS}; echo done{number}=$?"));
    machine.wait_until("calls", 4 * COMMAND_LIMIT, |stdout, _| {
        stdout.contains(&end)
    });
    begin.elapsed().as_secs_f64()
}

fn ctl(world: &World, words: &[&str]) -> Fallible<String> {
    let line = ["ctl", "--vm", NAME].iter().chain(words);
    let ended = world.run(line, COMMAND_LIMIT);
    match ended.status {
        0 => Ok(ended.stdout),
        _ => Err(format!("{words:?}: {}", ended.stderr).into()),
    }
}

/// Returns the seconds of the guest's calls untraced and traced, and the number of lines that a
/// reader got of them.
fn guest() -> Fallible<Option<(f64, f64, u64)>> {
    let Some(host) = support::host() else {
        return Ok(None);
    };
    let world = World::new();
    let folder = snapshot_folder(host);
    let line = ["run", "--name", NAME, "--restore"].map(std::ffi::OsStr::new);
    let mut machine = world.start(line.into_iter().chain([folder.as_os_str()]));
    let socket = world.path("run/exotrace").join(NAME).join("trace");
    machine.wait_until("machine", COMMAND_LIMIT, |_, _| socket.exists());
    // A restored guest gets its memory as it touches it.
    run_calls(&mut machine, 0);
    let plain = run_calls(&mut machine, 1);
    ctl(&world, &["trace", FUNCTION, FUNCTION, "new", "calls"])?;
    ctl(&world, &["trace", "calls", "on"])?;
    ctl(&world, &["size", "20"])?;
    let reader = reader(&socket)?;
    ctl(&world, &["start"])?;
    let traced = run_calls(&mut machine, 2);
    ctl(&world, &["stop"])?;
    let told = ctl(&world, &[])?;
    if !told.contains("#tracelost 0\n") {
        return Err(format!("lines were lost:\n{told}").into());
    }
    let ended = world.run(["stop", "--vm", NAME], COMMAND_LIMIT);
    if ended.status != 0 {
        return Err(ended.stderr.into());
    }
    machine.finish(COMMAND_LIMIT);
    let taken = reader.join().map_err(|_| "the reader panicked")?;
    Ok(Some((plain, traced, taken / LINE_BYTES as u64)))
}

/// Starts a reader of the machine's port, which returns the bytes it got until the machine has
/// ended.
fn reader(socket: &Path) -> Fallible<std::thread::JoinHandle<u64>> {
    let mut stream = UnixStream::connect(socket)?;
    Ok(std::thread::spawn(move || {
        let (mut taken, mut buffer) = (0, vec![0; 1 << 16]);
        // Until the machine closes its side.
        while let Ok(count @ 1..) = stream.read(&mut buffer) {
            taken += count as u64;
        }
        taken
    }))
}

/// Returns the lines a second of a guest that only calls the traced function.
fn calls_alone() -> Fallible<f64> {
    let world = World::new();
    let made = world.run(["guest", "micro", "micro"], COMMAND_LIMIT);
    if made.status != 0 {
        return Err(made.stderr.into());
    }
    let mut line = vec!["run", "--name", NAME, "--serial", "null", "--kernel"];
    line.extend(["micro/micro.elf", "--cmdline", "calls 4000000000"]);
    let mut machine = world.start(line);
    let socket = world.path("run/exotrace").join(NAME).join("trace");
    machine.wait_until("machine", COMMAND_LIMIT, |_, _| socket.exists());
    ctl(
        &world,
        &["trace", "micro_leaf", "micro_leaf", "new", "calls"],
    )?;
    ctl(&world, &["trace", "calls", "on"])?;
    ctl(&world, &["size", "20"])?;
    let reader = reader(&socket)?;
    let begin = Instant::now();
    ctl(&world, &["start"])?;
    std::thread::sleep(Duration::from_secs(5));
    ctl(&world, &["stop"])?;
    let took = begin.elapsed().as_secs_f64();
    let told = ctl(&world, &[])?;
    world.run(["stop", "--vm", NAME], COMMAND_LIMIT);
    machine.finish(COMMAND_LIMIT);
    let lines = reader.join().map_err(|_| "the reader panicked")? / LINE_BYTES as u64;
    match told.contains("#tracelost 0\n") && told.contains(&format!("#tracehits {lines},")) {
        true => Ok(lines as f64 / took),
        false => Err(format!("{lines} lines were read of:\n{told}").into()),
    }
}

fn main() -> Fallible<()> {
    let alone = port_alone()?;
    println!("port alone, log and socket:        {alone:>12.0} lines a second, none lost");
    let Some((plain, traced, lines)) = guest()? else {
        return Ok(());
    };
    let calls = calls_alone()?;
    println!("calls and nothing else:            {calls:>12.0} lines a second, none lost");
    if lines < 2 * CALLS {
        return Err(format!("{lines} lines of {CALLS} calls").into());
    }
    let rate = lines as f64 / traced;
    println!("guest's calls through the port:    {rate:>12.0} lines a second, none lost");
    println!(
        "the guest's calls, traced to untraced: {:.2} times as long ({:.2} µs a line)",
        traced / plain,
        (traced - plain) / lines as f64 * 1e6
    );
    println!(
        "the port alone to those of calls: {:.1} times as many: the vCPU's exits are the bound",
        alone / calls
    );
    Ok(())
}

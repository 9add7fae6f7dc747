//! The time that machines take to start, from outside: `cargo bench-start`.
//!
//! The first three are the time from the start of the `exotrace` command to a line that the guest
//! prints, the median of several runs. Beside them is the same for `exotrace --version`, which
//! starts no machine. Files are in the page cache, as they are when a second machine is started. A
//! guest's line comes later than its first instruction, by a restored guest's own work on the typed
//! line. So these are upper bounds.
//!
//! The command must have been built before, by `cargo build --release`.
//!
//! The last are boots of the small kernel, one without virtio devices and one with each kind.
//! Targets are those of the development machine, which interprets the guest's kernel code.

use std::error::Error;
use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use guest::Terminal;
use guest::build::initramfs;
use introspect::Gpa;
use support::command::World;
use support::linux::BootOptions;
use support::shell::{BOOT_LIMIT, READY, snapshot_folder};
use support::{Host, Linux, SerialLog};
use vmm::boot::KernelFile;
use vmm::machine::{ConsoleConfig, DiskConfig, MachineConfig, VirtioConfig, boot};
use vmm::snapshot::{KernelReference, SnapshotInfo, save};

/// The number of runs of which each figure is the median.
const RUNS: usize = 15;
/// The RAM of the restored micro guest in bytes.
const MEMORY: u64 = 128 << 20;
/// The first address that is filled; the micro guest lies below.
const FILLED_FROM: u64 = 2 << 20;
/// The interval at which a booting guest is polled for its first system call.
const LOOK_INTERVAL: Duration = Duration::from_millis(10);

/// The started command, the typed text, and the start of the awaited line.
struct Case<'a> {
    name: &'a str,
    words: Vec<&'a OsStr>,
    typed: &'a str,
    awaited: &'a str,
    target: Option<Duration>,
}

/// Returns the time from the start of the command to the end of the line.
fn once(world: &World, case: &Case<'_>) -> Result<Duration, Box<dyn Error>> {
    let mut command = world.command();
    command
        .args(&case.words)
        .stdout(Stdio::piped())
        .stderr(Stdio::null());
    let start = Instant::now();
    let mut child = command.spawn()?;
    let (Some(mut input), Some(output)) = (child.stdin.take(), child.stdout.take()) else {
        return Err("no pipes".into());
    };
    // A command that reads no input may have ended by now.
    let _ = input.write_all(case.typed.as_bytes());
    let mut output = BufReader::new(output);
    let mut line = Vec::new();
    let time = loop {
        line.clear();
        if output.read_until(b'\n', &mut line)? == 0 {
            break Err(format!("{}: ended without {:?}", case.name, case.awaited));
        }
        if String::from_utf8_lossy(&line).contains(case.awaited) {
            break Ok(start.elapsed());
        }
    };
    // Fails if it has ended by itself.
    let _ = child.kill();
    child.wait()?;
    Ok(time?)
}

fn median(world: &World, case: &Case<'_>) -> Result<Duration, Box<dyn Error>> {
    let mut times = (0..RUNS)
        .map(|_| once(world, case))
        .collect::<Result<Vec<_>, _>>()?;
    times.sort_unstable();
    Ok(times.get(RUNS / 2).copied().unwrap_or_default())
}

/// Saves the micro guest, which waits for a line, to `folder`, with all of its memory in use.
/// Returns the length of the pause.
fn save_full_micro(host: &Host, micro: &Path, folder: &Path) -> Result<Duration, Box<dyn Error>> {
    let kernel = KernelFile::open(micro)?;
    let serial = SerialLog::default();
    let config = MachineConfig {
        memory: MEMORY,
        cpus: 1,
        kernel: &kernel,
        initramfs: None,
        command_line: "echo",
        add_words: false,
        protocol: None,
        pit: false,
        acpi: None,
        virtio: Default::default(),
        serial: serial.output(),
    };
    let mut machine = boot(&host.kvm, &host.profile, config)?.machine;
    let page = [0xa5; 4096];
    for address in (FILLED_FROM..MEMORY).step_by(page.len()) {
        machine.ram().write_physical(Gpa(address), &page)?;
    }
    machine.start();
    machine.serial_input(b"filled\n");
    let echoed = |text: &str| text.contains("filled").then_some(());
    serial
        .wait(0, BOOT_LIMIT, echoed)
        .ok_or("the micro guest does not answer")?;
    let info = SnapshotInfo {
        command_line: "echo".into(),
        kernel: Some(KernelReference::new(micro, kernel.elf())),
    };
    Ok(save(&host.kvm, &machine, &info, folder)?.paused)
}

/// Returns the time from nothing to the first system call of a user program, if the host counts
/// those, and to `init`'s first line.
fn cold_boot(
    host: &Host,
    virtio: VirtioConfig,
) -> Result<(Option<Duration>, Duration), Box<dyn Error>> {
    let initramfs = initramfs::tiny(&support::host::cache(), &[], &Terminal::new())?;
    // Read before the clock starts, as the other cases find their files in the page cache.
    let _ = support::Kernel::small();
    let start = Instant::now();
    let linux = Linux::boot(
        host,
        &BootOptions {
            kernel: support::Kernel::small(),
            initramfs: Some(&initramfs),
            command_line: &guest::build::kernel::cmdline(),
            cpus: 1,
            protocol: None,
            virtio,
        },
    );
    let mut first_call = None;
    loop {
        let ready = |text: &str| text.contains(READY).then_some(());
        let found = linux.serial.wait(0, LOOK_INTERVAL, ready);
        if first_call.is_none() && linux.machine().stats().syscalls_repaired > 0 {
            first_call = Some(start.elapsed());
        }
        if found.is_some() {
            return Ok((first_call, start.elapsed()));
        }
        if start.elapsed() > BOOT_LIMIT {
            return Err(format!("not booted in {BOOT_LIMIT:?}\n{}", linux.situation()).into());
        }
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let Some(host) = support::host() else {
        return Ok(());
    };
    let world = World::new();
    let (micro, full, shell) = (
        world.path("micro.elf"),
        world.path("full"),
        snapshot_folder(host),
    );
    std::fs::write(&micro, guest::micro::elf())?;
    let paused = save_full_micro(host, &micro, &full)?;
    let words = |line: &'static str| line.split(' ').map(OsStr::new).collect::<Vec<_>>();
    let with = |line, path| [words(line), vec![path]].concat();

    let version = Case {
        name: "exotrace --version",
        words: words("--version"),
        typed: "",
        awaited: "exotrace",
        target: None,
    };
    let calls = [
        with("run --memory 4M --no-words --kernel", micro.as_os_str()),
        vec![OsStr::new("--cmdline"), OsStr::new("calls 1")],
    ];
    let cases = [
        Case {
            name: "micro guest, to its first line",
            words: calls.concat(),
            typed: "",
            awaited: "micro",
            target: Some(Duration::from_millis(20)),
        },
        Case {
            name: "restored, 128 MiB in use, to a line echoed",
            words: with("run --restore", full.as_os_str()),
            typed: "typed\n",
            awaited: "typed",
            target: Some(Duration::from_millis(15)),
        },
        Case {
            name: "restored Linux, to a line answered by its shell",
            words: with("run --restore", shell.as_os_str()),
            typed: "echo answer=$((6*7))\n",
            awaited: "answer=42",
            target: Some(Duration::from_secs(1)),
        },
    ];
    let base = median(&world, &version)?;
    let show = |name: &str, time: Duration, target: Option<Duration>| {
        let target = target.map_or(String::new(), |t| {
            format!("   target {:6.0} ms", milliseconds(t))
        });
        let ratio = time.as_secs_f64() / base.as_secs_f64();
        println!(
            "{name:<50} {:9.2} ms {ratio:9.2}{target}",
            milliseconds(time)
        );
    };
    show(version.name, base, None);
    for case in &cases {
        show(case.name, median(&world, case)?, case.target);
    }
    show(
        "128 MiB in use saved, the guest's pause",
        paused,
        Some(Duration::from_millis(30)),
    );
    let (first_call, ready) = cold_boot(host, VirtioConfig::default())?;
    let target = Some(Duration::from_secs(16));
    if let Some(time) = first_call {
        show("small kernel, cold, to the first system call", time, target);
    }
    show("small kernel, cold, to init's first line", ready, target);
    let image = world.path("disk.img");
    std::fs::write(&image, vec![0; 1 << 20])?;
    let rng = VirtioConfig {
        rng: true,
        ..VirtioConfig::default()
    };
    let disk = VirtioConfig {
        disks: vec![DiskConfig::new(image, false)],
        ..VirtioConfig::default()
    };
    let console = VirtioConfig {
        console: Some(ConsoleConfig::default()),
        ..VirtioConfig::default()
    };
    for (name, virtio) in [
        ("the same with virtio-rng", rng),
        ("the same with a disk", disk),
        ("the same with a virtio-console", console),
    ] {
        show(name, cold_boot(host, virtio)?.1, None);
    }
    println!(
        "(second column: relative to {}; medians of {RUNS} runs, the boots once)",
        version.name
    );
    Ok(())
}

fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

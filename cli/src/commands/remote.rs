//! The commands for machines in another process: `snapshot`, `stop`, `stat`, `vms`. `snapshot
//! --verify` needs no machine.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

use vmm::snapshot::{NewFolder, SavedMemory};

use crate::args;
use crate::byte_progress;
use crate::client::control::{ask, ask_with, ask_within, unexpected};
use crate::memory_size::HumanSize;
use crate::protocol::control::{Answer, Command, Info, SessionCount, SiteCount, Stat, Unknown};
use crate::registry::{self, Registry, Running, VmName};
use crate::report::{Failure, ToOutput, printable, printable_lines, say};

/// The largest number of unknown addresses listed by `stat`.
const LISTED: usize = 16;
/// The time that `vms` waits for a machine that does not answer.
const PATIENCE: Duration = Duration::from_secs(5);
/// The time that `stop` waits for the machine's process to write all its output.
const STOP_PATIENCE: Duration = Duration::from_secs(60);

/// Returns the running machines. Removes and reports the remains of dead ones.
fn running(registry: &Registry) -> Result<Vec<Running>, Failure> {
    let (running, removed) = registry.list()?;
    for name in removed {
        say(format_args!(
            "removed what the dead machine {name} left behind"
        ));
    }
    Ok(running)
}

/// Returns the selected machine.
///
/// # Errors
/// If there is none, or more than one.
pub(super) fn find(which: args::VmSelector) -> Result<Running, Failure> {
    let running = running(&Registry::open()?)?;
    Ok(registry::choose(running, which.vm)?)
}

/// Runs `exotrace snapshot`.
pub fn snapshot(args: args::Snapshot) -> Result<(), Failure> {
    if args.verify {
        return verify(&args.folder);
    }
    let (name, size, paused, _) = save(args.which, &args.folder, &Command::Snapshot)?;
    say(format_args!(
        "{name}: saved {size} to {}; the guest was paused for {paused}",
        args.folder.display()
    ));
    Ok(())
}

/// Runs `exotrace rewind`.
pub fn rewind(args: args::Rewind) -> Result<(), Failure> {
    let ago_ms = u64::try_from(args.ago.as_millis()).unwrap_or(u64::MAX);
    let (name, size, _, ago) = save(args.which, &args.folder, &Command::Rewind { ago_ms })?;
    say(format_args!(
        "{name}: saved {size} of {ago} ago to {}",
        args.folder.display()
    ));
    Ok(())
}

/// Has a machine saved to `folder`. Makes the folder and its files itself, because the machine's
/// process may not be able to. Returns the machine's name, its size, the guest's pause, and the age
/// of the moment.
fn save(
    which: args::VmSelector,
    folder: &Path,
    command: &Command,
) -> Result<(VmName, HumanSize, String, String), Failure> {
    let machine = find(which)?;
    let mut folder = NewFolder::create(folder)?;
    match ask(&machine, &Command::Info)? {
        Answer::Info(info) => folder.add_overlays(info.overlays)?,
        other => return Err(unexpected(&machine, &other).into()),
    }
    let bar = byte_progress::bar("saving");
    let answer = ask_with(&machine, command, &folder.descriptors(), |progress| {
        if let Answer::Saving {
            hashing,
            done,
            total,
        } = progress
        {
            byte_progress::done(&bar, done, total);
            bar.set_message(if hashing { "hashing" } else { "saving" });
        }
    });
    bar.finish_and_clear();
    match answer? {
        Answer::Saved {
            bytes,
            paused_us,
            ago_ms,
        } => {
            folder.finish()?;
            let tenths = |count: u64, unit| format!("{}.{} {unit}", count / 10, count % 10);
            let (paused, ago) = (tenths(paused_us / 100, "ms"), tenths(ago_ms / 100, "s"));
            Ok((machine.name, HumanSize(bytes), paused, ago))
        }
        other => Err(unexpected(&machine, &other).into()),
    }
}

/// Runs `exotrace snapshot --verify`.
fn verify(folder: &Path) -> Result<(), Failure> {
    let memory = SavedMemory::open(folder)?;
    report_damage(folder, &memory)?;
    say(format_args!(
        "{}: {} of memory in {} pieces: all as they were written",
        folder.display(),
        HumanSize(memory.size()),
        memory.pieces()
    ));
    Ok(())
}

/// Checks all of a snapshot's memory, with progress, and names each damaged piece.
///
/// # Errors
/// If one is damaged.
pub(super) fn report_damage(folder: &Path, memory: &SavedMemory) -> Result<(), Failure> {
    let bar = byte_progress::bar("checking");
    let damaged = memory.verify(|done, all| byte_progress::done(&bar, done, all));
    bar.finish_and_clear();
    for piece in &damaged {
        say(format_args!("{}/memory: {piece}", folder.display()));
    }
    match damaged.len() {
        0 => Ok(()),
        count => Err(Failure::new(format_args!(
            "snapshot {}: damaged: {count} of {} pieces of its memory; restore it from a copy, or save the machine anew",
            folder.display(),
            memory.pieces()
        ))),
    }
}

/// Returns a folder's absolute path, because the machine's process has another working directory.
/// `what` is its purpose.
pub(super) fn absolute(what: &str, folder: PathBuf) -> Result<PathBuf, Failure> {
    std::path::absolute(&folder)
        .map_err(|error| Failure::new(format_args!("{what} {}: {error}", folder.display())))
}

/// Runs `exotrace stop` and returns when the machine has ended.
pub fn stop(args: args::Stop) -> Result<(), Failure> {
    let machine = find(args.which)?;
    if args.gracefully {
        return shut_down(&machine, args.within);
    }
    match ask(&machine, &Command::Stop)? {
        Answer::Stopping => {}
        other => return Err(unexpected(&machine, &other).into()),
    }
    match machine.wait_gone(STOP_PATIENCE) {
        true => Ok(()),
        false => Err(Failure::new(format_args!(
            "machine {} has stopped, but its process {} still runs after {} s: its output is not read, or the process \
             is stopped itself",
            machine.name,
            machine.pid,
            STOP_PATIENCE.as_secs()
        ))),
    }
}

/// Presses the power button of a machine, and waits until it is gone.
fn shut_down(machine: &Running, within: Duration) -> Result<(), Failure> {
    match ask(machine, &Command::PowerButton)? {
        Answer::Pressed => {}
        other => return Err(unexpected(machine, &other).into()),
    }
    match machine.wait_gone(within) {
        true => Ok(()),
        false => Err(Failure::new(format_args!(
            "machine {} still runs {} s after its power button was pressed: nothing in the guest reacts, or it \
             takes longer (--within); `exotrace stop` ends it at once",
            machine.name,
            within.as_secs()
        ))),
    }
}

/// Runs `exotrace stat`.
pub fn stat(args: args::Stat) -> Result<(), Failure> {
    let machine = find(args.which)?;
    let stat = match ask(&machine, &Command::Stat { hash: args.hash })? {
        Answer::Stat(stat) => stat,
        other => return Err(unexpected(&machine, &other).into()),
    };
    let mut out = std::io::stdout().lock();
    if args.json {
        let json = serde_json::to_string(&stat)?;
        return writeln!(out, "{json}").to_output();
    }
    out.write_all(stat_text(&stat).as_bytes()).to_output()
}

/// Adds a machine's counts, which can be any numbers.
fn sum_of(counts: impl Iterator<Item = u64>) -> u64 {
    counts.fold(0, u64::saturating_add)
}

pub(super) fn stat_text(stat: &Stat) -> String {
    let mut text = String::new();
    let counts = [
        ("port exits", stat.port_exits),
        ("memory exits", stat.mmio_exits),
        ("traps of probes", stat.traps),
        ("guest's own int3s", stat.guest_int3),
        ("system calls repaired", stat.syscalls_repaired),
        ("changes by debuggers", stat.changes),
    ];
    for (what, count) in counts {
        text += &format!("{what:22} {count:>12}\n");
    }
    text += &format!("{:22} {:>12}\n", "guest memory", stat.memory.guest);
    let held = stat
        .memory
        .held
        .iter()
        .map(|(what, bytes)| format!("{bytes} for {what}"));
    text += &format!(
        "{:22} {:>12}, of at most {}: {}\n",
        "memory held",
        sum_of(stat.memory.held.iter().map(|(_, bytes)| *bytes)),
        stat.memory.most,
        held.collect::<Vec<_>>().join(", "),
    );
    if let Some(hash) = &stat.text {
        text += &format!("{:22} {hash}\n", "kernel text");
    }
    if let Some(history) = &stat.history {
        text += &format!(
            "{:22} {:>12}, of {}.{} s; {} bytes; pauses of at most {} us\n",
            "checkpoints",
            history.checkpoints,
            history.reaches_back_ms / 1000,
            history.reaches_back_ms % 1000 / 100,
            history.bytes,
            history.longest_pause_us,
        );
        text += &format!("{:22} {:>12}\n", "checkpoints left out", history.left_out);
    }
    if let Some(memory) = &stat.restored_memory {
        let counts = [
            ("memory pieces checked", memory.checked as u64),
            ("memory pieces damaged", memory.damaged.len() as u64),
        ];
        for (what, count) in counts {
            text += &format!("{what:22} {count:>12}\n");
        }
        for damaged in memory.damaged.iter().take(LISTED) {
            text += &format!("snapshot's memory: {damaged}\n");
        }
    }
    for (instruction, count) in &stat.completed {
        text += &format!("completed {instruction:12} {count:>12}\n");
    }
    for (instruction, count) in &stat.refused {
        text += &format!("refused {instruction:14} {count:>12}\n");
    }
    for device in &stat.virtio {
        text += &format!(
            "{} at {:#x}: {} used, {} rejected, {} queues broken, {} interrupts, {} lost{}\n",
            device.device,
            device.address,
            device.used,
            device.rejected,
            device.broken,
            device.interrupts,
            device.lost_interrupts,
            device
                .problem
                .as_ref()
                .map_or_else(String::new, |problem| format!("; the last: {problem}")),
        );
    }
    let sum = |count: fn(&SiteCount) -> u64| sum_of(stat.sites.iter().map(count));
    if !stat.sites.is_empty() {
        let (hits, stepped) = (sum(|s| s.hits), sum(|s| s.stepped));
        for (what, count) in [
            ("traps in the guest", stat.sites.len() as u64),
            ("hits emulated", hits - stepped.min(hits)),
            ("hits stepped", stepped),
            ("traps suspended", sum(|s| u64::from(s.suspended))),
        ] {
            text += &format!("{what:22} {count:>12}\n");
        }
    }
    for (what, count) in stat.engine.iter().filter(|(_, count)| *count > 0) {
        text += &format!("{what:22} {count:>12}\n");
    }
    if let Some(cost) = stat.cost.filter(|cost| cost.hits > 0) {
        let budget = stat.budget.map(String::from);
        let budget = budget.map_or_else(String::new, |budget| format!(", of at most {budget}"));
        text += &format!("{:22} {cost}{budget}\n", "cost of all traces");
    }
    for session in stat.sessions.iter().take(LISTED) {
        let SessionCount {
            number,
            label,
            cost,
            probes,
            resting,
            ..
        } = session;
        let budget = session.budget.map(String::from);
        let budget = budget.map_or_else(String::new, |budget| format!(", of at most {budget}"));
        text += &format!(
            "trace {number} {}: {cost}{budget}, {resting} of {probes} probes stopped\n",
            printable(label)
        );
    }
    let mut hottest: Vec<&SiteCount> = stat.sites.iter().filter(|s| s.hits > 0).collect();
    hottest.sort_by_key(|site| std::cmp::Reverse(site.hits));
    for site in hottest.iter().take(LISTED) {
        text += &format!(
            "trap at {:#x} {}: {} hits, {} stepped{}\n",
            site.address,
            printable(&site.symbol),
            site.hits,
            site.stepped,
            if site.given_up { ", given up" } else { "" }
        );
    }
    for (what, list) in [
        ("port", &stat.unknown_ports),
        ("memory", &stat.unknown_memory),
    ] {
        for Unknown {
            address,
            reads,
            writes,
        } in list.iter().take(LISTED)
        {
            text += &format!("no device at {what} {address:#x}: {reads} reads, {writes} writes\n");
        }
        if list.len() > LISTED {
            text += &format!(
                "and {} more {what} addresses without a device (see --json)\n",
                list.len() - LISTED
            );
        }
    }
    printable_lines(&text)
}

/// Runs `exotrace vms`.
pub fn vms(args: &args::Vms) -> Result<(), Failure> {
    let running = running(&Registry::open()?)?;
    let mut infos = Vec::new();
    for machine in running {
        match ask_within(&machine, &Command::Info, PATIENCE) {
            Ok(Answer::Info(info)) => infos.push(info),
            Ok(other) => say(unexpected(&machine, &other)),
            // It must not hide the others.
            Err(error) => say(error),
        }
    }
    let mut out = std::io::stdout().lock();
    if args.json {
        for info in &infos {
            let json = serde_json::to_string(info)?;
            writeln!(out, "{json}").to_output()?;
        }
        return Ok(());
    }
    if !infos.is_empty() {
        writeln!(
            out,
            "{:16} {:>8} {:>10} {:>4} {:>8}  KERNEL",
            "NAME", "PID", "MEMORY", "CPUS", "SECONDS"
        )
        .to_output()?;
    }
    for info in &infos {
        out.write_all(info_line(info).as_bytes()).to_output()?;
    }
    Ok(())
}

pub(super) fn info_line(info: &Info) -> String {
    let Info {
        name,
        pid,
        memory,
        cpus,
        kernel,
        running_s,
        overlays: _,
    } = info;
    let memory = HumanSize(*memory).to_string();
    printable_lines(&format!(
        "{name:16} {pid:>8} {memory:>10} {cpus:>4} {running_s:>8}  {kernel}\n"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::control::{MemoryCount, RestoredMemory, VirtioCount};
    use crate::protocol::cost::Cost;

    #[test]
    fn counts_are_listed_and_long_lists_cut() {
        let unknown = |address| Unknown {
            address,
            reads: 2,
            writes: 3,
        };
        let cost = Cost {
            hits: 21,
            ns: 1_000_000,
            busiest_ns: 1_000_000,
            passed_ns: 50_000_000,
        };
        let stat = Stat {
            name: "vm1".into(),
            port_exits: 10,
            mmio_exits: 11,
            traps: 12,
            guest_int3: 13,
            syscalls_repaired: 14,
            changes: 0,
            completed: vec![("popcnt".into(), 15)],
            refused: vec![("vaddps".into(), 2)],
            text: None,
            restored_memory: Some(RestoredMemory {
                pieces: 64,
                checked: 31,
                damaged: vec!["bytes 0x0 to 0x1000 have changed".into()],
            }),
            sites: vec![SiteCount {
                address: 0x1000,
                symbol: "vfs_read".into(),
                hits: 21,
                stepped: 1,
                suspended: false,
                given_up: false,
            }],
            engine: vec![("lifted".into(), 0), ("hidden bytes".into(), 9)],
            virtio: vec![VirtioCount {
                device: "virtio disk".into(),
                address: 0xe000_0000,
                used: 7,
                rejected: 1,
                broken: 0,
                interrupts: 6,
                lost_interrupts: 0,
                problem: Some("too short".into()),
            }],
            memory: MemoryCount {
                guest: 4096,
                held: vec![("rings".into(), 30), ("objects".into(), 4)],
                most: 50,
            },
            history: None,
            unknown_ports: (0..20).map(unknown).collect(),
            unknown_memory: vec![unknown(0xd000_0000)],
            cost: Some(cost),
            budget: "5%".parse().ok(),
            sessions: vec![SessionCount {
                number: 3,
                label: "vfs_read, \u{1b}[2J".into(),
                cost,
                budget: None,
                probes: 4,
                resting: 2,
            }],
        };
        let text = stat_text(&stat);
        for expected in [
            "traps of probes                  12\n",
            "guest memory                   4096\n",
            "memory held                      34, of at most 50: 30 for rings, 4 for objects\n",
            "completed popcnt                 15\n",
            "memory pieces checked            31\n",
            "memory pieces damaged             1\n",
            "snapshot's memory: bytes 0x0 to 0x1000 have changed\n",
            "refused vaddps                    2\n",
            "hits emulated                    20\n",
            "hidden bytes                      9\n",
            "virtio disk at 0xe0000000: 7 used, 1 rejected, 0 queues broken, 6 interrupts, 0 lost; the last: too short\n",
            "cost of all traces     2.0% of the guest's time (0.001 s at 21 hits), of at most 5%\n",
            "trace 3 vfs_read, ?[2J: 2.0% of the guest's time (0.001 s at 21 hits), 2 of 4 probes stopped\n",
            "trap at 0x1000 vfs_read: 21 hits, 1 stepped\n",
            "no device at port 0xf: 2 reads, 3 writes\n",
            "and 4 more port addresses",
            "no device at memory 0xd0000000: 2 reads",
        ] {
            assert!(text.contains(expected), "{expected:?} is not in:\n{text}");
        }
        assert!(!text.contains("port 0x10:"));
        // As from a machine that a guest has taken over.
        let memory = MemoryCount {
            held: vec![("\u{1b}[2J".into(), u64::MAX), ("rings".into(), 1)],
            ..stat.memory.clone()
        };
        let text = stat_text(&Stat { memory, ..stat });
        let held = format!("{} for ?[2J, 1 for rings\n", u64::MAX);
        assert!(text.contains(&held), "{text}");
    }
}

//! A machine with the guest of victims, run by the command as users run it, and the shell on its
//! serial port.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use support::Host;
use support::command::{Running, World, words};
use support::shell::{Answer, BOOT_LIMIT, Marks};
use support::victims;

use crate::control::Control;

/// The machine's name.
pub const NAME: &str = "torture";
/// The machine's sockets.
pub const SOCKETS: [&str; 7] = [
    "control",
    "dt",
    "ports",
    "trace",
    "tracectl",
    "ptrace",
    "ptracectl",
];
/// The time limit of a command on the host beside all other load.
pub const HOST_LIMIT: Duration = Duration::from_secs(180);
/// The parts of the kernel's messages that mean a fault in the guest's kernel.
const COMPLAINTS: [&str; 5] = [
    "BUG:",
    "Oops",
    "kernel BUG",
    "general protection fault",
    "Unable to handle",
];

/// A running machine.
pub struct Guest {
    /// The run directory, and files of the phase.
    pub world: World,
}

/// The resources of a machine, compared while no client uses it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settled {
    /// The hash of the kernel's text.
    pub text: String,
    /// The number of sites with a trap in memory.
    pub sites: usize,
    /// The number of open files of the machine's process.
    pub descriptors: usize,
    /// The open files that have no path, or the same one: their kinds, with their numbers.
    pub kinds: BTreeMap<String, usize>,
    /// The number of threads of the machine's process.
    pub threads: usize,
    /// The bytes held for guests and clients.
    pub held: u64,
    /// The limit of those bytes.
    pub most: u64,
}

/// The machine's process with the shell on its serial port: one command at a time.
pub struct Shell {
    machine: Running,
    commands: usize,
}

/// Returns the words that restore the guest, with a disk of its own.
pub fn restore(host: &Host, cpus: u8, world: &World) -> Vec<std::ffi::OsString> {
    let disk = world.path("disk");
    victims::make_disk(&disk);
    let mut line = words(&format!("run --name {NAME} --guest-ports rw --disk"));
    line.push(disk.into());
    line.push("--restore".into());
    line.push(victims::snapshot_folder(host, cpus).into());
    line
}

/// Waits until a machine answers and all its sockets exist. The sockets of a killed one may exist
/// before.
///
/// # Panics
/// If it does not.
pub fn wait_for_machine(world: &World, machine: &mut Running) {
    let folder = folder(world);
    let pid = machine.pid();
    let control = Control::new(folder.join("control"));
    machine.wait_until("machine", HOST_LIMIT, |_, _| {
        let info = control.ask(&json!({"command": "info"}));
        info.is_ok_and(|info| info["pid"] == pid)
            && SOCKETS.iter().all(|name| folder.join(name).exists())
    });
}

fn folder(world: &World) -> PathBuf {
    world.path("run/exotrace").join(NAME)
}

impl Guest {
    /// Restores the guest.
    pub fn start(host: &Host, cpus: u8) -> (Self, Shell) {
        let world = World::new();
        let mut machine = world.start(restore(host, cpus, &world));
        wait_for_machine(&world, &mut machine);
        let shell = Shell {
            machine,
            commands: 0,
        };
        (Self { world }, shell)
    }

    /// Returns its control socket.
    pub fn control(&self) -> Control {
        Control::new(self.socket("control"))
    }

    /// Returns the path of a socket of the machine.
    pub fn socket(&self, name: &str) -> PathBuf {
        folder(&self.world).join(name)
    }

    /// Polls until `is_settled` accepts the resources, and returns the last state.
    pub fn settle(&self, limit: Duration, is_settled: impl Fn(&Settled) -> bool) -> Settled {
        let deadline = Instant::now() + limit;
        loop {
            let now = self.settled();
            if is_settled(&now) || Instant::now() >= deadline {
                return now;
            }
            thread::sleep(Duration::from_millis(500));
        }
    }

    fn settled(&self) -> Settled {
        let stat = self
            .control()
            .ask(&json!({"command": "stat", "hash": true}));
        let stat = stat.unwrap_or_else(|e| panic!("stat: {e}"));
        let pid = self.control().ask(&json!({"command": "info"}));
        let pid = pid.unwrap_or_else(|e| panic!("info: {e}"))["pid"]
            .as_u64()
            .unwrap_or(0);
        let entries = |what: &str| {
            let entries = fs::read_dir(format!("/proc/{pid}/{what}"));
            entries.into_iter().flatten().flatten()
        };
        let mut kinds = BTreeMap::new();
        for descriptor in entries("fd") {
            let target = fs::read_link(descriptor.path()).unwrap_or_default();
            let target = target.to_string_lossy();
            let kind = target.split_once(":[").map_or(&*target, |(kind, _)| kind);
            *kinds.entry(kind.to_owned()).or_default() += 1;
        }
        let array = |value: &Value| value.as_array().cloned().unwrap_or_default();
        Settled {
            text: stat["text"].as_str().unwrap_or_default().to_owned(),
            sites: array(&stat["sites"]).len(),
            descriptors: kinds.values().sum(),
            kinds,
            threads: entries("task").count(),
            held: array(&stat["memory"]["held"])
                .iter()
                .filter_map(|purpose| purpose[1].as_u64())
                .sum(),
            most: stat["memory"]["most"].as_u64().unwrap_or(0),
        }
    }

    /// Ends the machine in order.
    ///
    /// # Panics
    /// If it does not end so.
    pub fn stop(self, shell: Shell) {
        self.world.stop(NAME, shell.machine);
    }
}

impl Shell {
    /// Runs a line.
    ///
    /// # Panics
    /// If it does not end within `limit`, or the machine ends.
    pub fn within(&mut self, line: &str, limit: Duration) -> Answer {
        self.commands += 1;
        let marks = Marks(self.commands);
        self.machine.type_line(&marks.line(line));
        let mut answer = None;
        self.machine.wait_until(line, limit, |stdout, _| {
            answer = marks.answer(stdout);
            answer.is_some()
        });
        answer.unwrap_or_else(|| panic!("no answer to {line}"))
    }

    /// Runs a line that must succeed, and returns its output.
    ///
    /// # Panics
    /// If it fails or does not end.
    pub fn succeed(&mut self, line: &str) -> String {
        let answer = self.within(line, BOOT_LIMIT);
        assert_eq!(answer.status, 0, "{line}: {answer:?}");
        answer.output
    }

    /// Returns the number of rounds that each victim reports.
    pub fn victims(&self) -> BTreeMap<String, u64> {
        let printed = self.printed();
        let lines = printed
            .lines()
            .filter_map(|line| line.split_once("victim ")?.1.split_once(": "));
        let lines = lines.filter_map(|(name, rest)| {
            Some((name.to_owned(), rest.strip_suffix(" rounds")?.parse().ok()?))
        });
        lines.collect()
    }

    /// Returns the errors that victims report.
    pub fn complaints(&self) -> Vec<String> {
        let printed = self.printed();
        let lines = printed
            .lines()
            .filter(|line| line.contains("victim ") && line.contains(" failed in round "));
        lines.map(str::to_owned).collect()
    }

    /// Returns the errors that the kernel reports of itself.
    pub fn kernel_complaints(&mut self) -> Vec<String> {
        let log = self.within("dmesg", BOOT_LIMIT).output;
        let lines = log
            .lines()
            .filter(|line| COMPLAINTS.iter().any(|what| line.contains(what)));
        lines.map(str::to_owned).collect()
    }

    /// Returns the machine's own messages.
    pub fn messages(&self) -> String {
        self.machine.printed().1
    }

    fn printed(&self) -> String {
        self.machine.printed().0.replace('\r', "")
    }
}

//! A machine with the guest of victims, run by the command as users run it, and the shell on its serial port.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use support::Host;
use support::command::{Running, World, words};
use support::shell::{Answer, COMMAND_LIMIT, Marks};
use support::victims;

use crate::control::Control;

/// The machine's name.
pub const NAME: &str = "torture";
/// Its sockets.
pub const SOCKETS: [&str; 7] = [
    "control",
    "dt",
    "ports",
    "trace",
    "tracectl",
    "ptrace",
    "ptracectl",
];
/// How long a command on the host may take beside everything else.
pub const HOST_LIMIT: Duration = Duration::from_secs(180);
/// Parts of the kernel's messages that mean a fault in the guest's kernel.
const COMPLAINTS: [&str; 5] = [
    "BUG:",
    "Oops",
    "kernel BUG",
    "general protection fault",
    "Unable to handle",
];

/// A running machine.
pub struct Guest {
    /// Its run directory, and files of the phase.
    pub world: World,
}

/// Resources of a machine, compared while no client uses it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settled {
    /// Hash of the kernel's text.
    pub text: String,
    /// Places where traps stand.
    pub sites: usize,
    /// Open files of its process.
    pub descriptors: usize,
    /// Threads of its process.
    pub threads: usize,
    /// Bytes held for guests and clients.
    pub held: u64,
    /// Most that may be.
    pub most: u64,
}

/// The machine's process with the shell on its serial port: one command at a time.
pub struct Shell {
    machine: Running,
    commands: usize,
}

/// The words that restore the guest, with a disk of its own.
pub fn restore(host: &Host, cpus: u8, world: &World) -> Vec<std::ffi::OsString> {
    let disk = world.path("disk");
    victims::make_disk(&disk);
    let mut line = words(&format!("run --name {NAME} --guest-ports rw --disk"));
    line.push(disk.into());
    line.push("--restore".into());
    line.push(victims::snapshot_folder(host, cpus).into());
    line
}

/// Waits until a machine answers, with all its sockets there: those of one that was killed are there, too, before.
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
    /// Restores it.
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

    /// Its control socket.
    pub fn control(&self) -> Control {
        Control::new(self.socket("control"))
    }

    /// A socket of it.
    pub fn socket(&self, name: &str) -> PathBuf {
        folder(&self.world).join(name)
    }

    /// Looks until it is as `is_settled` says, and returns how it was at last.
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
        let entries =
            |what: &str| fs::read_dir(format!("/proc/{pid}/{what}")).map_or(0, Iterator::count);
        let array = |value: &Value| value.as_array().cloned().unwrap_or_default();
        Settled {
            text: stat["text"].as_str().unwrap_or_default().to_owned(),
            sites: array(&stat["sites"]).len(),
            descriptors: entries("fd"),
            threads: entries("task"),
            held: array(&stat["memory"]["held"])
                .iter()
                .filter_map(|purpose| purpose[1].as_u64())
                .sum(),
            most: stat["memory"]["most"].as_u64().unwrap_or(0),
        }
    }

    /// Ends it in order.
    ///
    /// # Panics
    /// If it does not.
    pub fn stop(self, shell: Shell) {
        self.world.stop(NAME, shell.machine);
    }
}

impl Shell {
    /// Runs a line.
    ///
    /// # Panics
    /// If it does not end in `limit`, or the machine does.
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
        let answer = self.within(line, 3 * COMMAND_LIMIT);
        assert_eq!(answer.status, 0, "{line}: {answer:?}");
        answer.output
    }

    /// Returns how many rounds each victim says it had.
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

    /// Returns what victims say went wrong.
    pub fn complaints(&self) -> Vec<String> {
        let printed = self.printed();
        let lines = printed
            .lines()
            .filter(|line| line.contains("victim ") && line.contains(" failed in round "));
        lines.map(str::to_owned).collect()
    }

    /// Returns what the kernel says went wrong in it.
    pub fn kernel_complaints(&mut self) -> Vec<String> {
        let log = self.within("dmesg", COMMAND_LIMIT).output;
        let lines = log
            .lines()
            .filter(|line| COMPLAINTS.iter().any(|what| line.contains(what)));
        lines.map(str::to_owned).collect()
    }

    fn printed(&self) -> String {
        self.machine.printed().0.replace('\r', "")
    }
}

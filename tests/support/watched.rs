//! A guest with the rich kernel that the command runs, and scripts over it, as their user starts
//! them in other terminals.
//!
//! It is restored from the snapshot of [`crate::rich`]. Its busy process is ended first: only what
//! the test types is traced.

use std::ffi::OsString;

use crate::command::{Ended, Running, World};
use crate::host::Host;
use crate::rich;
use crate::shell::{COMMAND_LIMIT, Marks};

/// The name of the machine.
const NAME: &str = "watched";

/// The guest, and a folder for the test's files.
pub struct Watched {
    /// The folder in which the command runs.
    pub world: World,
    machine: Running,
    /// The number of commands typed so far: each has its own mark in the output.
    commands: usize,
}

/// A script that is attached.
pub struct Script(Running);

impl Watched {
    /// Restores a running copy of the guest.
    ///
    /// # Panics
    /// If it cannot be made or restored.
    pub fn new(host: &Host) -> Self {
        let world = World::new();
        let mut line: Vec<OsString> = ["run", "--name", NAME].map(Into::into).into();
        line.extend(rich::restore(host));
        let mut machine = world.start(line);
        machine.wait_until("machine", COMMAND_LIMIT, |_, _| {
            world.run(["vms"], COMMAND_LIMIT).stdout.contains(NAME)
        });
        let mut watched = Self {
            world,
            machine,
            commands: 0,
        };
        watched.run("read name pid < /tmp/workers; kill -9 $pid");
        watched
    }

    /// Types a command, waits for its end, and returns its output, whether it succeeds or not.
    ///
    /// # Panics
    /// If it does not end in time.
    pub fn run(&mut self, command: &str) -> String {
        self.commands += 1;
        let marks = Marks(self.commands);
        self.machine.type_line(&marks.line(command));
        let mut answer = None;
        let what = format!("end of {command:?}");
        self.machine.wait_until(&what, COMMAND_LIMIT, |printed, _| {
            answer = marks.answer(printed);
            answer.is_some()
        });
        answer.map(|answer| answer.output).unwrap_or_default()
    }

    /// Starts `exotrace trace` with these words, and waits until its probes are attached.
    ///
    /// # Panics
    /// If it ends before.
    pub fn trace(&self, words: &[&str]) -> Script {
        let mut script = self.world.start([&["trace"], words].concat());
        script.wait_until("attached probes", COMMAND_LIMIT, |_, stderr| {
            stderr.contains("exotrace: attached ")
        });
        Script(script)
    }

    /// Runs the command with these words to its end.
    ///
    /// # Panics
    /// If that does not come in time.
    pub fn ask(&self, words: &[&str]) -> Ended {
        self.world.run(words, COMMAND_LIMIT)
    }

    /// Ends the machine.
    ///
    /// # Panics
    /// If it does not end in order.
    pub fn stop(self) {
        let stopped = self.ask(&["stop"]);
        assert_eq!(stopped.status, 0, "{stopped:?}");
        let ended = self.machine.finish(COMMAND_LIMIT);
        assert_eq!(ended.status, 0, "{ended:?}");
    }
}

impl Script {
    /// Returns the running command.
    pub fn running(&mut self) -> &mut Running {
        &mut self.0
    }

    /// Interrupts the script and returns its output. It must end in order.
    ///
    /// # Panics
    /// If it does not.
    pub fn interrupt(self) -> String {
        self.interrupted().stdout
    }

    /// Interrupts the script, as [`interrupt`](Self::interrupt) does.
    ///
    /// # Panics
    /// If it does not end in order.
    pub fn interrupted(self) -> Ended {
        self.0.signal(rustix::process::Signal::INT);
        let ended = self.0.finish(COMMAND_LIMIT);
        assert_eq!(ended.status, 0, "{ended:?}");
        ended
    }

    /// Waits until the script has ended itself.
    ///
    /// # Panics
    /// If it does not in time.
    pub fn finish(self) -> Ended {
        self.0.finish(COMMAND_LIMIT)
    }
}

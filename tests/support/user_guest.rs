//! A guest with the small kernel whose programs are watched by the probe engine: its processes,
//! probes of files that they have mapped, and the traps in their text.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use introspect::kernel::task_list::{TaskInfo, TaskState};
use introspect::system::TextFile;
use introspect::x86_64::PAGE;
use probes::engine::{Capture, EnableError, Engine, EngineStats, Filter, ProbeStats, Session};
use probes::event::Event;
use probes::kernel_view::KernelView;
use probes::probe::{Moment, Probe, Target};
use probes::provider;
use vmm::trap::{INT3, SiteId};

use crate::host::Host;
use crate::shell::{Answer, COMMAND_LIMIT, Shell};
use crate::tracing::{self, SLOTS};

/// A program that works on files in rounds.
pub const FSLOAD: &str = "/bin/fsload";
/// A program that calls malloc and free in rounds, linked with the C library.
pub const ALLOCS: &str = "/bin/allocs";
/// The C library.
pub const LIBC: &str = "/lib/x86_64-linux-gnu/libc.so.6";
/// A program with static probes, linked with the C library.
pub const STATICS: &str = "/bin/statics";
/// A program that calls functions in states of the CPU that few programs use.
pub const STATES: &str = "/bin/states";
/// The milliseconds for a program that is to keep sleeping.
pub const FOR_EVER: &str = "100000000";
/// The interval at which a process is polled for its state, and for having mapped a file.
const LOOK_INTERVAL: Duration = Duration::from_millis(10);

/// The guest and the engine of its machine.
pub struct UserGuest {
    /// The engine.
    pub engine: Engine,
    /// The view of its kernel.
    pub view: Arc<KernelView>,
    /// The guest.
    pub shell: Shell,
}

impl UserGuest {
    /// Restores a copy of the small guest.
    ///
    /// # Panics
    /// If it cannot be made.
    pub fn new(host: &Host) -> Self {
        Self::of(Shell::new(host))
    }

    /// Makes the engine of a guest that has booted.
    ///
    /// # Panics
    /// If its kernel cannot be found.
    pub fn of(shell: Shell) -> Self {
        let view = shell.linux.view();
        Self {
            engine: shell.linux.engine(&view),
            view,
            shell,
        }
    }

    /// Starts a program in the background, and returns its process ID.
    ///
    /// # Panics
    /// If the shell does not answer.
    pub fn spawn(&self, command: &str) -> u32 {
        let answer = self
            .shell
            .output(&format!("({command} > /dev/null & echo $!)"));
        let pid = answer.parse();
        pid.unwrap_or_else(|e| panic!("{command}: {answer:?}: {e}"))
    }

    /// Starts a program that does its work and then sleeps, waits until it sleeps, and returns its
    /// process ID.
    ///
    /// # Panics
    /// If it does not.
    pub fn spawn_sleeper(&self, command: &str) -> u32 {
        let pid = self.spawn(command);
        // Not while it is still the shell's copy.
        let program = command.split_whitespace().next().unwrap_or_default();
        let name = program.rsplit('/').next().unwrap_or_default();
        self.wait_for_process(pid, "asleep", |task| {
            task.is_some_and(|task| {
                task.name() == name.as_bytes() && task.state == TaskState::Sleeping
            })
        });
        pid
    }

    /// Waits until a process is stopped by a signal.
    ///
    /// # Panics
    /// If it has ended, or is not stopped.
    pub fn wait_until_stopped(&self, pid: u32) {
        self.wait_for_process(pid, "stopped", |task| {
            task.is_some_and(|task| task.state == TaskState::Stopped)
        });
    }

    /// Ends a process and waits until it is gone.
    ///
    /// # Panics
    /// If it does not end.
    pub fn kill(&self, pid: u32) {
        self.shell.output(&format!("kill -9 {pid}"));
        self.wait_for_process(pid, "gone", |task| task.is_none());
    }

    /// Waits until `done` accepts a process, as it is read from outside: a guest that asks itself
    /// starts a program each time, at half a second of a CPU where its kernel is interpreted.
    ///
    /// # Panics
    /// If it does not within [`COMMAND_LIMIT`]; `what` names the awaited condition.
    pub fn wait_for_process(&self, pid: u32, what: &str, done: impl Fn(Option<&TaskInfo>) -> bool) {
        let number = i32::try_from(pid).unwrap_or_else(|e| panic!("{pid}: {e}"));
        let deadline = Instant::now() + COMMAND_LIMIT;
        loop {
            let task = self.shell.linux.look(|look| {
                let task = look.process(number).unwrap_or_else(|e| panic!("{e}"));
                task.unwrap_or_else(|e| panic!("{e}"))
            });
            if done(task.as_ref()) {
                return;
            }
            assert!(
                Instant::now() < deadline,
                "{pid} is not {what}: {task:?}\n{}",
                self.shell.linux.situation()
            );
            std::thread::sleep(LOOK_INTERVAL);
        }
    }

    /// Returns the probes of a pattern, once a process has mapped the file.
    ///
    /// # Panics
    /// If there are none within [`COMMAND_LIMIT`].
    pub fn probes(&self, pattern: &str) -> Vec<Probe> {
        let parsed = tracing::pattern(pattern);
        let guest = self.shell.linux.vm.traceable(&self.view);
        let deadline = Instant::now() + COMMAND_LIMIT;
        loop {
            match provider::find_user(&guest, &parsed) {
                Ok(found) => return found,
                Err(error) => assert!(Instant::now() < deadline, "{error}"),
            }
            std::thread::sleep(LOOK_INTERVAL);
        }
    }

    /// Reads a file that a process has mapped.
    ///
    /// # Panics
    /// If there is no such file, or several.
    pub fn file<T>(&self, path: &str, ask: impl FnOnce(&TextFile<'_>) -> T) -> T {
        self.shell.linux.look(|look| {
            let files = look.text_files(None, &|found| found == path.as_bytes());
            let files = files.unwrap_or_else(|e| panic!("{path}: {e}"));
            let [file] = files.files.as_slice() else {
                panic!("{path}: {} files", files.files.len())
            };
            ask(file)
        })
    }

    /// Makes a session without probes.
    ///
    /// # Panics
    /// If there is no memory for it.
    pub fn session(&self) -> UserSession<'_> {
        UserSession {
            guest: self,
            session: tracing::session(&self.engine, SLOTS),
            probes: Vec::new(),
            before: self.engine.stats(),
        }
    }

    /// Returns the user sites that are armed.
    pub fn user_sites(&self) -> BTreeSet<SiteId> {
        let stats = self.shell.linux.machine().traps().stats();
        let user = stats.into_iter().filter(|site| site.user);
        user.map(|site| site.site).collect()
    }

    /// Returns the user sites that are armed, but not in the pages of `sites`.
    pub fn sites_elsewhere(&self, sites: &BTreeSet<SiteId>) -> BTreeSet<SiteId> {
        let page = |site: &SiteId| site.0.0 / PAGE;
        let pages: BTreeSet<u64> = sites.iter().map(page).collect();
        let mut found = self.user_sites();
        found.retain(|site| !pages.contains(&page(site)));
        found
    }

    /// Returns those of `sites` that have an int3 in memory.
    ///
    /// # Panics
    /// If there is no memory.
    pub fn standing(&self, sites: &BTreeSet<SiteId>) -> BTreeSet<SiteId> {
        let linux = &self.shell.linux;
        let standing = sites.iter().filter(|site| linux.byte(site.0) == INT3);
        standing.copied().collect()
    }

    /// Checks that nothing is armed, and that no trap of `sites` is left in memory.
    ///
    /// # Panics
    /// If something is.
    pub fn assert_clean(&self, sites: &BTreeSet<SiteId>) {
        assert_eq!(self.shell.linux.machine().traps().hits(), []);
        assert_eq!(self.standing(sites), BTreeSet::new());
    }

    /// Returns the output and status of commands that may take longer, one after the other.
    ///
    /// # Panics
    /// If the shell does not answer.
    pub fn answers(&self, commands: &[String]) -> Vec<Answer> {
        let answer = |command: &String| self.shell.start(command).answer(4 * COMMAND_LIMIT);
        commands.iter().map(answer).collect()
    }
}

/// A session, with its probes by their numbers.
pub struct UserSession<'g> {
    guest: &'g UserGuest,
    /// The session.
    pub session: Session,
    /// The session's probes.
    pub probes: Vec<Probe>,
    before: EngineStats,
}

impl UserSession<'_> {
    /// Enables the entries and returns of the functions of fsload, or of a copy of it. Its first
    /// function, which has no caller, never returns.
    ///
    /// # Panics
    /// If one cannot be enabled.
    pub fn enable_fsload(&mut self, path: &str) {
        self.enable(&format!("uprobe:{path}:*:entry"), &Filter::default());
        for function in ["program", "one_round", "*_file"] {
            let returns = format!("uprobe:{path}:{function}:return");
            self.enable(&returns, &Filter::default());
        }
    }

    /// Enables the probes of a pattern, and returns their numbers.
    ///
    /// # Panics
    /// If there are none, or one cannot be enabled.
    pub fn enable(&mut self, pattern: &str, filter: &Filter) -> Vec<u32> {
        self.enable_all(&self.guest.probes(pattern), filter)
    }

    /// Enables probes, and returns their numbers.
    ///
    /// # Panics
    /// If one cannot be enabled.
    pub fn enable_all(&mut self, probes: &[Probe], filter: &Filter) -> Vec<u32> {
        let enabled = probes.iter().map(|probe| {
            let number = self.enable_one(probe, filter);
            number.unwrap_or_else(|e| panic!("{e}"))
        });
        enabled.collect()
    }

    /// Enables a probe while the guest is paused, and returns its number.
    ///
    /// # Errors
    /// If it cannot be enabled.
    pub fn enable_one(&mut self, probe: &Probe, filter: &Filter) -> Result<u32, EnableError> {
        let _paused = self.guest.shell.linux.machine().pause();
        let number = self
            .session
            .enable(probe, filter.clone(), Capture::default())?;
        self.probes.push(probe.clone());
        Ok(number)
    }

    /// Returns the counts of a probe.
    ///
    /// # Panics
    /// If there is none of this number.
    pub fn stats(&self, number: u32) -> ProbeStats {
        let stats = self.session.probe_stats(number);
        stats.unwrap_or_else(|| panic!("no probe {number}"))
    }

    /// Returns the numbers of recorded hits of a function's entry and return.
    ///
    /// # Panics
    /// If one of its probes has no counts.
    pub fn recorded(&self, function: &str) -> (u64, u64) {
        let of = |moment: Moment| {
            let numbers = (0..).zip(&self.probes).filter(|(_, probe)| {
                probe.name.function == function
                    && matches!(probe.target, Target::User { moment: of, .. } if of == moment)
            });
            numbers.map(|(number, _)| self.stats(number).recorded).sum()
        };
        (of(Moment::Entry), of(Moment::Return))
    }

    /// Ends the session and returns its events. All counts must agree, and nothing may have been
    /// dropped.
    ///
    /// # Panics
    /// If they do not.
    pub fn finish(mut self) -> Vec<Event> {
        let paused = self.guest.shell.linux.machine().pause();
        let engine = self.session.engine().stats();
        self.session.disable_all();
        drop(paused);
        let events = tracing::all_events(&mut self.session);
        let stats = self.session.stats();
        let told = format!("{stats:?}, {engine:?}");
        assert_eq!(stats.probes.dropped, 0, "{told}");
        assert_eq!(engine.without_return, self.before.without_return, "{told}");
        assert_eq!(engine.unknown_task, self.before.unknown_task, "{told}");
        events
    }
}

//! A guest with the small kernel whose programs are watched by the probe engine: its processes, probes of files that they have mapped, what
//! stands in their text.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use introspect::system::TextFile;
use introspect::x86_64::PAGE;
use probes::engine::{Capture, EnableError, Engine, EngineStats, Filter, ProbeStats, Session};
use probes::event::Event;
use probes::kernel_view::KernelView;
use probes::probe::{Moment, Probe, Target};
use probes::provider;
use vmm::trap::{INT3, SiteId};

use crate::host::Host;
use crate::insight::Insight;
use crate::shell::{Answer, COMMAND_LIMIT, Shell};
use crate::tracing::{self, SLOTS};

/// A program that works on files in rounds.
pub const FSLOAD: &str = "/bin/fsload";
/// A program that calls malloc and free in rounds, linked with the C library.
pub const ALLOCS: &str = "/bin/allocs";
/// That library.
pub const LIBC: &str = "/lib/x86_64-linux-gnu/libc.so.6";
/// A program with static probes, linked with the C library.
pub const STATICS: &str = "/bin/statics";
/// A program that calls functions in states of the CPU in which few programs are.
pub const STATES: &str = "/bin/states";
/// Milliseconds: for a program that is to stay where it is.
pub const FOR_EVER: &str = "100000000";
/// How often it is looked whether a process has mapped a file.
const LOOK_INTERVAL: Duration = Duration::from_millis(10);

/// The guest and the engine of its machine.
pub struct UserGuest {
    /// The engine.
    pub engine: Engine,
    /// What is read of the guest.
    pub insight: Insight,
    /// Its kernel.
    pub view: Arc<KernelView>,
    /// The guest.
    pub shell: Shell,
}

impl UserGuest {
    /// A copy of the small guest.
    ///
    /// # Panics
    /// If it cannot be made.
    pub fn new(host: &Host) -> Self {
        Self::of(Shell::new(host))
    }

    /// A guest that has booted.
    ///
    /// # Panics
    /// If its kernel cannot be found.
    pub fn of(shell: Shell) -> Self {
        let view = Arc::new(shell.linux.view());
        Self {
            engine: tracing::engine(&shell.linux, &view),
            insight: Insight::new(&shell.linux),
            view,
            shell,
        }
    }

    /// Starts a program in the background; its number.
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

    /// The same, of one that does its work and then sleeps; waits for that.
    ///
    /// # Panics
    /// If it does not.
    pub fn spawn_sleeper(&self, command: &str) -> u32 {
        let pid = self.spawn(command);
        self.shell.output(&format!(
            "until grep -q ') S ' /proc/{pid}/stat; do busybox usleep 20000; done"
        ));
        pid
    }

    /// Waits until a process is stopped by a signal.
    ///
    /// # Panics
    /// If it is gone, or runs on.
    pub fn wait_until_stopped(&self, pid: u32) {
        self.shell.output(&format!(
            "until grep -q ') T ' /proc/{pid}/stat; do busybox usleep 20000; done"
        ));
    }

    /// Ends a process and waits until it is gone.
    ///
    /// # Panics
    /// If it stays.
    pub fn kill(&self, pid: u32) {
        self.shell.output(&format!(
            "kill -9 {pid}; while [ -e /proc/{pid} ]; do busybox usleep 20000; done"
        ));
    }

    /// The probes of a pattern, once a process has mapped the file.
    ///
    /// # Panics
    /// If there are none in [`COMMAND_LIMIT`].
    pub fn probes(&self, pattern: &str) -> Vec<Probe> {
        let parsed = tracing::pattern(pattern);
        let machine = &self.shell.linux.machine;
        let deadline = Instant::now() + COMMAND_LIMIT;
        loop {
            match provider::find_user(&self.insight.traceable(machine, &self.view), &parsed) {
                Ok(found) => return found,
                Err(error) => assert!(Instant::now() < deadline, "{error}"),
            }
            std::thread::sleep(LOOK_INTERVAL);
        }
    }

    /// Looks at a file that a process has mapped.
    ///
    /// # Panics
    /// If there is no such file, or several.
    pub fn file<T>(&self, path: &str, ask: impl FnOnce(&TextFile<'_>) -> T) -> T {
        let machine = &self.shell.linux.machine;
        self.insight.look(machine, |look| {
            let files = look.text_files(None, &|found| found == path.as_bytes());
            let files = files.unwrap_or_else(|e| panic!("{path}: {e}"));
            let [file] = files.files.as_slice() else {
                panic!("{path}: {} files", files.files.len())
            };
            ask(file)
        })
    }

    /// A session without probes.
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

    /// User sites that are armed.
    pub fn user_sites(&self) -> BTreeSet<SiteId> {
        let stats = self.shell.linux.machine.traps().stats();
        let user = stats.into_iter().filter(|site| site.user);
        user.map(|site| site.site).collect()
    }

    /// User sites that are armed, but not in the pages of `sites`.
    pub fn sites_elsewhere(&self, sites: &BTreeSet<SiteId>) -> BTreeSet<SiteId> {
        let page = |site: &SiteId| site.0.0 / PAGE;
        let pages: BTreeSet<u64> = sites.iter().map(page).collect();
        let mut found = self.user_sites();
        found.retain(|site| !pages.contains(&page(site)));
        found
    }

    /// Those of `sites` where an int3 stands in memory.
    ///
    /// # Panics
    /// If there is no memory.
    pub fn standing(&self, sites: &BTreeSet<SiteId>) -> BTreeSet<SiteId> {
        let linux = &self.shell.linux;
        let standing = sites.iter().filter(|site| linux.byte(site.0) == INT3);
        standing.copied().collect()
    }

    /// Nothing is armed, and what was stands in memory no more.
    ///
    /// # Panics
    /// If something is.
    pub fn assert_clean(&self, sites: &BTreeSet<SiteId>) {
        assert_eq!(self.shell.linux.machine.traps().hits(), []);
        assert_eq!(self.standing(sites), BTreeSet::new());
    }

    /// Output and status of commands that may take longer, one after the other.
    ///
    /// # Panics
    /// If the shell does not answer.
    pub fn answers(&self, commands: &[String]) -> Vec<Answer> {
        let answer = |command: &String| self.shell.start(command).answer(4 * COMMAND_LIMIT);
        commands.iter().map(answer).collect()
    }
}

/// A session, and its probes by their numbers.
pub struct UserSession<'g> {
    guest: &'g UserGuest,
    /// The session.
    pub session: Session,
    /// Its probes.
    pub probes: Vec<Probe>,
    before: EngineStats,
}

impl UserSession<'_> {
    /// Enables the entries and returns of the functions of fsload, or a copy of it. Its first, which is called by nobody, never returns.
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

    /// Enables the probes of a pattern; their numbers.
    ///
    /// # Panics
    /// If there are none, or one cannot be enabled.
    pub fn enable(&mut self, pattern: &str, filter: &Filter) -> Vec<u32> {
        self.enable_all(&self.guest.probes(pattern), filter)
    }

    /// Enables probes; their numbers.
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

    /// Enables a probe while the guest stands still; its number.
    ///
    /// # Errors
    /// If it cannot be enabled.
    pub fn enable_one(&mut self, probe: &Probe, filter: &Filter) -> Result<u32, EnableError> {
        let _paused = self.guest.shell.linux.machine.pause();
        let number = self
            .session
            .enable(probe, filter.clone(), Capture::default())?;
        self.probes.push(probe.clone());
        Ok(number)
    }

    /// Counts of a probe.
    ///
    /// # Panics
    /// If there is none of this number.
    pub fn stats(&self, number: u32) -> ProbeStats {
        let stats = self.session.probe_stats(number);
        stats.unwrap_or_else(|| panic!("no probe {number}"))
    }

    /// Hits that were recorded of the entry and the return of a function.
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

    /// Ends it: its events. All counts agree, and none was lost.
    ///
    /// # Panics
    /// If they do not.
    pub fn finish(mut self) -> Vec<Event> {
        let paused = self.guest.shell.linux.machine.pause();
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

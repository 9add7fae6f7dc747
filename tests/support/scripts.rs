//! Runs scripts in the bt language on a Linux guest. Returns their output and counts.
//!
//! The caller owns a guest ([`UserGuest`] or [`Traced`]) and runs commands in its shell. This
//! module collects output and waits for it.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use exotrace::{Cost, GuestError, Rendered, Script, ScriptCounts, ScriptRequest};

use crate::shell::{Answer, COMMAND_LIMIT, Shell};
use crate::traced::Traced;
use crate::user_guest::UserGuest;

/// The longest wait for output before its end is checked for.
const LOOK_INTERVAL: Duration = Duration::from_millis(200);

/// A guest that scripts run on.
#[derive(Clone, Copy)]
pub struct ScriptGuest<'g> {
    shell: &'g Shell,
}

impl<'g> From<&'g UserGuest> for ScriptGuest<'g> {
    fn from(guest: &'g UserGuest) -> Self {
        let shell = &guest.shell;
        Self { shell }
    }
}

impl<'g> From<&'g Traced> for ScriptGuest<'g> {
    fn from(guest: &'g Traced) -> Self {
        let shell = &guest.shell;
        Self { shell }
    }
}

/// The result of a script's run.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Ran {
    /// The standard output.
    pub out: String,
    /// The standard error.
    pub err: String,
    /// The script's counts.
    pub counts: ScriptCounts,
}

impl Ran {
    /// Returns the output's non-empty lines, in order.
    pub fn lines(&self) -> Vec<&str> {
        let lines = self.out.lines();
        lines.filter(|line| !line.trim().is_empty()).collect()
    }

    /// Returns the number behind `@name:` or `@name[key]:`. It is 0 without such a line, which is
    /// not printed for what was never counted.
    ///
    /// # Panics
    /// If the text there is no number.
    pub fn number(&self, entry: &str) -> u64 {
        let line = self.out.lines().find_map(|line| {
            let value = line.strip_prefix(entry)?.strip_prefix(':')?;
            Some(value.trim())
        });
        line.map_or(0, |value| {
            value
                .parse()
                .unwrap_or_else(|e| panic!("{entry}: {value:?}: {e}"))
        })
    }

    /// Returns the hits of a probe by its name.
    ///
    /// # Panics
    /// If there is no such probe.
    pub fn hits(&self, probe: &str) -> u64 {
        let each = &self.counts.each;
        let found = each.iter().find(|(name, _)| name == probe);
        let (_, hits) = found.unwrap_or_else(|| panic!("{probe}: {each:?}"));
        *hits
    }

    /// Checks that nothing was dropped, that nothing went wrong, and that every hit is accounted
    /// for.
    ///
    /// # Panics
    /// If not.
    pub fn assert_whole(&self) {
        let counts = &self.counts;
        assert_eq!(counts.hits, counts.filtered + counts.ran, "{self:?}");
        let each: u64 = counts.each.iter().map(|(_, hits)| hits).sum();
        assert_eq!(counts.hits, each, "{self:?}");
        assert_eq!(self.faults(), ScriptCounts::default(), "{self:?}");
    }

    /// Returns the counts of what went wrong, all others zero. Timer ticks that came too late count
    /// as no fault: a busy host joins them.
    pub fn faults(&self) -> ScriptCounts {
        ScriptCounts {
            hits: 0,
            filtered: 0,
            ran: 0,
            each: Vec::new(),
            joined_ticks: 0,
            cost: Cost::default(),
            ..self.counts.clone()
        }
    }
}

impl<'g> ScriptGuest<'g> {
    /// Returns the guest's shell.
    pub fn shell(&self) -> &'g Shell {
        self.shell
    }

    /// Starts a script.
    ///
    /// # Panics
    /// If there is something wrong with it, or it cannot be started.
    pub fn start(&self, script: impl Into<ScriptRequest>) -> Running {
        let started = self.try_start(script);
        started.unwrap_or_else(|e| panic!("{e}"))
    }

    /// Starts a script.
    ///
    /// # Errors
    /// The script's error as it is shown to its author, or the reason why it cannot be started.
    pub fn try_start(&self, script: impl Into<ScriptRequest>) -> Result<Running, GuestError> {
        Ok(Running {
            script: self.shell.linux.vm.script(script)?,
            output: Rendered::default(),
        })
    }

    /// Runs a script while a command runs in the guest's shell.
    ///
    /// # Panics
    /// If the script cannot be started, or the command fails or does not end.
    pub fn run(&self, script: &str, command: &str) -> (Ran, Answer) {
        let running = self.start(script);
        let answer = self.shell.start(command).answer(4 * COMMAND_LIMIT);
        let ran = running.finish();
        assert_eq!(answer.status, 0, "{command}: {answer:?}");
        (ran, answer)
    }
}

/// Returns the host's wall clock.
///
/// # Panics
/// If the clock is before 1970.
pub fn unix_ns() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    let since = since.unwrap_or_else(|e| panic!("{e}"));
    u64::try_from(since.as_nanos()).unwrap_or_else(|e| panic!("{e}"))
}

/// A running script.
pub struct Running {
    script: Script,
    output: Rendered,
}

impl Running {
    /// Returns the standard output so far.
    pub fn out(&mut self) -> String {
        self.output.append(self.script.output());
        self.output.text()
    }

    /// Waits until `done` returns true for the output.
    ///
    /// # Panics
    /// If that does not happen within [`COMMAND_LIMIT`].
    pub fn wait(&mut self, what: &str, mut done: impl FnMut(&str) -> bool) {
        let deadline = Instant::now() + COMMAND_LIMIT;
        while !done(&self.out()) {
            assert!(
                Instant::now() < deadline,
                "no {what} in {COMMAND_LIMIT:?}: {:?}",
                self.output
            );
            self.script.wait(LOOK_INTERVAL);
        }
    }

    /// Waits until the script has ended itself.
    ///
    /// # Panics
    /// If it does not end within [`COMMAND_LIMIT`].
    pub fn wait_for_exit(&mut self) {
        let deadline = Instant::now() + COMMAND_LIMIT;
        while !self.script.has_exited() {
            assert!(
                Instant::now() < deadline,
                "still running: {:?}",
                self.output
            );
            self.script.wait(LOOK_INTERVAL);
            self.out();
        }
    }

    /// Removes its probes, all at one moment, and returns the result.
    pub fn finish(self) -> Ran {
        let Self { script, mut output } = self;
        let (last, counts) = script.finish();
        output.append(last);
        Ran {
            out: output.text(),
            err: String::from_utf8_lossy(&output.err).into_owned(),
            counts,
        }
    }
}

//! Runs scripts in the bt language on a Linux guest, prepared and started as the command does it.
//! Returns their output and counts.
//!
//! The caller owns a guest with its engine ([`UserGuest`] or [`Traced`]) and runs commands in its
//! shell. This module finds probes, names kernel addresses and waits for output. It does not name
//! programs' functions, which stay addresses.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use bt::Clock;
use bt::ast::{Dialect, Script};
use bt::compile::Options;
use bt::library::TEXTS;
use bt::parse;
use bt::render::{Output, text};
use bt::session::{Prepared, ScriptSession, ScriptStats};
use bt::value::Names;
use probes::engine::{Engine, Filter};
use probes::kernel_view::KernelView;
use probes::provider::{Inspectable, Traceable};

use crate::insight::Insight;
use crate::shell::{Answer, COMMAND_LIMIT, Shell};
use crate::traced::Traced;
use crate::user_guest::UserGuest;

/// The interval at which a script is polled for awaited output.
const LOOK_INTERVAL: Duration = Duration::from_millis(5);

/// A guest that scripts run on.
#[derive(Clone, Copy)]
pub struct ScriptGuest<'g> {
    shell: &'g Shell,
    view: &'g Arc<KernelView>,
    insight: &'g Insight,
    engine: &'g Engine,
}

impl<'g> From<&'g UserGuest> for ScriptGuest<'g> {
    fn from(guest: &'g UserGuest) -> Self {
        Self {
            shell: &guest.shell,
            view: &guest.view,
            insight: &guest.insight,
            engine: &guest.engine,
        }
    }
}

impl<'g> From<&'g Traced> for ScriptGuest<'g> {
    fn from(guest: &'g Traced) -> Self {
        Self {
            shell: &guest.shell,
            view: &guest.view,
            insight: &guest.insight,
            engine: &guest.engine,
        }
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
    pub stats: ScriptStats,
    /// The hits of each of its probes.
    pub each: Vec<(String, u64)>,
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
        let found = self.each.iter().find(|(name, _)| name == probe);
        let (_, hits) = found.unwrap_or_else(|| panic!("{probe}: {:?}", self.each));
        *hits
    }

    /// Checks that nothing was dropped, that nothing went wrong, and that every hit is accounted
    /// for.
    ///
    /// # Panics
    /// If not.
    pub fn assert_whole(&self) {
        let probes = self.stats.probes;
        assert_eq!(probes.hits, probes.filtered + probes.recorded, "{self:?}");
        let each: u64 = self.each.iter().map(|(_, hits)| hits).sum();
        assert_eq!(probes.hits, each, "{self:?}");
        let flawless = ScriptStats {
            probes,
            ..ScriptStats::default()
        };
        assert_eq!(self.stats, flawless, "{self:?}");
    }
}

impl<'g> ScriptGuest<'g> {
    /// Returns the guest's shell.
    pub fn shell(&self) -> &'g Shell {
        self.shell
    }

    /// Starts a script in the normal dialect at all hits of its probes.
    ///
    /// # Panics
    /// If there is something wrong with it, or it cannot be started.
    pub fn start(&self, script: &str) -> Running<'g> {
        self.start_with(script, &Options::default(), &Filter::default())
    }

    /// Starts a script at the hits that a filter accepts.
    ///
    /// # Panics
    /// As [`Self::start`].
    pub fn start_with(&self, script: &str, options: &Options, filter: &Filter) -> Running<'g> {
        self.try_start(script, options, filter)
            .unwrap_or_else(|e| panic!("{script}:\n{e}"))
    }

    /// Starts a script.
    ///
    /// # Errors
    /// The script's error as it is shown to its author, or the reason why it cannot be started.
    pub fn try_start(
        &self,
        script: &str,
        options: &Options,
        filter: &Filter,
    ) -> Result<Running<'g>, String> {
        let shown = |wrong: Vec<bt::diagnostic::Diagnostic>| -> String {
            let each = wrong.iter().map(|d| d.render("test", script.as_bytes()));
            each.collect()
        };
        let mut parsed = parse::parse(script.as_bytes(), options.dialect).map_err(shown)?;
        library(&mut parsed);
        let clock = Clock::now(self.engine.tsc_hz());
        let machine = &self.shell.linux.machine;
        // No hit comes between the first probe and the last.
        let _paused = machine.pause();
        let guest: &dyn Traceable = &self.insight.traceable(machine, self.view);
        let known: &dyn Inspectable = guest;
        let prepared = Prepared::new(&parsed, options, &known, &known, machine.vcpus(), clock);
        let prepared = prepared.map_err(shown)?;
        let mut outputs = Vec::new();
        let session = prepared.start(self.engine, &|_| filter.clone(), &mut |output| {
            outputs.push(output);
        });
        let mut session = session.map_err(|e| e.to_string())?;
        session.take_up(guest);
        let visited = session.iterate(guest, &mut |output| outputs.push(output));
        visited.map_err(|e| e.to_string())?;
        let mut running = Running {
            guest: *self,
            session,
            out: Vec::new(),
            err: Vec::new(),
        };
        running.show(outputs);
        Ok(running)
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

/// Adds the translators that come with exotrace.
fn library(script: &mut Script) {
    for (name, text) in TEXTS {
        let parsed = parse::parse(text.as_bytes(), Dialect::Normal);
        let parsed = parsed.unwrap_or_else(|wrong| panic!("{name}: {wrong:?}"));
        script.translators.extend(parsed.translators);
        script.structures.extend(parsed.structures);
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

/// Kernel addresses by name; those of programs as they are.
impl Names for ScriptGuest<'_> {
    fn kernel(&self, address: u64) -> String {
        match self.view.kernel.symbols.resolve(address) {
            Some((symbol, 0)) => symbol.name.to_owned(),
            Some((symbol, offset)) => format!("{}+{offset:#x}", symbol.name),
            None => format!("{address:#x}"),
        }
    }

    fn user(&self, _: u32, address: u64) -> String {
        format!("{address:#x}")
    }
}

/// A running script.
pub struct Running<'g> {
    guest: ScriptGuest<'g>,
    session: ScriptSession,
    out: Vec<u8>,
    err: Vec<u8>,
}

impl Running<'_> {
    /// Returns the script's session, to be followed by the caller.
    pub fn into_session(self) -> ScriptSession {
        self.session
    }

    /// Returns the probes of patterns that could not be enabled, with the reasons.
    pub fn skipped(&self) -> &[String] {
        self.session.skipped()
    }

    /// Returns the standard output so far.
    pub fn out(&mut self) -> String {
        let mut outputs = Vec::new();
        self.session.drain(&mut |output| outputs.push(output));
        self.show(outputs);
        String::from_utf8_lossy(&self.out).into_owned()
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
                "no {what} in {COMMAND_LIMIT:?}: {:?}, {:?}",
                self.out(),
                self.session.stats()
            );
            std::thread::sleep(LOOK_INTERVAL);
        }
    }

    /// Waits until the script has ended itself.
    ///
    /// # Panics
    /// If it does not end within [`COMMAND_LIMIT`].
    pub fn wait_for_exit(&self) {
        let deadline = Instant::now() + COMMAND_LIMIT;
        while !self.session.has_exited() {
            assert!(
                Instant::now() < deadline,
                "still running: {:?}",
                self.session.stats()
            );
            std::thread::sleep(LOOK_INTERVAL);
        }
    }

    /// Returns whether the script has ended itself.
    pub fn has_exited(&self) -> bool {
        self.session.has_exited()
    }

    /// Removes its probes, all at one moment, and returns the result.
    pub fn finish(mut self) -> Ran {
        let paused = self.guest.shell.linux.machine.pause();
        let each = self.session.each();
        let names = self.session.probes().iter().map(|p| p.name.to_string());
        let hits = each.iter().map(|stats| stats.map_or(0, |stats| stats.hits));
        let each = names.zip(hits).collect();
        self.out();
        let Self {
            guest,
            session,
            mut out,
            mut err,
        } = self;
        let dialect = session.dialect();
        let mut shown = |output| {
            show(&output, dialect, &guest, &mut out, &mut err);
        };
        let stats = session.finish(&mut shown, &mut drop);
        drop(paused);
        Ran {
            out: String::from_utf8_lossy(&out).into_owned(),
            err: String::from_utf8_lossy(&err).into_owned(),
            stats,
            each,
        }
    }

    fn show(&mut self, outputs: Vec<Output>) {
        let dialect = self.session.dialect();
        for output in outputs {
            show(&output, dialect, &self.guest, &mut self.out, &mut self.err);
        }
    }
}

fn show(
    output: &Output,
    dialect: Dialect,
    names: &dyn Names,
    out: &mut Vec<u8>,
    err: &mut Vec<u8>,
) {
    let part = match output.is_for_stderr() {
        true => err,
        false => out,
    };
    part.extend(text::render(output, dialect, names));
}

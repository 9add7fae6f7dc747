//! A script before it runs: finds its probes and compiles its rules for them.

use probes::engine::{Engine, Filter, RingSize, Session};
use probes::file_probes::FileProbes;
use probes::module_probes::ModuleProbes;
use probes::name::{ProbeName, ProbePattern};
use probes::probe::{Probe, Target};

use probes::provider::Inspectable;
pub use probes::provider::NotFound;
use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64};

use super::iterations::{self, Iterated};
use super::resolved::{Resolved, kinds_of, of_files, of_modules, resolve};
use super::to_come::ToCome;
use super::{ScriptSession, StartError, arguments, limits, output};
use crate::ast::{Dialect, ProbeKind, Rule, Script};
use crate::check::strict;
use crate::compile::places::asks_for_number;
use crate::compile::{Compiler, Guest, Options, ProbeKindInfo};
use crate::context::Clock;
use crate::diagnostic::Diagnostic;
use crate::maps::Maps;
use crate::moments::{Keeps, Moments};
use crate::program::Code;
use crate::render::Output;
use crate::run::{Faults, ProbeTexts, Shared};
use crate::snapshots::Snapshots;

/// The size of a ring in bytes: the output of a script while nobody reads.
const RING_BYTES: usize = 16 << 20;
/// The least and greatest number of records of a ring.
const SLOTS: std::ops::RangeInclusive<usize> = 1 << 10..=1 << 16;

/// The source of existing probes.
pub trait Finder {
    /// Returns the probes that match a pattern: at least one.
    ///
    /// # Errors
    /// No probe matches; the error has similar names.
    fn find(&self, pattern: &str) -> Result<Vec<Probe>, NotFound>;

    /// Returns a probe of each kind that a pattern without probes may match later: those of a
    /// module that is not loaded, or a file that is not mapped. Returns none if the pattern can
    /// never match.
    fn to_come(&self, pattern: &str) -> Vec<Probe> {
        let _ = pattern;
        Vec::new()
    }
}

/// A script that can be started.
pub struct Prepared {
    shared: Shared,
    words: usize,
    places: Places,
    /// The patterns that name a module.
    of_modules: Vec<ProbePattern>,
    /// The patterns of files that no process has mapped.
    of_files: Vec<ProbePattern>,
    /// The maps that are printed at the end, in order.
    printed: Vec<usize>,
    /// The messages about probes that do not exist, of rules that have others.
    missing: Vec<String>,
    clock: Clock,
    /// The caller's settings of the session, made before its first probe is enabled.
    set_up: SetUp,
}

type SetUp = Box<dyn Fn(&mut Session) + Send + Sync>;

impl fmt::Debug for Prepared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Prepared")
            .field("words", &self.words)
            .finish_non_exhaustive()
    }
}

/// A probe, and the code that runs at it.
struct Wanted {
    probe: Probe,
    codes: Vec<Arc<Code>>,
    /// Whether a pattern names this probe and does not just match it: it is then an error if it
    /// cannot be enabled.
    must: bool,
    /// Whether it is named as bpftrace does, by one of its patterns.
    is_foreign: bool,
}

/// The rules, compiled for their probes.
#[derive(Default)]
struct Places {
    begin: Vec<Code>,
    end: Vec<Code>,
    iterations: Vec<Iterated>,
    probes: Vec<Wanted>,
    /// The code for probes that may come, in the script's order.
    to_come: Vec<ToCome>,
    /// The indexes of `probes` by name: a name may stand for several targets.
    named: HashMap<ProbeName, Vec<usize>>,
}

impl Places {
    fn compile(&mut self, rule: &Rule, resolved: &Resolved<'_>, compiler: &mut Compiler<'_>) {
        let mut compiled: HashMap<ProbeKindInfo, Arc<Code>> = HashMap::new();
        let with_number = asks_for_number(rule);
        for spec in &rule.probes {
            let pattern = match &spec.kind {
                ProbeKind::Begin => {
                    let code = compiler.rule(rule, &ProbeKindInfo::default());
                    self.begin.push(code);
                    continue;
                }
                ProbeKind::End => {
                    let code = compiler.rule(rule, &ProbeKindInfo::default());
                    self.end.push(code);
                    continue;
                }
                ProbeKind::Iteration(iteration) => {
                    let kind = ProbeKindInfo::of_iteration(*iteration);
                    self.iterations.push(Iterated {
                        iteration: *iteration,
                        code: compiler.rule(rule, &kind),
                    });
                    continue;
                }
                ProbeKind::Pattern(pattern) => pattern,
            };
            let parsed = ProbePattern::parse(pattern);
            let must = parsed.as_ref().is_ok_and(ProbePattern::is_one);
            let is_foreign = parsed.is_ok_and(|pattern| pattern.is_foreign);
            let Some(found) = resolved.get(pattern.as_str()) else {
                continue;
            };
            for probe in &found.probes {
                let code = compiled
                    .entry(ProbeKindInfo::of(probe, with_number))
                    .or_insert_with_key(|kind| Arc::new(compiler.rule(rule, kind)));
                match found.to_come {
                    true => self.to_come.push(ToCome {
                        pattern: pattern.clone(),
                        form: probe.clone(),
                        code: code.clone(),
                        is_foreign,
                        filter: Filter::default(),
                    }),
                    false => {
                        if let Some(wanted) = self.add(probe, code) {
                            wanted.must |= must;
                            wanted.is_foreign |= is_foreign;
                        }
                    }
                }
            }
        }
    }

    /// Adds a rule's code to a probe: once, however many of its patterns match the probe. Returns
    /// the probe.
    fn add(&mut self, probe: &Probe, code: &Arc<Code>) -> Option<&mut Wanted> {
        let same = self.named.entry(probe.name.clone()).or_default();
        let at = same.iter().copied().find(|at| {
            let known = self.probes.get(*at);
            known.is_some_and(|known| known.probe.target == probe.target)
        });
        let at = at.unwrap_or_else(|| {
            same.push(self.probes.len());
            self.probes.push(Wanted {
                probe: probe.clone(),
                codes: Vec::new(),
                must: false,
                is_foreign: false,
            });
            self.probes.len() - 1
        });
        let wanted = self.probes.get_mut(at)?;
        if !wanted.codes.iter().any(|known| Arc::ptr_eq(known, code)) {
            wanted.codes.push(code.clone());
        }
        Some(wanted)
    }
}

impl Prepared {
    /// Compiles a script for a guest with so many vCPUs. `clock` provides the time of its hits.
    ///
    /// # Errors
    /// All errors in the script.
    pub fn new(
        script: &Script,
        options: &Options,
        guest: &dyn Guest,
        finder: &dyn Finder,
        vcpus: usize,
        clock: Clock,
    ) -> Result<Self, Vec<Diagnostic>> {
        let script = &*arguments::placed(script, &options.arguments)?;
        let options = &limits::of(script, options)?;
        let dialect = options.dialect;
        if dialect == Dialect::Strict
            && let Some(wrong) = strict::repeated(script)
        {
            return Err(vec![wrong]);
        }
        let (resolved, missing) = resolve(script, finder, dialect)?;
        let mut compiler = Compiler::new(script, options, guest);
        for probe in resolved.values().flat_map(|found| &found.probes) {
            compiler.may_put_out(longest_text(&probe.name));
        }
        for rule in &script.rules {
            for kind in kinds_of(rule, &resolved) {
                compiler.learn(rule, &kind);
            }
        }
        let mut places = Places::default();
        for rule in &script.rules {
            places.compile(rule, &resolved, &mut compiler);
        }
        let printed = match script.omits_maps {
            true => Vec::new(),
            false => compiler.printed_at_end(&strict::printed(script)),
        };
        let compiled = compiler.finish()?;
        Ok(Self {
            words: compiled.words,
            shared: Shared {
                dialect,
                maps: Maps::new(compiled.maps, vcpus, dialect, options.most_entries),
                emissions: compiled.emissions,
                snapshots: Snapshots::default(),
                moments: Moments::default(),
                began: clock.unix_ns(vmm::host_tsc()),
                exited: AtomicBool::new(false),
                failed: AtomicBool::new(false),
                status: AtomicU64::new(0),
                cpus: vcpus,
                faults: Faults::default(),
                random: AtomicU64::new(clock.unix_ns),
            },
            places,
            of_modules: of_modules(&resolved),
            of_files: of_files(&resolved),
            printed,
            missing,
            set_up: Box::new(|_| ()),
            clock,
        })
    }

    /// Returns the probes that will be enabled.
    pub fn probes(&self) -> impl ExactSizeIterator<Item = &Probe> {
        self.places.probes.iter().map(|wanted| &wanted.probe)
    }

    /// Returns the moments of the machine that the script keeps.
    #[must_use]
    pub fn keeps(&self) -> Keeps {
        let places = &self.places;
        let at_probes = places.probes.iter().flat_map(|wanted| &wanted.codes);
        let to_come = places.to_come.iter().map(|to_come| &to_come.code);
        let elsewhere = places.begin.iter().chain(&places.end);
        let iterated = places.iterations.iter().map(|iterated| &iterated.code);
        let shared = at_probes.chain(to_come).map(AsRef::as_ref);
        Keeps::of(shared.chain(elsewhere).chain(iterated))
    }

    /// Runs BEGIN, the iterations over `guest`, and END, and passes on their output, and the maps:
    /// all that a script without probes does. Returns the status that it gave to `exit()`.
    ///
    /// # Errors
    /// If the script iterates, and there is no guest, or it cannot be read.
    pub fn run_alone(
        self,
        guest: Option<&dyn Inspectable>,
        each: &mut dyn FnMut(Output),
    ) -> Result<u8, StartError> {
        let (shared, places, clock) = (self.shared, self.places, self.clock);
        output::run(&places.begin, "BEGIN", &shared, &clock, each);
        iterations::visit(&places.iterations, guest, &shared, &clock, each)?;
        output::finish(&places.end, &self.printed, &shared, &clock, each);
        Ok(shared.exit_status())
    }

    /// Has `set_up` done to the engine's session before the first probe is enabled: a budget, for
    /// instance.
    #[must_use]
    pub fn with_session(mut self, set_up: impl Fn(&mut Session) + Send + Sync + 'static) -> Self {
        self.set_up = Box::new(set_up);
        self
    }

    /// Runs BEGIN, then enables the probes, unless BEGIN has ended the script. `filter` selects the
    /// hits of a probe. `each` receives the output of BEGIN. Call [`ScriptSession::take_up`] then:
    /// a file may have come in between.
    ///
    /// # Errors
    /// A probe that is named and not just matched cannot be enabled. Nothing is left in the guest
    /// then.
    pub fn start(
        self,
        engine: &Engine,
        filter: &dyn Fn(&Probe) -> Filter,
        each: &mut dyn FnMut(Output),
    ) -> Result<ScriptSession, StartError> {
        let words = self.words;
        let bytes = 8 * (words + probes::ring::SLOT_OVERHEAD_WORDS);
        let slots = (RING_BYTES / bytes).clamp(*SLOTS.start(), *SLOTS.end());
        let slots = 1 << slots.ilog2();
        let mut session = engine.session(RingSize { slots, words })?;
        (self.set_up)(&mut session);
        let shared = Arc::new(self.shared);
        let Places {
            begin,
            end,
            iterations,
            probes,
            mut to_come,
            ..
        } = self.places;
        for wanted in &mut to_come {
            wanted.filter = filter(&wanted.form);
        }
        let mut running = ScriptSession {
            session,
            shared,
            end,
            iterations,
            printed: self.printed,
            clock: self.clock,
            probes: Vec::new(),
            skipped: self.missing,
            modules: None,
            files: None,
            to_come,
        };
        output::run(&begin, "BEGIN", &running.shared, &self.clock, each);
        if running.has_exited() {
            return Ok(running);
        }
        for wanted in probes {
            let Wanted {
                probe, codes, must, ..
            } = wanted;
            let program = running.program(&probe, codes, wanted.is_foreign);
            let filter = match &probe.target {
                // It belongs to no process.
                Target::Timer {
                    every_vcpu: false, ..
                } => Filter::default(),
                _ => filter(&probe),
            };
            match running.session.enable_program(&probe, filter, program) {
                Ok(_) => running.probes.push(probe),
                Err(error) if must => return Err(error.into()),
                Err(error) => running.skipped.push(error.to_string()),
            }
        }
        let enabled = running.probes.iter().zip(0..);
        running.modules = ModuleProbes::follow(&running.session, self.of_modules, enabled);
        let is_of_file = |wanted: &ToCome| self.of_files.iter().any(|of| of.text == wanted.pattern);
        let mut of_modules = running.to_come.iter().filter(|wanted| !is_of_file(wanted));
        if let (Some(first), None) = (of_modules.next(), &running.modules) {
            let pattern = first.pattern.clone();
            return Err(StartError::Modules { pattern });
        }
        if let Some(first) = self.of_files.first() {
            let pattern = first.text.clone();
            running.files = FileProbes::follow(&running.session, self.of_files);
            if running.files.is_none() {
                return Err(StartError::Files { pattern });
            }
        }
        // A module may have come in between.
        running.look_for_modules(ModuleProbes::take_up_present);
        Ok(running)
    }
}

/// Returns an upper bound of the length in bytes of the longest of [`texts`]. The parts of a probe
/// to come may be patterns for longer ones.
fn longest_text(name: &ProbeName) -> usize {
    /// The number of bytes by which a name of bpftrace may be longer.
    const FOREIGN: usize = 16;
    /// The longest name of a function in bytes (`KSYM_NAME_LEN`).
    const LONGEST_NAME: usize = 512;
    let ProbeName {
        provider,
        module,
        function,
        name,
    } = name;
    let longest = |part: &String| match ProbePattern::is_exact(part) || part.is_empty() {
        true => part.len(),
        false => part.len().max(LONGEST_NAME),
    };
    let parts = [provider, module, function, name].map(|part| longest(part) + 1);
    // `tracepoint:syscalls:sys_enter_X` is longer than `syscall::X:entry`.
    parts.iter().sum::<usize>() + FOREIGN
}

/// Returns `probe` and `func` at a probe, which a pattern may have named as bpftrace does.
pub(super) fn texts(named: &ProbeName, dialect: Dialect, is_foreign: bool) -> ProbeTexts {
    let ProbeName {
        provider,
        function,
        name: last,
        ..
    } = named;
    let whole = match dialect {
        Dialect::Normal if is_foreign => probes::name::foreign::shown(named),
        Dialect::Normal => named.to_string(),
        Dialect::Strict => format!("{provider}:{function}:{last}"),
    };
    ProbeTexts {
        name: whole.as_bytes().into(),
        function: function.as_bytes().into(),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::sync::atomic::Ordering;

    use probes::name::matches_part;
    use probes::probe::Moment;

    use super::super::to_come;
    use super::*;
    use crate::parse::parse;
    use crate::record;
    use crate::script_tests::Nobody;

    const CLOCK: Clock = Clock {
        tsc: 0,
        unix_ns: 0,
        hz: 1,
    };

    fn prepared(script: &str, longest_text: usize) -> Result<Prepared, Vec<Diagnostic>> {
        let script = parse(script.as_bytes(), Dialect::Normal).unwrap();
        let options = Options {
            longest_text,
            ..Options::default()
        };
        Prepared::new(&script, &options, &Nobody, &Nobody, 1, CLOCK)
    }

    /// A guest without modules, into which any module may come.
    struct Coming;

    impl Finder for Coming {
        fn find(&self, pattern: &str) -> Result<Vec<Probe>, NotFound> {
            Err(NotFound {
                message: format!("no probe {pattern}"),
                nearest: Vec::new(),
            })
        }

        fn to_come(&self, pattern: &str) -> Vec<Probe> {
            let pattern = ProbePattern::parse(pattern).unwrap();
            let moments = [Moment::Entry, Moment::Return].into_iter();
            let moments = moments.filter(|moment| matches_part(&pattern.name, moment.name()));
            let probes =
                moments.map(|moment| of_module(&pattern.module, &pattern.function, moment));
            probes.filter(|probe| probe.name.module == "brd").collect()
        }
    }

    fn of_module(module: &str, function: &str, moment: Moment) -> Probe {
        Probe {
            name: ProbeName::new("kprobe", module, function, moment.name()),
            signature: None,
            target: Target::Kernel {
                address: introspect::Gva(0),
                moment,
            },
        }
    }

    #[test]
    fn rules_for_a_module_to_come_are_compiled_for_what_they_may_match() {
        let text = "kprobe:brd:brd_init:, kprobe:brd:brd_*:entry { @a = count(); } \
                    kprobe:brd:brd_*:return { print(func); } kprobe:brd:brd_init:entry { @c = 1; }";
        let script = parse(text.as_bytes(), Dialect::Normal).unwrap();
        let options = Options::default();
        let prepared = Prepared::new(&script, &options, &Nobody, &Coming, 1, CLOCK).unwrap();
        assert_eq!(prepared.probes().len(), 0);
        let named: Vec<_> = prepared
            .of_modules
            .iter()
            .map(|p| p.text.as_str())
            .collect();
        let mut expected = vec![
            "kprobe:brd:brd_*:entry",
            "kprobe:brd:brd_*:return",
            "kprobe:brd:brd_init:",
            "kprobe:brd:brd_init:entry",
        ];
        expected.sort_unstable();
        assert_eq!(named, expected);
        for (module, function, moment, codes) in [
            ("brd", "brd_init", Moment::Entry, 2),
            ("brd", "brd_init", Moment::Return, 2),
            ("brd", "brd_exit", Moment::Entry, 1),
            ("brd", "brd_exit", Moment::Return, 1),
            ("brd", "del_brd", Moment::Entry, 0),
            ("ext4", "brd_init", Moment::Entry, 0),
        ] {
            let probe = of_module(module, function, moment);
            let found = to_come::of_module(&prepared.places.to_come, &probe);
            assert_eq!(found.codes.len(), codes, "{}", probe.name);
        }
        // The name that is printed may be as long as the kernel allows.
        assert!(prepared.words > 512 / 8);
        let other = parse(b"kprobe:ext4:ext4_sync:entry { }", Dialect::Normal).unwrap();
        let wrong = Prepared::new(&other, &options, &Nobody, &Coming, 1, CLOCK)
            .err()
            .unwrap();
        assert_eq!(
            wrong.first().unwrap().message,
            "no probe kprobe:ext4:ext4_sync:entry"
        );
    }

    #[test]
    fn records_have_room_for_the_longest_text() {
        let literal = format!("print(\"{}\");", "x".repeat(320));
        for (rule, longest_text, bytes) in [
            ("print(str(1));", 256, 256),
            ("print(str(1));", 8, 64),
            ("print(comm);", 8, 64),
            ("print(str(1, 1000));", 256, 1024),
            ("$x = str(1, 1000); print($x); print(pid);", 256, 1024),
            // Known only after it is emitted.
            ("printf(\"%s\", @x); @x = str(1, 1000);", 256, 1024),
            (&literal, 256, 320),
        ] {
            let script = format!("BEGIN {{ {rule} }}");
            let words = prepared(&script, longest_text).unwrap().words;
            assert_eq!(words, record::HEADER + 1 + bytes / 8, "{rule}");
        }
    }

    #[test]
    fn what_goes_wrong_is_counted() {
        for (rule, divisions, reads, endless) in [
            ("print(1 / pid);", 0, 0, 0),
            ("$x = 0; print(1 / $x); @x = 1; @x %= $x;", 2, 0, 0),
            ("print(str(1)); print(*(uint32 *)1);", 0, 2, 0),
            ("print(str(0));", 0, 0, 0),
            ("while (1) { }", 0, 0, 1),
            ("$t = (1, 2); while (1) { $t = ($t, $t); }", 0, 0, 1),
        ] {
            let script = format!("BEGIN {{ {rule} }}");
            let prepared = prepared(&script, 256).unwrap();
            let shared = &prepared.shared;
            output::run(&prepared.places.begin, "BEGIN", shared, &CLOCK, &mut |_| {});
            let Faults {
                divisions: d,
                reads: r,
                endless: e,
                lost,
                ..
            } = &shared.faults;
            let found = [d, r, e, lost].map(|count| count.load(Ordering::Relaxed));
            assert_eq!(found, [divisions, reads, endless, 0], "{rule}");
        }
    }

    #[test]
    fn a_rule_that_is_too_large_is_refused_whole() {
        let script = |statements| format!("BEGIN {{ {} }}", "@x = 1; ".repeat(statements));
        prepared(&script(30_000), 256).unwrap();
        let wrong = prepared(&script(40_000), 256).err().unwrap();
        let messages: Vec<_> = wrong.iter().map(|wrong| wrong.message.as_str()).collect();
        assert_eq!(
            messages,
            ["this rule is too large, with the translators it uses"]
        );
    }
}

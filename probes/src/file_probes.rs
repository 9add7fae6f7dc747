//! A session's probes of programs and libraries that no process has mapped yet: enabled when one
//! maps the file.
//!
//! The owner of the session calls [`FileProbes::take_up`] when it is woken. The guest is held
//! meanwhile, before the process executes anything of the file.

use std::collections::HashMap;
use std::fmt;

use crate::engine::{NewFiles, Session};
use crate::name::{ProbeName, ProbePattern};
use crate::probe::Probe;
use crate::provider::{self, Inspectable};

/// The most probes that are enabled for files of one session. A guest decides how many functions a
/// file has.
const MOST_PROBES: usize = 1 << 16;

/// A probe of a file that a process has mapped, and those of the waiting patterns that match it.
pub type Enable<'e> = dyn FnMut(&mut Session, Probe, &[&ProbePattern]) + 'e;

/// Patterns of files that are not mapped yet.
pub struct FileProbes {
    waiting: Vec<Waiting>,
    listener: NewFiles,
    /// How many probes were enabled.
    count: usize,
    /// Whether nobody has looked yet: a file may have come while the session was being made.
    is_new: bool,
}

/// A pattern that matches no probe yet.
struct Waiting {
    pattern: ProbePattern,
    /// Whether the log says that a file has come without such a probe.
    is_told: bool,
}

impl fmt::Debug for FileProbes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FileProbes")
            .field("waiting", &self.waiting.len())
            .finish_non_exhaustive()
    }
}

impl FileProbes {
    /// Waits for the files of these patterns. Returns `None` if the kernel does not report new
    /// ones.
    #[must_use]
    pub fn follow(session: &Session, patterns: Vec<ProbePattern>) -> Option<Self> {
        Some(Self {
            listener: session.new_files()?,
            count: 0,
            is_new: true,
            waiting: patterns
                .into_iter()
                .map(|pattern| Waiting {
                    pattern,
                    is_told: false,
                })
                .collect(),
        })
    }

    /// Returns the patterns whose file has not come yet.
    pub fn waiting(&self) -> impl Iterator<Item = &ProbePattern> {
        self.waiting.iter().map(|waiting| &waiting.pattern)
    }

    /// Enables the probes of files that were mapped since the last call: `enable` is called for
    /// each. The first call looks at those that are mapped. Once no pattern waits any more, this
    /// can be dropped.
    pub fn take_up(
        &mut self,
        session: &mut Session,
        guest: &dyn Inspectable,
        enable: &mut Enable<'_>,
    ) {
        if std::mem::take(&mut self.is_new) {
            self.look(session, guest, enable);
        }
        while let Some(_held) = self.listener.next() {
            self.look(session, guest, enable);
        }
    }

    fn look(&mut self, session: &mut Session, guest: &dyn Inspectable, enable: &mut Enable<'_>) {
        let (mut found, mut matched) = (Vec::<Found>::new(), Vec::new());
        let mut of_name: HashMap<ProbeName, Vec<usize>> = HashMap::new();
        self.waiting.retain_mut(|Waiting { pattern, is_told }| {
            let Ok(matches) = provider::mapped(guest, pattern) else {
                return true;
            };
            if matches.probes.is_empty() {
                // Another file may match, too.
                if !*is_told && !matches.files.is_empty() {
                    log::warn!("{}", provider::no_user_probe(pattern, matches));
                    *is_told = true;
                }
                return true;
            }
            let probes = matches.probes;
            for probe in probes {
                let same = of_name.entry(probe.name.clone()).or_default();
                let mut known = same.iter().copied();
                let known = known.find(|at| found[*at].probe.target == probe.target);
                let at = known.unwrap_or_else(|| {
                    same.push(found.len());
                    found.push(Found {
                        probe,
                        patterns: Vec::new(),
                    });
                    found.len() - 1
                });
                found[at].patterns.push(matched.len());
            }
            matched.push(pattern.clone());
            false
        });
        let room = MOST_PROBES - self.count;
        if found.len() > room {
            log::warn!(
                "{} probes of new files: only {room} are enabled",
                found.len()
            );
        }
        for Found { probe, patterns } in found.into_iter().take(room) {
            self.count += 1;
            let patterns: Vec<_> = patterns.iter().filter_map(|at| matched.get(*at)).collect();
            enable(session, probe, &patterns);
        }
    }
}

/// A probe, and the numbers of the patterns that match it.
struct Found {
    probe: Probe,
    patterns: Vec<usize>,
}

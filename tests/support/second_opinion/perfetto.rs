//! Checks a file against Perfetto's own definitions.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use super::{Package, heard, output};

/// PyPI's package with the definitions of all of Perfetto's messages. It does not contain the
/// program that reads files into Perfetto's UI.
const DEFINITIONS: Package = Package {
    requirements: &["perfetto==0.59.1"],
    entry: "second-opinion-perfetto-0.59.1",
};
const CHECK: &str = "tests/support/second_opinion/check_perfetto.py";

/// A file that passed the checks.
#[derive(Debug, PartialEq, Eq)]
pub struct Timeline {
    /// The counts by kind: packets by what they hold, events by type, `flows` that end and
    /// `flows_open` that do not.
    pub counts: BTreeMap<String, u64>,
    /// The names of the tracks that have events, sorted.
    pub tracks: Vec<String>,
}

impl Timeline {
    /// Returns the count of a kind.
    pub fn count(&self, what: &str) -> u64 {
        self.counts.get(what).copied().unwrap_or(0)
    }

    /// Reads a file; `check_perfetto.py` has the checks.
    ///
    /// # Panics
    /// If a check fails; the message names it.
    pub fn check(file: &Path) -> Self {
        let mut command = Command::new(DEFINITIONS.installed().join("bin/python3"));
        let what = format!("the definitions of Perfetto, on {}", file.display());
        let text = output(&what, command.arg(crate::data::source(CHECK)).arg(file));
        let (mut counts, mut tracks) = (BTreeMap::new(), Vec::new());
        for line in text.lines() {
            match line.split_once(' ') {
                Some(("track", name)) => tracks.push(name.to_owned()),
                Some((name, number)) => {
                    counts.insert(name.to_owned(), heard(&what, number.parse()));
                }
                None => panic!("{what}: {line:?}"),
            }
        }
        Self { counts, tracks }
    }
}

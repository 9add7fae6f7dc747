//! What Perfetto's own definitions say of a file.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use super::{Package, heard, output};

/// PyPI's package with the definitions of all of Perfetto's messages. The program that reads files into its UI is not in it.
const DEFINITIONS: Package = Package {
    requirement: "perfetto==0.59.1",
    entry: "second-opinion-perfetto-0.59.1",
};
const CHECK: &str = "tests/support/second_opinion/check_perfetto.py";

/// A file that is as it should be.
#[derive(Debug, PartialEq, Eq)]
pub struct Timeline {
    /// What is in it: packets by what they hold, events by type, `flows` that end and `flows_open` that do not.
    pub counts: BTreeMap<String, u64>,
    /// Names of the tracks that have events, sorted.
    pub tracks: Vec<String>,
}

impl Timeline {
    /// How many there are of something.
    pub fn count(&self, what: &str) -> u64 {
        self.counts.get(what).copied().unwrap_or(0)
    }

    /// Reads a file: `check_perfetto.py` has what is checked.
    ///
    /// # Panics
    /// If something in it is wrong; the message has what.
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

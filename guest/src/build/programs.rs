//! The small guest programs: C sources in this crate, compiled once to static executables without
//! any library. They have 1 to 3 kB, and one has two pages.
//!
//! Each source's first comment describes the program. The programs keep their symbols and frame
//! pointers, so that they can be traced.

use std::path::{Path, PathBuf};

use crate::build::compile::Batch;
use crate::build::make_error::MakeError;
use crate::cache::Cache;
use crate::progress::Progress;

/// The header that all sources include.
const HEADER: (&str, &str) = ("guest.h", include_str!("../../programs/guest.h"));

/// The name and source of each program.
const SOURCES: [(&str, &str); 16] = [
    ("alarms", include_str!("../../programs/alarms.c")),
    ("cat", include_str!("../../programs/cat.c")),
    ("deadline", include_str!("../../programs/deadline.c")),
    ("forks", include_str!("../../programs/forks.c")),
    ("fsload", include_str!("../../programs/fsload.c")),
    ("init", include_str!("../../programs/init.c")),
    ("insmod", include_str!("../../programs/insmod.c")),
    ("moves", include_str!("../../programs/moves.c")),
    ("queues", include_str!("../../programs/queues.c")),
    ("scatter", include_str!("../../programs/scatter.c")),
    ("selfmod", include_str!("../../programs/selfmod.c")),
    ("sh", include_str!("../../programs/sh.c")),
    ("spin", include_str!("../../programs/spin.c")),
    ("syscount", include_str!("../../programs/syscount.c")),
    ("twins", include_str!("../../programs/twins.c")),
    ("vsock", include_str!("../../programs/vsock.c")),
];

/// The flags of gcc: no library, no code that a guest's CPU or an interpreting host may lack, one
/// page of file for most.
const FLAGS: [&str; 15] = [
    "-Wall",
    "-Werror",
    "-std=gnu11",
    "-O2",
    "-ffreestanding",
    "-static",
    "-nostdlib",
    "-fno-pie",
    "-no-pie",
    "-fno-omit-frame-pointer",
    "-fno-stack-protector",
    "-fno-asynchronous-unwind-tables",
    "-fcf-protection=none",
    "-mno-sse",
    "-Wl,--build-id=none,-z,noseparate-code,-z,max-page-size=4096",
];

const BATCH: Batch = Batch {
    name: "programs",
    sources: &SOURCES,
    headers: &[HEADER],
    flags: &FLAGS,
    packages: &["gcc", "binutils"],
    phase: "compiling the guest programs",
};

/// The compiled programs in the cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Programs {
    directory: PathBuf,
}

impl Programs {
    /// Returns the names of all programs.
    pub fn names() -> impl Iterator<Item = &'static str> {
        SOURCES.iter().map(|(name, _)| *name)
    }

    /// Returns the path of the program `name`: a static ELF executable with symbols.
    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    /// Returns the folder of all programs, an entry of the cache.
    #[must_use]
    pub fn directory(&self) -> &Path {
        &self.directory
    }
}

/// Returns the programs, compiled if they are not in the cache yet.
///
/// # Errors
/// If gcc is missing and cannot be installed, or fails.
pub fn build(cache: &Cache, progress: &dyn Progress) -> Result<Programs, MakeError> {
    let directory = BATCH.build(cache, progress)?;
    Ok(Programs { directory })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::progress::Silent;
    use object::{Object, ObjectSymbol};
    use std::fs;
    use std::io::Write;
    use std::process::{Command, Stdio};

    /// Checks on the host: the programs are plain Linux executables.
    #[test]
    fn they_do_what_their_comments_say() {
        let directory = tempfile::tempdir().unwrap();
        let cache = Cache::at(directory.path()).unwrap();
        let programs = build(&cache, &Silent).unwrap();
        for (command, expected, status) in [
            (&["syscount", "100"][..], "syscount: 100\n", 0),
            (&["syscount"], "syscount: 1000\n", 0),
            (&["forks", "3"], "forks: 3\n", 0),
            (&["spin", "1"], "spin: done\n", 0),
            (&["fsload", "3", "0"], "fsload: 3 rounds\n", 0),
            (&["cat", "/dev/null"], "", 0),
            (&["cat", "/no/such"], "cat: cannot read /no/such\n", 1),
            (&["scatter", "/dev/null"], "scatter: 0 0\n", 0),
            (
                &["scatter", "/no/such"],
                "scatter: cannot read /no/such\n",
                1,
            ),
            (&["insmod"], "insmod: error 2\n", 1),
            (&["alarms", "500"], "alarms: 500\n", 0),
            (&["twins", "300"], "twins: 300\n", 0),
            (&["queues"], "", 2),
            (&["vsock"], "", 2),
        ] {
            let output = Command::new(programs.path(command[0]))
                .args(&command[1..])
                .output()
                .unwrap();
            assert_eq!(
                String::from_utf8_lossy(&output.stdout),
                expected,
                "{command:?}"
            );
            assert_eq!(output.status.code(), Some(status), "{command:?}");
        }
    }

    #[test]
    fn the_shell_runs_programs_until_exit_or_the_end_of_its_input() {
        let directory = tempfile::tempdir().unwrap();
        let cache = Cache::at(directory.path()).unwrap();
        let programs = build(&cache, &Silent).unwrap();
        for (input, expected) in [
            (
                "  echo  one two\n\nno-such-program x\nexit\necho three\n",
                "$ one two\n$ $ no-such-program: not found\n$ ",
            ),
            ("echo longer\necho end", "$ longer\n$ end\n$ "),
        ] {
            let mut shell = Command::new(programs.path("sh"))
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn()
                .unwrap();
            let mut stdin = shell.stdin.take().unwrap();
            stdin.write_all(input.as_bytes()).unwrap();
            drop(stdin);
            let output = shell.wait_with_output().unwrap();
            let printed = String::from_utf8_lossy(&output.stdout);
            assert_eq!(printed, expected, "{input:?}");
        }
    }

    #[test]
    fn they_are_small_and_traceable_and_compiled_once() {
        struct Forbidden;
        impl Progress for Forbidden {
            fn phase(&self, message: &str) {
                panic!("work was done: {message}");
            }
            fn fraction(&self, _done: f64) {}
        }
        let directory = tempfile::tempdir().unwrap();
        let cache = Cache::at(directory.path()).unwrap();
        let first = build(&cache, &Silent).unwrap();
        assert_eq!(build(&cache, &Forbidden).unwrap(), first);
        for name in Programs::names() {
            let bytes = fs::read(first.path(name)).unwrap();
            // `moves` has a function in a page of its own.
            let most = if name == "moves" { 2 * 4096 } else { 4096 };
            assert!(bytes.len() <= most, "{name}: {} bytes", bytes.len());
        }
        let bytes = fs::read(first.path("fsload")).unwrap();
        let file = object::File::parse(&*bytes).unwrap();
        for function in [
            "program",
            "one_round",
            "create_file",
            "write_file",
            "stat_file",
        ] {
            let symbol = file.symbols().find(|s| s.name() == Ok(function)).unwrap();
            assert!(symbol.size() > 0, "{function}");
        }
    }
}

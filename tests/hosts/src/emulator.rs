//! Builds the emulators once from Debian's source with this project's patches, and keeps them in
//! the cache.
//!
//! A [`Recipe`] is data. The cache entry's name changes with every part of it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use guest::build::{MakeError, command, packages};
use guest::{Cache, Progress, failed, short};
use rustix::fs::statvfs;
use sha2::{Digest, Sha256};

use crate::apt::{self, SourceError};

/// The room that a build needs, in bytes: sources, objects, result.
const ROOM: u64 = 3 << 30;

/// An emulator could not be built.
#[derive(Debug, thiserror::Error)]
pub enum EmulatorError {
    /// The cache, the packages, or a step of the build failed.
    #[error(transparent)]
    Make(MakeError),
    /// The source could not be fetched.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// A patch was made for another version of the source.
    #[error(
        "{patch} does not fit the source of {emulator} that Debian has now; its output is in {}",
        log.display()
    )]
    Patch {
        /// The patch's file name.
        patch: &'static str,
        /// The emulator's name.
        emulator: &'static str,
        /// The file with the output of patch(1).
        log: PathBuf,
    },
    /// The disk is full.
    #[error(
        "building {emulator} takes {} MiB, and {} has {} MiB free; make room, or set EXOTRACE_CACHE to another place",
        ROOM >> 20, place.display(), free >> 20
    )]
    NoRoom {
        /// The emulator's name.
        emulator: &'static str,
        /// The path of the cache.
        place: PathBuf,
        /// The free bytes there.
        free: u64,
    },
}

impl<E> From<E> for EmulatorError
where
    MakeError: From<E>,
{
    fn from(error: E) -> Self {
        Self::Make(error.into())
    }
}

/// The recipe of an emulator.
pub struct Recipe {
    /// The name, which is that of the source package.
    pub name: &'static str,
    /// The suite of Debian with the source.
    pub suite: &'static str,
    /// The Debian packages that building and running need.
    pub packages: &'static [&'static str],
    /// The name and text of each patch, in order.
    pub patches: &'static [(&'static str, &'static str)],
    /// The path in the source tree and the text of each added file.
    pub files: &'static [(&'static str, &'static str)],
    /// The command lines, run in the source tree. `{jobs}` is the number of CPUs.
    pub steps: &'static [&'static [&'static str]],
    /// The environment of the steps.
    pub environment: &'static [(&'static str, &'static str)],
    /// The number of lines that the steps print, for the progress bar.
    pub lines: u64,
    /// The built program in the source tree.
    pub program: &'static str,
    /// The CPU minutes that building takes, shown to the user beforehand.
    pub minutes: u32,
}

impl Recipe {
    /// Returns the program, built if it is not in the cache yet.
    ///
    /// # Errors
    /// If packages or the source cannot be had, or a step fails.
    pub fn build(&self, cache: &Cache, progress: &dyn Progress) -> Result<PathBuf, EmulatorError> {
        let topic = format!("host-{}", self.name);
        let name = format!("{topic}-{}", self.hash());
        let program = Path::new(self.program).file_name().unwrap_or_default();
        if let Some(entry) = cache.entry(&name) {
            return Ok(entry.join(program));
        }
        let lock = cache.lock(&topic, progress)?;
        if let Some(entry) = cache.entry(&name) {
            return Ok(entry.join(program));
        }
        self.check_room(cache)?;
        eprintln!(
            "host: {} is built from Debian's source once: about {} CPU minutes",
            self.name, self.minutes
        );
        let log = cache.root().join(&topic).with_extension("log");
        // A log is of one build.
        let _ = fs::remove_file(&log);
        packages::require(self.packages, &log, progress)?;
        let scratch = cache.scratch(&topic, &lock)?;
        let source = apt::source(self.name, self.suite, scratch.path(), &log, progress)?;
        self.patch(&source, &log)?;
        progress.phase(&format!("building {}", self.name));
        let done = std::cell::Cell::new(0);
        for step in self.steps {
            let before = done.get();
            let mut command = self.step(step, &source);
            command::run(&step.join(" "), &mut command, &log, |lines| {
                done.set(before + lines);
                progress.fraction((done.get() as f64 / self.lines as f64).min(0.99));
            })?;
        }
        let out = scratch.path().join("out");
        fs::create_dir(&out).map_err(failed("make the directory", &out))?;
        let built = source.join(self.program);
        fs::copy(&built, out.join(program)).map_err(failed("copy", &built))?;
        Ok(cache.publish(&out, &name)?.join(program))
    }

    fn check_room(&self, cache: &Cache) -> Result<(), EmulatorError> {
        let Ok(room) = statvfs(cache.root()) else {
            return Ok(());
        };
        let free = room.f_bavail.saturating_mul(room.f_frsize);
        if free >= ROOM {
            return Ok(());
        }
        Err(EmulatorError::NoRoom {
            emulator: self.name,
            place: cache.root().to_owned(),
            free,
        })
    }

    /// Applies the patches and adds the files.
    fn patch(&self, source: &Path, log: &Path) -> Result<(), EmulatorError> {
        for (name, text) in self.patches {
            let file = source.join(name);
            fs::write(&file, text).map_err(failed("write", &file))?;
            let mut patch = Command::new("patch");
            patch.current_dir(source).args(["-p1", "-i"]).arg(&file);
            command::run(&format!("patch < {name}"), &mut patch, log, |_| {}).map_err(|_| {
                EmulatorError::Patch {
                    patch: name,
                    emulator: self.name,
                    log: log.to_owned(),
                }
            })?;
        }
        for (path, text) in self.files {
            let file = source.join(path);
            fs::write(&file, text).map_err(failed("write", &file))?;
        }
        Ok(())
    }

    fn step(&self, words: &[&str], source: &Path) -> Command {
        let jobs = std::thread::available_parallelism().map_or(1, usize::from);
        let mut command = Command::new("nice");
        command
            .args(["-n", "10"])
            .args(
                words
                    .iter()
                    .map(|word| word.replace("{jobs}", &jobs.to_string())),
            )
            .current_dir(source)
            .env("LC_ALL", "C")
            // Set by an outer make, such as one that runs cargo.
            .env_remove("MAKEFLAGS")
            .env_remove("MAKELEVEL")
            .envs(self.environment.iter().copied());
        command
    }

    /// Returns a hash of all that determines the program.
    fn hash(&self) -> String {
        let mut hash = Sha256::new();
        let files = self.patches.iter().chain(self.files);
        let named = files.flat_map(|(name, text)| [*name, *text]);
        let steps = self.steps.iter().flat_map(|step| step.iter().copied());
        let environment = self
            .environment
            .iter()
            .flat_map(|(name, value)| [*name, *value]);
        for part in [self.suite, self.program]
            .into_iter()
            .chain(named)
            .chain(steps)
            .chain(environment)
        {
            hash.update(part);
            hash.update([0]);
        }
        short(hash)
    }
}

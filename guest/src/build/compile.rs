//! Compiles guest programs from C sources in this crate once, and keeps them in the cache.
//!
//! The caller specifies the programs and gcc's flags ([`Batch`]). The cache entry's name changes
//! with every source and flag.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use sha2::{Digest, Sha256};

use crate::build::command;
use crate::build::make_error::MakeError;
use crate::build::packages;
use crate::cache::{Cache, CacheError, failed, short};
use crate::progress::Progress;

/// Programs that are compiled together.
pub(crate) struct Batch {
    /// The start of the names of the cache entry, its lock and its log.
    pub(crate) name: &'static str,
    /// The name and source of each program.
    pub(crate) sources: &'static [(&'static str, &'static str)],
    /// The name and content of files that the sources include.
    pub(crate) headers: &'static [(&'static str, &'static str)],
    /// The flags of gcc.
    pub(crate) flags: &'static [&'static str],
    /// The Debian packages that the build needs.
    pub(crate) packages: &'static [&'static str],
    /// The phase shown to the user meanwhile.
    pub(crate) phase: &'static str,
}

impl Batch {
    /// Returns the folder with the programs, compiled if they are not in the cache yet.
    ///
    /// # Errors
    /// If a package is missing and cannot be installed, or gcc fails.
    pub(crate) fn build(
        &self,
        cache: &Cache,
        progress: &dyn Progress,
    ) -> Result<PathBuf, MakeError> {
        let name = self.entry_name();
        if let Some(directory) = cache.entry(&name) {
            return Ok(directory);
        }
        let lock = cache.lock(self.name, progress)?;
        if let Some(directory) = cache.entry(&name) {
            return Ok(directory);
        }
        let log = cache.root().join(self.name).with_extension("log");
        // A log is of one build.
        let _ = fs::remove_file(&log);
        packages::require(self.packages, &log, progress)?;
        progress.phase(self.phase);
        let scratch = cache.scratch(self.name, &lock)?;
        let out = scratch.path().join("out");
        fs::create_dir(&out).map_err(failed("make the directory", &out))?;
        for (header, text) in self.headers {
            write(&scratch.path().join(header), text)?;
        }
        for (program, text) in self.sources {
            let source = scratch.path().join(program).with_extension("c");
            write(&source, text)?;
            let mut gcc = Command::new("gcc");
            gcc.args(self.flags)
                .arg("-o")
                .arg(out.join(program))
                .arg(&source);
            command::run(&format!("gcc {program}.c"), &mut gcc, &log, |_| {})?;
        }
        Ok(cache.publish(&out, &name)?)
    }

    /// Returns the cache entry's name.
    pub(crate) fn entry_name(&self) -> String {
        let files = self.sources.iter().chain(self.headers);
        format!("{}-{}", self.name, made_from(files, self.flags))
    }
}

fn write(path: &Path, text: &str) -> Result<(), CacheError> {
    fs::write(path, text).map_err(failed("write", path))
}

/// Returns [`short`] of sources, by name and text, and of the flags of their compiler.
fn made_from<'a>(
    sources: impl IntoIterator<Item = &'a (&'a str, &'a str)>,
    flags: &[&str],
) -> String {
    let mut hash = Sha256::new();
    for part in sources.into_iter().flat_map(|(name, text)| [name, text]) {
        hash.update(part);
        hash.update([0]);
    }
    hash.update(flags.join(" "));
    short(hash)
}

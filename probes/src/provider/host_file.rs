//! The probes of a program or library on the host, without a guest: functions, and static probes.
//!
//! They are named as in a guest that has the file, by the last part of its path. Which of them a
//! kernel can be given traps for is only known in the guest.

use std::collections::HashSet;
use std::io;
use std::path::Path;

use introspect::user::demangle::demangle;
use introspect::user::object_file::{ObjectError, ObjectFile};
use introspect::user::static_probes::StaticSites;
use introspect::user::symbols::FunctionSymbols;
use introspect::user::symfs::HostFile;

use super::uprobe::{self, moments, names_function};
use super::usdt::{self, Wanted};
use super::user_file::{last_part, names_file};
use crate::name::{ProbeName, ProbePattern};
use crate::probe::Signature;

/// The probes of a file.
#[derive(Debug, Clone, Default)]
pub struct FileProbes {
    /// Names, and arguments if they are known. Static probes come behind functions.
    pub probes: Vec<(ProbeName, Option<Signature>)>,
    /// The parts of the file that could not be read, one sentence each.
    pub incomplete: Vec<String>,
}

/// The reason that a file has no probes to list.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// It cannot be opened.
    #[error("{path}: {source}")]
    Open {
        /// The path.
        path: String,
        /// The reason.
        source: io::Error,
    },
    /// It is no program and no library.
    #[error("{path}: {source}")]
    Object {
        /// The path.
        path: String,
        /// The reason.
        source: ObjectError,
    },
}

/// Lists the probes of the file at `path` that match a pattern.
///
/// # Errors
/// If the file cannot be opened, or is not an ELF file.
pub fn list(path: &Path, pattern: &ProbePattern) -> Result<FileProbes, FileError> {
    let shown = || path.display().to_string();
    let file = HostFile::open(path).map_err(|source| FileError::Open {
        path: shown(),
        source,
    })?;
    let object = ObjectFile::parse(&file).map_err(|source| FileError::Object {
        path: shown(),
        source,
    })?;
    let path = shown();
    let last = last_part(&path);
    let functions = FunctionSymbols::read(&object);
    let mut found = FileProbes::default();
    let lost = functions.lost().iter();
    found.incomplete = lost.map(|lost| format!("{path}: {lost}")).collect();
    if pattern.matches_provider(uprobe::PROVIDER) && names_file(&pattern.module, &path) {
        for function in functions.iter() {
            let name = demangle(function.name);
            if names_function(&pattern.function, function.name, &name) {
                moments(pattern, |moment| {
                    let name = ProbeName::new(uprobe::PROVIDER, last, &name, moment.name());
                    found.probes.push((name, None));
                });
            }
        }
    }
    let sites = StaticSites::read(&object);
    let lost = sites.lost.iter();
    let lost = lost.map(|lost| format!("{path}: {lost}"));
    found.incomplete.extend(lost);
    let mut known = HashSet::new();
    let wanted = Wanted::all_of(pattern);
    let wanted = wanted
        .iter()
        .filter(|wanted| wanted.process.is_none() && wanted.has_file(&path));
    for wanted in wanted {
        for site in &sites.sites {
            let function = || usdt::function_at(&functions, site.address);
            // The copies of a site are one probe.
            if let Ok(name) = wanted.name_of(site, &path, &function)
                && known.insert(name.clone())
            {
                found.probes.push((name, Some(usdt::signature(site))));
            }
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn names(path: &Path, pattern: &str) -> Vec<String> {
        let pattern = ProbePattern::parse(pattern).unwrap();
        let found = list(path, &pattern).unwrap().probes;
        found.iter().map(|(name, _)| name.to_string()).collect()
    }

    #[test]
    fn functions_of_a_file_are_listed_by_its_name() {
        let path = std::env::current_exe().unwrap();
        let last = path.file_name().unwrap().to_str().unwrap();
        for (pattern, expected) in [
            ("uprobe::main:", &["main:entry", "main:return"][..]),
            ("main", &["main:entry", "main:return"]),
            ("uretprobe:*:main", &["main:return"]),
            ("uprobe:/bin/other:main", &[]),
            ("kprobe:main", &[]),
            ("usdt:::nothing-like-it", &[]),
        ] {
            let expected: Vec<String> = expected
                .iter()
                .map(|name| format!("uprobe:{last}:{name}"))
                .collect();
            assert_eq!(names(&path, pattern), expected, "{pattern}");
        }
        let this = "uprobe::*functions_of_a_file_are_listed_by_its_name:entry";
        assert_eq!(names(&path, this).len(), 1);
    }

    #[test]
    fn other_files_are_refused() {
        let pattern = ProbePattern::parse("*:::").unwrap();
        for (path, part) in [
            // A file without bytes.
            ("/proc/self/status", "/proc/self/status: "),
            ("/dev/null", "/dev/null: "),
            ("/missing/file", "/missing/file: No such file"),
        ] {
            let error = list(Path::new(path), &pattern).unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        }
    }
}

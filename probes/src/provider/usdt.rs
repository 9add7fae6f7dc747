//! Static probes of programs and libraries, put in by their authors. SystemTap's macros and this
//! project's leave notes of them ([`introspect::user::static_probes`]).
//!
//! A probe's name is its note's provider, the file's name, the site's function (`none` if unknown),
//! and its note's name with `-` for `__`. If the author has declared all four parts, those are
//! used. Patterns are written as in bpftrace: `usdt:FILE:PROVIDER:NAME`, `usdt:PROVIDER:NAME` or
//! `usdt:/FILE:NAME`. They can also be written as in dtrace: `PROVIDER:FILE:FUNCTION:NAME`, and
//! `PROVIDER1234:::NAME` for process 1234. Names are accepted with `-` and with `__`.
//!
//! If the compiler has copied a site within a function, it is one probe with several sites. If it
//! was inlined into several functions, each has a probe. Only files that a process maps for
//! execution are found.

use std::collections::{HashMap, HashSet};

use introspect::Gpa;
use introspect::system::{PausedSystem, TextFile, Unavailable};
use introspect::user::demangle::demangle;
use introspect::user::static_probes::{
    ArgumentTypes, Semaphore, SiteArgument, StaticSite, ValueKind,
};
use introspect::user::symbols::FunctionSymbols;

use super::uprobe::{UserMatches, text};
use super::user_file::{UserFile, last_part, names_file};
use crate::name::{ProbeName, ProbePattern, matches_part};
use crate::probe::{Argument, Probe, SemaphoreText, Signature, StaticPlace, StaticText, Target};

/// The prefix of patterns with a file.
pub const PROVIDER: &str = "usdt";
/// The short form of the prefix.
const SHORT: &str = "U";
/// The function of a site if it is not known.
const NO_FUNCTION: &str = "none";
/// The type of an argument whose note cannot be parsed.
const UNKNOWN_TYPE: &str = "unknown";
/// The types of string arguments.
const STRINGS: [&str; 2] = ["char *", "const char *"];

/// Checks whether a pattern is for static probes only.
#[must_use]
pub fn is_meant(pattern: &ProbePattern) -> bool {
    [PROVIDER, SHORT].contains(&pattern.provider.as_str())
}

/// Checks whether a pattern may be for a static probe's provider, if no other provider has that
/// name.
#[must_use]
pub fn may_be_meant(pattern: &ProbePattern) -> bool {
    !pattern.provider.is_empty() && pattern.text.contains(':')
}

/// Checks whether a pattern names a file.
#[must_use]
pub fn has_file(pattern: &ProbePattern) -> bool {
    is_meant(pattern) && !file_of(pattern).is_empty()
}

/// Returns the file that a pattern of [`PROVIDER`] names; empty if it names none.
#[must_use]
pub fn file_of(pattern: &ProbePattern) -> &str {
    Wanted::of_file(pattern).file
}

/// The parts that a pattern selects, each itself a pattern; empty parts match everything.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Wanted<'p> {
    pub(super) process: Option<i32>,
    /// Compared with the file's path or its last part.
    file: &'p str,
    provider: &'p str,
    /// Compared with the declared module, the file's path or its last part.
    module: &'p str,
    function: &'p str,
    name: &'p str,
}

impl<'p> Wanted<'p> {
    /// Parses `usdt:FILE:PROVIDER:NAME` and its shorter forms.
    fn of_file(pattern: &'p ProbePattern) -> Self {
        let (file, provider) = match pattern.module.is_empty() && pattern.function.contains('/') {
            true => (pattern.function.as_str(), ""),
            false => (pattern.module.as_str(), pattern.function.as_str()),
        };
        Self {
            process: None,
            file,
            provider,
            module: "",
            function: "",
            name: &pattern.name,
        }
    }

    /// Parses `PROVIDER:FILE:FUNCTION:NAME`. Each split of the digits at the end of the provider
    /// into name and process is tried.
    fn of_provider(pattern: &'p ProbePattern) -> impl Iterator<Item = Self> {
        let all = Self {
            process: None,
            file: "",
            provider: &pattern.provider,
            module: &pattern.module,
            function: &pattern.function,
            name: &pattern.name,
        };
        let provider = pattern.provider.as_str();
        let letters = provider.trim_end_matches(|c: char| c.is_ascii_digit());
        let cuts = letters.len()..provider.len();
        let in_process = cuts.filter_map(move |at| {
            let (provider, digits) = provider.split_at_checked(at)?;
            let process = digits.parse().ok().filter(|_| !digits.starts_with('0'))?;
            (!provider.is_empty()).then_some(Self {
                process: Some(process),
                provider,
                ..all
            })
        });
        std::iter::once(all).chain(in_process)
    }

    /// Returns the parts that a pattern may select, in each way to read it.
    pub(super) fn all_of(pattern: &'p ProbePattern) -> Vec<Self> {
        match is_meant(pattern) {
            true => vec![Self::of_file(pattern)],
            false => Self::of_provider(pattern).collect(),
        }
    }

    /// Returns the name of a probe of the file at `path`, if these parts select it. `function` is
    /// the site's, unless its author has declared another.
    pub(super) fn name_of(
        &self,
        site: &StaticSite,
        path: &str,
        function: &dyn Fn() -> String,
    ) -> Result<ProbeName, Unselected> {
        if !matches_part(self.provider, &site.provider) {
            return Err(Unselected::Other);
        }
        let name = site.script_name();
        if !matches_part(self.name, &site.name) && !matches_part(self.name, &name) {
            return Err(Unselected::Name(name));
        }
        let module = declared_module(site).unwrap_or_else(|| last_part(path));
        let fits = |name: &str| matches_part(self.module, name);
        if !fits(module) && !fits(path) && !fits(last_part(path)) {
            return Err(Unselected::Other);
        }
        let declared = site.declared.as_ref().map(|name| &name.function);
        let function = match declared.filter(|function| !function.is_empty()) {
            Some(declared) => declared.clone(),
            None => function(),
        };
        if !matches_part(self.function, &function) {
            return Err(Unselected::Other);
        }
        let provider = match self.process {
            Some(pid) => format!("{}{pid}", site.provider),
            None => site.provider.clone(),
        };
        Ok(ProbeName::new(&provider, module, &function, &name))
    }

    pub(super) fn has_file(&self, path: &str) -> bool {
        names_file(self.file, path)
    }
}

/// The reason that a site is not selected.
pub(super) enum Unselected {
    /// Its name alone, which is this.
    Name(String),
    /// Another part of it.
    Other,
}

/// Finds the probes that match `pattern` in a paused guest. `unpatched` reads physical memory
/// without any traps.
///
/// # Errors
/// If the kernel's processes cannot be read.
pub fn find(
    look: &PausedSystem<'_>,
    pattern: &ProbePattern,
    unpatched: &dyn Fn(Gpa, &mut [u8]) -> bool,
) -> Result<UserMatches, Unavailable> {
    let mut found = UserMatches::default();
    if is_meant(pattern) {
        find_wanted(look, &Wanted::of_file(pattern), unpatched, &mut found)?;
        return Ok(found);
    }
    for wanted in Wanted::of_provider(pattern).filter(|_| may_be_meant(pattern)) {
        if let Some(pid) = wanted.process
            && !matches!(look.process(pid)?, Ok(Some(_)))
        {
            continue;
        }
        find_wanted(look, &wanted, unpatched, &mut found)?;
        if !found.probes.is_empty() {
            break;
        }
    }
    Ok(found)
}

/// Finds the probes that match `pattern` in the file at the path that it names, whether it is
/// mapped or not.
///
/// # Errors
/// If the kernel's files cannot be read.
pub fn find_at_path(
    look: &PausedSystem<'_>,
    pattern: &ProbePattern,
    unpatched: &dyn Fn(Gpa, &mut [u8]) -> bool,
) -> Result<UserMatches, Unavailable> {
    let wanted = Wanted::of_file(pattern);
    let mut found = UserMatches::default();
    let file = UserFile::named(look, wanted.file, wanted.process)?;
    if let Some(file) = file.at_path(look)? {
        in_files(&[file], &wanted, unpatched, &mut found);
    }
    Ok(found)
}

fn find_wanted(
    look: &PausedSystem<'_>,
    wanted: &Wanted<'_>,
    unpatched: &dyn Fn(Gpa, &mut [u8]) -> bool,
    found: &mut UserMatches,
) -> Result<(), Unavailable> {
    let file = UserFile::named(look, wanted.file, wanted.process)?;
    let files = file.mapped(look)?;
    found.incomplete.extend(files.incomplete);
    in_files(&files.files, wanted, unpatched, found);
    Ok(())
}

fn in_files(
    files: &[TextFile<'_>],
    wanted: &Wanted<'_>,
    unpatched: &dyn Fn(Gpa, &mut [u8]) -> bool,
    found: &mut UserMatches,
) {
    for file in files {
        let path = String::from_utf8_lossy(&file.path).into_owned();
        of_file(file, &path, wanted, unpatched, found);
        if !found.files.contains(&path) {
            found.files.push(path);
        }
    }
}

fn of_file(
    file: &TextFile<'_>,
    path: &str,
    wanted: &Wanted<'_>,
    unpatched: &dyn Fn(Gpa, &mut [u8]) -> bool,
    found: &mut UserMatches,
) {
    let sites = file.static_sites();
    let lost = sites.lost.iter().map(|lost| format!("{path}: {lost}"));
    found.incomplete.extend(lost);
    // By name, because the sites of a probe are collected.
    let mut known: HashMap<ProbeName, Known> = HashMap::new();
    for site in &sites.sites {
        let function = || function_at(file.functions(), site.address);
        let name = match wanted.name_of(site, path, &function) {
            Ok(name) => name,
            Err(Unselected::Name(name)) => {
                note_name(name, found);
                continue;
            }
            Err(Unselected::Other) => continue,
        };
        let Some(offset) = site.offset.filter(|offset| *offset < file.file.size) else {
            let (provider, name) = (&site.provider, &site.name);
            found.incomplete.push(format!(
                "{path}: the site of {provider}:{name} at {:#x} is in no segment that the file loads",
                site.address
            ));
            continue;
        };
        let known = known.entry(name).or_insert_with_key(|name| {
            found.probes.push(probe(name.clone(), wanted, site));
            Known {
                number: found.probes.len() - 1,
                places: HashSet::new(),
                semaphores: HashSet::new(),
            }
        });
        let probe = found.probes.get_mut(known.number);
        let Some(Target::Static(target)) = probe.map(|probe| &mut probe.target) else {
            continue;
        };
        // A site is hit once, even if it has several notes.
        if known.places.insert(offset) {
            target.sites.push(StaticPlace {
                text: text(file, path, offset, unpatched),
                address: site.address,
                arguments: site.arguments.clone().into(),
            });
        }
        if let Some(at) = site.semaphore.filter(|at| known.semaphores.insert(*at)) {
            let semaphore = semaphore(file, path, site, at, &mut found.incomplete);
            target.semaphores.extend(semaphore);
        }
    }
}

/// The parts of a probe that were already found in a file.
struct Known {
    /// Its index among those found.
    number: usize,
    /// The offsets of its sites.
    places: HashSet<u64>,
    semaphores: HashSet<Semaphore>,
}

/// Returns the arguments of a site.
pub(super) fn signature(site: &StaticSite) -> Signature {
    let types = site.types.as_deref().unwrap_or_default();
    let arguments = site.arguments.iter().enumerate();
    let arguments = arguments.map(|(number, argument)| described(argument, types.get(number)));
    Signature {
        arguments: arguments.collect(),
        returns: None,
    }
}

/// Returns the target of a probe in a file that is not mapped yet. It has no sites.
#[must_use]
pub fn target_to_come() -> Target {
    Target::Static(StaticText {
        process: None,
        sites: Vec::new(),
        semaphores: Vec::new(),
    })
}

/// Creates a probe without sites.
fn probe(name: ProbeName, wanted: &Wanted<'_>, site: &StaticSite) -> Probe {
    Probe {
        name,
        signature: Some(signature(site)),
        target: Target::Static(StaticText {
            process: wanted.process,
            sites: Vec::new(),
            semaphores: Vec::new(),
        }),
    }
}

fn described(argument: &SiteArgument, types: Option<&ArgumentTypes>) -> Argument {
    let declared = types.map(|types| types.native.as_str());
    let by_size = argument.kind().map_or(UNKNOWN_TYPE, ValueKind::type_name);
    Argument {
        name: String::new(),
        type_name: declared.unwrap_or(by_size).to_owned(),
        is_string: declared.is_some_and(|name| STRINGS.contains(&name)),
        translated: types.and_then(|types| types.translated.clone()),
    }
}

/// Returns a counter of listeners, unless the file does not contain its bytes.
fn semaphore(
    file: &TextFile<'_>,
    path: &str,
    site: &StaticSite,
    semaphore: Semaphore,
    incomplete: &mut Vec<String>,
) -> Option<SemaphoreText> {
    let Some(offset) = semaphore.offset else {
        let why = format!(
            "{path}: the counter of listeners of {}:{} at {:#x} is not in the file: the program may not come to the probe",
            site.provider, site.name, semaphore.address
        );
        log::warn!("{why}");
        incomplete.push(why);
        return None;
    };
    Some(SemaphoreText {
        path: path.to_owned(),
        file: file.file,
        offset,
    })
}

fn declared_module(site: &StaticSite) -> Option<&str> {
    let module = site.declared.as_ref()?.module.as_str();
    Some(module).filter(|module| !module.is_empty())
}

/// Returns the function at a site's address.
pub(super) fn function_at(functions: &FunctionSymbols, address: u64) -> String {
    match functions.resolve(address) {
        Some((function, _)) => demangle(function.name).into_owned(),
        None => NO_FUNCTION.to_owned(),
    }
}

/// Keeps the name of a probe that does not match, to suggest for a misspelled one.
fn note_name(name: String, found: &mut UserMatches) {
    if found.nearest.len() < super::SUGGESTIONS && !found.nearest.contains(&name) {
        found.nearest.push(name);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn patterns_of_files_are_read_as_bpftrace_has_them() {
        for (text, [file, provider, name]) in [
            (
                "usdt:/lib/libc.so.6:libc:setjmp",
                ["/lib/libc.so.6", "libc", "setjmp"],
            ),
            ("usdt:libc*:libc:*", ["libc*", "libc", "*"]),
            ("usdt:/bin/sh:start", ["/bin/sh", "", "start"]),
            ("usdt:/bin/sh", ["/bin/sh", "", ""]),
            ("usdt:libc:setjmp", ["", "libc", "setjmp"]),
            ("usdt:libc", ["", "libc", ""]),
            ("usdt:::", ["", "", ""]),
            ("U:/bin/sh:p:n", ["/bin/sh", "p", "n"]),
        ] {
            let pattern = ProbePattern::parse(text).unwrap();
            assert!(is_meant(&pattern), "{text}");
            let wanted = Wanted::of_file(&pattern);
            assert_eq!(
                [wanted.file, wanted.provider, wanted.name],
                [file, provider, name],
                "{text}"
            );
            assert_eq!(has_file(&pattern), !file.is_empty(), "{text}");
        }
    }

    #[test]
    fn a_providers_last_digits_may_be_a_process() {
        for (text, expected) in [
            ("libc:::setjmp", vec![("libc", None)]),
            (
                "libc42:::setjmp",
                vec![("libc42", None), ("libc", Some(42)), ("libc4", Some(2))],
            ),
            (
                "x0105:::",
                vec![("x0105", None), ("x0", Some(105)), ("x010", Some(5))],
            ),
            ("42:::", vec![("42", None), ("4", Some(2))]),
        ] {
            let pattern = ProbePattern::parse(text).unwrap();
            let found = Wanted::of_provider(&pattern).map(|w| (w.provider, w.process));
            assert_eq!(found.collect::<Vec<_>>(), expected, "{text}");
        }
    }
}

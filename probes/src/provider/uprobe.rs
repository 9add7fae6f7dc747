//! Probes of functions in programs and libraries. `uprobe:FILE:FUNCTION:entry`, `:return` and
//! `:OFFSET` are for every process that maps the file, `pidN:FILE:FUNCTION:…` for process N only.
//!
//! The private module `user_file` has the names of files. Offsets are in bytes from the function's
//! first, decimal or hexadecimal with 0x. The function `-` is the whole file, with offsets from its
//! start. A function `0x1234` is the place with that address in the file's own addresses. Only
//! files that a process maps for execution can be probed.
//!
//! A function of C++ or Rust is matched and shown as its language writes it. It is matched as it is
//! mangled, and without the parameters of C++, too.

use introspect::Gpa;
use introspect::system::{PausedSystem, TextFile, TextFiles, Unavailable};
use introspect::user::demangle::{demangle, without_parameters};
use introspect::x86_64::PAGE;

use super::user_file::UserFile;
use crate::name::{ProbeName, ProbePattern, matches_part, offset};
use crate::probe::{Moment, Probe, Target, UserText};

/// The name of the provider for all processes.
pub const PROVIDER: &str = "uprobe";
/// The prefix of the provider for one process.
pub const PROCESS: &str = "pid";
/// The function name that stands for the whole file.
pub const WHOLE_FILE: &str = "-";
/// The length of the longest instruction in bytes.
const LONGEST_INSTRUCTION: usize = 15;

/// The result of a search.
#[derive(Debug, Clone, Default)]
pub struct UserMatches {
    /// The probes.
    pub probes: Vec<Probe>,
    /// Functions similar to the one in the pattern, best first, if a file was found but no function
    /// of it.
    pub nearest: Vec<String>,
    /// Files that match.
    pub files: Vec<String>,
    /// The parts that could not be read, one sentence each.
    pub incomplete: Vec<String>,
}

/// Returns the process that a provider's name contains.
#[must_use]
pub fn process_of(provider: &str) -> Option<i32> {
    provider
        .strip_prefix(PROCESS)?
        .parse()
        .ok()
        .filter(|pid| *pid > 0)
}

/// Checks whether a pattern is for this provider.
#[must_use]
pub fn is_meant(pattern: &ProbePattern) -> bool {
    pattern.provider == PROVIDER || process_of(&pattern.provider).is_some()
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
    let process = process_of(&pattern.provider);
    if process.is_none() && pattern.provider != PROVIDER {
        return Ok(UserMatches::default());
    }
    let file = UserFile::named(look, &pattern.module, process)?;
    Ok(matches(&file.mapped(look)?, pattern, unpatched))
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
    let file = UserFile::named(look, &pattern.module, process_of(&pattern.provider))?;
    let files = TextFiles {
        files: file.at_path(look)?.into_iter().collect(),
        ..TextFiles::default()
    };
    Ok(matches(&files, pattern, unpatched))
}

fn matches(
    files: &TextFiles<'_>,
    pattern: &ProbePattern,
    unpatched: &dyn Fn(Gpa, &mut [u8]) -> bool,
) -> UserMatches {
    let mut found = UserMatches {
        incomplete: files.incomplete.clone(),
        ..UserMatches::default()
    };
    for file in &files.files {
        let path = String::from_utf8_lossy(&file.path).into_owned();
        let probes_before = found.probes.len();
        of_file(file, &path, pattern, unpatched, &mut found.probes);
        if found.probes.len() == probes_before {
            if ProbePattern::is_exact(&pattern.function) {
                let nearest = file
                    .functions()
                    .nearest_names(&pattern.function, super::SUGGESTIONS);
                found.nearest.extend(nearest.into_iter().map(str::to_owned));
            }
            let before = found.incomplete.len();
            found.incomplete.extend(file.lost_functions());
            if found.incomplete.len() == before && file.functions().iter().next().is_none() {
                found.incomplete.push(format!(
                    "{path} is stripped, so its functions have no names; a place is {PROVIDER}:{path}:{WHOLE_FILE}:OFFSET"
                ));
            }
        }
        found.files.push(path);
    }
    found
}

/// Returns the probe of one instruction: the byte at `offset` of the file that a process has mapped
/// at `path` for execution. `None` if it has not, or the file is shorter.
///
/// # Errors
/// If the kernel's processes cannot be read.
pub fn point(
    look: &PausedSystem<'_>,
    process: i32,
    path: &[u8],
    offset: u64,
    unpatched: &dyn Fn(Gpa, &mut [u8]) -> bool,
) -> Result<Option<Probe>, Unavailable> {
    let files = look.text_files(Some(process), &|found| found == path)?;
    let file = files.files.first();
    let Some(file) = file.filter(|file| offset < file.file.size) else {
        return Ok(None);
    };
    let path = String::from_utf8_lossy(path);
    let provider = format!("{PROCESS}{process}");
    let name = format!("{offset:#x}");
    Ok(Some(Probe {
        name: ProbeName::new(&provider, &path, WHOLE_FILE, &name),
        signature: None,
        target: Target::User {
            text: text(file, &path, offset, unpatched),
            moment: Moment::Point,
        },
    }))
}

/// Returns the address that a function's name is.
fn address_of(function: &str) -> Option<u64> {
    function.starts_with("0x").then(|| offset(function))?
}

/// Checks whether a pattern names this function: as it is mangled, as its language writes it, or
/// without the parameters of C++.
pub(super) fn names_function(pattern: &str, mangled: &str, shown: &str) -> bool {
    matches_part(pattern, mangled)
        || (mangled != shown
            && (matches_part(pattern, shown) || matches_part(pattern, without_parameters(shown))))
}

/// Returns the targets of the kinds of probe that a pattern may match in a file that is not mapped
/// yet. They have no places.
#[must_use]
pub fn targets_to_come(pattern: &ProbePattern) -> Vec<Target> {
    let mut kinds = Vec::new();
    if offset(&pattern.name).is_some() {
        kinds.push(Moment::Point);
    } else if pattern.function != WHOLE_FILE {
        moments(pattern, |moment| kinds.push(moment));
        // It may be in the middle of a function.
        if address_of(&pattern.function).is_some() && kinds.contains(&Moment::Entry) {
            kinds.push(Moment::Point);
        }
    }
    let targets = kinds.into_iter().map(|moment| Target::User {
        text: UserText::default(),
        moment,
    });
    targets.collect()
}

fn of_file(
    file: &TextFile<'_>,
    path: &str,
    pattern: &ProbePattern,
    unpatched: &dyn Fn(Gpa, &mut [u8]) -> bool,
    probes: &mut Vec<Probe>,
) {
    let module = match process_of(&pattern.provider) {
        Some(_) => super::user_file::last_part(path),
        None => path,
    };
    let mut add = |function: &str, name: &str, moment, offset: Option<u64>| {
        let Some(offset) = offset.filter(|offset| *offset < file.file.size) else {
            return;
        };
        probes.push(Probe {
            name: ProbeName::new(&pattern.provider, module, function, name),
            signature: None,
            target: Target::User {
                text: text(file, path, offset, unpatched),
                moment,
            },
        });
    };
    let distance = offset(&pattern.name);
    if pattern.function == WHOLE_FILE {
        if let Some(distance) = distance {
            add(WHOLE_FILE, &pattern.name, Moment::Point, Some(distance));
        }
        return;
    }
    let segments = file.segments();
    let place_of = |address| {
        let mut segments = segments.iter();
        let place = segments.find_map(|segment| segment.file_offset_of(address));
        place.map(|(offset, _)| offset)
    };
    if let Some(address) = address_of(&pattern.function) {
        let address = address.saturating_add(distance.unwrap_or_default());
        let place = place_of(address);
        let (function, into) = match file.functions().resolve(address) {
            Some((function, into)) => (demangle(function.name).into_owned(), into),
            None => (WHOLE_FILE.to_owned(), place.unwrap_or_default()),
        };
        match into {
            0 => moments(pattern, |moment| {
                add(&function, moment.name(), moment, place);
            }),
            _ if matches_part(&pattern.name, Moment::Entry.name()) || distance.is_some() => {
                add(&function, &format!("{into:#x}"), Moment::Point, place);
            }
            // Nothing returns from the middle of a function.
            _ => {}
        }
        return;
    }
    for function in file.functions().iter() {
        let name = demangle(function.name);
        if !names_function(&pattern.function, function.name, &name) {
            continue;
        }
        let place = place_of(function.address);
        if let Some(distance) = distance {
            let place = place.and_then(|place| place.checked_add(distance));
            add(&name, &pattern.name, Moment::Point, place);
            continue;
        }
        moments(pattern, |moment| add(&name, moment.name(), moment, place));
    }
}

/// Passes on the moments that a pattern's name matches.
pub(super) fn moments(pattern: &ProbePattern, each: impl FnMut(Moment)) {
    let moments = [Moment::Entry, Moment::Return].into_iter();
    let wanted = moments.filter(|moment| matches_part(&pattern.name, moment.name()));
    wanted.for_each(each);
}

/// Creates a place in a file's text.
pub(super) fn text(
    file: &TextFile<'_>,
    path: &str,
    offset: u64,
    unpatched: &dyn Fn(Gpa, &mut [u8]) -> bool,
) -> UserText {
    let mut code = file.bytes_at(offset, LONGEST_INSTRUCTION);
    // Other sessions' traps may be there, so the bytes are read without traps, page by page.
    let mut done = 0;
    while let Some(rest) = code.get_mut(done..).filter(|rest| !rest.is_empty()) {
        let at = offset + done as u64;
        let in_page = usize::try_from(PAGE - at % PAGE)
            .unwrap_or(1)
            .min(rest.len());
        if let Some(physical) = file.physical(at) {
            unpatched(physical, rest.split_at_mut(in_page).0);
        }
        done += in_page;
    }
    let physical = file.physical(offset);
    UserText {
        path: path.to_owned(),
        file: file.file,
        offset,
        physical,
        code,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions_are_named_as_mangled_or_as_written() {
        for (pattern, mangled, named) in [
            ("main", "main", true),
            ("_ZN5space3fooEii", "_ZN5space3fooEii", true),
            ("space::foo(int, int)", "_ZN5space3fooEii", true),
            ("space::foo", "_ZN5space3fooEii", true),
            ("space::f*", "_ZN5space3fooEii", true),
            ("*foo*", "_ZN5space3fooEii", true),
            ("foo", "_ZN5space3fooEii", false),
            ("space::foo()", "_ZN5space3fooEii", false),
            ("mycrate::foo", "_RNvCs1234_7mycrate3foo", true),
            ("mycrate::fo", "_RNvCs1234_7mycrate3foo", false),
        ] {
            let shown = demangle(mangled);
            let found = names_function(pattern, mangled, &shown);
            assert_eq!(found, named, "{pattern} {mangled}");
        }
    }

    #[test]
    fn processes_are_named_by_number() {
        for (provider, pid) in [
            ("pid42", Some(42)),
            ("pid", None),
            ("pid0", None),
            ("pid-1", None),
            ("uprobe", None),
            ("pidx", None),
        ] {
            assert_eq!(process_of(provider), pid, "{provider}");
        }
    }
}

//! Which provider a pattern is of, and the probes that it stands for in a guest.
//!
//! The caller brings the guest as [`Inspectable`]. If it runs, it is paused only for providers that
//! read its processes or tables.

use introspect::Gpa;
use introspect::system::PausedSystem;
use vmm::machine::Handle;

use super::no_kernel_probe::no_kernel_probe;
use super::uprobe::{self, UserMatches};
use super::user_file::in_proc;
use super::{each_of_kernel, file_forms, tracepoint, usdt, watchpoint};
use crate::kernel_view::KernelView;
use crate::name::ProbePattern;
use crate::probe::Probe;

/// Most files named in a message about a function that was found in none of them.
const NAMED_FILES: usize = 5;

/// A guest that can be read, whether it runs or not.
pub trait Inspectable {
    /// Returns its kernel.
    fn view(&self) -> &KernelView;

    /// Returns its machine, if it runs in one.
    fn running(&self) -> Option<Handle>;

    /// Pauses the guest and has `ask` read its structures.
    ///
    /// # Errors
    /// If its kernel's structures are not known, with the reason. `ask` is not called then.
    fn inspect(&self, ask: &mut dyn FnMut(PausedSystem<'_>)) -> Result<(), String>;
}

/// A running guest, in which probes can be enabled.
pub trait Traceable: Inspectable {
    /// Returns its machine.
    fn machine(&self) -> Handle;
}

/// A pattern that matches no probe.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}{}", suggestion(.nearest))]
pub struct NotFound {
    /// The message, which names the requested probe and the searched place.
    pub message: String,
    /// Similar names, best first.
    pub nearest: Vec<String>,
}

impl From<String> for NotFound {
    fn from(message: String) -> Self {
        Self {
            message,
            nearest: Vec::new(),
        }
    }
}

fn suggestion(nearest: &[String]) -> String {
    match nearest.is_empty() {
        true => String::new(),
        false => format!(" (did you mean {}?)", nearest.join(", ")),
    }
}

/// Pauses the guest and returns the answer about its structures.
///
/// # Errors
/// As [`Inspectable::inspect`].
pub fn inspect<T>(
    guest: &dyn Inspectable,
    ask: impl FnOnce(PausedSystem<'_>) -> T,
) -> Result<T, String> {
    let (mut ask, mut answer) = (Some(ask), None);
    guest.inspect(&mut |system| answer = ask.take().map(|ask| ask(system)))?;
    answer.ok_or_else(|| "the guest could not be paused".to_owned())
}

/// Returns the probes that a pattern stands for, of all providers.
///
/// # Errors
/// If there are none, with similar names; or if the guest's structures cannot be read.
pub fn find(guest: &dyn Inspectable, pattern: &ProbePattern) -> Result<Vec<Probe>, NotFound> {
    let mut found = Vec::new();
    find_each(guest, pattern, &mut |probe| found.push(probe))?;
    Ok(found)
}

/// Passes the probes that [`find`] returns to `each`, one by one: a kernel has a hundred thousand.
///
/// # Errors
/// As [`find`]. Some may have been passed before.
pub fn find_each(
    guest: &dyn Inspectable,
    pattern: &ProbePattern,
    each: &mut dyn FnMut(Probe),
) -> Result<(), NotFound> {
    if uprobe::is_meant(pattern) || usdt::is_meant(pattern) {
        find_user(guest, pattern)?.into_iter().for_each(each);
        return Ok(());
    }
    let view = guest.view();
    if watchpoint::is_meant(pattern) {
        let found = watchpoint::find(view, pattern);
        each(found.map_err(|error| NotFound::from(error.to_string()))?);
        return Ok(());
    }
    let mut any = false;
    let mut passed = |probe| {
        any = true;
        each(probe);
    };
    each_of_kernel(view, pattern, &mut passed);
    if pattern.matches_provider(tracepoint::PROVIDER) && pattern.text.contains(':') {
        let found = find_tracepoints(guest, pattern)?.into_iter();
        found.for_each(&mut passed);
    }
    if any {
        return Ok(());
    }
    // A provider that is none of the kernel's may be a program's own.
    if usdt::may_be_meant(pattern)
        && let Ok(found) = find_user(guest, pattern)
    {
        found.into_iter().for_each(each);
        return Ok(());
    }
    Err(no_kernel_probe(guest, pattern))
}

/// Returns the tracepoints that match a pattern. A kernel whose tracepoints cannot be read has
/// none, unless the pattern names that provider.
///
/// # Errors
/// If the pattern names the provider, and they cannot be read.
pub fn find_tracepoints(
    guest: &dyn Inspectable,
    pattern: &ProbePattern,
) -> Result<Vec<Probe>, String> {
    let (view, machine) = (guest.view(), guest.running());
    let found = inspect(guest, |system| {
        tracepoint::find(&system, machine.as_ref(), view, pattern)
    })?;
    match found {
        Ok(found) => {
            for sentence in &found.incomplete {
                log::warn!("not all tracepoints are known: {sentence}");
            }
            Ok(found.probes)
        }
        Err(why) if pattern.provider == tracepoint::PROVIDER => Err(why),
        Err(_) => Ok(Vec::new()),
    }
}

/// Returns the functions or static probes of programs that a pattern stands for.
///
/// # Errors
/// If there are none, with similar names; or if the guest's processes cannot be read.
pub fn find_user(guest: &dyn Inspectable, pattern: &ProbePattern) -> Result<Vec<Probe>, NotFound> {
    let found = mapped(guest, pattern)?;
    if !found.probes.is_empty() {
        return Ok(found.probes);
    }
    // A file that nobody has mapped may show that there is no such probe.
    match found.files.is_empty() {
        true => Err(match at_path(guest, pattern) {
            Some(stored) if stored.probes.is_empty() => no_user_probe(pattern, stored),
            _ => no_user_probe(pattern, found),
        }),
        false => Err(no_user_probe(pattern, found)),
    }
}

/// Returns the matches of a pattern in the files that processes have mapped.
///
/// # Errors
/// If the guest's processes cannot be read.
pub(crate) fn mapped(
    guest: &dyn Inspectable,
    pattern: &ProbePattern,
) -> Result<UserMatches, NotFound> {
    let found = search(guest, |system, unpatched| match uprobe::is_meant(pattern) {
        true => uprobe::find(system, pattern, unpatched),
        false => usdt::find(system, pattern, unpatched),
    })?;
    found.map_err(|lost| NotFound::from(lost.to_string()))
}

/// Returns the matches of a pattern in the file at the path that it names, whether it is mapped or
/// not. `None` if it names no path, or that file is not known.
fn at_path(guest: &dyn Inspectable, pattern: &ProbePattern) -> Option<UserMatches> {
    let found = search(guest, |system, unpatched| match uprobe::is_meant(pattern) {
        true => uprobe::find_at_path(system, pattern, unpatched),
        false => usdt::find_at_path(system, pattern, unpatched),
    });
    // Without its bytes, nothing is known of its probes.
    let is_known = |found: &UserMatches| !found.files.is_empty() && found.incomplete.is_empty();
    found.ok()?.ok().filter(is_known)
}

/// Pauses the guest and has `ask` search its files. The second argument of `ask` reads physical
/// memory without any traps.
fn search<T>(
    guest: &dyn Inspectable,
    ask: impl FnOnce(&PausedSystem<'_>, &dyn Fn(Gpa, &mut [u8]) -> bool) -> T,
) -> Result<T, String> {
    let machine = guest.running();
    inspect(guest, |system| {
        let unpatched = |gpa: Gpa, buf: &mut [u8]| match &machine {
            Some(machine) => machine.traps().read_unpatched(gpa, buf).is_ok(),
            // Without a machine there are no traps.
            None => system.kernel().physical().read_physical(gpa, buf).is_ok(),
        };
        ask(&system, &unpatched)
    })
}

/// Returns the reason that a pattern matches none of these files' probes.
pub(crate) fn no_user_probe(pattern: &ProbePattern, found: UserMatches) -> NotFound {
    let named: Vec<&str> = (found.files.iter().take(NAMED_FILES))
        .map(String::as_str)
        .collect();
    let named = named.join(", ");
    let (module, function) = (&pattern.module, &pattern.function);
    let why = match (usdt::is_meant(pattern), found.files.is_empty()) {
        (true, _) if !usdt::has_file(pattern) => {
            "no program or library that a process has mapped has such a static probe".to_owned()
        }
        (true, true) => "no process has such a program or library mapped; see maps".to_owned(),
        (true, false) => format!("no such static probe in {named}"),
        (false, true) => {
            format!("no process has a program or library {module:?} mapped; see maps")
        }
        (false, false) if ProbePattern::is_exact(function) => {
            format!("no function {function:?} in {named}")
        }
        (false, false) => format!("no such functions in {named}"),
    };
    let mut message = format!("{pattern}: {why}");
    for sentence in found.incomplete.iter().take(NAMED_FILES) {
        message += &format!("; {sentence}");
    }
    NotFound {
        message,
        nearest: found.nearest,
    }
}

/// Returns a probe of each kind that a pattern may match in a file which no process has mapped yet.
/// If the guest's memory or disks have the file, these are its probes. Otherwise a part of a name
/// may be a pattern. None of them can be enabled. Returns none if no process can come that has such
/// a probe.
pub fn to_come(guest: &dyn Inspectable, pattern: &ProbePattern) -> Vec<Probe> {
    let is_user = uprobe::is_meant(pattern) || usdt::has_file(pattern);
    if !is_user || !may_come(guest, pattern) {
        return Vec::new();
    }
    match at_path(guest, pattern) {
        Some(known) => known.probes,
        None => file_forms::forms(pattern),
    }
}

/// Returns the probes that a pattern stands for in the file at the path that it names, as far as
/// the guest's memory and disks have it. The file need not be mapped.
pub fn find_at_path(guest: &dyn Inspectable, pattern: &ProbePattern) -> Vec<Probe> {
    let is_user = uprobe::is_meant(pattern) || usdt::has_file(pattern);
    let found = is_user.then(|| at_path(guest, pattern)).flatten();
    found.map_or_else(Vec::new, |found| found.probes)
}

/// Checks whether a pattern's process exists, and has not mapped its file yet. One that does not
/// exist never maps anything.
fn may_come(guest: &dyn Inspectable, pattern: &ProbePattern) -> bool {
    let file = match uprobe::is_meant(pattern) {
        true => &pattern.module,
        false => usdt::file_of(pattern),
    };
    let of_file = in_proc(file).map(|(pid, _)| pid);
    let process = uprobe::process_of(&pattern.provider).or(of_file);
    let exists = inspect(guest, |system| {
        process.is_none_or(|pid| matches!(system.process(pid), Ok(Ok(Some(_)))))
    });
    // A function may be missing in a file that is mapped.
    let whole_file = ProbePattern {
        function: uprobe::WHOLE_FILE.into(),
        ..pattern.clone()
    };
    let any_of_it = match uprobe::is_meant(pattern) {
        true => &whole_file,
        false => pattern,
    };
    exists == Ok(true) && mapped(guest, any_of_it).is_ok_and(|found| found.files.is_empty())
}

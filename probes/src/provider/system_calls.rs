//! Probes of system calls: `syscall:NAME:entry` and `:return`, for every system call of x86-64, at
//! a function that all of them pass.
//!
//! These are the entry and return of `x64_sys_call`, or of `do_syscall_64` in kernels without it.
//! System calls of 32-bit programs take another path and are not included. `exit`, `exit_group` and
//! `rt_sigreturn` do not return to their caller and have no return probe.

use crate::name::{ProbeName, ProbePattern, matches_part};
use crate::probe::{Argument, Moment, Probe, Signature, Target};
use crate::syscall_table::{self, Syscall};

/// The name of the provider.
pub const PROVIDER: &str = "syscall";

/// Passes the probes that match `pattern` to `each`.
pub fn list(pattern: &ProbePattern, each: &mut dyn FnMut(Probe)) {
    if !pattern.matches_provider(PROVIDER) || !matches_part(&pattern.module, "") {
        return;
    }
    let wanted = syscall_table::all()
        .iter()
        .filter(|call| matches_part(&pattern.function, call.name));
    for call in wanted {
        for moment in [Moment::Entry, Moment::Return] {
            if matches_part(&pattern.name, moment.name()) {
                each(probe(call, moment));
            }
        }
    }
}

/// Returns the names of system calls most similar to `name`, best first.
pub(super) fn nearest(name: &str, count: usize) -> Vec<String> {
    let names = syscall_table::nearest_names(name, count).into_iter();
    names.map(str::to_owned).collect()
}

fn probe(call: &Syscall, moment: Moment) -> Probe {
    let arguments = call.arguments.iter().map(|argument| Argument {
        name: argument.name.to_owned(),
        type_name: argument.type_name.to_owned(),
        is_string: argument.is_string(),
        translated: None,
    });
    Probe {
        name: ProbeName::new(PROVIDER, "", call.name, moment.name()),
        signature: Some(Signature {
            arguments: arguments.collect(),
            returns: (moment == Moment::Return).then(|| "long".to_owned()),
        }),
        target: Target::SystemCall {
            number: call.number,
            moment,
        },
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn names(pattern: &str) -> Vec<String> {
        let mut names = Vec::new();
        list(&ProbePattern::parse(pattern).unwrap(), &mut |probe| {
            names.push(probe.name.to_string());
        });
        names
    }

    #[test]
    fn system_calls_are_found_by_name() {
        assert_eq!(
            names("syscall:read"),
            ["syscall::read:entry", "syscall::read:return"]
        );
        assert_eq!(
            names("syscall::openat*:entry"),
            ["syscall::openat:entry", "syscall::openat2:entry"]
        );
        assert!(names("syscall:::").len() > 600);
        assert!(names("syscall:raed").is_empty());
        assert_eq!(nearest("openta", 1), ["openat"]);
    }
}

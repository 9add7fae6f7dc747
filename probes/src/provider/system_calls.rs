//! `syscall::NAME:entry` and `:return`: every system call of x86-64 by its name, seen where all of them pass.
//!
//! That is the entry and the return of `x64_sys_call`, or of `do_syscall_64` in kernels without it. System calls of 32-bit programs go another
//! way and are not among them. exit, exit_group and rt_sigreturn do not come back to their caller and have no return.

use crate::name::{ProbeName, ProbePattern, matches_part};
use crate::probe::{Argument, Moment, Probe, Signature, Target};
use crate::syscall_table::{self, Syscall};

/// Name of the provider.
pub const PROVIDER: &str = "syscall";

/// Gives the probes that match `pattern` to `each`.
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

/// Names that look like one of a system call, best first.
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

//! The names of probes as bpftrace writes them: `kretprobe:vfs_read`,
//! `tracepoint:syscalls:sys_enter_openat`, `fentry:vmlinux:vfs_read`.
//!
//! They are read as DTrace's four parts, and a script's `probe` shows them as they were written.
//! Forms that mean something else as parts, such as `kprobe:vfs_read:return`, stay parts.

use super::{ProbeName, matches_part, offset};

/// Provider, module, function and name of a pattern.
type Parts<'t> = [&'t str; 4];

// The providers and the kernel's own module, as [`provider`](crate::provider) names them.
const KPROBE: &str = "kprobe";
const KERNEL: &str = "vmlinux";
const SYSCALL: &str = "syscall";
const TRACEPOINT: &str = "tracepoint";
const UPROBE: &str = "uprobe";
const WATCHPOINT: &str = "watchpoint";

/// The start of the names of events at which system calls are entered.
const SYS_ENTER: &str = "sys_enter_";
/// The start of the names of events at which they return.
const SYS_EXIT: &str = "sys_exit_";

/// Returns the four parts of a name of bpftrace; `None` if it is none.
pub(crate) fn parts<'t>(parts: &[&'t str]) -> Option<Parts<'t>> {
    match *parts {
        [provider, ref rest @ ..] if let Some(moment) = kernel_moment(provider) => {
            of_kernel(provider, moment, rest)
        }
        ["uprobe" | "u", file, function] => Some(of_file("uprobe", file, function, "entry")),
        ["uretprobe" | "ur", file, function] => Some(["uprobe", file, function, "return"]),
        ["tracepoint" | "t", "syscalls", event] => of_system_call(event),
        ["tracepoint" | "t", "raw_syscalls", "sys_enter"] => Some([SYSCALL, "", "*", "entry"]),
        ["tracepoint" | "t", "raw_syscalls", "sys_exit"] => Some([SYSCALL, "", "*", "return"]),
        ["t", system] => Some(["tracepoint", "", system, ""]),
        ["tracepoint" | "t", system, event] => Some(["tracepoint", "", system, event]),
        ["rawtracepoint" | "rt", event] => Some(["tracepoint", "", "", event]),
        ["rawtracepoint" | "rt", KERNEL, event] => Some(["tracepoint", "", "", event]),
        ["rawtracepoint" | "rt", system, event] => Some(["tracepoint", "", system, event]),
        // One that waits for its program or not: here it does not wait for it in either case.
        ["w" | "asyncwatchpoint" | "aw", address, length, mode] => {
            Some([WATCHPOINT, address, length, mode])
        }
        _ => None,
    }
}

/// Returns the moment of a function that a provider of bpftrace is for.
fn kernel_moment(provider: &str) -> Option<&'static str> {
    match provider {
        "kprobe" | "k" | "fentry" | "f" | "kfunc" => Some("entry"),
        "kretprobe" | "kr" | "fexit" | "fr" | "kretfunc" => Some("return"),
        _ => None,
    }
}

fn of_kernel<'t>(provider: &str, moment: &'static str, rest: &[&'t str]) -> Option<Parts<'t>> {
    let is_own = provider == KPROBE;
    match *rest {
        [function] if moment == "entry" => Some(of_file("kprobe", "", function, moment)),
        [function] => Some(["kprobe", "", function, moment]),
        // The last part may be the name, as in `kprobe:vfs_read:return`.
        [_, last] if is_own && is_moment(last) => None,
        [module, function] => Some(["kprobe", module, function, moment]),
        _ => None,
    }
}

/// Checks whether a name may stand for a moment, or is an offset.
fn is_moment(name: &str) -> bool {
    offset(name).is_some() || ["entry", "return"].iter().any(|of| matches_part(name, of))
}

/// Returns the parts of a function with an offset, `vfs_read+16`, or without.
fn of_file<'t>(
    provider: &'static str,
    module: &'t str,
    function: &'t str,
    moment: &'static str,
) -> Parts<'t> {
    match function.rsplit_once('+') {
        Some((function, at)) if offset(at).is_some() => [provider, module, function, at],
        _ => [provider, module, function, moment],
    }
}

/// Returns the parts of an event of a system call. Its name may be a pattern.
fn of_system_call(event: &str) -> Option<Parts<'_>> {
    let provider = SYSCALL;
    let call = |start| event.strip_prefix(start).map(call_of);
    match (call(SYS_ENTER), call(SYS_EXIT), event) {
        (Some(call), _, _) => Some([provider, "", call, "entry"]),
        (_, Some(call), _) => Some([provider, "", call, "return"]),
        (_, _, "*" | "sys_*") => Some([provider, "", "*", ""]),
        (_, _, "sys_enter*") => Some([provider, "", "*", "entry"]),
        (_, _, "sys_exit*") => Some([provider, "", "*", "return"]),
        _ => None,
    }
}

/// Returns the system call of an event's name. The kernel's own name of some calls is another.
fn call_of(name: &str) -> &str {
    match name {
        "newstat" => "stat",
        "newfstat" => "fstat",
        "newlstat" => "lstat",
        "newuname" => "uname",
        "umount" => "umount2",
        "sendfile64" => "sendfile",
        other => other,
    }
}

/// Returns a probe's name as bpftrace writes it.
#[must_use]
pub fn shown(name: &ProbeName) -> String {
    let ProbeName {
        provider,
        module,
        function,
        name,
    } = name;
    let of_module = |provider: &str| match module.as_str() {
        "" | KERNEL => format!("{provider}:{function}"),
        module => format!("{provider}:{module}:{function}"),
    };
    match (provider.as_str(), name.as_str()) {
        (KPROBE, "entry") => of_module("kprobe"),
        (KPROBE, "return") => of_module("kretprobe"),
        (KPROBE, at) => format!("{}+{at}", of_module("kprobe")),
        (SYSCALL, "entry") => format!("tracepoint:syscalls:{SYS_ENTER}{function}"),
        (SYSCALL, _) => format!("tracepoint:syscalls:{SYS_EXIT}{function}"),
        (TRACEPOINT, event) => format!("tracepoint:{function}:{event}"),
        (UPROBE, "entry") => format!("uprobe:{module}:{function}"),
        (UPROBE, "return") => format!("uretprobe:{module}:{function}"),
        (UPROBE, at) => format!("uprobe:{module}:{function}+{at}"),
        _ if module.is_empty() => format!("{provider}:{function}:{name}"),
        _ => format!("{provider}:{module}:{function}:{name}"),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::super::ProbePattern;
    use super::*;

    #[test]
    fn names_of_bpftrace_are_read_as_parts_and_shown_as_written() {
        for (text, expected, back) in [
            (
                "kprobe:vfs_read",
                "kprobe::vfs_read:entry",
                "kprobe:vfs_read",
            ),
            ("k:vfs_read", "kprobe::vfs_read:entry", "kprobe:vfs_read"),
            (
                "kretprobe:vfs_read",
                "kprobe::vfs_read:return",
                "kretprobe:vfs_read",
            ),
            (
                "kr:brd:brd_init",
                "kprobe:brd:brd_init:return",
                "kretprobe:brd:brd_init",
            ),
            (
                "kprobe:brd:brd_init",
                "kprobe:brd:brd_init:entry",
                "kprobe:brd:brd_init",
            ),
            (
                "kprobe:vfs_read+0x10",
                "kprobe::vfs_read:0x10",
                "kprobe:vfs_read+0x10",
            ),
            (
                "fentry:vfs_read",
                "kprobe::vfs_read:entry",
                "kprobe:vfs_read",
            ),
            (
                "fexit:vmlinux:vfs_read",
                "kprobe:vmlinux:vfs_read:return",
                "kretprobe:vfs_read",
            ),
            ("kfunc:vfs_*", "kprobe::vfs_*:entry", "kprobe:vfs_*"),
            (
                "kretfunc:vfs_read",
                "kprobe::vfs_read:return",
                "kretprobe:vfs_read",
            ),
            (
                "tracepoint:syscalls:sys_enter_openat",
                "syscall::openat:entry",
                "tracepoint:syscalls:sys_enter_openat",
            ),
            (
                "tracepoint:syscalls:sys_enter_newstat",
                "syscall::stat:entry",
                "tracepoint:syscalls:sys_enter_stat",
            ),
            (
                "t:syscalls:sys_exit_*",
                "syscall::*:return",
                "tracepoint:syscalls:sys_exit_*",
            ),
            (
                "tracepoint:raw_syscalls:sys_enter",
                "syscall::*:entry",
                "tracepoint:syscalls:sys_enter_*",
            ),
            (
                "tracepoint:sched:sched_switch",
                "tracepoint::sched:sched_switch",
                "tracepoint:sched:sched_switch",
            ),
            (
                "rt:sched_switch",
                "tracepoint:::sched_switch",
                "tracepoint::sched_switch",
            ),
            (
                "uprobe:/bin/sh:main",
                "uprobe:/bin/sh:main:entry",
                "uprobe:/bin/sh:main",
            ),
            ("u:sh:main+16", "uprobe:sh:main:16", "uprobe:sh:main+16"),
            (
                "ur:/bin/sh:main",
                "uprobe:/bin/sh:main:return",
                "uretprobe:/bin/sh:main",
            ),
            (
                "asyncwatchpoint:jiffies_64:8:w",
                "watchpoint:jiffies_64:8:w",
                "watchpoint:jiffies_64:8:w",
            ),
            (
                "w:0xffffffff82000000:4:rw",
                "watchpoint:0xffffffff82000000:4:rw",
                "watchpoint:0xffffffff82000000:4:rw",
            ),
        ] {
            let pattern = ProbePattern::parse(text).unwrap();
            assert!(pattern.is_foreign, "{text}");
            let name = ProbeName::new(
                &pattern.provider,
                &pattern.module,
                &pattern.function,
                &pattern.name,
            );
            assert_eq!(name.to_string(), expected, "{text}");
            assert_eq!(shown(&name), back, "{text}");
        }
        for own in [
            "kprobe:vfs_read:return",
            "kprobe:vfs_read:0x10",
            "syscall:::",
            "vfs_read",
        ] {
            assert!(!ProbePattern::parse(own).unwrap().is_foreign, "{own}");
        }
    }
}

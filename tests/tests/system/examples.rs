//! The library's examples, each on a guest: what they show is what embedders begin with.

use support::{Kernel, host, shell};

#[allow(dead_code)]
#[path = "../../../cli/examples/boot.rs"]
mod boot;
#[allow(dead_code)]
#[path = "../../../cli/examples/expect.rs"]
mod expect;
#[allow(dead_code)]
#[path = "../../../cli/examples/inspect.rs"]
mod inspect;
#[allow(dead_code)]
#[path = "../../../cli/examples/script.rs"]
mod script;
#[allow(dead_code)]
#[path = "../../../cli/examples/trace.rs"]
mod trace;

#[test]
fn boot_shows_the_console_and_the_text() {
    let _host = host!();
    let folder = tempfile::tempdir().unwrap_or_else(|e| panic!("{e}"));
    let initramfs = folder.path().join("initramfs");
    std::fs::write(&initramfs, shell::full_initramfs()).unwrap_or_else(|e| panic!("{e}"));
    boot::run(&Kernel::small().reference.path, &initramfs).unwrap_or_else(|e| panic!("{e}"));
}

#[test]
fn trace_shows_ten_calls() {
    let host = host!();
    let seen = trace::run(shell::snapshot_folder(host), "do_filp_open");
    assert_eq!(seen.unwrap_or_else(|e| panic!("{e}")), 10);
}

#[test]
fn script_counts_the_calls_of_a_command() {
    let host = host!();
    let output = script::run(shell::snapshot_folder(host));
    let output = output.unwrap_or_else(|e| panic!("{e}"));
    assert!(output.contains("@[cat, openat]"), "{output}");
}

#[test]
fn inspect_lists_processes() {
    let host = host!();
    let count = inspect::run(shell::snapshot_folder(host)).unwrap_or_else(|e| panic!("{e}"));
    assert!(count > 2, "init, kthreadd and the shell: {count}");
}

#[test]
fn expect_finds_what_the_command_did() {
    let host = host!();
    let verdicts = expect::run(shell::snapshot_folder(host));
    let verdicts = verdicts.unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(verdicts.len(), 2);
    assert!(verdicts.iter().all(|verdict| verdict.holds), "{verdicts:?}");
}

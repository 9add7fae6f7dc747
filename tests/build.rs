//! Says at the start of the first build of the tests what they are about to build, and how long
//! that takes: the rest of the workspace compiles for minutes before the first test could.
//!
//! The places of the cache are those of `guest::cache`, which is compiled after this.

use std::path::PathBuf;

fn main() {
    let variables = ["EXOTRACE_CACHE", "XDG_CACHE_HOME", "HOME"];
    for variable in variables {
        println!("cargo::rerun-if-env-changed={variable}");
    }
    let [own, shared, home] =
        variables.map(|name| std::env::var_os(name).filter(|value| !value.is_empty()));
    let cache = own
        .map(PathBuf::from)
        .or_else(|| shared.map(|path| PathBuf::from(path).join("exotrace")))
        .or_else(|| home.map(|path| PathBuf::from(path).join(".cache/exotrace")));
    let Some(cache) = cache else { return };
    let has = |prefix: &str| {
        let entries = std::fs::read_dir(&cache).into_iter().flatten().flatten();
        entries
            .filter_map(|entry| entry.file_name().into_string().ok())
            .any(|name| name.starts_with(prefix))
    };
    let missing: Vec<&str> = [
        (
            "kernel-small-",
            "a small Linux kernel (4 minutes on two cores)",
        ),
        ("kernel-rich-", "a Linux kernel with modules (10 minutes)"),
        (
            "kernel-pc-",
            "a small Linux kernel with a PCI bus (5 minutes)",
        ),
    ]
    .into_iter()
    .filter_map(|(prefix, what)| (!has(prefix)).then_some(what))
    .collect();
    if !missing.is_empty() {
        // A file that is never there: asked again until the kernels are.
        println!("cargo::rerun-if-changed=first-run");
        println!(
            "cargo::warning=the first run of the tests compiles for some 5 minutes, then builds {}, \
             and boots each of its guests once; kept in {}",
            missing.join(", "),
            cache.display()
        );
    }
    if !PathBuf::from("/dev/kvm").exists() {
        println!("cargo::rerun-if-changed=/dev/kvm");
        println!(
            "cargo::warning=no /dev/kvm here: the tests that need it will fail; set EXOTRACE_NO_KVM=1 to leave them out"
        );
    }
}

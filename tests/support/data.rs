//! Files that tests read, found when the test runs.
//!
//! `EXOTRACE_TEST_DATA` names a folder for test programs that run elsewhere than where they were built: it
//! mirrors the source tree, `built` in it has the programs that tests compile otherwise, and `debian` the files
//! of packages that they fetch otherwise. The example `test-data` makes one. Without the variable it is the
//! source tree as it was at build time.
//!
//! This file is included by the tests of several crates, so that there is one such place.
#![allow(dead_code, reason = "each test program uses a part of it")]

use std::path::{Path, PathBuf};

/// Environment variable that names the folder.
const VARIABLE: &str = "EXOTRACE_TEST_DATA";

/// Returns where a file or folder of the source tree is; `path` is relative to the tree's root.
pub fn source(path: &str) -> PathBuf {
    folder().unwrap_or_else(tree).join(path)
}

/// Returns a program that was compiled beforehand; `None` where the test is to compile it.
///
/// # Panics
/// If the folder is there and the program is not.
pub fn built(name: &str) -> Option<PathBuf> {
    shipped(&format!("built/{name}"))
}

/// Returns something that was shipped for the tests; `None` where they are to make or fetch it.
///
/// # Panics
/// If the folder is there and the thing is not.
pub fn shipped(path: &str) -> Option<PathBuf> {
    let thing = folder()?.join(path);
    assert!(
        thing.exists(),
        "{} is missing; {VARIABLE} must name a folder as the example test-data makes it",
        thing.display()
    );
    Some(thing)
}

/// Returns whether the test runs elsewhere than where it was built.
pub fn is_elsewhere() -> bool {
    folder().is_some()
}

fn folder() -> Option<PathBuf> {
    std::env::var_os(VARIABLE).map(PathBuf::from)
}

fn tree() -> PathBuf {
    let own = Path::new(env!("CARGO_MANIFEST_DIR"));
    let root = own.ancestors().find(|at| at.join("Cargo.lock").is_file());
    root.unwrap_or(own).to_path_buf()
}

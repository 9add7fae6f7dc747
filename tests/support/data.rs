//! Finds the files that tests read, at run time.
//!
//! `EXOTRACE_TEST_DATA` names a folder for test programs that run on another machine than they were
//! built on. It mirrors the source tree. Its `built` has the programs that tests otherwise compile.
//! Its `debian` has the files of packages that they otherwise fetch. The example `test-data` makes
//! such a folder. Without the variable, the folder is the source tree as it was at build time.
//!
//! The tests of several crates include this file, so that this is decided in one place.
#![allow(dead_code, reason = "each test program uses a part of it")]

use std::path::{Path, PathBuf};

/// The environment variable that names the folder.
const VARIABLE: &str = "EXOTRACE_TEST_DATA";

/// Returns the path of a file or folder of the source tree; `path` is relative to the tree's root.
pub fn source(path: &str) -> PathBuf {
    folder().unwrap_or_else(tree).join(path)
}

/// Returns a program that was compiled beforehand; `None` if the test is to compile it.
///
/// # Panics
/// If the folder exists and the program does not.
pub fn built(name: &str) -> Option<PathBuf> {
    shipped(&format!("built/{name}"))
}

/// Returns a file that was shipped for the tests; `None` if they are to make or fetch it.
///
/// # Panics
/// If the folder exists and the file does not.
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

//! A guest with the small kernel and Debian's strace: a second opinion about system calls, from
//! within.
//!
//! It is booted once and kept in the cache, as the shell (`shell.rs`) is. The packages are fetched
//! without being installed, or were shipped.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use guest::Terminal;
use guest::build::debian;
use guest::build::initramfs::ExtraFile;

use crate::data;
use crate::host::{Host, cache};
use crate::kernel::Kernel;
use crate::shell::{self, Parts, Shell};

/// The name of the cache's entries and lock.
const TOPIC: &str = "tests-strace";
/// Packages, and their files that strace needs. The C library is in the guest anyway.
const FILES: [(&str, &[&str]); 3] = [
    ("strace", &["usr/bin/strace"]),
    (
        "libunwind8",
        &[
            "usr/lib/x86_64-linux-gnu/libunwind-ptrace.so.0",
            "usr/lib/x86_64-linux-gnu/libunwind-x86_64.so.8",
            "usr/lib/x86_64-linux-gnu/libunwind.so.8",
        ],
    ),
    ("liblzma5", &["lib/x86_64-linux-gnu/liblzma.so.5"]),
];

/// Restores a running copy of the guest.
///
/// # Panics
/// If it cannot be made or restored.
pub fn guest(host: &Host) -> Shell {
    Shell::restore(host, Kernel::small(), snapshot_folder(host))
}

fn snapshot_folder(host: &Host) -> &'static Path {
    // The guest's parts do not change while a process tests it.
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| Parts::small(shell::full_initramfs_with(files())).kept(host, TOPIC))
}

/// Returns strace and its libraries, at the paths where the dynamic linker searches for them.
fn files() -> Vec<ExtraFile> {
    let mut files = Vec::new();
    for (package, paths) in FILES {
        let folder = data::shipped(&shipped_as(package));
        let folder = folder.unwrap_or_else(|| fetched(package));
        for path in paths {
            let content = fs::read(folder.join(path));
            let content = content.unwrap_or_else(|e| panic!("{package}: {path}: {e}"));
            let path = path.strip_prefix("usr/").unwrap_or(path);
            files.push(ExtraFile {
                path: path.to_owned(),
                mode: 0o755,
                content,
            });
        }
    }
    files
}

/// Copies the packages' files into `folder`, for tests on another machine: see [`data`].
///
/// # Errors
/// If one cannot be copied.
///
/// # Panics
/// If a package cannot be fetched.
pub(crate) fn ship(folder: &Path) -> io::Result<()> {
    for (package, paths) in FILES {
        let (from, to) = (fetched(package), folder.join(shipped_as(package)));
        for path in paths {
            let target = to.join(path);
            fs::create_dir_all(target.parent().unwrap_or(&to))?;
            fs::copy(from.join(path), target)?;
        }
    }
    Ok(())
}

/// Returns the path of a package in the folder for another machine.
fn shipped_as(package: &str) -> String {
    format!("debian/{package}")
}

fn fetched(package: &str) -> PathBuf {
    debian::fetch(package, &cache(), &Terminal::new()).unwrap_or_else(|e| panic!("{e}"))
}

//! Initramfs archives for all of this crate's kernels, uncompressed because the two built here have
//! no decompressor.
//!
//! * [`tiny`]: the programs of this crate, some 20 kB. Its shell only runs programs by name.
//! * [`full`]: the same with Debian's busybox, 2 MB; unpacking that costs 1.6 s where kernel code
//!   is interpreted.
//!
//! Both have the same `init`. It prints `exotrace: ready` and runs the program behind `--` on the
//! kernel command line (`-- fsload 100`), or a shell, on the serial port. It resets the machine
//! when that ends.

use std::fs;
use std::path::PathBuf;

pub use crate::build::cpio::ExtraFile;
use crate::build::cpio::{Archive, ArchiveError, Node};
use crate::build::debian::{self, DebianError};
use crate::build::dynamic;
use crate::build::make_error::MakeError;
use crate::build::packages;
use crate::build::programs::{self, Programs};
use crate::cache::{Cache, CacheError, failed};
use crate::progress::Progress;

/// An initramfs could not be made.
#[derive(Debug, thiserror::Error)]
pub enum InitramfsError {
    /// The programs could not be compiled.
    #[error(transparent)]
    Programs(#[from] MakeError),
    /// A given file cannot be in the archive.
    #[error(transparent)]
    Archive(#[from] ArchiveError),
    /// A file could not be read.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// busybox could not be fetched.
    #[error(transparent)]
    Debian(#[from] DebianError),
}

/// Directories that `init` mounts on, and what else should be there.
const DIRECTORIES: [&str; 7] = ["bin", "dev", "etc", "proc", "root", "sys", "tmp"];

/// The programs that a guest has only if they are given as extra files: those that test a machine's
/// limits, and one for sockets that few kernels here have.
const APART: [&str; 4] = ["alarms", "queues", "twins", "vsock"];

/// The commands of busybox that get a link. Each link costs the guest a file at boot, so not all
/// 270 do.
const APPLETS: [&str; 49] = [
    "sh", "ash", "awk", "basename", "cat", "chmod", "clear", "cp", "cut", "date", "dd", "df",
    "dmesg", "echo", "env", "false", "find", "free", "grep", "head", "hexdump", "id", "insmod",
    "kill", "ln", "ls", "lsmod", "mkdir", "mknod", "mount", "mv", "ps", "pwd", "reboot", "rm",
    "rmdir", "rmmod", "sed", "seq", "sleep", "stat", "stty", "sync", "tail", "time", "touch",
    "true", "umount", "wc",
];

/// Returns an archive with the crate's programs and a shell that runs them by name.
///
/// # Errors
/// If the programs cannot be compiled, or a path of `extra` is wrong.
pub fn tiny(
    cache: &Cache,
    extra: &[ExtraFile],
    progress: &dyn Progress,
) -> Result<Vec<u8>, InitramfsError> {
    let programs = programs::build(cache, progress)?;
    let mut archive = skeleton(&programs)?;
    for name in usual() {
        archive = add_program(archive, &programs, name)?;
    }
    Ok(add_extra(archive, extra).finish()?)
}

/// Returns an archive with busybox and a real shell, the crate's workloads, and its programs that
/// use the C library.
///
/// # Errors
/// As for [`tiny`]; and if busybox is neither installed nor can be fetched.
pub fn full(
    cache: &Cache,
    extra: &[ExtraFile],
    progress: &dyn Progress,
) -> Result<Vec<u8>, InitramfsError> {
    let programs = programs::build(cache, progress)?;
    let busybox = busybox(cache, progress)?;
    let content = fs::read(&busybox).map_err(failed("read", &busybox))?;
    let mut archive = skeleton(&programs)?.file("bin/busybox", 0o755, &content);
    for applet in APPLETS {
        archive = archive.symlink(&format!("bin/{applet}"), "busybox");
    }
    for name in usual().filter(|name| !APPLETS.contains(name)) {
        archive = add_program(archive, &programs, name)?;
    }
    let dynamic = dynamic::files(cache, progress)?;
    let given = |file: &&ExtraFile| !extra.iter().any(|other| other.path == file.path);
    let dynamic: Vec<ExtraFile> = dynamic.iter().filter(given).cloned().collect();
    Ok(add_extra(add_extra(archive, &dynamic), extra).finish()?)
}

/// Returns the programs that every guest has besides `init`: their bytes cost each boot time.
fn usual() -> impl Iterator<Item = &'static str> {
    Programs::names().filter(|name| *name != "init" && !APART.contains(name))
}

/// Adds directories, the console that the kernel opens for `init` before anything is mounted, and
/// `init`.
fn skeleton(programs: &Programs) -> Result<Archive, InitramfsError> {
    let mut archive = Archive::new();
    for directory in DIRECTORIES {
        archive = archive.dir(directory);
    }
    let console = Node::Character { major: 5, minor: 1 };
    archive = archive.node("dev/console", 0o600, console);
    let path = programs.path("init");
    let init = fs::read(&path).map_err(failed("read", &path))?;
    Ok(archive.file("init", 0o755, &init))
}

fn add_program(
    archive: Archive,
    programs: &Programs,
    name: &str,
) -> Result<Archive, InitramfsError> {
    let path = programs.path(name);
    let content = fs::read(&path).map_err(failed("read", &path))?;
    Ok(archive.file(&format!("bin/{name}"), 0o755, &content))
}

fn add_extra(archive: Archive, extra: &[ExtraFile]) -> Archive {
    extra.iter().fold(archive, |archive, file| {
        archive.file(&file.path, file.mode, &file.content)
    })
}

/// Returns Debian's static busybox: the installed one, else the one in the package, fetched without
/// installing.
fn busybox(cache: &Cache, progress: &dyn Progress) -> Result<PathBuf, InitramfsError> {
    const PACKAGE: &str = "busybox-static";
    let installed = PathBuf::from("/bin/busybox");
    // Without dpkg, a cache that was made elsewhere still works.
    let version = packages::version(PACKAGE).unwrap_or_default();
    if version.is_some() && installed.is_file() {
        return Ok(installed);
    }
    let directory = debian::fetch(PACKAGE, cache, progress)?;
    let places = ["bin/busybox", "usr/bin/busybox"].map(|place| directory.join(place));
    let found = places.into_iter().find(|path| path.is_file());
    Ok(found.ok_or_else(|| DebianError::Contents {
        package: PACKAGE.to_owned(),
        what: "bin/busybox",
        directory,
    })?)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::progress::Silent;
    use std::process::{Command, Stdio};

    fn names(archive: &[u8]) -> Vec<String> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("archive");
        fs::write(&path, archive).unwrap();
        let output = Command::new("cpio")
            .args(["-it", "--quiet"])
            .stdin(Stdio::from(fs::File::open(&path).unwrap()))
            .output()
            .unwrap();
        assert!(output.status.success());
        let text = String::from_utf8(output.stdout).unwrap();
        text.lines().map(str::to_owned).collect()
    }

    #[test]
    fn the_tiny_one_is_small_and_has_init_console_and_programs() {
        let directory = tempfile::tempdir().unwrap();
        let cache = Cache::at(directory.path()).unwrap();
        let extra = ExtraFile {
            path: "lib/brd.ko".to_owned(),
            mode: 0o644,
            content: b"module".to_vec(),
        };
        let archive = tiny(&cache, &[extra], &Silent).unwrap();
        assert!(archive.len() < 32 * 1024, "{} bytes", archive.len());
        let names = names(&archive);
        for name in [
            "init",
            "dev/console",
            "bin/sh",
            "bin/fsload",
            "proc",
            "tmp",
            "lib/brd.ko",
        ] {
            assert!(
                names.iter().any(|n| n == name),
                "{name} is not in {names:?}"
            );
        }
        assert!(!names.iter().any(|n| n == "bin/init"));
    }

    #[test]
    fn the_full_one_has_a_real_shell_and_the_workloads_once() {
        let directory = tempfile::tempdir().unwrap();
        let cache = Cache::at(directory.path()).unwrap();
        let archive = full(&cache, &[], &Silent).unwrap();
        let names = names(&archive);
        for name in [
            "init",
            "bin/busybox",
            "bin/sh",
            "bin/ls",
            "bin/fsload",
            "bin/syscount",
        ] {
            assert_eq!(names.iter().filter(|n| *n == name).count(), 1, "{name}");
        }
    }

    #[test]
    fn a_wrong_extra_path_is_named() {
        let directory = tempfile::tempdir().unwrap();
        let cache = Cache::at(directory.path()).unwrap();
        let extra = ExtraFile {
            path: "/etc/x".to_owned(),
            mode: 0o644,
            content: Vec::new(),
        };
        let error = tiny(&cache, &[extra], &Silent).unwrap_err();
        assert!(error.to_string().contains("\"/etc/x\""), "{error}");
    }
}

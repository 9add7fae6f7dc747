//! Guest programs that are linked with the C library, and the library itself: Debian's, from the
//! machine that builds them.
//!
//! The caller puts [`files`] into an initramfs. Unlike the small programs
//! ([`crate::build::programs`]) these are like users' programs: position-independent, loaded by
//! ld.so, without frame pointers, unwound by `.eh_frame`.

use std::fs;
use std::path::{Path, PathBuf};

use crate::build::compile::Batch;
use crate::build::cpio::ExtraFile;
use crate::build::make_error::MakeError;
use crate::cache::{Cache, failed};
use crate::progress::Progress;

/// The name and source of each program.
const SOURCES: [(&str, &str); 6] = [
    ("workers", include_str!("../../programs/dynamic/workers.c")),
    ("allocs", include_str!("../../programs/dynamic/allocs.c")),
    ("statics", include_str!("../../programs/dynamic/statics.c")),
    ("throws", include_str!("../../programs/dynamic/throws.c")),
    ("states", include_str!("../../programs/dynamic/states.c")),
    (
        "debugged",
        include_str!("../../programs/dynamic/debugged.c"),
    ),
];
/// The flags of gcc: as Debian's packages are built, symbols kept.
const FLAGS: [&str; 6] = [
    "-Wall",
    "-Werror",
    "-O2",
    "-fomit-frame-pointer",
    "-fPIE",
    "-pie",
];
const BATCH: Batch = Batch {
    name: "dynamic-programs",
    sources: &SOURCES,
    headers: &[],
    flags: &FLAGS,
    packages: &["gcc", "libc6-dev"],
    phase: "compiling the guest programs that use the C library",
};
/// The program interpreter that gcc names in the programs, and the library that they need.
const LIBRARIES: [&str; 2] = [
    "lib64/ld-linux-x86-64.so.2",
    "lib/x86_64-linux-gnu/libc.so.6",
];

/// Returns the folder of the programs, a cache entry that is made if it is missing.
///
/// # Errors
/// If gcc or the C library's headers are missing and cannot be installed, or gcc fails.
pub fn build(cache: &Cache, progress: &dyn Progress) -> Result<PathBuf, MakeError> {
    BATCH.build(cache, progress)
}

/// Returns the programs under `bin/` and the libraries at the paths where the programs look for
/// them, compiled if they are not in the cache yet.
///
/// # Errors
/// If gcc or the C library's headers are missing and cannot be installed, or gcc fails.
pub fn files(cache: &Cache, progress: &dyn Progress) -> Result<Vec<ExtraFile>, MakeError> {
    let directory = build(cache, progress)?;
    let read = |path: &Path| fs::read(path).map_err(failed("read", path));
    let mut files = Vec::new();
    for (program, _) in SOURCES {
        files.push(ExtraFile {
            path: format!("bin/{program}"),
            mode: 0o755,
            content: read(&directory.join(program))?,
        });
    }
    for library in LIBRARIES {
        files.push(ExtraFile {
            path: library.to_owned(),
            mode: 0o755,
            content: read(&Path::new("/").join(library))?,
        });
    }
    Ok(files)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::progress::Silent;
    use std::io::{BufRead, BufReader};
    use std::process::{Command, Stdio};

    /// Checks on the host: static probes do nothing without a listener, and exceptions need no
    /// handler.
    #[test]
    fn programs_do_their_rounds_and_say_so() {
        let directory = tempfile::tempdir().unwrap();
        let cache = Cache::at(directory.path()).unwrap();
        files(&cache, &Silent).unwrap();
        for (program, arguments, last) in [
            (
                "statics",
                ["3", "0"],
                "statics: 3 rounds, 0 guarded by 0, 0 quiet by 0",
            ),
            ("throws", ["5", "0"], "throws: 5 exceptions"),
            (
                "states",
                ["2", "0"],
                "states: 4 traps, sum 2.50, 2 exceptions with code 3, quotient inf",
            ),
        ] {
            let path = directory.path().join(BATCH.entry_name()).join(program);
            let output = Command::new(&path).args(arguments).output().unwrap();
            let printed = String::from_utf8(output.stdout).unwrap();
            assert!(output.status.success(), "{program}: {printed}");
            assert_eq!(printed.lines().last(), Some(last));
        }
    }

    /// Checks on the host, too.
    #[test]
    fn workers_stand_where_they_are_told() {
        let directory = tempfile::tempdir().unwrap();
        let cache = Cache::at(directory.path()).unwrap();
        let files = files(&cache, &Silent).unwrap();
        let path = directory.path().join(BATCH.entry_name()).join("workers");
        assert_eq!(files[0].content, fs::read(&path).unwrap());
        for file in &files[SOURCES.len()..] {
            assert_eq!(&file.content[..4], b"\x7fELF", "{}", file.path);
        }
        let mut child = Command::new(&path)
            .arg("3")
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        let output = child.stdout.take().unwrap();
        BufReader::new(output).read_line(&mut line).unwrap();
        assert_eq!(line, format!("workers: {}\n", child.id()));
        let tasks = fs::read_dir(format!("/proc/{}/task", child.id())).unwrap();
        let mut names: Vec<String> = tasks
            .map(|task| fs::read_to_string(task.unwrap().path().join("comm")).unwrap())
            .collect();
        child.kill().unwrap();
        child.wait().unwrap();
        names.sort();
        assert_eq!(
            names,
            ["worker-0\n", "worker-1\n", "worker-2\n", "workers\n"]
        );
    }
}

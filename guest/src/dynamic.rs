//! Guest programs that are linked with the C library, and the library itself: Debian's, from the machine that builds them.
//!
//! The caller puts [`files`] into an initramfs. Unlike the small programs ([`crate::programs`]) these are what users run:
//! position-independent, loaded by ld.so, without frame pointers, unwound by `.eh_frame`.

use std::fs;
use std::path::Path;
use std::process::Command;

use crate::cache::{Cache, failed, made_from};
use crate::command;
use crate::initramfs::ExtraFile;
use crate::packages;
use crate::programs::ProgramsError;
use crate::progress::Progress;

/// Name and source of each.
const SOURCES: [(&str, &str); 1] = [("workers", include_str!("../programs/dynamic/workers.c"))];
/// What gcc is told: as Debian's packages are built, symbols kept.
const FLAGS: [&str; 6] = [
    "-Wall",
    "-Werror",
    "-O2",
    "-fomit-frame-pointer",
    "-fPIE",
    "-pie",
];
/// The program interpreter that gcc names in the programs, and the library they need.
const LIBRARIES: [&str; 2] = [
    "lib64/ld-linux-x86-64.so.2",
    "lib/x86_64-linux-gnu/libc.so.6",
];

/// The programs under `bin/` and the libraries where the programs look for them, compiled if they are not in the cache yet.
///
/// # Errors
/// If gcc or the C library's headers are missing and cannot be installed, or gcc fails.
pub fn files(cache: &Cache, progress: &dyn Progress) -> Result<Vec<ExtraFile>, ProgramsError> {
    let name = entry_name();
    let directory = match cache.entry(&name) {
        Some(directory) => directory,
        None => build(cache, &name, progress)?,
    };
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

fn build(
    cache: &Cache,
    name: &str,
    progress: &dyn Progress,
) -> Result<std::path::PathBuf, ProgramsError> {
    let lock = cache.lock("dynamic-programs", progress)?;
    if let Some(directory) = cache.entry(name) {
        return Ok(directory);
    }
    let log = cache.root().join("dynamic-programs.log");
    // a log is of one build
    let _ = fs::remove_file(&log);
    packages::require(&["gcc", "libc6-dev"], &log, progress)?;
    progress.phase("compiling the guest programs that use the C library");
    let scratch = cache.scratch("dynamic-programs", &lock)?;
    let out = scratch.path().join("out");
    fs::create_dir(&out).map_err(failed("make the directory", &out))?;
    for (program, text) in SOURCES {
        let source = scratch.path().join(program).with_extension("c");
        fs::write(&source, text).map_err(failed("write", &source))?;
        let mut gcc = Command::new("gcc");
        gcc.args(FLAGS)
            .arg("-o")
            .arg(out.join(program))
            .arg(&source);
        command::run(&format!("gcc {program}.c"), &mut gcc, &log, |_| {})?;
    }
    Ok(cache.publish(&out, name)?)
}

/// The cache entry's name, which changes with every source and flag.
fn entry_name() -> String {
    format!("dynamic-programs-{}", made_from(&SOURCES, &FLAGS))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::progress::Silent;
    use std::io::{BufRead, BufReader};
    use std::process::Stdio;

    /// They run on the host as well.
    #[test]
    fn workers_stand_where_they_are_told() {
        let directory = tempfile::tempdir().unwrap();
        let cache = Cache::at(directory.path()).unwrap();
        let files = files(&cache, &Silent).unwrap();
        let path = directory.path().join(entry_name()).join("workers");
        assert_eq!(files[0].content, fs::read(&path).unwrap());
        for file in &files[1..] {
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

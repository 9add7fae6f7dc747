//! A guest with programs in C, C++, Rust and Go that crash in a thread, and the same programs on
//! this machine, where gdb(1) shows the stack that is expected.
//!
//! The programs are compiled once, and the guest is booted once; both are kept in the cache.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use guest::build::initramfs::ExtraFile;
use sha2::{Digest, Sha256};

use crate::host::Host;
use crate::kept::kept;
use crate::shell::{self, Parts};

/// The names of the cache's entries and locks.
const TOPIC: &str = "tests-crashes";
const PROGRAMS_TOPIC: &str = "tests-crash-programs";

/// A program: its name, its source, and the compiler with its flags.
#[derive(Debug, Clone, Copy)]
pub struct Program {
    /// Its name.
    pub name: &'static str,
    file: &'static str,
    source: &'static str,
    compiler: &'static str,
    flags: &'static [&'static str],
}

/// The programs. They print `crash: ready`, and crash when they read a 2.
pub const PROGRAMS: [Program; 4] = [
    Program {
        name: "crash-c",
        file: "crash-c.c",
        source: include_str!("crashes/crash-c.c"),
        compiler: "gcc",
        flags: &["-g", "-O1", "-pthread"],
    },
    Program {
        name: "crash-cpp",
        file: "crash-cpp.cpp",
        source: include_str!("crashes/crash-cpp.cpp"),
        compiler: "g++",
        flags: &["-g", "-O1", "-pthread"],
    },
    Program {
        name: "crash-rust",
        file: "crash-rust.rs",
        source: include_str!("crashes/crash-rust.rs"),
        compiler: "rustc",
        flags: &["-g", "-Copt-level=1"],
    },
    Program {
        name: "crash-go",
        file: "crash-go.go",
        source: include_str!("crashes/crash-go.go"),
        compiler: "go",
        flags: &["build"],
    },
];
/// The libraries that they need besides those of all guests, in the folder of this machine and of
/// the guest.
const LIBRARIES: [&str; 3] = ["libstdc++.so.6", "libgcc_s.so.1", "libm.so.6"];
const LIBRARY_FOLDER: &str = "lib/x86_64-linux-gnu";

/// Returns the folder of the snapshot; the guest is booted if there is none yet.
///
/// # Panics
/// If it cannot be made.
pub fn snapshot_folder(host: &Host) -> &'static Path {
    // The guest's parts do not change while a process tests it.
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| Parts::small(shell::full_initramfs_with(files())).kept(host, TOPIC))
}

/// Returns the folder of the programs.
///
/// # Panics
/// If they cannot be compiled.
pub fn programs() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let mut hash = Sha256::new();
        for program in PROGRAMS {
            hash.update(program.source);
            program.flags.iter().for_each(|flag| hash.update(flag));
        }
        kept(PROGRAMS_TOPIC, &guest::short(hash), compile)
    })
}

/// Compiles the programs into the new `folder`.
fn compile(folder: &Path) {
    let done = |what: std::io::Result<()>| what.unwrap_or_else(|e| panic!("{folder:?}: {e}"));
    done(fs::create_dir(folder));
    for program in PROGRAMS {
        done(fs::write(folder.join(program.file), program.source));
        let mut compiler = Command::new(program.compiler);
        compiler
            .current_dir(folder)
            .args(program.flags)
            .args(["-o", program.name, program.file]);
        let ran = compiler.output();
        let ran = ran.unwrap_or_else(|e| panic!("{}: {e}", program.compiler));
        assert!(ran.status.success(), "{}: {ran:?}", program.name);
    }
}

fn files() -> Vec<ExtraFile> {
    let own = PROGRAMS.map(|program| {
        let path = format!("bin/{}", program.name);
        (path, programs().join(program.name))
    });
    let libraries = LIBRARIES.map(|library| {
        let path = format!("{LIBRARY_FOLDER}/{library}");
        let here = Path::new("/").join(&path);
        (path, here)
    });
    let all = own.into_iter().chain(libraries);
    let file = |(path, from): (String, PathBuf)| ExtraFile {
        path,
        mode: 0o755,
        content: fs::read(&from).unwrap_or_else(|e| panic!("{}: {e}", from.display())),
    };
    all.map(file).collect()
}

//! Compiles host programs for tests from the tree's C and Rust, and ships them to another machine.

use std::fs;
use std::io;
use std::path::Path;
use std::process::Command;

use crate::data;
use crate::strace;

/// The folders and files of the source tree that tests read at run time.
const READ: [&str; 6] = [
    "cli/examples",
    "introspect/src",
    "probes/devices/dt",
    "probes/bt/src/tests",
    "probes/devices/src/ptrace/render/testdata",
    "tests/support/second_opinion",
];

/// A program that tests compile.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Program {
    /// The client of dt(4) with today's layouts.
    DtClient,
    /// The client of dt(4) with the older layouts.
    OldDtClient,
    /// The example of SDT(9) in C.
    SdtC,
    /// The example of SDT(9) in Rust.
    SdtRust,
    /// A guest's program that loads the kernel for its crash, without libraries.
    CrashLoad,
    /// A guest's program that has pages of a file moved in memory, without libraries.
    Offline,
}

impl Program {
    const ALL: [Self; 6] = [
        Self::DtClient,
        Self::OldDtClient,
        Self::SdtC,
        Self::SdtRust,
        Self::CrashLoad,
        Self::Offline,
    ];

    fn name(self) -> &'static str {
        match self {
            Self::DtClient => "dt-client",
            Self::OldDtClient => "dt-client-old",
            Self::SdtC => "icmp",
            Self::SdtRust => "icmp-rust",
            Self::CrashLoad => "crashload",
            Self::Offline => "offline",
        }
    }

    /// Copies the program to `path` if it was shipped, or compiles it there.
    ///
    /// # Panics
    /// If neither is possible; the message has the compiler's output.
    pub fn make(self, path: &Path) {
        match data::built(self.name()) {
            Some(built) => copied(&built, path),
            None => self.compile(path),
        }
    }

    fn compile(self, path: &Path) {
        match self {
            Self::DtClient => compile_client(path, &[]),
            Self::OldDtClient => compile_client(path, &["-DDT_OLD_ABI"]),
            Self::SdtC => {
                let sdt = data::source("probes/sdt");
                run(Command::new("gcc")
                    .args(["-O2", "-Wall", "-Werror", "-I"])
                    .arg(sdt.join("include"))
                    .arg("-o")
                    .args([path, &sdt.join("examples/icmp.c")]));
            }
            Self::CrashLoad => compile_alone(path, "tests/support/kdump/crashload.c"),
            Self::Offline => compile_alone(path, "tests/support/rich/offline.c"),
            Self::SdtRust => {
                let folder = tempfile::tempdir().unwrap_or_else(|e| panic!("{e}"));
                run(Command::new(env!("CARGO"))
                    .args(["build", "--quiet", "--package", "exotrace-sdt"])
                    .args(["--example", "icmp", "--target-dir"])
                    .arg(folder.path())
                    .current_dir(data::source("")));
                copied(&folder.path().join("debug/examples/icmp"), path);
            }
        }
    }
}

/// Fills `folder` with the files that tests on another machine need: see [`data`].
///
/// # Errors
/// If something cannot be read or written.
///
/// # Panics
/// If a program cannot be compiled or a package not be fetched.
pub fn ship(folder: &Path) -> io::Result<()> {
    for path in READ {
        copy_tree(&data::source(path), &folder.join(path))?;
    }
    let built = folder.join("built");
    fs::create_dir_all(&built)?;
    for program in Program::ALL {
        program.compile(&built.join(program.name()));
    }
    strace::ship(folder)
}

fn copy_tree(from: &Path, to: &Path) -> io::Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let target = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            copy_tree(&entry.path(), &target)?;
        } else {
            fs::copy(entry.path(), target)?;
        }
    }
    Ok(())
}

fn compile_client(path: &Path, options: &[&str]) {
    let sources = data::source("probes/devices/dt");
    run(Command::new("gcc")
        .args(["-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror"])
        .args(options)
        .arg("-o")
        .arg(path)
        .args(["example.c", "dtclient.c"].map(|file| sources.join(file))));
}

/// Compiles a program that needs no libraries where it runs.
fn compile_alone(path: &Path, source: &str) {
    run(Command::new("gcc")
        .args(["-O2", "-Wall", "-Werror", "-static", "-o"])
        .args([path, &data::source(source)]));
}

fn copied(from: &Path, to: &Path) {
    fs::copy(from, to).unwrap_or_else(|e| panic!("{} to {}: {e}", from.display(), to.display()));
}

fn run(command: &mut Command) {
    let output = command
        .output()
        .unwrap_or_else(|e| panic!("{command:?}: {e}"));
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {told}");
}

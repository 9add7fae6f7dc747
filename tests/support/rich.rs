//! A guest with the rich kernel and a crowd of processes. Unlike the small one it has modules, ORC
//! and a disk, among others.
//!
//! It is booted and crowded once and kept in the cache, as the shell (`shell.rs`) of the small
//! kernel is.

use std::collections::hash_map::DefaultHasher;
use std::ffi::OsString;
use std::fs::{self, File};
use std::hash::{Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::time::SystemTime;

use guest::Terminal;
use guest::build::initramfs::ExtraFile;
use guest::build::programs;
use vmm::machine::{DiskConfig, VirtioConfig};

use crate::compiled::Program;
use crate::crowd;
use crate::host::{Host, cache};
use crate::kept::kept;
use crate::kernel::Kernel;
use crate::shell::{self, Parts, Shape, Shell};

/// The path of the RAM disk's module in the guest. It is not loaded yet.
pub const BRD: &str = "/lib/brd.ko";
/// The disk, which nothing has mounted yet: ext2, with the program [`STORED`].
pub const DISK: &str = "/dev/vda";
/// The name of the program on the disk: `fsload`, with its symbols far behind what it maps.
pub const STORED: &str = "stored";
/// The number of bytes between what the program on the disk maps and its symbols.
const PADDING: usize = 256 << 10;
/// The name of the disk's image in its folder.
const IMAGE: &str = "image";
/// The name of the cache's entries and lock.
const TOPIC: &str = "tests-rich";

/// Restores a running copy of the guest.
///
/// # Panics
/// If it cannot be made or restored.
pub fn guest(host: &Host) -> Shell {
    Shell::restore(host, Kernel::rich(), snapshot_folder(host))
}

/// Returns the folder of the guest's snapshot.
///
/// # Panics
/// If it cannot be made.
fn snapshot_folder(host: &Host) -> &'static Path {
    // The guest's parts do not change while a process tests it.
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let kernel = Kernel::rich();
        let module = ExtraFile {
            path: BRD.trim_start_matches('/').to_owned(),
            mode: 0o644,
            content: kernel.module("brd.ko"),
        };
        let parts = Parts {
            kernel,
            initramfs: shell::full_initramfs_with(vec![module, offline()]),
            shape: Shape {
                virtio: VirtioConfig {
                    disks: disks(),
                    ..VirtioConfig::default()
                },
                ..Shape::default()
            },
            lines: &crowd::START,
        };
        parts.kept(host, TOPIC)
    })
}

/// Returns the program `offline`, which has pages of files moved: see its source.
fn offline() -> ExtraFile {
    let folder = tempfile::tempdir().unwrap_or_else(|e| panic!("{e}"));
    let program = folder.path().join("offline");
    Program::Offline.make(&program);
    ExtraFile {
        path: "bin/offline".to_owned(),
        mode: 0o755,
        content: fs::read(program).unwrap_or_else(|e| panic!("{e}")),
    }
}

/// Returns the words by which the command restores a copy of the guest.
///
/// # Panics
/// If the guest cannot be made.
pub fn restore(host: &Host) -> [OsString; 3] {
    let folder = snapshot_folder(host);
    ["--disks-as-saved".into(), "--restore".into(), folder.into()]
}

/// Returns the disk. A kernel that the environment names finds none: a distribution's does not look
/// for one where this machine has it.
fn disks() -> Vec<DiskConfig> {
    match Kernel::given() {
        Some(_) => Vec::new(),
        None => vec![DiskConfig::new(disk(), true)],
    }
}

/// Returns the image of the disk.
fn disk() -> PathBuf {
    let programs = programs::build(&cache(), &Terminal::new());
    let programs = programs.unwrap_or_else(|e| panic!("programs: {e}"));
    let program = fs::read(programs.path("fsload")).unwrap_or_else(|e| panic!("fsload: {e}"));
    let mut hash = DefaultHasher::new();
    (&program, STORED, PADDING).hash(&mut hash);
    let name = format!("{:016x}", hash.finish());
    let folder = kept("tests-disk", &name, |folder| {
        let files = folder.join("files");
        fs::create_dir_all(&files).unwrap_or_else(|e| panic!("{}: {e}", files.display()));
        let padding = folder.join("padding");
        fs::write(&padding, [b'p'; PADDING]).unwrap_or_else(|e| panic!("{e}"));
        let mut command = Command::new("objcopy");
        command.arg(format!("--add-section=.padding={}", padding.display()));
        command.arg(programs.path("fsload")).arg(files.join(STORED));
        let ended = command.status();
        assert!(ended.is_ok_and(|status| status.success()), "{command:?}");
        let mut command = Command::new("/usr/sbin/mke2fs");
        command.args(["-q", "-F", "-t", "ext2", "-d"]).arg(&files);
        let image = folder.join(IMAGE);
        let ended = command.arg(&image).arg("4M").status();
        assert!(ended.is_ok_and(|status| status.success()), "{command:?}");
        // A disk that is made again is still the one of the guest's snapshot.
        let made = File::options().write(true).open(&image);
        let dated = made.and_then(|file| file.set_modified(SystemTime::UNIX_EPOCH));
        dated.unwrap_or_else(|e| panic!("{}: {e}", image.display()));
    });
    folder.join(IMAGE)
}

//! A guest that does at once everything that is hard on a machine and on its tracers: see
//! `victims.sh`.
//!
//! Its kernel is the rich one, with modules and tracers of its own. It has a disk, random numbers,
//! and the trace devices' ports. It is booted once for each number of vCPUs and kept in the cache,
//! with its programs' untraced output.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use guest::Terminal;
use guest::build::initramfs::ExtraFile;
use guest::build::programs::{self, Programs};
use object::{Object, ObjectSymbol};
use vmm::machine::{DiskConfig, VirtioConfig};

use crate::host::{Host, cache};
use crate::kernel::Kernel;
use crate::linux::memory;
use crate::ports;
use crate::shell::{Parts, Shape, full_initramfs_with};

/// The loops of `victims.sh`.
pub const VICTIMS: [&str; 12] = [
    "flags",
    "itself",
    "again",
    "signals",
    "storm",
    "movers",
    "modules",
    "kprobes",
    "uprobes",
    "functions",
    "floods",
    "rings",
];
/// A program with a function that is called as often as its argument says.
pub const EXACT: &str = "/tmp/exact";
/// A program that makes as many system calls as its argument says.
pub const CALLS: &str = "/tmp/calls";
/// The size of the disk in bytes.
const DISK: u64 = 1 << 20;
/// The words that reserve the last 64 KiB of [`MEMORY`], which the kernel leaves alone.
const RESERVED: &str = "memmap=64K$0x3ff0000";
const AREA: u64 = 0x3ff_0000;
/// The RAM of the guest in bytes.
const MEMORY: u64 = 64 << 20;
/// The address at which the linker places programs without PIE.
const BASE: u64 = 0x40_0000;

/// Returns the folder of the snapshot. A machine that is restored from it must be given a disk of
/// its own: see [`make_disk`].
///
/// # Panics
/// If it cannot be made.
pub fn snapshot_folder(host: &Host, cpus: u8) -> PathBuf {
    assert_eq!(
        memory(),
        MEMORY,
        "the guest of torture has a kernel of its own"
    );
    let disk = cache().root().join("victims.disk");
    make_disk(&disk);
    let kernel = Kernel::rich();
    let file = |path: &str, content: Vec<u8>| ExtraFile {
        path: path.to_owned(),
        mode: 0o755,
        content,
    };
    let programs = programs::build(&cache(), &Terminal::new()).unwrap_or_else(|e| panic!("{e}"));
    let program = |name: &str| {
        let content = fs::read(programs.path(name));
        file(
            &format!("bin/{name}"),
            content.unwrap_or_else(|e| panic!("{name}: {e}")),
        )
    };
    let parts = Parts {
        kernel,
        initramfs: full_initramfs_with(vec![
            file("lib/brd.ko", kernel.module("brd.ko")),
            file("victims.sh", script(&programs).into_bytes()),
            program("alarms"),
            program("queues"),
            program("twins"),
        ]),
        shape: Shape {
            cpus,
            words: RESERVED,
            virtio: VirtioConfig {
                console: Some(ports::console()),
                disks: vec![DiskConfig::new(disk, false)],
                rng: true,
                ..VirtioConfig::default()
            },
        },
        lines: &[". /victims.sh", "victims_prepare"],
    };
    parts.kept(host, &format!("tests-victims{cpus}"))
}

/// Makes a disk for a copy of the guest.
///
/// # Panics
/// If it cannot be written.
pub fn make_disk(path: &Path) {
    let made = File::create(path).and_then(|file| file.set_len(DISK));
    made.unwrap_or_else(|e| panic!("{}: {e}", path.display()));
}

fn script(programs: &Programs) -> String {
    let elf = fs::read(programs.path("alarms")).unwrap_or_else(|e| panic!("alarms: {e}"));
    let file = object::File::parse(&*elf).unwrap_or_else(|e| panic!("alarms: {e}"));
    let counted = file.symbol_by_name("counted");
    let counted = counted.unwrap_or_else(|| panic!("alarms has no function counted"));
    format!(
        "AREA={AREA} COUNTED={:#x}\n{}",
        counted.address() - BASE,
        include_str!("victims.sh"),
    )
}

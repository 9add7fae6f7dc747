//! A guest with the rich kernel and a crowd of processes. Unlike the small one it has modules and
//! ORC, among others.
//!
//! It is booted and crowded once and kept in the cache, as the shell (`shell.rs`) of the small
//! kernel is.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use guest::build::initramfs::ExtraFile;

use crate::crowd;
use crate::host::Host;
use crate::kernel::Kernel;
use crate::shell::{self, Parts, Shape, Shell};

/// The path of the RAM disk's module in the guest. It is not loaded yet.
pub const BRD: &str = "/lib/brd.ko";
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
pub fn snapshot_folder(host: &Host) -> &'static Path {
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
            initramfs: shell::full_initramfs_with(vec![module]),
            shape: Shape::default(),
            lines: &crowd::START,
        };
        parts.kept(host, TOPIC)
    })
}

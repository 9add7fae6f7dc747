//! A guest with the rich kernel and a crowd of processes: what the small one has not, modules and ORC among them.
//!
//! Booted and crowded once and kept in the cache, as the shell (`shell.rs`) of the small kernel is.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use guest::initramfs::ExtraFile;

use crate::crowd;
use crate::host::Host;
use crate::kernel::Kernel;
use crate::shell::{self, Parts, Shape, Shell};

/// Where the module of the RAM disk is in the guest. It is not loaded yet.
pub const BRD: &str = "/lib/brd.ko";
/// What the cache's entries and lock are called.
const TOPIC: &str = "tests-rich";

/// A copy of the guest, running.
///
/// # Panics
/// If it cannot be made or restored.
pub fn guest(host: &Host) -> Shell {
    Shell::restore(host, Kernel::rich(), snapshot_folder(host))
}

/// The folder of its snapshot.
///
/// # Panics
/// If it cannot be made.
pub fn snapshot_folder(host: &Host) -> &'static Path {
    // What the guest is made of does not change while a process tests it.
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

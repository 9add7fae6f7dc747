//! A guest with the trace devices' ports in a virtio-console: the small kernel at its shell, booted
//! once and kept in the cache.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use vmm::machine::{ConsoleConfig, EndOfFile, PortConfig, VirtioConfig};

use crate::host::Host;
use crate::kernel::Kernel;
use crate::shell::{Parts, Shape, full_initramfs};

/// The name of the cache's entries and lock.
const TOPIC: &str = "tests-ports";
/// The ports, as `run --guest-ports` makes them.
const PORTS: [(&str, EndOfFile); 5] = [
    ("tracectl", EndOfFile::WhenIdle),
    ("trace", EndOfFile::WhenIdle),
    ("ptrace", EndOfFile::Never),
    ("ptracectl", EndOfFile::WhenIdle),
    ("dt", EndOfFile::Never),
];

pub(crate) fn console() -> ConsoleConfig {
    let ports = PORTS.iter();
    ConsoleConfig {
        ports: ports
            .map(|(name, end_of_file)| PortConfig::named(name, *end_of_file))
            .collect(),
        ..ConsoleConfig::default()
    }
}

/// Returns the folder of the guest's snapshot.
///
/// # Panics
/// If it cannot be made.
pub fn snapshot_folder(host: &Host) -> &'static Path {
    // The guest's parts do not change while a process tests it.
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let parts = Parts {
            kernel: Kernel::small(),
            initramfs: full_initramfs(),
            shape: Shape {
                virtio: VirtioConfig {
                    console: Some(console()),
                    ..VirtioConfig::default()
                },
                ..Shape::default()
            },
            lines: &["cd /dev/virtio-ports"],
        };
        parts.kept(host, TOPIC)
    })
}

//! A guest with three small disks that nothing has mounted, booted once and kept in the cache. A
//! copy gets images of its own.

use std::fs::File;

use vmm::machine::{DiskConfig, VirtioConfig};

use crate::host::{Host, cache};
use crate::kernel::Kernel;
use crate::shell::{Parts, Shape, Shell, full_initramfs};

/// The size of each disk in bytes.
pub const SIZE: usize = 512 << 10;
/// The number of disks.
pub const DISKS: usize = 3;

/// Restores a running copy of the guest on these images, each of [`SIZE`] bytes for its guest.
///
/// # Panics
/// If it cannot be made or restored.
pub fn guest(host: &Host, disks: &[DiskConfig; DISKS]) -> Shell {
    let parts = Parts {
        shape: Shape {
            virtio: VirtioConfig {
                disks: (0..DISKS).map(empty).collect(),
                ..VirtioConfig::default()
            },
            ..Shape::default()
        },
        ..Parts::small(full_initramfs())
    };
    let folder = parts.kept(host, "tests-disks");
    Shell::restore_with(host, Kernel::small(), &folder, disks)
}

/// Makes an empty disk to boot with.
fn empty(number: usize) -> DiskConfig {
    let path = cache().root().join(format!("empty{number}.disk"));
    let made = File::create(&path).and_then(|file| file.set_len(SIZE as u64));
    made.unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    DiskConfig::new(path, false)
}

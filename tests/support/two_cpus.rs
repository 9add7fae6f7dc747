//! A guest with the small kernel on two vCPUs at its shell, booted once and kept in the cache.
//! `boot.rs` of the tests boots one itself.

use std::path::PathBuf;
use std::sync::OnceLock;

use vmm::machine::{Transport, VirtioConfig};

use crate::host::Host;
use crate::kernel::Kernel;
use crate::shell::{Parts, Shape, Shell, full_initramfs};

/// The name of the cache's entries and lock.
const TOPIC: &str = "tests-two-cpus";

/// Restores a running copy of the guest.
///
/// # Panics
/// If it cannot be made or restored.
pub fn guest(host: &Host) -> Shell {
    // The guest's parts do not change while a process tests it.
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    let folder = FOLDER.get_or_init(|| {
        let parts = Parts {
            shape: Shape {
                cpus: 2,
                virtio: VirtioConfig {
                    transport: transport(),
                    ..VirtioConfig::default()
                },
                ..Shape::default()
            },
            ..Parts::small(full_initramfs())
        };
        parts.kept(host, TOPIC)
    });
    Shell::restore(host, Kernel::small(), folder)
}

/// Returns the transport whose machine shows the kernel both vCPUs. Kernels of distributions read
/// the ACPI tables alone, which only a machine with a PCI bus has.
fn transport() -> Transport {
    match Kernel::given() {
        Some(_) => Transport::Pci,
        None => Transport::Mmio,
    }
}

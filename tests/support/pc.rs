//! A guest with the PC kernel at its shell: two vCPUs, a network card and sockets to the host,
//! which lead nowhere until a restore connects them. It is booted once and kept in the cache.
//! `image_boot.rs` and `virtio.rs` of the tests boot such kernels themselves.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use guest::Terminal;
use guest::build::initramfs::ExtraFile;
use guest::build::programs;
use vmm::machine::{NetConfig, Transport, VirtioConfig, VsockConfig};

use crate::host::{Host, cache};
use crate::kernel::Kernel;
use crate::shell::{Parts, Shape, full_initramfs_with};

/// The name of the cache's entries and lock.
const TOPIC: &str = "tests-pc";
/// The hardware address of the card.
pub const MAC: [u8; 6] = [2, 0, 0, 0xe, 0xe, 1];
/// The MTU of the card, which `run --net user` gives a guest.
pub const MTU: u16 = 65_520;
/// The context id of the guest's sockets.
pub const CID: u32 = 5;
/// The script `/lease` that udhcpc(8) calls with its lease.
const LEASE: &str = "#!/bin/sh
[ \"$1\" = bound ] || exit 0
ip addr add $ip/$mask dev $interface && ip route add default via $router && echo lease-of-$ip
";

/// Returns the folder of the guest's snapshot. It has the programs `/lease` and `/bin/vsock`.
///
/// # Panics
/// If it cannot be made.
pub fn snapshot_folder(host: &Host) -> &'static Path {
    // The guest's parts do not change while a process tests it.
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let programs = programs::build(&cache(), &Terminal::new());
        let vsock = programs.unwrap_or_else(|e| panic!("{e}")).path("vsock");
        let vsock = fs::read(&vsock).unwrap_or_else(|e| panic!("{}: {e}", vsock.display()));
        let files = [("lease", LEASE.as_bytes().to_vec()), ("bin/vsock", vsock)];
        let files = files.map(|(path, content)| ExtraFile {
            path: path.into(),
            content,
            mode: 0o755,
        });
        let parts = Parts {
            kernel: Kernel::pc(),
            initramfs: full_initramfs_with(files.into()),
            shape: Shape {
                cpus: 2,
                virtio: VirtioConfig {
                    net: Some(NetConfig {
                        mac: MAC,
                        mtu: MTU,
                        segmentation: false,
                        chosen: "user".to_owned(),
                        moved: false,
                        connection: None,
                    }),
                    vsock: Some(VsockConfig {
                        cid: CID,
                        socket: None,
                    }),
                    transport: Transport::Pci,
                    ..VirtioConfig::default()
                },
                ..Shape::default()
            },
            lines: &[],
        };
        parts.kept(host, TOPIC)
    })
}

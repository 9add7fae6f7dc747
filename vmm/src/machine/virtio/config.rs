//! The choice of virtio devices of a machine: plain data, in the order in which the guest finds
//! them.

use std::io;
use std::path::PathBuf;

use devices::virtio::blk::{self, BlockBackend, ImageError, ImageFormat, ImageOptions, Overlay};
use devices::virtio::console::{PortConfig, PortConfigError, Size};
use devices::virtio::{PciStateError, TransportStateError};
use serde::{Deserialize, Serialize};

use super::layout::{MAX_DEVICES, MmioSlot};
use super::net::NetConfig;
use super::tap::TapError;
use super::vsock::VsockConfig;
use crate::vm::KvmError;

/// The way in which a guest finds its virtio devices.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Transport {
    /// By words on the kernel's command line. It needs CONFIG_VIRTIO_MMIO_CMDLINE_DEVICES, which
    /// small kernels have.
    #[default]
    Mmio,
    /// On a PCI bus, as distributions' kernels do. It needs CONFIG_VIRTIO_PCI.
    Pci,
}

/// A machine's virtio devices. By default it has none.
///
/// They come in the order of the fields, disks as the guest's `vda`, `vdb` and so on.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct VirtioConfig {
    /// The console, if any.
    pub console: Option<ConsoleConfig>,
    /// The disks.
    pub disks: Vec<DiskConfig>,
    /// Whether there is a source of random bytes, those of the host.
    pub rng: bool,
    /// The network card, if any.
    pub net: Option<NetConfig>,
    /// The sockets between guest and host, if any.
    pub vsock: Option<VsockConfig>,
    /// The way in which the guest finds them.
    pub transport: Transport,
}

/// A virtio-console: port 0, the guest's `hvc0`, and named ports, each `/dev/virtio-ports/NAME`.
///
/// The ports have no backends until [`ConsolePorts::attach`](super::ConsolePorts::attach).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConsoleConfig {
    /// The ports behind the first, from number 1 on. They are connected when they have a backend,
    /// whatever is set here.
    pub ports: Vec<PortConfig>,
    /// The size of the console.
    pub size: Size,
}

impl Default for ConsoleConfig {
    /// Returns a console alone, of the traditional size of terminals.
    fn default() -> Self {
        Self {
            ports: Vec::new(),
            size: Size {
                columns: 80,
                rows: 24,
            },
        }
    }
}

/// A disk.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskConfig {
    /// The image file. A snapshot stores its whole path and the size of the disk.
    pub path: PathBuf,
    /// Whether the guest may only read it.
    pub read_only: bool,
    /// The format of the image; by content if it is `None`.
    pub format: Option<ImageFormat>,
    /// The backing file of a qcow2 image instead of the one that the image names.
    pub backing: Option<PathBuf>,
    /// The file for the guest's writes, if the image is to stay as it is. A snapshot holds it.
    pub overlay: Option<Overlay>,
    /// The overlay that a temporary one begins with. A restore sets it.
    #[serde(skip)]
    pub saved_overlay: Option<PathBuf>,
}

impl DiskConfig {
    /// Returns a disk on the image in `path`, raw or qcow2.
    #[must_use]
    pub fn new(path: impl Into<PathBuf>, read_only: bool) -> Self {
        Self {
            path: path.into(),
            read_only,
            ..Self::default()
        }
    }

    /// Opens the image for reading, apart from any machine. It is locked meanwhile.
    ///
    /// # Errors
    /// If it cannot be opened, is damaged, or a machine writes to it.
    pub fn open_read_only(&self) -> Result<Box<dyn BlockBackend>, ImageError> {
        let options = ImageOptions {
            read_only: true,
            ..self.options()
        };
        blk::open(&self.path, &options)
    }

    /// Returns whether the guest's writes go to an overlay.
    pub(crate) fn has_overlay(&self) -> bool {
        self.overlay.is_some() && !self.read_only
    }

    /// Returns the choices for the image.
    pub(crate) fn options(&self) -> ImageOptions {
        ImageOptions {
            read_only: self.read_only,
            format: self.format,
            backing: self.backing.clone(),
            overlay: self.overlay.clone(),
            saved_overlay: self.saved_overlay.clone(),
        }
    }

    /// Returns the disk with whole paths, which stay valid if this process changes its directory.
    pub(crate) fn whole(&self) -> Self {
        let whole = |path: &PathBuf| path.canonicalize().unwrap_or_else(|_| path.clone());
        Self {
            path: whole(&self.path),
            backing: self.backing.as_ref().map(whole),
            overlay: self.overlay.as_ref().map(|overlay| match overlay {
                Overlay::Temporary => Overlay::Temporary,
                Overlay::Kept(path) => Overlay::Kept(whole(path)),
            }),
            ..self.clone()
        }
    }
}

impl std::fmt::Display for DiskConfig {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let path = self.path.display();
        match &self.overlay {
            _ if self.read_only => write!(f, "{path} (only read)"),
            None => write!(f, "{path} (read and written)"),
            Some(Overlay::Temporary) => write!(f, "{path} (only read, under a temporary overlay)"),
            Some(Overlay::Kept(overlay)) => {
                write!(
                    f,
                    "{path} (only read, under the overlay {})",
                    overlay.display()
                )
            }
        }
    }
}

/// The configuration of one device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum DeviceConfig {
    Console(ConsoleConfig),
    Disk(DiskConfig),
    Rng,
    Net(NetConfig),
    Vsock(VsockConfig),
}

impl VirtioConfig {
    /// Returns the devices in their order.
    pub(crate) fn list(&self) -> Vec<DeviceConfig> {
        let console = self.console.iter().cloned().map(DeviceConfig::Console);
        let disks = self.disks.iter().cloned().map(DeviceConfig::Disk);
        let rng = self.rng.then_some(DeviceConfig::Rng);
        let net = self.net.iter().cloned().map(DeviceConfig::Net);
        let vsock = self.vsock.iter().cloned().map(DeviceConfig::Vsock);
        let devices = console.chain(disks).chain(rng);
        devices.chain(net).chain(vsock).collect()
    }
}

/// Returns the places of devices.
///
/// # Errors
/// If there are too many.
pub(crate) fn places(count: usize) -> Result<Vec<MmioSlot>, VirtioError> {
    (0..count)
        .map(|index| MmioSlot::of(index).ok_or(VirtioError::TooMany { asked: count }))
        .collect()
}

/// The reason that a machine's virtio devices cannot be created.
#[derive(Debug, thiserror::Error)]
pub enum VirtioError {
    /// There are more devices than places.
    #[error("{asked} virtio devices: a machine has at most {MAX_DEVICES}; use fewer disks")]
    TooMany {
        /// The requested number of devices.
        asked: usize,
    },
    /// A disk's image is not usable.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// A console's ports are not valid.
    #[error("virtio-console: {0}")]
    Port(#[from] PortConfigError),
    /// A network card's connection is of another kind than the guest expects.
    #[error(
        "the network: the guest sends TCP segments larger than the MTU, as a TAP interface takes them, and this connection does not: \
         restore with --net tap=NAME"
    )]
    Segmentation,
    /// A TAP interface is not usable.
    #[error(transparent)]
    Tap(#[from] TapError),
    /// KVM refuses a call.
    #[error(transparent)]
    Kvm(#[from] KvmError),
    /// The host refuses an event or a thread.
    #[error("virtio devices: the host refuses an event or a thread: {0}")]
    Host(#[from] io::Error),
    /// A disk is not the one that was saved.
    #[error(
        "disk {path}: {found} bytes, it had {saved} when the machine was saved; give the image of that time"
    )]
    DiskChanged {
        /// The path of the image.
        path: PathBuf,
        /// The size in the snapshot, in bytes.
        saved: u64,
        /// The size now, in bytes.
        found: u64,
    },
    /// A saved device does not fit.
    #[error(transparent)]
    State(#[from] TransportStateError),
    /// A saved PCI function does not fit.
    #[error(transparent)]
    PciState(#[from] PciStateError),
    /// A device was saved with another transport.
    #[error("a virtio device was saved with another transport; the snapshot is damaged")]
    Transport,
}

//! The machine's virtio devices: their places, the delivery of the guest's accesses, and the thread
//! that serves them.
//!
//! The models and their registers are the `devices` crate's. Here they get guest memory, addresses,
//! interrupts, events and files. A guest notifies a queue by a write to device memory. KVM turns
//! that into an event if it can. Otherwise it is an exit. Both wake the one device thread. That
//! thread is held while the machine is paused ([`crate::machine::control`]), so a paused guest's
//! memory is left alone.
//!
//! The backends of a console's ports are called on the device thread while the machine cannot be
//! paused. They must not pause it, nor wait for somebody who does.

mod config;
mod disk_reader;
mod interrupt;
mod layout;
mod net;
mod ports;
mod tap;
mod vectored_io;
mod vsock;
mod worker;

use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use devices::pci::SharedFunction;
use devices::virtio::blk::{self, Block, BlockOptions};
use devices::virtio::net::{MAX_PAIRS, Net, NetBackend, NetOptions};
use devices::virtio::rng::{HostEntropy, Rng};
use devices::virtio::vsock::{Vsock, VsockOptions};
use devices::virtio::{
    DeviceHandle, MMIO_LENGTH, MmioTransport, PCI_MEMORY_LENGTH, PCI_NOTIFY, PCI_NOTIFY_STEP,
    PciState, PciTransport, QUEUE_NOTIFY, QueueStats, TransportState, VirtioDevice,
};
use devices::{Bus, SharedDevice};
use kvm_ioctls::{IoEventAddress, NoDatamatch, VmFd};
use serde::{Deserialize, Serialize};

pub use devices::virtio::blk::{BlockBackend, ImageError, ImageFormat, Overlay, OverlayFile};

pub use config::{ConsoleConfig, DiskConfig, Transport, VirtioConfig, VirtioError};
pub(crate) use config::{DeviceConfig, places};
pub use disk_reader::DiskReader;
pub use layout::MAX_DEVICES;
pub use net::{ETHERNET_MTU, NetConfig, NetConnection};
pub use ports::ConsolePorts;
pub use tap::TapError;
pub use vsock::{FIRST_CID, VsockConfig, VsockSocket};
pub(crate) use worker::Worker;

use super::MachineError;
use super::control::Control;
use crate::boot::MmioWindow;
use crate::host::HostProfile;
use crate::memory::GuestRam;
use crate::tape::{Stream, Tape, TapedDisk, TapedNet, TapedRandom};
use crate::vm::NameCall;
use layout::{MmioSlot, pci_memory};
use vectored_io::VectoredIo;
use worker::{BackendEvent, DeviceEvents, Served};

/// The parts that devices are made with.
pub(crate) struct Host<'a> {
    pub(crate) vm: &'a Arc<VmFd>,
    pub(crate) profile: &'a HostProfile,
    pub(crate) control: &'a Arc<Control>,
    pub(crate) ram: &'a GuestRam,
    /// The tape of the guest's inputs.
    pub(crate) tape: &'a Tape,
    /// The number of vCPUs, each of which has queues of its own in a network card.
    pub(crate) cpus: u8,
    /// The addresses for the memory of PCI functions.
    pub(crate) pci_window: MmioWindow,
}

/// All virtio devices of a machine.
#[derive(Default)]
pub(crate) struct Devices(Vec<Device>);

struct Device {
    identity: Identity,
    /// The GPA of the registers.
    address: u64,
    registers: Registers,
    handle: DeviceHandle,
    events: Arc<DeviceEvents>,
    ports: Option<ConsolePorts>,
}

/// The identity of a device in a snapshot.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Identity {
    config: DeviceConfig,
    /// The size of a disk in bytes.
    length: Option<u64>,
    /// The time of the last change of an image that the guest does not write.
    changed: Option<SystemTime>,
}

/// A device's registers, by its transport.
enum Registers {
    Mmio(Arc<Mutex<MmioTransport>>),
    Pci(Arc<Mutex<PciTransport>>),
}

/// The state of a device's registers in a snapshot.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum SavedRegisters {
    Mmio(TransportState),
    Pci(PciState),
}

/// A device in a snapshot.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct SavedDevice {
    identity: Identity,
    state: SavedRegisters,
}

/// The counters of a virtio device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VirtioStats {
    /// The kind of device.
    pub name: &'static str,
    /// The GPA of the registers.
    pub address: u64,
    /// The number of raised interrupts.
    pub interrupts: u64,
    /// The number of interrupts that the host refused.
    pub lost_interrupts: u64,
    /// The counters of each queue.
    pub queues: Vec<QueueStats>,
}

/// A new device.
struct Made {
    model: Box<dyn VirtioDevice>,
    /// The size of a disk in bytes.
    length: Option<u64>,
    ports: Option<ConsolePorts>,
    far_end: Arc<BackendEvent>,
    /// The descriptor of a backend that has one.
    backend: Option<Arc<OwnedFd>>,
}

impl Made {
    fn new(config: &DeviceConfig, index: usize, host: &Host<'_>) -> Result<Self, VirtioError> {
        let stream = Stream::Device(u16::try_from(index).unwrap_or(u16::MAX));
        let tape = host.tape.clone();
        let far_end = Arc::new(BackendEvent::new()?);
        let made = |model: Box<dyn VirtioDevice>, length, ports| Self {
            model,
            length,
            ports,
            far_end: far_end.clone(),
            backend: None,
        };
        Ok(match config {
            DeviceConfig::Disk(disk) => {
                let mut inner = blk::open(&disk.path, &disk.options())?;
                inner.use_direct_io(&VectoredIo);
                let length = inner.length();
                let backend = Box::new(TapedDisk {
                    inner,
                    tape,
                    stream,
                });
                let options = BlockOptions {
                    read_only: disk.read_only,
                    id: &format!("exotrace-{index}"),
                };
                let block = Block::new(backend, options);
                made(Box::new(block), Some(length), None)
            }
            DeviceConfig::Rng => {
                let source = TapedRandom {
                    inner: HostEntropy,
                    tape,
                    stream,
                };
                made(Box::new(Rng::new(source)), None, None)
            }
            DeviceConfig::Console(console) => {
                let waker = far_end.clone();
                let (console, ports) = ConsolePorts::new(console, &tape, move || waker.raise())?;
                made(Box::new(console), None, Some(ports))
            }
            DeviceConfig::Net(net) => {
                let connection = net.connection.as_ref();
                if net.segmentation && connection.is_some_and(|connection| !connection.segments()) {
                    return Err(VirtioError::Segmentation);
                }
                let options = NetOptions {
                    mac: net.mac,
                    mtu: net.mtu,
                    pairs: u16::from(host.cpus).min(MAX_PAIRS),
                    segmentation: net.segmentation,
                    moved: net.moved && !tape.plays(),
                };
                let waker = far_end.clone();
                tape.on_input(stream, move || waker.raise());
                let inner = connection.and_then(NetConnection::take);
                let is_there = inner.is_some() || tape.plays();
                let backend = is_there.then(|| {
                    Box::new(TapedNet {
                        inner,
                        tape,
                        stream,
                        offloads: net.segmentation,
                    }) as Box<dyn NetBackend>
                });
                let card = Net::new(backend, options);
                Self {
                    backend: connection.map(NetConnection::descriptor),
                    ..made(Box::new(card), None, None)
                }
            }
            DeviceConfig::Vsock(vsock) => {
                let socket = vsock.socket.as_ref();
                let options = VsockOptions {
                    cid: vsock.cid,
                    seed: socket.map_or(0, VsockSocket::seed),
                };
                let device = Vsock::new(socket.and_then(VsockSocket::take), options);
                Self {
                    backend: socket.map(VsockSocket::descriptor),
                    ..made(Box::new(device), None, None)
                }
            }
        })
    }
}

/// Returns the time of the last change of a disk's image, if the guest does not write it.
fn unwritten(config: &DeviceConfig) -> Option<SystemTime> {
    match config {
        DeviceConfig::Disk(disk) if disk.read_only || disk.has_overlay() => {
            let metadata = std::fs::metadata(&disk.path).ok()?;
            metadata
                .is_file()
                .then(|| metadata.modified().ok())
                .flatten()
        }
        _ => None,
    }
}

/// Returns the configuration with whole paths.
fn whole(config: &DeviceConfig) -> DeviceConfig {
    match config {
        DeviceConfig::Disk(disk) => DeviceConfig::Disk(disk.whole()),
        other => other.clone(),
    }
}

impl Devices {
    /// Creates the devices and puts their memory on `bus`.
    pub(crate) fn new(
        list: &[DeviceConfig],
        transport: Transport,
        host: &Host<'_>,
        bus: &mut Bus,
    ) -> Result<Self, MachineError> {
        let mut devices = Vec::new();
        for (index, (config, place)) in list.iter().zip(places(list.len())?).enumerate() {
            let device = Device::new(config, index, transport, place, host)?;
            let (registers, length): (SharedDevice, _) = match &device.registers {
                Registers::Mmio(registers) => (registers.clone(), MMIO_LENGTH),
                Registers::Pci(registers) => (registers.clone(), PCI_MEMORY_LENGTH),
            };
            bus.insert("virtio", device.address, length, registers)?;
            devices.push(device);
        }
        Ok(Self(devices))
    }

    /// Returns the functions on the PCI bus, in their order.
    pub(crate) fn functions(&self) -> Vec<SharedFunction> {
        let function = |device: &Device| match &device.registers {
            Registers::Mmio(_) => None,
            Registers::Pci(registers) => Some(registers.clone() as SharedFunction),
        };
        self.0.iter().filter_map(function).collect()
    }

    /// Starts the thread that serves the devices, if there are any.
    pub(crate) fn start(&self, control: &Arc<Control>) -> Result<Option<Worker>, VirtioError> {
        let served = self.0.iter().map(|device| Served {
            handle: device.handle.clone(),
            events: device.events.clone(),
        });
        match self.0.is_empty() {
            true => Ok(None),
            false => Ok(Some(Worker::start(served.collect(), control.clone())?)),
        }
    }

    /// Returns the devices of the paused machine.
    pub(crate) fn save(&self) -> Vec<SavedDevice> {
        let save = |device: &Device| SavedDevice {
            identity: device.identity.clone(),
            state: match &device.registers {
                Registers::Mmio(registers) => SavedRegisters::Mmio(lock(registers).state()),
                Registers::Pci(registers) => SavedRegisters::Pci(lock(registers).state()),
            },
        };
        self.0.iter().map(save).collect()
    }

    /// Returns the number of disks whose writes go to an overlay.
    pub(crate) fn overlay_count(&self) -> usize {
        let has_overlay = |device: &&Device| match &device.identity.config {
            DeviceConfig::Disk(disk) => disk.has_overlay(),
            _ => false,
        };
        self.0.iter().filter(has_overlay).count()
    }

    /// Returns the overlays of the paused machine's disks, up to date, in the disks' order.
    pub(crate) fn overlays(&self) -> io::Result<Vec<OverlayFile>> {
        let overlays = self.0.iter().map(|device| device.handle.overlay());
        overlays.filter_map(Result::transpose).collect()
    }

    /// Returns the disks, in the order in which they were given.
    pub(crate) fn disks(&self) -> Vec<DiskReader> {
        let reader = |device: &Device| {
            let length = device.identity.length?;
            let handle = device.handle.clone();
            Some(DiskReader { handle, length })
        };
        self.0.iter().filter_map(reader).collect()
    }

    /// Restores the saved state of a machine with the same devices.
    ///
    /// Memory and interrupt controllers are restored already. The vCPUs have not run.
    pub(crate) fn restore(&self, saved: &[SavedDevice]) -> Result<(), VirtioError> {
        for (device, saved) in self.0.iter().zip(saved) {
            let (now, then) = (&device.identity, &saved.identity);
            if let (DeviceConfig::Disk(disk), Some(found), Some(saved)) =
                (&now.config, now.length, then.length)
                && found != saved
            {
                return Err(VirtioError::DiskChanged {
                    path: disk.path.clone(),
                    saved,
                    found,
                });
            }
            if let (DeviceConfig::Disk(disk), Some(found), Some(saved)) =
                (&now.config, now.changed, then.changed)
                && found != saved
            {
                let path = disk.path.display();
                log::warn!(
                    "disk {path}: changed since the machine was saved; it should be the image of that time"
                );
            }
            match (&device.registers, &saved.state) {
                (Registers::Mmio(registers), SavedRegisters::Mmio(state)) => {
                    lock(registers).restore(state)?;
                }
                (Registers::Pci(registers), SavedRegisters::Pci(state)) => {
                    lock(registers).restore(state)?;
                }
                _ => return Err(VirtioError::Transport),
            }
        }
        Ok(())
    }

    /// Returns the console's ports, if there is a console.
    pub(crate) fn console_ports(&self) -> Option<&ConsolePorts> {
        self.0.iter().find_map(|device| device.ports.as_ref())
    }

    /// Returns the counters of the devices.
    pub(crate) fn stats(&self) -> Vec<VirtioStats> {
        let stats = |device: &Device| {
            let interrupts = device.handle.interrupt_stats();
            let queues = 0..device.handle.queues();
            VirtioStats {
                name: device.handle.name(),
                address: device.address,
                interrupts: interrupts.raised,
                lost_interrupts: interrupts.lost,
                queues: queues
                    .map(|queue| device.handle.queue_stats(queue))
                    .collect(),
            }
        };
        self.0.iter().map(stats).collect()
    }
}

impl SavedDevice {
    pub(crate) fn config(&self) -> DeviceConfig {
        self.identity.config.clone()
    }

    /// Returns the disk's file, if the device is a disk.
    pub(crate) fn disk(&self) -> Option<&DiskConfig> {
        match &self.identity.config {
            DeviceConfig::Disk(disk) => Some(disk),
            _ => None,
        }
    }

    /// Returns the disk's file for changes, if the device is a disk.
    pub(crate) fn disk_mut(&mut self) -> Option<&mut DiskConfig> {
        match &mut self.identity.config {
            DeviceConfig::Disk(disk) => Some(disk),
            _ => None,
        }
    }
}

impl SavedDevice {
    /// Returns the network card, if the device is one.
    pub(crate) fn net(&self) -> Option<&NetConfig> {
        match &self.identity.config {
            DeviceConfig::Net(net) => Some(net),
            _ => None,
        }
    }

    /// Connects the network card, if the device is one.
    pub(crate) fn connect(&mut self, connection: &NetConnection, chosen: &str) {
        if let DeviceConfig::Net(net) = &mut self.identity.config {
            net.connection = Some(connection.clone());
            net.moved = network(&net.chosen) != network(chosen);
            chosen.clone_into(&mut net.chosen);
        }
    }
}

impl SavedDevice {
    /// Returns the sockets between guest and host, if the device is those.
    pub(crate) fn vsock(&self) -> Option<&VsockConfig> {
        match &self.identity.config {
            DeviceConfig::Vsock(vsock) => Some(vsock),
            _ => None,
        }
    }

    /// Replaces the sockets between guest and host, if the device is those.
    pub(crate) fn set_vsock(&mut self, config: &VsockConfig) {
        if let DeviceConfig::Vsock(vsock) = &mut self.identity.config {
            vsock.clone_from(config);
        }
    }
}

/// Returns the words for the network itself, without options such as ports.
fn network(chosen: &str) -> Option<&str> {
    chosen.split(',').next()
}

impl Device {
    fn new(
        config: &DeviceConfig,
        index: usize,
        transport: Transport,
        place: MmioSlot,
        host: &Host<'_>,
    ) -> Result<Self, VirtioError> {
        let Made {
            model,
            length,
            ports,
            far_end,
            backend,
        } = Made::new(config, index, host)?;
        let queues = model.queue_sizes().len();
        let events = Arc::new(DeviceEvents::new(queues, far_end, backend)?);
        let address = match transport {
            Transport::Mmio => place.address,
            Transport::Pci => pci_memory(host.pci_window, index)
                .ok_or(VirtioError::TooMany { asked: index + 1 })?,
        };
        if host.profile.ioeventfd {
            notify_by_events(host, transport, address, &events)?;
        }
        let memory = host.ram.map_ref().clone();
        let (registers, handle) = match transport {
            Transport::Mmio => {
                let irq = u32::from(place.irq);
                let line = interrupt::line(host.vm, host.profile, host.control, irq)?;
                let registers = MmioTransport::new(model, memory, line, events.clone());
                let handle = registers.handle();
                (Registers::Mmio(Arc::new(Mutex::new(registers))), handle)
            }
            Transport::Pci => {
                let messages = interrupt::messages(host.vm, host.profile, host.control);
                let notifier = events.clone();
                let registers = PciTransport::new(model, memory, address, messages, notifier);
                let handle = registers.handle();
                (Registers::Pci(Arc::new(Mutex::new(registers))), handle)
            }
        };
        Ok(Self {
            identity: Identity {
                config: whole(config),
                length,
                changed: unwritten(config),
            },
            address,
            registers,
            handle,
            events,
            ports,
        })
    }
}

/// Makes KVM turn the guest's notifications of a device at `address` into events.
fn notify_by_events(
    host: &Host<'_>,
    transport: Transport,
    address: u64,
    events: &DeviceEvents,
) -> Result<(), VirtioError> {
    for (queue, event) in (0u32..).zip(events.queues()) {
        let registered = match transport {
            Transport::Mmio => {
                let register = IoEventAddress::Mmio(address + QUEUE_NOTIFY);
                host.vm.register_ioevent(event, &register, queue)
            }
            Transport::Pci => {
                let register = address + PCI_NOTIFY + PCI_NOTIFY_STEP * u64::from(queue);
                let register = IoEventAddress::Mmio(register);
                host.vm.register_ioevent(event, &register, NoDatamatch)
            }
        };
        registered.call("KVM_IOEVENTFD")?;
    }
    Ok(())
}

fn lock<T>(registers: &Mutex<T>) -> MutexGuard<'_, T> {
    registers.lock().unwrap_or_else(PoisonError::into_inner)
}

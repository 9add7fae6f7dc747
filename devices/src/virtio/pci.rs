//! Virtio over PCI: virtio 1.2 section 4.1.
//!
//! A function has one region of memory, which its capabilities divide. Interrupts are messages
//! (MSI-X) alone; a driver that does not enable them gets none.

use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};

use serde::{Deserialize, Serialize};

use super::device::VirtioDevice;
use super::handle::{DeviceHandle, Interrupt, InterruptStats};
use super::transport::{QueueNotifier, Registers, TransportState, TransportStateError, half};
use crate::WatchedMemory;
use crate::bus::BusDevice;
use crate::pci::{
    ConfigSpace, ConfigState, Identity, MSIX_ENTRY, Msix, MsixState, MsixStateError, NO_VECTOR,
    PciFunction,
};
use crate::signals::MessageInterrupts;

/// The size of a function's memory in bytes.
pub const PCI_MEMORY_LENGTH: u64 = 0x8000;
/// The offset of queue 0's notification register in that memory.
pub const PCI_NOTIFY: u64 = 0x3000;
/// The distance in bytes from one queue's notification register to the next one's.
pub const PCI_NOTIFY_STEP: u64 = 4;

/// The parts of the memory, each as long as a page or two.
const COMMON: u64 = 0;
const ISR: u64 = 0x1000;
const DEVICE: u64 = 0x2000;
const TABLE: u64 = 0x4000;
const PENDING: u64 = 0x6000;
const PAGE: u64 = 0x1000;
/// The length of the common registers in bytes, without those of features that are not offered.
const COMMON_LENGTH: u32 = 0x38;

/// virtio's vendor id, and the device id of type 0.
const VENDOR: u16 = 0x1af4;
const FIRST_DEVICE: u16 = 0x1040;
/// A vendor's own capability.
const VENDOR_CAPABILITY: u8 = 9;
/// The kinds of virtio's capabilities (`cfg_type`).
const COMMON_KIND: u8 = 1;
const NOTIFY_KIND: u8 = 2;
const ISR_KIND: u8 = 3;
const DEVICE_KIND: u8 = 4;
const ACCESS_KIND: u8 = 5;
/// The places of bar, offset, length and data in the capability that leads to the memory.
const ACCESS_BAR: usize = 4;
const ACCESS_OFFSET: usize = 8;
const ACCESS_LENGTH: usize = 12;
const ACCESS_DATA: usize = 16;
/// The place of the command register, and its bit for memory.
const COMMAND: usize = 4;
const COMMAND_MEMORY: u16 = 2;

/// The vectors of a device's interrupts.
struct Vectors {
    msix: Msix,
    config: AtomicU16,
    queues: Vec<AtomicU16>,
}

/// The state of a function and its device in a snapshot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PciState {
    /// Features, status, queues and the model.
    pub transport: TransportState,
    config: ConfigState,
    msix: MsixState,
    config_vector: u16,
    queue_vectors: Vec<u16>,
}

/// The reason why a function's saved state was rejected.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PciStateError {
    /// The device's state.
    #[error(transparent)]
    Transport(#[from] TransportStateError),
    /// The interrupts' state.
    #[error(transparent)]
    Msix(#[from] MsixStateError),
}

/// One virtio device as a PCI function.
///
/// Its memory is a [`BusDevice`], its configuration space a [`PciFunction`].
pub struct PciTransport {
    registers: Registers,
    config: ConfigSpace,
    vectors: Arc<Vectors>,
    /// The place of message control.
    msix_control: usize,
    /// The place of the capability that leads to the memory.
    access: usize,
}

impl std::fmt::Debug for PciTransport {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PciTransport")
            .field("registers", &self.registers)
            .finish_non_exhaustive()
    }
}

impl Vectors {
    /// Sends the message of a vector, and counts it.
    fn send(&self, vector: u16, stats: &mut InterruptStats) {
        match self.msix.send(vector) {
            Some(true) => stats.raised += 1,
            Some(false) => stats.lost += 1,
            None => {}
        }
    }

    /// Takes on a vector that the driver has chosen. One that is not there becomes none, by which
    /// the driver learns that it cannot have it.
    fn choose(&self, place: &AtomicU16, vector: u16) {
        let exists = usize::from(vector) < self.msix.vectors();
        place.store(if exists { vector } else { NO_VECTOR }, Ordering::Release);
    }

    fn forget(&self) {
        for place in self.queues.iter().chain([&self.config]) {
            place.store(NO_VECTOR, Ordering::Release);
        }
    }
}

impl Interrupt for Arc<Vectors> {
    fn raise(&self, queues: &[u16], config: bool) -> InterruptStats {
        let mut stats = InterruptStats::default();
        if config {
            self.send(self.config.load(Ordering::Acquire), &mut stats);
        }
        let mut last = NO_VECTOR;
        for queue in queues {
            let vector = self.queues.get(usize::from(*queue));
            let vector = vector.map_or(NO_VECTOR, |vector| vector.load(Ordering::Acquire));
            // Queues may share a vector, and then one message is enough.
            if vector != last {
                self.send(vector, &mut stats);
                last = vector;
            }
        }
        stats
    }
}

/// Returns the class code of a type of device, by which users and their tools know it.
fn class(device_id: u32) -> [u8; 3] {
    match device_id {
        1 => [0x02, 0x00, 0],
        2 => [0x01, 0x80, 0],
        3 => [0x07, 0x80, 0],
        _ => [0xff, 0x00, 0],
    }
}

/// Returns the body of one of virtio's capabilities: for so many bytes at `offset`, with `more`.
fn capability(kind: u8, offset: u64, length: u32, more: &[u8]) -> Vec<u8> {
    let whole = u8::try_from(16 + more.len()).unwrap_or(u8::MAX);
    let mut body = vec![whole, kind, 0, 0, 0, 0];
    body.extend((offset as u32).to_le_bytes());
    body.extend(length.to_le_bytes());
    body.extend(more);
    body
}

impl PciTransport {
    /// Makes the function of `device`, with its memory at `address`. It interrupts by `messages`.
    #[must_use]
    pub fn new(
        device: Box<dyn VirtioDevice>,
        memory: WatchedMemory,
        address: u64,
        messages: Arc<dyn MessageInterrupts>,
        notifier: Arc<dyn QueueNotifier>,
    ) -> Self {
        let id = device.device_id();
        let queues = device.queue_sizes().len();
        // One for each queue and one for the configuration.
        let most = (PENDING - TABLE) as usize / MSIX_ENTRY;
        let count = u16::try_from((queues + 1).min(most)).unwrap_or(u16::MAX);
        let vectors = Arc::new(Vectors {
            msix: Msix::new(count, messages),
            config: AtomicU16::new(NO_VECTOR),
            queues: (0..queues).map(|_| AtomicU16::new(NO_VECTOR)).collect(),
        });
        let number = u16::try_from(id).unwrap_or(0);
        let mut config = ConfigSpace::new(&Identity {
            ids: (VENDOR, FIRST_DEVICE.saturating_add(number)),
            subsystem: (VENDOR, number),
            revision: 1,
            class: class(id),
        });
        config.set_memory(address, PCI_MEMORY_LENGTH);
        let msix = vectors
            .msix
            .announce(&mut config, TABLE as u32, PENDING as u32);
        let step = (PCI_NOTIFY_STEP as u32).to_le_bytes();
        for (kind, offset, length, more) in [
            (COMMON_KIND, COMMON, COMMON_LENGTH, &[][..]),
            (ISR_KIND, ISR, 1, &[]),
            (DEVICE_KIND, DEVICE, PAGE as u32, &[]),
            (NOTIFY_KIND, PCI_NOTIFY, PAGE as u32, &step),
        ] {
            config.add_capability(VENDOR_CAPABILITY, &capability(kind, offset, length, more));
        }
        let body = capability(ACCESS_KIND, 0, 0, &[0; 4]);
        let access = config.add_capability(VENDOR_CAPABILITY, &body);
        config.allow(access + ACCESS_BAR, &[0xff]);
        config.allow(access + ACCESS_OFFSET, &[0xff; 8]);
        Self {
            registers: Registers::new(device, memory, Box::new(vectors.clone()), notifier),
            config,
            vectors,
            msix_control: msix + 2,
            access,
        }
    }

    /// Returns the device for the thread that serves it.
    #[must_use]
    pub fn handle(&self) -> DeviceHandle {
        self.registers.handle()
    }

    /// Returns the number of accesses that virtio does not allow at their time or in their form.
    /// They had no effect.
    #[must_use]
    pub fn refused(&self) -> u64 {
        self.registers.refused
    }

    /// Returns the state to save. vCPUs must be paused, and the device's thread must make no calls.
    #[must_use]
    pub fn state(&self) -> PciState {
        let load = |vector: &AtomicU16| vector.load(Ordering::Acquire);
        PciState {
            transport: self.registers.state(),
            config: self.config.state(),
            msix: self.vectors.msix.state(),
            config_vector: load(&self.vectors.config),
            queue_vectors: self.vectors.queues.iter().map(load).collect(),
        }
    }

    /// Restores a saved state. The device was just made, and the guest's memory is restored. The
    /// interrupt controllers must be restored too. Every queue is notified once.
    ///
    /// # Errors
    /// If the state is of another device or damaged. The device is then as after a reset.
    pub fn restore(&mut self, state: &PciState) -> Result<(), PciStateError> {
        self.vectors.msix.restore(&state.msix)?;
        self.config.restore(&state.config);
        let vectors = &self.vectors;
        vectors.choose(&vectors.config, state.config_vector);
        for (place, saved) in vectors.queues.iter().zip(&state.queue_vectors) {
            vectors.choose(place, *saved);
        }
        let restored = self.registers.restore(&state.transport);
        if restored.is_err() {
            self.vectors.forget();
        }
        Ok(restored?)
    }

    /// Reads a common register of `width` bytes. `None` if there is none.
    fn read_common(&self, offset: u64, width: usize) -> Option<u64> {
        let registers = &self.registers;
        let load = |vector: &AtomicU16| u64::from(vector.load(Ordering::Acquire));
        let queue = registers.selected();
        let (index, queue) = match queue {
            Some((index, queue)) => (Some(index), *queue),
            None => (None, Default::default()),
        };
        let part = |address: u64, first: u64| match (offset - first, width) {
            (0, 8) => Some(address),
            (0, 4) => Some(address & 0xffff_ffff),
            (4, 4) => Some(address >> 32),
            _ => None,
        };
        let value = match (offset, width) {
            (0x00, 4) => u64::from(registers.device_features_select),
            (0x04, 4) => u64::from(half(registers.offered, registers.device_features_select)),
            (0x08, 4) => u64::from(registers.driver_features_select),
            (0x0c, 4) => u64::from(half(
                registers.driver_features,
                registers.driver_features_select,
            )),
            (0x10, 2) => load(&self.vectors.config),
            (0x12, 2) => registers.queues.len() as u64,
            (0x14, 1) => u64::from(registers.status()),
            (0x15, 1) => u64::from(registers.generation() & 0xff),
            (0x16, 2) => u64::from(registers.queue_select),
            (0x18, 2) => match (queue.size, index) {
                (0, Some(index)) => u64::from(registers.max_size(index)),
                (size, _) => u64::from(size),
            },
            (0x1a, 2) => {
                let vector = index.and_then(|index| self.vectors.queues.get(usize::from(index)));
                vector.map_or(u64::from(NO_VECTOR), load)
            }
            (0x1c, 2) => u64::from(index.is_some_and(|index| registers.is_set_up(index))),
            (0x1e, 2) => u64::from(index.unwrap_or(0)),
            (0x20..=0x24, _) => part(queue.descriptors, 0x20)?,
            (0x28..=0x2c, _) => part(queue.available, 0x28)?,
            (0x30..=0x34, _) => part(queue.used, 0x30)?,
            _ => return None,
        };
        Some(value)
    }

    /// Returns whether virtio allows the write now.
    fn write_common(&mut self, offset: u64, width: usize, value: u64) -> bool {
        let (double, word) = (value as u32, value as u16);
        let registers = &mut self.registers;
        match (offset, width) {
            (0x00, 4) => registers.device_features_select = double,
            (0x08, 4) => registers.driver_features_select = double,
            (0x0c, 4) => return registers.write_features(double),
            (0x10, 2) => self.vectors.choose(&self.vectors.config, word),
            (0x14, 1) => {
                let allowed = registers.write_status(double);
                if double == 0 {
                    self.vectors.forget();
                }
                return allowed;
            }
            (0x16, 2) => registers.queue_select = double,
            (0x1a, 2) => {
                let index = registers.selected().map(|(index, _)| usize::from(index));
                let Some(place) = index.and_then(|index| self.vectors.queues.get(index)) else {
                    return false;
                };
                self.vectors.choose(place, word);
            }
            (0x1c, 2) => {
                // A queue is disabled by a reset alone.
                let index = registers.selected().map(|(index, _)| index);
                let Some(index) = index.filter(|_| double == 1) else {
                    return false;
                };
                let most = u32::from(registers.max_size(index));
                if let Some(queue) = registers.selected_to_set_up()
                    && queue.size == 0
                {
                    queue.size = most;
                }
                return registers.write_ready(double);
            }
            (0x18, 2) | (0x20..=0x37, 4 | 8) => {
                let Some(queue) = registers.selected_to_set_up() else {
                    return false;
                };
                let place = match offset & !7 {
                    0x20 => &mut queue.descriptors,
                    0x28 => &mut queue.available,
                    0x30 => &mut queue.used,
                    _ => {
                        queue.size = double;
                        return true;
                    }
                };
                *place = match (offset & 7, width) {
                    (0, 8) => value,
                    (0, _) => *place & !0xffff_ffff | value,
                    (4, 4) => *place & 0xffff_ffff | value << 32,
                    _ => return false,
                };
            }
            _ => return false,
        }
        true
    }

    fn read_memory(&mut self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        let within = offset % PAGE;
        match offset - within {
            COMMON => match self.read_common(offset, data.len()) {
                Some(value) => data.copy_from_slice(&value.to_le_bytes()[..data.len()]),
                None => self.registers.refuse(),
            },
            ISR => {
                if let Some(first) = data.first_mut().filter(|_| within == 0) {
                    *first = self.registers.take_interrupts();
                }
            }
            DEVICE => self.registers.read_config(within, data),
            TABLE.. if offset < PENDING => {
                let table = &self.vectors.msix;
                table.read_table((offset - TABLE) as usize, data);
            }
            PENDING.. => {
                let table = &self.vectors.msix;
                table.read_pending((offset - PENDING) as usize, data);
            }
            _ => {}
        }
    }

    fn write_memory(&mut self, offset: u64, data: &[u8]) {
        let within = offset % PAGE;
        let allowed = match offset - within {
            COMMON => {
                let mut value = [0; 8];
                match value.get_mut(..data.len()) {
                    Some(low) => {
                        low.copy_from_slice(data);
                        self.write_common(offset, data.len(), u64::from_le_bytes(value))
                    }
                    None => false,
                }
            }
            DEVICE => {
                self.registers.write_config(within, data);
                true
            }
            PCI_NOTIFY => {
                let queue = u16::try_from(within / PCI_NOTIFY_STEP);
                within.is_multiple_of(PCI_NOTIFY_STEP)
                    && queue.is_ok_and(|queue| self.registers.notify(queue))
            }
            TABLE.. if offset < PENDING => {
                let table = &self.vectors.msix;
                table.write_table((offset - TABLE) as usize, data);
                true
            }
            _ => false,
        };
        if !allowed {
            self.registers.refuse();
        }
    }

    /// Returns the memory that the driver has chosen to reach by configuration space, if an access
    /// of so many bytes at `place` is for it.
    fn accessed(&self, place: usize, length: usize) -> Option<u64> {
        if place != self.access + ACCESS_DATA {
            return None;
        }
        let mut fields = [0; 12];
        self.config.read(self.access + ACCESS_BAR, &mut fields);
        let word = |at: usize| {
            let bytes = fields.get(at..at + 4)?;
            Some(u32::from_le_bytes(bytes.try_into().ok()?))
        };
        let (offset, width) = (
            u64::from(word(ACCESS_OFFSET - ACCESS_BAR)?),
            word(ACCESS_LENGTH - ACCESS_BAR)?,
        );
        let fits = matches!(width, 1 | 2 | 4)
            && width as usize == length
            && offset + u64::from(width) <= PCI_MEMORY_LENGTH;
        (fits && fields[0] == 0).then_some(offset)
    }
}

impl PciFunction for PciTransport {
    fn read_config(&mut self, offset: usize, data: &mut [u8]) {
        match self.accessed(offset, data.len()) {
            Some(place) => self.read_memory(place, data),
            None => self.config.read(offset, data),
        }
    }

    fn write_config(&mut self, offset: usize, data: &[u8]) {
        if let Some(place) = self.accessed(offset, data.len()) {
            return self.write_memory(place, data);
        }
        self.config.write(offset, data);
        let control = self.msix_control;
        if offset <= control + 1 && offset + data.len() > control {
            self.vectors.msix.set_control(self.config.word(control));
        }
    }
}

impl BusDevice for PciTransport {
    fn read(&mut self, offset: u64, data: &mut [u8]) {
        match self.config.word(COMMAND) & COMMAND_MEMORY {
            0 => data.fill(0xff),
            _ => self.read_memory(offset, data),
        }
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        if self.config.word(COMMAND) & COMMAND_MEMORY != 0 {
            self.write_memory(offset, data);
        }
    }
}

#[cfg(test)]
mod tests;

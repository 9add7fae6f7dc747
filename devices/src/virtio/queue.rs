//! A device's queues as its model sees them: whole chains are popped and returned with a length.

use std::sync::atomic::Ordering;

use serde::{Deserialize, Serialize};
use virtio_bindings::virtio_ring::VRING_AVAIL_F_NO_INTERRUPT;
use virtio_queue::{Queue, QueueOwnedT, QueueState, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestMemory, Permissions};

use super::chain::{Chain, ChainError, DESCRIPTOR};
use super::{FEATURE_EVENT_INDEX, FEATURE_INDIRECT_DESCRIPTORS};
use crate::WatchedMemory;

/// The size in bytes of the available ring without its elements: flags, index, used_event.
const AVAILABLE_EXTRA: usize = 6;
/// The size in bytes of the used ring without its elements: flags, index, avail_event.
const USED_EXTRA: usize = 6;
/// The flag of the available ring by which a driver disables interrupts.
const NO_INTERRUPT: u16 = VRING_AVAIL_F_NO_INTERRUPT as u16;

/// The reason why a queue is unusable.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, thiserror::Error)]
pub enum QueueError {
    /// The size is not a power of two, or exceeds that offered.
    #[error("its size is not a power of two or more than offered")]
    Size,
    /// A ring is not aligned.
    #[error("a ring is not aligned as virtio 1.2 section 2.7 demands")]
    Alignment,
    /// A ring is not in the guest's memory.
    #[error("a ring lies outside the guest's memory")]
    OutsideMemory,
    /// The available index runs further ahead than the queue is long.
    #[error("the available ring's index is further ahead than the queue is long")]
    Index,
    /// A chain begins at a descriptor that the queue does not have.
    #[error("a chain begins beyond the descriptor table")]
    Head,
}

/// The counts of a queue since the machine was made. They are exact.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct QueueStats {
    /// The number of chains returned to the driver, including rejected ones.
    pub used: u64,
    /// The number of chains that were malformed or not acceptable to the device. They were returned
    /// with a length of zero.
    pub rejected: u64,
    /// The reason of the last rejection.
    pub last_rejection: Option<ChainError>,
    /// The number of times that the queue broke.
    pub broken: u64,
    /// The reason of the last break.
    pub last_break: Option<QueueError>,
}

/// A queue in a snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedQueue {
    /// The number of descriptors.
    pub size: u16,
    /// True if the driver has set it up.
    pub ready: bool,
    /// The reason why it is broken.
    pub broken: Option<QueueError>,
    /// The GPA of the descriptor table.
    pub descriptors: u64,
    /// The GPA of the available ring.
    pub available: u64,
    /// The GPA of the used ring.
    pub used: u64,
    /// The device's index in the available ring.
    pub next_available: u16,
    /// The device's index in the used ring.
    pub next_used: u16,
}

#[derive(Debug)]
struct Slot {
    queue: Queue,
    broken: Option<QueueError>,
    /// True if chains were added to the used ring since the driver was last notified.
    added: bool,
    stats: QueueStats,
}

/// A device's queues and the memory that holds them.
///
/// An index that the device does not have, a queue that is not set up and one that broke are empty
/// queues.
#[derive(Debug)]
pub struct Queues {
    memory: WatchedMemory,
    slots: Vec<Slot>,
    /// The negotiated features, known from DRIVER_OK on.
    features: u64,
    /// True if a queue broke since the transport last checked.
    newly_broken: bool,
    /// True if configuration space changed since the transport last checked.
    config_changed: bool,
}

impl Queues {
    /// Makes queues of at most these sizes. A size that virtio does not allow becomes one
    /// descriptor.
    pub(super) fn new(memory: WatchedMemory, sizes: &[u16]) -> Self {
        let slots = sizes
            .iter()
            .filter_map(|&size| Queue::new(size).or_else(|_| Queue::new(1)).ok())
            .map(|queue| Slot {
                queue,
                broken: None,
                added: false,
                stats: QueueStats::default(),
            })
            .collect();
        Self {
            memory,
            slots,
            features: 0,
            newly_broken: false,
            config_changed: false,
        }
    }

    /// Returns the number of queues.
    #[must_use]
    pub fn len(&self) -> usize {
        self.slots.len()
    }

    /// Checks whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }

    /// Returns the guest's memory.
    #[must_use]
    pub fn memory(&self) -> &WatchedMemory {
        &self.memory
    }

    /// Checks whether the driver has set the queue up and it is not broken.
    #[must_use]
    pub fn ready(&self, index: u16) -> bool {
        self.slot(index).is_some_and(usable)
    }

    /// Returns the queue's size as set by the driver.
    #[must_use]
    pub fn size(&self, index: u16) -> u16 {
        self.slot(index).map_or(0, |slot| slot.queue.size())
    }

    /// Returns the counts.
    #[must_use]
    pub fn stats(&self, index: u16) -> QueueStats {
        self.slot(index)
            .map_or_else(QueueStats::default, |slot| slot.stats)
    }

    /// Takes the next chain. Malformed ones before it are returned with a length of zero and
    /// counted. If there are more of them in one call than the queue has descriptors, the call
    /// ends.
    pub fn pop(&mut self, index: u16) -> Option<Chain> {
        for _ in 0..=self.size(index) {
            let (head, chain) = self.next(index)?;
            match chain {
                Ok(chain) => return Some(chain),
                Err(error) => self.give_back(index, head, error),
            }
        }
        None
    }

    fn next(&mut self, index: u16) -> Option<(u16, Result<Chain, ChainError>)> {
        let indirect = self.features & FEATURE_INDIRECT_DESCRIPTORS != 0;
        let slot = self.slots.get_mut(usize::from(index))?;
        if !usable(slot) {
            return None;
        }
        let (size, table) = (slot.queue.size(), slot.queue.desc_table());
        let found = match slot.queue.iter(&self.memory) {
            Ok(mut chains) => chains.next(),
            Err(virtio_queue::Error::InvalidAvailRingIndex) => {
                self.break_queue(index, QueueError::Index);
                return None;
            }
            Err(_) => {
                self.break_queue(index, QueueError::OutsideMemory);
                return None;
            }
        };
        let head = found?.head_index();
        if head >= size {
            self.break_queue(index, QueueError::Head);
            return None;
        }
        let table = GuestAddress(table);
        let chain = Chain::collect(&self.memory, table, size, head, indirect);
        Some((head, chain))
    }

    /// Puts back the chain that was taken last, so that the next `pop` returns it.
    pub fn put_back(&mut self, index: u16, chain: Chain) {
        drop(chain);
        if let Some(slot) = self.slot_mut(index) {
            slot.queue.go_to_previous_position();
        }
    }

    /// Returns a chain to the driver, with `length` bytes written into it.
    pub fn give(&mut self, index: u16, chain: Chain, length: usize) {
        self.add_used(
            index,
            chain.head(),
            u32::try_from(length).unwrap_or(u32::MAX),
        );
    }

    /// Returns a chain that the device does not accept, and counts it.
    pub fn reject(&mut self, index: u16, chain: Chain, error: ChainError) {
        self.give_back(index, chain.head(), error);
    }

    fn give_back(&mut self, index: u16, head: u16, error: ChainError) {
        if let Some(slot) = self.slot_mut(index) {
            slot.stats.rejected += 1;
            slot.stats.last_rejection = Some(error);
        }
        self.add_used(index, head, 0);
    }

    fn add_used(&mut self, index: u16, head: u16, length: u32) {
        let Some(slot) = self.slots.get_mut(usize::from(index)) else {
            return;
        };
        if !usable(slot) {
            return;
        }
        if slot.queue.add_used(&self.memory, head, length).is_err() {
            self.break_queue(index, QueueError::OutsideMemory);
            return;
        }
        slot.stats.used += 1;
        slot.added = true;
    }

    /// Returns the number of chains made available since the queue was set up, including taken
    /// ones. The count wraps.
    #[must_use]
    pub fn made_available(&self, index: u16) -> u16 {
        let index = self.slot(index).filter(|slot| usable(slot));
        index
            .and_then(|slot| slot.queue.avail_idx(&self.memory, Ordering::Acquire).ok())
            .map_or(0, |wrapping| wrapping.0)
    }

    /// Returns the number of chains that the device has taken since then and not put back. The
    /// count wraps.
    #[must_use]
    pub fn taken(&self, index: u16) -> u16 {
        self.slot(index).map_or(0, |slot| slot.queue.next_avail())
    }

    /// Enables notifications from the next chain on. Returns whether chains came meanwhile; the
    /// caller takes those first.
    #[must_use]
    pub fn listen(&mut self, index: u16) -> bool {
        let Some(slot) = self.slots.get_mut(usize::from(index)) else {
            return false;
        };
        usable(slot)
            && slot
                .queue
                .enable_notification(&self.memory)
                .unwrap_or(false)
    }

    /// Enables notifications from the first chain that the driver adds behind `seen`, a value of
    /// [`Queues::taken`], when those before it are not enough and were put back. Returns whether
    /// such came meanwhile.
    #[must_use]
    pub fn listen_behind(&mut self, index: u16, seen: u16) -> bool {
        let next = self.taken(index);
        self.set_next(index, seen);
        let more = self.listen(index);
        self.set_next(index, next);
        more
    }

    fn set_next(&mut self, index: u16, next: u16) {
        if let Some(slot) = self.slot_mut(index) {
            slot.queue.set_next_avail(next);
        }
    }

    /// Disables notifications of the queue. The driver may send them all the same.
    pub fn ignore(&mut self, index: u16) {
        if let Some(slot) = self.slots.get_mut(usize::from(index))
            && usable(slot)
        {
            // The rings are in memory, so this cannot fail. If it did, notifications would just
            // continue.
            let _ = slot.queue.disable_notification(&self.memory);
        }
    }

    /// Notes a change of configuration space. The driver is notified after the call.
    pub fn config_changed(&mut self) {
        self.config_changed = true;
    }

    /// Marks a queue as broken. The device then needs a reset, and other queues continue.
    fn break_queue(&mut self, index: u16, error: QueueError) {
        if let Some(slot) = self.slot_mut(index) {
            slot.broken = Some(error);
            slot.stats.broken += 1;
            slot.stats.last_break = Some(error);
            self.newly_broken = true;
        }
    }

    fn slot(&self, index: u16) -> Option<&Slot> {
        self.slots.get(usize::from(index))
    }

    fn slot_mut(&mut self, index: u16) -> Option<&mut Slot> {
        self.slots.get_mut(usize::from(index))
    }

    // The transport's part of the interface.

    /// Returns the maximum size offered.
    pub(super) fn max_size(&self, index: u16) -> u16 {
        self.slot(index).map_or(0, |slot| slot.queue.max_size())
    }

    /// Checks whether the driver has set the queue up, even if it broke since.
    pub(super) fn is_set_up(&self, index: u16) -> bool {
        self.slot(index).is_some_and(|slot| slot.queue.ready())
    }

    /// Sets up a queue as the driver or a snapshot describes it.
    pub(super) fn set_up(&mut self, index: u16, saved: &SavedQueue) -> Result<(), QueueError> {
        check(&self.memory, saved, self.max_size(index))?;
        let event_idx_enabled = self.features & FEATURE_EVENT_INDEX != 0;
        let Some(slot) = self.slots.get_mut(usize::from(index)) else {
            return Err(QueueError::Size);
        };
        slot.queue = Queue::try_from(QueueState {
            max_size: slot.queue.max_size(),
            next_avail: saved.next_available,
            next_used: saved.next_used,
            event_idx_enabled,
            size: saved.size,
            ready: saved.ready,
            desc_table: saved.descriptors,
            avail_ring: saved.available,
            used_ring: saved.used,
        })
        .map_err(|_| QueueError::Alignment)?;
        slot.broken = saved.broken;
        slot.added = false;
        Ok(())
    }

    /// Handles the removal of one queue by the driver.
    pub(super) fn take_down(&mut self, index: u16) {
        if let Some(slot) = self.slot_mut(index) {
            slot.queue.reset();
            slot.broken = None;
            slot.added = false;
        }
    }

    /// Handles the removal of all queues by the driver.
    pub(super) fn reset(&mut self) {
        for index in 0..u16::try_from(self.slots.len()).unwrap_or(u16::MAX) {
            self.take_down(index);
        }
        self.features = 0;
        self.newly_broken = false;
        self.config_changed = false;
    }

    /// Sets the negotiated features, when the driver is ready.
    pub(super) fn set_features(&mut self, features: u64) {
        self.features = features;
        for slot in &mut self.slots {
            slot.queue
                .set_event_idx(features & FEATURE_EVENT_INDEX != 0);
        }
    }

    pub(super) fn save(&self) -> Vec<SavedQueue> {
        let save = |slot: &Slot| {
            let state = slot.queue.state();
            SavedQueue {
                size: state.size,
                ready: state.ready,
                broken: slot.broken,
                descriptors: state.desc_table,
                available: state.avail_ring,
                used: state.used_ring,
                next_available: state.next_avail,
                next_used: state.next_used,
            }
        };
        self.slots.iter().map(save).collect()
    }

    /// Collects the queues for whose used chains the driver wants an interrupt. To be called once
    /// after each call of the device.
    pub(super) fn take_used(&mut self, used: &mut Vec<u16>) {
        used.clear();
        for (index, slot) in (0..).zip(&mut self.slots) {
            if !std::mem::take(&mut slot.added) || !usable(slot) {
                continue;
            }
            // A spurious interrupt is harmless, a missing one is not.
            let by_index = slot.queue.needs_notification(&self.memory).unwrap_or(true);
            if by_index && !interrupts_refused(&self.memory, &slot.queue) {
                used.push(index);
            }
        }
    }

    pub(super) fn take_config_changed(&mut self) -> bool {
        std::mem::take(&mut self.config_changed)
    }

    pub(super) fn take_broken(&mut self) -> bool {
        std::mem::take(&mut self.newly_broken)
    }
}

fn usable(slot: &Slot) -> bool {
    slot.queue.ready() && slot.broken.is_none()
}

/// Checks the flag of the available ring that disables interrupts without event index.
fn interrupts_refused(memory: &WatchedMemory, queue: &Queue) -> bool {
    let flags = memory.load::<u16>(GuestAddress(queue.avail_ring()), Ordering::Relaxed);
    !queue.event_idx_enabled() && flags.is_ok_and(|flags| u16::from_le(flags) & NO_INTERRUPT != 0)
}

/// Checks whether a ready queue is valid. This is done once, so that later accesses to its rings
/// cannot fail.
fn check(memory: &WatchedMemory, queue: &SavedQueue, most: u16) -> Result<(), QueueError> {
    if queue.size == 0 || !queue.size.is_power_of_two() || queue.size > most {
        return Err(QueueError::Size);
    }
    let size = usize::from(queue.size);
    let areas = [
        (queue.descriptors, 16, size * DESCRIPTOR, Permissions::Read),
        (
            queue.available,
            2,
            AVAILABLE_EXTRA + size * 2,
            Permissions::Read,
        ),
        (queue.used, 4, USED_EXTRA + size * 8, Permissions::Write),
    ];
    for (address, alignment, length, access) in areas {
        if address % alignment != 0 {
            return Err(QueueError::Alignment);
        }
        let there = GuestMemory::check_range(memory, GuestAddress(address), length, access);
        // The ring's implementation treats an available ring at zero as not set up.
        if queue.ready && (address == 0 || !there) {
            return Err(QueueError::OutsideMemory);
        }
    }
    Ok(())
}

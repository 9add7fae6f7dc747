//! Frames from the backend to the guest.

use std::io;

use super::header::{set_buffers, set_complete};
use super::{
    ChainError, FEATURE_GUEST_CHECKSUM, FEATURE_MERGED_BUFFERS, FRAMES_AT_ONCE, HEADER, Net,
    RECEIVE,
};
use crate::virtio::{Chain, Progress, Queues};

/// The result for a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Placed {
    /// The guest has it, or never will.
    Done,
    /// It waits for buffers behind those that were there, which this value of [`Queues::taken`]
    /// tells.
    Waits(u16),
}

impl Net {
    /// Gives the guest what has come, until there is no more or its buffers are full.
    pub(super) fn receive(&mut self, queues: &mut Queues) -> Progress {
        if !self.link.up || !queues.ready(RECEIVE) {
            return Progress::Idle;
        }
        for _ in 0..FRAMES_AT_ONCE {
            let Some(length) = self.waiting_length else {
                match self.take(queues) {
                    true => continue,
                    // The backend tells when there is more. Buffers need no notification then.
                    false => return Progress::Idle,
                }
            };
            let queue = self.queue_of_waiting(length, queues);
            if let Placed::Waits(seen) = self.place(length, queue, queues) {
                return match queues.listen_behind(queue, seen) {
                    true => Progress::More,
                    false => Progress::Idle,
                };
            }
            self.waiting_length = None;
        }
        Progress::More
    }

    /// Returns the queue whose buffers get the waiting packet.
    fn queue_of_waiting(&self, length: usize, queues: &Queues) -> u16 {
        let frame = self.waiting.get(HEADER..length).unwrap_or_default();
        let pair = match self.pairs {
            1 => 0,
            pairs => self.steering.pair(frame) % pairs,
        };
        let queue = RECEIVE + 2 * pair;
        match queues.ready(queue) {
            true => queue,
            false => RECEIVE,
        }
    }

    /// Takes the next packet from the backend. Returns whether there was one.
    fn take(&mut self, queues: &mut Queues) -> bool {
        let Some(backend) = &mut self.backend else {
            return false;
        };
        match backend.receive(&mut self.waiting) {
            Ok(length) if length >= HEADER => {
                if !self.abilities.offloads {
                    let checked = self.abilities.checked && self.has(FEATURE_GUEST_CHECKSUM);
                    set_complete(&mut self.waiting, checked);
                }
                self.waiting_length = Some(length);
                true
            }
            Ok(_) => true,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => false,
            Err(error) => {
                self.end(&error, queues);
                false
            }
        }
    }

    /// Puts the waiting packet into as many of the guest's buffers as it needs: with merged buffers
    /// several chains, else one.
    fn place(&mut self, length: usize, queue: u16, queues: &mut Queues) -> Placed {
        let merged = self.has(FEATURE_MERGED_BUFFERS);
        let before = queues.taken(queue);
        let mut chains: Vec<Chain> = Vec::new();
        let mut room = 0usize;
        while room < length {
            let Some(chain) = queues.pop(queue) else {
                return self.short_of_buffers(chains, before, queue, queues);
            };
            if chain.readable() > 0 || chain.writable() < HEADER {
                queues.reject(queue, chain, ChainError::Direction);
                continue;
            }
            room = room.saturating_add(chain.writable());
            chains.push(chain);
            if !merged && room < length {
                // It fits into no buffer of this driver: the network loses it.
                self.put_back(chains, before, queue, queues);
                return Placed::Done;
            }
        }
        set_buffers(&mut self.waiting, u16::try_from(chains.len()).unwrap_or(1));
        let mut done = 0;
        for chain in chains {
            let left = self.waiting.get(done..length).unwrap_or_default();
            let written = chain.write(queues.memory(), 0, left);
            done += written;
            queues.give(queue, chain, written);
        }
        Placed::Done
    }

    /// Puts chains back that are too few for the packet. It waits for more, unless the driver has
    /// filled its queue: then it is lost.
    fn short_of_buffers(
        &self,
        chains: Vec<Chain>,
        before: u16,
        queue: u16,
        queues: &mut Queues,
    ) -> Placed {
        let full = chains.len() >= usize::from(queues.size(queue).max(1));
        let seen = queues.taken(queue);
        self.put_back(chains, before, queue, queues);
        match full {
            true => Placed::Done,
            false => Placed::Waits(seen),
        }
    }

    /// Puts back the chains that were taken since `before`. If others between them were rejected,
    /// the queue cannot go back to the first, and they are returned empty.
    fn put_back(&self, chains: Vec<Chain>, before: u16, queue: u16, queues: &mut Queues) {
        let taken = queues.taken(queue).wrapping_sub(before);
        let together = usize::from(taken) == chains.len();
        for chain in chains.into_iter().rev() {
            match together {
                true => queues.put_back(queue, chain),
                false => queues.reject(queue, chain, ChainError::Content),
            }
        }
    }
}

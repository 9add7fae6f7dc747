//! Frames from the guest to the backend.

use std::io;

use super::header::{Header, Permitted};
use super::{
    ChainError, FEATURE_CHECKSUM, FEATURE_HOST_TSO4, FEATURE_HOST_TSO6, FRAMES_AT_ONCE, HEADER,
    LONGEST_FRAME, Net, SHORTEST_FRAME, TRANSMIT,
};
use crate::virtio::{Chain, Progress, Queues};

impl Net {
    /// Sends the guest's frames of all pairs, as [`Self::transmit`] does for one.
    pub(super) fn transmit_all(&mut self, queues: &mut Queues) -> Progress {
        self.stuck = false;
        self.behind = false;
        let mut progress = Progress::Idle;
        for pair in 0..self.most_pairs() {
            if self.transmit(pair, queues) == Progress::More {
                progress = Progress::More;
            }
            if self.stuck {
                return Progress::Idle;
            }
        }
        // The notifications of a queue with more frames are off.
        self.behind = progress == Progress::More;
        progress
    }

    /// Sends the guest's frames of a pair until there are no more, or the backend has no room.
    pub(super) fn transmit(&mut self, pair: u16, queues: &mut Queues) -> Progress {
        let queue = TRANSMIT + 2 * pair;
        queues.ignore(queue);
        for _ in 0..FRAMES_AT_ONCE {
            let Some(chain) = queues.pop(queue) else {
                self.settle(queues);
                // Chains that came between the last check and now are not notified.
                return match queues.listen(queue) {
                    true => Progress::More,
                    false => Progress::Idle,
                };
            };
            let packet = match self.read(&chain, queues) {
                Ok(packet) => packet,
                Err(error) => {
                    queues.reject(queue, chain, error);
                    continue;
                }
            };
            let Some(backend) = &mut self.backend else {
                queues.give(queue, chain, 0);
                continue;
            };
            let packet = self.packet.get(..packet).unwrap_or_default();
            match backend.send(packet) {
                Ok(()) => {
                    if self.pairs > 1 {
                        let frame = packet.get(HEADER..).unwrap_or_default();
                        self.steering.sent(frame, pair);
                    }
                    queues.give(queue, chain, 0);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    queues.put_back(queue, chain);
                    self.stuck = true;
                    return Progress::Idle;
                }
                Err(error) => {
                    queues.give(queue, chain, 0);
                    self.end(&error, queues);
                }
            }
        }
        self.settle(queues);
        Progress::More
    }

    /// Sends the rest of the last packet, or waits for room for it.
    fn settle(&mut self, queues: &mut Queues) {
        match self.backend.as_mut().map(|backend| backend.flush()) {
            None | Some(Ok(())) => {}
            Some(Err(error)) if error.kind() == io::ErrorKind::WouldBlock => self.stuck = true,
            Some(Err(error)) => self.end(&error, queues),
        }
    }

    /// Reads the packet of a chain, in the form that the backend takes. Returns its length.
    fn read(&mut self, chain: &Chain, queues: &Queues) -> Result<usize, ChainError> {
        if chain.writable() > 0 {
            return Err(ChainError::Direction);
        }
        let length = chain.readable();
        if !(HEADER + SHORTEST_FRAME..=HEADER + LONGEST_FRAME).contains(&length) {
            return Err(ChainError::Content);
        }
        let permitted = Permitted {
            checksum: self.has(FEATURE_CHECKSUM),
            tcp4: self.has(FEATURE_HOST_TSO4),
            tcp6: self.has(FEATURE_HOST_TSO6),
        };
        let packet = self.packet.get_mut(..length).unwrap_or_default();
        if chain.read(queues.memory(), 0, packet) != length {
            return Err(ChainError::OutsideMemory);
        }
        let header = Header::read(packet, permitted).ok_or(ChainError::Content)?;
        let Some((place, frame)) = packet.split_first_chunk_mut::<HEADER>() else {
            return Err(ChainError::Content);
        };
        if self.abilities.offloads {
            *place = header.clean();
        } else {
            header.complete(frame);
        }
        Ok(length)
    }
}

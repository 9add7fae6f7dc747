//! Frames from the guest to the backend.

use std::io;

use super::header::{Header, Permitted};
use super::{
    ChainError, FEATURE_CHECKSUM, FEATURE_HOST_TSO4, FEATURE_HOST_TSO6, FRAMES_AT_ONCE, HEADER,
    LONGEST_FRAME, Net, SHORTEST_FRAME, TRANSMIT,
};
use crate::virtio::{Chain, Progress, Queues};

impl Net {
    /// Sends the guest's frames until there are no more, or the backend has no room.
    pub(super) fn transmit(&mut self, queues: &mut Queues) -> Progress {
        self.stuck = false;
        queues.ignore(TRANSMIT);
        for _ in 0..FRAMES_AT_ONCE {
            let Some(chain) = queues.pop(TRANSMIT) else {
                self.settle(queues);
                // Chains that came between the last check and now are not notified.
                return match queues.listen(TRANSMIT) {
                    true => Progress::More,
                    false => Progress::Idle,
                };
            };
            let packet = match self.read(&chain, queues) {
                Ok(packet) => packet,
                Err(error) => {
                    queues.reject(TRANSMIT, chain, error);
                    continue;
                }
            };
            let Some(backend) = &mut self.backend else {
                queues.give(TRANSMIT, chain, 0);
                continue;
            };
            match backend.send(self.packet.get(..packet).unwrap_or_default()) {
                Ok(()) => queues.give(TRANSMIT, chain, 0),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    queues.put_back(TRANSMIT, chain);
                    self.stuck = true;
                    return Progress::Idle;
                }
                Err(error) => {
                    queues.give(TRANSMIT, chain, 0);
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

//! The guest's packets, read and checked.

use super::{AT_ONCE, ChainError, HEADER, HOST_CID, Header, LARGEST, TRANSMIT, Vsock};
use crate::virtio::{Chain, Progress, Queues};

impl Vsock {
    /// Takes the guest's packets until there are no more, or answers wait for buffers.
    pub(super) fn transmit(&mut self, queues: &mut Queues) -> Progress {
        queues.ignore(TRANSMIT);
        for _ in 0..AT_ONCE {
            if self.is_full() {
                // Buffers are notified then.
                return Progress::Idle;
            }
            let Some(chain) = queues.pop(TRANSMIT) else {
                return match queues.listen(TRANSMIT) {
                    true => Progress::More,
                    false => Progress::Idle,
                };
            };
            match self.read(&chain, queues) {
                Ok((header, length)) => {
                    queues.give(TRANSMIT, chain, 0);
                    self.handle(&header, length);
                }
                Err(error) => queues.reject(TRANSMIT, chain, error),
            }
        }
        Progress::More
    }

    /// Reads a packet: its header, and its content to the device's own room. Returns the content's
    /// length.
    fn read(&mut self, chain: &Chain, queues: &Queues) -> Result<(Header, usize), ChainError> {
        if chain.writable() > 0 {
            return Err(ChainError::Direction);
        }
        let mut bytes = [0; HEADER];
        if chain.read(queues.memory(), 0, &mut bytes) != HEADER {
            return Err(ChainError::Content);
        }
        let header = Header::decode(&bytes);
        let length = usize::try_from(header.length).unwrap_or(usize::MAX);
        let there = chain.readable().saturating_sub(HEADER);
        let own = u64::from(self.options.cid);
        let from_guest = header.source_cid == own && header.destination_cid == HOST_CID;
        if length > LARGEST || length > there || !from_guest {
            return Err(ChainError::Content);
        }
        let content = self.content.get_mut(..length).unwrap_or_default();
        match chain.read(queues.memory(), HEADER, content) == length {
            true => Ok((header, length)),
            false => Err(ChainError::OutsideMemory),
        }
    }
}

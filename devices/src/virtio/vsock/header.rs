//! The header of each packet (`struct virtio_vsock_hdr`, virtio 1.2, 5.10.6): 44 bytes, little
//! endian.

/// The size of a header in bytes.
pub const HEADER: usize = 44;
/// The type of a packet of a stream.
pub const STREAM: u16 = 1;

/// The flag of a shutdown by whose sender nothing more is received.
pub const NO_MORE_RECEIVED: u32 = 1;
/// The flag of a shutdown by whose sender nothing more is sent.
pub const NO_MORE_SENT: u32 = 2;
/// Both.
pub const CLOSED: u32 = NO_MORE_RECEIVED | NO_MORE_SENT;

/// The purpose of a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u16)]
pub enum Operation {
    /// Asks for a connection.
    Request = 1,
    /// Accepts one.
    Response = 2,
    /// Refuses or ends one.
    Reset = 3,
    /// Ends one direction or both.
    Shutdown = 4,
    /// Carries bytes.
    Data = 5,
    /// Reports the sender's room.
    CreditUpdate = 6,
    /// Asks for the receiver's room.
    CreditRequest = 7,
}

impl Operation {
    const ALL: [Self; 7] = [
        Self::Request,
        Self::Response,
        Self::Reset,
        Self::Shutdown,
        Self::Data,
        Self::CreditUpdate,
        Self::CreditRequest,
    ];

    /// Returns the operation with a number, if it is known.
    #[must_use]
    pub fn of(number: u16) -> Option<Self> {
        let mut all = Self::ALL.into_iter();
        all.find(|operation| *operation as u16 == number)
    }
}

/// The header of a packet, as its sender sees both sides.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Header {
    /// The sender's context id.
    pub source_cid: u64,
    /// The receiver's context id.
    pub destination_cid: u64,
    /// The sender's port.
    pub source_port: u32,
    /// The receiver's port.
    pub destination_port: u32,
    /// The number of bytes behind the header.
    pub length: u32,
    /// The type of the socket ([`STREAM`]).
    pub kind: u16,
    /// The [`Operation`].
    pub operation: u16,
    /// The flags of a shutdown.
    pub flags: u32,
    /// The size in bytes of the sender's buffer for this connection.
    pub buffer: u32,
    /// The number of bytes that have left that buffer since the connection began. It wraps.
    pub consumed: u32,
}

impl Header {
    /// Reads a header.
    #[must_use]
    pub fn decode(bytes: &[u8; HEADER]) -> Self {
        let mut rest = bytes.as_slice();
        Self {
            source_cid: u64::from_le_bytes(next(&mut rest)),
            destination_cid: u64::from_le_bytes(next(&mut rest)),
            source_port: u32::from_le_bytes(next(&mut rest)),
            destination_port: u32::from_le_bytes(next(&mut rest)),
            length: u32::from_le_bytes(next(&mut rest)),
            kind: u16::from_le_bytes(next(&mut rest)),
            operation: u16::from_le_bytes(next(&mut rest)),
            flags: u32::from_le_bytes(next(&mut rest)),
            buffer: u32::from_le_bytes(next(&mut rest)),
            consumed: u32::from_le_bytes(next(&mut rest)),
        }
    }

    /// Writes the header.
    #[must_use]
    pub fn encode(&self) -> [u8; HEADER] {
        let mut bytes = [0; HEADER];
        let fields = self.source_cid.to_le_bytes().into_iter();
        let fields = fields
            .chain(self.destination_cid.to_le_bytes())
            .chain(self.source_port.to_le_bytes())
            .chain(self.destination_port.to_le_bytes())
            .chain(self.length.to_le_bytes())
            .chain(self.kind.to_le_bytes())
            .chain(self.operation.to_le_bytes())
            .chain(self.flags.to_le_bytes())
            .chain(self.buffer.to_le_bytes())
            .chain(self.consumed.to_le_bytes());
        for (place, byte) in bytes.iter_mut().zip(fields) {
            *place = byte;
        }
        bytes
    }
}

/// Takes the next bytes. After the end, zeros follow.
fn next<const N: usize>(rest: &mut &[u8]) -> [u8; N] {
    match rest.split_first_chunk::<N>() {
        Some((first, behind)) => {
            *rest = behind;
            *first
        }
        None => [0; N],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_stand_where_the_standard_has_them() {
        let mut bytes = [0; HEADER];
        for (place, byte) in bytes.iter_mut().zip(1..) {
            *place = byte;
        }
        let header = Header::decode(&bytes);
        let expected = Header {
            source_cid: 0x0807_0605_0403_0201,
            destination_cid: 0x100f_0e0d_0c0b_0a09,
            source_port: 0x1413_1211,
            destination_port: 0x1817_1615,
            length: 0x1c1b_1a19,
            kind: 0x1e1d,
            operation: 0x201f,
            flags: 0x2423_2221,
            buffer: 0x2827_2625,
            consumed: 0x2c2b_2a29,
        };
        assert_eq!(header, expected);
        assert_eq!(header.encode(), bytes);
    }

    #[test]
    fn operations_have_the_numbers_of_the_standard() {
        for number in 0..=u16::MAX {
            let known = Operation::of(number).map(|operation| operation as u16);
            assert_eq!(known, (1..=7).contains(&number).then_some(number));
        }
    }
}

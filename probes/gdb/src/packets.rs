//! Packets of the protocol: `$BODY#CHECKSUM`, with acknowledgements and interrupts between them
//! (GDB manual, "Overview" of appendix E).

/// The size in bytes up to which a packet is collected. A longer one is passed on in pieces.
const MOST: usize = 1 << 16;

/// Collects bytes to packets.
#[derive(Debug, Default)]
pub(crate) struct Framer {
    /// The bytes of the packet that has begun.
    packet: Vec<u8>,
}

impl Framer {
    /// Takes a byte. Returns bytes that are complete: a packet, or one byte between packets.
    pub(crate) fn take(&mut self, byte: u8) -> Option<Vec<u8>> {
        self.packet.push(byte);
        let is_packet = self.packet.first() == Some(&b'$');
        let is_whole = self.packet.iter().rev().nth(2) == Some(&b'#');
        let is_complete = !is_packet || is_whole || self.packet.len() >= MOST;
        is_complete.then(|| std::mem::take(&mut self.packet))
    }
}

/// Returns the body of a packet; `None` for other bytes.
pub(crate) fn body(piece: &[u8]) -> Option<&[u8]> {
    let (body, [mark, ..]) = piece.strip_prefix(b"$")?.split_last_chunk::<3>()?;
    (*mark == b'#').then_some(body)
}

/// Returns the packet with this body, in which no character needs an escape.
pub(crate) fn packet(body: &str) -> Vec<u8> {
    let sum = body.bytes().fold(0_u8, u8::wrapping_add);
    format!("${body}#{sum:02x}").into_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_divided_into_packets_and_what_stands_between_them() {
        let mut framer = Framer::default();
        let taken: Vec<_> = b"+$OK#9a\x03-$#00$m1"
            .iter()
            .filter_map(|byte| framer.take(*byte))
            .collect();
        let expected: [&[u8]; 5] = [b"+", b"$OK#9a", b"\x03", b"-", b"$#00"];
        assert_eq!(taken, expected);
        let bodies: Vec<_> = taken.iter().map(|piece| body(piece)).collect();
        assert_eq!(bodies, [None, Some(&b"OK"[..]), None, None, Some(&b""[..])]);
        assert_eq!(packet("OK"), b"$OK#9a");
    }

    #[test]
    fn an_endless_packet_is_passed_on_in_pieces() {
        let mut framer = Framer::default();
        let bytes = [b'$'].into_iter().chain(std::iter::repeat(b'x'));
        let taken: Vec<_> = bytes.take(MOST).filter_map(|b| framer.take(b)).collect();
        assert_eq!(taken.len(), 1);
        assert_eq!(body(&taken[0]), None);
    }
}

//! The header before each frame (virtio 1.2, 5.1.6), and checksums that the guest leaves to its
//! device.

use virtio_bindings::virtio_net::{
    VIRTIO_NET_HDR_F_DATA_VALID, VIRTIO_NET_HDR_F_NEEDS_CSUM, VIRTIO_NET_HDR_GSO_NONE,
    VIRTIO_NET_HDR_GSO_TCPV4, VIRTIO_NET_HDR_GSO_TCPV6,
};

use super::backend::{HEADER, LONGEST_FRAME};

const NEEDS_CHECKSUM: u8 = VIRTIO_NET_HDR_F_NEEDS_CSUM as u8;
const DATA_VALID: u8 = VIRTIO_NET_HDR_F_DATA_VALID as u8;
const NONE: u8 = VIRTIO_NET_HDR_GSO_NONE as u8;
const TCP4: u8 = VIRTIO_NET_HDR_GSO_TCPV4 as u8;
const TCP6: u8 = VIRTIO_NET_HDR_GSO_TCPV6 as u8;
/// The place of `num_buffers`.
const BUFFERS: usize = 10;

/// The offloads that the driver may request for a frame that it sends.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Permitted {
    /// To complete a checksum.
    pub(super) checksum: bool,
    /// To cut TCP over IPv4.
    pub(super) tcp4: bool,
    /// To cut TCP over IPv6.
    pub(super) tcp6: bool,
}

/// The header of a frame that the driver sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Header {
    needs_checksum: bool,
    segmentation: u8,
    header_length: u16,
    segment: u16,
    start: u16,
    offset: u16,
}

impl Header {
    /// Reads the header of `packet`, and checks that it asks only for what is `permitted`, of bytes
    /// that are in the frame. Unknown flags are ignored, as virtio demands.
    pub(super) fn read(packet: &[u8], permitted: Permitted) -> Option<Self> {
        let (bytes, frame) = packet.split_first_chunk::<HEADER>()?;
        if frame.len() > LONGEST_FRAME {
            return None;
        }
        let [flags, segmentation, a, b, c, d, e, f, g, h, _, _] = *bytes;
        let header = Self {
            needs_checksum: flags & NEEDS_CHECKSUM != 0,
            segmentation,
            header_length: u16::from_le_bytes([a, b]),
            segment: u16::from_le_bytes([c, d]),
            start: u16::from_le_bytes([e, f]),
            offset: u16::from_le_bytes([g, h]),
        };
        let cut = match header.segmentation {
            NONE => true,
            TCP4 => permitted.tcp4 && header.needs_checksum && header.segment > 0,
            TCP6 => permitted.tcp6 && header.needs_checksum && header.segment > 0,
            _ => false,
        };
        let place = header.place();
        let checksum = !header.needs_checksum || (permitted.checksum && place.end <= frame.len());
        (cut && checksum).then_some(header)
    }

    /// Returns the place of the checksum in the frame.
    fn place(&self) -> std::ops::Range<usize> {
        let start = usize::from(self.start) + usize::from(self.offset);
        start..start + 2
    }

    /// Returns the header without what the device does not know.
    pub(super) fn clean(&self) -> [u8; HEADER] {
        let mut bytes = [0; HEADER];
        let checksum = self.needs_checksum;
        let words = [self.header_length, self.segment, self.start, self.offset];
        let parts = [if checksum { NEEDS_CHECKSUM } else { 0 }, self.segmentation];
        let words = words.iter().flat_map(|word| word.to_le_bytes());
        for (place, byte) in bytes.iter_mut().zip(parts.into_iter().chain(words)) {
            *place = byte;
        }
        bytes
    }

    /// Completes the checksum of `frame`, if the driver has left that to the device: the sum of
    /// everything from `csum_start` on, to which the driver has added the rest.
    pub(super) fn complete(&self, frame: &mut [u8]) {
        if !self.needs_checksum {
            return;
        }
        let Some(covered) = frame.get(usize::from(self.start)..) else {
            return;
        };
        // A sum of zero means none at all for UDP. Both are the same number in this arithmetic.
        let sum = match !folded(covered) {
            0 => 0xffff,
            sum => sum,
        };
        if let Some(place) = frame.get_mut(self.place()) {
            place.copy_from_slice(&sum.to_be_bytes());
        }
    }
}

/// Returns the one's complement sum of 16-bit words (RFC 1071).
fn folded(bytes: &[u8]) -> u16 {
    let (pairs, rest) = bytes.as_chunks::<2>();
    let sum: u64 = pairs
        .iter()
        .map(|pair| u64::from(u16::from_be_bytes(*pair)))
        .sum();
    let last = rest.first().map_or(0, |byte| u64::from(*byte) << 8);
    let mut sum = sum + last;
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}

/// Puts the number of chains into the header of a received packet.
pub(super) fn set_buffers(packet: &mut [u8], count: u16) {
    if let Some(place) = packet.get_mut(BUFFERS..HEADER) {
        place.copy_from_slice(&count.to_le_bytes());
    }
}

/// Fills the header of a received packet whose checksums are complete; `checked`: and right.
pub(super) fn set_complete(packet: &mut [u8], checked: bool) {
    if let Some(header) = packet.first_chunk_mut::<HEADER>() {
        *header = [0; HEADER];
        header[0] = if checked { DATA_VALID } else { 0 };
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    const ALL: Permitted = Permitted {
        checksum: true,
        tcp4: true,
        tcp6: true,
    };
    const NOTHING: Permitted = Permitted {
        checksum: false,
        tcp4: false,
        tcp6: false,
    };

    fn packet(header: [u8; HEADER], frame: usize) -> Vec<u8> {
        [header.to_vec(), vec![0; frame]].concat()
    }

    #[test]
    fn a_header_asks_only_for_what_was_negotiated_and_is_in_the_frame() {
        let checksum = |start: u8, offset: u8| [1, 0, 0, 0, 0, 0, start, 0, offset, 0, 0, 0];
        let cut = |kind: u8, flags: u8, size: u8| [flags, kind, 0, 0, size, 0, 34, 0, 16, 0, 0, 0];
        for (header, frame, permitted, good) in [
            ([0; HEADER], 60, NOTHING, true),
            ([0; HEADER], LONGEST_FRAME, NOTHING, true),
            ([0; HEADER], LONGEST_FRAME + 1, ALL, false),
            // Flags of other versions are not looked at.
            ([0xfe, 0, 0, 0, 0, 0, 0, 0, 0, 0, 9, 9], 60, NOTHING, true),
            (checksum(34, 6), 42, ALL, true),
            (checksum(34, 6), 41, ALL, false),
            (checksum(34, 6), 60, NOTHING, false),
            (
                [1, 0, 0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff, 0, 0],
                60,
                ALL,
                false,
            ),
            (cut(1, 1, 200), 300, ALL, true),
            (cut(4, 1, 200), 300, ALL, true),
            (cut(1, 1, 200), 300, NOTHING, false),
            (cut(1, 0, 200), 300, ALL, false),
            (cut(1, 1, 0), 300, ALL, false),
            (cut(3, 1, 200), 300, ALL, false),
            (cut(0x81, 1, 200), 300, ALL, false),
        ] {
            let read = Header::read(&packet(header, frame), permitted);
            assert_eq!(read.is_some(), good, "{header:?} {frame}");
        }
        assert_eq!(Header::read(&[0; HEADER - 1], ALL), None);
    }

    #[test]
    fn a_checksum_is_the_one_of_rfc_1071() {
        // A UDP datagram over IPv4, from 10.0.2.15 to 10.0.2.2: the driver has put the sum of the
        // addresses, the protocol and the length there.
        let mut frame = vec![0; 34];
        frame.extend([
            0x04, 0xd2, 0x00, 0x35, 0x00, 0x0b, 0x18, 0x2d, b'a', b'b', b'c',
        ]);
        let header = [1, 0, 0, 0, 0, 0, 34, 0, 6, 0, 0, 0];
        let header = Header::read(&[header.to_vec(), frame.clone()].concat(), ALL).unwrap();
        header.complete(&mut frame);
        // The receiver adds everything: all ones are right.
        let mut received = frame.split_off(34);
        let pseudo = [10, 0, 2, 15, 10, 0, 2, 2, 0, 17, 0, 11];
        received.extend([0]);
        received.extend(pseudo);
        assert_eq!(folded(&received), 0xffff);
        // Without the request nothing is changed.
        let mut untouched = vec![7; 60];
        let header = Header::read(&packet([0; HEADER], 60), ALL).unwrap();
        header.complete(&mut untouched);
        assert_eq!(untouched, vec![7; 60]);
    }

    #[test]
    fn a_sum_of_zero_is_sent_as_all_ones() {
        let mut frame = vec![0xff, 0xff, 0, 0];
        let header = [1, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0];
        let header = Header::read(&[header.to_vec(), frame.clone()].concat(), ALL).unwrap();
        header.complete(&mut frame);
        assert_eq!(frame, [0xff, 0xff, 0xff, 0xff]);
    }

    #[test]
    fn only_what_is_known_is_passed_on() {
        let bytes = [0xff, 1, 54, 0, 0xb4, 5, 34, 0, 16, 0, 9, 9];
        let header = Header::read(&packet(bytes, 100), ALL).unwrap();
        assert_eq!(header.clean(), [1, 1, 54, 0, 0xb4, 5, 34, 0, 16, 0, 0, 0]);
    }
}

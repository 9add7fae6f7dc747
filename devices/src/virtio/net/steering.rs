//! The choice of a pair of queues for each received frame: the one by which the guest has last sent
//! a frame of the same flow (virtio 1.2, 5.1.6.5.6.1, automatic receive steering).
//!
//! A flow is the pair of addresses and ports of IPv4 or IPv6, in either direction. Flows share a
//! table of fixed size. One that is new there, and all other frames, come by the first pair.

/// The size of the table.
const FLOWS: usize = 1024;

const ETHERNET: usize = 14;
/// The EtherType of a VLAN tag, which is 4 bytes long.
const VLAN: [u8; 2] = [0x81, 0x00];
const IPV4: [u8; 2] = [0x08, 0x00];
const IPV6: [u8; 2] = [0x86, 0xdd];
const TCP: u8 = 6;
const UDP: u8 = 17;

/// The pair of queues of each flow.
pub(super) struct Steering(Box<[u8; FLOWS]>);

impl Steering {
    pub(super) fn new() -> Self {
        Self(Box::new([0; FLOWS]))
    }

    /// Forgets all flows.
    pub(super) fn forget(&mut self) {
        self.0.fill(0);
    }

    /// Notes that the guest has sent a frame by a pair.
    pub(super) fn sent(&mut self, frame: &[u8], pair: u16) {
        if let Some(place) = flow(frame).and_then(|flow| self.0.get_mut(flow)) {
            *place = u8::try_from(pair).unwrap_or(0);
        }
    }

    /// Returns the pair for a received frame.
    pub(super) fn pair(&self, frame: &[u8]) -> u16 {
        let place = flow(frame).and_then(|flow| self.0.get(flow));
        place.copied().unwrap_or(0).into()
    }
}

/// Returns the place of a frame's flow in the table; `None` for a frame that is not of IP.
fn flow(frame: &[u8]) -> Option<usize> {
    let (kind, packet) = match frame.get(12..14)? {
        tag if tag == VLAN => (frame.get(16..18)?, frame.get(ETHERNET + 4..)?),
        kind => (kind, frame.get(ETHERNET..)?),
    };
    let (addresses, ports) = if kind == IPV4 {
        let header = usize::from(packet.first()? & 0xf) * 4;
        // Only the first fragment has ports, so no fragment is steered by them.
        let is_whole = u16::from_be_bytes([*packet.get(6)?, *packet.get(7)?]) & 0x3fff == 0;
        let ports = is_whole && matches!(*packet.get(9)?, TCP | UDP);
        (packet.get(12..20)?, ports.then_some(header))
    } else if kind == IPV6 {
        let ports = matches!(*packet.get(6)?, TCP | UDP);
        (packet.get(8..40)?, ports.then_some(40))
    } else {
        return None;
    };
    let ports = ports.and_then(|at| packet.get(at..at.checked_add(4)?));
    // The sum of both sides is the same in both directions.
    let (source, target) = addresses.split_at(addresses.len() / 2);
    let (from, to) = ports.unwrap_or_default().split_at(ports.map_or(0, |_| 2));
    let sum = side(source, from).wrapping_add(side(target, to));
    // Multiplied by the golden ratio, the upper bits depend on all others.
    let mixed = sum.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (64 - FLOWS.ilog2());
    usize::try_from(mixed).ok()
}

/// Returns a number for an address and a port: their FNV-1a hash.
fn side(address: &[u8], port: &[u8]) -> u64 {
    let bytes = address.iter().chain(port);
    bytes.fold(0xcbf2_9ce4_8422_2325, |sum: u64, byte| {
        (sum ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3)
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    const NEAR: [u8; 4] = [10, 0, 0, 2];
    const FAR: [u8; 4] = [10, 0, 0, 1];

    fn tcp4(source: [u8; 4], target: [u8; 4], ports: [u16; 2], fragment: u16) -> Vec<u8> {
        let mut frame = vec![0; ETHERNET + 40];
        frame[12..14].copy_from_slice(&IPV4);
        let packet = &mut frame[ETHERNET..];
        packet[0] = 0x45;
        packet[6..8].copy_from_slice(&fragment.to_be_bytes());
        packet[9] = TCP;
        packet[12..16].copy_from_slice(&source);
        packet[16..20].copy_from_slice(&target);
        packet[20..22].copy_from_slice(&ports[0].to_be_bytes());
        packet[22..24].copy_from_slice(&ports[1].to_be_bytes());
        frame
    }

    #[test]
    fn an_answer_comes_by_the_pair_of_the_request() {
        let mut steering = Steering::new();
        for pair in 0..4 {
            let sent = tcp4(NEAR, FAR, [40_000 + pair, 80], 0);
            steering.sent(&sent, pair);
        }
        for pair in 0..4 {
            let answer = tcp4(FAR, NEAR, [80, 40_000 + pair], 0);
            assert_eq!(steering.pair(&answer), pair);
            // With a VLAN's tag it is the same flow.
            let mut tagged = answer.clone();
            tagged.splice(12..12, [0x81, 0, 0, 7]);
            assert_eq!(steering.pair(&tagged), pair);
        }
        // The thread of the guest has moved to another CPU.
        steering.sent(&tcp4(NEAR, FAR, [40_001, 80], 0), 3);
        assert_eq!(steering.pair(&tcp4(FAR, NEAR, [80, 40_001], 0)), 3);
        steering.forget();
        assert_eq!(steering.pair(&tcp4(FAR, NEAR, [80, 40_001], 0)), 0);
    }

    #[test]
    fn flows_spread_over_the_table_and_fragments_keep_together() {
        let ports = 40_000..41_000;
        let flows: std::collections::BTreeSet<_> = ports
            .map(|port| flow(&tcp4(NEAR, FAR, [port, 80], 0)).unwrap())
            .collect();
        assert!(flows.len() > 500, "{}", flows.len());
        // The first one has ports, the others have data in their place.
        let more = flow(&tcp4(NEAR, FAR, [40_000, 80], 0x2000));
        assert_eq!(more, flow(&tcp4(FAR, NEAR, [1, 2], 0x0100)));
    }

    #[test]
    fn frames_that_end_early_are_no_flow() {
        let frame = tcp4(NEAR, FAR, [1, 2], 0);
        for length in 0..ETHERNET + 20 {
            assert_eq!(flow(&frame[..length]), None, "{length}");
        }
        let mut other = frame;
        other[12..14].copy_from_slice(&[0x08, 0x06]);
        assert_eq!(flow(&other), None);
        let mut wide = vec![0xff; ETHERNET + 40];
        wide[12..14].copy_from_slice(&IPV6);
        assert!(flow(&wide).is_some());
        assert_eq!(flow(&wide[..ETHERNET + 39]), None);
    }
}

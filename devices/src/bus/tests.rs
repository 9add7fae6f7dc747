#![allow(clippy::unwrap_used)]

use super::*;

/// A device that returns the offset for reads and records writes.
#[derive(Default)]
struct Recorder {
    writes: Vec<(u64, Vec<u8>)>,
}

impl BusDevice for Recorder {
    fn read(&mut self, offset: u64, data: &mut [u8]) {
        data.fill(u8::try_from(offset & 0xff).unwrap());
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        self.writes.push((offset, data.to_vec()));
    }
}

fn recorder() -> Arc<Mutex<Recorder>> {
    Arc::default()
}

fn read(bus: &Bus, address: u64, length: usize) -> Vec<u8> {
    let mut data = vec![0x55; length];
    bus.read(address, &mut data);
    data
}

#[test]
fn accesses_reach_the_device_with_relative_offsets() {
    let (low, high) = (recorder(), recorder());
    let mut bus = Bus::new();
    bus.insert("high", 0x200, 0x10, high.clone()).unwrap();
    bus.insert("low", 0x100, 0x10, low.clone()).unwrap();
    bus.write(0x101, &[1, 2]);
    bus.write(0x20f, &[3]);
    assert_eq!(low.lock().unwrap().writes, [(1, vec![1, 2])]);
    assert_eq!(high.lock().unwrap().writes, [(15, vec![3])]);
    assert_eq!(read(&bus, 0x20e, 2), [14, 14]);
    assert_eq!(bus.stats(), BusStats::default());
}

#[test]
fn what_no_device_holds_reads_all_ones_and_is_counted() {
    let device = recorder();
    let mut bus = Bus::new();
    bus.insert("dev", 0x100, 0x10, device.clone()).unwrap();
    bus.insert("top", u64::MAX - 3, 4, recorder()).unwrap();
    // (address, length): before, after, across the start, across the end, past the end of
    // everything
    let misses = [
        (0xff, 1),
        (0x110, 4),
        (0xfe, 4),
        (0x10e, 4),
        (u64::MAX, 2),
        (0, 8),
    ];
    for (address, length) in misses {
        assert_eq!(
            read(&bus, address, length),
            vec![0xff; length],
            "{address:#x}"
        );
        bus.write(address, &vec![0; length]);
        bus.write(address, &vec![0; length]);
    }
    assert!(device.lock().unwrap().writes.is_empty());
    let stats = bus.stats();
    let mut addresses: Vec<u64> = misses.iter().map(|&(address, _)| address).collect();
    addresses.sort_unstable();
    let expected: Vec<UnknownAccess> = addresses
        .into_iter()
        .map(|address| UnknownAccess {
            address,
            reads: 1,
            writes: 2,
        })
        .collect();
    assert_eq!(stats.unknown, expected);
    assert_eq!(stats.unknown_total(), 18);
    // The last byte of the address space belongs to "top".
    assert_eq!(read(&bus, u64::MAX, 1), [3]);
}

#[test]
fn a_guest_that_touches_many_addresses_fills_a_bounded_table() {
    let bus = Bus::new();
    for address in 0..1000 {
        bus.write(address, &[0]);
    }
    bus.read(999, &mut [0]);
    bus.read(3, &mut [0]);
    let stats = bus.stats();
    assert_eq!(stats.unknown.len(), 64);
    assert_eq!((stats.other_writes, stats.other_reads), (936, 1));
    assert_eq!(stats.unknown_total(), 1002);
    assert_eq!(stats.unknown[3].reads, 1);
}

#[test]
fn counts_from_several_threads_add_up() {
    let bus = Bus::new();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for address in 0..500 {
                    bus.read(address % 100, &mut [0; 2]);
                }
            });
        }
    });
    assert_eq!(bus.stats().unknown_total(), 2000);
}

#[test]
fn an_overlap_names_both_devices() {
    let cases = [
        (0x100, 0x10),
        (0xff, 2),
        (0x10f, 1),
        (0x0, 0x1000),
        (0x108, 2),
    ];
    for (base, length) in cases {
        let mut bus = Bus::new();
        bus.insert("first", 0x100, 0x10, recorder()).unwrap();
        let error = bus.insert("second", base, length, recorder()).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("first at 0x100 (16 bytes)"), "{text}");
        assert!(
            text.contains(&format!("second at {base:#x} ({length} bytes)")),
            "{text}"
        );
    }
    let mut bus = Bus::new();
    bus.insert("first", 0x100, 0x10, recorder()).unwrap();
    bus.insert("before", 0xf0, 0x10, recorder()).unwrap();
    bus.insert("after", 0x110, 1, recorder()).unwrap();
}

#[test]
fn impossible_ranges_are_refused() {
    let cases = [(0x100, 0, false), (u64::MAX, 2, false), (1, u64::MAX, true)];
    for (base, length, fits) in cases {
        let result = Bus::new().insert("dev", base, length, recorder());
        assert_eq!(result.is_ok(), fits, "{base:#x} {length}");
    }
}

#[test]
fn an_empty_access_touches_nothing() {
    let bus = Bus::new();
    bus.read(1, &mut []);
    bus.write(1, &[]);
    assert_eq!(bus.stats().unknown_total(), 0);
}

//! Requests as a driver writes them, and their results.
#![allow(clippy::unwrap_used)]

use std::io;
use std::sync::{Arc, Mutex};

use virtio_queue::desc::RawDescriptor;
use virtio_queue::desc::split::Descriptor;
use virtio_queue::mock::MockSplitQueue;
use vm_memory::{Bytes, GuestAddress};

use super::*;
use crate::WatchedMemory;

const QUEUE: u16 = 16;
const MEMORY: usize = 1 << 20;
/// The start of a request's buffers.
const BUFFERS: u64 = 0x1_0000;
const WRITE: u16 = 2;
const SECTORS: u64 = 64;
const NOT_WRITTEN: u8 = 0xee;

/// A disk in memory that records its requests.
#[derive(Clone)]
struct Kept(Arc<Mutex<State>>);

struct State {
    bytes: Vec<u8>,
    flushes: usize,
    discards: Vec<Range<u64>>,
    has_holes: bool,
    broken: bool,
}

impl Kept {
    fn new(sectors: u64) -> Self {
        Self(Arc::new(Mutex::new(State {
            bytes: (0..sectors * SECTOR)
                .map(|at| (at / SECTOR) as u8)
                .collect(),
            flushes: 0,
            discards: Vec::new(),
            has_holes: true,
            broken: false,
        })))
    }

    fn with<R>(&self, look: impl FnOnce(&mut State) -> R) -> io::Result<R> {
        let mut state = self.0.lock().unwrap();
        match state.broken {
            true => Err(io::Error::other("broken")),
            false => Ok(look(&mut state)),
        }
    }
}

impl BlockBackend for Kept {
    fn length(&self) -> u64 {
        self.0.lock().unwrap().bytes.len() as u64
    }

    fn read_at(&mut self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        let at = offset as usize;
        self.with(|state| buffer.copy_from_slice(&state.bytes[at..at + buffer.len()]))
    }

    fn write_at(&mut self, data: &[u8], offset: u64) -> io::Result<()> {
        let at = offset as usize;
        self.with(|state| state.bytes[at..at + data.len()].copy_from_slice(data))
    }

    fn flush(&mut self) -> io::Result<()> {
        self.with(|state| state.flushes += 1)
    }

    fn discard(&mut self, range: Range<u64>) -> io::Result<bool> {
        self.with(|state| {
            state.discards.push(range.clone());
            if state.has_holes {
                state.bytes[range.start as usize..range.end as usize].fill(0);
            }
            state.has_holes
        })
    }
}

fn header(kind: u32, sector: u64) -> Vec<u8> {
    let mut bytes = kind.to_le_bytes().to_vec();
    bytes.extend([0; 4]);
    bytes.extend(sector.to_le_bytes());
    bytes
}

fn segment(sector: u64, sectors: u32, flags: u32) -> Vec<u8> {
    let mut bytes = sector.to_le_bytes().to_vec();
    bytes.extend(sectors.to_le_bytes());
    bytes.extend(flags.to_le_bytes());
    bytes
}

/// The result of a request in the driver's memory.
#[derive(Debug, PartialEq, Eq)]
struct Answer {
    /// The status byte.
    status: u8,
    used: usize,
    data: Vec<u8>,
}

/// Puts a request into guest memory and serves it. Its readable part is split into descriptors of
/// the lengths of `given`, its writable part into those of `room`.
fn serve(disk: &mut Disk, given: &[&[u8]], room: &[usize]) -> Option<Answer> {
    let memory = WatchedMemory::from_ranges(&[(GuestAddress(0), MEMORY)]).unwrap();
    let mut at = BUFFERS;
    let mut descriptors = Vec::new();
    // There are no descriptors of zero length.
    for bytes in given.iter().filter(|bytes| !bytes.is_empty()) {
        memory.write_slice(bytes, GuestAddress(at)).unwrap();
        descriptors.push(Descriptor::new(at, bytes.len() as u32, 0, 0));
        at += bytes.len() as u64;
    }
    let writable = at;
    for length in room {
        memory
            .write_slice(&vec![NOT_WRITTEN; *length], GuestAddress(at))
            .unwrap();
        descriptors.push(Descriptor::new(at, *length as u32, WRITE, 0));
        at += *length as u64;
    }
    let queue = MockSplitQueue::create(&memory, GuestAddress(0), QUEUE);
    let descriptors: Vec<RawDescriptor> =
        descriptors.into_iter().map(RawDescriptor::from).collect();
    let chain = queue.build_desc_chain(&descriptors).unwrap();
    let (table, head) = (queue.desc_table_addr(), chain.head_index());
    let chain = Chain::collect(&memory, table, QUEUE, head, false).unwrap();
    let used = disk.serve(&chain, &memory)?;
    let mut data = vec![0; (at - writable) as usize];
    memory
        .read_slice(&mut data, GuestAddress(writable))
        .unwrap();
    let status = data.pop().unwrap();
    assert!(status <= Status::Unsupported as u8, "status {status}");
    Some(Answer { status, used, data })
}

fn disk(kept: &Kept, read_only: bool) -> Disk {
    let mut disk = Disk::new(Box::new(kept.clone()), read_only, "disk7");
    disk.write_through = false;
    disk
}

fn sector(value: u8) -> Vec<u8> {
    vec![value; SECTOR as usize]
}

#[test]
fn sectors_are_read_and_written_however_they_are_cut() {
    let kept = Kept::new(SECTORS);
    let mut disk = disk(&kept, false);
    for room in [
        &[1024, 1][..],
        &[1025],
        &[512, 512, 1],
        &[1, 1023, 1],
        &[700, 325],
    ] {
        let answer = serve(&mut disk, &[&header(IN, 3)], room).unwrap();
        assert_eq!((answer.status, answer.used), (0, 1025), "{room:?}");
        assert_eq!(answer.data, [sector(3), sector(4)].concat(), "{room:?}");
    }
    for (at, cut) in [(10, 16), (11, 3), (12, 17), (13, 500)] {
        let whole = [header(OUT, at), sector(0xa0 + at as u8)].concat();
        let (first, second) = whole.split_at(cut);
        let answer = serve(&mut disk, &[first, second], &[1]).unwrap();
        assert_eq!((answer.status, answer.used), (0, 1), "cut at {cut}");
        let answer = serve(&mut disk, &[&header(IN, at)], &[513]).unwrap();
        assert_eq!(answer.data, sector(0xa0 + at as u8), "cut at {cut}");
    }
}

#[test]
fn a_long_request_goes_through_in_pieces() {
    let length = 3 * CHUNK + 512;
    let kept = Kept::new(1000);
    let mut disk = disk(&kept, false);
    let answer = serve(&mut disk, &[&header(IN, 1)], &[length + 1]).unwrap();
    let expected = kept.0.lock().unwrap().bytes[512..512 + length].to_vec();
    assert_eq!((answer.status, answer.used), (0, length + 1));
    assert!(answer.data == expected);
}

#[test]
fn what_is_not_the_disks_is_an_error_and_touches_nothing() {
    let kept = Kept::new(SECTORS);
    let before = kept.0.lock().unwrap().bytes.clone();
    let mut disk = disk(&kept, false);
    let two = [sector(1), sector(2)].concat();
    // Header, data, room, and status.
    type Case<'a> = (Vec<u8>, &'a [u8], &'a [usize], u8);
    let cases: [Case<'_>; 18] = [
        // Beyond the end: the last sector is 63.
        (header(IN, SECTORS), &[], &[513], 1),
        (header(IN, SECTORS - 1), &[], &[1025], 1),
        (header(OUT, SECTORS - 1), &two, &[1], 1),
        // In bytes, these sectors overflow to 0 and less.
        (header(IN, 1 << 55), &[], &[513], 1),
        (header(OUT, u64::MAX), &two, &[1], 1),
        (header(IN, (u64::MAX >> 9) + 1), &[], &[513], 1),
        // Not whole sectors.
        (header(IN, 0), &[], &[512], 1),
        (header(IN, 0), &[], &[1], 1),
        (header(OUT, 0), &two[..700], &[1], 1),
        (header(OUT, 0), &[], &[1], 1),
        // Data in the wrong direction.
        (header(IN, 0), &two, &[513], 1),
        (header(OUT, 0), &two, &[513], 1),
        (header(FLUSH, 0), &two, &[1], 1),
        // Unsupported requests: SCSI, secure erase, zones.
        (header(2, 0), &[], &[1], 2),
        (header(14, 0), &[], &[1], 2),
        (header(u32::MAX, 0), &[], &[513], 2),
        // A truncated header, and none.
        (header(IN, 0)[..15].to_vec(), &[], &[513], 1),
        (vec![0], &[], &[1], 1),
    ];
    for (header, given, room, status) in cases {
        let whole = [&header, given].concat();
        let answer = serve(&mut disk, &[&whole], room).unwrap();
        assert_eq!(answer.status, status, "{header:?} {room:?}");
        assert!(answer.data.iter().all(|byte| *byte == NOT_WRITTEN));
        assert_eq!(
            answer.used,
            usize::from(answer.data.is_empty()),
            "{header:?}"
        );
    }
    assert_eq!(serve(&mut disk, &[&header(IN, 0)], &[]), None);
    assert_eq!(kept.0.lock().unwrap().bytes, before);
}

#[test]
fn a_disk_that_is_only_read_cannot_be_changed() {
    let kept = Kept::new(SECTORS);
    let mut disk = disk(&kept, true);
    let zeros = segment(0, 1, 0);
    for (kind, given) in [
        (OUT, sector(9)),
        (DISCARD, zeros.clone()),
        (WRITE_ZEROES, zeros),
    ] {
        let answer = serve(&mut disk, &[&header(kind, 0), &given], &[1]).unwrap();
        assert_eq!(answer.status, 1, "{kind}");
    }
    let answer = serve(&mut disk, &[&header(IN, 5)], &[513]).unwrap();
    assert_eq!((answer.status, answer.data), (0, sector(5)));
    assert_eq!(
        serve(&mut disk, &[&header(FLUSH, 0)], &[1]).unwrap().status,
        0
    );
    let state = kept.0.lock().unwrap();
    assert!(state.discards.is_empty() && state.bytes[0] == 0);
}

#[test]
fn a_disk_tells_its_name() {
    let mut disk = disk(&Kept::new(1), false);
    let mut name = b"disk7".to_vec();
    name.resize(ID_LENGTH, 0);
    for (room, told) in [(21, &name[..]), (4, b"dis")] {
        let answer = serve(&mut disk, &[&header(GET_ID, 0)], &[room]).unwrap();
        assert_eq!((answer.status, answer.data), (0, told.to_vec()));
        assert_eq!(answer.used, room.min(21));
    }
}

#[test]
fn sectors_are_given_up_and_zeroed() {
    let kept = Kept::new(SECTORS);
    let mut disk = disk(&kept, false);
    let mut change = |kind, given: Vec<u8>| {
        serve(&mut disk, &[&header(kind, 0), &given], &[1])
            .unwrap()
            .status
    };
    let two = [segment(8, 8, 0), segment(20, 1, 0)].concat();
    assert_eq!(change(DISCARD, two), 0);
    // A discard is only a hint if the host does not support it.
    kept.0.lock().unwrap().has_holes = false;
    assert_eq!(change(DISCARD, segment(30, 2, 0)), 0);
    // Zeros are written all the same. Without the flag none are discarded.
    assert_eq!(change(WRITE_ZEROES, segment(40, 2, UNMAP)), 0);
    kept.0.lock().unwrap().has_holes = true;
    assert_eq!(change(WRITE_ZEROES, segment(44, 1, UNMAP)), 0);
    assert_eq!(change(WRITE_ZEROES, segment(50, 2, 0)), 0);

    for (kind, given, status) in [
        (DISCARD, segment(0, 1, UNMAP), 2),
        (DISCARD, segment(0, 1, 0x80), 2),
        (WRITE_ZEROES, segment(0, 1, 2), 2),
        // None is carried out if one is invalid.
        (
            DISCARD,
            [segment(0, 1, 0), segment(SECTORS, 1, 0)].concat(),
            1,
        ),
        (DISCARD, segment(u64::MAX, 1, 0), 1),
        (DISCARD, segment(0, u32::MAX, 0), 1),
        (DISCARD, segment(0, 1, 0)[..15].to_vec(), 1),
        (DISCARD, Vec::new(), 1),
        (DISCARD, segment(0, 1, 0).repeat(17), 1),
        (WRITE_ZEROES, segment(0, 1, 0).repeat(2), 1),
        (WRITE_ZEROES, segment(60, 5, 0), 1),
    ] {
        assert_eq!(change(kind, given.clone()), status, "{kind} {given:?}");
    }

    let state = kept.0.lock().unwrap();
    let in_sectors: Vec<_> = state
        .discards
        .iter()
        .map(|range| (range.start / SECTOR, range.end / SECTOR))
        .collect();
    assert_eq!(
        in_sectors,
        [(8, 16), (20, 21), (30, 32), (40, 42), (44, 45)]
    );
    let zeroed = |sector: &u64| state.bytes[(*sector * SECTOR) as usize] == 0;
    let zeros: Vec<u64> = (1..SECTORS).filter(zeroed).collect();
    let expected = (8..16).chain([20, 40, 41, 44, 50, 51]);
    assert_eq!(zeros, expected.collect::<Vec<_>>());
}

#[test]
fn a_driver_that_does_not_flush_is_told_of_writes_that_last() {
    let kept = Kept::new(SECTORS);
    let mut disk = disk(&kept, false);
    let flushes = |disk: &mut Disk, kind, given: &[u8]| {
        let before = kept.0.lock().unwrap().flushes;
        let answer = serve(disk, &[&header(kind, 0), given], &[1]).unwrap();
        assert_eq!(answer.status, 0);
        kept.0.lock().unwrap().flushes - before
    };
    assert_eq!(flushes(&mut disk, OUT, &sector(1)), 0);
    assert_eq!(flushes(&mut disk, FLUSH, &[]), 1);
    disk.write_through = true;
    assert_eq!(flushes(&mut disk, OUT, &sector(1)), 1);
    assert_eq!(flushes(&mut disk, WRITE_ZEROES, &segment(0, 1, 0)), 1);
}

#[test]
fn a_broken_host_is_an_error_of_the_disk() {
    let kept = Kept::new(SECTORS);
    let mut disk = disk(&kept, false);
    kept.0.lock().unwrap().broken = true;
    let one = sector(1);
    let zeros = segment(0, 1, 0);
    for (kind, given, room) in [
        (IN, &[][..], 513),
        (OUT, &one[..], 1),
        (FLUSH, &[], 1),
        (DISCARD, &zeros, 1),
        (WRITE_ZEROES, &zeros, 1),
    ] {
        let answer = serve(&mut disk, &[&header(kind, 0), given], &[room]).unwrap();
        assert_eq!(answer.status, 1, "{kind}");
    }
}

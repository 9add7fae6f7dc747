#![allow(clippy::unwrap_used)]
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::{AtomicUsize, Ordering};

use imago::file::File as ImageFile;
use imago::qcow2::Qcow2;
use imago::{FormatCreateBuilder, Storage, StorageCreateOptions};
use tempfile::TempDir;
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend};

use super::super::DirectIo;
use crate::{MemorySlice, WatchedMemory};

use super::*;

/// Not a whole number of clusters.
const LENGTH: u64 = (1 << 20) + 2048;

/// A folder with an image of each kind: `raw`, and `plain.qcow2` and `top.qcow2`, which has `raw`
/// as its backing file.
fn images() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("raw"), vec![1; LENGTH as usize]).unwrap();
    make(&folder.path().join("plain.qcow2"), LENGTH, None);
    make(&folder.path().join("top.qcow2"), LENGTH, Some("raw"));
    folder
}

fn make(path: &Path, length: u64, backing: Option<&str>) {
    let file = ImageFile::create_open(StorageCreateOptions::new().filename(path)).unwrap();
    let mut image = Qcow2::<ImageFile>::create_builder(file).size(length);
    if let Some(backing) = backing {
        let format = if backing.ends_with("qcow2") {
            "qcow2"
        } else {
            "raw"
        };
        image = image.backing(backing.to_owned(), format.to_owned());
    }
    image.create().unwrap();
}

fn read_only() -> ImageOptions {
    ImageOptions {
        read_only: true,
        ..ImageOptions::default()
    }
}

fn overlay(overlay: Overlay) -> ImageOptions {
    ImageOptions {
        overlay: Some(overlay),
        ..ImageOptions::default()
    }
}

fn byte(disk: &mut dyn BlockBackend, offset: u64) -> u8 {
    let mut bytes = [0xff; 2];
    disk.read_at(&mut bytes, offset).unwrap();
    assert_eq!(bytes[0], bytes[1]);
    bytes[0]
}

fn refusal(path: &Path, options: &ImageOptions) -> String {
    match open(path, options) {
        Ok(_) => panic!("{} was opened", path.display()),
        Err(error) => error.to_string(),
    }
}

#[test]
fn what_is_no_disk_is_refused_with_the_reason() {
    let folder = images();
    let path = |name| folder.path().join(name);
    for length in [0, 511, 1025] {
        std::fs::write(path("odd"), vec![0; length]).unwrap();
        let said = refusal(&path("odd"), &read_only());
        assert!(said.contains(&format!("odd: {length} bytes")), "{said}");
    }
    make(&path("odd.qcow2"), 1000, None);
    make(&path("lost.qcow2"), LENGTH, Some("nowhere.raw"));
    make(&path("self.qcow2"), LENGTH, Some("self.qcow2"));
    std::fs::write(path("cut.qcow2"), b"QFI\xfb\0\0\0\x03").unwrap();
    let mut encrypted = std::fs::read(path("plain.qcow2")).unwrap();
    encrypted[35] = 2;
    std::fs::write(path("luks.qcow2"), encrypted).unwrap();
    for (name, said) in [
        ("nowhere", "nowhere: No such file"),
        ("", "neither a regular file nor a block device"),
        ("odd.qcow2", "1000 bytes"),
        ("lost.qcow2", "nowhere.raw: No such file"),
        ("self.qcow2", "more than 16 backing files"),
        ("cut.qcow2", "not a usable qcow2 image"),
        ("luks.qcow2", "encryption, which is not supported"),
    ] {
        let found = refusal(&path(name), &read_only());
        assert!(found.contains(said), "{name}: {found}");
    }
}

#[test]
fn a_damaged_image_is_read_but_not_written() {
    let folder = images();
    let path = folder.path().join("plain.qcow2");
    let mut disk = open(&path, &ImageOptions::default()).unwrap();
    disk.write_at(&[7; 512], 0).unwrap();
    drop(disk);
    let whole = std::fs::read(&path).unwrap();
    let long = |at: usize| u64::from_be_bytes(*whole[at..].first_chunk().unwrap());
    let (l1, counts) = (long(40) as usize, long(48) as usize);
    let l2 = (long(l1) & 0x00ff_ffff_ffff_fe00) as usize;
    let block = (long(counts) & 0x00ff_ffff_ffff_fe00) as usize;
    let cases: [(usize, &[u8], &str); 8] = [
        (l2, &[0x80, 1], "second-level table names 0x1000000050000"),
        (l2 + 6, &[0x10], "second-level table names 0x51000"),
        (l2 + 8, &whole[l2..l2 + 8], "used twice"),
        (l1 + 6, &[0xff], "first-level table names"),
        (block + 2 * (l2 >> 16), &[0, 0], "has reference count 0"),
        (
            counts,
            &[0; 8],
            "the cluster at 0x0 is used and has reference count 0",
        ),
        (56, &[0xff; 4], "size of the table of reference counts is"),
        (63, &[1], "1 internal snapshots"),
    ];
    for (place, bytes, expected) in cases {
        let mut damaged = whole.clone();
        damaged[place..place + bytes.len()].copy_from_slice(bytes);
        std::fs::write(&path, &damaged).unwrap();
        let said = refusal(&path, &ImageOptions::default());
        assert!(said.contains(expected), "{expected}: {said}");
        assert!(std::fs::read(&path).unwrap() == damaged, "{expected}");
    }
    std::fs::write(&path, &whole).unwrap();
    assert_eq!(
        byte(&mut *open(&path, &ImageOptions::default()).unwrap(), 0),
        7
    );
}

#[test]
fn a_backing_file_is_read_if_it_lies_beside_the_image_or_is_named() {
    let (folder, other) = (images(), tempfile::tempdir().unwrap());
    let beside = open(&folder.path().join("top.qcow2"), &read_only());
    assert_eq!(byte(&mut *beside.unwrap(), 4096), 1);
    let raw = folder.path().join("raw");
    let outside = other.path().join("outside.qcow2");
    make(&outside, LENGTH, raw.to_str());
    std::os::unix::fs::symlink(&raw, other.path().join("link")).unwrap();
    let linked = other.path().join("linked.qcow2");
    make(&linked, LENGTH, Some("link"));
    for path in [outside, linked] {
        let said = refusal(&path, &read_only());
        let named = format!("name it if it is to be read: backing={}", raw.display());
        assert!(said.contains(&named), "{said}");
        let options = ImageOptions {
            backing: Some(raw.clone()),
            ..read_only()
        };
        assert_eq!(byte(&mut *open(&path, &options).unwrap(), 4096), 1);
    }
}

#[test]
fn an_image_has_one_writer_or_many_readers() {
    let folder = images();
    for name in ["raw", "plain.qcow2"] {
        let path = folder.path().join(name);
        let open = |options: &ImageOptions| open(&path, options);
        let in_use =
            |options: &ImageOptions| matches!(open(options), Err(ImageError::InUse { .. }));
        let overlay = overlay(Overlay::Temporary);
        let reader = open(&read_only()).unwrap();
        let readers = (open(&read_only()).unwrap(), open(&overlay).unwrap());
        assert!(in_use(&ImageOptions::default()));
        drop((reader, readers));
        let _writer = open(&ImageOptions::default()).unwrap();
        assert!(in_use(&ImageOptions::default()) && in_use(&read_only()) && in_use(&overlay));
    }
    // So has a backing file.
    let _writer = open(&folder.path().join("raw"), &ImageOptions::default()).unwrap();
    let said = refusal(&folder.path().join("top.qcow2"), &read_only());
    assert!(said.contains("raw: in use by another machine"), "{said}");
}

#[test]
fn what_is_written_is_read_back_by_a_later_start() {
    let folder = images();
    for name in ["raw", "plain.qcow2", "top.qcow2"] {
        let path = folder.path().join(name);
        let before = std::fs::read(folder.path().join("raw")).unwrap();
        let mut disk = open(&path, &ImageOptions::default()).unwrap();
        assert_eq!(disk.length(), LENGTH, "{name}");
        disk.write_at(&[7; 1536], 3 * 512).unwrap();
        disk.flush().unwrap();
        drop(disk);
        let mut disk = open(&path, &read_only()).unwrap();
        assert_eq!(byte(&mut *disk, 3 * 512), 7, "{name}");
        assert!(disk.overlay().unwrap().is_none());
        let raw = std::fs::read(folder.path().join("raw")).unwrap();
        assert_eq!(raw == before, name != "raw");
    }
}

#[test]
fn what_is_discarded_reads_as_zeros_and_a_raw_image_takes_less_room() {
    let folder = images();
    let blocks = || folder.path().join("raw").metadata().unwrap().blocks();
    for name in ["raw", "plain.qcow2", "top.qcow2"] {
        let mut disk = open(&folder.path().join(name), &ImageOptions::default()).unwrap();
        disk.write_at(&vec![7; LENGTH as usize], 0).unwrap();
        disk.flush().unwrap();
        let before = blocks();
        if !disk.discard(4096..LENGTH - 4096).unwrap() {
            // A file system without holes keeps the content.
            continue;
        }
        let mut back = vec![1; LENGTH as usize];
        disk.read_at(&mut back, 0).unwrap();
        let kept = back.iter().filter(|byte| **byte == 7).count();
        assert_eq!((kept, back[4095], back[4096]), (8192, 7, 0), "{name}");
        // To the end, which is in the middle of a cluster.
        assert!(disk.discard(LENGTH - 1024..LENGTH).unwrap());
        assert_eq!(byte(&mut *disk, LENGTH - 512), 0, "{name}");
        if name == "raw" {
            assert!(blocks() < before, "{} blocks", blocks());
        }
    }
}

#[test]
fn a_guest_cannot_change_the_format_that_was_found() {
    let folder = images();
    let path = folder.path().join("raw");
    let mut header = [0; 512];
    header[..4].copy_from_slice(&qcow2::MAGIC);
    let error = open(&path, &ImageOptions::default())
        .unwrap()
        .write_at(&header, 0)
        .unwrap_err();
    assert!(error.to_string().contains("format=raw"), "{error}");
    let raw = ImageOptions {
        format: Some(ImageFormat::Raw),
        ..ImageOptions::default()
    };
    open(&path, &raw).unwrap().write_at(&header, 0).unwrap();
    assert_eq!(byte(&mut *open(&path, &raw).unwrap(), 512), 1);
}

#[test]
fn an_overlay_takes_the_writes_and_the_image_stays() {
    let folder = images();
    for name in ["raw", "plain.qcow2", "top.qcow2"] {
        let path = folder.path().join(name);
        let before = std::fs::read(&path).unwrap();
        let file = folder.path().join(format!("{name}.overlay"));
        let kept = overlay(Overlay::Kept(file.clone()));
        let old = byte(&mut *open(&path, &read_only()).unwrap(), 0);
        for options in [&overlay(Overlay::Temporary), &kept] {
            let mut disk = open(&path, options).unwrap();
            assert_eq!((disk.length(), byte(&mut *disk, 0)), (LENGTH, old));
            disk.write_at(&[7; 512], 512).unwrap();
            assert_eq!((byte(&mut *disk, 0), byte(&mut *disk, 512)), (old, 7));
            disk.flush().unwrap();
        }
        // The kept overlay continues, and a temporary one can begin with its content.
        assert_eq!(byte(&mut *open(&path, &kept).unwrap(), 512), 7);
        let saved = ImageOptions {
            saved_overlay: Some(file.clone()),
            ..overlay(Overlay::Temporary)
        };
        let mut first = open(&path, &saved).unwrap();
        let mut second = open(&path, &saved).unwrap();
        first.write_at(&[8; 512], 512).unwrap();
        assert_eq!((byte(&mut *first, 512), byte(&mut *second, 512)), (8, 7));
        // Its file is known by its changes.
        let changes = first.overlay().unwrap().unwrap().changes;
        assert_eq!(first.overlay().unwrap().unwrap().changes, changes);
        first.write_at(&[9; 512], 512).unwrap();
        assert_ne!(first.overlay().unwrap().unwrap().changes, changes);
        assert!(std::fs::read(&path).unwrap() == before, "{name}");
    }
}

#[test]
fn an_overlay_of_another_image_is_refused() {
    let folder = images();
    let path = |name: &str| folder.path().join(name);
    let kept = |name| overlay(Overlay::Kept(path(name)));
    drop(open(&path("raw"), &kept("overlay")).unwrap());
    let said = refusal(&path("plain.qcow2"), &kept("overlay"));
    assert!(
        said.contains("made for") && said.contains("raw, not for"),
        "{said}"
    );
    let said = refusal(&path("raw"), &kept("plain.qcow2"));
    assert!(said.contains("made for no image"), "{said}");
    let said = refusal(&path("raw"), &kept("raw"));
    assert!(said.contains("in use"), "{said}");
    let said = refusal(&path("raw"), &kept("none/overlay"));
    assert!(
        said.starts_with("overlay ") && said.contains("No such file"),
        "{said}"
    );
}

/// Calls that move bytes as the host's do, and count.
#[derive(Debug, Default)]
struct Moves {
    read: AtomicUsize,
    written: AtomicUsize,
}

impl DirectIo for Moves {
    fn read(&self, file: &File, targets: &[MemorySlice<'_>], mut offset: u64) -> io::Result<()> {
        for target in targets {
            let mut bytes = vec![0; target.len()];
            file.read_exact_at(&mut bytes, offset)?;
            target.copy_from(&bytes);
            offset += bytes.len() as u64;
            self.read.fetch_add(bytes.len(), Ordering::Relaxed);
        }
        Ok(())
    }

    fn write(&self, file: &File, sources: &[MemorySlice<'_>], mut offset: u64) -> io::Result<()> {
        for source in sources {
            let mut bytes = vec![0; source.len()];
            source.copy_to(&mut bytes);
            file.write_all_at(&bytes, offset)?;
            offset += bytes.len() as u64;
            self.written.fetch_add(bytes.len(), Ordering::Relaxed);
        }
        Ok(())
    }
}

#[test]
fn what_moves_past_the_buffer_is_what_the_buffer_holds() {
    const LENGTH: usize = 270_336;
    /// The part of it in the first piece of memory. No piece is a whole number of clusters.
    const FIRST: usize = 70_000;
    let folder = images();
    let path = |name| folder.path().join(name);
    let memory = WatchedMemory::from_ranges(&[(GuestAddress(0), 1 << 20)]).unwrap();
    let places = [GuestAddress(0), GuestAddress(500_000)];
    let piece = |at, length| memory.get_slice(places[at], length).unwrap();
    let pieces = [piece(0, FIRST), piece(1, LENGTH - FIRST)];
    let content: Vec<u8> = (0..LENGTH).map(|at| (at / 11) as u8).collect();
    for (image, options) in [
        ("plain.qcow2", ImageOptions::default()),
        ("raw", overlay(Overlay::Kept(path("kept")))),
    ] {
        let moves: &Moves = Box::leak(Box::default());
        let mut disk = open(&path(image), &options).unwrap();
        disk.use_direct_io(moves);
        let (first, rest) = content.split_at(FIRST);
        memory.write_slice(first, places[0]).unwrap();
        memory.write_slice(rest, places[1]).unwrap();
        // From the middle of a cluster to the middle of another.
        disk.write_direct(&pieces, 30 << 10).unwrap().unwrap();
        assert_eq!(moves.written.load(Ordering::Relaxed), LENGTH, "{image}");
        let mut found = vec![0; LENGTH];
        disk.read_at(&mut found, 30 << 10).unwrap();
        assert!(found == content, "{image}: what was written");
        // What is behind it is in the file below, or nowhere.
        disk.read_at(&mut found, 200 << 10).unwrap();
        let read = disk.read_direct(&pieces, 200 << 10);
        assert_eq!(read.is_some(), image == "raw", "{image}");
        if let Some(read) = read {
            read.unwrap();
            assert_eq!(moves.read.load(Ordering::Relaxed), LENGTH);
            let mut moved = vec![0; LENGTH];
            let (first, rest) = moved.split_at_mut(FIRST);
            memory.read_slice(first, places[0]).unwrap();
            memory.read_slice(rest, places[1]).unwrap();
            assert!(moved == found, "{image}: what was read");
        }
        // Clusters that the crate itself takes and zeroes lie behind those.
        disk.write_at(&[7; 100], 900_000).unwrap();
        assert!(disk.discard(64 << 10..128 << 10).unwrap());
        disk.flush().unwrap();
        drop(disk);
        let mut disk = open(&path(image), &options).unwrap();
        for (at, expected) in [
            (30 << 10, 0),
            ((30 << 10) + 11 * 200, 200),
            (100 << 10, 0),
            (900_001, 7),
        ] {
            assert_eq!(byte(&mut *disk, at), expected, "{image} at {at}");
        }
    }
}

#![allow(clippy::unwrap_used)]

mod fixtures;

use proptest::prelude::*;

use super::*;

/// Returns the contents of the fixtures: an ELF's first bytes, calls to one address (which the x86
/// filter of XZ rewrites), and data after the ELF.
fn vmlinux() -> Vec<u8> {
    let mut bytes = b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0".to_vec();
    for letter in b"exotrace".iter().cycle().take(48) {
        bytes.push(0xe8);
        let distance = 0x1000 - i32::try_from(bytes.len() + 4).unwrap();
        bytes.extend_from_slice(&distance.to_le_bytes());
        bytes.extend_from_slice(&[*letter; 2]);
    }
    bytes.extend_from_slice(b"relocations");
    bytes
}

fn hex(text: &str) -> Vec<u8> {
    (0..text.len())
        .step_by(2)
        .map(|at| u8::from_str_radix(&text[at..at + 2], 16).unwrap())
        .collect()
}

fn packed() -> Vec<(Codec, Vec<u8>)> {
    let mut all: Vec<_> = [
        (Codec::Gzip, fixtures::GZIP),
        (Codec::Bzip2, fixtures::BZIP2),
        (Codec::Lzma, fixtures::LZMA),
        (Codec::Xz, fixtures::XZ),
        (Codec::Zstd, fixtures::ZSTD),
        (Codec::Lz4, fixtures::LZ4),
        (Codec::Lzo, fixtures::LZO),
    ]
    .into_iter()
    .map(|(codec, text)| (codec, hex(text)))
    .collect();
    all.push((Codec::None, vmlinux()));
    all
}

/// The distance of the payload from the protected-mode code in these images.
const OFFSET: u32 = 0x20;

/// Returns a bzImage of protocol 2.15 with this `setup_sects`, whose payload is followed by other
/// bytes.
fn bzimage(setup_sects: u8, payload: &[u8]) -> Vec<u8> {
    let sectors = if setup_sects == 0 {
        4
    } else {
        usize::from(setup_sects)
    };
    let mut file = vec![0; (sectors + 1) * SECTOR];
    let mut put = |at: usize, bytes: &[u8]| file[at..at + bytes.len()].copy_from_slice(bytes);
    put(SETUP_SECTS, &[setup_sects]);
    put(BOOT_FLAG, &[0x55, 0xaa]);
    put(HEADER_MAGIC, b"HdrS");
    put(VERSION, &0x020f_u16.to_le_bytes());
    put(PAYLOAD_OFFSET, &OFFSET.to_le_bytes());
    put(
        PAYLOAD_LENGTH,
        &u32::try_from(payload.len()).unwrap().to_le_bytes(),
    );
    file.extend_from_slice(&[0x90; OFFSET as usize]);
    file.extend_from_slice(payload);
    file.extend_from_slice(b"boot stub, checksum and signature");
    file
}

#[test]
fn every_codec_gives_the_kernel_back() {
    for (codec, payload) in packed() {
        assert_eq!(Codec::detect(&payload).unwrap(), codec);
        for setup_sects in [0, 1, 39] {
            let unpacked = unpack_bzimage(&bzimage(setup_sects, &payload)).unwrap();
            assert_eq!(unpacked, vmlinux(), "{codec}, {setup_sects} setup sectors");
        }
    }
}

/// Tests blocks of 8 MiB, a smaller last one, and a second frame behind the first.
#[test]
fn lz4_of_several_blocks() {
    let mut kernel = vmlinux();
    kernel.resize(2 * (8 << 20) + 5000, 0x5a);
    let mut payload = Vec::new();
    for (index, block) in kernel.chunks(8 << 20).enumerate() {
        if index != 1 {
            payload.extend_from_slice(&0x184c_2102_u32.to_le_bytes());
        }
        let body = lz4_flex::block::compress(block);
        payload.extend_from_slice(&u32::try_from(body.len()).unwrap().to_le_bytes());
        payload.extend_from_slice(&body);
    }
    payload.extend_from_slice(&u32::try_from(kernel.len()).unwrap().to_le_bytes());
    assert!(unpack_bzimage(&bzimage(4, &payload)).unwrap() == kernel);
}

/// Tests a header with all optional fields, blocks that are stored and packed, and every checksum.
#[test]
fn lzo_of_several_blocks() {
    const PACKED: &[u8] = &[0x12, 0, 0x20, 0, 0xdf, 0, 0, 0x11, 0, 0];
    const ALL: u32 = 0xb43;
    let mut payload = b"\x89LZO\0\r\n\x1a\n".to_vec();
    payload.extend_from_slice(&[0x10, 0x40, 0, 0, 0, 0, 1, 9]);
    payload.extend_from_slice(&ALL.to_be_bytes());
    payload.extend_from_slice(&[0; 16]);
    payload.extend_from_slice(b"\x04name\0\0\0\0");
    payload.extend_from_slice(b"\0\0\0\x03ext\0\0\0\0");
    for (unpacked, packed) in [(vmlinux(), vmlinux()), (vec![0; 512], PACKED.to_vec())] {
        for size in [&unpacked, &packed].map(Vec::len) {
            payload.extend_from_slice(&u32::try_from(size).unwrap().to_be_bytes());
        }
        payload.extend_from_slice(&adler2::adler32_slice(&unpacked).to_be_bytes());
        let others = if packed.len() < unpacked.len() { 12 } else { 4 };
        payload.extend_from_slice(&vec![0; others]);
        payload.extend_from_slice(&packed);
    }
    payload.extend_from_slice(&[0; 4]);
    let length = vmlinux().len() + 512;
    payload.extend_from_slice(&u32::try_from(length).unwrap().to_le_bytes());
    let mut kernel = vmlinux();
    kernel.resize(length, 0);
    assert_eq!(unpack_bzimage(&bzimage(4, &payload)).unwrap(), kernel);
}

#[test]
fn a_bad_header_is_named() {
    let good = bzimage(4, &vmlinux());
    let with = |at: usize, bytes: &[u8]| {
        let mut file = good.clone();
        file[at..at + bytes.len()].copy_from_slice(bytes);
        file
    };
    let start = 5 * SECTOR + OFFSET as usize;
    let length = vmlinux().len();
    let needed = format!(
        "{length} bytes at {start:#x}, so the file must have {}",
        start + length
    );
    // (file, text in the message)
    let cases = [
        (
            Vec::new(),
            "0 bytes, but the setup header alone takes 592".to_owned(),
        ),
        (good[..0x24f].to_vec(), "591 bytes".to_owned()),
        (
            with(BOOT_FLAG, &[0, 0]),
            "found 0x0000 and \"HdrS\"".to_owned(),
        ),
        (
            with(HEADER_MAGIC, b"\x7fELF"),
            "found 0xaa55 and \"\\x7fELF\"".to_owned(),
        ),
        (
            with(VERSION, &[7, 2]),
            "boot protocol 2.07 is too old".to_owned(),
        ),
        (
            with(PAYLOAD_OFFSET, &[0; 4]),
            "names no payload (offset 0x0".to_owned(),
        ),
        (
            with(PAYLOAD_LENGTH, &[0; 4]),
            "names no payload (offset 0x20, 0 bytes)".to_owned(),
        ),
        (
            good[..start + length - 1].to_vec(),
            format!("{needed} bytes, but has {}", start + length - 1),
        ),
        (good[..600].to_vec(), format!("{needed} bytes, but has 600")),
        (
            with(PAYLOAD_LENGTH, &[0xff; 4]),
            "truncated: the payload is 4294967295 bytes".to_owned(),
        ),
        (
            with(PAYLOAD_OFFSET, &[0xff; 4]),
            "bytes at 0x1000009ff".to_owned(),
        ),
        (
            with(start, b"hello!"),
            "starts with [68, 65, 6c, 6c, 6f, 21]".to_owned(),
        ),
    ];
    for (file, expected) in cases {
        let message = unpack_bzimage(&file).unwrap_err().to_string();
        assert!(message.contains(&expected), "{message}\nlacks: {expected}");
    }
}

#[test]
fn the_recorded_size_must_be_right() {
    let length = u32::try_from(vmlinux().len()).unwrap();
    // (recorded size, text in the message)
    let cases = [
        (
            length - 1,
            format!(
                "{} bytes were expected, at least {length} came out",
                length - 1
            ),
        ),
        (
            length + 1,
            format!("{} bytes were expected, {length} came out", length + 1),
        ),
        (0, "0 bytes were expected, at least ".to_owned()),
        (
            u32::MAX,
            "claims to unpack to 4294967295 bytes; at most 1073741824".to_owned(),
        ),
    ];
    for (codec, mut payload) in packed() {
        // The size is part of a gzip stream, whose decoder itself detects a wrong one.
        if codec == Codec::None || codec == Codec::Gzip {
            continue;
        }
        for (size, expected) in &cases {
            let at = payload.len() - TRAILER;
            payload[at..].copy_from_slice(&size.to_le_bytes());
            let message = unpack_bzimage(&bzimage(4, &payload))
                .unwrap_err()
                .to_string();
            // LZ4 has no room for more than was expected, and reports that itself.
            let refused = message.contains("damaged") && codec == Codec::Lz4;
            assert!(
                message.contains(expected) || refused,
                "{codec}: {message}\nlacks: {expected}"
            );
            assert!(message.contains(&codec.to_string()), "{message}");
        }
    }
}

#[test]
fn something_packed_that_is_no_elf_is_refused() {
    let text = b"just text";
    let mut payload = 0x184c_2102_u32.to_le_bytes().to_vec();
    let body = lz4_flex::block::compress(text);
    payload.extend_from_slice(&u32::try_from(body.len()).unwrap().to_le_bytes());
    payload.extend_from_slice(&body);
    payload.extend_from_slice(&u32::try_from(text.len()).unwrap().to_le_bytes());
    let message = unpack_bzimage(&bzimage(4, &payload))
        .unwrap_err()
        .to_string();
    assert_eq!(
        message,
        "the LZ4 payload holds no ELF kernel: it starts with [6a, 75, 73, 74]"
    );
}

/// Tests that a payload cut short is an error at every length, because the recorded size is lost
/// with its end.
#[test]
fn every_truncated_payload_is_refused() {
    for (codec, payload) in packed() {
        for length in 1..payload.len() {
            let result = unpack_bzimage(&bzimage(4, &payload[..length]));
            let whole_elf = codec == Codec::None && length >= 4;
            assert_eq!(result.is_ok(), whole_elf, "{codec} cut to {length} bytes");
        }
    }
}

proptest! {
    /// Tests that a damaged payload never panics.
    ///
    /// It returns an error, or a kernel of the recorded size if the damage does not matter (an
    /// unused field, an unpacked ELF).
    #[test]
    fn damage_never_panics(
        which in 0..8_usize,
        damage in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
    ) {
        let (codec, mut payload) = packed().swap_remove(which);
        for (index, byte) in damage {
            let at = index.index(payload.len());
            payload[at] = byte;
        }
        if let Ok(kernel) = unpack_bzimage(&bzimage(4, &payload)) {
            prop_assert_eq!(kernel.len(), vmlinux().len(), "{}", codec);
        }
    }

    /// Tests that checksums detect damage inside the packed data of gzip, bzip2, XZ, Zstandard and
    /// LZO.
    #[test]
    fn a_flipped_bit_never_changes_the_kernel_silently(
        which in prop::sample::select(vec![0_usize, 1, 3, 4, 6]),
        index: prop::sample::Index,
        bit in 0..8_u32,
    ) {
        let (codec, mut payload) = packed().swap_remove(which);
        let at = index.index(payload.len());
        payload[at] ^= 1 << bit;
        if let Ok(kernel) = unpack_bzimage(&bzimage(4, &payload)) {
            prop_assert_eq!(kernel, vmlinux(), "{} bit {} of byte {}", codec, bit, at);
        }
    }

    /// Tests any bytes after a known magic number.
    #[test]
    fn noise_never_panics(which in 0..8_usize, noise in proptest::collection::vec(any::<u8>(), 0..300)) {
        let (_, mut payload) = packed().swap_remove(which);
        payload.truncate(8);
        payload.extend_from_slice(&noise);
        let size = u32::try_from(noise.len()).unwrap();
        payload.extend_from_slice(&size.to_le_bytes());
        let _ = unpack_bzimage(&bzimage(4, &payload));
    }

    /// Tests any header fields.
    #[test]
    fn any_header_is_answered(sects: u8, version: u16, offset: u32, length in 0..2000_u32) {
        let mut file = bzimage(4, &vmlinux());
        file[SETUP_SECTS] = sects;
        file[VERSION..VERSION + 2].copy_from_slice(&version.to_le_bytes());
        file[PAYLOAD_OFFSET..PAYLOAD_OFFSET + 4].copy_from_slice(&(offset % 3000).to_le_bytes());
        file[PAYLOAD_LENGTH..PAYLOAD_LENGTH + 4].copy_from_slice(&length.to_le_bytes());
        let _ = unpack_bzimage(&file);
    }
}

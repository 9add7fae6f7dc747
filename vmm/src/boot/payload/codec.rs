//! The codecs with which a kernel's build packs it, and a decoder for each.
//!
//! The decoders are other crates', all without C code. This module bounds their memory and output.

use std::fmt;
use std::io::{self, ErrorKind, Read};

use super::{PayloadError, lzop};

pub(super) const ELF_MAGIC: &[u8] = b"\x7fELF";

/// The memory limit of LZMA and XZ dictionaries in KiB. Kernels use up to 128 MiB.
const LZMA_MEMORY_KIB: u32 = 256 << 10;
/// The unpacked size in bytes of an LZ4 block in the legacy frame. Only the last one is smaller.
const LZ4_BLOCK: usize = 8 << 20;
const LZ4_MAGIC: [u8; 4] = 0x184c_2102_u32.to_le_bytes();

/// The codec of a payload (`CONFIG_KERNEL_*`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Codec {
    /// No packing: an ELF file.
    None,
    /// gzip.
    Gzip,
    /// bzip2.
    Bzip2,
    /// LZMA with the 13-byte header of `.lzma` files.
    Lzma,
    /// XZ: LZMA2 behind the x86 branch filter.
    Xz,
    /// Zstandard.
    Zstd,
    /// LZ4 blocks in the legacy frame (`lz4 -l`).
    Lz4,
    /// LZO1X blocks in a file of lzop.
    Lzo,
}

impl fmt::Display for Codec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::None => "unpacked",
            Self::Gzip => "gzip",
            Self::Bzip2 => "bzip2",
            Self::Lzma => "LZMA",
            Self::Xz => "XZ",
            Self::Zstd => "Zstandard",
            Self::Lz4 => "LZ4",
            Self::Lzo => "LZO",
        })
    }
}

impl Codec {
    /// Detects the codec by the payload's first bytes, as the kernel's boot protocol lists them.
    pub(super) fn detect(payload: &[u8]) -> Result<Self, PayloadError> {
        let known: [(&[u8], Self); 8] = [
            (ELF_MAGIC, Self::None),
            (&[0x1f, 0x8b], Self::Gzip),
            (b"BZh", Self::Bzip2),
            (&[0x5d, 0, 0], Self::Lzma),
            (b"\xfd7zXZ\0", Self::Xz),
            (&[0x28, 0xb5, 0x2f, 0xfd], Self::Zstd),
            (&LZ4_MAGIC, Self::Lz4),
            (b"\x89LZO\0", Self::Lzo),
        ];
        known
            .into_iter()
            .find_map(|(magic, codec)| payload.starts_with(magic).then_some(codec))
            .ok_or_else(|| PayloadError::UnknownCodec {
                magic: payload.iter().take(6).copied().collect(),
            })
    }

    /// Appends the unpacked `packed` to `out`, and stops after one byte more than `expected`.
    pub(super) fn decode(
        self,
        packed: &[u8],
        expected: usize,
        out: &mut Vec<u8>,
    ) -> io::Result<()> {
        match self {
            Self::None => drain(packed, expected, out),
            Self::Gzip => drain(flate2::bufread::GzDecoder::new(packed), expected, out),
            Self::Bzip2 => drain(bzip2::bufread::BzDecoder::new(packed), expected, out),
            Self::Lzma => {
                let reader = lzma_rust2::LzmaReader::new_mem_limit(packed, LZMA_MEMORY_KIB, None)?;
                drain(reader, expected, out)
            }
            Self::Xz => {
                let reader = lzma_rust2::XzReader::new_mem_limit(packed, false, LZMA_MEMORY_KIB);
                drain(reader, expected, out)
            }
            Self::Zstd => zstd(packed, expected, out),
            Self::Lz4 => lz4(packed, expected, out),
            Self::Lzo => lzop::unpack(packed, expected, out),
        }
    }
}

/// Reads to the end, but at most one byte more than `expected`.
///
/// That byte shows that there is more. Reading it also makes the decoder check its checksum.
fn drain(reader: impl Read, expected: usize, out: &mut Vec<u8>) -> io::Result<()> {
    let limit = u64::try_from(expected)
        .unwrap_or(u64::MAX)
        .saturating_add(1);
    reader.take(limit).read_to_end(out).map(|_| ())
}

pub(super) fn invalid(reason: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, reason)
}

/// Unpacks one Zstandard frame.
///
/// The checksum is compared here, because the decoder only computes it, over the bytes that were
/// read.
fn zstd(packed: &[u8], expected: usize, out: &mut Vec<u8>) -> io::Result<()> {
    let mut reader = ruzstd::decoding::StreamingDecoder::new(packed).map_err(invalid)?;
    drain(&mut reader, expected, out)?;
    let stored = reader.decoder.get_checksum_from_data();
    let found = reader.decoder.get_calculated_checksum();
    match (stored, found) {
        // If there is more to come, the size is wrong and the checksum means nothing.
        (Some(stored), Some(found)) if stored != found && out.len() <= expected => {
            let reason = format!("checksum {found:#010x}, expected {stored:#010x}");
            Err(invalid(reason))
        }
        _ => Ok(()),
    }
}

/// Unpacks the legacy frame: a magic number, then blocks, each behind its packed size (32 bits,
/// little-endian). The frame ends with the data.
fn lz4(packed: &[u8], expected: usize, out: &mut Vec<u8>) -> io::Result<()> {
    let mut rest = packed.strip_prefix(&LZ4_MAGIC).unwrap_or(packed);
    let mut block = vec![0; LZ4_BLOCK.min(expected.saturating_add(1))];
    while !rest.is_empty() && out.len() <= expected {
        let (size, data) = rest
            .split_first_chunk()
            .ok_or_else(|| invalid(format!("{} stray bytes after the last block", rest.len())))?;
        // Several frames may follow one another, each with its magic number.
        if *size == LZ4_MAGIC {
            rest = data;
            continue;
        }
        let size = usize::try_from(u32::from_le_bytes(*size)).map_err(invalid)?;
        let (body, next) = data.split_at_checked(size).ok_or_else(|| {
            invalid(format!(
                "a block of {size} bytes, but {} are left",
                data.len()
            ))
        })?;
        let length = lz4_flex::block::decompress_into(body, &mut block).map_err(invalid)?;
        out.extend_from_slice(block.get(..length).unwrap_or_default());
        rest = next;
    }
    Ok(())
}

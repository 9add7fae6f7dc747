//! Unpacking of the kernel inside a bzImage, on the host.
//!
//! The caller reads the file. The setup header locates the payload, and its first bytes determine
//! the codec. It is unpacked into memory. The result is the ELF `vmlinux` that the kernel's build
//! packed, followed by its relocation table if there is one. The caller must check that it is a
//! kernel for this machine.
//!
//! Every offset and size in the file is checked before it is used. The output is at most
//! [`MAX_UNPACKED`] bytes, and its size must be the one that the build recorded.
//!
//! Source: `Documentation/x86/boot.rst` and `scripts/Makefile.lib` of Linux.

mod codec;
mod lzop;

pub use codec::Codec;

/// The largest kernel that is unpacked, in bytes: 1 GiB, some ten times the largest distribution
/// kernel.
pub const MAX_UNPACKED: usize = 1 << 30;

const SETUP_SECTS: usize = 0x1f1;
const BOOT_FLAG: usize = 0x1fe;
const HEADER_MAGIC: usize = 0x202;
const VERSION: usize = 0x206;
const PAYLOAD_OFFSET: usize = 0x248;
const PAYLOAD_LENGTH: usize = 0x24c;
/// The end of the fields used here.
const HEADER_END: usize = 0x250;

const SECTOR: usize = 512;
/// The first version with payload fields: boot protocol 2.08 (Linux 2.6.26).
const MIN_VERSION: u16 = 0x0208;
/// The length in bytes of the unpacked size that the build appends, little-endian. A gzip stream
/// already ends with it.
const TRAILER: usize = 4;

/// The reason that a bzImage could not be unpacked.
#[derive(Debug, thiserror::Error)]
pub enum PayloadError {
    /// The file ends inside the setup header.
    #[error(
        "not a bzImage, or a truncated one: {found} bytes, but the setup header alone takes \
         {HEADER_END}"
    )]
    HeaderTruncated {
        /// The number of bytes in the file.
        found: usize,
    },
    /// The signatures of a setup header are missing.
    #[error(
        "not a bzImage: expected boot flag 0xaa55 at 0x1fe and \"HdrS\" at 0x202, found \
         {boot_flag:#06x} and \"{}\"; give a bzImage (vmlinuz) or an ELF vmlinux",
        magic.escape_ascii()
    )]
    NotBzImage {
        /// The value at 0x1fe.
        boot_flag: u16,
        /// The bytes at 0x202.
        magic: [u8; 4],
    },
    /// The header has no payload fields yet.
    #[error(
        "boot protocol {}.{:02} is too old: the payload can be found from 2.08 on (Linux 2.6.26); \
         give a newer kernel or the ELF vmlinux",
        version >> 8, version & 0xff
    )]
    ProtocolTooOld {
        /// The version: major in the high byte, minor in the low one.
        version: u16,
    },
    /// The header says that there is no payload.
    #[error(
        "the setup header names no payload (offset {offset:#x}, {length} bytes): not a Linux \
         bzImage; give the ELF vmlinux"
    )]
    NoPayload {
        /// The header's `payload_offset`.
        offset: u32,
        /// The header's `payload_length`.
        length: u32,
    },
    /// The file ends before the payload does.
    #[error(
        "truncated: the payload is {length} bytes at {start:#x}, so the file must have {} bytes, but \
         has {found}; copy or download it again",
        start.saturating_add(*length)
    )]
    Truncated {
        /// The offset of the payload in the file.
        start: u64,
        /// The length in bytes.
        length: u64,
        /// The number of bytes in the file.
        found: usize,
    },
    /// The payload has an unknown codec.
    #[error(
        "the payload starts with {magic:02x?}: not gzip, bzip2, LZMA, XZ, Zstandard, LZ4, LZO or ELF; \
         give the ELF vmlinux"
    )]
    UnknownCodec {
        /// The first bytes of the payload, at most six.
        magic: Vec<u8>,
    },
    /// The payload claims to be larger than any kernel.
    #[error(
        "the {codec} payload claims to unpack to {claimed} bytes; at most {MAX_UNPACKED} are \
         accepted: the file is damaged"
    )]
    TooLarge {
        /// The codec of the payload.
        codec: Codec,
        /// The recorded unpacked size.
        claimed: u32,
    },
    /// There is not enough memory for the unpacked kernel.
    #[error("no memory for the unpacked kernel of {wanted} bytes")]
    NoMemory {
        /// The number of requested bytes.
        wanted: usize,
    },
    /// The packed data is damaged.
    #[error("the {codec} payload is damaged, copy or download the file again: {source}")]
    Damaged {
        /// The codec of the payload.
        codec: Codec,
        /// The decoder's error.
        source: std::io::Error,
    },
    /// The unpacked size differs from the one that the build recorded.
    #[error(
        "the {codec} payload is damaged, copy or download the file again: {expected} bytes were \
         expected, {}{found} came out",
        if found > expected { "at least " } else { "" }
    )]
    WrongSize {
        /// The codec of the payload.
        codec: Codec,
        /// The recorded size in bytes.
        expected: usize,
        /// The number of unpacked bytes. Unpacking stops one byte after the expected end.
        found: usize,
    },
    /// The unpacked payload is no ELF file.
    #[error("the {codec} payload holds no ELF kernel: it starts with {magic:02x?}")]
    NotElf {
        /// The codec of the payload.
        codec: Codec,
        /// The first unpacked bytes, at most four.
        magic: Vec<u8>,
    },
}

/// Unpacks the kernel in `file`, the whole contents of a bzImage.
///
/// # Errors
/// If the file is no bzImage, is truncated or damaged, or is packed with an unknown codec.
pub fn unpack_bzimage(file: &[u8]) -> Result<Vec<u8>, PayloadError> {
    let payload = find_payload(file)?;
    let codec = Codec::detect(payload)?;
    let kernel = match codec {
        Codec::None => payload.to_vec(),
        _ => unpack(codec, payload)?,
    };
    if !kernel.starts_with(codec::ELF_MAGIC) {
        let magic = kernel
            .iter()
            .take(codec::ELF_MAGIC.len())
            .copied()
            .collect();
        return Err(PayloadError::NotElf { codec, magic });
    }
    Ok(kernel)
}

/// Returns the packed bytes, located by the setup header.
fn find_payload(file: &[u8]) -> Result<&[u8], PayloadError> {
    let field = |offset| Field { file, offset };
    let (boot_flag, magic) = (field(BOOT_FLAG).u16()?, field(HEADER_MAGIC).bytes()?);
    if boot_flag != 0xaa55 || &magic != b"HdrS" {
        return Err(PayloadError::NotBzImage { boot_flag, magic });
    }
    let version = field(VERSION).u16()?;
    if version < MIN_VERSION {
        return Err(PayloadError::ProtocolTooOld { version });
    }
    // Zero means four, for compatibility with boot loaders older than the field.
    let setup_sectors = match field(SETUP_SECTS).bytes()? {
        [0] => 4,
        [sectors] => usize::from(sectors),
    };
    let offset = field(PAYLOAD_OFFSET).u32()?;
    let length = field(PAYLOAD_LENGTH).u32()?;
    if offset == 0 || length == 0 {
        return Err(PayloadError::NoPayload { offset, length });
    }
    // The offset counts from the protected-mode code, after boot sector and setup sectors.
    let protected_mode = (setup_sectors + 1) * SECTOR;
    file.get(protected_mode..)
        .and_then(|code| code.get(usize::try_from(offset).ok()?..))
        .and_then(|rest| rest.get(..usize::try_from(length).ok()?))
        .ok_or(PayloadError::Truncated {
            start: protected_mode as u64 + u64::from(offset),
            length: u64::from(length),
            found: file.len(),
        })
}

/// One field of the setup header.
#[derive(Clone, Copy)]
struct Field<'a> {
    file: &'a [u8],
    offset: usize,
}

impl Field<'_> {
    fn bytes<const N: usize>(self) -> Result<[u8; N], PayloadError> {
        self.file
            .get(self.offset..)
            .and_then(|rest| rest.first_chunk())
            .copied()
            .ok_or(PayloadError::HeaderTruncated {
                found: self.file.len(),
            })
    }

    fn u16(self) -> Result<u16, PayloadError> {
        self.bytes().map(u16::from_le_bytes)
    }

    fn u32(self) -> Result<u32, PayloadError> {
        self.bytes().map(u32::from_le_bytes)
    }
}

/// Unpacks `payload` and compares its size with the recorded one.
fn unpack(codec: Codec, payload: &[u8]) -> Result<Vec<u8>, PayloadError> {
    let Some((packed, trailer)) = payload.split_last_chunk::<TRAILER>() else {
        let source = std::io::ErrorKind::UnexpectedEof.into();
        return Err(PayloadError::Damaged { codec, source });
    };
    let claimed = u32::from_le_bytes(*trailer);
    let expected = usize::try_from(claimed)
        .ok()
        .filter(|&size| size <= MAX_UNPACKED)
        .ok_or(PayloadError::TooLarge { codec, claimed })?;
    // A gzip stream itself ends with the size, which the decoder needs.
    let packed = if codec == Codec::Gzip {
        payload
    } else {
        packed
    };

    let mut kernel = Vec::new();
    kernel
        .try_reserve_exact(expected)
        .map_err(|_| PayloadError::NoMemory { wanted: expected })?;
    codec
        .decode(packed, expected, &mut kernel)
        .map_err(|source| PayloadError::Damaged { codec, source })?;
    if kernel.len() != expected {
        let found = kernel.len();
        return Err(PayloadError::WrongSize {
            codec,
            expected,
            found,
        });
    }
    Ok(kernel)
}

#[cfg(test)]
mod tests;

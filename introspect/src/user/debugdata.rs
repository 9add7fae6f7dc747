//! `.gnu_debugdata`: a small ELF object, packed with xz, that names the functions of a stripped one
//! (Fedora's "MiniDebugInfo").

use std::io::{self, Read};

/// The maximum number of packed bytes.
pub(super) const MAX_PACKED: u64 = 32 << 20;
/// The maximum number of unpacked bytes.
const MAX_UNPACKED: u64 = 64 << 20;
/// The maximum memory for unpacking, in KiB. xz's strongest preset needs 65 MiB.
const MEMORY_KIB: u32 = 128 << 10;

/// The reason why it could not be unpacked.
#[derive(Debug, thiserror::Error)]
pub(super) enum DebugDataError {
    /// It is not xz, is truncated, has a wrong checksum, or needs too much memory.
    #[error("cannot be unpacked as xz: {0}")]
    Xz(#[from] io::Error),
    /// It unpacks to too many bytes.
    #[error("unpacks to more than {MAX_UNPACKED} bytes")]
    TooLarge,
}

/// Unpacks the contents of the section.
///
/// # Errors
/// If they are not an xz stream, or unpack to more than 64 MiB.
pub(super) fn unpack(packed: &[u8]) -> Result<Vec<u8>, DebugDataError> {
    let reader = lzma_rust2::XzReader::new_mem_limit(packed, false, MEMORY_KIB);
    let mut unpacked = Vec::new();
    let length = reader.take(MAX_UNPACKED + 1).read_to_end(&mut unpacked)?;
    match length as u64 > MAX_UNPACKED {
        true => Err(DebugDataError::TooLarge),
        false => Ok(unpacked),
    }
}

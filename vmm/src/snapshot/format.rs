//! The `state` file: a header that any version can read, then the version's own body.
//!
//! Header, little endian: 8 bytes `EXOTSNAP`, u32 version, u32 zero, u64 body length, SHA-256 of
//! the body.

use sha2::{Digest, Sha256};

use crate::hex::hex;

/// The version of the body. Raised with every change of the saved state.
pub const FORMAT_VERSION: u32 = 11;
const MAGIC: &[u8; 8] = b"EXOTSNAP";
const HEADER: usize = 56;

/// The reason that a state file is not usable.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SnapshotDamage {
    /// The file is not a state file.
    #[error(
        "not a snapshot's state file (starts with {found}); name the folder that `exotrace snapshot` wrote"
    )]
    NotASnapshot {
        /// The first bytes of the file, in hex.
        found: String,
    },
    /// The file was written by another version.
    #[error(
        "written in format {found}, this exotrace reads format {FORMAT_VERSION}; boot the machine again and save it anew"
    )]
    Version {
        /// The version of the file.
        found: u32,
    },
    /// The file was cut short.
    #[error("damaged: {found} bytes of state, {expected} were written")]
    Truncated {
        /// The number of bytes in the file.
        found: u64,
        /// The number of bytes that the header announces.
        expected: u64,
    },
    /// The file was changed.
    #[error("damaged: SHA-256 {found}, {expected} was written")]
    Hash {
        /// The SHA-256 of the current bytes, in hexadecimal.
        found: String,
        /// The SHA-256 of the written bytes, in hexadecimal.
        expected: String,
    },
}

/// Returns the file with a body.
pub(super) fn encode(body: &[u8]) -> Vec<u8> {
    let mut file = Vec::with_capacity(HEADER + body.len());
    file.extend_from_slice(MAGIC);
    file.extend_from_slice(&FORMAT_VERSION.to_le_bytes());
    file.extend_from_slice(&[0; 4]);
    file.extend_from_slice(&(body.len() as u64).to_le_bytes());
    file.extend_from_slice(&Sha256::digest(body));
    file.extend_from_slice(body);
    file
}

/// Returns the body of a file.
pub(super) fn decode(file: &[u8]) -> Result<&[u8], SnapshotDamage> {
    let word = |at: usize| {
        let bytes = file.get(at..at + 4).and_then(|b| b.try_into().ok());
        bytes.map(u32::from_le_bytes)
    };
    let length = file
        .get(16..24)
        .and_then(|b| b.try_into().ok())
        .map(u64::from_le_bytes);
    let (Some(MAGIC), Some(version)) = (file.first_chunk::<8>(), word(8)) else {
        let start = file.get(..MAGIC.len()).unwrap_or(file);
        return Err(SnapshotDamage::NotASnapshot { found: hex(start) });
    };
    if version != FORMAT_VERSION {
        return Err(SnapshotDamage::Version { found: version });
    }
    let body = file.get(HEADER..).unwrap_or_default();
    let (Some(expected_hash), Some(expected)) = (file.get(24..HEADER), length) else {
        return Err(SnapshotDamage::Truncated {
            found: 0,
            expected: HEADER as u64,
        });
    };
    if body.len() as u64 != expected {
        return Err(SnapshotDamage::Truncated {
            found: body.len() as u64,
            expected,
        });
    }
    let found = Sha256::digest(body);
    if found.as_slice() != expected_hash {
        return Err(SnapshotDamage::Hash {
            found: hex(&found),
            expected: hex(expected_hash),
        });
    }
    Ok(body)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use devices::virtio::QueueError;
    use devices::virtio::console::{EndOfFile, WhenFull};
    use serde::de::DeserializeOwned;
    use serde_reflection::{Samples, Tracer, TracerConfig};

    use super::*;
    use crate::machine::virtio::{DeviceConfig, ImageFormat, Overlay, SavedRegisters};
    use crate::snapshot::SavedMachine;
    use crate::snapshot::pieces::Piece;
    use crate::tape::{Kind, Stream};

    /// The hash of the body's fields and their types, in [`FORMAT_VERSION`].
    const SHAPE: &str = "95 7f ec ea 7e 88 bc 73 3d 03 1e c5 53 92 21 27 ec 85 dd 9d 88 f0 17 cc 98 c0 61 9f aa 91 f8 22";

    #[test]
    fn a_changed_body_has_another_version() {
        fn trace<T: DeserializeOwned>(tracer: &mut Tracer) {
            let traced = tracer.trace_type::<T>(&Samples::new());
            traced.unwrap_or_else(|e| panic!("{e}: {}", e.explanation()));
        }
        let mut tracer = Tracer::new(TracerConfig::default());
        trace::<SavedMachine>(&mut tracer);
        // The variants of an enum are found from itself alone.
        trace::<DeviceConfig>(&mut tracer);
        trace::<EndOfFile>(&mut tracer);
        trace::<Kind>(&mut tracer);
        trace::<Stream>(&mut tracer);
        trace::<ImageFormat>(&mut tracer);
        trace::<Overlay>(&mut tracer);
        trace::<Piece>(&mut tracer);
        trace::<QueueError>(&mut tracer);
        trace::<SavedRegisters>(&mut tracer);
        trace::<WhenFull>(&mut tracer);
        let registry = tracer.registry().unwrap();
        let found = hex(&Sha256::digest(format!("{registry:?}")));
        assert_eq!(
            found, SHAPE,
            "the saved state has changed: raise FORMAT_VERSION, and put the new hash here ({registry:#?})"
        );
    }

    #[test]
    fn what_was_written_reads_back() {
        assert_eq!(decode(&encode(b"body")).unwrap(), b"body");
    }

    #[test]
    fn every_kind_of_damage_is_told_apart() {
        let good = encode(b"some body");
        let mut other_version = good.clone();
        other_version[8] += 1;
        let mut flipped = good.clone();
        *flipped.last_mut().unwrap() ^= 1;
        let cases = [
            (b"hello".to_vec(), "not a snapshot"),
            (Vec::new(), "not a snapshot"),
            (other_version, &format!("format {}", FORMAT_VERSION + 1)),
            (
                good[..good.len() - 1].to_vec(),
                "8 bytes of state, 9 were written",
            ),
            (good[..20].to_vec(), "damaged"),
            (flipped, "SHA-256"),
        ];
        for (file, expected) in cases {
            let message = decode(&file).unwrap_err().to_string();
            assert!(message.contains(expected), "{message}");
        }
    }
}

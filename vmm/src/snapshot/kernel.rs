//! A reference to the kernel of a snapshot, from which later sessions get symbols.

use std::fmt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// A kernel by its file and its contents.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KernelReference {
    /// The file as it was named at boot.
    pub path: PathBuf,
    /// The size of the unpacked ELF in bytes.
    pub size: u64,
    /// The hash of the unpacked ELF.
    pub hash: KernelHash,
}

/// The BLAKE3 hash of an unpacked ELF. Each start of a machine computes it, and SHA-256 takes three
/// times as long.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct KernelHash(pub [u8; 32]);

impl KernelReference {
    /// Returns the reference to an unpacked kernel.
    #[must_use]
    pub fn new(path: &Path, elf: &[u8]) -> Self {
        let path = path.canonicalize().unwrap_or_else(|_| path.to_path_buf());
        Self {
            path,
            size: elf.len() as u64,
            hash: KernelHash(*blake3::hash(elf).as_bytes()),
        }
    }

    /// Checks whether both are the same kernel, whatever the path of its file.
    #[must_use]
    pub fn is_same_kernel(&self, other: &Self) -> bool {
        (self.size, self.hash) == (other.size, other.hash)
    }
}

impl fmt::Display for KernelHash {
    /// Writes 64 hexadecimal digits.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

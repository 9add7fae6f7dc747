//! The kernel that a snapshot runs: what a later session needs for symbols.

use std::fmt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// A kernel by its file and its contents.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KernelReference {
    /// The file as it was named when the machine was booted.
    pub path: PathBuf,
    /// Size of the unpacked ELF in bytes.
    pub size: u64,
    /// Hash of the unpacked ELF.
    pub hash: KernelHash,
}

/// BLAKE3 of an unpacked ELF. Each start of a machine computes it, and SHA-256 takes three times as long.
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

    /// Returns whether both are of the same kernel, wherever its file stands.
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

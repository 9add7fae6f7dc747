//! Reading a kernel file: an ELF `vmlinux`, or a bzImage whose payload is unpacked here.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use introspect::regular_file;

use super::payload::{self, PayloadError};
use crate::hex::hex;

/// The largest kernel file that is read, in bytes. A kernel with all its debug information has 800
/// MiB.
const LONGEST: u64 = 2 << 30;

/// The reason that a kernel file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum KernelFileError {
    /// The file cannot be read.
    #[error("kernel {path}: {source}")]
    Read {
        /// The file.
        path: PathBuf,
        /// The host's error.
        source: std::io::Error,
    },
    /// The file has neither of the two formats.
    #[error(
        "kernel {path}: neither an ELF nor a bzImage ({length} bytes, starts with {start}); give a vmlinux or a bzImage for x86-64"
    )]
    NotAKernel {
        /// The file.
        path: PathBuf,
        /// The length of the file in bytes.
        length: usize,
        /// The first bytes of the file, in hex.
        start: String,
    },
    /// The bzImage cannot be unpacked.
    #[error("kernel {path}: {source}")]
    Payload {
        /// The file.
        path: PathBuf,
        /// The reason.
        source: PayloadError,
    },
    /// The ELF is not a kernel for this machine.
    #[error("kernel {path}: {reason}")]
    Elf {
        /// The file.
        path: PathBuf,
        /// The reason.
        reason: String,
    },
}

/// An unpacked kernel. Cloning shares its bytes.
#[derive(Debug, Clone)]
pub struct KernelFile {
    elf: Arc<Vec<u8>>,
    physical_end: u64,
}

impl KernelFile {
    /// Reads and, if necessary, unpacks the kernel at `path`.
    ///
    /// # Errors
    /// If it is not a kernel for x86-64, is truncated, or is packed in an unsupported way.
    pub fn open(path: &Path) -> Result<Self, KernelFileError> {
        let bytes = regular_file::read(path, LONGEST).map_err(|source| KernelFileError::Read {
            path: path.to_path_buf(),
            source,
        })?;
        Self::from_bytes(bytes, path)
    }

    /// Accepts the contents of a kernel file. `path` is only for messages.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn from_bytes(bytes: Vec<u8>, path: &Path) -> Result<Self, KernelFileError> {
        let own = || path.to_path_buf();
        let elf = if bytes.starts_with(b"\x7fELF") {
            bytes
        } else if bytes.get(0x202..0x206) == Some(b"HdrS") {
            payload::unpack_bzimage(&bytes).map_err(|source| KernelFileError::Payload {
                path: own(),
                source,
            })?
        } else {
            return Err(KernelFileError::NotAKernel {
                path: own(),
                length: bytes.len(),
                start: hex(bytes.get(..8).unwrap_or(&bytes)),
            });
        };
        let physical_end = physical_end(&elf).map_err(|reason| KernelFileError::Elf {
            path: own(),
            reason,
        })?;
        Ok(Self {
            elf: Arc::new(elf),
            physical_end,
        })
    }

    /// Returns the ELF's bytes.
    pub fn elf(&self) -> &[u8] {
        &self.elf
    }

    /// Returns the ELF's bytes, for a reader that keeps them.
    pub fn shared_elf(&self) -> Arc<Vec<u8>> {
        self.elf.clone()
    }

    /// Returns the end of the highest segment in guest-physical memory.
    pub fn physical_end(&self) -> u64 {
        self.physical_end
    }
}

/// Checks the ELF header and the load segments. Returns the end of the highest one.
fn physical_end(elf: &[u8]) -> Result<u64, String> {
    use object::elf::{ELFCLASS64, ELFDATA2LSB, EM_X86_64, FileHeader64, PT_LOAD};
    // Bytes 4 and 5 of e_ident. Checked first, because the parser reports another class as damage.
    if let Some([class, data]) = elf.get(4..6)
        && (*class != ELFCLASS64 || *data != ELFDATA2LSB)
    {
        return Err(format!(
            "an ELF, but not a 64-bit little-endian one (class {class}, data {data}); exotrace runs x86-64 kernels"
        ));
    }
    use object::read::elf::{FileHeader, ProgramHeader};
    let header = FileHeader64::<object::LittleEndian>::parse(elf)
        .map_err(|e| format!("damaged ELF header ({e}, {} bytes)", elf.len()))?;
    let machine = header.e_machine(object::LittleEndian);
    if machine != EM_X86_64 {
        return Err(format!("an ELF for machine {machine}, not x86-64 (62)"));
    }
    let segments = header
        .program_headers(object::LittleEndian, elf)
        .map_err(|e| format!("truncated: {e} ({} bytes)", elf.len()))?;
    let mut end = 0u64;
    for segment in segments {
        if segment.p_type(object::LittleEndian) != PT_LOAD {
            continue;
        }
        let (offset, size) = segment.file_range(object::LittleEndian);
        let file_end = offset
            .checked_add(size)
            .ok_or("damaged: a segment wraps around")?;
        if file_end > elf.len() as u64 {
            return Err(format!(
                "truncated: a segment ends at byte {file_end}, the file has {}",
                elf.len()
            ));
        }
        let physical = segment.p_paddr(object::LittleEndian);
        let memory_end = physical
            .checked_add(segment.p_memsz(object::LittleEndian))
            .ok_or("damaged: a segment wraps around")?;
        end = end.max(memory_end);
    }
    if end == 0 {
        return Err(
            "an ELF without anything to load; is it an object file or a debug file?".into(),
        );
    }
    Ok(end)
}

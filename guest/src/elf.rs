//! Executables without sections: programs and kernels of a few instructions.

use object::Endianness;
use object::build::Error;
use object::build::elf::{Builder, Header};
use object::elf;

/// A loadable segment with all permissions.
#[derive(Debug, Clone, Copy)]
pub struct Load {
    /// The offset of its bytes in the file; the headers are in front of the code.
    pub offset: u64,
    /// The virtual and physical address.
    pub address: u64,
    /// The size in the file, in bytes.
    pub size: u64,
    /// The size in memory, in bytes. Memory beyond `size` is zero.
    pub memory: u64,
}

/// Returns an executable that starts at `entry`: headers of 64 bytes and of 56 for each segment,
/// then `code`.
///
/// # Errors
/// If there is no memory for the file.
pub fn program(entry: u64, loads: &[Load], code: &[u8]) -> Result<Vec<u8>, Error> {
    let mut file = builder(entry);
    for load in loads {
        let segment = file.segments.add();
        segment.p_type = elf::PT_LOAD;
        segment.p_flags = elf::PF_R | elf::PF_W | elf::PF_X;
        segment.p_offset = load.offset;
        segment.p_vaddr = load.address;
        segment.p_paddr = load.address;
        segment.p_filesz = load.size;
        segment.p_memsz = load.memory;
        segment.p_align = 0x1000;
    }
    let mut out = Vec::new();
    file.write(&mut out)?;
    out.extend(code);
    Ok(out)
}

/// Returns an executable for x86-64 without contents.
pub(crate) fn builder<'data>(entry: u64) -> Builder<'data> {
    let mut file = Builder::new(Endianness::Little, true);
    file.header = Header {
        e_type: elf::ET_EXEC,
        e_machine: elf::EM_X86_64,
        e_entry: entry,
        e_phoff: file.file_header_size() as u64,
        ..Header::default()
    };
    file
}

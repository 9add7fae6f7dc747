//! The saved guest of the tests: its memory and CPU, and its kernel's types. `README.md` has its
//! origin.

use std::io::Read;

use introspect::core_file::CoreFile;
use introspect::kernel::btf::Btf;
use lzma_rust2::XzReader;

/// Returns the memory, as far as the readers use it, and the CPU.
///
/// # Panics
/// If the file of this repository is damaged.
#[must_use]
pub fn core() -> CoreFile {
    let bytes = unpacked(include_bytes!("small-6.1.core.xz"));
    CoreFile::parse(bytes).expect("a core file")
}

/// Returns the types of its kernel, a Linux 6.1.
///
/// # Panics
/// If the file of this repository is damaged.
#[must_use]
pub fn types() -> Btf {
    let bytes = unpacked(include_bytes!("small-6.1.btf.xz"));
    Btf::parse(&bytes).expect("types of a kernel")
}

fn unpacked(packed: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    XzReader::new(packed, false)
        .read_to_end(&mut bytes)
        .expect("a file packed by xz");
    bytes
}

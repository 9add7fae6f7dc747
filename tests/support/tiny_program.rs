//! Programs of a few instructions, small enough to be typed into a guest's shell.

use guest::elf::{Load, program};

/// The address of a program's file in memory. Its memory is one segment with all rights.
pub const BASE: u64 = 0x40_0000;
/// The offset of the code in the file.
pub const CODE: u64 = 0x40 + 0x38;
const PAGE: u64 = 0x1000;
/// mov $60, %eax; xor %edi, %edi; syscall: exit(0).
pub const EXIT: [u8; 9] = [0xb8, 60, 0, 0, 0, 0x31, 0xff, 0x0f, 0x05];

/// Returns an ELF file that runs `code`, with `pages` more pages after the first. Without any, its
/// text stays the file's page: zeros after it would be written to a copy.
pub fn elf(code: &[u8], pages: u64) -> Vec<u8> {
    let size = CODE + code.len() as u64;
    let load = Load {
        offset: 0,
        address: BASE,
        size,
        memory: size + pages * PAGE,
    };
    program(BASE + CODE, &[load], code).expect("a small file")
}

/// Returns the shell line that makes a program of `file` at `path`.
pub fn line_that_makes(path: &str, file: &[u8]) -> String {
    let octal: Vec<String> = file.iter().map(|byte| format!("\\{byte:03o}")).collect();
    format!("printf '{}' > {path} && chmod +x {path}", octal.concat())
}

//! Programs of a few instructions, small enough to be typed into a guest's shell. `guest::micro`'s
//! writer of ELF files pads to whole pages.

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
    let mut file = vec![0x7f, b'E', b'L', b'F', 2, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    // ET_EXEC, EM_X86_64, version.
    file.extend([2, 0, 62, 0, 1, 0, 0, 0]);
    // Entry, program headers, no section headers.
    for word in [BASE + CODE, 0x40, 0] {
        file.extend(word.to_le_bytes());
    }
    // Flags; sizes of the header and of the one program header.
    for half in [0u16, 0, 0x40, 0x38, 1, 0, 0, 0] {
        file.extend(half.to_le_bytes());
    }
    // PT_LOAD, all rights.
    file.extend([1, 0, 0, 0, 7, 0, 0, 0]);
    for word in [0, BASE, 0, size, size + pages * PAGE, PAGE] {
        file.extend(word.to_le_bytes());
    }
    file.extend(code);
    file
}

/// Returns the shell line that makes a program of `file` at `path`.
pub fn line_that_makes(path: &str, file: &[u8]) -> String {
    let octal: Vec<String> = file.iter().map(|byte| format!("\\{byte:03o}")).collect();
    format!("printf '{}' > {path} && chmod +x {path}", octal.concat())
}

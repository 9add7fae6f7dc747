//! The guest's kernel: its image file, its symbols and types, and where its tasks stand.
//!
//! The caller brings the bytes of the decompressed kernel (an ELF file) and, for what is live, memory and
//! registers. Nothing here needs debug files: kallsyms and BTF are inside the image.

pub mod btf;
pub mod image;
pub mod kallsyms;
pub mod slide;
pub mod symbols;
pub mod task;

mod elf_symbols;
mod name_index;
mod nearest;

#[cfg(test)]
mod image_tests;
#[cfg(test)]
mod test_elf;

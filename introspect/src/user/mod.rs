//! Programs and libraries of the guest's processes: ELF objects read from the page cache, from memory, or from the host.
//!
//! The caller brings a file's bytes as a [`FileBytes`](file_bytes::FileBytes) and knows where the file is mapped. This
//! solves: [the object's headers](object_file), [its functions](symbols) by address and by name, [its build
//! id](build_id), [where it was loaded](load_base), [its static probes](static_probes), and the sources of bytes that are no file of the guest: [the
//! vdso](vdso) and [a directory of the host](symfs). What the guest's memory does not hold is reported table by table,
//! and the rest is used.
//!
//! Addresses of an object are link-time addresses; [`LoadBase`](load_base::LoadBase) converts them.

pub mod build_id;
pub mod demangle;
pub mod file_bytes;
pub mod load_base;
pub mod lost;
pub mod object_file;
pub mod static_probes;
pub mod symbols;
pub mod symfs;
pub mod vdso;

mod code_ranges;
mod debugdata;
mod dynamic_table;
mod elf_headers;
mod sparse_bytes;
mod symbol_tables;

#[cfg(test)]
mod own_executable_tests;
#[cfg(test)]
mod symbol_tests;
#[cfg(test)]
pub(crate) mod test_object;

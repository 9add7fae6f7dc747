//! Programs and libraries of the guest's processes: ELF objects read from the page cache, from
//! memory, or from the host.
//!
//! The caller provides a file's bytes as a [`FileBytes`](file_bytes::FileBytes) and knows the
//! file's mappings. This module reads [the object's headers](object_file) and [its
//! functions](symbols) by address and by name. It finds [its build id](build_id), [its load
//! base](load_base) and [its static probes](static_probes). Other sources of bytes are [the
//! vdso](vdso) and [a directory of the host](symfs). Parts that the guest's memory lacks are
//! reported table by table, and the rest is used.
//!
//! Addresses of an object are link-time addresses. [`LoadBase`](load_base::LoadBase) converts them.

pub mod build_id;
pub mod demangle;
pub mod file_bytes;
pub mod load_base;
pub mod lost;
pub mod object_file;
pub mod perf_map;
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

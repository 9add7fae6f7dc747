//! The guest's kernel: its symbols and types, from its image file or from memory, and its
//! structures. Those are modules, tasks, VMAs, open files and cached pages.
//!
//! The caller passes the bytes of the decompressed kernel (an ELF file) and, for live data, memory
//! and registers. Debug files are not needed, because kallsyms and BTF are inside the image.

pub mod bpf_symbols;
pub mod btf;
pub mod cached;
pub mod cgroup;
pub mod cgroup_tree;
pub mod credentials;
pub mod files;
pub mod fpu;
pub mod image;
pub mod jump_label;
pub mod kallsyms;
pub mod layout;
pub mod list;
pub mod live;
pub mod load;
pub mod loaded_modules;
pub mod maple_tree;
pub mod module_memory;
pub mod module_readers;
pub mod module_symbols;
pub mod modules;
pub mod namespaces;
pub mod nearest;
pub mod page_cache;
pub mod panic;
pub mod path;
pub mod per_cpu;
pub mod process;
pub mod running;
pub mod section_table;
pub mod shared_bytes;
pub mod slide;
pub mod stored_inode;
pub mod structure;
pub mod symbols;
pub mod task;
pub mod task_list;
pub mod text;
pub mod tracepoint;
pub mod uptime;
pub mod vma;
pub mod vma_list;
pub mod xarray;

mod backing_file;
mod elf_symbols;
mod name_index;
mod symbol_table;

#[cfg(test)]
mod image_tests;
#[cfg(test)]
mod test_elf;
#[cfg(test)]
pub(crate) mod test_kernel;

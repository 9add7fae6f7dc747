//! What depends on the x86-64 architecture.

pub mod paging;
pub mod virtual_memory;

pub use paging::{AddressSpace, TranslateError, Translation, translate};
pub use virtual_memory::{ReadVirtualError, read_c_string, read_u32, read_u64, read_virtual};

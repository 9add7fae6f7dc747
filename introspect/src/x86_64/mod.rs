//! The parts that depend on the x86-64 architecture.

pub mod cpu_state;
pub mod paging;
pub mod translation_cache;
pub mod virtual_memory;

pub use cpu_state::{CpuState, GeneralRegisters};
pub use paging::{AddressSpace, PAGE, TranslateError, Translation, translate};
pub use translation_cache::TranslationCache;
pub use virtual_memory::{ReadVirtualError, read_c_string, read_u32, read_u64, read_virtual};

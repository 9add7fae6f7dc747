//! Constants of debug exceptions (Intel SDM volume 3B, chapter 18), with vectors as in
//! `kvm_debug_exit_arch.exception`.

/// #DB: a single step or a hardware breakpoint.
pub(crate) const VECTOR_DB: u32 = 1;
/// #BP: int3.
pub(crate) const VECTOR_BP: u32 = 3;
/// DR6.BS: the exception was a single step.
pub(crate) const DR6_STEP: u64 = 1 << 14;

//! The host's time stamp counter.

/// Executes RDTSC on the calling thread.
pub fn host_tsc() -> u64 {
    // SAFETY: RDTSC reads a counter and has no preconditions on x86-64.
    unsafe { core::arch::x86_64::_rdtsc() }
}

//! Kicks: making a vCPU thread leave KVM_RUN from another thread.
//!
//! `run->immediate_exit` makes the next KVM_RUN return at once, and the signal ends the one in
//! progress. Both together leave no window. KVM completes a pending I/O before it returns EINTR, so
//! the state is whole.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU8, Ordering};

use kvm_ioctls::VcpuFd;
use vmm_sys_util::signal::{SIGRTMIN, register_signal_handler};

/// Returns the signal in use. Rust's runtime and libc leave real-time signals alone.
fn signal() -> libc::c_int {
    SIGRTMIN()
}

extern "C" fn ignore(_: libc::c_int, _: *mut libc::siginfo_t, _: *mut libc::c_void) {}

/// Installs the empty handler, once per process, that makes the signal interrupt KVM_RUN.
pub(crate) fn install_handler() -> std::io::Result<()> {
    static DONE: OnceLock<i32> = OnceLock::new();
    let errno = *DONE.get_or_init(|| match register_signal_handler(signal(), ignore) {
        Ok(()) => 0,
        Err(error) => error.errno(),
    });
    if errno == 0 {
        Ok(())
    } else {
        Err(std::io::Error::from_raw_os_error(errno))
    }
}

/// The means to kick one vCPU. It must not outlive the vCPU's thread:
/// [`crate::machine::control::Control`] drops it before the thread ends.
pub(crate) struct Kick {
    thread: libc::pthread_t,
    immediate_exit: *const AtomicU8,
}

// SAFETY: `immediate_exit` points into the vCPU's kvm_run mapping, which lives as long as the
// vCPU's thread. The kick is dropped before that (see the type). The byte is only accessed
// atomically.
unsafe impl Send for Kick {}

/// Sets whether the next KVM_RUN of `fd` returns at once. The store is atomic because other threads
/// [kick](Kick::kick) meanwhile.
pub(super) fn set_immediate_exit(fd: &mut VcpuFd, on: bool) {
    let byte: *mut u8 = &mut fd.get_kvm_run().immediate_exit;
    // SAFETY: the byte lies in the mapping that `fd` owns, and a u8 is always aligned. All accesses
    // in this process are atomic.
    unsafe { AtomicU8::from_ptr(byte) }.store(u8::from(on), Ordering::SeqCst);
}

impl Kick {
    /// Creates the kick of the vCPU `fd`, which the calling thread runs.
    pub(crate) fn of_this_thread(fd: &mut VcpuFd) -> Self {
        let byte: *mut u8 = &mut fd.get_kvm_run().immediate_exit;
        // SAFETY: pthread_self has no preconditions.
        let thread = unsafe { libc::pthread_self() };
        Self {
            thread,
            immediate_exit: byte.cast::<AtomicU8>().cast_const(),
        }
    }

    /// Makes KVM_RUN return.
    pub(crate) fn kick(&self) {
        // SAFETY: the mapping is alive (see the type), a u8 is always aligned, and the kernel reads
        // it as a byte.
        unsafe { &*self.immediate_exit }.store(1, Ordering::SeqCst);
        // SAFETY: the thread has not ended (see the type). The handler is installed before any vCPU
        // runs.
        unsafe { libc::pthread_kill(self.thread, signal()) };
    }
}

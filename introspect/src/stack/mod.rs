//! Call stacks of the kernel and of processes.
//!
//! The caller pauses the CPUs. [`kernel`] walks kernel stacks, [`user`] those of processes. Both
//! return a [`frames::Stack`]: the frames, how each was found, and why the walk ended. The caller
//! looks up function names by [`frames::Frame::lookup_address`].

pub mod code;
pub mod frames;
pub mod kernel;
pub mod orc;
pub mod orc_versions;
pub mod user;

mod eh_frame;
mod frame_pointer;
mod orc_walk;
mod ranges;
mod trampoline;

#[cfg(test)]
mod frame_pointer_tests;
#[cfg(test)]
mod kernel_tests;
#[cfg(test)]
mod test_kernel;
#[cfg(test)]
mod user_tests;

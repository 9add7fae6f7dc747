//! Probes, the hit path, event rings and trace formats.
//!
//! The caller owns the machine ([`vmm::Machine`]) and the threads that read events; it hands a
//! [`kernel_view::KernelView`] to a tracer, drains the tracer, and stops it before the machine goes. This crate
//! decides where traps stand and what is kept of a hit. It opens no files and knows no terminals.
//!
//! * [`event`], [`ring`], [`merge`]: what one hit leaves behind, and how it gets off the vCPU's thread in time order.
//! * [`kernel_view`]: what a tracer must know of the running kernel.
//! * [`function_trace`]: the first tracer: entries and returns of kernel functions.
//! * [`trace_line`]: the text of trace(3).
//! * [`text_hash`]: proof that nothing of us is left in the guest.
#![forbid(unsafe_code)]

pub mod event;
pub mod function_trace;
pub mod kernel_view;
pub mod merge;
pub mod ring;
pub mod text_hash;
pub mod trace_line;

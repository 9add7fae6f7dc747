//! The atomics of this crate's lock-free parts: the standard library's, or the model checker's.
//!
//! With `--cfg loom` they record every order in which threads may see them, and work only inside
//! `loom::model`.

#[cfg(loom)]
pub(crate) use loom::sync::atomic::{AtomicU64, Ordering, fence};
#[cfg(not(loom))]
pub(crate) use std::sync::atomic::{AtomicU64, Ordering, fence};

//! The hit path without KVM: hits as plain values over a small memory.
#![allow(clippy::unwrap_used)]

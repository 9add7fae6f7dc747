//! The sources of the event rings, built on their own: with loom's atomics everything else of the
//! workspace would be, too, for nothing.
//!
//! `RUSTFLAGS="--cfg loom" cargo test --manifest-path probes/loom/Cargo.toml --release` runs the
//! model (`probes/src/ring/loom_model.rs`).
#![forbid(unsafe_code)]
#![allow(dead_code, reason = "the engine uses the rest")]

#[path = "../../src/merge.rs"]
pub mod merge;
#[path = "../../src/ring/mod.rs"]
pub mod ring;
#[path = "../../src/sync.rs"]
mod sync;

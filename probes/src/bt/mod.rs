//! The bt language: bt(5) of OpenBSD, with what users of bpftrace expect, run at the guest's probes.
//!
//! The caller has a script's text and an engine; it parses, prepares, starts and drains, and shows what comes.
//!
//! * [`ast`]: a script as a tree. [`diagnostic`]: what is wrong with one.
//! * [`compile`]: the tree becomes programs for a small stack machine, with names and types looked up in the guest's kernel.
//! * [`session`]: a script at work.
//! * [`maps`]: the global variables, shared by the vCPUs' threads; [`histogram`]: the buckets of `hist` and `lhist`.
//! * [`value`], [`format`](mod@format), [`time`], [`render`]: what a script puts out, and how it is shown.

pub mod ast;
mod check;
pub mod compile;
mod context;
pub mod diagnostic;
pub mod format;
pub mod histogram;
mod lex;
pub mod library;
pub mod maps;
mod names;
pub mod parse;
mod program;
mod record;
pub mod render;
mod run;
#[cfg(test)]
mod script_tests;
pub mod session;
mod snapshots;
pub mod time;
pub mod value;
mod walk;

pub use context::Clock;

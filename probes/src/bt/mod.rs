//! The bt language: bt(5) of OpenBSD, with what users of bpftrace expect, run at the guest's probes.
//!
//! The caller has a script's text and an engine; it parses, prepares, starts and drains, and shows what comes.
//!
//! * [`parse`]: text becomes a tree, [`ast`], by way of the tokens of `lex` and the words of `names`; `check` says what a tree cannot mean.
//!   [`diagnostic`]: what is wrong with a script. [`library`]: scripts and translators that come along.
//! * [`compile`]: the tree becomes programs for a small stack machine, with names and types looked up in the guest's kernel.
//! * [`session`]: a script at work: `run` is the machine, `context` what it knows of a hit.
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
mod registers;
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

//! The bt language: bt(5) of OpenBSD, with what users of bpftrace expect, run at the guest's
//! probes.
//!
//! The caller has a script's text and an engine. It parses, prepares, starts and drains, and shows
//! the output.
//!
//! * [`parse`]: makes a tree, [`ast`], from text, by the tokens of `lex` and the words of `names`;
//!   `check` finds trees that cannot be meant. [`diagnostic`]: errors in a script. [`library`]:
//!   scripts and translators that come with exotrace.
//! * [`compile`]: makes programs for a small stack machine from the tree, with names and types
//!   looked up in the guest's kernel.
//! * [`session`]: a running script. `run` is the machine, `context` its view of a hit.
//! * [`maps`]: the global variables, shared by the vCPUs' threads; [`histogram`]: the buckets of
//!   `hist` and `lhist`.
//! * [`moments`]: moments of the machine that a script keeps.
//! * [`value`], [`format`](mod@format), [`time`], [`render`]: a script's output, and how it is
//!   shown.
#![forbid(unsafe_code)]

mod arrangement;
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
pub mod moments;
mod names;
pub mod parse;
mod program;
mod record;
mod registers;
pub mod render;
mod run;
#[cfg(test)]
mod script_tests;
pub mod series;
pub mod session;
pub mod shape;
mod snapshots;
#[cfg(test)]
#[path = "../../../tests/support/data.rs"]
mod test_data;
pub mod time;
pub mod value;
pub mod value_text;
pub mod walk;

pub use check::differences::differences;

pub use context::Clock;

//! The exotrace command.
#![forbid(unsafe_code)]
fn main() {}

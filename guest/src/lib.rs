//! Demo and test guests, and the micro guest.
#![forbid(unsafe_code)]

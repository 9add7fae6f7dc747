//! Helpers of the whole-system tests.
#![forbid(unsafe_code)]

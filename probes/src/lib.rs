//! Probes, the hit path, event rings and trace formats.
#![forbid(unsafe_code)]

//! Device models without KVM: bus, serial, i8042, CMOS.
#![forbid(unsafe_code)]

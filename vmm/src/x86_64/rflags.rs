//! Bits of RFLAGS (Intel SDM volume 1, section 3.4.3).

pub(crate) const CF: u64 = 1 << 0;
/// The bit that is always set.
pub(crate) const FIXED: u64 = 1 << 1;
pub(crate) const PF: u64 = 1 << 2;
pub(crate) const AF: u64 = 1 << 4;
pub(crate) const ZF: u64 = 1 << 6;
pub(crate) const SF: u64 = 1 << 7;
pub(crate) const TF: u64 = 1 << 8;
pub(crate) const IF: u64 = 1 << 9;
pub(crate) const DF: u64 = 1 << 10;
pub(crate) const OF: u64 = 1 << 11;
pub(crate) const IOPL: u64 = 3 << 12;
pub(crate) const NT: u64 = 1 << 14;
pub(crate) const RF: u64 = 1 << 16;
pub(crate) const AC: u64 = 1 << 18;
pub(crate) const ID: u64 = 1 << 21;
/// The six status flags that arithmetic sets.
pub(crate) const STATUS: u64 = CF | PF | AF | ZF | SF | OF;

//! The memory that this process keeps on behalf of guests and clients: what is held for what, and one limit for all of it.
//!
//! A guest says how large its symbol tables are, and clients how many traces there are. Each of these has bounds of its own; this
//! is the bound of all together. It is of the process, as its memory is. Who asks for more than is left is refused, and nothing
//! that is held is taken away. What is held for so short a time that one client at a time has it is not counted.

use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes that are held at most.
pub const LIMIT: u64 = 1 << 30;

/// A purpose that memory is held for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// Functions of programs that are looked at or traced.
    Symbols,
    /// Events of traces and scripts that are not read yet.
    Rings,
    /// Copies of programs for clients of dt(4), while they are made.
    Objects,
}

/// Bytes held for each purpose.
static HELD: [AtomicU64; Purpose::ALL.len()] = [const { AtomicU64::new(0) }; Purpose::ALL.len()];
/// Bytes held for all.
static TOTAL: AtomicU64 = AtomicU64::new(0);

/// More than is left was asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "{asked} bytes for {}: {held} of {LIMIT} bytes are held for guests and clients; end a trace", purpose.name()
)]
pub struct OverBudget {
    /// The purpose.
    pub purpose: Purpose,
    /// Bytes that were asked for.
    pub asked: u64,
    /// Bytes that were held for all purposes.
    pub held: u64,
}

impl Purpose {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Symbols, Self::Rings, Self::Objects];

    /// Returns the name for a message or a list.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Symbols => "symbols",
            Self::Rings => "rings",
            Self::Objects => "objects",
        }
    }

    /// Returns the bytes that are held for it.
    #[must_use]
    pub fn held(self) -> u64 {
        HELD[self as usize].load(Ordering::Relaxed)
    }
}

/// Memory that is held. Given back when dropped.
#[derive(Debug)]
pub struct Held {
    purpose: Purpose,
    bytes: u64,
}

impl Held {
    /// Counts `bytes` as held.
    ///
    /// # Errors
    /// If that would be more than [`LIMIT`] together with what is held.
    pub fn take(purpose: Purpose, bytes: u64) -> Result<Self, OverBudget> {
        let more = |held: u64| held.checked_add(bytes).filter(|all| *all <= LIMIT);
        let taken = TOTAL.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more);
        taken.map_err(|held| OverBudget {
            purpose,
            asked: bytes,
            held,
        })?;
        HELD[purpose as usize].fetch_add(bytes, Ordering::Relaxed);
        Ok(Self { purpose, bytes })
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        HELD[self.purpose as usize].fetch_sub(self.bytes, Ordering::Relaxed);
        TOTAL.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    /// Other tests of this process hold little.
    #[test]
    fn all_purposes_share_one_limit() {
        let most = LIMIT / 2;
        let symbols = Held::take(Purpose::Symbols, most).unwrap();
        assert!(Purpose::Symbols.held() >= most);
        let refused = Held::take(Purpose::Objects, most + 1).unwrap_err();
        assert!(refused.held >= most, "{refused}");
        assert!(Held::take(Purpose::Objects, u64::MAX).is_err());
        drop(symbols);
        let objects = Held::take(Purpose::Objects, most + 1).unwrap();
        assert!(Purpose::Symbols.held() < most && Purpose::Objects.held() > most);
        drop(objects);
    }
}

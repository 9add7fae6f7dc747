//! Limits the memory that this process holds on behalf of guests and clients, by purpose and in
//! total.
//!
//! A guest determines the size of its symbol tables, and clients the number of traces. Each of
//! these has its own bound; this is the bound on their sum. It applies to the process, as its
//! memory does. A request for more than is left is refused, and nothing that is held is released
//! for it. Memory that only one client at a time holds, for a short time, is not counted.

use std::sync::atomic::{AtomicU64, Ordering};

/// The maximum number of bytes held.
pub const LIMIT: u64 = 1 << 30;

/// A purpose for which memory is held.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// Functions of programs that are inspected or traced.
    Symbols,
    /// Unread events of traces and scripts.
    Rings,
    /// Copies of programs for clients of dt(4), while they are made.
    Objects,
}

/// The bytes held for each purpose.
static HELD: [AtomicU64; Purpose::ALL.len()] = [const { AtomicU64::new(0) }; Purpose::ALL.len()];
/// The bytes held for all purposes.
static TOTAL: AtomicU64 = AtomicU64::new(0);

/// The error of a request for more than is left.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "{asked} bytes for {}: {held} of {LIMIT} bytes are held for guests and clients; end a trace", purpose.name()
)]
pub struct OverBudget {
    /// The purpose.
    pub purpose: Purpose,
    /// The number of bytes requested.
    pub asked: u64,
    /// The number of bytes held for all purposes.
    pub held: u64,
}

impl Purpose {
    /// All purposes.
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

    /// Returns the number of bytes held for this purpose.
    #[must_use]
    pub fn held(self) -> u64 {
        HELD[self as usize].load(Ordering::Relaxed)
    }
}

/// A reservation of memory, released on drop.
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
        Held::take(Purpose::Objects, u64::MAX).unwrap_err();
        drop(symbols);
        let objects = Held::take(Purpose::Objects, most + 1).unwrap();
        assert!(Purpose::Symbols.held() < most && Purpose::Objects.held() > most);
        drop(objects);
    }
}

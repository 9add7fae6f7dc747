//! Moments of the machine that a script wants to have kept: by `snapshot()` the one of the hit, by
//! `rewind()` one before it.
//!
//! A rule does not save a machine. It pauses it at the hit and passes the pause on to the script's
//! owner, which saves it and lets it go. So the guest waits until the owner has taken the moment.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use vmm::machine::Paused;

use crate::ast::{ExpressionKind, Function, Script};
use crate::program::Code;
use crate::walk;

/// The maximum number of moments that wait for the script's owner.
const MOST: usize = 64;

/// A moment to be kept.
#[derive(Debug)]
pub struct Moment {
    /// The wish.
    pub wish: Wish,
    /// The name for its snapshot: that of a file, without a folder.
    pub name: Arc<str>,
    /// The time of the hit, in nanoseconds since 1970.
    pub unix_ns: u64,
    /// The pause of the machine at the hit, for a snapshot of it. `None` outside hits.
    pub hold: Option<Paused>,
}

/// The wish of a rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wish {
    /// A snapshot of the machine as it is.
    Snapshot,
    /// A snapshot of the machine before: so long, or as long as the machine's owner chooses.
    Rewind(Option<Duration>),
}

/// The moments of the machine that a script keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Keeps {
    /// Set if it calls `snapshot()`.
    pub hits: bool,
    /// Set if it calls `rewind()`.
    pub past: bool,
}

impl Keeps {
    /// Returns the moments that rules keep.
    pub(crate) fn of<'c>(rules: impl Iterator<Item = &'c Code>) -> Self {
        let mut keeps = Self::default();
        for rule in rules {
            keeps.hits |= rule.keeps_hits();
            keeps.past |= rule.rewinds();
        }
        keeps
    }
}

/// The moments that a script's owner has not taken yet.
#[derive(Debug, Default)]
pub(crate) struct Moments(Mutex<Vec<Moment>>);

impl Moments {
    /// Adds a moment. Returns `false` if too many wait.
    pub(crate) fn add(&self, moment: Moment) -> bool {
        let mut waiting = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let has_room = waiting.len() < MOST;
        if has_room {
            waiting.push(moment);
        }
        has_room
    }

    /// Takes all of them, in order.
    pub(crate) fn take(&self) -> Vec<Moment> {
        std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Checks whether a script keeps moments.
#[must_use]
pub fn are_kept_by(script: &Script) -> bool {
    let mut keeps = false;
    for rule in &script.rules {
        walk::of_rule(rule, &mut |expression| {
            walk::below(expression, &mut |part| {
                if let ExpressionKind::Call(call) = &part.kind {
                    keeps |= matches!(call.function, Function::Snapshot | Function::Rewind);
                }
            });
        });
    }
    keeps
}

/// Checks whether a text can name a snapshot: it is the name of a file in a folder.
pub(crate) fn is_name(text: &[u8]) -> bool {
    const LONGEST: usize = 200;
    let is_usual = |byte: &u8| byte.is_ascii_alphanumeric() || b"._-+@:".contains(byte);
    (1..=LONGEST).contains(&text.len()) && text.iter().all(is_usual) && text.first() != Some(&b'.')
}

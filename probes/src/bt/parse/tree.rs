//! How high a tree of expressions may grow.
//!
//! Trees are walked, compared and dropped by functions that call themselves, so that no text may make one higher than the stack bears:
//! neither by nesting nor by `1 + 1 + 1 + ...`, whose tree leans to the left.

use super::super::ast::{Expression, ExpressionKind, Span};

/// Levels of the highest tree, and of the deepest nesting.
pub const HIGHEST: usize = 200;

/// The tree would be higher than [`HIGHEST`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TooHigh;

/// An expression that knows its height.
#[derive(Debug)]
pub struct Tall {
    /// The expression.
    pub expression: Expression,
    /// Levels under it, with its own.
    pub height: usize,
}

impl Tall {
    /// An expression on top of others, of which the highest has `below` levels.
    ///
    /// # Errors
    /// If it is too high.
    pub fn new(kind: ExpressionKind, span: Span, below: usize) -> Result<Self, TooHigh> {
        if below >= HIGHEST {
            return Err(TooHigh);
        }
        Ok(Self {
            expression: Expression { kind, span },
            height: below + 1,
        })
    }
}

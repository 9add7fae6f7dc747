//! Bounds the height of a tree of expressions.
//!
//! Recursive functions walk, compare and drop trees, so no text may make a tree too high for the
//! stack. Neither nesting may do so, nor `1 + 1 + 1 + ...`, whose tree leans to the left.

use crate::ast::{Expression, ExpressionKind, Span};

/// The greatest height of a tree in levels, and the greatest depth of nesting.
pub const HIGHEST: usize = 200;

/// The error of a tree higher than [`HIGHEST`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TooHigh;

/// An expression that knows its height.
#[derive(Debug)]
pub struct Tall {
    /// The expression.
    pub expression: Expression,
    /// The number of levels, including its own.
    pub height: usize,
}

impl Tall {
    /// Makes an expression on top of others, of which the highest has `below` levels.
    ///
    /// # Errors
    /// The tree is too high.
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

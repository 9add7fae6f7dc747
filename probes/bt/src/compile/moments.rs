//! Compiles `snapshot()` and `rewind()`, which keep moments of the machine.

use std::sync::Arc;

use super::{RuleCompiler, shared_text, text_of};
use crate::ast::{Call, Expression, Function};
use crate::moments;
use crate::program::Operation;

impl RuleCompiler<'_, '_> {
    /// Compiles a call that keeps a moment.
    pub(super) fn keep_moment(&mut self, call: &Call) {
        let Some(name) = self.snapshot_name(call.arguments.first()) else {
            return;
        };
        if call.function == Function::Snapshot {
            self.put(Operation::Keep(name));
            return;
        }
        let ago = call.arguments.get(1);
        if ago.is_some() {
            self.number(ago);
        }
        let has_ago = ago.is_some();
        self.put(Operation::Rewind { name, has_ago });
    }

    /// Returns the name that a call gives to a snapshot.
    fn snapshot_name(&mut self, argument: Option<&Expression>) -> Option<Arc<str>> {
        let text = text_of(argument).unwrap_or_default();
        if moments::is_name(text) {
            return Some(shared_text(text));
        }
        let span = argument.map(|argument| argument.span)?;
        self.refuse(
            span,
            "the name of a snapshot is that of a file: 1 to 200 letters, digits and ._-+@:, not beginning with a dot",
        );
        None
    }
}

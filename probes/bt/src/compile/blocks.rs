//! Compiles blocks with a value: those of expressions, of macros, and the bodies of functions.

use super::types::Type;
use super::{Loop, RuleCompiler};
use crate::ast::{BlockExpression, Expression, Span};
use crate::program::Operation;

/// The function whose body is being compiled.
pub(super) struct Body {
    /// The slot of the returned value.
    slot: usize,
    /// The type of the returned values, as far as it is known.
    of: Option<Type>,
    /// The jumps to its end.
    returns: Vec<usize>,
    /// The loops around it, which it cannot leave by `break`.
    loops: Vec<Loop>,
    /// The number of blocks in operands, from which it cannot return.
    operands: usize,
}

impl RuleCompiler<'_, '_> {
    /// Compiles a block as an operand.
    pub(super) fn block_value(&mut self, of: &BlockExpression) -> Type {
        if of.is_function {
            return self.function(of);
        }
        // Operands before it are on the stack, so nothing may jump out of it.
        let loops = std::mem::take(&mut self.loops);
        self.operands += 1;
        self.block(&of.block);
        self.operands -= 1;
        self.loops = loops;
        match &of.value {
            Some(value) => self.expression(value),
            None => self.constant(0),
        }
    }

    /// Compiles a block as a statement.
    pub(super) fn block_effect(&mut self, of: &BlockExpression) {
        if of.is_function {
            self.function(of);
            return self.put(Operation::Drop);
        }
        self.block(&of.block);
        if let Some(value) = &of.value {
            self.effect(value);
        }
    }

    /// Compiles a call of a function: its body, and the value that it returns.
    fn function(&mut self, of: &BlockExpression) -> Type {
        let slot = self.new_slot();
        self.constant(0);
        self.put(Operation::SetLocal(slot));
        self.functions.push(Body {
            slot,
            of: None,
            returns: Vec::new(),
            loops: std::mem::take(&mut self.loops),
            operands: std::mem::take(&mut self.operands),
        });
        self.block(&of.block);
        if let Some(value) = &of.value {
            self.value(value);
            self.put(Operation::SetLocal(slot));
        }
        let Some(body) = self.functions.pop() else {
            return Type::Any;
        };
        self.loops = body.loops;
        self.operands = body.operands;
        body.returns.iter().for_each(|from| self.land(*from));
        self.gives(Operation::Local(slot), body.of.unwrap_or(Type::Number))
    }

    /// Compiles `return`.
    pub(super) fn give_back(&mut self, value: Option<&Expression>, span: Span) {
        let Some(slot) = self.functions.last().map(|body| body.slot) else {
            if let Some(value) = value {
                self.effect(value);
            }
            return self.put(Operation::Return);
        };
        if self.operands > 0 {
            let message = "return inside of a block with a value; return behind it";
            self.refuse(span, message);
        }
        if let Some(value) = value {
            let found = self.value(value);
            self.put(Operation::SetLocal(slot));
            if let Some(body) = self.functions.last_mut() {
                body.of = Some(match body.of.take() {
                    Some(before) => before.joined(found),
                    None => found,
                });
            }
        }
        let maps = self.loops.iter().filter(|around| around.is_of_map).count();
        for _ in 0..maps {
            self.put(Operation::EndIteration);
        }
        let end = self.jump(Operation::Jump);
        if let Some(body) = self.functions.last_mut() {
            body.returns.push(end);
        }
    }
}

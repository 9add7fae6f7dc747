//! Parses enums of a script.

use super::{Parsed, Parser};
use crate::ast::{BinaryOperator, Enum, Expression, ExpressionKind, UnaryOperator};
use crate::diagnostic::Diagnostic;
use crate::lex::normal::TokenKind;

/// The greatest number of members.
const MOST_MEMBERS: usize = 4096;

impl Parser<'_> {
    /// Parses `enum name { A, B = 5, ... };`
    pub(super) fn enumeration(&mut self) -> Parsed<Enum> {
        self.next()?;
        let name = match self.peek()?.kind {
            TokenKind::Word(name) => {
                self.next()?;
                name.to_owned()
            }
            _ => String::new(),
        };
        self.expect("{", "after the enum's name")?;
        let mut members: Vec<(String, i64)> = Vec::new();
        let mut next = 0i64;
        while !self.eat("}")? {
            let (member, span) = self.expect_word("a name, or '}'")?;
            if members.len() >= MOST_MEMBERS {
                let message = format!("an enum of more than {MOST_MEMBERS} names");
                return Err(Diagnostic::new(span, message));
            }
            if self.eat("=")? {
                let value = self.expression()?;
                next = number(&value, &members).ok_or_else(|| {
                    let message = "the value of an enum's name must be a number as such";
                    Diagnostic::new(value.span, message)
                })?;
            }
            members.push((member.to_owned(), next));
            next = next.wrapping_add(1);
            if !self.eat(",")? && !self.is("}")? {
                return Err(self.unexpected("',' or '}' after the name"));
            }
        }
        // C needs it, bpftrace does not.
        self.eat(";")?;
        Ok(Enum { name, members })
    }
}

/// Returns the number that an expression of numbers and earlier names amounts to.
fn number(of: &Expression, known: &[(String, i64)]) -> Option<i64> {
    match &of.kind {
        ExpressionKind::Number(number) => Some(*number),
        ExpressionKind::Constant(name) | ExpressionKind::Named { name, .. } => {
            let found = known.iter().find(|(known, _)| known == name);
            found.map(|(_, number)| *number)
        }
        ExpressionKind::Unary(UnaryOperator::Negate, of) => number(of, known)?.checked_neg(),
        ExpressionKind::Unary(UnaryOperator::Complement, of) => Some(!number(of, known)?),
        ExpressionKind::Binary(operator, left, right) => {
            let (left, right) = (number(left, known)?, number(right, known)?);
            match operator {
                BinaryOperator::Add => left.checked_add(right),
                BinaryOperator::Subtract => left.checked_sub(right),
                BinaryOperator::Multiply => left.checked_mul(right),
                BinaryOperator::ShiftLeft => left.checked_shl(u32::try_from(right).ok()?),
                BinaryOperator::ShiftRight => left.checked_shr(u32::try_from(right).ok()?),
                BinaryOperator::Or => Some(left | right),
                BinaryOperator::And => Some(left & right),
                _ => None,
            }
        }
        _ => None,
    }
}

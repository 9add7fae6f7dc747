//! Finds conditions that are known before the script runs, so that branches that are never taken
//! are not compiled: what stands in them need not have a meaning for this guest or probe.

use super::types::Type;
use super::{RuleCompiler, shared_text};
use crate::ast::{
    BinaryOperator, Call, Dialect, Expression, ExpressionKind, Function, Span, TypeTest,
    UnaryOperator,
};
use crate::run::numbers;
use crate::value::Value;

impl RuleCompiler<'_, '_> {
    /// Returns whether a condition holds, if that is known.
    pub(super) fn known_truth(&mut self, of: &Expression) -> Option<bool> {
        match self.is_strict() {
            true => None,
            false => self.known(of).map(|value| numbers::is_true(&value)),
        }
    }

    /// Returns the value of an expression of literals, the script's arguments, and questions about
    /// types.
    fn known(&mut self, of: &Expression) -> Option<Value> {
        match &of.kind {
            ExpressionKind::Number(number) | ExpressionKind::Enumerator { number, .. } => {
                Some(Value::Int(*number))
            }
            ExpressionKind::Boolean(truth) => Some(Value::Int((*truth).into())),
            ExpressionKind::Text(text) => Some(Value::text(text)),
            ExpressionKind::Argument(number) => {
                let given = self.shared.argument(*number);
                given.map_or(Some(Value::ZERO), super::expressions::number_of)
            }
            ExpressionKind::TypeInfo(of) => {
                let items = self.type_names(of)?;
                Value::tuple(&items)
            }
            ExpressionKind::Member { of, name, .. } => match &of.kind {
                ExpressionKind::TypeInfo(of) => {
                    let at = super::like::item_of_type_info(name)?;
                    self.type_names(of)?.get(at).cloned()
                }
                _ => None,
            },
            ExpressionKind::Item { of, index } => match &of.kind {
                ExpressionKind::TypeInfo(of) => self.type_names(of)?.get(*index).cloned(),
                _ => None,
            },
            ExpressionKind::ArgumentCount => {
                let count = self.shared.positional_arguments().count();
                i64::try_from(count).ok().map(Value::Int)
            }
            ExpressionKind::Call(Call {
                function: Function::TypeTest(test),
                arguments,
                ..
            }) => {
                let found = self.holds(*test, arguments.first()?);
                Some(Value::Int(found.into()))
            }
            ExpressionKind::Builtin(crate::ast::Builtin::ProbeType) => {
                self.probe.kind.is_none().then(|| Value::text(b"special"))
            }
            ExpressionKind::Unary(operator, operand) => {
                let known = self.known(operand)?;
                matches!(operator, UnaryOperator::Not | UnaryOperator::Negate)
                    .then(|| numbers::unary(*operator, &known, Dialect::Normal))
            }
            ExpressionKind::Binary(BinaryOperator::LogicalAnd, left, right) => {
                let (left, right) = (self.known_truth(left), self.known_truth(right));
                let both = match (left, right) {
                    (Some(false), _) | (_, Some(false)) => Some(false),
                    (Some(true), right) => right,
                    (None, _) => None,
                };
                both.map(|truth| Value::Int(truth.into()))
            }
            ExpressionKind::Binary(BinaryOperator::LogicalOr, left, right) => {
                let (left, right) = (self.known_truth(left), self.known_truth(right));
                let either = match (left, right) {
                    (Some(true), _) | (_, Some(true)) => Some(true),
                    (Some(false), right) => right,
                    (None, _) => None,
                };
                either.map(|truth| Value::Int(truth.into()))
            }
            ExpressionKind::Binary(operator, left, right) => {
                let (left, right) = (self.known(left)?, self.known(right)?);
                numbers::binary(*operator, &left, &right, Dialect::Normal).ok()
            }
            _ => None,
        }
    }

    /// Returns the number that an expression is, if that is known before the script runs.
    pub(super) fn known_number(&mut self, of: &Expression) -> Option<i64> {
        match self.known(of)? {
            Value::Int(number) => Some(number),
            _ => None,
        }
    }

    /// Answers a question about the type of an expression, which is compiled for it alone.
    pub(super) fn holds(&mut self, test: TypeTest, of: &Expression) -> bool {
        if test == TypeTest::Literal {
            return matches!(
                of.kind,
                ExpressionKind::Number(_)
                    | ExpressionKind::Unsigned(_)
                    | ExpressionKind::Boolean(_)
                    | ExpressionKind::Text(_)
                    | ExpressionKind::Enumerator { .. }
            );
        }
        let (before, said) = (self.here(), self.shared.diagnostics.len());
        let found = self.expression(of);
        let is_char_array = self.is_char_array(&found);
        self.code.truncate(before);
        self.shared.diagnostics.truncate(said);
        match test {
            TypeTest::Array => {
                let is_memory =
                    matches!(found, Type::Lvalue(super::types::MemoryType::Array { .. }));
                matches!(found, Type::Array { .. }) || is_memory
            }
            TypeTest::Integer => matches!(found, Type::Number | Type::Unsigned),
            TypeTest::UnsignedInteger => found == Type::Unsigned,
            TypeTest::Pointer => matches!(found, Type::Pointer(_)),
            TypeTest::Text => found == Type::Text || is_char_array,
            TypeTest::Literal => false,
        }
    }

    /// Compiles `static_assert(condition, message)`.
    pub(super) fn static_assert(&mut self, arguments: &[Expression], span: Span) {
        let Some(condition) = arguments.first() else {
            return;
        };
        let message = match arguments.get(1).map(|of| &of.kind) {
            Some(ExpressionKind::Text(text)) => shared_text(text),
            _ => "static_assert() does not hold".into(),
        };
        match self.known_truth(condition) {
            Some(true) => {}
            Some(false) => {
                self.refuse(span, &*message);
            }
            None => {
                let message =
                    "the condition of static_assert() must be known before the script runs";
                self.refuse(condition.span, message);
            }
        }
    }

    /// Compiles `fail(format, ...)`: an error wherever it is not in a branch that is never taken.
    pub(super) fn fail_script(&mut self, arguments: &[Expression], span: Span) {
        let Some((ExpressionKind::Text(format), values)) = arguments
            .split_first()
            .map(|(format, values)| (&format.kind, values))
        else {
            return;
        };
        let Ok(format) = crate::format::Format::parse(format, Dialect::Normal) else {
            return;
        };
        let mut known = Vec::new();
        for value in values {
            match self.known(value) {
                Some(found) => known.push(found),
                None => {
                    let message = "the values of fail() must be known before the script runs";
                    self.refuse(value.span, message);
                    return;
                }
            }
        }
        let text = format.render(&known, &NoNames);
        self.refuse(span, String::from_utf8_lossy(&text));
    }
}

/// Names for values known before the script runs, none of which is an address.
struct NoNames;

impl crate::value::Names for NoNames {
    fn kernel(&self, address: u64) -> String {
        format!("{address:#x}")
    }

    fn user(&self, _pid: u32, address: u64) -> String {
        format!("{address:#x}")
    }
}

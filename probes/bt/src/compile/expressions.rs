//! Compiles expressions: operations that leave one value.

use std::sync::Arc;

use probes::event::{EventKind, MAX_FRAMES};

use super::extent::Extent;
use super::types::{MemoryType, Type};
use super::{DEEPEST, MOST_EXPRESSIONS, RuleCompiler, TOO_LARGE, Value};
use crate::ast::{BinaryOperator, Builtin, Expression, ExpressionKind, Span, UnaryOperator};
use crate::program::{Known, Operation};
use crate::run::{MOST_BYTES, numbers};

impl RuleCompiler<'_, '_> {
    /// Leaves a value that can be kept and shown: the text of a `char` array, not its address.
    pub(super) fn value(&mut self, of: &Expression) -> Type {
        let found = self.expression(of);
        let is_place = matches!(found, Type::Lvalue(_));
        let settled = self.settle(found, of.span);
        if is_place && let Some(Operation::ReadText { most }) = self.code.last() {
            self.extent = Extent::Text(*most as u64);
        }
        settled
    }

    /// Turns an lvalue into a value.
    pub(super) fn settle(&mut self, of: Type, span: Span) -> Type {
        match of {
            Type::Lvalue(MemoryType::Array { element, elements })
                if *element == MemoryType::Char =>
            {
                let most = match elements {
                    // The last member of a structure: its length is not declared.
                    0 => self.shared.options.longest_text,
                    _ => usize::try_from(elements).unwrap_or(usize::MAX),
                };
                self.gives(Operation::ReadText { most }, Type::Text)
            }
            Type::Lvalue(MemoryType::Array { element, elements }) => {
                self.array_value(*element, elements)
            }
            Type::Lvalue(MemoryType::Unknown) => {
                self.refuse(span, "a thing of unknown type has no value; cast it")
            }
            Type::Lvalue(thing) => self.structure_value(&thing, span),
            Type::Translated { .. } => {
                self.refuse(span, "a translated structure has no value; name a member")
            }
            value => value,
        }
    }

    /// Leaves a value, or the address of a thing that is no value: see [`Type::Lvalue`].
    pub(super) fn expression(&mut self, of: &Expression) -> Type {
        self.depth += 1;
        self.spent += 1;
        // Translators that use each other can make a small script huge.
        let before = self.here();
        let found = match self.depth > DEEPEST || self.spent > MOST_EXPRESSIONS {
            true if self.spent > MOST_EXPRESSIONS + 1 => Type::Any,
            true => self.refuse(of.span, TOO_LARGE),
            false => self.any_expression(of),
        };
        self.depth -= 1;
        let own = self.own_extent.take();
        self.extent = own.unwrap_or_else(|| self.extent_of(of, &found, before));
        found
    }

    /// Compiles values one behind the other. Returns their types and extents.
    fn values<'e>(&mut self, of: impl Iterator<Item = &'e Expression>) -> (Vec<Type>, Vec<Extent>) {
        of.map(|item| (self.value(item), self.extent.clone()))
            .unzip()
    }

    fn any_expression(&mut self, of: &Expression) -> Type {
        match &of.kind {
            ExpressionKind::Number(number) => self.constant(*number),
            ExpressionKind::Unsigned(number) => {
                let number = numbers::unsigned(*number);
                self.gives(Operation::Constant(number), Type::Number)
            }
            ExpressionKind::Text(text) => {
                // Text ends at the first zero byte, as C's.
                let end = text.iter().position(|byte| *byte == 0 && !self.is_strict());
                let text = text.get(..end.unwrap_or(text.len())).unwrap_or_default();
                self.gives(Operation::Constant(Value::text(text)), Type::Text)
            }
            ExpressionKind::Boolean(truth) => self.truth(*truth),
            ExpressionKind::Enumerator { of, number } => {
                self.constant(*number);
                self.shared.types.own_enum(*of)
            }
            ExpressionKind::Builtin(builtin) => self.builtin(*builtin, of.span),
            ExpressionKind::Argument(number) => self.argument_of_script(*number),
            ExpressionKind::Constant(name) => match self.shared.types.constant(name) {
                Some((value, of)) => {
                    self.constant(value);
                    of
                }
                None => {
                    let why = self.shared.types.why_none();
                    self.refuse(of.span, format!("no enum of the kernel has {name:?}{why}"))
                }
            },
            ExpressionKind::ArgumentCount => {
                let count = self.shared.positional_arguments().count();
                self.quantity(count as u64)
            }
            ExpressionKind::Lvalue(place) => self.read_place(place),
            ExpressionKind::Unary(UnaryOperator::Dereference, operand) => {
                match self.expression(operand) {
                    Type::Pointer(to) => self.access(to),
                    Type::Lvalue(MemoryType::Array { element, .. }) => self.access(*element),
                    // The address of a word, as kaddr() gives it.
                    number if number.is_number() && !self.is_strict() => {
                        self.access(MemoryType::Number {
                            bytes: 8,
                            signed: false,
                        })
                    }
                    _ => self.refuse(
                        of.span,
                        "expected a pointer; cast this to one, as in *(uint64 *)x",
                    ),
                }
            }
            ExpressionKind::Unary(UnaryOperator::Address, operand) => {
                self.address_of(operand, of.span)
            }
            ExpressionKind::Unary(operator, operand) => {
                let operand_type = self.value(operand);
                if *operator != UnaryOperator::Not {
                    self.must_be_number(&operand_type, operand.span);
                }
                self.put(Operation::Unary(*operator));
                match (operator, operand_type) {
                    // A small number does not show that it is unsigned.
                    (UnaryOperator::Complement, Type::Unsigned) if !self.is_strict() => {
                        self.extend(8, false)
                    }
                    (UnaryOperator::Not, _) if !self.is_strict() => Type::Bool,
                    _ => Type::Number,
                }
            }
            ExpressionKind::Binary(operator, left, right) => self.binary(*operator, left, right),
            ExpressionKind::Conditional {
                condition,
                then,
                otherwise,
            } => {
                match (self.known_truth(condition), then) {
                    (Some(true), Some(then)) => return self.value(then),
                    (Some(true), None) => return self.value(condition),
                    (Some(false), _) => return self.value(otherwise),
                    (None, _) => {}
                }
                let mut one = self.value(condition);
                let mut extent = self.extent.clone();
                let kept = then.is_none().then(|| self.new_slot());
                if let Some(slot) = kept {
                    self.put(Operation::SetLocal(slot));
                    self.put(Operation::Local(slot));
                }
                let no = self.jump(Operation::JumpIfZero);
                match (then, kept) {
                    (Some(then), _) => {
                        one = self.value(then);
                        extent = self.extent.clone();
                    }
                    (None, Some(slot)) => self.put(Operation::Local(slot)),
                    (None, None) => {}
                }
                let end = self.jump(Operation::Jump);
                self.land(no);
                let other = self.value(otherwise);
                let other = self.arrange(other, &one);
                self.land(end);
                self.own_extent = Some(extent.joined(self.extent.clone()));
                one.joined(other)
            }
            ExpressionKind::Step { place, by, postfix } => self.step(place, *by, *postfix),
            ExpressionKind::Call(call) => self.call(call, of.span),
            ExpressionKind::Member {
                of: owner,
                name,
                name_span,
                ..
            } => self.member(owner, name, *name_span),
            ExpressionKind::Item { of: tuple, index } => {
                let found = self.value(tuple);
                self.item(found, tuple.span, *index)
            }
            ExpressionKind::Index { of: array, index } => self.index(array, index),
            ExpressionKind::Cast { to, of: value } => self.cast(to, value),
            ExpressionKind::SizeOfType(of_type) => {
                let Some(thing) = self.named(of_type) else {
                    return self.no_type(of_type);
                };
                let Some(size) = self.shared.types.size(&thing) else {
                    let name = &of_type.base;
                    return self.refuse(of_type.span, format!("the size of {name} is not known"));
                };
                self.quantity(size)
            }
            ExpressionKind::SizeOfValue(of_value) => self.size_of_value(of_value),
            ExpressionKind::OffsetOf { of: owner, members } => self.offset_of(owner, members),
            ExpressionKind::TypeInfo(of_type) => self.type_info(of_type, of.span),
            ExpressionKind::Tuple(items) => {
                let (types, extents) = self.values(items.iter());
                self.own_extent = Some(Extent::Items(extents));
                self.gives(Operation::Tuple(items.len()), Type::Tuple(types))
            }
            ExpressionKind::Translate { to, of: input } => self.translate(to, input),
            ExpressionKind::Block(block) => self.block_value(block),
            ExpressionKind::Record(members) => {
                let (types, extents) = self.values(members.iter().map(|(_, value)| value));
                self.own_extent = Some(Extent::Items(extents));
                let names = members.iter().map(|(name, _)| name.as_str().into());
                self.record(names.zip(types).collect())
            }
            // The parser has replaced all of them.
            ExpressionKind::Named { name, .. } => {
                self.refuse(of.span, format!("unknown name '{name}'"))
            }
        }
    }

    /// Compiles an item of the tuple or record on the stack, which `span` gives.
    pub(super) fn item(&mut self, of: Type, span: Span, index: usize) -> Type {
        let items = match of {
            Type::Tuple(items) => items,
            Type::Record(members) => members.into_iter().map(|(_, of)| of).collect(),
            Type::Any => Vec::new(),
            _ => return self.refuse(span, "expected a tuple"),
        };
        self.put(Operation::Item(index));
        self.own_extent = Some(self.extent.item(index));
        match items.get(index) {
            Some(item) => item.clone(),
            None if items.is_empty() || self.is_strict() => Type::Any,
            None => {
                let count = items.len();
                self.refuse(span, format!("a tuple of {count} has no item {index}"))
            }
        }
    }

    /// Makes a record of the values on the stack.
    pub(super) fn record(&mut self, members: Vec<(Arc<str>, Type)>) -> Type {
        let names = members.iter().map(|(name, _)| name.clone()).collect();
        self.gives(Operation::Record(names), Type::Record(members))
    }

    /// Compiles an operator. Text can only be compared. `&&` and `||` skip the right side if it
    /// does not matter, except in bt(5).
    fn binary(&mut self, operator: BinaryOperator, left: &Expression, right: &Expression) -> Type {
        let is_logical = matches!(
            operator,
            BinaryOperator::LogicalAnd | BinaryOperator::LogicalOr
        );
        if is_logical && !self.is_strict() {
            self.value(left);
            self.put(Operation::Truth);
            if operator == BinaryOperator::LogicalOr {
                self.put(Operation::Unary(UnaryOperator::Not));
            }
            let short = self.jump(Operation::JumpIfZero);
            self.value(right);
            self.put(Operation::Truth);
            let end = self.jump(Operation::Jump);
            self.land(short);
            self.truth(operator == BinaryOperator::LogicalOr);
            self.land(end);
            return Type::Bool;
        }
        let one = self.value(left);
        let mut other = self.value(right);
        let is_equality = matches!(operator, BinaryOperator::Equal | BinaryOperator::NotEqual);
        if is_equality {
            other = self.arrange(other, &one);
        }
        let is_order = matches!(
            operator,
            BinaryOperator::Less
                | BinaryOperator::LessOrEqual
                | BinaryOperator::Greater
                | BinaryOperator::GreaterOrEqual
        );
        // A signed number becomes unsigned beside an unsigned one, as in C.
        let as_unsigned = !self.is_strict()
            && (is_equality || is_order)
            && matches!(
                (&one, &other),
                (Type::Unsigned, other) | (other, Type::Unsigned) if other.is_number()
            );
        if operator == BinaryOperator::Add
            && !self.is_strict()
            && (&one, &other) == (&Type::Text, &Type::Text)
        {
            self.shared.may_put_out(MOST_BYTES);
            return self.gives(Operation::Concatenate, Type::Text);
        }
        let is_sum = matches!(operator, BinaryOperator::Add | BinaryOperator::Subtract);
        if is_sum && !self.is_strict() && !matches!(other, Type::Pointer(_)) {
            self.scale(&one);
        }
        self.put(match as_unsigned {
            true => Operation::CompareUnsigned(operator),
            false => Operation::Binary(operator),
        });
        if self.is_strict() {
            return Type::Number;
        }
        let is_text = |of: &Type| *of == Type::Text;
        let is_known = |of: &Type| *of != Type::Any;
        if is_equality {
            if is_text(&one) != is_text(&other) && is_known(&one) && is_known(&other) {
                let span = left.span.to(right.span);
                return self.refuse(
                    span,
                    "text is compared with a number; use str() to read the text at a pointer",
                );
            }
            return Type::Bool;
        }
        if !(is_logical || is_order && is_text(&one) && is_text(&other)) {
            self.must_be_number(&one, left.span);
            self.must_be_number(&other, right.span);
        }
        match (is_sum, other) {
            (false, _) if is_order => Type::Bool,
            (false, _) | (true, Type::Pointer(_)) => Type::Number,
            (true, _) => self.stepped(one),
        }
    }

    pub(super) fn must_be_number(&mut self, of: &Type, span: Span) {
        let what = match of {
            Type::Text if self.is_strict() => return,
            Type::Text => "text",
            Type::Stack(_) => "a stack",
            Type::Tuple(_) => "a tuple",
            Type::Array { .. } => "an array",
            Type::Record(_) => "a record",
            _ => return,
        };
        self.refuse(span, format!("expected a number, found {what}"));
    }

    fn builtin(&mut self, builtin: Builtin, span: Span) -> Type {
        let (known, of) = match builtin {
            Builtin::Argument(number) => return self.argument(usize::from(number)),
            Builtin::Arguments => return self.all_arguments(span),
            Builtin::Comm => (Known::Comm, Type::Text),
            Builtin::Cpu => (Known::Cpu, Type::Number),
            Builtin::Nsecs => (Known::Nsecs, Type::Unsigned),
            Builtin::Elapsed => (Known::Elapsed, Type::Unsigned),
            Builtin::Pid => (Known::Pid, Type::Number),
            Builtin::Tid => (Known::Tid, Type::Number),
            Builtin::Probe => (Known::Probe, Type::Text),
            Builtin::Function => (Known::Function, Type::Text),
            Builtin::ReturnValue => return self.returned(span),
            Builtin::KernelStack => return self.stack(Operation::KernelStack),
            Builtin::UserStack => return self.stack(Operation::UserStack),
            Builtin::CurrentTask => return self.current_task(),
            Builtin::Uid => return self.of_task(&["cred", "uid", "val"], span),
            Builtin::Gid => return self.of_task(&["cred", "gid", "val"], span),
            Builtin::ParentPid => return self.of_task(&["real_parent", "tgid"], span),
            Builtin::Random => (Known::Random, Type::Number),
            Builtin::ProgramCounter => (Known::ProgramCounter, Type::Number),
            Builtin::Context => {
                let message = match self.probe.iteration {
                    None => "ctx is of iterations alone, such as iter:task, where ctx.task is the thread".to_owned(),
                    Some(iteration) => {
                        let others = iteration.members().iter().map(|(name, _)| format!(", ctx.{name}"));
                        format!("{} has ctx.task{}", iteration.name(), others.collect::<String>())
                    }
                };
                return self.refuse(span, message);
            }
            Builtin::CpuCount => (Known::CpuCount, Type::Number),
            Builtin::ProbeType => (Known::ProbeType, Type::Text),
        };
        self.gives(Operation::Known(known), of)
    }

    fn stack(&mut self, operation: fn(usize) -> Operation) -> Type {
        // bt(5) has room for 19 frames (STACKTRACE_MAX of sys/stacktrace.h).
        const STRICT: usize = 19;
        let most = if self.is_strict() { STRICT } else { MAX_FRAMES };
        let form = self.shared.script.stack_form;
        self.gives(operation(most), Type::Stack(form))
    }

    pub(super) fn current_task(&mut self) -> Type {
        self.put(Operation::Known(Known::Task));
        match self.shared.types.written("struct task_struct *") {
            Some(MemoryType::Pointer(task)) => Type::Pointer(*task),
            _ => Type::Number,
        }
    }

    /// Reads a number of the current task's, by its path of members.
    fn of_task(&mut self, path: &[&str], span: Span) -> Type {
        let mut found = self.current_task();
        let said = self.shared.diagnostics.len();
        for name in path {
            found = self.member_of(found, name, span);
            if self.shared.diagnostics.len() > said {
                // One mistake is reported once.
                return Type::Any;
            }
        }
        self.settle(found, span)
    }

    fn returned(&mut self, span: Span) -> Type {
        if self.probe.kind != Some(EventKind::Return) && !self.is_strict() {
            return self.refuse(span, "retval is known at a return only");
        }
        if self.is_strict() && self.probe.is_system_call {
            return self.gives(Operation::Known(Known::ReturnedOrMinusOne), Type::Number);
        }
        self.put(Operation::Known(Known::Returned));
        let returns = self.probe.returns.clone();
        let thing = returns.and_then(|name| self.shared.types.written(&name));
        match thing {
            Some(thing) if !self.is_strict() => self.typed(thing),
            // A value without a type is a number that may be an error.
            _ => self.extend(8, true),
        }
    }

    /// Types the word on the stack.
    pub(super) fn typed(&mut self, thing: MemoryType) -> Type {
        match thing {
            MemoryType::Number { bytes, signed } => self.extend(bytes, signed),
            MemoryType::Char => self.extend(1, true),
            MemoryType::Bool => {
                self.extend(1, false);
                self.gives(Operation::Truth, Type::Bool)
            }
            MemoryType::Enum {
                bytes,
                signed,
                names,
            } => self.gives(Operation::Extend { bytes, signed }, Type::Enum(names)),
            MemoryType::Pointer(to) => Type::Pointer(*to),
            _ => Type::Number,
        }
    }

    /// Appends `true` or `false`.
    pub(super) fn truth(&mut self, truth: bool) -> Type {
        self.gives(Operation::Constant(Value::Int(truth.into())), Type::Bool)
    }

    fn extend(&mut self, bytes: u8, signed: bool) -> Type {
        self.gives(
            Operation::Extend { bytes, signed },
            Type::of_number(bytes, signed),
        )
    }

    /// Compiles `$N`: a number if all of its text is one.
    fn argument_of_script(&mut self, number: usize) -> Type {
        let Some(given) = self.shared.argument(number).map(<[u8]>::to_vec) else {
            return match self.is_strict() {
                true => self.gives(Operation::Constant(Value::text(b"")), Type::Any),
                false => self.constant(0),
            };
        };
        match number_of(&given) {
            Some(number) => self.gives(Operation::Constant(number), Type::Number),
            None => self.gives(Operation::Constant(Value::text(&given)), Type::Text),
        }
    }
}

/// Returns the number in an argument of the script, as [`number_of`] reads it, if it has a sign.
pub(crate) fn argument_number(text: &[u8]) -> Option<i64> {
    match number_of(text)? {
        Value::Int(number) => Some(number),
        _ => None,
    }
}

/// Returns the number in an argument of the script: decimal, octal or hexadecimal as C writes it,
/// with a sign.
pub(super) fn number_of(text: &[u8]) -> Option<Value> {
    let text = std::str::from_utf8(text).ok()?;
    let (negative, digits) = match text.strip_prefix('-') {
        Some(rest) => (true, rest),
        None => (false, text),
    };
    let (digits, radix) = match digits {
        hex if hex.starts_with("0x") || hex.starts_with("0X") => (hex.get(2..)?, 16),
        octal if octal.len() > 1 && octal.starts_with('0') => (octal.get(1..)?, 8),
        decimal => (decimal, 10),
    };
    if digits.starts_with(['+', '-']) {
        return None;
    }
    let number = u64::from_str_radix(digits, radix).ok()?;
    match negative {
        true => 0i64.checked_sub_unsigned(number).map(Value::Int),
        false => Some(numbers::unsigned(number)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_are_numbers_if_all_of_them_is_one() {
        for (text, expected) in [
            ("12", Some(Value::Int(12))),
            ("-3", Some(Value::Int(-3))),
            ("0x1F", Some(Value::Int(31))),
            ("010", Some(Value::Int(8))),
            ("0", Some(Value::Int(0))),
            ("0xffffffffffffffff", Some(Value::Unsigned(u64::MAX))),
            ("-0x8000000000000000", Some(Value::Int(i64::MIN))),
            ("-0x8000000000000001", None),
            ("12a", None),
            ("", None),
            ("--1", None),
            ("0x", None),
            ("sh", None),
        ] {
            assert_eq!(number_of(text.as_bytes()), expected, "{text}");
        }
    }
}

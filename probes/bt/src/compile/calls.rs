//! Compiles calls of the language's functions.
//!
//! The number of arguments, and that formats are literals, have been checked before. If that still
//! does not hold, the argument counts as missing.

use std::net::IpAddr;
use std::sync::Arc;

use probes::event::MAX_FRAMES;

use super::types::{MemoryType, Type};
use super::{RuleCompiler, shared_text, text_of, with};
use crate::ast::{BinaryOperator, Call, Expression, ExpressionKind, Function, LvalueKind, Span};
use crate::maps::MapKind;
use crate::names;
use crate::program::{Emission, Known, NumberText, Operation};
use crate::registers::{REGISTERS, Register};
use crate::run::MOST_BYTES;
use crate::run::numbers::{self, STRICT_TEXT};
use crate::time::TimeFormat;
use crate::value::Value;

impl RuleCompiler<'_, '_> {
    /// Compiles an expression as a statement: its value is dropped.
    pub(super) fn effect(&mut self, of: &Expression) {
        if let ExpressionKind::Call(call) = &of.kind
            && self.statement_call(call, of.span)
        {
            return;
        }
        match &of.kind {
            ExpressionKind::Block(block) => return self.block_effect(block),
            ExpressionKind::Conditional {
                condition,
                then: Some(then),
                otherwise,
            } => return self.either_effect(condition, then, otherwise),
            _ => {}
        }
        self.expression(of);
        self.put(Operation::Drop);
    }

    /// Compiles `condition ? then : otherwise` as a statement.
    fn either_effect(&mut self, condition: &Expression, then: &Expression, otherwise: &Expression) {
        match self.known_truth(condition) {
            Some(true) => return self.effect(then),
            Some(false) => return self.effect(otherwise),
            None => {}
        }
        self.value(condition);
        let no = self.jump(Operation::JumpIfZero);
        self.effect(then);
        let end = self.jump(Operation::Jump);
        self.land(no);
        self.effect(otherwise);
        self.land(end);
    }

    /// Compiles a call of a function that returns nothing. Returns `false` if it is another
    /// function's.
    fn statement_call(&mut self, call: &Call, span: Span) -> bool {
        let arguments = call.arguments.as_slice();
        match call.function {
            Function::Printf => self.printf(arguments, None),
            Function::Errorf | Function::Warnf => {
                let is_error = call.function == Function::Errorf;
                let complaint = self.complaint(is_error, span);
                self.printf(arguments, Some(complaint.into()));
            }
            Function::Cat => self.cat(arguments),
            Function::Print => self.print(arguments),
            Function::Time => {
                let format = text_of(arguments.first()).unwrap_or(b"%H:%M:%S\n");
                if let Some(format) = self.time_format(format, span) {
                    self.emit(Emission::Time { format }, &[]);
                }
            }
            Function::Clear | Function::Zero => self.empty(call, span),
            Function::Exit => {
                self.number(arguments.first());
                self.put(Operation::Exit);
            }
            Function::Snapshot | Function::Rewind => self.keep_moment(call),
            Function::Refused(why) => {
                self.refuse_call(call, why);
            }
            Function::Join => self.join(arguments),
            Function::Assert => self.assert(arguments),
            Function::StaticAssert => self.static_assert(arguments, span),
            Function::FailScript => self.fail_script(arguments, span),
            _ => return false,
        }
        true
    }

    fn refuse_call(&mut self, call: &Call, why: &str) -> Type {
        let name = names::signature_of(call.function).map_or("", |known| known.name);
        self.refuse(call.name_span, format!("{name}() is not offered: {why}"))
    }

    /// Returns the map that `@name` as a whole is.
    pub(super) fn whole_map(&mut self, of: Option<&Expression>, span: Span) -> Option<usize> {
        let place = of.and_then(Expression::as_global);
        let map = place.and_then(|(name, _)| self.shared.map_numbers.get(name).copied());
        if map.is_none() {
            self.refuse(span, "this takes a map, as in clear(@x)");
        }
        map
    }

    /// Compiles `clear(@x)` and `zero(@x)`.
    fn empty(&mut self, call: &Call, span: Span) {
        let (name, operation): (_, fn(usize) -> Operation) = match call.function {
            Function::Clear => ("clear", Operation::Clear),
            _ => ("zero", Operation::Zero),
        };
        let of = call.arguments.first();
        if let Some(ExpressionKind::Lvalue(place)) = of.map(|of| &of.kind)
            && let LvalueKind::Local(local) = &place.kind
            && self.is_strict()
        {
            if self.locals.iter().any(|known| known.name == *local) {
                self.abort(&format!("invalid variable type for {name}(@{local})"));
            }
            return;
        }
        let Some(map) = self.whole_map(of, span) else {
            return;
        };
        if self.is_strict() && self.shared.kind_of(map) == MapKind::Scalar {
            // A value without a key is that of a variable, which is no map.
            self.put(Operation::HasKey { map, keys: 0 });
            let is_map = self.jump(Operation::JumpIfZero);
            let variable = of.and_then(Expression::as_global).map_or("", |(of, _)| of);
            self.abort(&format!("invalid variable type for {name}(@{variable})"));
            self.land(is_map);
        }
        self.put(operation(map));
    }

    fn assert(&mut self, arguments: &[Expression]) {
        let Some(condition) = arguments.first() else {
            return;
        };
        self.value(condition);
        self.put(Operation::Unary(crate::ast::UnaryOperator::Not));
        let holds = self.jump(Operation::JumpIfZero);
        let message = shared_text(text_of(arguments.get(1)).unwrap_or(b"assertion failed"));
        self.emit(Emission::Fail { message }, &[]);
        self.constant(1);
        self.put(Operation::Exit);
        self.land(holds);
    }

    fn time_format(&mut self, format: &[u8], span: Span) -> Option<Arc<TimeFormat>> {
        match TimeFormat::parse(format, self.dialect(), &self.shared.options.zone) {
            Ok(format) => Some(Arc::new(format)),
            Err(error) => {
                self.refuse(span, error.to_string());
                None
            }
        }
    }

    /// Compiles a call that returns a value.
    pub(super) fn call(&mut self, call: &Call, span: Span) -> Type {
        if let Function::Refused(why) = call.function {
            return self.refuse_call(call, why);
        }
        if self.statement_call(call, span) {
            return self.refuse(call.name_span, "this function gives no value");
        }
        let arguments = call.arguments.as_slice();
        let first = arguments.first();
        let longest = self.shared.options.longest_text;
        match call.function {
            Function::Str | Function::KernelStr | Function::UserStr => self.string(arguments),
            Function::Buf => {
                let of = first.map(|of| self.expression(of));
                match (arguments.get(1), of) {
                    (Some(length), _) => {
                        self.number(Some(length));
                    }
                    (None, Some(Type::Lvalue(thing))) => {
                        let size = self.shared.types.size(&thing).unwrap_or_default();
                        self.quantity(size);
                    }
                    (None, _) => {
                        self.refuse(span, "buf() needs a length: buf(pointer, 16)");
                    }
                }
                self.gives(Operation::ReadBytes { most: longest }, Type::Shown)
            }
            Function::KernelSymbol => self.of_number(first, Operation::KernelSymbol, Type::Shown),
            Function::UserSymbol => self.of_number(first, Operation::UserSymbol, Type::Shown),
            Function::KernelAddress => self.kernel_address(first, span),
            Function::UserAddress => self.refuse(
                span,
                "uaddr() is not known: a program's symbols differ with the process; compare usym(address) instead",
            ),
            Function::KernelStack | Function::UserStack => {
                let mode = text_of(first).map(shared_text);
                let form = mode.and_then(|mode| names::stack_form(&mode));
                let form = form.unwrap_or(self.shared.script.stack_form);
                let most = arguments.iter().find_map(|of| self.known_number(of));
                let most = most.and_then(|most| usize::try_from(most).ok());
                let most = most.unwrap_or(MAX_FRAMES).min(MAX_FRAMES);
                let operation = match call.function {
                    Function::KernelStack => Operation::KernelStack(most),
                    _ => Operation::UserStack(most),
                };
                self.gives(operation, Type::Stack(form))
            }
            Function::Ntop => self.address_text(arguments),
            Function::InetNtoa => {
                self.of_number(first, Operation::AddressText { bytes: 4 }, Type::Text)
            }
            Function::MacAddress => {
                first.map(|of| self.expression(of));
                self.gives(Operation::MacText, Type::Text)
            }
            Function::Strncmp | Function::StrContains => {
                arguments.iter().take(2).for_each(|text| self.text(text));
                match call.function {
                    Function::StrContains => self.gives(Operation::Contains, Type::Bool),
                    _ => self.of_number(arguments.get(2), Operation::CompareText, Type::Number),
                }
            }
            Function::CompareBytes => {
                arguments.iter().take(2).for_each(|of| self.bytes(of));
                self.of_number(arguments.get(2), Operation::CompareBytes, Type::Number)
            }
            Function::LongestText => self.quantity(longest as u64),
            Function::TextRoom => self.text_room(first),
            Function::GlobMatch => {
                arguments.iter().for_each(|text| self.text(text));
                self.gives(Operation::GlobMatch, Type::Bool)
            }
            Function::Config => self.config(),
            Function::TypeTest(test) => {
                let found = first.is_some_and(|of| self.holds(test, of));
                self.truth(found)
            }
            Function::Option => self.option(arguments),
            Function::CgroupId => self.cgroup_id(first, span),
            Function::CgroupPath => self.cgroup_path(arguments),
            Function::Find => {
                arguments.iter().take(2).for_each(|text| self.text(text));
                self.gives(Operation::Find, Type::Number)
            }
            Function::ErrorText => self.name_of(first, NumberText::Error),
            Function::SignalName => self.name_of(first, NumberText::Signal),
            Function::CallName => self.name_of(first, NumberText::SystemCall),
            Function::AddressBytes => self.address_bytes(first, span),
            Function::Register => self.register(first, span),
            Function::ByteSwap => {
                self.number(first);
                let bytes = self.extent.bytes();
                self.gives(Operation::SwapBytes(bytes), Type::Number)
            }
            Function::NetworkShort => self.of_number(first, Operation::SwapBytes(2), Type::Number),
            Function::NetworkLong => self.of_number(first, Operation::SwapBytes(4), Type::Number),
            Function::Pointer => first.map_or(Type::Number, |of| self.value(of)),
            Function::Strftime => {
                let format = text_of(first).unwrap_or_default();
                let format = self.time_format(format, span);
                self.number(arguments.get(1));
                if let Some(format) = format {
                    self.put(Operation::TimeText(format));
                }
                Type::Text
            }
            Function::Delete | Function::HasKey => self.on_entry(call.function, arguments, span),
            Function::Len => self.length(first, span),
            _ => self.refuse(span, "this function is not known here"),
        }
    }

    /// Compiles a value that must be a number: 0 if there is none.
    pub(super) fn number(&mut self, of: Option<&Expression>) -> Type {
        let Some(of) = of else {
            return self.constant(0);
        };
        let found = self.value(of);
        self.must_be_number(&found, of.span);
        found
    }

    fn of_number(&mut self, of: Option<&Expression>, operation: Operation, gives: Type) -> Type {
        self.number(of);
        self.gives(operation, gives)
    }

    /// Compiles the name of a number.
    fn name_of(&mut self, of: Option<&Expression>, kind: NumberText) -> Type {
        self.of_number(of, Operation::Text(kind), Type::Text)
    }

    /// Compiles `pton("address")`: the bytes of an IPv4 or IPv6 address.
    fn address_bytes(&mut self, of: Option<&Expression>, span: Span) -> Type {
        let text = shared_text(&self.literal(of).unwrap_or_default());
        let bytes: Arc<[u8]> = match text.parse() {
            Ok(IpAddr::V4(address)) => address.octets().as_slice().into(),
            Ok(IpAddr::V6(address)) => address.octets().as_slice().into(),
            Err(_) => {
                let message =
                    format!("{text:?} is no address: expected one such as 10.0.0.1 or ::1");
                return self.refuse(span, message);
            }
        };
        self.gives(Operation::Constant(Value::Bytes(bytes)), Type::Shown)
    }

    /// Compiles text, reading it if this is a pointer to it.
    fn text(&mut self, of: &Expression) {
        let found = self.value(of);
        if matches!(found, Type::Pointer(_)) {
            let most = self.shared.options.longest_text;
            self.put(Operation::ReadText { most });
        }
    }

    /// Compiles bytes to compare: text, bytes, or a pointer to them, which is read.
    fn bytes(&mut self, of: &Expression) {
        let found = self.expression(of);
        let found = match found {
            Type::Lvalue(MemoryType::Array { element, .. }) => Type::Pointer(*element),
            other => self.settle(other, of.span),
        };
        if !matches!(found, Type::Text | Type::Shown) {
            self.must_be_number(&found, of.span);
            let most = self.shared.options.longest_text;
            self.quantity(most as u64);
            self.put(Operation::ReadBytes { most });
        }
    }

    /// Compiles `str(pointer [, length])`; of text it is the text.
    fn string(&mut self, arguments: &[Expression]) -> Type {
        let Some(of) = arguments.first() else {
            return Type::Text;
        };
        let most = match self.is_strict() {
            true => STRICT_TEXT,
            false => self.shared.options.longest_text,
        };
        let found = match self.argument_text(of) {
            Some(text) => {
                self.put(Operation::Constant(Value::text(&text)));
                Type::Text
            }
            None => match self.expression(of) {
                place @ Type::Lvalue(MemoryType::Array { .. }) if self.is_char_array(&place) => {
                    self.settle(place, of.span)
                }
                // Other arrays yield their address: bytes of text are not always called char.
                Type::Lvalue(MemoryType::Array { element, .. }) => Type::Pointer(*element),
                other => self.settle(other, of.span),
            },
        };
        let length = arguments.get(1);
        match (found, length) {
            (Type::Text, None) => {
                if self.is_strict() {
                    self.constant(STRICT_TEXT as i64);
                    self.put(Operation::CutText);
                }
            }
            (Type::Text, Some(length)) => {
                self.number(Some(length));
                if self.is_strict() {
                    self.put(Operation::CutText);
                    self.constant(STRICT_TEXT as i64);
                }
                self.put(Operation::CutText);
            }
            (other, None) => {
                self.must_be_number(&other, of.span);
                self.put(Operation::ReadText { most });
            }
            (other, Some(length)) => {
                self.must_be_number(&other, of.span);
                self.number(Some(length));
                // An explicit length may exceed the default one.
                self.put(Operation::ReadTextOf {
                    most: match length.as_number() {
                        Some(_) => MOST_BYTES,
                        None => most,
                    },
                });
            }
        }
        Type::Text
    }

    /// Returns the text of `str($N)`: the argument as it was given, number or not. `str($N + 2)` is
    /// its rest from there on.
    fn argument_text(&self, of: &Expression) -> Option<Vec<u8>> {
        let (number, from) = match &of.kind {
            ExpressionKind::Argument(number) => (*number, 0),
            ExpressionKind::Binary(BinaryOperator::Add, left, right) => match left.kind {
                ExpressionKind::Argument(number) => {
                    (number, usize::try_from(right.as_number()?).ok()?)
                }
                _ => return None,
            },
            _ => return None,
        };
        let given = self.shared.argument(number).unwrap_or_default();
        Some(given.get(from..).unwrap_or_default().to_vec())
    }

    /// Returns text that is known before the script runs: a literal, or `str($N)`.
    pub(super) fn literal(&self, of: Option<&Expression>) -> Option<Vec<u8>> {
        match &of?.kind {
            ExpressionKind::Text(text) => Some(text.clone()),
            ExpressionKind::Call(Call {
                function: Function::Str,
                arguments,
                ..
            }) => self.argument_text(arguments.first()?),
            _ => None,
        }
    }

    /// Compiles `strcap(text)`.
    fn text_room(&mut self, of: Option<&Expression>) -> Type {
        let Some(of) = of else {
            return self.constant(0);
        };
        let (found, _) = self.type_alone(of);
        match self.size_of(&found, &self.extent) {
            Some(size) if found == Type::Text || self.is_char_array(&found) => self.quantity(size),
            _ => {
                self.text(of);
                self.gives(Operation::Length, Type::Number)
            }
        }
    }

    pub(super) fn is_char_array(&self, of: &Type) -> bool {
        matches!(of, Type::Lvalue(MemoryType::Array { element, .. }) if **element == MemoryType::Char)
    }

    fn kernel_address(&mut self, of: Option<&Expression>, span: Span) -> Type {
        let Some(name) = self.literal(of) else {
            return self.refuse(
                span,
                "kaddr() takes the name of a symbol: kaddr(\"jiffies\")",
            );
        };
        let name = shared_text(&name);
        match self.shared.guest.symbol(&name) {
            Some(address) => {
                let address = numbers::unsigned(address);
                self.gives(Operation::Constant(address), Type::Number)
            }
            None => {
                let nearest = self.shared.guest.nearest_symbols(&name);
                let message = format!("the guest's kernel has no symbol {name:?}");
                self.refuse_with(with(span, message, nearest))
            }
        }
    }

    /// Compiles `ntop([family,] address)`: an array or a pointer by its size, a number as IPv4.
    fn address_text(&mut self, arguments: &[Expression]) -> Type {
        let Some(of) = arguments.last() else {
            return Type::Text;
        };
        let found = self.expression(of);
        let size = match &found {
            Type::Lvalue(thing) | Type::Pointer(thing) => self.shared.types.size(thing),
            _ => None,
        };
        // Linux's AF_INET6.
        let family = match arguments {
            [family, _] => match family.as_number() {
                Some(10) => Some(16),
                Some(_) => Some(4),
                None => None,
            },
            _ => None,
        };
        let bytes = if family.or(size) == Some(16) { 16 } else { 4 };
        if bytes == 16 || matches!(found, Type::Lvalue(_) | Type::Pointer(_) | Type::Shown) {
            return self.gives(Operation::AddressText { bytes }, Type::Text);
        }
        let other = self.settle(found, of.span);
        self.must_be_number(&other, of.span);
        self.gives(Operation::Ipv4Text, Type::Text)
    }

    fn register(&mut self, of: Option<&Expression>, span: Span) -> Type {
        let name = shared_text(&self.literal(of).unwrap_or_default());
        match Register::of(&name) {
            Some(register) => self.gives(Operation::Known(Known::Register(register)), Type::Number),
            None => {
                let names = super::nearest(&name, REGISTERS.iter().map(|known| known.name));
                self.refuse_with(with(span, format!("no register {name:?}"), names))
            }
        }
    }

    /// Compiles `delete(@x[key])`, `delete(@x, key)`, the same forms of `has_key`, and `delete(@x)`
    /// of a scalar.
    fn on_entry(&mut self, function: Function, arguments: &[Expression], span: Span) -> Type {
        let Some((name, keys)) = arguments.first().and_then(Expression::as_global) else {
            return self.refuse(span, "this takes an entry of a map, as in delete(@x[pid])");
        };
        let Some(map) = self.shared.map_numbers.get(name).copied() else {
            return self.constant(0);
        };
        let by_argument = match arguments.get(1).map(|key| &key.kind) {
            Some(ExpressionKind::Tuple(items)) => items.as_slice(),
            Some(_) => arguments.get(1..2).unwrap_or_default(),
            None => &[],
        };
        let keys = self.keys(map, if keys.is_empty() { by_argument } else { keys });
        let operation = match function {
            Function::Delete => Operation::Delete { map, keys },
            _ => Operation::HasKey { map, keys },
        };
        self.gives(operation, Type::Bool)
    }

    fn length(&mut self, of: Option<&Expression>, span: Span) -> Type {
        let Some(of) = of else {
            return self.refuse(span, "len() takes a map, a stack or text");
        };
        if let Some((name, [])) = of.as_global()
            && let Some(map) = self.shared.map_numbers.get(name).copied()
            && self.shared.is_keyed(map)
        {
            return self.gives(Operation::MapLength(map), Type::Number);
        }
        let found = self.value(of);
        if found.is_number() || matches!(found, Type::Pointer(_)) {
            return self.refuse(of.span, "len() takes a map, a stack or text");
        }
        self.gives(Operation::Length, Type::Number)
    }
}

//! Compiles members, elements, casts and translators: the way from a pointer to a number in the
//! guest's memory.

use std::sync::Arc;

use probes::event::EventKind;

use super::types::{Member, MemoryType, Type, around};
use super::{RuleCompiler, like, nearest, places, with};
use crate::ast::{
    BinaryOperator, Builtin, Expression, ExpressionKind, Iteration, Span, TypeName, UnaryOperator,
};
use crate::program::{Known, Operation};

const NO_ADDRESS: &str =
    "this has no address in the guest; take one of a member or an element, as in &x->member";
/// The greatest depth of translators that use one another.
const MOST_TRANSLATORS: usize = 16;

impl RuleCompiler<'_, '_> {
    /// Replaces the address of a thing on the stack by its contents, if these are a value.
    pub(super) fn access(&mut self, thing: MemoryType) -> Type {
        match thing {
            MemoryType::Number { bytes, signed } => {
                self.load(bytes, signed, Type::of_number(bytes, signed))
            }
            MemoryType::Char => self.load(1, true, Type::Number),
            MemoryType::Bool => self.load(1, false, Type::Bool),
            MemoryType::Enum {
                bytes,
                signed,
                names,
            } => self.load(bytes, signed, Type::Enum(names)),
            MemoryType::Pointer(to) => self.load(8, false, Type::Pointer(*to)),
            place => Type::Lvalue(place),
        }
    }

    fn load(&mut self, bytes: u8, signed: bool, of: Type) -> Type {
        self.gives(Operation::Load { bytes, signed }, of)
    }

    /// Compiles `of.name` and `of->name`.
    pub(super) fn member(&mut self, of: &Expression, name: &str, name_span: Span) -> Type {
        if of.kind == ExpressionKind::Builtin(Builtin::Arguments) {
            return self.argument_named(name, name_span);
        }
        if of.kind == ExpressionKind::Builtin(Builtin::Context)
            && let Some(iteration) = self.probe.iteration
            && iteration.has(name)
        {
            return self.member_of_context(iteration, name);
        }
        if let ExpressionKind::TypeInfo(_) = of.kind
            && let Some(at) = like::item_of_type_info(name)
        {
            let found = self.expression(of);
            return self.item(found, of.span, at);
        }
        let said = self.shared.diagnostics.len();
        let owner = self.expression(of);
        match (owner, self.shared.diagnostics.len() > said) {
            // The error has been reported.
            (Type::Any, true) => Type::Any,
            (owner, _) => self.member_of(owner, name, name_span),
        }
    }

    /// Compiles a member of `ctx` that an iteration has. At its places, the members are what
    /// arguments are at hits.
    fn member_of_context(&mut self, iteration: Iteration, name: &str) -> Type {
        let members = iteration.members().iter().enumerate();
        match members.into_iter().find(|(_, (known, _))| *known == name) {
            Some((number, (_, type_name))) => {
                self.put(Operation::Known(Known::Argument(number)));
                self.typed_as(type_name)
            }
            None => self.current_task(),
        }
    }

    /// Compiles a member of the value on the stack.
    pub(super) fn member_of(&mut self, owner: Type, name: &str, span: Span) -> Type {
        let thing = match owner {
            Type::Pointer(MemoryType::Unknown)
            | Type::Any
            | Type::Number
            | Type::Unsigned
            | Type::Bool
            | Type::Enum(_) => {
                return self.refuse(
                    span,
                    match self.shared.types.has_kernel_types() {
                        true => format!("no type is known that has {name:?}; cast it, as in ((struct task_struct *)x)->{name}"),
                        false => format!("no type is known that has {name:?}; the guest's kernel has no types (BTF) in it"),
                    },
                );
            }
            Type::Translated { translator, input } => {
                return self.translated_member(translator, *input, name, span);
            }
            Type::Pointer(thing) | Type::Lvalue(thing) => thing,
            Type::Record(members) => return self.member_of_record(&members, name, span),
            Type::Text
            | Type::Shown
            | Type::Cgroup
            | Type::Stack(_)
            | Type::Tuple(_)
            | Type::Array { .. } => {
                return self.refuse(span, format!("this has no member {name:?}"));
            }
        };
        match self.shared.types.member(&thing, name) {
            Ok(member) => self.read_member(member),
            Err(none) => self.refuse_with(with(span, none.message, none.nearest)),
        }
    }

    /// Compiles a member of the record on the stack.
    fn member_of_record(&mut self, of: &[(Arc<str>, Type)], name: &str, span: Span) -> Type {
        match of
            .iter()
            .enumerate()
            .find(|(_, (known, _))| &**known == name)
        {
            Some((at, (_, found))) => {
                self.own_extent = Some(self.extent.item(at));
                self.gives(Operation::Item(at), found.clone())
            }
            None => {
                let names = nearest(name, of.iter().map(|(known, _)| &**known));
                self.refuse_with(with(
                    span,
                    format!("the record has no member {name:?}"),
                    names,
                ))
            }
        }
    }

    /// Compiles `&of`: the address of a member, an element, or a thing behind a pointer.
    pub(super) fn address_of(&mut self, of: &Expression, span: Span) -> Type {
        match &of.kind {
            ExpressionKind::Member {
                of: owner,
                name,
                name_span,
                ..
            } if owner.kind != ExpressionKind::Builtin(Builtin::Arguments) => {
                let (Type::Pointer(thing) | Type::Lvalue(thing)) = self.expression(owner) else {
                    return self.refuse(owner.span, NO_ADDRESS);
                };
                match self.shared.types.member(&thing, name) {
                    Ok(member) if member.bits.is_none() => {
                        self.add(member.offset);
                        Type::Pointer(member.thing)
                    }
                    Ok(_) => self.refuse(*name_span, "a bit field has no address"),
                    Err(none) => self.refuse_with(with(*name_span, none.message, none.nearest)),
                }
            }
            ExpressionKind::Index { of: array, index }
                if array.kind != ExpressionKind::Builtin(Builtin::Arguments) =>
            {
                let found = self.expression(array);
                match self.element_of(found, array.span, index) {
                    Some(element) => Type::Pointer(element),
                    None => Type::Any,
                }
            }
            ExpressionKind::Unary(UnaryOperator::Dereference, pointer) => self.value(pointer),
            _ => match self.expression(of) {
                Type::Lvalue(thing) => Type::Pointer(thing),
                _ => self.refuse(span, NO_ADDRESS),
            },
        }
    }

    fn read_member(&mut self, member: Member) -> Type {
        self.add(member.offset);
        match member.bits {
            Some((shift, width)) => {
                self.put(Operation::LoadBits {
                    shift,
                    width,
                    signed: member.signed,
                });
                match member.thing {
                    MemoryType::Bool => Type::Bool,
                    MemoryType::Enum { names, .. } => Type::Enum(names),
                    _ => Type::Number,
                }
            }
            None => self.access(member.thing),
        }
    }

    pub(super) fn add(&mut self, offset: u64) {
        if offset != 0 {
            self.quantity(offset);
            self.put(Operation::Binary(BinaryOperator::Add));
        }
    }

    /// Compiles `of[index]`; of `args`, the argument at that index.
    pub(super) fn index(&mut self, of: &Expression, index: &Expression) -> Type {
        if of.kind == ExpressionKind::Builtin(Builtin::Arguments) {
            return match index.kind {
                ExpressionKind::Number(number) => {
                    let number = usize::try_from(number).unwrap_or(usize::MAX);
                    self.declared_argument(number, index.span)
                }
                _ => self.refuse(index.span, "args is indexed by a number, as in args[0]"),
            };
        }
        if let Some(argument) = self.call_argument(of, index) {
            return argument;
        }
        let found = self.expression(of);
        if found == Type::Text {
            self.number(Some(index));
            return self.gives(Operation::ByteOfText, Type::Number);
        }
        if let (Type::Tuple(_), Some(at)) = (&found, self.known_number(index))
            && let Ok(at) = usize::try_from(at)
        {
            return self.item(found, of.span, at);
        }
        if let Type::Array { element, elements } = found {
            return self.element_of_value(*element, elements, index);
        }
        match self.element_of(found, of.span, index) {
            Some(element) => self.access(element),
            None => Type::Any,
        }
    }

    /// Compiles `args.args[N]` at a system call: its arguments by number, without types.
    fn call_argument(&mut self, of: &Expression, index: &Expression) -> Option<Type> {
        let ExpressionKind::Member {
            of: owner, name, ..
        } = &of.kind
        else {
            return None;
        };
        let is_meant = self.probe.is_system_call
            && name == "args"
            && owner.kind == ExpressionKind::Builtin(Builtin::Arguments);
        match index.kind {
            _ if !is_meant => None,
            ExpressionKind::Number(number @ 0..6) => {
                let number = usize::try_from(number).unwrap_or_default();
                Some(self.gives(Operation::Known(Known::Argument(number)), Type::Unsigned))
            }
            _ => Some(self.refuse(index.span, "a system call has args.args[0] to args.args[5]")),
        }
    }

    /// Leaves the address of an element of the array or pointer on the stack. Returns its type.
    fn element_of(&mut self, of: Type, span: Span, index: &Expression) -> Option<MemoryType> {
        let element = match of {
            Type::Lvalue(MemoryType::Array { element, elements }) => {
                self.check_index(elements, index);
                *element
            }
            Type::Pointer(to) => to,
            _ => {
                let message = "expected an array or a pointer with a type; cast this";
                self.refuse(span, message);
                return None;
            }
        };
        let Some(size) = self.shared.types.size(&element) else {
            let message = "the size of an element is not known; cast the pointer";
            self.refuse(span, message);
            return None;
        };
        self.number(Some(index));
        self.quantity(size);
        self.put(Operation::Binary(BinaryOperator::Multiply));
        self.put(Operation::Binary(BinaryOperator::Add));
        Some(element)
    }

    /// Compiles `(to)value`.
    pub(super) fn cast(&mut self, to: &TypeName, value: &Expression) -> Type {
        let thing = match &to.like {
            Some(like) => match self.type_alone(like) {
                (_, Some(thing)) => around(thing, to),
                (same, None) => return self.cast_to_same(&same, to, value),
            },
            None => match self.shared.types.named(to) {
                Some(thing) => thing,
                None if to.base == "string" && to.pointers == 0 => {
                    return self.cast_to_text(to, value);
                }
                None => return self.no_type(to),
            },
        };
        let from = self.expression(value);
        let extent = self.extent.clone();
        let is_address = matches!(from, Type::Lvalue(_));
        match thing {
            MemoryType::Pointer(to) => {
                if !is_address {
                    let settled = self.settle(from, value.span);
                    self.must_be_number(&settled, value.span);
                }
                Type::Pointer(*to)
            }
            MemoryType::Kernel(_) | MemoryType::Own(_) if is_address => Type::Lvalue(thing),
            MemoryType::Array { element, elements } => {
                self.cast_to_array((from, extent), value, (*element, elements), to.span)
            }
            MemoryType::Kernel(_) | MemoryType::Own(_) | MemoryType::Unknown => {
                let name = match to.like {
                    Some(_) => self.shared.types.describe(&thing),
                    None => to.base.clone(),
                };
                self.refuse(
                    to.span,
                    format!("nothing is cast to {name}; cast to {name} *"),
                )
            }
            number => {
                let settled = self.settle(from, value.span);
                if number == MemoryType::Bool && !matches!(settled, Type::Stack(_)) {
                    return self.gives(Operation::Truth, Type::Bool);
                }
                if let Type::Array { element, elements } = &settled {
                    self.join_array(element, *elements, &number, value.span);
                    return self.typed(number);
                }
                self.must_be_number(&settled, value.span);
                self.typed(number)
            }
        }
    }

    pub(super) fn no_type(&mut self, name: &TypeName) -> Type {
        let message = match name.like {
            Some(_) => {
                "typeof's value is none of the guest's memory: it has no size and no members there"
                    .to_owned()
            }
            None => {
                let why = self.shared.types.why_none();
                format!("no type {:?}{why}", name.base)
            }
        };
        self.refuse(name.span, message)
    }

    pub(super) fn offset_of(&mut self, owner: &TypeName, members: &[String]) -> Type {
        let Some(mut thing) = self.named(owner) else {
            return self.no_type(owner);
        };
        let mut offset = 0u64;
        for name in members {
            match self.shared.types.member(&thing, name) {
                Ok(member) => {
                    offset = offset.saturating_add(member.offset);
                    thing = member.thing;
                }
                Err(none) => {
                    return self.refuse_with(with(owner.span, none.message, none.nearest));
                }
            }
        }
        self.quantity(offset)
    }

    /// Compiles `argN`: with its type if the probe's types are known, in bt(5) the plain register.
    pub(super) fn argument(&mut self, number: usize) -> Type {
        self.put(Operation::Known(Known::Argument(number)));
        match self.probe.arguments.get(number) {
            Some(declared) if !self.is_strict() => self.typed_as(&declared.type_name),
            _ => Type::Number,
        }
    }

    /// Types the word on the stack as the probe declares; as a number if that type is not known.
    fn typed_as(&mut self, type_name: &str) -> Type {
        match self.shared.types.written(type_name) {
            Some(thing) => self.typed(thing),
            None => Type::Number,
        }
    }

    /// Compiles `args.name`.
    fn argument_named(&mut self, name: &str, span: Span) -> Type {
        if let Some(found) = self.field(name) {
            return found;
        }
        let probe = self.probe;
        let mut arguments = probe.arguments.iter().enumerate();
        if let Some((number, found)) = arguments.find(|(_, known)| known.name == name) {
            let register = self.register_of(number);
            self.put(Operation::Known(Known::Argument(register)));
            return self.typed_as(&found.type_name);
        }
        if probe.is_system_call && places::CALL_NUMBERS.contains(&name) {
            let number = probe.call_number.unwrap_or_default();
            return self.quantity(number);
        }
        if name == "ret" && probe.kind == Some(EventKind::Return) {
            return self.gives(Operation::Known(Known::Returned), Type::Number);
        }
        let arguments = probe.arguments.iter().map(|argument| &argument.name);
        let names = probe
            .fields
            .iter()
            .map(|field| &field.name)
            .chain(arguments);
        let names: Vec<&str> = names.map(String::as_str).collect();
        let is_known = probe.signature_known || !probe.fields.is_empty();
        let why = match (probe.kind, is_known, names.is_empty()) {
            (None, ..) => "BEGIN and END have no arguments".to_owned(),
            (_, false, _) => {
                "the names of this probe's arguments are not known; use arg0, arg1 ...".to_owned()
            }
            (_, true, true) => "this probe has no arguments".to_owned(),
            (_, true, false) => format!("no argument {name:?}; there are {}", names.join(", ")),
        };
        self.refuse_with(with(span, why, nearest(name, names.into_iter())))
    }

    /// Compiles `args` alone: a record of all arguments.
    pub(super) fn all_arguments(&mut self, span: Span) -> Type {
        let arguments = self.probe.arguments.clone();
        if arguments.is_empty() {
            return self.argument_named("", span);
        }
        let members = arguments.iter().map(|argument| {
            let found = self.argument_named(&argument.name, span);
            (argument.name.as_str().into(), self.settle(found, span))
        });
        let members = members.collect();
        self.record(members)
    }

    /// Returns the register of an argument: arguments of more than 8 bytes take two, those of more
    /// than 16 none.
    fn register_of(&self, number: usize) -> usize {
        let before = self.probe.arguments.iter().take(number);
        before
            .map(|argument| {
                let thing = self.shared.types.written(&argument.type_name);
                match thing.and_then(|thing| self.shared.types.size(&thing)) {
                    Some(9..=16) => 2,
                    Some(17..) => 0,
                    _ => 1,
                }
            })
            .sum()
    }

    /// Compiles `args[N]`: with the type that the probe declares for it, which a translator may
    /// make.
    fn declared_argument(&mut self, number: usize, span: Span) -> Type {
        let Some(argument) = self.probe.arguments.get(number).cloned() else {
            let count = self.probe.arguments.len();
            return self.refuse(
                span,
                format!("no argument {number}: this probe has {count}"),
            );
        };
        let register = self.register_of(number);
        self.put(Operation::Known(Known::Argument(register)));
        let input = self.typed_as(&argument.type_name);
        let Some(translated) = argument.translated.filter(|name| !name.is_empty()) else {
            return input;
        };
        let output = translated.trim_end_matches(['*', ' ']).to_owned();
        self.translate_to(&output, &argument.type_name, input, span)
    }

    /// Compiles `xlate <to>(of)`.
    pub(super) fn translate(&mut self, to: &TypeName, of: &Expression) -> Type {
        let input = self.expression(of);
        let described = match &input {
            Type::Pointer(thing) | Type::Lvalue(thing) => {
                format!("{} *", self.shared.types.describe(thing))
            }
            _ => "a number".to_owned(),
        };
        self.translate_to(&to.base, &described, input, to.span)
    }

    /// Finds the translator for the input on the stack, which stays there.
    fn translate_to(&mut self, output: &str, described: &str, input: Type, span: Span) -> Type {
        let bare = |name: &str| name.trim_start_matches("struct ").to_owned();
        let wanted = bare(output);
        let script = self.shared.script;
        let mut of_output = script
            .translators
            .iter()
            .enumerate()
            .filter(|(_, translator)| bare(&translator.output.base) == wanted)
            .peekable();
        if of_output.peek().is_none() {
            let known = script.translators.iter().map(|t| t.output.base.as_str());
            let suggestions = nearest(output, known);
            let message = format!("no translator makes {output}");
            return self.refuse_with(with(span, message, suggestions));
        }
        let of_input = |name: &TypeName| {
            let known = self.shared.types.named(name);
            match (&input, &known) {
                (Type::Pointer(MemoryType::Unknown), _) | (_, None) => {
                    bare(described.trim_end_matches(['*', ' '])) == bare(&name.base)
                }
                (Type::Pointer(thing), Some(MemoryType::Pointer(to))) => thing == to.as_ref(),
                (Type::Lvalue(thing), Some(known)) => thing == known,
                (input, Some(MemoryType::Number { .. })) if input.is_number() => true,
                _ => false,
            }
        };
        let found = of_output.find(|(_, translator)| of_input(&translator.input));
        match found {
            Some((translator, of)) => {
                // A structure of the program's own is known only by the script's definition of it.
                let thing = self.shared.types.named(&of.input);
                let input = match thing {
                    Some(MemoryType::Pointer(to)) => Type::Pointer(*to),
                    _ => input,
                };
                Type::Translated {
                    translator,
                    input: Box::new(input),
                }
            }
            None => self.refuse(span, format!("no translator makes {output} of {described}")),
        }
    }

    /// Compiles a member of a translator's output: its expression alone is evaluated.
    fn translated_member(&mut self, at: usize, input: Type, name: &str, span: Span) -> Type {
        let script = self.shared.script;
        let Some(translator) = script.translators.get(at) else {
            return Type::Any;
        };
        let member = translator.members.iter().find(|(known, _)| known == name);
        let Some((_, value)) = member else {
            let names = translator.members.iter().map(|(known, _)| known.as_str());
            let message = format!(
                "the translator of {} gives no member {name:?}",
                translator.output.base
            );
            let suggestions = nearest(name, names);
            return self.refuse_with(with(span, message, suggestions));
        };
        if self.scopes.len() >= MOST_TRANSLATORS {
            let message = format!(
                "the translators of {} use each other without end",
                translator.output.base
            );
            return self.refuse(span, message);
        }
        let slot = self.new_slot();
        self.put(Operation::SetLocal(slot));
        self.scopes.push((translator.variable.clone(), slot, input));
        let said = self.shared.diagnostics.len();
        let found = self.value(value);
        self.scopes.pop();
        if !self.scopes.is_empty() {
            return found;
        }
        // An error in a library's text is reported at its use.
        for diagnostic in self.shared.diagnostics.iter_mut().skip(said) {
            diagnostic.message = format!(
                "in the translator of {}: {}",
                translator.output.base, diagnostic.message
            );
            diagnostic.span = span;
        }
        found
    }
}

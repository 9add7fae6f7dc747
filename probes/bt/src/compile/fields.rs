//! Compiles the formatted fields of a tracepoint's event: `args.next_comm`.
//!
//! At a hit, the record is read at a fixed address, so a field is a thing in memory like any other.

use probes::fields::{Field, FieldPlace, RECORD};

use super::RuleCompiler;
use super::types::{MemoryType, Type, pointer};
use crate::ast::BinaryOperator;
use crate::program::{Known, Operation};
use crate::run::numbers;

impl RuleCompiler<'_, '_> {
    /// Compiles `args.name` where the probe's event has a field of this name. Returns `None` if it
    /// has none, or if a parameter of the tracepoint says more.
    pub(super) fn field(&mut self, name: &str) -> Option<Type> {
        let fields = self.probe.fields.clone();
        let field = fields.iter().find(|field| field.name == name)?;
        let thing = self.thing_of(field);
        // A parameter of this name is the same pointer, with a type.
        if thing == pointer(MemoryType::Unknown) && self.has_pointer(name) {
            return None;
        }
        self.put(Operation::Known(Known::Record));
        match field.place {
            FieldPlace::At(offset) => self.add(offset.into()),
            FieldPlace::Named { word, base } => {
                let word = numbers::unsigned(RECORD.wrapping_add(word.into()));
                self.put(Operation::Constant(word));
                // Its upper half is the length.
                self.put(Operation::Load {
                    bytes: 2,
                    signed: false,
                });
                self.put(Operation::Binary(BinaryOperator::Add));
                self.add(base.into());
            }
        }
        Some(self.access(thing))
    }

    /// Checks whether a parameter of this name is a pointer.
    fn has_pointer(&self, name: &str) -> bool {
        let mut parameters = self.probe.arguments.iter();
        parameters.any(|known| known.name == name && known.type_name.ends_with('*'))
    }

    /// Returns the type of a field: a number of its size where the type is not known.
    fn thing_of(&self, field: &Field) -> MemoryType {
        let types = &self.shared.types;
        let written = types
            .written(&field.type_name)
            .filter(|thing| *thing != MemoryType::Unknown);
        let size = written.as_ref().and_then(|thing| types.size(thing));
        if field.array.is_some() {
            let (element, size) = match (written, size) {
                (Some(thing), Some(size)) if size > 0 => (thing, size),
                _ => (number(1, false), 1),
            };
            return MemoryType::Array {
                element: Box::new(element),
                elements: u64::from(field.size) / size,
            };
        }
        let is_named = matches!(field.place, FieldPlace::Named { .. });
        match (written, u8::try_from(field.size)) {
            (Some(thing), _) if is_named || size == Some(field.size.into()) => thing,
            (_, Ok(bytes @ (1 | 2 | 4 | 8))) => number(bytes, field.signed),
            _ => MemoryType::Array {
                element: Box::new(number(1, false)),
                elements: field.size.into(),
            },
        }
    }
}

fn number(bytes: u8, signed: bool) -> MemoryType {
    MemoryType::Number { bytes, signed }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::cell::RefCell;
    use std::iter::repeat;
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

    use probes::event::{COMM_LENGTH, EventKind};
    use probes::probe::Argument;

    use super::*;
    use crate::ast::Dialect;
    use crate::compile::{Compiler, Options, ProbeKindInfo};
    use crate::context::Context;
    use crate::maps::Maps;
    use crate::parse::parse;
    use crate::registers;
    use crate::run::{Faults, ProbeTexts, Shared, run};
    use crate::script_tests::Nobody;
    use crate::snapshots::Snapshots;
    use crate::value::Value;

    /// A hit with a record, or without.
    struct Recorded {
        record: Option<Vec<u8>>,
        emitted: RefCell<Vec<Value>>,
    }

    impl Context for Recorded {
        fn cpu(&self) -> usize {
            0
        }

        fn process(&self) -> u32 {
            0
        }

        fn thread(&self) -> u32 {
            0
        }

        fn comm(&self) -> [u8; COMM_LENGTH] {
            [0; COMM_LENGTH]
        }

        fn unix_ns(&self) -> u64 {
            0
        }

        fn task(&self) -> u64 {
            0
        }

        fn pc(&self) -> u64 {
            0
        }

        fn argument(&self, number: usize) -> u64 {
            100 + number as u64
        }

        fn has_record(&self) -> bool {
            self.record.is_some()
        }

        fn returned(&self) -> Option<u64> {
            None
        }

        fn register(&self, _: &registers::Register) -> u64 {
            0
        }

        fn read(&self, address: u64, buffer: &mut [u8]) -> bool {
            let Some(offset) = address.checked_sub(RECORD) else {
                return false;
            };
            let record = self.record.as_deref().unwrap_or_default();
            let there = record.get(offset as usize..).unwrap_or_default();
            for (place, byte) in buffer.iter_mut().zip(there.iter().chain(repeat(&0))) {
                *place = *byte;
            }
            true
        }

        fn read_string(&self, address: u64, buffer: &mut [u8]) -> (usize, bool) {
            let is_there = self.read(address, buffer);
            let end = buffer.iter().position(|byte| *byte == 0);
            (end.unwrap_or(buffer.len()), is_there)
        }

        fn kernel_stack(&self, _: &mut [u64]) -> usize {
            0
        }

        fn user_stack(&self, _: &mut [u64]) -> usize {
            0
        }

        fn emit(&self, _: usize, values: &[Value]) -> bool {
            self.emitted.borrow_mut().extend_from_slice(values);
            true
        }
    }

    fn field(name: &str, type_name: &str, place: FieldPlace, size: u32) -> Field {
        let array = type_name.split_once('[');
        Field {
            name: name.to_owned(),
            type_name: array.map_or(type_name, |(element, _)| element).to_owned(),
            array: array.map(|(_, length)| length.trim_end_matches(']').to_owned()),
            place,
            size,
            signed: true,
        }
    }

    fn probe() -> ProbeKindInfo {
        let argument = |name: &str, type_name: &str| Argument {
            name: name.to_owned(),
            type_name: type_name.to_owned(),
            is_string: false,
            translated: None,
        };
        let named = |word, base| FieldPlace::Named { word, base };
        ProbeKindInfo {
            kind: Some(EventKind::Point),
            arguments: vec![
                argument("pid", "int"),
                argument("work", "struct work_struct *"),
                argument("flags", "long"),
            ],
            fields: vec![
                field("pid", "pid_t", FieldPlace::At(0), 4),
                field("state", "strange_t", FieldPlace::At(4), 2),
                field("comm", "char[COMM]", FieldPlace::At(6), 6),
                field("name", "char[]", named(12, 0), 0),
                field("near", "char[]", named(16, 20), 0),
                field("pair", "u16[2]", FieldPlace::At(20), 4),
                field("work", "void *", FieldPlace::At(24), 8),
                field("other", "void *", FieldPlace::At(24), 8),
                field("strange", "struct strange", FieldPlace::At(20), 3),
            ]
            .into(),
            signature_known: true,
            ..ProbeKindInfo::default()
        }
    }

    /// Runs a rule that prints `value`. Returns the value and the count of reads without a record,
    /// or the message.
    fn printed(value: &str, record: Option<Vec<u8>>) -> Result<(Value, u64), String> {
        let script = format!("kprobe:f:entry {{ print({value}); }}");
        let script = parse(script.as_bytes(), Dialect::Normal).unwrap();
        let options = Options::default();
        let mut compiler = Compiler::new(&script, &options, &Nobody);
        let code = compiler.rule(&script.rules[0], &probe());
        let compiled = compiler
            .finish()
            .map_err(|wrong| wrong[0].message.clone())?;
        let shared = Shared {
            dialect: Dialect::Normal,
            maps: Maps::new(compiled.maps, 1, Dialect::Normal, 1),
            emissions: compiled.emissions,
            snapshots: Snapshots::default(),
            moments: crate::moments::Moments::default(),
            began: 0,
            exited: AtomicBool::new(false),
            failed: AtomicBool::new(false),
            status: AtomicU64::new(0),
            cpus: 1,
            faults: Faults::default(),
            random: AtomicU64::new(0),
        };
        let context = Recorded {
            record,
            emitted: RefCell::default(),
        };
        let texts = ProbeTexts {
            name: (*b"probe").into(),
            function: (*b"f").into(),
        };
        run(&code, &shared, &context, &texts);
        assert_eq!(shared.faults.reads.load(Ordering::Relaxed), 0, "{value}");
        let without = shared.faults.records.load(Ordering::Relaxed);
        let emitted = context.emitted.take();
        Ok((emitted[0].clone(), without))
    }

    #[test]
    fn fields_are_read_before_parameters() {
        let mut record = vec![0xff, 0xff, 0xff, 0xff, 0xfe, 0xff];
        record.extend_from_slice(b"sh\0\0\0\0");
        // 32 and 20 + 18, each with its length in the upper half.
        record.extend_from_slice(&[32, 0, 6, 0, 18, 0, 5, 0]);
        record.extend_from_slice(&[1, 0, 2, 0, 7, 0, 0, 0, 0, 0, 0, 0]);
        record.extend_from_slice(b"/bin/\0near\0");
        let text = |text: &str| Value::text(text.as_bytes());
        for (value, expected, without_record) in [
            ("args.pid", Value::Int(-1), Value::Int(0)),
            ("args.state", Value::Int(-2), Value::Int(0)),
            ("args.comm", text("sh"), text("")),
            ("args.name", text("/bin/"), text("")),
            ("str(args.name)", text("/bin/"), text("")),
            ("args->near", text("near"), text("")),
            ("args.pair[1]", Value::Int(2), Value::Int(0)),
            ("(uint64)args.other", Value::Int(7), Value::Int(0)),
            (
                "args.strange",
                Value::Array([1, 0, 2].map(Value::Int).into()),
                Value::Array([0; 3].map(Value::Int).into()),
            ),
        ] {
            let found = printed(value, Some(record.clone()));
            assert_eq!(found, Ok((expected, 0)), "{value}");
            assert_eq!(printed(value, None), Ok((without_record, 1)), "{value}");
        }
        // Those of parameters need no record.
        for (value, expected) in [("args.flags", 102), ("(uint64)args.work", 101)] {
            let expected = Ok((Value::Int(expected), 0));
            assert_eq!(printed(value, None), expected, "{value}");
        }
    }

    #[test]
    fn an_unknown_name_tells_fields_and_parameters() {
        let error = printed("args.pod", None).unwrap_err();
        let expected = "no argument \"pod\"; there are pid, state, comm, name, near, pair, work, \
                        other, strange, pid, work, flags";
        assert_eq!(error, expected);
    }
}

//! The record that the kernel writes for an event, with the fields that
//! `events/SYSTEM/EVENT/format` of tracefs shows.
//!
//! The caller pauses the CPUs and has the event's class. This module reads the list of the class's
//! fields, and the address of the function that fills a record. It does not read the fields that
//! all events have (`common_pid`), nor those of system calls, whose lists are elsewhere.
//!
//! Structures: `trace_event_class` in include/linux/trace_events.h, `ftrace_event_field` in
//! kernel/trace/trace.h. The macros behind them: include/trace/stages.

use super::events::EventError;
use crate::kernel::btf::Btf;
use crate::kernel::layout::{LayoutError, offset};
use crate::kernel::list::List;
use crate::kernel::structure::Structure;
use crate::{Gva, MemoryView};

/// The maximum number of fields of an event. A distribution kernel's largest has about 50.
const MAX_FIELDS: usize = 256;
/// The maximum length of a field's name or type in bytes.
const MAX_TEXT: usize = 256;
/// The maximum size in bytes of a record without its dynamic fields.
const MAX_RECORD: u32 = 4096;

/// The record of an event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EventRecord {
    /// The function that fills a record: `trace_event_raw_event_CLASS`. It takes a
    /// `trace_event_file`, then the tracepoint's parameters.
    pub writer: Gva,
    /// The fields in order of the event's format.
    pub fields: Vec<EventField>,
}

/// A field of a record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EventField {
    /// The name.
    pub name: String,
    /// The type as the kernel's source has it: `pid_t`, `char[16]`, `__data_loc char[]`.
    pub type_name: String,
    /// The offset in the record in bytes.
    pub offset: u32,
    /// The size in bytes.
    pub size: u32,
    /// Whether a number in it may be negative.
    pub signed: bool,
}

/// The location of the classes' fields.
#[derive(Debug, Clone, Copy)]
pub(super) struct RecordLayout {
    /// Offsets in `trace_event_class`.
    probe: u64,
    fields: u64,
    /// Offsets in `ftrace_event_field`.
    link: u64,
    name: u64,
    type_name: u64,
    offset: u64,
    size: u64,
    signed: u64,
}

impl RecordLayout {
    /// Looks up the offsets.
    ///
    /// # Errors
    /// If the kernel's types do not describe them.
    pub(super) fn new(btf: &Btf) -> Result<Self, LayoutError> {
        Ok(Self {
            probe: offset(btf, "trace_event_class.probe", 8)?,
            fields: offset(btf, "trace_event_class.fields", 16)?,
            link: offset(btf, "ftrace_event_field.link", 16)?,
            name: offset(btf, "ftrace_event_field.name", 8)?,
            type_name: offset(btf, "ftrace_event_field.type", 8)?,
            offset: offset(btf, "ftrace_event_field.offset", 4)?,
            size: offset(btf, "ftrace_event_field.size", 4)?,
            signed: offset(btf, "ftrace_event_field.is_signed", 4)?,
        })
    }

    /// Reads the record of the events of `class`. Returns `None` if it has no function or no
    /// fields.
    ///
    /// # Errors
    /// If the list or a field is broken.
    pub(super) fn read(
        &self,
        view: MemoryView<'_>,
        class: Gva,
    ) -> Result<Option<EventRecord>, EventError> {
        let class = Structure::at(view, "trace_event_class", class)?;
        let Some(writer) = class.pointer(self.probe)? else {
            return Ok(None);
        };
        let list = List {
            name: "trace_event_class.fields",
            head: class.member(self.fields),
            member: self.link,
            limit: MAX_FIELDS,
        };
        let mut fields = Vec::new();
        for field in list.walk(view).complete()? {
            fields.push(self.field(view, field)?);
        }
        // The newest field comes first.
        fields.reverse();
        Ok((!fields.is_empty()).then_some(EventRecord { writer, fields }))
    }

    fn field(&self, view: MemoryView<'_>, field: Gva) -> Result<EventField, EventError> {
        let structure = Structure::at(view, "ftrace_event_field", field)?;
        let text = |offset, what| {
            let text = structure.string(offset, what, MAX_TEXT)?;
            let text = text.filter(|text| !text.is_empty() && text.len() < MAX_TEXT);
            let text = text.and_then(|text| String::from_utf8(text).ok());
            text.ok_or(EventError::BadField { field })
        };
        let found = EventField {
            name: text(self.name, "name of a field")?,
            type_name: text(self.type_name, "type of a field")?,
            offset: structure.u32(self.offset)?,
            size: structure.u32(self.size)?,
            signed: structure.u32(self.signed)? != 0,
        };
        let end = found.offset.checked_add(found.size);
        match end.is_some_and(|end| end <= MAX_RECORD) {
            true => Ok(found),
            false => Err(EventError::BadField { field }),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::kernel::test_kernel::{
        BASE, HALF, Member, TestKernel, WILD, WORD, types as types_of,
    };
    use crate::test_says::assert_says;

    const CLASS: u64 = BASE + 0x1000;
    const FIELDS: u64 = BASE + 0x2000;
    const TEXTS: u64 = BASE + 0x3000;
    const WRITER: u64 = BASE + 0x4000;

    fn layout() -> RecordLayout {
        let types = types_of(&[
            ("list_head", &[("next", 0, WORD), ("prev", 8, WORD)]),
            (
                "trace_event_class",
                &[("probe", 8, WORD), ("fields", 24, Member::Of("list_head"))],
            ),
            (
                "ftrace_event_field",
                &[
                    ("link", 0, Member::Of("list_head")),
                    ("name", 16, WORD),
                    ("type", 24, WORD),
                    ("offset", 32, HALF),
                    ("size", 36, HALF),
                    ("is_signed", 40, HALF),
                ],
            ),
        ]);
        RecordLayout::new(&types).unwrap()
    }

    /// Makes a class with these fields: name, type, offset, size, whether signed. The newest comes
    /// first.
    fn kernel(fields: &[(&str, &str, u64, u64, bool)]) -> TestKernel {
        let mut kernel = TestKernel::default();
        kernel.words(CLASS + 8, &[WRITER]);
        let head = CLASS + 24;
        let mut link = head;
        for (index, (name, kind, offset, size, signed)) in (0..).zip(fields) {
            let (at, text) = (FIELDS + index * 0x40, TEXTS + index * 0x40);
            kernel.words(link, &[at]);
            kernel.words(at, &[head, 0, text, text + 0x20, offset | size << 32]);
            kernel.put_all(&[(at + 40, (*signed).into(), 4)]);
            kernel.put(text, format!("{name}\0"));
            kernel.put(text + 0x20, format!("{kind}\0"));
            link = at;
        }
        kernel.words(link, &[head]);
        kernel
    }

    fn read(kernel: &TestKernel) -> Result<Option<EventRecord>, EventError> {
        kernel.look(|view| layout().read(view, Gva(CLASS)))
    }

    #[test]
    fn fields_are_told_in_the_order_of_the_format() {
        let record = read(&kernel(&[
            ("filename", "__data_loc char[]", 12, 4, false),
            ("pid", "pid_t", 8, 4, true),
        ]));
        let record = record.unwrap().unwrap();
        assert_eq!(record.writer, Gva(WRITER));
        let told = record.fields.iter().map(|field| {
            let EventField {
                name,
                type_name,
                offset,
                size,
                signed,
            } = field;
            (name.as_str(), type_name.as_str(), *offset, *size, *signed)
        });
        assert_eq!(
            told.collect::<Vec<_>>(),
            [
                ("pid", "pid_t", 8, 4, true),
                ("filename", "__data_loc char[]", 12, 4, false),
            ]
        );
    }

    #[test]
    fn classes_without_function_or_fields_have_no_record() {
        assert_eq!(read(&kernel(&[])), Ok(None));
        let mut without = kernel(&[("pid", "pid_t", 8, 4, true)]);
        without.words(CLASS + 8, &[0]);
        assert_eq!(read(&without), Ok(None));
    }

    #[test]
    fn broken_fields_are_refused() {
        let endless = |kernel: &mut TestKernel| kernel.words(FIELDS, &[FIELDS]);
        let wild = |kernel: &mut TestKernel| kernel.words(FIELDS + 16, &[WILD]);
        let nameless = |kernel: &mut TestKernel| kernel.put(TEXTS, "\0");
        let far = |kernel: &mut TestKernel| kernel.words(FIELDS + 32, &[4093 | 4 << 32]);
        let wraps = |kernel: &mut TestKernel| kernel.words(FIELDS + 32, &[u64::MAX]);
        for (breaks, expected) in [
            (endless as fn(&mut TestKernel), "trace_event_class.fields"),
            (wild, "name of a field at"),
            (nameless, "has no name or type"),
            (far, "outside of a record"),
            (wraps, "outside of a record"),
        ] {
            let mut kernel = kernel(&[("pid", "pid_t", 8, 4, true)]);
            breaks(&mut kernel);
            assert_says(read(&kernel).unwrap_err(), expected);
        }
    }
}

//! The formatted fields of a tracepoint's event: those that `events/SYSTEM/EVENT/format` of tracefs
//! shows and that other tracers read.
//!
//! The kernel's own code fills a record with them. At a hit, that code is followed by speculation,
//! and the record is kept outside the guest. To readers it appears at [`RECORD`].

use std::sync::Arc;

use introspect::Gva;
use introspect::kernel::symbols::Symbols;
use introspect::kernel::tracepoint::{EventField, EventRecord};

/// The kernel address at which the record of a hit is read. It is in the 2 MiB at the end of all
/// addresses, which Linux never maps (Documentation/arch/x86/x86_64/mm.rst).
pub const RECORD: u64 = 0xffff_ffff_ffe1_0000;
/// The maximum size of a record in bytes.
pub const MOST_BYTES: usize = 4096;

/// The code that fills a record, and the record's fields.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RecordText {
    /// The function that fills a record (`trace_event_raw_event_CLASS`).
    pub writer: Gva,
    /// The function that makes room for it: `trace_event_buffer_reserve(buffer, file, size)`.
    pub reserve: Gva,
    /// The function that is called once it is filled: `trace_event_buffer_commit(buffer)`.
    pub commit: Gva,
    /// The fields.
    pub fields: Arc<[Field]>,
}

/// A field of a record.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Field {
    /// The name.
    pub name: String,
    /// The type in C notation; of an array, that of an element.
    pub type_name: String,
    /// Of an array: its length as the kernel's source has it, empty if it differs from record to
    /// record.
    pub array: Option<String>,
    /// The place in the record.
    pub place: FieldPlace,
    /// The size in bytes; 0 for a field that differs in size from record to record.
    pub size: u32,
    /// Whether a number in it may be negative.
    pub signed: bool,
}

/// The place of a field in its record.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FieldPlace {
    /// At this offset.
    At(u32),
    /// Behind the fixed fields. The 4 bytes at `word` have the offset in their lower half.
    Named {
        /// The offset of these 4 bytes.
        word: u32,
        /// The offset that the named one is added to.
        base: u32,
    },
}

impl RecordText {
    /// Returns the code and fields of an event's record. `None` in a kernel that fills records in
    /// another way.
    pub(crate) fn of(record: &EventRecord, symbols: &Symbols) -> Option<Self> {
        let address = |name| symbols.address_of(name).map(Gva);
        Some(Self {
            writer: record.writer,
            reserve: address("trace_event_buffer_reserve")?,
            commit: address("trace_event_buffer_commit")?,
            fields: record.fields.iter().map(Field::from).collect(),
        })
    }
}

/// Returns the approximate size in memory of a record's fields, in bytes.
pub(crate) fn bytes(record: &EventRecord) -> usize {
    let bytes = |of: &EventField| size_of::<Field>() + of.name.len() + of.type_name.len();
    record.fields.iter().map(bytes).sum()
}

impl From<&EventField> for Field {
    fn from(field: &EventField) -> Self {
        let (text, place, size) = match field.type_name.split_once(' ') {
            Some(("__data_loc", of)) => {
                let word = field.offset;
                (of, FieldPlace::Named { word, base: 0 }, 0)
            }
            Some(("__rel_loc", of)) => {
                let (word, base) = (field.offset, field.offset.saturating_add(4));
                (of, FieldPlace::Named { word, base }, 0)
            }
            _ => {
                let text = field.type_name.as_str();
                (text, FieldPlace::At(field.offset), field.size)
            }
        };
        let array = text.split_once('[');
        Self {
            name: field.name.clone(),
            type_name: array
                .map_or(text, |(element, _)| element.trim_end())
                .to_owned(),
            array: array.map(|(_, length)| length.trim_end_matches(']').to_owned()),
            place,
            size,
            signed: field.signed,
        }
    }
}

impl Field {
    /// Returns the field as C declares it.
    #[must_use]
    pub fn declaration(&self) -> String {
        let Self {
            name, type_name, ..
        } = self;
        let space = if type_name.ends_with('*') { "" } else { " " };
        let array = self.array.as_ref();
        let array = array.map_or_else(String::new, |length| format!("[{length}]"));
        format!("{type_name}{space}{name}{array}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_declared_as_the_kernel_writes_them() {
        let named = |word, base| FieldPlace::Named { word, base };
        for (type_name, offset, size, declaration, place, expected_size) in [
            ("pid_t", 8, 4, "pid_t x", FieldPlace::At(8), 4),
            ("char[16]", 8, 16, "char x[16]", FieldPlace::At(8), 16),
            (
                "const void *",
                16,
                8,
                "const void *x",
                FieldPlace::At(16),
                8,
            ),
            ("__data_loc char[]", 8, 4, "char x[]", named(8, 0), 0),
            ("__rel_loc u8[]", 8, 4, "u8 x[]", named(8, 12), 0),
            (
                "__data_loc cpumask_t",
                12,
                4,
                "cpumask_t x",
                named(12, 0),
                0,
            ),
        ] {
            let field = Field::from(&EventField {
                name: "x".to_owned(),
                type_name: type_name.to_owned(),
                offset,
                size,
                signed: false,
            });
            let found = (field.declaration(), field.place, field.size);
            let expected = (declaration.to_owned(), place, expected_size);
            assert_eq!(found, expected, "{type_name}");
        }
    }
}

//! Files of Parquet, with a column for each field of an event.
//!
//! Rows are collected in memory until a row group is full. Then it is written whole, so at most one
//! group of [`GROUP_ROWS`] rows and about [`GROUP_BYTES`] bytes is held. A file without its end
//! cannot be read. [`Table::cut_off`] makes that end for the groups that were written whole.

mod column;
mod hits;
mod records;
#[cfg(test)]
mod tests;

use std::fmt;
use std::io::{self, Write};
use std::sync::Arc;

use parquet::basic::Compression;
use parquet::errors::ParquetError;
use parquet::file::metadata::{FileMetaData, KeyValue, ParquetMetaData, ParquetMetaDataWriter};
use parquet::file::properties::{EnabledStatistics, WriterProperties, WriterPropertiesPtr};
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::types::Type;
use trace_devices::render::CutOff;

use column::{Column, Field, Kind};
pub use hits::{Hit, Hits};
pub use records::{Calls, Device, Processes, Rendered};

/// The greatest number of rows of a row group.
const GROUP_ROWS: usize = 1 << 17;
/// The number of bytes of values at which a row group is written.
const GROUP_BYTES: usize = 64 << 20;
/// The number of rows after which the bytes are counted.
const LOOK_ROWS: usize = 256;
/// The bytes before the first group.
const MAGIC: u64 = 4;
/// The version in the file's end: all that is used here is in the first one.
const FORMAT: i32 = 1;

/// A key and a value of a file's metadata.
type Note = (&'static str, String);

/// A table that is written as rows arrive.
pub struct Table {
    writer: SerializedFileWriter<Vec<u8>>,
    columns: Vec<Column>,
    /// The rows of the open group.
    rows: usize,
    /// The rows at which it is full.
    most_rows: usize,
    /// The offset in the file at which each written group ends, and the rows until there.
    ends: Vec<(u64, u64)>,
}

impl fmt::Debug for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Table")
            .field("rows", &self.rows)
            .field("ends", &self.ends)
            .finish_non_exhaustive()
    }
}

impl Table {
    /// Makes a table with these columns.
    ///
    /// # Errors
    /// If two columns have one name.
    pub fn new(fields: &[Field]) -> io::Result<Self> {
        let types: Result<Vec<_>, _> = fields.iter().map(Field::column_type).collect();
        let schema = Type::group_type_builder("exotrace").with_fields(types.map_err(failed)?);
        let schema = Arc::new(schema.build().map_err(failed)?);
        let writer = SerializedFileWriter::new(Vec::new(), schema, properties(fields));
        Ok(Self {
            writer: writer.map_err(failed)?,
            columns: fields.iter().map(Column::new).collect(),
            rows: 0,
            most_rows: GROUP_ROWS,
            ends: Vec::new(),
        })
    }

    /// Sets the number in a column of the current row.
    pub fn number(&mut self, column: usize, value: i64) {
        if let Some(column) = self.columns.get_mut(column) {
            column.number(self.rows, value);
        }
    }

    /// Sets the text in a column of the current row.
    pub fn text(&mut self, column: usize, value: &str) {
        if let Some(column) = self.columns.get_mut(column) {
            column.text(self.rows, value);
        }
    }

    /// Sets the list in a column of the current row. An empty one is null.
    pub fn texts(&mut self, column: usize, values: &[String]) {
        if let Some(column) = self.columns.get_mut(column) {
            column.texts(self.rows, values);
        }
    }

    /// Ends the current row, and writes the group to `out` if it is full.
    ///
    /// # Errors
    /// The errors of `out`.
    pub fn end_row(&mut self, out: &mut dyn Write) -> io::Result<()> {
        self.rows += 1;
        let bytes = || self.columns.iter().map(Column::bytes).sum::<usize>();
        let is_large = self.rows.is_multiple_of(LOOK_ROWS) && bytes() >= GROUP_BYTES;
        match self.rows >= self.most_rows || is_large {
            true => self.write_group(out),
            false => Ok(()),
        }
    }

    /// Writes the last group and the end of the file, with `notes` as its metadata.
    ///
    /// # Errors
    /// The errors of `out`.
    pub fn finish(&mut self, notes: &[Note], out: &mut dyn Write) -> io::Result<()> {
        if self.rows > 0 {
            self.write_group(out)?;
        }
        self.pass_on(out)?;
        let end = self.end_of(self.ends.len(), notes)?;
        out.write_all(&end)
    }

    /// Returns the end for a file of which the first `intact` bytes were written.
    pub fn cut_off(&self, intact: u64, notes: &[Note]) -> Option<CutOff> {
        let groups = self.ends.partition_point(|(end, _)| *end <= intact);
        let kept = groups.checked_sub(1).and_then(|last| self.ends.get(last));
        let (length, rows) = *kept.unwrap_or(&(MAGIC, 0));
        if length > intact {
            return None;
        }
        Some(CutOff {
            length,
            end: self.end_of(groups, notes).ok()?,
            lost: self.passed() + self.rows as u64 - rows,
        })
    }

    /// Returns the rows of all groups that are not open.
    fn passed(&self) -> u64 {
        self.ends.last().map_or(0, |(_, rows)| *rows)
    }

    /// Returns the end of a file of the first groups.
    fn end_of(&self, groups: usize, notes: &[Note]) -> io::Result<Vec<u8>> {
        let written = self.writer.flushed_row_groups().iter().take(groups);
        let rows = groups.checked_sub(1).and_then(|last| self.ends.get(last));
        let note = |(key, value): &Note| KeyValue::new((*key).to_owned(), value.clone());
        let file = FileMetaData::new(
            FORMAT,
            i64::try_from(rows.map_or(0, |(_, rows)| *rows)).unwrap_or(i64::MAX),
            Some(format!("exotrace version {}", env!("CARGO_PKG_VERSION"))),
            Some(notes.iter().map(note).collect()),
            Arc::new(self.writer.schema_descr().clone()),
            None,
        );
        let all = ParquetMetaData::new(file, written.cloned().collect());
        let mut end = Vec::new();
        let written = ParquetMetaDataWriter::new(&mut end, &all).finish();
        written.map_err(failed)?;
        Ok(end)
    }

    fn write_group(&mut self, out: &mut dyn Write) -> io::Result<()> {
        let mut group = self.writer.next_row_group().map_err(failed)?;
        for column in &mut self.columns {
            let next = group.next_column().map_err(failed)?;
            let mut writer = next.ok_or_else(|| io::Error::other("a column is missing"))?;
            column.write(self.rows, &mut writer).map_err(failed)?;
            writer.close().map_err(failed)?;
        }
        group.close().map_err(failed)?;
        let rows = self.passed() + self.rows as u64;
        self.rows = 0;
        let end = self.writer.bytes_written() as u64;
        self.ends.push((end, rows));
        self.pass_on(out)
    }

    /// Writes the bytes that were made since the last call.
    fn pass_on(&mut self, out: &mut dyn Write) -> io::Result<()> {
        self.writer.flush()?;
        let made = std::mem::take(self.writer.inner_mut());
        out.write_all(&made)
    }
}

/// Dictionaries hold text, which repeats. Times are stored as differences.
fn properties(fields: &[Field]) -> WriterPropertiesPtr {
    let mut properties = WriterProperties::builder()
        .set_compression(Compression::SNAPPY)
        .set_statistics_enabled(EnabledStatistics::Chunk)
        .set_offset_index_disabled(true);
    for field in fields {
        let path = field.path();
        if let Some(encoding) = field.encoding() {
            properties = properties
                .set_column_dictionary_enabled(path.clone(), false)
                .set_column_encoding(path, encoding);
        }
    }
    Arc::new(properties.build())
}

fn failed(error: ParquetError) -> io::Error {
    io::Error::other(error)
}

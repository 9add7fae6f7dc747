//! The columns of a table: their types in the file, and the values of the open row group.
//!
//! A null costs nothing until the next value of its column: levels are filled up then.

use std::collections::HashMap;

use foldhash::fast::RandomState;
use parquet::basic::{
    ConvertedType, Encoding, LogicalType, Repetition, TimeUnit, Type as Physical,
};
use parquet::data_type::{ByteArray, ByteArrayType, Int32Type, Int64Type};
use parquet::errors::ParquetError;
use parquet::file::writer::SerializedColumnWriter;
use parquet::schema::types::{ColumnPath, Type, TypePtr};

/// The greatest number of texts of one column and group that are kept once for all their rows.
const MOST_TEXTS: usize = 1 << 14;
/// The bytes that a text's place in a column takes.
const TEXT: usize = size_of::<ByteArray>();

/// The type of a column.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A time: nanoseconds since 1970, UTC.
    Time,
    /// A number of 64 bits.
    Signed,
    /// A number of 64 bits without a sign.
    Unsigned,
    /// A number of 32 bits without a sign.
    Small,
    /// A text.
    Text,
    /// A list of texts.
    Texts,
}

/// A column's name and type.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Field {
    name: String,
    kind: Kind,
    /// Set if a row may have no value in it.
    optional: bool,
}

impl Field {
    /// Returns a column with a value in each row.
    pub fn required(name: &str, kind: Kind) -> Self {
        Self {
            name: name.to_owned(),
            kind,
            optional: false,
        }
    }

    /// Returns a column that may be null.
    pub fn optional(name: &str, kind: Kind) -> Self {
        Self {
            optional: true,
            ..Self::required(name, kind)
        }
    }

    /// Returns the path of the column that holds the values.
    pub fn path(&self) -> ColumnPath {
        let parts: &[&str] = match self.kind {
            Kind::Texts => &[&self.name, "list", "element"],
            _ => &[&self.name],
        };
        ColumnPath::new(parts.iter().map(|part| (*part).to_owned()).collect())
    }

    /// Returns the encoding of a column without a dictionary.
    pub fn encoding(&self) -> Option<Encoding> {
        match self.kind {
            Kind::Time | Kind::Unsigned => Some(Encoding::DELTA_BINARY_PACKED),
            Kind::Signed => Some(Encoding::PLAIN),
            Kind::Small | Kind::Text | Kind::Texts => None,
        }
    }

    /// Returns the column's type in the file.
    ///
    /// # Errors
    /// If the parts of the type do not fit each other.
    pub fn column_type(&self) -> Result<TypePtr, ParquetError> {
        let repetition = match self.optional {
            true => Repetition::OPTIONAL,
            false => Repetition::REQUIRED,
        };
        let unsigned = |bits| LogicalType::integer(bits, false);
        let (physical, logical) = match self.kind {
            Kind::Time => {
                let time = LogicalType::timestamp(true, TimeUnit::NANOS);
                (Physical::INT64, Some(time))
            }
            Kind::Signed => (Physical::INT64, None),
            Kind::Unsigned => (Physical::INT64, Some(unsigned(64))),
            Kind::Small => (Physical::INT32, Some(unsigned(32))),
            Kind::Text => (Physical::BYTE_ARRAY, Some(LogicalType::String)),
            Kind::Texts => return self.list_type(repetition),
        };
        let built = Type::primitive_type_builder(&self.name, physical)
            .with_logical_type(logical)
            .with_repetition(repetition);
        Ok(built.build()?.into())
    }

    /// The three levels of a list in Parquet's specification.
    fn list_type(&self, repetition: Repetition) -> Result<TypePtr, ParquetError> {
        let element = Type::primitive_type_builder("element", Physical::BYTE_ARRAY)
            .with_logical_type(Some(LogicalType::String))
            .with_repetition(Repetition::REQUIRED)
            .build()?;
        let list = Type::group_type_builder("list")
            .with_repetition(Repetition::REPEATED)
            .with_fields(vec![element.into()])
            .build()?;
        let outer = Type::group_type_builder(&self.name)
            .with_logical_type(Some(LogicalType::List))
            .with_converted_type(ConvertedType::LIST)
            .with_repetition(repetition)
            .with_fields(vec![list.into()]);
        Ok(outer.build()?.into())
    }
}

/// The values of a column in the open row group.
pub struct Column {
    values: Values,
    /// The level of each row or element: whether there is a value. Required columns have none.
    levels: Option<Vec<i16>>,
    /// Of a list, 0 for the first element of each row.
    repeats: Option<Vec<i16>>,
    /// The number of rows that have a value or are null.
    filled: usize,
}

enum Values {
    Int(Vec<i32>),
    Long(Vec<i64>),
    Texts(Texts),
}

/// Texts, each of which is kept once.
#[derive(Default)]
struct Texts {
    all: Vec<ByteArray>,
    known: HashMap<Box<[u8]>, ByteArray, RandomState>,
    bytes: usize,
}

impl Texts {
    fn push(&mut self, text: &str) {
        let same = self
            .all
            .last()
            .filter(|last| last.data() == text.as_bytes());
        if let Some(same) = same.or_else(|| self.known.get(text.as_bytes())) {
            self.all.push(same.clone());
            return;
        }
        let new = ByteArray::from(text.as_bytes().to_vec());
        self.bytes += text.len();
        if self.known.len() < MOST_TEXTS {
            self.known.insert(text.as_bytes().into(), new.clone());
        }
        self.all.push(new);
    }
}

/// The level of a value in a column that may be null.
const PRESENT: i16 = 1;
/// The level of an element of a list.
const ELEMENT: i16 = 2;

impl Column {
    /// Makes an empty column.
    pub fn new(field: &Field) -> Self {
        let is_list = field.kind == Kind::Texts;
        Self {
            values: match field.kind {
                Kind::Small => Values::Int(Vec::new()),
                Kind::Time | Kind::Signed | Kind::Unsigned => Values::Long(Vec::new()),
                Kind::Text | Kind::Texts => Values::Texts(Texts::default()),
            },
            levels: (field.optional || is_list).then(Vec::new),
            repeats: is_list.then(Vec::new),
            filled: 0,
        }
    }

    /// Sets the number of row `row`.
    pub fn number(&mut self, row: usize, value: i64) {
        if !self.begin(row) {
            return;
        }
        match &mut self.values {
            // The bits of a number without a sign.
            Values::Int(values) => values.push(value as i32),
            Values::Long(values) => values.push(value),
            Values::Texts(texts) => texts.push(""),
        }
        self.levels.iter_mut().for_each(|l| l.push(PRESENT));
    }

    /// Sets the text of row `row`.
    pub fn text(&mut self, row: usize, value: &str) {
        if let Values::Texts(_) = &self.values
            && self.begin(row)
            && let Values::Texts(texts) = &mut self.values
        {
            texts.push(value);
            self.levels.iter_mut().for_each(|l| l.push(PRESENT));
        }
    }

    /// Sets the list of row `row`.
    pub fn texts(&mut self, row: usize, value: &[String]) {
        if value.is_empty() || self.repeats.is_none() || !self.begin(row) {
            return;
        }
        let (Values::Texts(texts), Some(repeats)) = (&mut self.values, &mut self.repeats) else {
            return;
        };
        for (number, text) in value.iter().enumerate() {
            texts.push(text);
            repeats.push(i16::from(number > 0));
        }
        let levels = std::iter::repeat_n(ELEMENT, value.len());
        self.levels
            .iter_mut()
            .for_each(|l| l.extend(levels.clone()));
    }

    /// Makes the rows before this one null that have no value yet. Returns whether this one has
    /// none.
    fn begin(&mut self, row: usize) -> bool {
        self.fill(row);
        let is_new = self.filled == row;
        self.filled = row + 1;
        is_new
    }

    /// Makes rows without a value null, or in a required column 0, until there are so many.
    fn fill(&mut self, rows: usize) {
        let missing = rows.saturating_sub(self.filled);
        self.filled = self.filled.max(rows);
        match (&mut self.levels, &mut self.values) {
            (Some(levels), _) => levels.resize(levels.len() + missing, 0),
            (None, Values::Int(values)) => values.resize(rows, 0),
            (None, Values::Long(values)) => values.resize(rows, 0),
            (None, Values::Texts(texts)) => (0..missing).for_each(|_| texts.push("")),
        }
        if let Some(repeats) = &mut self.repeats {
            repeats.resize(repeats.len() + missing, 0);
        }
    }

    /// Returns the bytes that the values take in memory.
    pub fn bytes(&self) -> usize {
        match &self.values {
            Values::Int(values) => 4 * values.len(),
            Values::Long(values) => 8 * values.len(),
            Values::Texts(texts) => texts.bytes + TEXT * texts.all.len(),
        }
    }

    /// Writes the column of a group of `rows` rows, and empties it.
    ///
    /// # Errors
    /// If the writer is of another type.
    pub fn write(
        &mut self,
        rows: usize,
        writer: &mut SerializedColumnWriter<'_>,
    ) -> Result<(), ParquetError> {
        self.fill(rows);
        let levels = self.levels.as_deref();
        let repeats = self.repeats.as_deref();
        match &self.values {
            Values::Int(values) => writer
                .typed::<Int32Type>()
                .write_batch(values, levels, repeats)?,
            Values::Long(values) => writer
                .typed::<Int64Type>()
                .write_batch(values, levels, repeats)?,
            Values::Texts(texts) => writer
                .typed::<ByteArrayType>()
                .write_batch(&texts.all, levels, repeats)?,
        };
        self.filled = 0;
        self.levels.iter_mut().for_each(Vec::clear);
        self.repeats.iter_mut().for_each(Vec::clear);
        match &mut self.values {
            Values::Int(values) => values.clear(),
            Values::Long(values) => values.clear(),
            Values::Texts(texts) => *texts = Texts::default(),
        }
        Ok(())
    }
}

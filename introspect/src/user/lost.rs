//! The parts of an object that could not be read, table by table.

use std::fmt;

use super::file_bytes::Missing;
use super::object_file::Section;
use super::sparse_bytes::SparseBytes;

/// A part of an object that could not be read, or not completely.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{part}: {reason}")]
pub struct LostPart {
    /// The part: a section's name or words such as `section headers`.
    pub part: Part,
    /// The reason.
    pub reason: LostReason,
}

/// A part of an object that was lost.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Part {
    /// The section headers, and with them `.symtab` and `.gnu_debugdata`.
    SectionHeaders,
    /// The names of the sections.
    SectionNames,
    /// The table of `PT_DYNAMIC`.
    DynamicTable,
    /// The notes, and with them the build id.
    Notes,
    /// A section's contents, or those of the table that the section would show.
    Section(String),
    /// A part of the object that is packed into `.gnu_debugdata`.
    InDebugData(Box<Part>),
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::SectionHeaders => f.write_str("section headers"),
            Self::SectionNames => f.write_str("section names"),
            Self::DynamicTable => f.write_str("dynamic table"),
            Self::Notes => f.write_str("notes"),
            Self::Section(name) => f.write_str(name),
            Self::InDebugData(part) => write!(f, "{part} of .gnu_debugdata"),
        }
    }
}

/// The reason for the loss.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LostReason {
    /// All of it is missing.
    #[error(transparent)]
    Missing(#[from] Missing),
    /// Some of its pages are missing. The rest was used.
    #[error("{missing} of its {total} bytes are missing, the rest is used")]
    Partly {
        /// The number of missing bytes.
        missing: usize,
        /// The total number of bytes.
        total: usize,
    },
    /// It is more than the maximum.
    #[error("{found} is too much, at most {most} is read")]
    TooMuch {
        /// The number of bytes or entries that the file declares.
        found: u64,
        /// The maximum number of bytes or entries.
        most: u64,
    },
    /// The file contradicts itself.
    #[error("damaged: {0}")]
    Damaged(String),
}

impl Part {
    /// Returns the part of a section's contents.
    pub(super) fn of(section: &Section) -> Self {
        Self::Section(match section.name.as_str() {
            "" => format!("section at {:#x}", section.offset),
            name => name.to_owned(),
        })
    }
}

impl LostPart {
    /// Returns the loss of a section's contents.
    pub(super) fn section(section: &Section, reason: LostReason) -> Self {
        let part = Part::of(section);
        Self { part, reason }
    }
}

impl LostReason {
    /// Returns the loss to report for a table that was read as far as it is available.
    pub(super) fn of_pages(table: &SparseBytes) -> Option<Self> {
        let (missing, total) = (table.missing(), table.len());
        (missing > 0).then_some(Self::Partly { missing, total })
    }

    /// Converts `found` to a size, if it is at most `most`.
    pub(super) fn bounded(found: u64, most: u64) -> Result<usize, Self> {
        usize::try_from(found)
            .ok()
            .filter(|_| found <= most)
            .ok_or(Self::TooMuch { found, most })
    }
}

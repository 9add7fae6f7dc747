//! The interface of renderers, which convert a device's stream to other formats.

use std::io::{self, Write};

/// A renderer of one format, for records of one kind as they arrive.
///
/// Call [`record`](Self::record) for each record of the stream, then [`finish`](Self::finish) once.
/// Output before `finish` is already part of the whole. Formats of lines are complete after each
/// record. To continue in another file, finish this renderer and create another. Whatever is open
/// is closed in the first, and begins anew in the second.
pub trait Render<T: ?Sized> {
    /// Writes the output that this record permits.
    ///
    /// # Errors
    /// The errors of `out`. The output cannot be continued then.
    fn record(&mut self, record: &T, out: &mut dyn Write) -> io::Result<()>;

    /// Writes the rest, and closes whatever is open: nothing, if every record is written at once.
    ///
    /// # Errors
    /// The errors of `out`.
    fn finish(&mut self, out: &mut dyn Write) -> io::Result<()> {
        let _ = out;
        Ok(())
    }

    /// Returns the end for a file that could not be written further, and has `intact` bytes of the
    /// output so far. Returns `None` for a format that is read as far as it goes, or if there is no
    /// such end.
    fn cut_off(&self, intact: u64) -> Option<CutOff> {
        let _ = intact;
        None
    }
}

/// The end for a file that was cut off.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CutOff {
    /// The length of the file's part that is kept, in bytes.
    pub length: u64,
    /// The bytes that follow it.
    pub end: Vec<u8>,
    /// The number of records that are not in the file.
    pub lost: u64,
}

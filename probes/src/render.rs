//! What makes other formats of a device's stream.

use std::io::{self, Write};

/// Makes one format of records of one kind, as they come.
///
/// Order: [`record`](Self::record) for each record of the stream, then [`finish`](Self::finish) once. What is written before `finish` is part
/// of the whole already; formats of lines are whole after each record. To go on in another file, finish this renderer and make another: what
/// is open is closed in the first, and begins anew.
pub trait Render<T> {
    /// Writes what can be written after this record.
    ///
    /// # Errors
    /// Those of `out`; nothing sensible can follow then.
    fn record(&mut self, record: &T, out: &mut dyn Write) -> io::Result<()>;

    /// Writes the rest, and closes what is open.
    ///
    /// # Errors
    /// Those of `out`.
    fn finish(&mut self, out: &mut dyn Write) -> io::Result<()>;
}

//! The rate limit of log lines for each place in the code, so that neither a guest nor a client
//! fills a disk by repeating an action that causes a warning.

use std::collections::HashMap;
use std::io::{self, Write};
use std::time::{Duration, Instant};

use env_logger::fmt::Formatter;
use log::Record;
use parking_lot::Mutex;

/// The length of a period.
const WHILE: Duration = Duration::from_secs(10);
/// The number of lines of one place that are written in a period.
const MOST: u64 = 5;

/// A place in the code: its module or file, and line.
type Place = (String, Option<u32>);

/// The lines of one place.
#[derive(Debug, Clone, Copy)]
struct Lines {
    /// The start of the period.
    began: Instant,
    /// The number of lines since then, including omitted ones.
    count: u64,
}

/// The lines by place. There are as many as log calls in the code.
static PLACES: Mutex<Option<HashMap<Place, Lines>>> = Mutex::new(None);

/// Writes a line, unless its place has reached the limit.
///
/// # Errors
/// If `output` does not accept it.
pub fn write(output: &mut Formatter, record: &Record<'_>) -> io::Result<()> {
    let file = record.file().unwrap_or(record.target()).to_owned();
    let left_out = {
        let mut places = PLACES.lock();
        let places = places.get_or_insert_default();
        let lines = places.entry((file, record.line())).or_insert(Lines {
            began: Instant::now(),
            count: 0,
        });
        match lines.next(Instant::now()) {
            Some(left_out) => left_out,
            None => return Ok(()),
        }
    };
    let (level, target) = (record.level(), record.target());
    write!(output, "[{level:<5} {target}] {}", record.args())?;
    match left_out {
        0 => writeln!(output),
        _ => writeln!(output, " ({left_out} more like it were left out)"),
    }
}

impl Lines {
    /// Counts a line. Returns the number of lines omitted before it; `None` if it is omitted too.
    fn next(&mut self, now: Instant) -> Option<u64> {
        let mut left_out = 0;
        if now.duration_since(self.began) >= WHILE {
            left_out = self.count.saturating_sub(MOST);
            *self = Self {
                began: now,
                count: 0,
            };
        }
        self.count += 1;
        (self.count <= MOST).then_some(left_out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_comes_again_and_again_is_left_out_and_counted() {
        let began = Instant::now();
        let mut lines = Lines { began, count: 0 };
        let written = (0..1000).filter(|_| lines.next(began).is_some()).count();
        assert_eq!(written as u64, MOST);
        assert_eq!(lines.next(began + WHILE), Some(1000 - MOST));
        assert_eq!(lines.next(began + WHILE), Some(0));
        assert_eq!(lines.next(began + 2 * WHILE), Some(0));
    }
}

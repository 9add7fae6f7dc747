//! The event lines of trace(3): exactly 121 bytes each.
//!
//! The caller selects the events. The columns follow the manual page, and its implementation in
//! 9atom's devtrace.c. They are `E` or `X`, then the program counter, the cycle counter, the
//! process id and four arguments. Each number is 16 lower-case hex digits with leading zeros, after
//! one space; a newline ends the line. A process id of all ones means no process. An exit line has
//! the return value as first argument, and zeros as the others.

use probes::event::{Event, EventKind};

/// The length of a line in bytes, newline included.
pub const LINE_BYTES: usize = 121;
/// The process id of a line without a process: in an interrupt, or on an idle CPU.
pub const NO_PROCESS: u64 = u64::MAX;

/// The numbers of a line: program counter, cycles, process, four arguments.
const NUMBERS: usize = 7;
/// The width of a column: a space and 16 digits.
const COLUMN: usize = 17;

const _: () = assert!(1 + NUMBERS * COLUMN + 1 == LINE_BYTES);

/// The kind of a line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LineKind {
    /// `E`: a function was entered.
    Entry,
    /// `X`: a function has returned.
    Exit,
}

/// The content of a line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TraceLine {
    /// `E` or `X`.
    pub kind: LineKind,
    /// The program counter.
    pub pc: u64,
    /// The cycle counter in ticks.
    pub ticks: u64,
    /// The process id.
    pub pid: u64,
    /// The arguments, or the return value and zeros.
    pub arguments: [u64; 4],
}

/// The reason that bytes are no line of trace(3).
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ParseLineError {
    /// The length is wrong.
    #[error("a trace line has {LINE_BYTES} bytes with its newline, this has {found}")]
    Length {
        /// The number of bytes.
        found: usize,
    },
    /// The first byte is wrong.
    #[error("a trace line starts with E or X, this with byte {found:#04x}")]
    Kind {
        /// The byte.
        found: u8,
    },
    /// A separator or a digit is wrong.
    #[error(
        "byte {found:#04x} in column {column}: a space, a lower-case hex digit or the newline belongs there"
    )]
    Byte {
        /// The column, from 0.
        column: usize,
        /// The byte.
        found: u8,
    },
}

impl TraceLine {
    /// Returns the line of an entry or a return; `None` for other events.
    #[must_use]
    pub fn of(event: &Event) -> Option<Self> {
        let kind = match event.kind {
            EventKind::Entry => LineKind::Entry,
            EventKind::Return => LineKind::Exit,
            EventKind::Point | EventKind::Tick => return None,
        };
        let mut arguments = [0; 4];
        for (place, argument) in arguments.iter_mut().zip(&event.arguments) {
            *place = *argument;
        }
        Some(Self {
            kind,
            pc: event.pc,
            ticks: event.tsc,
            pid: event.tid.map_or(NO_PROCESS, u64::from),
            arguments,
        })
    }

    /// Returns the line with its newline.
    #[must_use]
    pub fn to_bytes(&self) -> [u8; LINE_BYTES] {
        let mut line = [b' '; LINE_BYTES];
        let [a, b, c, d] = self.arguments;
        let numbers = [self.pc, self.ticks, self.pid, a, b, c, d];
        let [kind, columns @ .., newline] = &mut line;
        *kind = match self.kind {
            LineKind::Entry => b'E',
            LineKind::Exit => b'X',
        };
        for (column, number) in columns.chunks_exact_mut(COLUMN).zip(numbers) {
            for (place, digit) in column.iter_mut().skip(1).enumerate() {
                *digit = hex_digit((number >> (60 - 4 * place) & 0xf) as u8);
            }
        }
        *newline = b'\n';
        line
    }

    /// Parses a line.
    ///
    /// # Errors
    /// If these are not exactly the bytes of one.
    pub fn parse(line: &[u8]) -> Result<Self, ParseLineError> {
        let length = ParseLineError::Length { found: line.len() };
        let line: &[u8; LINE_BYTES] = line.try_into().map_err(|_| length)?;
        let [kind, columns @ .., newline] = line;
        let kind = match kind {
            b'E' => LineKind::Entry,
            b'X' => LineKind::Exit,
            found => return Err(ParseLineError::Kind { found: *found }),
        };
        let mut numbers = [0; NUMBERS];
        for (index, (bytes, number)) in columns.chunks_exact(COLUMN).zip(&mut numbers).enumerate() {
            for (place, byte) in bytes.iter().enumerate() {
                let column = 1 + index * COLUMN + place;
                let wrong = ParseLineError::Byte {
                    column,
                    found: *byte,
                };
                match (place, hex_value(*byte)) {
                    (0, _) if *byte == b' ' => {}
                    (1.., Some(value)) => *number = *number << 4 | u64::from(value),
                    _ => return Err(wrong),
                }
            }
        }
        if *newline != b'\n' {
            return Err(ParseLineError::Byte {
                column: LINE_BYTES - 1,
                found: *newline,
            });
        }
        let [pc, ticks, pid, arguments @ ..] = numbers;
        Ok(Self {
            kind,
            pc,
            ticks,
            pid,
            arguments,
        })
    }
}

fn hex_digit(value: u8) -> u8 {
    match value {
        0..=9 => b'0' + value,
        _ => b'a' + (value - 10),
    }
}

fn hex_value(digit: u8) -> Option<u8> {
    match digit {
        b'0'..=b'9' => Some(digit - b'0'),
        b'a'..=b'f' => Some(digit - b'a' + 10),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use LineKind::{Entry, Exit};

    /// The first two are the example of trace(3), where they are broken for the page's width.
    const LINES: [(LineKind, [u64; 7], &str); 4] = [
        (
            Entry,
            [
                0xffff_ffff_8016_c2c6,
                0x96_d201_1acb,
                0x57,
                0xffff_ffff_80a8_b2d8,
                0xffff_ffff_80a8_b2d8,
                0xffff_ffff_8016_d446,
                0xffff_ffff_80a7_c548,
            ],
            "E ffffffff8016c2c6 00000096d2011acb 0000000000000057 ffffffff80a8b2d8 \
             ffffffff80a8b2d8 ffffffff8016d446 ffffffff80a7c548\n",
        ),
        (
            Exit,
            [
                0xffff_ffff_8016_c306,
                0x96_d201_1c3c,
                0x57,
                0xffff_ffff_8025_1b38,
                0,
                0,
                0,
            ],
            "X ffffffff8016c306 00000096d2011c3c 0000000000000057 ffffffff80251b38 \
             0000000000000000 0000000000000000 0000000000000000\n",
        ),
        (
            Entry,
            [
                0,
                u64::MAX,
                u64::MAX,
                1,
                0x10,
                0x0123_4567_89ab_cdef,
                1 << 63,
            ],
            "E 0000000000000000 ffffffffffffffff ffffffffffffffff 0000000000000001 \
             0000000000000010 0123456789abcdef 8000000000000000\n",
        ),
        (
            Exit,
            [0; 7],
            "X 0000000000000000 0000000000000000 0000000000000000 0000000000000000 \
             0000000000000000 0000000000000000 0000000000000000\n",
        ),
    ];

    fn line(kind: LineKind, numbers: [u64; 7]) -> TraceLine {
        let [pc, ticks, pid, arguments @ ..] = numbers;
        TraceLine {
            kind,
            pc,
            ticks,
            pid,
            arguments,
        }
    }

    #[test]
    fn lines_have_the_bytes_of_the_manual_page_and_read_back() {
        for (kind, numbers, text) in LINES {
            let line = line(kind, numbers);
            assert_eq!(text.len(), LINE_BYTES);
            assert_eq!(std::str::from_utf8(&line.to_bytes()).unwrap(), text);
            assert_eq!(TraceLine::parse(text.as_bytes()), Ok(line));
        }
    }

    #[test]
    fn entries_and_returns_become_lines_and_other_events_none() {
        let event = |kind, tid, arguments: &[u64]| Event {
            probe: 9,
            kind,
            vcpu: 3,
            tsc: 2,
            pid: tid,
            tid,
            pc: 1,
            arguments: arguments.to_vec(),
            comm: None,
            kernel_stack: vec![7],
            user_stack: vec![8],
            strings: Vec::new(),
        };
        for (event, expected) in [
            (
                event(EventKind::Entry, Some(3), &[4, 5, 6, 7, 8, 9]),
                Some(line(Entry, [1, 2, 3, 4, 5, 6, 7])),
            ),
            (
                event(EventKind::Return, None, &[4]),
                Some(line(Exit, [1, 2, u64::MAX, 4, 0, 0, 0])),
            ),
            (event(EventKind::Point, Some(3), &[4]), None),
            (event(EventKind::Tick, Some(3), &[]), None),
        ] {
            assert_eq!(TraceLine::of(&event), expected, "{event:?}");
        }
    }

    #[test]
    fn other_bytes_are_told_with_their_column() {
        let good = LINES[0].2.as_bytes();
        for (column, found) in [
            (0, b'F'),
            (1, b'0'),
            (2, b'F'),
            (18, b'_'),
            (119, b' '),
            (120, b' '),
        ] {
            let mut bad = good.to_vec();
            bad[column] = found;
            let expected = match column {
                0 => ParseLineError::Kind { found },
                _ => ParseLineError::Byte { column, found },
            };
            assert_eq!(TraceLine::parse(&bad), Err(expected));
        }
        for length in [0, 120, 122] {
            let bytes = vec![b'E'; length];
            assert_eq!(
                TraceLine::parse(&bytes),
                Err(ParseLineError::Length { found: length })
            );
        }
    }
}

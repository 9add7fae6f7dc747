//! Writes the SVG of a picture.

use std::io::{self, Write};

use quick_xml::escape::escape;

use super::super::tasks::shown;
use super::super::trap::{Trap, system_call};
use super::{Mark, Row, Slice, State, Svg};
use crate::ptrace::record::STATE_NAMES;

/// The left edge of the bars, and their greatest width.
const LEFT: i64 = 190;
const WIDTH: i64 = 1200;
const MARGIN: i64 = 20;
/// The space above the rows: the title, and the axis with its labels.
const TOP: i64 = 56;
const AXIS: i64 = 44;
/// The height of a row, and within it marks, bar, marks.
const ROW: i64 = 20;
const BAR_FROM: i64 = 7;
const BAR: i64 = 6;
const MARK: i64 = 4;
/// The space below the rows, for the note on what is left out.
const BOTTOM: i64 = 30;
/// The greatest number of labelled parts of the axis.
const AXIS_PARTS: i64 = 10;

const STYLE: &str = "text{font:12px monospace;fill:#000}\
    .r{fill:#1f4fd8}.g{fill:#1f9d3a}.w{fill:#d8301f}.s{fill:#1f4fd8}.p{fill:#d8301f}.t{fill:#000}\
    .a{stroke:#ccc}.l{fill:#f4f4f4}";

/// Writes the picture.
pub(super) fn picture(all: &Svg, out: &mut dyn Write) -> io::Result<()> {
    let rows = i64::try_from(all.rows.len()).unwrap_or(0);
    let width = LEFT + WIDTH + MARGIN;
    let height = TOP + rows * ROW + BOTTOM;
    writeln!(
        out,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" viewBox=\"0 0 {width} {height}\">"
    )?;
    writeln!(out, "<style>{STYLE}</style>")?;
    writeln!(
        out,
        "<rect width=\"{width}\" height=\"{height}\" fill=\"#fff\"/>"
    )?;
    let (first, length) = (all.first, Duration(all.end));
    writeln!(
        out,
        "<text x=\"8\" y=\"18\">{length} from {first} ns since the epoch (clock realtime)</text>"
    )?;
    legend(out)?;
    axis(all, height, out)?;
    for (row, place) in all.rows.iter().zip(0..) {
        bar(all.end, row, TOP + place * ROW, out)?;
    }
    if all.left_out > 0 {
        let (left_out, y) = (all.left_out, height - 10);
        let text = format!("{left_out} records after that are left out");
        writeln!(out, "<text x=\"8\" y=\"{y}\">{text}</text>")?;
    }
    writeln!(out, "</svg>")
}

fn legend(out: &mut dyn Write) -> io::Result<()> {
    let entries = [
        ("r", "running"),
        ("g", "ready"),
        ("w", "waiting"),
        ("s", "system call"),
        ("p", "page fault"),
        ("t", "other trap"),
    ];
    for ((class, text), place) in entries.into_iter().zip(0..) {
        let x = LEFT + WIDTH - 690 + place * 115;
        let (height, y) = if place < 3 { (BAR, 10) } else { (MARK, 11) };
        let width = if place < 3 { 16 } else { MARK };
        writeln!(
            out,
            "<rect class=\"{class}\" x=\"{x}\" y=\"{y}\" width=\"{width}\" height=\"{height}\"/>\
             <text x=\"{}\" y=\"18\">{text}</text>",
            x + 20
        )?;
    }
    Ok(())
}

/// Writes a line and a label at round times.
fn axis(all: &Svg, height: i64, out: &mut dyn Write) -> io::Result<()> {
    let step = round_step(all.end);
    let (mut time, bottom) = (0, height - BOTTOM);
    while time <= all.end {
        let (x, label) = (place(time, all.end), Duration(time));
        writeln!(
            out,
            "<path class=\"a\" d=\"M{x} {AXIS}V{bottom}\"/><text x=\"{x}\" y=\"{}\" text-anchor=\"middle\">{label}</text>",
            AXIS - 4
        )?;
        let Some(next) = time.checked_add(step) else {
            break;
        };
        time = next;
    }
    Ok(())
}

/// Returns the least of 1, 2, 5, 10, 20... that divides `length` into at most so many parts.
fn round_step(length: i64) -> i64 {
    let least = length / AXIS_PARTS;
    let mut power: i64 = 1;
    loop {
        for factor in [1, 2, 5] {
            match power.checked_mul(factor) {
                Some(step) if step >= least.max(1) => return step,
                Some(_) => {}
                None => return i64::MAX,
            }
        }
        power = power.saturating_mul(10);
    }
}

/// Returns the position of a time, with three decimals.
fn place(time: i64, length: i64) -> Decimal {
    let part = i128::from(time) * i128::from(WIDTH) * 1000 / i128::from(length.max(1));
    Decimal(i128::from(LEFT) * 1000 + part)
}

fn bar(length: i64, row: &Row, top: i64, out: &mut dyn Write) -> io::Result<()> {
    let name = escaped(shown(row.name.as_deref()));
    let (pid, cpu, from) = (row.pid, row.cpu, top + BAR_FROM);
    writeln!(
        out,
        "<rect class=\"l\" x=\"{LEFT}\" y=\"{from}\" width=\"{WIDTH}\" height=\"{BAR}\"/>\
         <text x=\"8\" y=\"{}\">{name:<8} {pid} m{cpu}</text>",
        top + 14
    )?;
    for slice in &row.slices {
        part(length, slice, &name, pid, from, out)?;
    }
    for trap in &row.marks {
        mark(length, trap, top, out)?;
    }
    Ok(())
}

fn part(
    length: i64,
    slice: &Slice,
    name: &str,
    pid: u32,
    y: i64,
    out: &mut dyn Write,
) -> io::Result<()> {
    let (class, state) = match slice.state {
        State::Running => ("r", "running".to_owned()),
        State::Ready => ("g", "ready".to_owned()),
        State::Waiting(state) => {
            let state = STATE_NAMES.get(usize::from(state)).copied();
            ("w", format!("waiting ({})", state.unwrap_or("unknown")))
        }
    };
    let (from, to) = (place(slice.from, length), place(slice.to, length));
    // A slice that is too short to be seen is still a line.
    let width = Decimal((to.0 - from.0).max(100));
    let (cpu, at) = (slice.cpu, Duration(slice.from));
    let lasts = Duration(slice.to.saturating_sub(slice.from));
    writeln!(
        out,
        "<rect class=\"{class}\" x=\"{from}\" y=\"{y}\" width=\"{width}\" height=\"{BAR}\">\
         <title>{name} {pid} {state} for {lasts} at {at}, m{cpu}</title></rect>"
    )
}

fn mark(length: i64, mark: &Mark, top: i64, out: &mut dyn Write) -> io::Result<()> {
    let below = top + BAR_FROM + BAR + 1;
    let (class, y, what) = match Trap::of(mark.argument) {
        Trap::SystemCall { number } => ("s", top + BAR_FROM - MARK - 1, system_call(number)),
        Trap::Fault { address, write } => {
            let access = if write { "write" } else { "read" };
            ("p", below, format!("page fault, {access} of {address:#x}"))
        }
        Trap::Other { vector } => ("t", below, format!("trap {vector}")),
    };
    let (x, at) = (place(mark.time, length), Duration(mark.time));
    writeln!(
        out,
        "<rect class=\"{class}\" x=\"{x}\" y=\"{y}\" width=\"2\" height=\"{MARK}\"><title>{what} at {at}</title></rect>"
    )
}

/// A number in thousandths.
struct Decimal(i128);

impl std::fmt::Display for Decimal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{:03}", self.0 / 1000, self.0 % 1000)
    }
}

/// Nanoseconds, printed in the unit that suits them.
struct Duration(i64);

impl std::fmt::Display for Duration {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (unit, per) = match self.0 {
            ..1_000 => return write!(f, "{} ns", self.0),
            1_000..1_000_000 => ("µs", 1_000),
            1_000_000..1_000_000_000 => ("ms", 1_000_000),
            _ => ("s", 1_000_000_000),
        };
        let (whole, rest) = (self.0 / per, self.0 % per / (per / 1000));
        match rest {
            0 => write!(f, "{whole} {unit}"),
            _ => write!(f, "{whole}.{rest:03} {unit}"),
        }
    }
}

/// Returns text for XML 1.0, which cannot represent most control characters.
fn escaped(text: &str) -> String {
    let unfit = |c: char| c.is_control() || matches!(c, '\u{fffe}' | '\u{ffff}');
    escape(text.replace(unfit, "\u{fffd}")).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_axis_has_round_parts_and_few_of_them() {
        for (length, step) in [
            (0, 1),
            (9, 1),
            (10, 1),
            (100, 10),
            (101, 10),
            (199, 20),
            (3_000_000, 500_000),
            (i64::MAX, 1_000_000_000_000_000_000),
        ] {
            assert_eq!(round_step(length), step, "{length}");
        }
    }

    #[test]
    fn durations_have_their_unit() {
        for (ns, text) in [
            (0, "0 ns"),
            (999, "999 ns"),
            (1_000, "1 µs"),
            (1_234_567, "1.234 ms"),
            (90_000_000_000, "90 s"),
        ] {
            assert_eq!(Duration(ns).to_string(), text);
        }
    }

    #[test]
    fn names_cannot_leave_their_text() {
        let name = "</te\"xt>&\0\x1b\u{ffff}é";
        assert_eq!(
            escaped(name),
            "&lt;/te&quot;xt&gt;&amp;\u{fffd}\u{fffd}\u{fffd}é"
        );
    }
}

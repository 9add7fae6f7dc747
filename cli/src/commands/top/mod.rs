//! The command `exotrace top`: a live view of a guest's busiest processes, system calls, files and
//! connections, or of a script's maps.
//!
//! A view is a script of bt that prints its maps each second. On a terminal it is a table with
//! keys; elsewhere its first rows are printed each second.

mod feed;
mod screen;
mod table;
mod views;

use std::io::{self, IsTerminal, Write};
use std::net::Shutdown;
use std::time::{Duration, Instant};

use crate::args;
use crate::commands::remote::find;
use crate::commands::script::Source;
use crate::report::{Failure, ToOutput, printable};
use crate::signals::StopSignals;
use feed::{Event, Feed};
use table::{Order, rows, shown};
use views::View;

/// The time after which a wait looks whether it is over.
const STEP: Duration = Duration::from_millis(200);

/// Runs `exotrace top`.
///
/// # Errors
/// If the script is wrong, the machine refuses it, or the output cannot be written.
pub fn top(args: args::Top) -> Result<(), Failure> {
    let source = match (&args.program, &args.file) {
        (Some(text), _) => Some(Source::given(text)),
        (None, Some(file)) => Some(Source::read(file)?),
        (None, None) => None,
    };
    let view = match source {
        Some(source) => View::of_script(&source.text, &source.file).map_err(Failure::Shown)?,
        None => View::of(args.by),
    };
    let machine = find(args.which)?;
    let is_live = !args.plain && args.duration.is_none();
    if is_live && io::stdout().is_terminal() && io::stdin().is_terminal() {
        return screen::show(&machine, view);
    }
    let signals = StopSignals::watch()?;
    let feed = Feed::start(&machine, &view)?;
    let closing = feed.connection()?;
    signals.on_stop(move || {
        // A connection already closed is as good.
        let _ = closing.shutdown(Shutdown::Write);
    });
    let mut begun = None;
    loop {
        match feed.next(STEP) {
            Event::Tick(frame) => {
                let begun = *begun.get_or_insert_with(Instant::now);
                let rows = rows(&view, &frame, &Order::default());
                write(&view, &rows, args.lines).to_output()?;
                if args
                    .duration
                    .is_some_and(|most| begun.elapsed() + Duration::from_secs(1) > most)
                {
                    return Ok(());
                }
            }
            Event::None => {}
            Event::End(ended) => return ended,
        }
    }
}

/// Writes the first rows of a tick, with their titles, and an empty line.
fn write(view: &View, rows: &[table::Row], most: usize) -> io::Result<()> {
    let mut out = io::stdout().lock();
    let titles = view.keys.iter().map(|key| format!("{key:<16}"));
    let columns = view
        .columns
        .iter()
        .map(|column| format!("{:>12}", column.title));
    writeln!(out, "{}", titles.chain(columns).collect::<String>())?;
    for row in rows.iter().take(most) {
        let keys = row
            .key
            .iter()
            .map(|part| format!("{:<16}", printable(part)));
        let numbers = row.numbers.iter().zip(&view.columns);
        let numbers =
            numbers.map(|(number, column)| format!("{:>12}", shown(*number, &column.unit)));
        writeln!(out, "{}", keys.chain(numbers).collect::<String>())?;
    }
    writeln!(out)?;
    out.flush()
}

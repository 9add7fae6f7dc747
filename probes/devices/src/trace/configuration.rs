//! The text of a read of `tracectl`: lines that can be written back, and comments with counts.

use std::fmt::Write;

use super::device::{DeviceCounts, Trace};

/// The number of functions of a trace that are listed.
const LISTED: usize = 32;

/// The state to report.
pub(super) struct ConfigText<'a> {
    pub(super) entries: usize,
    pub(super) traces: &'a [Trace],
    pub(super) watched: &'a [u32],
    pub(super) all: bool,
    pub(super) active: bool,
    pub(super) counts: DeviceCounts,
}

impl ConfigText<'_> {
    pub(super) fn text(&self) -> String {
        let mut text = String::new();
        // Writing to a `String` never fails.
        let _ = self.write(&mut text);
        text
    }

    fn write(&self, text: &mut String) -> std::fmt::Result {
        writeln!(text, "logsize {}", self.entries)?;
        for trace in self.traces {
            let name = quoted(&trace.name);
            writeln!(
                text,
                "trace {:016x} {:016x} new {name}",
                trace.start, trace.end
            )?;
            for function in trace.functions.iter().take(LISTED) {
                writeln!(
                    text,
                    "#  tracept E {:016x} {}",
                    function.address, function.name
                )?;
            }
            let more = trace.functions.len().saturating_sub(LISTED);
            if more > 0 {
                writeln!(text, "#  and {more} more")?;
            }
            for refused in trace.refused.iter().take(LISTED) {
                writeln!(text, "#  not traced: {refused}")?;
            }
            writeln!(
                text,
                "#trace {:016x} traced? {}",
                trace.start,
                u8::from(trace.on)
            )?;
            if trace.on {
                writeln!(text, "trace {name} on")?;
            }
        }
        for pid in self.watched {
            writeln!(text, "watch {pid}")?;
        }
        match (self.all, self.active) {
            (true, _) => writeln!(text, "all")?,
            (false, true) => writeln!(text, "start")?,
            (false, false) => {}
        }
        let counts = &self.counts;
        writeln!(
            text,
            "#tracehits {}, in queue {}",
            counts.entries + counts.exits,
            counts.waiting
        )?;
        writeln!(text, "#traceactive {}", u8::from(self.active))?;
        writeln!(text, "#traceinhits {}", counts.entries)?;
        writeln!(text, "#traceouthits {}", counts.exits)?;
        writeln!(text, "#tracelost {}", counts.lost)
    }
}

/// Returns a name as commands accept it.
fn quoted(name: &str) -> String {
    match name.is_empty() || name.contains(char::is_whitespace) {
        true => format!("'{name}'"),
        false => name.to_owned(),
    }
}

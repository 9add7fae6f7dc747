//! The messages about expectations on standard error.

use super::report::{Report, Verdict};
use crate::report::{printable, say, show};

/// Prints the verdicts: a table if one fails, and the known facts of a crash.
pub fn tell(report: &Report) {
    let count = report.expectations.len();
    let plural = if count == 1 { "" } else { "s" };
    match report.passed {
        true => say(format_args!(
            "{count} expectation{plural} met in {:.1} s",
            report.seconds
        )),
        false => {
            say(format_args!(
                "expected and seen in {:.1} s ({}):",
                report.seconds, report.end.text
            ));
            show(table(&report.expectations).as_bytes());
        }
    }
    let Some(crash) = &report.crash else {
        return;
    };
    for (title, lines) in [
        ("the console's last lines", report.console.clone()),
        ("the kernel's stack, innermost first", crash.stack_lines()),
        ("the last events", report.event_lines()),
    ] {
        let none = if lines.is_empty() { ": none" } else { ":" };
        say(format_args!("{title}{none}"));
        let lines: String = lines.iter().map(|line| format!("  {line}\n")).collect();
        show(lines.as_bytes());
    }
}

/// Returns a line for each expectation.
fn table(expectations: &[Verdict]) -> String {
    let rows: Vec<[String; 4]> = expectations
        .iter()
        .map(|judged| {
            [
                judged.word().to_owned(),
                printable(&judged.expected.rule()),
                judged.expected.bound(),
                judged.seen.map_or("-".to_owned(), |seen| seen.to_string()),
            ]
        })
        .collect();
    let width = |column: usize, least: &str| {
        let cells = rows.iter().filter_map(|row| row.get(column));
        let widest = cells.map(|cell| cell.chars().count()).max();
        widest.unwrap_or_default().max(least.len())
    };
    let widths = [width(0, ""), width(1, "probe"), width(2, "expected")];
    let header = ["", "probe", "expected", "seen"].map(str::to_owned);
    let lines = [&header].into_iter().chain(&rows);
    let lines = lines.map(|[word, rule, bound, seen]| {
        let [w, r, b] = widths;
        let line = format!("  {word:w$}  {rule:r$}  {bound:b$}  {seen}");
        line.trim_end().to_owned() + "\n"
    });
    lines.collect()
}

//! The report as JUnit's XML, as CI systems read it: a test case for each expectation and one for
//! the guest's health.

use probes::bt::ast::Dialect;
use probes::bt::time::{TimeFormat, Zone};

use super::xml::{attribute, escape};
use super::{EndKind, Report, Verdict};

/// A test case.
struct Case {
    name: String,
    class: &'static str,
    /// The kind, message and details of a `failure` (the guest misbehaved) or an `error` (the
    /// result is unknown).
    outcome: Option<(&'static str, &'static str, String, String)>,
}

/// Returns the document.
pub fn render(report: &Report) -> String {
    let mut cases: Vec<Case> = report
        .expectations
        .iter()
        .map(|judged| of_expectation(judged, report))
        .collect();
    cases.push(of_guest(report));
    if !report.end.kind.is_whole() && report.crash.is_none() {
        cases.push(Case {
            name: "run was whole".to_owned(),
            class: "exotrace.run",
            outcome: Some(("error", "run", report.end.text.clone(), String::new())),
        });
    }
    let count = |kind: &str| {
        let of_kind = |case: &&Case| case.outcome.as_ref().is_some_and(|(k, ..)| *k == kind);
        cases.iter().filter(of_kind).count().to_string()
    };
    let seconds = format!("{:.3}", report.seconds);
    let mut totals = String::new();
    attribute(&mut totals, "tests", &cases.len().to_string());
    attribute(&mut totals, "failures", &count("failure"));
    attribute(&mut totals, "errors", &count("error"));
    attribute(&mut totals, "time", &seconds);

    let mut xml = "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n".to_owned();
    xml += &format!("<testsuites name=\"exotrace\"{totals}>\n  <testsuite");
    attribute(
        &mut xml,
        "name",
        &format!("exotrace run {}", report.machine),
    );
    xml += &totals;
    xml += " skipped=\"0\"";
    if let Some(time) = timestamp(report.began_unix_ns) {
        attribute(&mut xml, "timestamp", &time);
    }
    xml += ">\n";
    for case in &cases {
        put(&mut xml, case, &seconds);
    }
    if !report.console.is_empty() {
        let console = escape(&report.console.join("\n"));
        xml += &format!("    <system-out>{console}\n</system-out>\n");
    }
    xml + "  </testsuite>\n</testsuites>\n"
}

fn put(xml: &mut String, case: &Case, seconds: &str) {
    *xml += "    <testcase";
    attribute(xml, "classname", case.class);
    attribute(xml, "name", &case.name);
    attribute(xml, "time", seconds);
    let Some((element, kind, message, more)) = &case.outcome else {
        *xml += "/>\n";
        return;
    };
    *xml += &format!(">\n      <{element}");
    attribute(xml, "type", kind);
    attribute(xml, "message", message);
    *xml += &format!(">{}</{element}>\n    </testcase>\n", escape(more));
}

fn of_expectation(judged: &Verdict, report: &Report) -> Case {
    let outcome = match (judged.seen, judged.holds) {
        (_, true) => None,
        (Some(seen), false) => {
            let message = format!("expected {}, seen {seen}", judged.expected.bound());
            Some((
                "failure",
                "count",
                message,
                format!("{}\n", judged.expected.rule()),
            ))
        }
        (None, false) => {
            let message = format!("not counted: {}", report.end.text);
            Some(("error", "run", message, String::new()))
        }
    };
    Case {
        name: judged.expected.text.clone(),
        class: "exotrace.expect",
        outcome,
    }
}

fn of_guest(report: &Report) -> Case {
    let outcome = report.crash.as_ref().map(|crash| {
        let kind = match report.end.kind {
            EndKind::Panic => "panic",
            _ => "crash",
        };
        let trace = ("Last lines of the trace:", report.trace.clone());
        let trace = Some(trace).filter(|(_, lines)| !lines.is_empty());
        let mut more = String::new();
        for (title, lines) in [
            ("Kernel stack, innermost first:", crash.stack_lines()),
            ("Last lines of the console:", report.console.clone()),
            ("Last events:", report.event_lines()),
        ]
        .into_iter()
        .chain(trace)
        {
            more += &format!("{title}\n");
            more.extend(lines.iter().map(|line| format!("  {line}\n")));
        }
        ("failure", kind, crash.message.clone(), more)
    });
    Case {
        name: "guest did not panic".to_owned(),
        class: "exotrace.guest",
        outcome,
    }
}

/// Formats a time by ISO 8601, in UTC.
fn timestamp(unix_ns: u64) -> Option<String> {
    let format = TimeFormat::parse(b"%Y-%m-%dT%H:%M:%SZ", Dialect::Normal, &Zone::utc()).ok()?;
    let time = format.render(i64::try_from(unix_ns).ok()?);
    String::from_utf8(time).ok()
}

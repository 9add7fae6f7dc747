//! The report as JUnit's XML, as CI systems read it: a test case for each expectation and one for
//! the guest's health.

use std::io;

use bt::ast::Dialect;
use bt::time::{TimeFormat, Zone};
use quick_xml::events::{BytesDecl, BytesText, Event};
use quick_xml::writer::Writer;

use super::{EndKind, Report, Verdict};

/// A test case.
struct Case {
    name: String,
    class: &'static str,
    /// The kind, message and details of a `failure` (the guest misbehaved) or an `error` (the
    /// result is unknown).
    outcome: Option<(&'static str, &'static str, String, String)>,
}

/// Returns the document. U+FFFD stands for a character that XML cannot hold.
///
/// # Errors
/// Never: memory takes every write.
pub fn render(report: &Report) -> io::Result<String> {
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
    let name = format!("exotrace run {}", report.machine);
    let seconds = format!("{:.3}", report.seconds);
    let (tests, failures, errors) = (cases.len().to_string(), count("failure"), count("error"));
    let totals = [
        ("tests", &*tests),
        ("failures", &*failures),
        ("errors", &*errors),
        ("time", &*seconds),
    ];
    let time = timestamp(report.began_unix_ns);

    let mut xml = Writer::new_with_indent(Vec::new(), b' ', 2);
    xml.write_event(Event::Decl(BytesDecl::new("1.0", Some("UTF-8"), None)))?;
    let suites = xml
        .create_element("testsuites")
        .with_attribute(("name", "exotrace"))
        .with_attributes(totals);
    suites.write_inner_content(|xml| {
        let suite = xml
            .create_element("testsuite")
            .with_attribute(("name", &*name))
            .with_attributes(totals)
            .with_attribute(("skipped", "0"))
            .with_attributes(time.as_deref().map(|time| ("timestamp", time)));
        suite.write_inner_content(|xml| {
            for case in &cases {
                put(xml, case, &seconds)?;
            }
            if !report.console.is_empty() {
                let console = report.console.join("\n") + "\n";
                let output = xml.create_element("system-out");
                output.write_text_content(BytesText::new(&console))?;
            }
            Ok(())
        })?;
        Ok(())
    })?;
    let text = xml.into_inner();
    let text = String::from_utf8_lossy(&text).replace(|c| !is_allowed(c), "\u{fffd}");
    Ok(text + "\n")
}

fn put(xml: &mut Writer<Vec<u8>>, case: &Case, seconds: &str) -> io::Result<()> {
    let element = xml.create_element("testcase").with_attributes([
        ("classname", case.class),
        ("name", &case.name),
        ("time", seconds),
    ]);
    let Some((outcome, kind, message, more)) = &case.outcome else {
        return element.write_empty().map(drop);
    };
    let outcome = |xml: &mut Writer<Vec<u8>>| {
        xml.create_element(*outcome)
            .with_attributes([("type", *kind), ("message", message)])
            .write_text_content(BytesText::new(more))
            .map(drop)
    };
    element.write_inner_content(outcome).map(drop)
}

/// Checks for the characters of XML 1.0, section 2.2.
fn is_allowed(c: char) -> bool {
    matches!(c, '\t' | '\n' | '\r' | '\u{20}'..='\u{d7ff}' | '\u{e000}'..='\u{fffd}' | '\u{10000}'..)
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

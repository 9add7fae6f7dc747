//! The parser of `PROBE[/PREDICATE/][>=N]`, and of the same without a count.
//!
//! The count follows the last slash and the last quotation mark, so that a predicate and a quoted
//! name may contain `>`. The script language defines where the predicate begins: `/` begins one
//! unless it belongs to a path. A path follows a colon and begins with `/` or `.` (a blank tells a
//! predicate from it: `pid22:libc.so.6:malloc: /arg0 > 1/`). So `uprobe:/bin/busybox:main/pid > 1/`
//! has the predicate `pid > 1`.

use bt::ast::{Dialect, ProbeKind, Script};
use bt::parse::parse;
use probes::name::{PatternError, ProbePattern};

use super::{Comparison, Expectation, Point};

/// The characters of comparisons.
const OPERATORS: [char; 4] = ['>', '<', '=', '!'];

/// The text is not an expectation.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ParseError {
    /// There is no valid comparison.
    #[error("unknown comparison {found:?}: expected >=, ==, <=, > or <")]
    Operator {
        /// The text in its place.
        found: String,
    },
    /// There is no valid number after the comparison.
    #[error("invalid count {found:?}: expected a number, such as {operator}5")]
    Number {
        /// The text in its place.
        found: String,
        /// The comparison.
        operator: String,
    },
    /// The bound holds always or never.
    #[error("{bound} {outcome}, whatever the guest does")]
    Empty {
        /// The bound.
        bound: String,
        /// The outcome.
        outcome: &'static str,
    },
    /// The script language rejects the probe or its predicate.
    #[error("{message}; write PROBE, PROBE/PREDICATE/ or one of these followed by a count")]
    Rule {
        /// The message.
        message: String,
    },
    /// There are several probes.
    #[error("{found} probes; write an --expect for each")]
    Probes {
        /// The number of probes.
        found: usize,
    },
    /// The probe is not one of the guest's.
    #[error("{name} is not a probe of the guest")]
    OwnProbe {
        /// Its name.
        name: String,
    },
    /// The probe's name is invalid.
    #[error(transparent)]
    Pattern(#[from] PatternError),
}

impl Expectation {
    /// Parses an expectation.
    ///
    /// # Errors
    /// The fault in the text. Whether the guest has such a probe is known only once it runs.
    pub fn parse(text: &str) -> Result<Self, ParseError> {
        let (rule, comparison, number) = split_count(text)?;
        let (probe, predicate) = split_rule(rule)?;
        let expectation = Self {
            text: text.trim().to_owned(),
            probe: entry_of(probe)?,
            predicate,
            comparison,
            number,
        };
        // A name with an open quotation mark has swallowed the text after it.
        split_rule(&expectation.rule())?;
        Ok(expectation)
    }

    /// Returns the rule without its actions.
    pub fn rule(&self) -> String {
        rule_of(&self.probe, self.predicate.as_deref())
    }
}

impl Point {
    /// Parses a point.
    ///
    /// # Errors
    /// The fault in the text.
    pub fn parse(text: &str) -> Result<Self, ParseError> {
        let (probe, predicate) = split_rule(text)?;
        let point = Self {
            probe: entry_of(probe)?,
            predicate,
        };
        split_rule(&point.rule())?;
        Ok(point)
    }

    /// Returns the rule without its actions.
    pub fn rule(&self) -> String {
        rule_of(&self.probe, self.predicate.as_deref())
    }
}

fn rule_of(probe: &str, predicate: Option<&str>) -> String {
    match predicate {
        Some(predicate) => format!("{probe} /{predicate}/"),
        None => probe.to_owned(),
    }
}

/// Splits the text from the count.
fn split_count(text: &str) -> Result<(&str, Comparison, u64), ParseError> {
    let behind = text.rfind(['/', '"']).map_or(0, |at| at + 1);
    let (_, tail) = text.split_at(behind);
    let Some(at) = tail.find(OPERATORS) else {
        return Ok((text, Comparison::AtLeast, 1));
    };
    let (rule, count) = text.split_at(behind + at);
    let digits = count.trim_start_matches(OPERATORS);
    let operator = count.strip_suffix(digits).unwrap_or_default();
    let comparison = match operator {
        ">=" => Comparison::AtLeast,
        ">" => Comparison::More,
        "==" => Comparison::Exactly,
        "<=" => Comparison::AtMost,
        "<" => Comparison::Fewer,
        other => {
            let found = other.to_owned();
            return Err(ParseError::Operator { found });
        }
    };
    let number = digits.trim().parse().map_err(|_| ParseError::Number {
        found: digits.trim().to_owned(),
        operator: operator.to_owned(),
    })?;
    let empty = |outcome| ParseError::Empty {
        bound: format!("{operator}{number}"),
        outcome,
    };
    match (comparison, number) {
        (Comparison::AtLeast, 0) | (Comparison::AtMost, u64::MAX) => Err(empty("always holds")),
        (Comparison::Fewer, 0) | (Comparison::More, u64::MAX) => Err(empty("never holds")),
        _ => Ok((rule, comparison, number)),
    }
}

/// Splits the probe from the predicate by the script language.
fn split_rule(rule: &str) -> Result<(&str, Option<String>), ParseError> {
    let wrong = |message: String| ParseError::Rule { message };
    if rule.trim().is_empty() {
        return Err(wrong("no probe".to_owned()));
    }
    // On a line of its own, out of reach of a comment after the probe.
    let script = parse(format!("{rule}\n{{ }}").as_bytes(), Dialect::Normal);
    let Script {
        rules,
        translators,
        structures,
        macros,
        enums,
        map_sizes,
        // An expectation has no maps of its own to print, and reads texts of the usual length.
        omits_maps: _,
        most_entries: _,
        longest_text: _,
        longest_file: _,
        lines: _,
        notes: _,
        stack_form: _,
        // Its one probe has to exist.
        missing_probes: _,
    } = script.map_err(|found| {
        let messages = found.into_iter().map(|diagnostic| diagnostic.message);
        let messages = messages.collect::<Vec<_>>().join("; ");
        // The brace was added here.
        let messages = messages.replace("found '{'", "found the end");
        wrong(messages.replace("expected '{' and actions", "expected the end"))
    })?;
    let [parsed] = rules.as_slice() else {
        return Err(wrong(format!("{} rules of a script", rules.len())));
    };
    let has_definitions = !(translators.is_empty()
        && structures.is_empty()
        && macros.is_empty()
        && enums.is_empty()
        && map_sizes.is_empty());
    if has_definitions {
        return Err(wrong("definitions of a script".to_owned()));
    }
    let [probe] = parsed.probes.as_slice() else {
        let found = parsed.probes.len();
        return Err(ParseError::Probes { found });
    };
    let name = rule.get(probe.span.start..probe.span.end);
    let name = name.ok_or_else(|| wrong("no probe".to_owned()))?;
    if !matches!(probe.kind, ProbeKind::Pattern(_)) {
        let name = name.to_owned();
        return Err(ParseError::OwnProbe { name });
    }
    let behind = rule.get(probe.span.end..).unwrap_or_default().trim();
    if parsed.filter.is_none() {
        return match behind {
            "" => Ok((name, None)),
            more => Err(wrong(format!("{more:?} after the probe"))),
        };
    }
    let predicate = behind.strip_prefix('/').and_then(|p| p.strip_suffix('/'));
    let predicate = predicate.ok_or_else(|| {
        wrong(format!(
            "invalid predicate {behind:?}: expected it between slashes"
        ))
    })?;
    Ok((name, Some(predicate.trim().to_owned())))
}

/// Completes a name without entry or return by the entry, so that a call is one hit.
fn entry_of(name: &str) -> Result<String, PatternError> {
    let pattern = ProbePattern::parse(&name.replace('"', ""))?;
    let of_functions = matches!(
        pattern.provider.as_str(),
        "" | "kprobe" | "syscall" | "uprobe"
    ) || pattern.provider.starts_with("pid");
    if !(of_functions && pattern.name.is_empty()) {
        return Ok(name.to_owned());
    }
    // The last part of three or more is the name, and empty here, unless it is a function
    // (`syscall::read`).
    let colons = name.matches(':').count();
    let head = match colons {
        4.. => name.rsplit_once(':').map_or(name, |(head, _)| head),
        _ => name,
    };
    let head = head.trim_end();
    let completed = match colons {
        0 => format!("kprobe:{name}:entry"),
        1 => format!("{name}:entry"),
        _ if head.trim_end_matches('"').ends_with(':') => format!("{head}entry"),
        _ => format!("{head}:entry"),
    };
    // It is longer now, perhaps too long.
    ProbePattern::parse(&completed.replace('"', ""))?;
    Ok(completed)
}

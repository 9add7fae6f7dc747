//! The command `exotrace trace` with a script: sends its text to the machine and prints its output.

use std::fs;
use std::io::{self, Read, Write};
use std::path::Path;

use bt::ast::{Expression, ExpressionKind, Function, ProbeKind, Script};
use bt::library::{SCRIPTS, about, needs};
use bt::{differences, walk};

use super::exporting::Exports;
#[cfg(not(feature = "export"))]
use super::exporting::Labels;
use super::guest;
use super::inspect;
use super::remote::find;
use super::run::{tell_cost, tell_given_up};
use super::trace::{Lines, start, tell_skipped};
use crate::args::{self, Format};
#[cfg(feature = "export")]
use crate::export::labels::labels;
use crate::inspection::InspectedGuest;
use crate::output_file::Output;
use crate::output_file::{OutputFile, kept_output};
use crate::protocol::control::Command;
use crate::protocol::end::MachineEnd;
use crate::protocol::script::Counts;
use crate::protocol::script::Line;
use crate::protocol::script::{Form, ScriptRequest};
use crate::protocol::trace::Request;
use crate::report::{Failure, ToOutput, say, show};
use crate::script_library as library;
use crate::scripting::{Rendered, run_alone, run_over};
use crate::tracing::waits;

/// The longest script, in bytes.
const LONGEST: u64 = 1 << 20;
/// The name in messages of a script given with -e.
const NAME: &str = "exotrace";

/// A script and its arguments.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Source {
    /// The script's text.
    pub text: String,
    /// The script's name in messages.
    pub file: String,
    /// The values of `$1` and so on.
    pub arguments: Vec<String>,
}

impl Source {
    /// Returns the script that a command line selects; `None` if it names probes.
    ///
    /// # Errors
    /// If its file cannot be read, or a script stands where its file belongs.
    pub fn of(program: Option<&str>, what: &[String]) -> Result<Option<Self>, Failure> {
        let (source, arguments) = match (program, what) {
            (Some(text), arguments) => (Self::given(text), arguments),
            (None, [file, arguments @ ..]) if is_script(file) => (Self::read(file)?, arguments),
            (None, [text, ..]) if text.contains('{') => {
                let wrong =
                    format!("{text:?} is a script, not the name of a probe: give it with -e");
                return Err(Failure::Usage(wrong));
            }
            (None, _) => return Ok(None),
        };
        Ok(Some(Self {
            arguments: arguments.to_vec(),
            ..source
        }))
    }

    /// Returns the script on the command line itself.
    pub fn given(text: &str) -> Self {
        Self {
            text: text.to_owned(),
            file: NAME.to_owned(),
            arguments: Vec::new(),
        }
    }

    /// Reads the script from a file, or from standard input for `-`.
    ///
    /// # Errors
    /// If it cannot be read, or is too long.
    pub fn read(name: &str) -> Result<Self, Failure> {
        let failed = |error: io::Error| Failure::new(format_args!("script {name}: {error}"));
        // A ready script is found by its name alone unless there is a file of that name.
        if let (Some(text), false) = (ready(name), Path::new(name).exists()) {
            return Ok(Self {
                text: text.to_owned(),
                file: name.to_owned(),
                arguments: Vec::new(),
            });
        }
        let mut bytes = Vec::new();
        match name {
            "-" => io::stdin().take(LONGEST + 1).read_to_end(&mut bytes),
            path => fs::File::open(path)
                .map_err(failed)?
                .take(LONGEST + 1)
                .read_to_end(&mut bytes),
        }
        .map_err(failed)?;
        if bytes.len() as u64 > LONGEST {
            return Err(Failure::new(format_args!(
                "script {name}: more than {LONGEST} bytes; is it a script?"
            )));
        }
        let text = String::from_utf8(bytes).map_err(|error| {
            let at = error.utf8_error().valid_up_to();
            Failure::new(format_args!(
                "script {name}: invalid UTF-8 at byte {at}; is it a script?"
            ))
        })?;
        Ok(Self {
            text,
            file: name.to_owned(),
            arguments: Vec::new(),
        })
    }
}

/// Returns the advice to run a ready script, if one of `words` is its name without the `.bt`.
pub(super) fn ready_script(words: &[String]) -> Option<String> {
    let file = |word: &String| format!("{word}.bt");
    let found = words.iter().map(file).find(|file| ready(file).is_some());
    found.map(|file| format!("the ready script of this name is run by: exotrace trace {file}"))
}

/// Returns the text of a script that comes with exotrace.
fn ready(name: &str) -> Option<&'static str> {
    let found = SCRIPTS.iter().find(|(known, _)| *known == name);
    found.map(|(_, text)| *text)
}

/// Runs `exotrace scripts`: prints the ready scripts, a line each, or the text of one.
///
/// # Errors
/// If there is none of this name.
pub fn scripts(args: &args::Scripts) -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    let Some(name) = &args.name else {
        for (name, text) in SCRIPTS {
            let about = about(text);
            let about = about.split_once(" - ").map_or(about, |(_, about)| about);
            let needs = needs(text).map(|needs| format!(" (needs {needs})"));
            writeln!(out, "{name:16} {about}{}", needs.unwrap_or_default()).to_output()?;
        }
        return Ok(());
    };
    let text = ready(name).or_else(|| ready(&format!("{name}.bt")));
    match text {
        Some(text) => out.write_all(text.as_bytes()).to_output(),
        None => {
            let known: Vec<&str> = SCRIPTS.iter().map(|(known, _)| *known).collect();
            let known = known.join(", ");
            Err(Failure::new(format_args!(
                "no script {name:?}; there are {known}"
            )))
        }
    }
}

/// Checks whether a word of the command line is a script's file, not a probe.
fn is_script(word: &str) -> bool {
    let path = Path::new(word);
    word == "-"
        || path.extension().is_some_and(|ending| ending == "bt")
        || (word.contains('/') && path.is_file())
}

/// Returns a script's output form for a format.
pub fn form(format: Option<Format>) -> Form {
    match format {
        Some(Format::Json) => Form::Json,
        Some(Format::Collapsed) => Form::Collapsed,
        // A table is refused before.
        _ => Form::Text,
    }
}

/// Runs a script.
///
/// # Errors
/// If the script is faulty, the machine refuses, or the output cannot be written.
pub fn run(args: args::Trace, source: Source) -> Result<(), Failure> {
    let mut texts = Vec::new();
    for folder in &args.library {
        texts.extend(library::read(folder)?);
    }
    let mut request = ScriptRequest {
        text: source.text,
        file: source.file,
        arguments: source.arguments,
        strict: args.strict,
        library: texts,
        longest_text: args.strlen.into(),
        whose: Request {
            follow: args.follow,
            tids: args.tids.clone(),
            comms: args.comms.clone(),
            one_in: args.one_in,
            per_second: args.per_second,
            budget: args.budget,
            ..Request::default()
        },
        form: form(args.format),
    };
    // Faults of the text are reported without a machine.
    let script = request
        .parse()
        .map_err(|wrong| Failure::Own(wrong.message))?;
    if args.parse_only {
        let notes = match args.strict {
            true => Vec::new(),
            false => differences(&script),
        };
        for note in notes {
            let shown = note.render(&request.file, request.text.as_bytes());
            eprint!("warning: {shown}");
        }
        return Ok(());
    }
    let mut file = args.output.as_deref().map(OutputFile::open).transpose()?;
    if !needs_guest(&script) {
        if let [wrong, ..] = *args.exports.given() {
            let wrong = format!("{wrong}: not for a script without probes");
            return Err(Failure::Usage(wrong));
        }
        match run_alone(&script, &request) {
            Ok((Rendered { out, err }, status)) => {
                put(&mut kept_output(file.as_mut())?, &out, &err)?;
                return with_status(status);
            }
            // A guest may have the types that it names.
            Err(_) if guest::is_there(&args.guest) => {}
            Err(wrong) => return Err(Failure::refused(wrong)),
        }
    }
    request.whose.pids = inspect::pids(&args.guest, &args.processes)?;
    let ran = guest::read(&args.guest, |saved| {
        run_over(&InspectedGuest::new(saved)?, &script, &request)
    })?;
    if let Some((read, (Rendered { out, err }, status))) = ran {
        read.tell();
        put(&mut kept_output(file.as_mut())?, &out, &err)?;
        return with_status(status);
    }
    let machine = find(args.guest.which)?;
    #[cfg(feature = "export")]
    let labels = labels(&script, &request.text);
    #[cfg(not(feature = "export"))]
    let labels = Labels::new();
    let exports = Exports::start(&args.exports, &machine, labels)?;
    request.whose.interval_ms = exports.interval_ms();
    let (lines, _signals) = start(&machine, &Command::Script(request), args.duration)?;
    let output = kept_output(file.as_mut())?;
    follow(lines, output, exports, args.verbose > 0)
}

/// Checks whether a script has rules for a guest, or asks for its files, symbols or control groups.
fn needs_guest(script: &Script) -> bool {
    let mut specs = script.rules.iter().flat_map(|rule| &rule.probes);
    let mut asks = false;
    let mut each = |expression: &Expression| {
        if let ExpressionKind::Call(call) = &expression.kind {
            asks |= matches!(
                call.function,
                Function::Cat
                    | Function::KernelAddress
                    | Function::KernelSymbol
                    | Function::CgroupId
                    | Function::CgroupPath
            );
        }
    };
    for rule in &script.rules {
        walk::of_rule(rule, &mut |outer| walk::below(outer, &mut each));
    }
    asks || specs.any(|spec| !matches!(spec.kind, ProbeKind::Begin | ProbeKind::End))
}

/// Prints the output until the machine ends the script.
fn follow(
    mut lines: Lines,
    mut output: Output,
    mut exports: Exports,
    verbose: bool,
) -> Result<(), Failure> {
    loop {
        match lines.next()? {
            Line::Begin {
                probes,
                skipped,
                open,
            } => {
                lines.begun()?;
                tell_skipped(&skipped);
                open.iter().for_each(|pattern| say(waits(pattern)));
                tell_attached(probes.len());
            }
            Line::Output { out, err } => put(&mut output, out.as_bytes(), err.as_bytes())?,
            Line::Counts { counts } => exports.script_counts(&counts),
            Line::Map(map) => exports.map(map),
            Line::End { counts, machine } => {
                exports.script_counts(&counts);
                tell(&counts, verbose);
                tell_cost(&counts.cost, &counts.unwatched);
                exports.finish();
                MachineEnd::report(machine.as_ref())?;
                return with_status(counts.exit_status);
            }
            Line::Refused(error) => return Err(Failure::refused(error)),
        }
    }
}

/// Ends the command with a script's own status.
fn with_status(status: u8) -> Result<(), Failure> {
    match status {
        0 => Ok(()),
        status => Err(Failure::Status(status)),
    }
}

/// Reports the number of probes that a script has attached.
pub fn tell_attached(count: usize) {
    let plural = if count == 1 { "" } else { "s" };
    say(format_args!("attached {count} probe{plural}"));
}

/// Reports a script's counts. Losses are always reported.
pub fn tell(counts: &Counts, verbose: bool) {
    if verbose {
        say(format_args!(
            "{} events read, {} filtered, {} ticks joined",
            counts.ran, counts.filtered, counts.joined_ticks
        ));
        for (name, hits) in counts.each.iter().filter(|(_, hits)| *hits > 0) {
            say(format_args!("{hits:>10} {name}"));
        }
    }
    for (count, what) in [
        (
            counts.lost_output,
            "pieces of output were lost: they were not read in time",
        ),
        (counts.lost_values, "values found no room in a map"),
        (
            counts.divisions_by_zero,
            "divisions by zero gave 1 (0 with --strict)",
        ),
        (counts.lost_moments, "moments of the machine were not kept"),
        (
            counts.endless,
            "runs of a rule took too long and were ended",
        ),
    ] {
        if count > 0 {
            say(format_args!("{count} {what}"));
        }
    }
    tell_given_up(&counts.given_up);
    if counts.failed_fields > 0 {
        let count = counts.failed_fields;
        say(format_args!(
            "{count} reads of tracepoints' fields gave 0: the kernel's code for them could not be followed"
        ));
    }
    if verbose && counts.failed_reads > 0 {
        let count = counts.failed_reads;
        say(format_args!(
            "{count} reads of memory that was not there gave 0"
        ));
    }
}

/// Writes a script's output.
fn put(output: &mut Output, out: &[u8], err: &[u8]) -> Result<(), Failure> {
    let written = output.write_all(out).and_then(|()| output.flush());
    written.to_output()?;
    show(err);
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_script_is_told_from_probes() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let own = file.path().to_str().unwrap();
        for (word, expected) in [
            ("-", true),
            ("opensnoop.bt", true),
            (own, true),
            ("vfs_read", false),
            ("uprobe:/bin/busybox:main", false),
            ("syscall:::", false),
        ] {
            assert_eq!(is_script(word), expected, "{word}");
        }
        let of = |word: &str| Source::of(None, &[word.to_owned()]);
        assert!(matches!(of("vfs_read"), Ok(None)));
        assert!(matches!(
            of("vfs_read { @ = count(); }"),
            Err(Failure::Usage(_))
        ));
        let advised = |word: &str| ready_script(&[word.to_owned()]).is_some();
        assert!(advised("opensnoop") && !advised("vfs_read"));
    }
}

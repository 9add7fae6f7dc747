//! Checks the commands of the documentation.
//!
//! The command line parses each command, and the bt language each script. `blocks` finds the pieces
//! of a page, `shell` splits them into words.
#![allow(clippy::unwrap_used)]

mod blocks;
mod shell;

use std::fs;

use bt::library::SCRIPTS;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{CommandFactory, Error, Parser};
use probes::name::ProbePattern;
use serde_json::Value;

use super::{Cli, Command, Trace};
use crate::protocol::control::{self, decode};
use crate::protocol::script::ScriptRequest;
use crate::test_data;
use blocks::{Block, Page};
use shell::Aliases;

/// The pages that are no chapters of the book.
const PAGES: [&str; 4] = [
    "README.md",
    "ARCHITECTURE.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
];

/// Somewhat fewer pieces than the documentation has. A test that overlooks many of them fails.
const AT_LEAST: Found = Found {
    commands: 60,
    mentions: 70,
    scripts: 8,
    probes: 20,
    requests: 3,
};

/// The numbers of pieces that were checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Found {
    /// The commands in blocks.
    commands: usize,
    /// The commands within sentences, which may lack arguments.
    mentions: usize,
    /// The scripts, on command lines or as blocks.
    scripts: usize,
    /// The names of probes on command lines.
    probes: usize,
    /// The requests of the control protocol.
    requests: usize,
}

/// A piece of a page, with its place.
struct Piece<'a> {
    page: &'a str,
    line: usize,
    text: &'a str,
}

/// Checks pages, and collects their faults.
#[derive(Default)]
struct Checker {
    aliases: Aliases,
    found: Found,
    wrong: Vec<String>,
}

impl Checker {
    fn page(&mut self, name: &str, text: &str) {
        let page = Page::read(text);
        for block in &page.blocks {
            self.block(name, block);
        }
        let commands = Cli::command();
        let is_command = |word: &str| commands.get_subcommands().any(|one| one.get_name() == word);
        for (line, text) in page.spans() {
            let mut words = text.split_whitespace();
            let (first, second) = (words.next(), words.next());
            match (first.unwrap_or_default(), second.unwrap_or_default()) {
                ("exotrace" | "cargo", second) if !second.is_empty() => {
                    self.commands(name, line, &text, false);
                }
                (first, option) if option.starts_with('-') && is_command(first) => {
                    self.commands(name, line, &format!("exotrace {text}"), false);
                }
                _ => {}
            }
        }
    }

    fn block(&mut self, page: &str, block: &Block) {
        let Block { line, text, .. } = block;
        let line = *line;
        match block.language.as_str() {
            "sh" => self.commands(page, line, text, true),
            "console" => self.commands(page, line, &block.typed(), true),
            "yaml" => {
                for (line, text) in block.steps() {
                    self.commands(page, line, &text, true);
                }
            }
            "bt" => self.script(&Piece { page, line, text }, text, false),
            "json" => self.requests(&Piece { page, line, text }),
            "c" | "rust" | "text" => {}
            other => {
                let text = "```";
                let known = "expected sh, console, bt, json, yaml, c, rust, or text for the rest";
                let why = format!("a block of the language {other:?}: {known}");
                self.refuse(&Piece { page, line, text }, why);
            }
        }
    }

    /// Checks the commands of a shell's text. Those of a sentence are not whole: they may lack
    /// arguments, and have words in place of values.
    fn commands(&mut self, page: &str, line: usize, script: &str, is_whole: bool) {
        for command in shell::commands(script, line) {
            let text = command.text.as_str();
            let line = command.line;
            let piece = Piece { page, line, text };
            match self.aliases.arguments(text) {
                Ok(Some(arguments)) => self.command(&piece, &arguments, is_whole),
                Ok(None) => {}
                Err(why) => self.refuse(&piece, why),
            }
        }
    }

    fn command(&mut self, piece: &Piece, arguments: &[String], is_whole: bool) {
        match is_whole {
            true => self.found.commands += 1,
            false => self.found.mentions += 1,
        }
        let words = ["exotrace"].into_iter();
        match Cli::try_parse_from(words.chain(arguments.iter().map(String::as_str))) {
            Ok(cli) if is_whole => self.meaning(piece, &cli.command),
            Ok(_) => {}
            Err(error) if error.kind() == ErrorKind::DisplayVersion => {}
            Err(error) if !is_whole && is_incomplete(&error) => {}
            Err(error) => {
                let text = error.to_string();
                let why = text.split("\n\n").next().unwrap_or_default();
                self.refuse(piece, why);
            }
        }
    }

    /// Checks what the command line leaves to the commands.
    fn meaning(&mut self, piece: &Piece, command: &Command) {
        match command {
            Command::Trace(trace) => self.trace(piece, trace),
            Command::Run(run) => {
                self.patterns(piece, &run.trace);
                if let Some(text) = &run.program {
                    self.script(piece, text, false);
                }
            }
            Command::List(list) => self.patterns(piece, list.pattern.as_slice()),
            Command::Read(read) => {
                self.without_meaning(piece, &read.without_meaning());
                self.patterns(piece, &read.probes);
            }
            Command::Scripts(scripts) => {
                if let Some(name) = &scripts.name {
                    self.ready(piece, name);
                }
            }
            _ => {}
        }
    }

    fn trace(&mut self, piece: &Piece, trace: &Trace) {
        let first = trace.what.first().map(String::as_str).unwrap_or_default();
        let is_file = first == "-" || first.ends_with(".bt");
        let is_script = trace.program.is_some() || is_file;
        if !trace.list {
            self.without_meaning(piece, &trace.without_meaning(is_script));
        }
        match &trace.program {
            Some(text) => self.script(piece, text, trace.strict),
            None if first == "-" => {}
            None if is_file => self.ready(piece, first),
            None => self.patterns(piece, &trace.what),
        }
    }

    fn without_meaning(&mut self, piece: &Piece, options: &[impl AsRef<str>]) {
        for option in options {
            self.refuse(piece, format!("{}: not for this", option.as_ref()));
        }
    }

    fn patterns(&mut self, piece: &Piece, patterns: &[String]) {
        for pattern in patterns {
            self.found.probes += 1;
            if let Err(error) = ProbePattern::parse(pattern) {
                self.refuse(piece, error);
            }
        }
    }

    /// Checks that a script of this name comes with exotrace, unless it is a path.
    fn ready(&mut self, piece: &Piece, name: &str) {
        let file = format!("{}.bt", name.trim_end_matches(".bt"));
        if !name.contains('/') && !SCRIPTS.iter().any(|(known, _)| *known == file) {
            self.refuse(piece, format!("no ready script {file}"));
        }
    }

    fn script(&mut self, piece: &Piece, text: &str, strict: bool) {
        self.found.scripts += 1;
        let request = ScriptRequest {
            text: text.to_owned(),
            file: "script".to_owned(),
            strict,
            ..ScriptRequest::default()
        };
        if let Err(error) = request.parse() {
            self.refuse(piece, error.message);
        }
    }

    fn requests(&mut self, piece: &Piece) {
        for value in serde_json::Deserializer::from_str(piece.text).into_iter::<Value>() {
            match value {
                Ok(value) if value.get("command").is_some() => {
                    self.found.requests += 1;
                    if let Err(error) = decode::<control::Command>(&value.to_string()) {
                        self.refuse(piece, error);
                    }
                }
                Ok(_) => {}
                Err(error) => return self.refuse(piece, error),
            }
        }
    }

    fn refuse(&mut self, piece: &Piece, why: impl ToString) {
        let Piece { page, line, text } = piece;
        let why = why.to_string();
        let (text, why) = (text.trim_end(), why.trim_end().replace('\n', "\n    "));
        self.wrong.push(format!("{page}:{line}: {text}\n    {why}"));
    }
}

/// Checks whether a command has no other fault than missing words.
fn is_incomplete(error: &Error) -> bool {
    match error.kind() {
        ErrorKind::MissingRequiredArgument
        | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => true,
        // An option without its value has an empty one.
        ErrorKind::InvalidValue => matches!(
            error.get(ContextKind::InvalidValue),
            Some(ContextValue::String(value)) if value.is_empty()
        ),
        _ => false,
    }
}

#[test]
fn every_command_of_the_documentation_is_one() {
    if test_data::is_elsewhere() {
        return; // The documentation is not shipped, and no host changes it.
    }
    let chapters = fs::read_dir(test_data::source("docs")).unwrap();
    let chapters = chapters.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let chapters = chapters.filter(|name| name.ends_with(".md"));
    let mut pages: Vec<String> = chapters.map(|name| format!("docs/{name}")).collect();
    pages.sort();
    pages.splice(..0, PAGES.map(str::to_owned));

    let read = |path: &str| fs::read_to_string(test_data::source(path)).unwrap();
    let mut checker = Checker {
        aliases: Aliases::read(&read(".cargo/config.toml")),
        ..Checker::default()
    };
    for page in &pages {
        checker.page(page, &read(page));
    }

    let Checker { found, wrong, .. } = checker;
    assert!(
        wrong.is_empty(),
        "{} faults of the documentation:\n{}",
        wrong.len(),
        wrong.join("\n")
    );
    println!("{} pages: {found:?}", pages.len());
    for (what, found, least) in [
        ("commands", found.commands, AT_LEAST.commands),
        ("mentions", found.mentions, AT_LEAST.mentions),
        ("scripts", found.scripts, AT_LEAST.scripts),
        ("probes", found.probes, AT_LEAST.probes),
        ("requests", found.requests, AT_LEAST.requests),
    ] {
        assert!(found >= least, "{found} {what}; expected {least} or more");
    }
}

#[test]
fn faults_are_told_with_their_places() {
    let page = "\
Run `exotrace stat --hush` or `run --memory`.

```sh
exotrace trace vfs_read   # it's right
exotrace run \\
    --kernel vmlinux --initram initramfs
timeout 5 target/release/exotrace list --count | grep 'x; exotrace brew'; exotrace brew
exotrace trace -e 'BEGIN { printf(\"%d\\n\", $x); }'
exotrace trace opensnap.bt; exotrace trace opensnoop.bt
exotrace trace -n vfs_read
cargo demo --four 5
```

```console
$ exotrace ps --tree
exotrace brew is output
```

```
no language
```

```bt
BEGIN { exit() }
END { 1 + ; }
```

```json
{\"version\":2,\"command\":\"brew\"}
```
";
    let mut checker = Checker {
        aliases: Aliases::read("demo = \"run --package exotrace -- demo\""),
        ..Checker::default()
    };
    checker.page("a.md", page);
    let told: Vec<_> = checker.wrong.iter().map(String::as_str).collect();
    let expected = [
        ("a.md:5: exotrace run ", "unexpected argument '--initram'"),
        ("a.md:7: exotrace brew\n", "unrecognized subcommand 'brew'"),
        ("a.md:8: exotrace trace -e ", "$x"),
        ("a.md:9: exotrace trace opensnap.bt\n", "no ready script"),
        ("a.md:10: exotrace trace -n vfs_read\n", "-n: not for"),
        ("a.md:11: cargo demo --four 5\n", "'--four'"),
        ("a.md:15: exotrace ps --tree\n", "'--tree'"),
        ("a.md:20: ```\n", "language \"\""),
        ("a.md:24: BEGIN", "script:2:"),
        ("a.md:29: {", "brew"),
        ("a.md:1: exotrace stat --hush\n", "'--hush'"),
    ];
    assert_eq!(told.len(), expected.len(), "{told:#?}");
    for (told, (start, part)) in told.iter().zip(expected) {
        assert!(
            told.starts_with(start) && told.contains(part),
            "{told}: {start}"
        );
    }
}

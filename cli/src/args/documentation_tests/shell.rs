//! As much of a shell as the documentation's commands use.

use std::collections::BTreeMap;
use std::iter::Peekable;
use std::str::Chars;

/// Programs whose arguments may name another program.
const RUNNERS: [&str; 9] = [
    "cargo", "docker", "env", "exec", "nice", "sudo", "taskset", "time", "timeout",
];

/// Options behind which `exotrace` names a package.
const PACKAGE: [&str; 3] = ["-p", "--package", "--bin"];

/// A command: a program and its arguments.
#[derive(Debug, PartialEq, Eq)]
pub struct Simple {
    /// The number of the line that it begins on.
    pub line: usize,
    /// Its words as they are written, without comments and redirections.
    pub text: String,
}

/// Splits a shell's text, whose first line has the number `line`, into commands. Those in `$(...)`
/// come first, and a number takes their place.
pub fn commands(script: &str, line: usize) -> Vec<Simple> {
    let mut scanner = Scanner {
        rest: script.chars().peekable(),
        line,
        quote: None,
        command: Simple {
            line,
            text: String::new(),
        },
        found: Vec::new(),
    };
    while let Some(c) = scanner.next() {
        scanner.take(c);
    }
    scanner.finish();
    scanner.found
}

struct Scanner<'a> {
    rest: Peekable<Chars<'a>>,
    line: usize,
    quote: Option<char>,
    command: Simple,
    found: Vec<Simple>,
}

impl Scanner<'_> {
    fn next(&mut self) -> Option<char> {
        let c = self.rest.next()?;
        self.line += usize::from(c == '\n');
        Some(c)
    }

    fn take(&mut self, c: char) {
        match (self.quote, c) {
            (Some(quote), c) if c == quote => {
                self.quote = None;
                self.push(c);
            }
            (Some('\''), c) => self.push(c),
            (_, '\\') => match self.next() {
                Some('\n') | None => {}
                Some(c) => {
                    self.push('\\');
                    self.push(c);
                }
            },
            (_, '$') if self.rest.peek() == Some(&'(') => self.substitution(),
            (Some(_), c) => self.push(c),
            (None, '\'' | '"') => {
                self.quote = Some(c);
                self.push(c);
            }
            (None, '#') if !self.is_in_word() => {
                while self.rest.next_if(|c| *c != '\n').is_some() {}
            }
            (None, ';' | '|' | '&' | '(' | ')' | '\n') => self.finish(),
            (None, '<' | '>') => self.redirection(),
            (None, c) => self.push(c),
        }
    }

    fn push(&mut self, c: char) {
        if self.command.text.is_empty() {
            if c.is_whitespace() {
                return;
            }
            self.command.line = self.line;
        }
        self.command.text.push(c);
    }

    fn is_in_word(&self) -> bool {
        let text = &self.command.text;
        !text.is_empty() && !text.ends_with(char::is_whitespace)
    }

    fn substitution(&mut self) {
        let line = self.line;
        let mut inner = String::new();
        let mut depth = 0;
        while let Some(c) = self.next() {
            match c {
                '(' => depth += 1,
                ')' => depth -= 1,
                _ => {}
            }
            inner.push(c);
            if depth == 0 {
                break;
            }
        }
        self.found.extend(commands(&inner, line));
        self.push('1');
    }

    fn redirection(&mut self) {
        // 2> is one operator.
        let text = &mut self.command.text;
        let before = text.trim_end_matches(|c: char| c.is_ascii_digit());
        if before.ends_with(char::is_whitespace) {
            text.truncate(before.len());
        }
        for skipped in ["<>&|", " "] {
            while self.rest.next_if(|c| skipped.contains(*c)).is_some() {}
        }
        while self.rest.next_if(|c| !" \t\n;|&()".contains(*c)).is_some() {}
    }

    fn finish(&mut self) {
        let text = std::mem::take(&mut self.command.text);
        if !text.is_empty() {
            let line = self.command.line;
            let text = text.trim_end().to_owned();
            self.found.push(Simple { line, text });
        }
    }
}

/// The words that cargo puts in place of its aliases.
#[derive(Debug, Default)]
pub struct Aliases(BTreeMap<String, Vec<String>>);

impl Aliases {
    /// Reads a configuration of cargo that has aliases alone.
    pub fn read(configuration: &str) -> Self {
        let lines = configuration.lines();
        let pairs = lines.filter_map(|line| line.split_once(" = "));
        let words = |text: &str| {
            text.trim_matches('"')
                .split(' ')
                .map(str::to_owned)
                .collect()
        };
        Self(
            pairs
                .map(|(name, text)| (name.to_owned(), words(text)))
                .collect(),
        )
    }

    /// Returns the arguments that a command gives to exotrace; `None` if it runs something else.
    ///
    /// # Errors
    /// If a quotation mark is missing.
    pub fn arguments(&self, command: &str) -> Result<Option<Vec<String>>, &'static str> {
        let words = shlex::split(command).ok_or("a quotation mark is missing")?;
        let is_set = |word: &String| {
            let name = word.split_once('=').map(|(name, _)| name);
            name.is_some_and(|name| name.chars().all(|c| c.is_ascii_uppercase() || c == '_'))
        };
        let words: Vec<String> = words.into_iter().skip_while(is_set).collect();
        Ok(match words.as_slice() {
            [program, arguments @ ..] if is_exotrace(program) => Some(arguments.to_vec()),
            [cargo, name, more @ ..] if cargo == "cargo" => match self.0.get(name) {
                Some(alias) => of_runner(&[alias, more].concat()),
                None => of_runner(words.get(1..).unwrap_or_default()),
            },
            [runner, more @ ..] if RUNNERS.contains(&runner.as_str()) => of_runner(more),
            _ => None,
        })
    }
}

/// Returns the arguments of exotrace among those of another program.
fn of_runner(words: &[String]) -> Option<Vec<String>> {
    let is_package = |pair: &[String]| match pair {
        [option, name] => PACKAGE.contains(&option.as_str()) && name == "exotrace",
        _ => false,
    };
    let end = words.iter().position(|word| word == "--");
    if let (Some("run"), Some(end)) = (words.first().map(String::as_str), end) {
        let (own, arguments) = words.split_at(end);
        let is_example = own.iter().any(|word| word == "--example");
        if own.windows(2).any(is_package) && !is_example {
            return arguments.get(1..).map(<[_]>::to_vec);
        }
    }
    let starts = |at: &usize| {
        let before = at.checked_sub(1).and_then(|before| words.get(before));
        let is_package = before.is_some_and(|word| PACKAGE.contains(&word.as_str()));
        words.get(*at).is_some_and(|word| is_exotrace(word)) && !is_package
    };
    let at = (0..words.len()).find(starts)?;
    words.get(at + 1..).map(<[_]>::to_vec)
}

fn is_exotrace(word: &str) -> bool {
    word == "exotrace"
        || ["release/exotrace", "debug/exotrace"]
            .iter()
            .any(|end| word.ends_with(end))
}

#[test]
fn a_shell_splits_commands_so() {
    let script = "\
a 'b;c' # d; e
  f \\
  g 2>&1 >h | i \"$(j k)\" && l #m
n 'o
p' < q; r 2x >s
";
    let split: Vec<_> = commands(script, 1)
        .into_iter()
        .map(|command| (command.line, command.text))
        .collect();
    let expected = [
        (1, "a 'b;c'"),
        (2, "f   g"),
        (3, "j k"),
        (3, "i \"1\""),
        (3, "l"),
        (4, "n 'o\np'"),
        (5, "r 2x"),
    ];
    let expected = expected.map(|(line, text)| (line, text.to_owned()));
    assert_eq!(split, expected);
}

#[test]
fn commands_of_exotrace_are_known_by_their_program() {
    let aliases = Aliases::read("[alias]\ndemo = \"run --quiet --package exotrace -- demo\"");
    for (command, expected) in [
        ("exotrace ps -T", Some("ps -T")),
        ("EXOTRACE_LOG=debug target/release/exotrace ps", Some("ps")),
        ("sudo A=b timeout 5 ./target/debug/exotrace ps", Some("ps")),
        ("cargo demo --for 5", Some("demo --for 5")),
        ("cargo run -p exotrace -- ps", Some("ps")),
        ("cargo run --release --bin exotrace --", Some("")),
        ("cargo run -p exotrace --example boot -- ps", None),
        ("cargo host svm --limit 3 -- exotrace ps", Some("ps")),
        ("cargo build -p exotrace", None),
        ("git clone https://example.org/exotrace exotrace", None),
        ("sudo chown -R me ~/.cache/exotrace", None),
    ] {
        let found = aliases.arguments(command).unwrap();
        let found = found.map(|words| words.join(" "));
        assert_eq!(found.as_deref(), expected, "{command}");
    }
}

//! The syntax of GRUB's scripts.
//!
//! A script is a tree of commands. Text that makes no sense is an error, but for an end that is
//! missing at the end of the file.

use std::rc::Rc;

/// The most words of a command.
const MOST_WORDS: usize = 1024;
/// The deepest nesting.
const MOST_DEPTH: usize = 32;

/// A part of a word.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Piece {
    Text(String),
    /// A variable. Within quotes its value stays one word.
    Variable {
        name: String,
        is_quoted: bool,
    },
}

/// A word before its variables have values.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Word {
    pub pieces: Vec<Piece>,
    /// A part of it is in quotes, so it is no word of the language.
    is_quoted: bool,
}

impl Word {
    /// Returns the word if it is one of the language.
    fn keyword(&self) -> Option<&str> {
        match self.pieces.as_slice() {
            [Piece::Text(text)] if !self.is_quoted => Some(text),
            _ => None,
        }
    }
}

/// A list of commands.
pub(super) type Script = Rc<Vec<Command>>;

/// A command.
#[derive(Debug)]
pub(super) enum Command {
    /// A name and its arguments; with a block for `menuentry` and `submenu`.
    Simple {
        words: Vec<Word>,
        block: Option<Script>,
    },
    /// Conditions with what they lead to, and what is done otherwise.
    If {
        arms: Vec<(Script, Script)>,
        otherwise: Script,
    },
    /// A loop over words.
    For {
        variable: String,
        words: Vec<Word>,
        body: Script,
    },
    /// A loop while a condition holds, or until it does.
    While {
        condition: Script,
        body: Script,
        until: bool,
    },
    Function {
        name: String,
        body: Script,
    },
}

#[derive(Debug, PartialEq, Eq)]
enum Token {
    Word(Word),
    End,
    Open,
    Close,
}

/// Parses a script; the error is the number of the line, from 1.
pub(super) fn parse(text: &str) -> Result<Script, usize> {
    let tokens = tokens(text)?;
    let mut parser = Parser {
        tokens: &tokens,
        at: 0,
    };
    let script = parser.list(&[], 0)?;
    match parser.tokens.get(parser.at) {
        Some((line, _)) => Err(*line),
        None => Ok(script),
    }
}

/// Splits text into words and separators, each with its line.
fn tokens(text: &str) -> Result<Vec<(usize, Token)>, usize> {
    let mut lexer = Lexer {
        left: text.chars().peekable(),
        line: 1,
        tokens: Vec::new(),
        word: None,
    };
    lexer.run()?;
    Ok(lexer.tokens)
}

struct Lexer<'a> {
    left: std::iter::Peekable<std::str::Chars<'a>>,
    line: usize,
    tokens: Vec<(usize, Token)>,
    word: Option<Word>,
}

impl Lexer<'_> {
    fn run(&mut self) -> Result<(), usize> {
        while let Some(c) = self.left.next() {
            match c {
                '#' if self.word.is_none() => while self.left.next_if(|c| *c != '\n').is_some() {},
                '\n' | ';' => {
                    self.finish();
                    self.tokens.push((self.line, Token::End));
                    self.line += usize::from(c == '\n');
                }
                ' ' | '\t' | '\r' => self.finish(),
                '{' | '}' => {
                    self.finish();
                    let token = if c == '{' { Token::Open } else { Token::Close };
                    self.tokens.push((self.line, token));
                }
                '\\' => match self.left.next() {
                    Some('\n') => self.line += 1,
                    Some(c) => self.push(c, true),
                    None => {}
                },
                '\'' => self.quoted()?,
                '"' => self.expanded()?,
                '$' => self.variable(false),
                c => self.push(c, false),
            }
        }
        self.finish();
        Ok(())
    }

    fn finish(&mut self) {
        if let Some(word) = self.word.take() {
            self.tokens.push((self.line, Token::Word(word)));
        }
    }

    fn piece(&mut self, piece: Piece) {
        self.word.get_or_insert_default().pieces.push(piece);
    }

    fn push(&mut self, c: char, is_quoted: bool) {
        let word = self.word.get_or_insert_default();
        word.is_quoted |= is_quoted;
        match word.pieces.last_mut() {
            Some(Piece::Text(text)) => text.push(c),
            _ => word.pieces.push(Piece::Text(c.into())),
        }
    }

    /// Begins a part in quotes: even an empty one makes a word.
    fn open(&mut self) {
        self.piece(Piece::Text(String::new()));
        self.word.get_or_insert_default().is_quoted = true;
    }

    fn quoted(&mut self) -> Result<(), usize> {
        let first = self.line;
        self.open();
        for c in self.left.by_ref() {
            match c {
                '\'' => return Ok(()),
                c => {
                    self.line += usize::from(c == '\n');
                    if let Some(Piece::Text(text)) =
                        self.word.as_mut().and_then(|word| word.pieces.last_mut())
                    {
                        text.push(c);
                    }
                }
            }
        }
        Err(first)
    }

    fn expanded(&mut self) -> Result<(), usize> {
        let first = self.line;
        self.open();
        while let Some(c) = self.left.next() {
            match c {
                '"' => return Ok(()),
                '$' => self.variable(true),
                '\\' => match self.left.next() {
                    Some('\n') => self.line += 1,
                    Some(c @ ('$' | '"' | '\\')) => self.push(c, true),
                    Some(c) => {
                        self.push('\\', true);
                        self.push(c, true);
                    }
                    None => {}
                },
                c => {
                    self.line += usize::from(c == '\n');
                    self.push(c, true);
                }
            }
        }
        Err(first)
    }

    /// Reads a variable's name, after its `$`.
    fn variable(&mut self, is_quoted: bool) {
        let mut name = String::new();
        match self.left.peek() {
            Some('{') => {
                self.left.next();
                while let Some(c) = self.left.next_if(|c| !matches!(c, '}' | '\n')) {
                    name.push(c);
                }
                self.left.next_if_eq(&'}');
            }
            Some('?' | '@' | '*' | '#') => name.extend(self.left.next()),
            _ => {
                let is_name = |c: &char| c.is_ascii_alphanumeric() || *c == '_';
                while let Some(c) = self.left.next_if(is_name) {
                    name.push(c);
                }
            }
        }
        match name.is_empty() {
            true => self.push('$', is_quoted),
            false => self.piece(Piece::Variable { name, is_quoted }),
        }
    }
}

struct Parser<'a> {
    tokens: &'a [(usize, Token)],
    at: usize,
}

impl<'a> Parser<'a> {
    fn peek(&self) -> Option<&'a Token> {
        self.tokens.get(self.at).map(|(_, token)| token)
    }

    fn line(&self) -> usize {
        let last = || self.tokens.last().map_or(1, |(line, _)| *line);
        self.tokens
            .get(self.at)
            .map_or_else(last, |(line, _)| *line)
    }

    fn keyword(&self) -> Option<&'a str> {
        match self.peek() {
            Some(Token::Word(word)) => word.keyword(),
            _ => None,
        }
    }

    /// Parses commands up to one of these words, which is left, or to a brace or the end.
    fn list(&mut self, ends: &[&str], depth: usize) -> Result<Script, usize> {
        if depth > MOST_DEPTH {
            return Err(self.line());
        }
        let mut commands = Vec::new();
        loop {
            match self.peek() {
                None | Some(Token::Close) => break,
                Some(Token::End) => self.at += 1,
                Some(Token::Open) => {
                    self.at += 1;
                    let block = Some(self.block(depth)?);
                    let words = Vec::new();
                    commands.push(Command::Simple { words, block });
                }
                Some(Token::Word(_)) => {
                    if self.keyword().is_some_and(|word| ends.contains(&word)) {
                        break;
                    }
                    commands.push(self.command(depth)?);
                }
            }
        }
        Ok(Rc::new(commands))
    }

    /// Parses the rest of a block, whose opening brace was taken.
    fn block(&mut self, depth: usize) -> Result<Script, usize> {
        let body = self.list(&[], depth + 1)?;
        if self.peek() == Some(&Token::Close) {
            self.at += 1;
        }
        Ok(body)
    }

    /// Takes a word of the language; the end of the file stands for any.
    fn expect(&mut self, wanted: &str) -> Result<(), usize> {
        match self.peek() {
            None => Ok(()),
            Some(_) if self.keyword() == Some(wanted) => {
                self.at += 1;
                Ok(())
            }
            Some(_) => Err(self.line()),
        }
    }

    fn command(&mut self, depth: usize) -> Result<Command, usize> {
        let keyword = self.keyword().unwrap_or_default();
        match keyword {
            "if" => self.condition(depth),
            "while" | "until" => {
                self.at += 1;
                let condition = self.list(&["do"], depth + 1)?;
                let body = self.body(depth)?;
                Ok(Command::While {
                    condition,
                    body,
                    until: keyword == "until",
                })
            }
            "for" => {
                self.at += 1;
                let variable = self.keyword().ok_or(self.line())?.to_owned();
                self.at += 1;
                self.expect("in")?;
                let words = self.words()?;
                while self.peek() == Some(&Token::End) {
                    self.at += 1;
                }
                let body = self.body(depth)?;
                Ok(Command::For {
                    variable,
                    words,
                    body,
                })
            }
            "function" => {
                self.at += 1;
                let name = self.keyword().ok_or(self.line())?.to_owned();
                self.at += 1;
                while self.peek() == Some(&Token::End) {
                    self.at += 1;
                }
                match self.peek() {
                    Some(Token::Open) => self.at += 1,
                    _ => return Err(self.line()),
                }
                let body = self.block(depth)?;
                Ok(Command::Function { name, body })
            }
            _ => {
                let words = self.words()?;
                let block = match self.peek() {
                    Some(Token::Open) => {
                        self.at += 1;
                        Some(self.block(depth)?)
                    }
                    _ => None,
                };
                Ok(Command::Simple { words, block })
            }
        }
    }

    fn condition(&mut self, depth: usize) -> Result<Command, usize> {
        self.at += 1;
        let mut arms = Vec::new();
        loop {
            let condition = self.list(&["then"], depth + 1)?;
            self.expect("then")?;
            let body = self.list(&["elif", "else", "fi"], depth + 1)?;
            arms.push((condition, body));
            match self.keyword() {
                Some("elif") => self.at += 1,
                _ => break,
            }
        }
        let otherwise = match self.keyword() {
            Some("else") => {
                self.at += 1;
                self.list(&["fi"], depth + 1)?
            }
            _ => Script::default(),
        };
        self.expect("fi")?;
        Ok(Command::If { arms, otherwise })
    }

    /// Parses `do`, commands, `done`.
    fn body(&mut self, depth: usize) -> Result<Script, usize> {
        self.expect("do")?;
        let body = self.list(&["done"], depth + 1)?;
        self.expect("done")?;
        Ok(body)
    }

    fn words(&mut self) -> Result<Vec<Word>, usize> {
        let mut words = Vec::new();
        while let Some(Token::Word(word)) = self.peek() {
            if words.len() >= MOST_WORDS {
                return Err(self.line());
            }
            words.push(word.clone());
            self.at += 1;
        }
        Ok(words)
    }
}

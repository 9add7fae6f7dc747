//! Parses rules, and the other parts at the outermost level of a script.

use super::timers::{event, has_argument, timer};
use super::{Parsed, Parser};
use crate::ast::{MapSize, MissingProbes, ProbeKind, ProbeSpec, Rule, Script};
use crate::diagnostic::Diagnostic;
use crate::lex::normal::{Token, TokenKind};
use crate::names;
use crate::value::StackForm;

/// The key that has maps printed at the end.
const PRINT_MAPS: &str = "print_maps_on_exit";

/// The keys that bpftrace knows in `config = { ... }`.
const CONFIG: &[&str] = &[
    "cache_user_symbols",
    "cpp_demangle",
    "lazy_symbolication",
    "license",
    "log_size",
    "max_ast_nodes",
    "max_bpf_progs",
    "max_cat_bytes",
    "max_map_keys",
    "max_probes",
    "max_strlen",
    "max_type_res_iterations",
    "missing_probes",
    "on_stack_limit",
    "perf_rb_pages",
    PRINT_MAPS,
    "probe_inline",
    "show_debug_info",
    "stack_mode",
    "str_trunc_trailer",
    "symbol_source",
    "use_blazesym",
];

/// The first words of other languages' outermost parts, and advice about them.
const ELSEWHERE: &[(&str, &str)] = &[
    ("import", "scripts cannot be imported; give one file"),
    ("inline", "constants are written #define NAME value"),
];

/// The kinds of maps whose size a script can give. Only those with `lru` differ here.
const MAP_KINDS: &[&str] = &[
    "hash",
    "percpuhash",
    "lruhash",
    "percpulruhash",
    "array",
    "percpuarray",
];

/// Returns the kind of the probe that `text` names.
///
/// # Errors
/// A sentence if it is a timer or an event that there is not.
pub(crate) fn probe_kind(text: &str) -> Result<ProbeKind, String> {
    match text {
        "BEGIN" | "begin" | "dtrace:::BEGIN" => Ok(ProbeKind::Begin),
        "END" | "end" | "dtrace:::END" => Ok(ProbeKind::End),
        _ => timer(text)
            .or_else(|| event(text))
            .unwrap_or_else(|| Ok(ProbeKind::Pattern(text.replace('"', "")))),
    }
}

impl Parser<'_> {
    /// Parses all of the text; the errors are in `errors`.
    pub(super) fn script(&mut self) -> Script {
        let mut script = Script::default();
        loop {
            // A token that was only looked at belongs to the next part.
            self.rewind(self.position());
            self.depth = 0;
            self.in_filter = false;
            self.input = None;
            let before = self.lexer.position();
            let problem = match self.outermost(&mut script) {
                Ok(true) => continue,
                Ok(false) => return script,
                Err(problem) => problem,
            };
            if !self.report(problem) {
                return script;
            }
            // From its start: however much of it was read, all its braces are counted.
            self.lexer.rewind(before);
            match self.lexer.at_word("let") {
                true => {
                    self.ahead = None;
                    self.skip_statement();
                }
                false => self.skip_rule(),
            }
            // A text that cannot be skipped ends the parsing, so that nothing is read twice for
            // ever.
            if self.lexer.position() <= before {
                return script;
            }
        }
    }

    /// Parses one rule or definition. Returns `false` at the end of the text.
    fn outermost(&mut self, script: &mut Script) -> Parsed<bool> {
        self.lexer.skip()?;
        match self.lexer.upcoming() {
            None => return Ok(false),
            Some(b';') => {
                self.next()?;
                return Ok(true);
            }
            Some(_) => {}
        }
        if self.lexer.at_word("struct") || self.lexer.at_word("union") {
            self.structure(&mut script.structures)?;
        } else if self.lexer.at_word("typedef") {
            self.typedef(&mut script.structures)?;
        } else if self.lexer.at_word("translator") {
            let translator = self.translator()?;
            script.translators.push(translator);
        } else if self.lexer.at_word("enum") {
            let found = self.enumeration()?;
            script.enums.push(found);
        } else if self.lexer.at_word("macro") {
            let found = self.macro_definition()?;
            script.macros.push(found);
        } else if self.lexer.at_word("fn") {
            let found = self.function_definition()?;
            script.macros.push(found);
        } else if self.lexer.at_word("let") {
            let size = self.map_size()?;
            script.map_sizes.push(size);
        } else if self.lexer.at_word("config") {
            self.config(script)?;
        } else {
            for (word, instead) in ELSEWHERE {
                if self.lexer.at_word(word) {
                    let span = self.next()?.span;
                    return Err(Diagnostic::new(span, *instead));
                }
            }
            let rule = self.rule()?;
            script.rules.push(rule);
        }
        Ok(true)
    }

    /// Parses `config = { key = value; ... }`. Settings of bpftrace's own work have no effect here.
    fn config(&mut self, script: &mut Script) -> Parsed<()> {
        self.next()?;
        self.expect("=", "after config")?;
        self.expect("{", "after config =")?;
        while !self.eat("}")? {
            if self.eat(";")? || self.eat(",")? {
                continue;
            }
            let (key, span) = self.expect_word("a name of bpftrace's configuration")?;
            let known = key.strip_prefix("BPFTRACE_").unwrap_or(key).to_lowercase();
            if !CONFIG.contains(&known.as_str()) && !known.starts_with("unstable_") {
                let unknown = Diagnostic::new(span, format!("unknown configuration '{key}'"))
                    .suggest(&known, CONFIG.iter().copied());
                self.report(unknown);
            }
            self.expect("=", "after the name")?;
            let token = self.peek()?;
            let (is_off, number) = match token.kind {
                TokenKind::Word(word) => (word == "false", None),
                TokenKind::Number(number) => (number == 0, usize::try_from(number).ok()),
                TokenKind::Text => (false, None),
                _ => return Err(self.unexpected("a number, a word or a string")),
            };
            self.next()?;
            match known.as_str() {
                PRINT_MAPS => script.omits_maps = is_off,
                "max_map_keys" => script.most_entries = number.filter(|most| *most > 0),
                "stack_mode" => script.stack_form = self.stack_form(token)?,
                "missing_probes" => script.missing_probes = self.missing_probes(token)?,
                "max_cat_bytes" => script.longest_file = number.filter(|most| *most > 0),
                "max_strlen" => script.longest_text = number.filter(|most| *most > 0),
                _ => {
                    let message = format!("{known} changes nothing here");
                    script.notes.push((span, message));
                }
            }
        }
        Ok(())
    }

    /// Returns the form of stacks that the word or string after `stack_mode =` names.
    fn stack_form(&self, token: Token<'_>) -> Parsed<StackForm> {
        let mode = self.word_or_text(token)?;
        let found = std::str::from_utf8(&mode).ok().and_then(names::stack_form);
        found.ok_or_else(|| {
            let message = "stacks are shown in the modes bpftrace, perf and raw";
            Diagnostic::new(token.span, message)
        })
    }

    /// Returns the handling that the word or string after `missing_probes =` names.
    fn missing_probes(&self, token: Token<'_>) -> Parsed<MissingProbes> {
        match self.word_or_text(token)?.as_slice() {
            b"error" => Ok(MissingProbes::Error),
            b"warn" => Ok(MissingProbes::Warn),
            b"ignore" => Ok(MissingProbes::Ignore),
            _ => {
                let message = "missing_probes is one of error, warn and ignore";
                Err(Diagnostic::new(token.span, message))
            }
        }
    }

    /// Returns the text of a word or string; none of another token.
    fn word_or_text(&self, token: Token<'_>) -> Parsed<Vec<u8>> {
        match token.kind {
            TokenKind::Word(word) => Ok(word.as_bytes().to_vec()),
            TokenKind::Text => self.lexer.text_value(token.span),
            _ => Ok(Vec::new()),
        }
    }

    /// Parses `let @x = hash(100);`.
    fn map_size(&mut self) -> Parsed<MapSize> {
        let start = self.next()?.span;
        let TokenKind::Global(name) = self.peek()?.kind else {
            return Err(self.unexpected("a map, such as @x"));
        };
        self.next()?;
        self.expect("=", "after the map")?;
        let (kind, span) = self.expect_word("a kind of map, such as hash(100)")?;
        if !MAP_KINDS.contains(&kind) {
            let message = format!("unknown kind of map '{kind}'");
            let told = Diagnostic::new(span, message).suggest(kind, MAP_KINDS.iter().copied());
            return Err(told);
        }
        self.expect("(", "after the kind of map")?;
        let token = self.next()?;
        let most = match token.kind {
            TokenKind::Number(most) if most > 0 => usize::try_from(most).ok(),
            _ => None,
        };
        let most = most.ok_or_else(|| {
            Diagnostic::new(token.span, "the size of a map is a number from 1 on")
        })?;
        self.expect(")", "after the size")?;
        self.eat(";")?;
        Ok(MapSize {
            name: name.to_owned(),
            most,
            evicts: kind.contains("lru"),
            span: self.since(start),
        })
    }

    /// Parses `probe, probe /filter/ { ... }`.
    fn rule(&mut self) -> Parsed<Rule> {
        let mut probes = vec![self.probe()?];
        while self.eat(",")? {
            // A comma may stand behind the last one.
            if matches!(self.lexer.upcoming(), Some(b'{' | b'/')) {
                break;
            }
            probes.push(self.probe()?);
        }
        let filter = if self.eat("/")? {
            self.in_filter = true;
            let filter = self.expression()?;
            self.in_filter = false;
            self.expect("/", "at the filter's end")?;
            Some(filter)
        } else {
            None
        };
        if !self.is("{")? {
            return Err(self.unexpected("'{' and actions"));
        }
        let body = self.block()?;
        Ok(Rule {
            probes,
            filter,
            body,
        })
    }

    fn probe(&mut self) -> Parsed<ProbeSpec> {
        let (bytes, span) = self.lexer.probe()?;
        self.last = span;
        let Ok(text) = std::str::from_utf8(bytes) else {
            return Err(Diagnostic::new(span, "this probe's name is not UTF-8"));
        };
        let kind = probe_kind(text).unwrap_or_else(|message| {
            // The whole name is known when the script's arguments are.
            if !has_argument(text) {
                self.report(Diagnostic::new(span, message));
            }
            ProbeKind::Pattern(text.to_owned())
        });
        Ok(ProbeSpec { kind, span })
    }

    /// Skips a wrong rule: to the end of its block.
    fn skip_rule(&mut self) {
        self.ahead = None;
        let mut open = 0usize;
        loop {
            match self.lexer.next().map(|token| token.kind) {
                Ok(TokenKind::End) => return,
                Ok(TokenKind::Punctuation("{")) => open += 1,
                Ok(TokenKind::Punctuation("}")) => {
                    open = open.saturating_sub(1);
                    if open == 0 {
                        return;
                    }
                }
                _ => {}
            }
        }
    }
}

//! Parses statements: assignments, aggregations, branches and loops.

use super::expressions::{misspelt, place_of};
use super::{Parsed, Parser};
use crate::ast::{
    Block, Expression, ExpressionKind, Lvalue, LvalueKind, Span, Statement, StatementKind,
};
use crate::diagnostic::Diagnostic;
use crate::lex::normal::TokenKind;
use crate::names;

impl Parser<'_> {
    /// Parses `{ ... }`. After an error in one statement, it goes on with the next.
    pub(super) fn block(&mut self) -> Parsed<Block> {
        let mut block = Block::default();
        self.statements_into(&mut block)?;
        Ok(block)
    }

    /// Adds the statements of `{ ... }` to a block.
    fn statements_into(&mut self, block: &mut Block) -> Parsed<()> {
        let open = self.expect("{", "before statements")?;
        loop {
            let problem = match self.peek().map(|token| token.kind) {
                Ok(TokenKind::Punctuation("}")) => {
                    self.next()?;
                    return Ok(());
                }
                Ok(TokenKind::End) => {
                    return Err(Diagnostic::new(open, "this '{' has no '}'"));
                }
                Ok(TokenKind::Punctuation("{")) => {
                    self.deeper(|parser| parser.statements_into(block)).err()
                }
                Ok(_) => self
                    .deeper(Self::statement)
                    .map(|statement| block.statements.extend(statement))
                    .err(),
                Err(problem) => Some(problem),
            };
            if let Some(problem) = problem {
                if !self.report(problem.clone()) {
                    return Err(problem);
                }
                self.skip_statement();
            }
        }
    }

    /// Skips the rest of a wrong statement: behind its `;` or its block, or before the `}` that
    /// ends the enclosing block.
    pub(super) fn skip_statement(&mut self) {
        let mut open = 0usize;
        loop {
            match self.peek().map(|token| token.kind) {
                Ok(TokenKind::End) => return,
                Ok(TokenKind::Punctuation("}")) if open == 0 => return,
                Ok(TokenKind::Punctuation("}")) => {
                    open -= 1;
                    if open == 0 {
                        self.ahead = None;
                        return;
                    }
                }
                Ok(TokenKind::Punctuation("{")) => open += 1,
                Ok(TokenKind::Punctuation(";")) if open == 0 => {
                    self.ahead = None;
                    return;
                }
                Ok(_) | Err(_) => {}
            }
            self.ahead = None;
        }
    }

    /// Parses `{ ... }`, or one statement.
    fn body(&mut self) -> Parsed<Block> {
        if self.is("{")? {
            return self.block();
        }
        Ok(Block {
            statements: self.deeper(Self::statement)?.into_iter().collect(),
        })
    }

    /// Parses one statement with its `;`, which may be left out before another statement or `}`.
    /// Returns `None` for `;` alone.
    fn statement(&mut self) -> Parsed<Option<Statement>> {
        let start = self.here()?;
        if self.eat(";")? {
            return Ok(None);
        }
        let word = match self.peek()?.kind {
            TokenKind::Word(word) => word,
            _ => "",
        };
        let with_body = match word {
            "if" => Some(self.branch()?),
            "while" => Some(self.while_loop()?),
            "unroll" => {
                self.next()?;
                let times = self.expression()?;
                let body = self.body()?;
                Some(StatementKind::Repeat { times, body })
            }
            "for" => Some(self.for_loop()?),
            _ => None,
        };
        if let Some(kind) = with_body {
            let span = self.since(start);
            self.ended_by_semicolon = false;
            return Ok(Some(Statement { kind, span }));
        }
        let kind = match word {
            "break" => self.word_alone(StatementKind::Break)?,
            "continue" => self.word_alone(StatementKind::Continue)?,
            "return" => {
                self.next()?;
                let is_alone = self.is(";")? || self.is("}")?;
                let value = (!is_alone).then(|| self.expression()).transpose()?;
                StatementKind::Return(value)
            }
            "else" => {
                let message = "this 'else' belongs to no 'if'";
                return Err(Diagnostic::new(self.next()?.span, message));
            }
            "let" => self.declaration()?,
            // `_ = value` drops the value.
            "_" if self.lexer.is_single_equals() => {
                self.next()?;
                self.next()?;
                StatementKind::Assign {
                    place: Lvalue {
                        kind: LvalueKind::Local(word.to_owned()),
                        span: start,
                    },
                    operator: None,
                    value: self.expression()?,
                }
            }
            _ => self.simple()?,
        };
        let span = self.since(start);
        self.ended_by_semicolon = self.eat(";")?;
        if !self.ended_by_semicolon && !self.is("}")? && !self.at_statement()? {
            let missing = self.unexpected("';' or another operator");
            // An unknown name before a bracket is a misspelt `if` or `while`.
            if let StatementKind::Expression(of) = &kind
                && let ExpressionKind::Named { name, .. } = &of.kind
            {
                let span = Span {
                    end: start.start + name.len(),
                    ..start
                };
                let unknown = Diagnostic::new(span, format!("unknown name '{name}'"));
                return Err(misspelt(name, unknown));
            }
            return Err(match self.peek()?.kind {
                TokenKind::Word(word) => misspelt(word, missing),
                _ => missing,
            });
        }
        // `let $x;`
        if word == "let"
            && let StatementKind::Expression(of) = &kind
            && let ExpressionKind::Lvalue(place) = &of.kind
            && let LvalueKind::Local(variable) = &place.kind
        {
            let variable = variable.clone();
            let kind = StatementKind::Declare { variable };
            return Ok(Some(Statement { kind, span }));
        }
        Ok(Some(Statement { kind, span }))
    }

    /// Parses `let $x`, `let $x = value` and `let $x: type = value`; `let` is ahead.
    fn declaration(&mut self) -> Parsed<StatementKind> {
        self.next()?;
        let TokenKind::Local(name) = self.peek()?.kind else {
            return Err(self.unexpected("a variable, such as $x"));
        };
        let span = self.here()?;
        let before = self.position();
        self.next()?;
        if !self.eat(":")? {
            self.rewind(before);
            return self.simple();
        }
        let of = self.annotation()?;
        let place = Lvalue {
            kind: LvalueKind::Local(name.to_owned()),
            span,
        };
        if !self.eat("=")? {
            let kind = ExpressionKind::Lvalue(Box::new(place));
            return Ok(StatementKind::Expression(Expression { kind, span }));
        }
        let mut value = self.expression()?;
        if let Some(to) = of {
            let span = value.span;
            let of = Box::new(value);
            let kind = ExpressionKind::Cast { to, of };
            value = Expression { kind, span };
        }
        Ok(StatementKind::Assign {
            place,
            operator: None,
            value,
        })
    }

    /// Parses a statement that is the word ahead.
    fn word_alone(&mut self, kind: StatementKind) -> Parsed<StatementKind> {
        self.next()?;
        Ok(kind)
    }

    /// Checks whether the next token can begin a statement: bt(5) needs no `;` between them.
    fn at_statement(&mut self) -> Parsed<bool> {
        Ok(match self.peek()?.kind {
            TokenKind::Local(_) | TokenKind::Global(_) => true,
            TokenKind::Word(word) => {
                names::KEYWORDS.contains(&word)
                    || names::signature(word).is_some_and(|function| !function.gives_value)
            }
            _ => false,
        })
    }

    /// Parses an assignment, or an expression.
    fn simple(&mut self) -> Parsed<StatementKind> {
        let target = self.expression()?;
        let TokenKind::Punctuation(text) = self.peek()?.kind else {
            return Ok(StatementKind::Expression(target));
        };
        let operator = names::ASSIGNMENTS
            .iter()
            .find(|(known, _)| *known == text)
            .map(|(_, operator)| *operator);
        if text != "=" && operator.is_none() {
            return Ok(StatementKind::Expression(target));
        }
        self.next()?;
        let place = place_of(target)?;
        if let TokenKind::Word(word) = self.peek()?.kind
            && let Some(gatherer) = names::gatherer(word)
            && self.lexer.upcoming() == Some(b'(')
        {
            let span = self.next()?.span;
            let usage = gatherer.usage;
            if operator.is_some() {
                let message = format!("{word}() adds to what is there by itself: @x = {usage}");
                return Err(Diagnostic::new(span, message));
            }
            if let LvalueKind::Local(name) = &place.kind {
                let message = format!("{word}() gathers in a global variable: @{name} = {usage}");
                return Err(Diagnostic::new(place.span, message));
            }
            return self.gather(gatherer, place);
        }
        Ok(StatementKind::Assign {
            place,
            operator,
            value: self.expression()?,
        })
    }

    /// Parses the condition behind a word that is ahead: in parentheses, or any expression before
    /// `{`.
    pub(super) fn condition(&mut self) -> Parsed<Expression> {
        self.next()?;
        let start = self.position();
        if self.eat("(")? {
            let condition = self.inside(Self::expression)?;
            // `(a, b) == $x` and the like go on behind the parenthesis.
            if self.eat(")")? && !self.at_operator()? {
                return Ok(condition);
            }
            self.rewind(start);
        }
        let condition = self.inside(Self::expression)?;
        if !self.is("{")? {
            return Err(self.unexpected("'{' after the condition"));
        }
        Ok(condition)
    }

    /// Checks whether the next token goes on with an expression, and begins no statement.
    fn at_operator(&mut self) -> Parsed<bool> {
        let TokenKind::Punctuation(text) = self.peek()?.kind else {
            return Ok(false);
        };
        let is_binary = names::BINARY_OPERATORS
            .iter()
            .any(|(known, ..)| *known == text);
        Ok(is_binary && text != "*" || matches!(text, "?" | "." | "->" | "["))
    }

    /// Parses `while (condition) ...`; `while` is ahead.
    fn while_loop(&mut self) -> Parsed<StatementKind> {
        let condition = self.condition()?;
        let body = self.body()?;
        Ok(StatementKind::While { condition, body })
    }

    /// Parses `if (condition) ... else ...`; `if` is ahead.
    fn branch(&mut self) -> Parsed<StatementKind> {
        let condition = self.condition()?;
        let then = self.body()?;
        let otherwise = if self.eat_word("else")? {
            self.body()?
        } else {
            Block::default()
        };
        Ok(StatementKind::If {
            condition,
            then,
            otherwise,
        })
    }

    /// Parses `for ($kv : @map) ...` and `for ($i : first..end) ...`; `for` is ahead. The
    /// parentheses may be left out.
    fn for_loop(&mut self) -> Parsed<StatementKind> {
        self.next()?;
        let parentheses = self.eat("(")?;
        let TokenKind::Local(variable) = self.peek()?.kind else {
            return Err(self.unexpected("a variable, such as $kv"));
        };
        let variable = variable.to_owned();
        self.next()?;
        self.expect(":", "after the loop's variable")?;
        let first = self.inside(Self::expression)?;
        if self.eat("..")? {
            let end = self.inside(Self::expression)?;
            let body = self.loop_body(parentheses)?;
            return Ok(StatementKind::ForRange {
                variable,
                first,
                end,
                body,
            });
        }
        if let Some((map, [])) = first.as_global() {
            let map = map.to_owned();
            let body = self.loop_body(parentheses)?;
            return Ok(StatementKind::ForMap {
                variable,
                map,
                body,
            });
        }
        let message = "a loop goes over a map, @x, or over numbers, first..end";
        Err(Diagnostic::new(first.span, message))
    }

    /// Parses the repeated block, behind the parenthesis that may be open.
    fn loop_body(&mut self, parentheses: bool) -> Parsed<Block> {
        if parentheses {
            self.expect(")", "after the range of the loop")?;
        }
        self.body()
    }
}

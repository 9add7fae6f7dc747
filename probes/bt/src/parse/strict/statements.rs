//! Parses statements of the strict dialect.

use super::super::tree::Tall;
use super::{Parsed, Parser, SyntaxError};
use crate::ast::{
    Aggregation, Block, Call, Expression, ExpressionKind, Function, Lvalue, LvalueKind, Span,
    Statement, StatementKind,
};
use crate::lex::strict::Token;
use crate::names::StrictWord;

impl Parser<'_> {
    /// Parses `{ ... }`.
    pub(super) fn action(&mut self) -> Parsed<Block> {
        self.expect(b'{')?;
        let mut block = Block::default();
        while !self.eat(b'}') {
            block.statements.extend(self.deeper(Self::statement)?);
        }
        Ok(block)
    }

    /// Parses `{ ... }`, or one statement with its `;`.
    fn block(&mut self) -> Parsed<Block> {
        if *self.peek() == Token::Byte(b'{') {
            return self.action();
        }
        if *self.peek() == Token::Keyword(StrictWord::If) {
            return Err(SyntaxError);
        }
        let statement = self.deeper(Self::statement)?;
        self.expect(b';')?;
        Ok(Block {
            statements: statement.into_iter().collect(),
        })
    }

    /// Parses a statement; returns `None` for `;` alone.
    fn statement(&mut self) -> Parsed<Option<Statement>> {
        let start = self.here();
        let kind = match self.peek().clone() {
            Token::Byte(b';') => {
                self.next();
                return Ok(None);
            }
            Token::Global(name) => {
                self.next();
                self.store_global(name, start)?
            }
            Token::Local(name) => {
                self.next();
                let place = self.place(LvalueKind::Local(name), start);
                self.expect(b'=')?;
                StatementKind::Assign {
                    place,
                    operator: None,
                    value: self.expression()?.expression,
                }
            }
            Token::Keyword(StrictWord::If) => self.condition()?,
            Token::Keyword(word) => self.call_statement(word)?,
            _ => return Err(SyntaxError),
        };
        Ok(Some(Statement {
            kind,
            span: self.from(start),
        }))
    }

    pub(super) fn place(&self, kind: LvalueKind, start: Span) -> Lvalue {
        Lvalue {
            kind,
            span: self.from(start),
        }
    }

    /// Parses the rest of `if`, which is ahead.
    fn condition(&mut self) -> Parsed<StatementKind> {
        self.next();
        self.expect(b'(')?;
        let condition = self.expression()?.expression;
        self.expect(b')')?;
        let then = self.block()?;
        let mut otherwise = Block::default();
        if *self.peek() == Token::Keyword(StrictWord::Else) {
            self.next();
            if *self.peek() == Token::Keyword(StrictWord::If) {
                otherwise.statements.extend(self.deeper(Self::statement)?);
            } else {
                otherwise = self.block()?;
            }
        }
        Ok(StatementKind::If {
            condition,
            then,
            otherwise,
        })
    }

    /// Parses the rest behind `@name`.
    fn store_global(&mut self, name: String, start: Span) -> Parsed<StatementKind> {
        let (keys, _) = self.keys()?;
        let tuple = matches!(
            keys.first().map(|key| &key.kind),
            Some(ExpressionKind::Tuple(_))
        );
        let is_map = !keys.is_empty();
        let place = self.place(LvalueKind::Global { name, keys }, start);
        self.expect(b'=')?;
        let gathered = match self.peek() {
            Token::Keyword(StrictWord::Hist) if !is_map => {
                Some((Aggregation::PowerHistogram(0), Some(self.argument()?)))
            }
            Token::Keyword(StrictWord::Lhist) if !is_map => {
                let (value, aggregation) = self.linear_histogram()?;
                Some((aggregation, Some(value)))
            }
            Token::Keyword(StrictWord::Count) if is_map => {
                self.next();
                self.expect(b'(')?;
                self.expect(b')')?;
                Some((Aggregation::Count, None))
            }
            Token::Keyword(StrictWord::OfValue(aggregation)) if is_map => {
                let aggregation = *aggregation;
                Some((aggregation, Some(self.argument()?)))
            }
            _ => None,
        };
        let is_whole = gathered.is_some();
        let kind = match gathered {
            Some((aggregation, value)) => StatementKind::Aggregate {
                place,
                aggregation,
                value,
                range: Vec::new(),
            },
            None => StatementKind::Assign {
                place,
                operator: None,
                value: self.expression()?.expression,
            },
        };
        if tuple && (is_whole || self.ends_statement()) {
            self.lexer.wrong("tuple cannot be used as map key");
        }
        Ok(kind)
    }

    /// Checks whether the token ahead may follow an expression that ends a statement. Only then
    /// btrace takes both for whole.
    fn ends_statement(&mut self) -> bool {
        use StrictWord as W;
        match self.peek() {
            Token::Byte(byte) => matches!(byte, b';' | b'}'),
            Token::Keyword(word) => matches!(
                word,
                W::If | W::OfVariable(_) | W::Delete | W::Exit | W::Print | W::Printf | W::Time
            ),
            token => matches!(token, Token::Global(_) | Token::Local(_)),
        }
    }

    /// Parses `(x)` behind a word that is ahead.
    fn argument(&mut self) -> Parsed<Expression> {
        self.next();
        self.expect(b'(')?;
        let value = self.expression()?.expression;
        self.expect(b')')?;
        Ok(value)
    }

    /// Parses `lhist(x, min, max, step)`, of which the name is ahead. Returns x and its buckets.
    fn linear_histogram(&mut self) -> Parsed<(Expression, Aggregation)> {
        self.next();
        self.expect(b'(')?;
        let value = self.expression()?.expression;
        self.expect(b',')?;
        let (range, _) = self.list()?;
        self.expect(b')')?;
        let mut numbers = [0i64; 3];
        for (count, argument) in range.iter().enumerate() {
            let Some(slot) = numbers.get_mut(count) else {
                self.lexer.wrong("too many arguments");
                // btrace aborts here.
                break;
            };
            let ExpressionKind::Number(number) = argument.kind else {
                self.lexer.wrong("type invalid");
                continue;
            };
            *slot = number;
            let [min, ..] = numbers;
            // There are no negative numbers, so no text can cause "negative minimum".
            if count == 1 && number <= min {
                self.lexer
                    .wrong(format!("maximum smaller than minimum ({number} < {min})"));
            }
        }
        if range.len() < 3 {
            self.lexer
                .wrong(format!("{} missing arguments", 3 - range.len()));
        }
        let [min, max, step] = numbers;
        let aggregation = Aggregation::LinearHistogram {
            min,
            max,
            // OpenBSD divides by it unchecked.
            step: step.max(1),
        };
        Ok((value, aggregation))
    }

    /// Parses a function that is no expression; its name is ahead.
    fn call_statement(&mut self, word: StrictWord) -> Parsed<StatementKind> {
        let name_span = self.here();
        let function = match word {
            StrictWord::OfVariable(function) => function,
            StrictWord::Delete => Function::Delete,
            StrictWord::Exit => Function::Exit,
            StrictWord::Print => Function::Print,
            StrictWord::Printf => Function::Printf,
            StrictWord::Time => Function::Time,
            _ => return Err(SyntaxError),
        };
        self.next();
        self.expect(b'(')?;
        let arguments = match function {
            Function::Exit => Vec::new(),
            Function::Printf => self.list()?.0,
            Function::Time => vec![self.expression()?.expression],
            Function::Print => self.print_arguments()?,
            Function::Delete => {
                let start = self.here();
                let Token::Global(name) = self.peek().clone() else {
                    return Err(SyntaxError);
                };
                self.next();
                if *self.peek() != Token::Byte(b'[') {
                    return Err(SyntaxError);
                }
                vec![self.global(name, start)?.expression]
            }
            _ => vec![self.variable()?.expression],
        };
        self.expect(b')')?;
        let call = ExpressionKind::Call(Call {
            function,
            name_span,
            arguments,
        });
        Ok(StatementKind::Expression(Expression {
            kind: call,
            span: self.from(name_span),
        }))
    }

    /// Parses `$x`, `@x`, or an item of a tuple that such a variable holds.
    pub(super) fn variable(&mut self) -> Parsed<Tall> {
        let start = self.here();
        let kind = match self.peek().clone() {
            Token::Local(name) => LvalueKind::Local(name),
            Token::Global(name) => LvalueKind::Global {
                name,
                keys: Vec::new(),
            },
            _ => return Err(SyntaxError),
        };
        self.next();
        let place = self.place(kind, start);
        let variable = self.node(ExpressionKind::Lvalue(Box::new(place)), start, 0)?;
        self.items(variable)
    }

    /// Parses an expression, or a global with the number of its entries to print.
    fn print_arguments(&mut self) -> Parsed<Vec<Expression>> {
        let first = self.expression()?.expression;
        let whole = first.is_whole_global();
        let mut arguments = vec![first];
        if whole && self.eat(b',') {
            arguments.push(self.expression()?.expression);
        }
        Ok(arguments)
    }
}

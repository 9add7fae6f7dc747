//! Parses macros, functions, and blocks with a value.
//!
//! [`expand`](super::expand) replaces their calls.

use std::ops::Range;

use super::expressions::node;
use super::tree::Tall;
use super::{Parsed, Parser};
use crate::ast::{
    Block, BlockExpression, Expression, ExpressionKind, Lvalue, LvalueKind, Macro, Parameter, Span,
    Statement, StatementKind,
};
use crate::diagnostic::Diagnostic;
use crate::lex::normal::{Lexer, TokenKind};
use crate::names;

/// The greatest number of parameters.
const MOST_PARAMETERS: usize = 64;

impl<'t> Parser<'t> {
    /// Parses `macro name($x, @y, z) { ... }`; the parentheses may be left out.
    pub(super) fn macro_definition(&mut self) -> Parsed<Macro> {
        self.next()?;
        let (name, span) = self.expect_word("the macro's name")?;
        let mut parameters = Vec::new();
        if self.eat("(")? {
            self.parameters(|parser| {
                let token = parser.next()?;
                parameters.push(match token.kind {
                    TokenKind::Local(name) => Parameter::Variable(name.to_owned()),
                    TokenKind::Global(name) => Parameter::Map(name.to_owned()),
                    TokenKind::Word(name) => Parameter::Expression(name.to_owned()),
                    _ => {
                        let message = "expected a parameter: $x, @x or x";
                        return Err(Diagnostic::new(token.span, message));
                    }
                });
                Ok(())
            })?;
        }
        let (body, _) = self.block_with_value()?;
        Ok(Macro {
            name: name.to_owned(),
            parameters,
            body,
            span,
        })
    }

    /// Parses `fn name($x : type, ...) : type { ... }`.
    pub(super) fn function_definition(&mut self) -> Parsed<Macro> {
        self.next()?;
        let (name, span) = self.expect_word("the function's name")?;
        self.expect("(", "after the function's name")?;
        let mut parameters = Vec::new();
        self.parameters(|parser| {
            let token = parser.next()?;
            let TokenKind::Local(name) = token.kind else {
                return Err(Diagnostic::new(
                    token.span,
                    "expected a parameter, such as $x",
                ));
            };
            parameters.push(Parameter::Variable(name.to_owned()));
            if parser.eat(":")? {
                parser.annotation()?;
            }
            Ok(())
        })?;
        if self.eat(":")? {
            self.annotation()?;
        }
        let (body, _) = self.block_with_value()?;
        Ok(Macro {
            name: name.to_owned(),
            parameters,
            body: BlockExpression {
                is_function: true,
                ..body
            },
            span,
        })
    }

    /// Parses parameters by `one`, up to the `)`.
    fn parameters(&mut self, mut one: impl FnMut(&mut Self) -> Parsed<()>) -> Parsed<()> {
        for _ in 0..MOST_PARAMETERS {
            if self.eat(")")? {
                return Ok(());
            }
            one(self)?;
            if !self.eat(",")? {
                self.expect(")", "after the parameters")?;
                return Ok(());
            }
        }
        let message = format!("more than {MOST_PARAMETERS} parameters");
        Err(Diagnostic::new(self.here()?, message))
    }

    /// Parses the statements of `{ ... }`. The last one is the value if it is an expression without
    /// `;`. Returns also the height of the highest expression in it.
    pub(super) fn block_with_value(&mut self) -> Parsed<(BlockExpression, usize)> {
        let before = std::mem::replace(&mut self.highest, 0);
        let mut block = self.inside(Self::block)?;
        let below = self.highest;
        self.highest = before.max(below);
        let has_value = !self.ended_by_semicolon
            && matches!(
                block.statements.last(),
                Some(Statement {
                    kind: StatementKind::Expression(_),
                    ..
                })
            );
        let value = match has_value.then(|| block.statements.pop()).flatten() {
            Some(Statement {
                kind: StatementKind::Expression(value),
                ..
            }) => Some(value),
            _ if self.ended_by_semicolon => None,
            _ => branches_value(&mut block),
        };
        let found = BlockExpression {
            block,
            value,
            is_function: false,
        };
        Ok((found, below))
    }

    /// Parses a block as an operand; the `{` is ahead.
    pub(super) fn block_operand(&mut self) -> Parsed<Tall> {
        let start = self.here()?;
        let (found, below) = self.block_with_value()?;
        let span = self.since(start);
        if self.input.is_some() {
            let message = "a translator's member is one expression, without statements";
            return Err(Diagnostic::new(span, message));
        }
        node(ExpressionKind::Block(Box::new(found)), span, below)
    }

    /// Parses `if (condition) { x } else { y }` as an operand; `if` is ahead. Without `else`, the
    /// other value is 0.
    pub(super) fn if_value(&mut self) -> Parsed<Tall> {
        let start = self.here()?;
        let before = std::mem::replace(&mut self.highest, 0);
        let condition = self.condition()?;
        let mut below = self.highest;
        self.highest = before.max(below);
        let then = self.deeper(Self::block_operand)?;
        below = below.max(then.height);
        let otherwise = match (self.eat_word("else")?, self.peek()?.kind) {
            (true, TokenKind::Word("if")) => self.deeper(Self::if_value)?,
            (true, _) => self.deeper(Self::block_operand)?,
            (false, _) => node(ExpressionKind::Number(0), start, 0)?,
        };
        below = below.max(otherwise.height);
        let kind = ExpressionKind::Conditional {
            condition: Box::new(condition),
            then: Some(Box::new(then.expression)),
            otherwise: Box::new(otherwise.expression),
        };
        node(kind, self.since(start), below)
    }

    /// Makes the constants of `#define`, of which `text` has the values.
    pub(super) fn constants(text: &'t [u8], places: &[(Span, Range<usize>)]) -> Vec<Macro> {
        let made = places.iter().map(|(span, range)| {
            let line = text.get(..range.end).unwrap_or_default();
            let mut parser = Parser::of(Lexer::at(line, range.start));
            let value = parser
                .expression()
                .and_then(|value| match parser.peek()?.kind {
                    TokenKind::End => Ok(value),
                    _ => Err(parser.unexpected("the end of the constant")),
                });
            let name = text.get(span.start..span.end).unwrap_or_default();
            let value = value.ok();
            Macro {
                name: String::from_utf8_lossy(name).into_owned(),
                parameters: Vec::new(),
                body: BlockExpression {
                    block: Block::default(),
                    value,
                    is_function: false,
                },
                span: *span,
            }
        });
        made.collect()
    }
}

/// Takes an `if` with two values from the end of a block: `{ if (c) { x } else { y } }`.
fn branches_value(of: &mut Block) -> Option<Expression> {
    if !of.statements.last().is_some_and(has_values) {
        return None;
    }
    let Statement {
        kind:
            StatementKind::If {
                condition,
                then,
                otherwise,
            },
        span,
    } = of.statements.pop()?
    else {
        return None;
    };
    let value = |mut block: Block| {
        let value = match branches_value(&mut block) {
            Some(value) => Some(value),
            None => match block.statements.pop()?.kind {
                StatementKind::Expression(value) => Some(value),
                _ => None,
            },
        };
        let kind = ExpressionKind::Block(Box::new(BlockExpression {
            block,
            value,
            is_function: false,
        }));
        Some(Box::new(Expression { kind, span }))
    };
    let kind = ExpressionKind::Conditional {
        condition: Box::new(condition),
        then: Some(value(then)?),
        otherwise: value(otherwise)?,
    };
    Some(Expression { kind, span })
}

/// Checks whether both branches of an `if` end in a value.
fn has_values(of: &Statement) -> bool {
    let StatementKind::If {
        then, otherwise, ..
    } = &of.kind
    else {
        return false;
    };
    [then, otherwise].into_iter().all(|block| {
        let last = block.statements.last();
        last.is_some_and(|last| match &last.kind {
            StatementKind::Expression(value) => !is_effect(value),
            _ => has_values(last),
        })
    })
}

/// Checks whether an expression is the call of a function that gives no value.
fn is_effect(of: &Expression) -> bool {
    match &of.kind {
        ExpressionKind::Call(call) => {
            names::signature_of(call.function).is_none_or(|known| !known.gives_value)
        }
        _ => false,
    }
}

/// Makes `$name = value;`.
pub(super) fn assignment(name: &str, value: Expression) -> Statement {
    let span = value.span;
    Statement {
        kind: StatementKind::Assign {
            place: Lvalue {
                kind: LvalueKind::Local(name.to_owned()),
                span,
            },
            operator: None,
            value,
        },
        span,
    }
}

//! Parses expressions of the strict dialect: three levels of operators with two operands, and no
//! other operators.

use super::super::tree::Tall;
use super::{Parsed, Parser, SyntaxError};
use crate::ast::{
    BinaryOperator, Builtin, Call, Expression, ExpressionKind, Function, LvalueKind, Span,
};
use crate::lex::strict::Token;
use crate::names::StrictWord;

impl Parser<'_> {
    /// Parses expressions with commas between. Returns also the height of the highest.
    pub(super) fn list(&mut self) -> Parsed<(Vec<Expression>, usize)> {
        let first = self.expression()?;
        let mut below = first.height;
        let mut list = vec![first.expression];
        while self.eat(b',') {
            let next = self.expression()?;
            below = below.max(next.height);
            list.push(next.expression);
        }
        Ok((list, below))
    }

    pub(super) fn expression(&mut self) -> Parsed<Tall> {
        self.deeper(|parser| parser.binary(0))
    }

    /// Parses the three levels of operators, all of them from left to right.
    fn binary(&mut self, level: usize) -> Parsed<Tall> {
        let operand = |parser: &mut Self| match level {
            2 => parser.factor(),
            _ => parser.binary(level + 1),
        };
        let mut left = operand(self)?;
        while let Some(operator) = operator(self.peek(), level) {
            self.next();
            let right = operand(self)?;
            let span = left.expression.span.to(right.expression.span);
            let below = left.height.max(right.height);
            let (left_side, right_side) = (Box::new(left.expression), Box::new(right.expression));
            left = self.node(
                ExpressionKind::Binary(operator, left_side, right_side),
                span,
                below,
            )?;
        }
        Ok(left)
    }

    pub(super) fn factor(&mut self) -> Parsed<Tall> {
        let start = self.here();
        let token = self.peek().clone();
        let kind = match token {
            Token::Byte(b'(') => return self.parentheses(start),
            Token::Number(number) => ExpressionKind::Number(number),
            Token::Text(text) => ExpressionKind::Text(text),
            Token::Argument(number) => ExpressionKind::Argument(number),
            Token::ArgumentCount => ExpressionKind::ArgumentCount,
            Token::Keyword(StrictWord::Builtin(builtin)) => ExpressionKind::Builtin(builtin),
            Token::Keyword(StrictWord::ProbeArgument(number)) => {
                ExpressionKind::Builtin(Builtin::Argument(number))
            }
            Token::Keyword(StrictWord::Str) => return self.str_call(start),
            Token::Local(_) => return self.variable(),
            Token::Global(name) => {
                self.next();
                return self.global(name, start);
            }
            _ => return Err(SyntaxError),
        };
        self.next();
        self.node(kind, start, 0)
    }

    /// Parses `(x)`, or a tuple.
    fn parentheses(&mut self, start: Span) -> Parsed<Tall> {
        self.next();
        let (mut items, below) = self.list()?;
        self.expect(b')')?;
        if items.len() == 1
            && let Some(expression) = items.pop()
        {
            let height = below;
            return Ok(Tall { expression, height });
        }
        let span = self.from(start);
        self.node(ExpressionKind::Tuple(items), span, below)
    }

    /// Parses `@name`, `@name[keys]` or `@name.0`; the name was read.
    pub(super) fn global(&mut self, name: String, start: Span) -> Parsed<Tall> {
        let (keys, below) = self.keys()?;
        let is_map = !keys.is_empty();
        let place = self.place(LvalueKind::Global { name, keys }, start);
        let span = place.span;
        let variable = self.node(ExpressionKind::Lvalue(Box::new(place)), span, below)?;
        if is_map {
            Ok(variable)
        } else {
            self.items(variable)
        }
    }

    /// Parses `[keys]` behind a global variable, if they are there. Returns also the height of the
    /// highest.
    pub(super) fn keys(&mut self) -> Parsed<(Vec<Expression>, usize)> {
        if !self.eat(b'[') {
            return Ok((Vec::new(), 0));
        }
        let keys = self.list()?;
        self.expect(b']')?;
        Ok(keys)
    }

    /// Parses `.0` and the like behind a variable. Of several the last one counts.
    pub(super) fn items(&mut self, variable: Tall) -> Parsed<Tall> {
        let start = variable.expression.span;
        let mut last = None;
        while self.eat(b'.') {
            let Token::Number(number) = *self.peek() else {
                return Err(SyntaxError);
            };
            self.next();
            last = usize::try_from(number).ok();
        }
        let Some(index) = last else {
            return Ok(variable);
        };
        let span = self.from(start);
        let below = variable.height;
        let of = Box::new(variable.expression);
        self.node(ExpressionKind::Item { of, index }, span, below)
    }

    /// Parses `str($1)` or `str($1, length)`.
    fn str_call(&mut self, start: Span) -> Parsed<Tall> {
        self.next();
        self.expect(b'(')?;
        let argument_span = self.here();
        let Token::Argument(number) = *self.peek() else {
            return Err(SyntaxError);
        };
        self.next();
        let mut arguments = vec![Expression {
            kind: ExpressionKind::Argument(number),
            span: argument_span,
        }];
        let mut below = 0;
        if self.eat(b',') {
            let length = self.expression()?;
            below = length.height;
            arguments.push(length.expression);
        }
        self.expect(b')')?;
        let span = self.from(start);
        let call = Call {
            function: Function::Str,
            name_span: start,
            arguments,
        };
        self.node(ExpressionKind::Call(call), span, below)
    }
}

/// Returns the operator of a level that a token is, if it is one.
fn operator(token: &Token, level: usize) -> Option<BinaryOperator> {
    use BinaryOperator as B;
    Some(match (level, token) {
        (0, Token::Double(b'&')) => B::LogicalAnd,
        (0, Token::Double(b'|')) => B::LogicalOr,
        (1, Token::Double(b'=')) => B::Equal,
        (1, Token::Double(b'!')) => B::NotEqual,
        (1, Token::Double(b'<')) => B::LessOrEqual,
        (1, Token::Double(b'>')) => B::GreaterOrEqual,
        (1, Token::Byte(b'<')) => B::Less,
        (1, Token::Byte(b'>')) => B::Greater,
        (1, Token::Byte(b'+')) => B::Add,
        (1, Token::Byte(b'-')) => B::Subtract,
        (1, Token::Byte(b'&')) => B::And,
        (1, Token::Byte(b'^')) => B::Xor,
        (1, Token::Byte(b'|')) => B::Or,
        (2, Token::Byte(b'*')) => B::Multiply,
        (2, Token::Byte(b'/')) => B::Divide,
        (2, Token::Byte(b'%')) => B::Modulo,
        _ => return None,
    })
}

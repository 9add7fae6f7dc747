//! Parses translators, as in dtrace(1): the members of a stable structure in terms of a kernel's.

use super::expressions::node;
use super::tree::Tall;
use super::{Parsed, Parser};
use crate::ast::{Expression, ExpressionKind, Span, Translator};
use crate::diagnostic::Diagnostic;
use crate::lex::normal::TokenKind;
use std::collections::BTreeSet;

impl<'t> Parser<'t> {
    /// Parses `translator output < input *name > { member = expression; ... };`
    pub(super) fn translator(&mut self) -> Parsed<Translator> {
        let start = self.next()?.span;
        let output = self.type_name()?;
        if output.pointers > 0 {
            let message = "a translator makes a structure, not a pointer; leave the '*' out";
            return Err(Diagnostic::new(output.span, message));
        }
        self.expect("<", "before the translator's input")?;
        let input = self.type_name()?;
        let (variable, _) = self.expect_word("a name for the input")?;
        self.expect(">", "after the translator's input")?;
        self.expect("{", "before the translator's members")?;
        self.input = Some(variable.to_owned());
        let mut members = Vec::new();
        let mut names = BTreeSet::new();
        while !self.eat("}")? {
            if let Err(problem) = self.member(&mut members, &mut names) {
                // At the end of the text nothing is left to skip.
                let at_end = matches!(self.peek().map(|token| token.kind), Ok(TokenKind::End));
                if at_end || !self.report(problem.clone()) {
                    return Err(problem);
                }
                self.skip_statement();
            }
        }
        self.input = None;
        self.eat(";")?;
        Ok(Translator {
            output,
            input,
            variable: variable.to_owned(),
            members,
            span: self.since(start),
        })
    }

    /// Parses `member = expression;`
    fn member(
        &mut self,
        members: &mut Vec<(String, Expression)>,
        names: &mut BTreeSet<&'t str>,
    ) -> Parsed<()> {
        let (name, span) = self.expect_word("a member's name, or '}',")?;
        self.expect("=", "after the member's name")?;
        let value = self.expression()?;
        self.expect(";", "after the member")?;
        if !names.insert(name) {
            let message = format!("the member '{name}' is translated twice");
            self.report(Diagnostic::new(span, message));
        }
        members.push((name.to_owned(), value));
        Ok(())
    }

    /// Parses `xlate <type>(x)`, of which `xlate` was read.
    pub(super) fn translate(&mut self, start: Span) -> Parsed<Tall> {
        self.expect("<", "after xlate")?;
        let to = self.type_name()?;
        self.expect(">", "after the type")?;
        self.expect("(", "after xlate's type")?;
        let of = self.inside(|parser| parser.tall())?;
        self.expect(")", "after xlate's input")?;
        let kind = ExpressionKind::Translate {
            to,
            of: Box::new(of.expression),
        };
        node(kind, self.since(start), of.height)
    }
}

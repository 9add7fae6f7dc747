//! Parses names of types, and structures.

use super::{Parsed, Parser};
use crate::ast::{Structure, StructureMember, TypeName};
use crate::diagnostic::Diagnostic;
use crate::lex::normal::TokenKind;
use crate::names;
use std::collections::BTreeSet;

/// The words that occur only in types.
const TYPE_WORDS: &[&str] = &[
    "struct", "union", "enum", "const", "volatile", "unsigned", "signed", "long", "short", "int",
    "char", "void", "bool", "_Bool", "float", "double", "int8", "int16", "int32", "int64", "uint8",
    "uint16", "uint32", "uint64", "u8", "u16", "u32", "u64", "s8", "s16", "s32", "s64",
];

/// The words of which several make one type.
const COMBINED: &[&str] = &["unsigned", "signed", "long", "short", "int", "char"];

/// The greatest number of `*` of a type.
const MOST_POINTERS: usize = 8;

impl Parser<'_> {
    /// Checks whether a name may be a type's: it is neither a translator's input nor a word of the
    /// language.
    fn may_be_type(&self, word: &str) -> bool {
        !names::is_taken(word) && self.input.as_deref() != Some(word)
    }

    /// Checks whether a type comes next: one of C's words, or a name that is no value.
    pub(super) fn at_type(&mut self) -> Parsed<bool> {
        let TokenKind::Word(word) = self.peek()?.kind else {
            return Ok(false);
        };
        Ok(TYPE_WORDS.contains(&word) || self.may_be_type(word))
    }

    /// Parses `const struct file *`.
    pub(super) fn type_name(&mut self) -> Parsed<TypeName> {
        let start = self.here()?;
        let mut base = self.base_type()?;
        // `signed` matters only before `char`, which has a sign of its own here.
        if let Some(plain) = base.strip_prefix("signed ") {
            base = plain.to_owned();
        } else if base == "signed" {
            base = "int".to_owned();
        }
        let pointers = self.pointers()?;
        Ok(TypeName {
            base,
            pointers,
            span: self.since(start),
        })
    }

    /// Parses a type without `*`.
    fn base_type(&mut self) -> Parsed<String> {
        self.qualifiers()?;
        let (first, span) = self.expect_word("a type")?;
        let base = match first {
            "struct" | "union" | "enum" => {
                let (name, _) = self.expect_word(&format!("the name of a {first}"))?;
                format!("{first} {name}")
            }
            _ if COMBINED.contains(&first) => {
                let mut words = vec![first];
                while let TokenKind::Word(word) = self.peek()?.kind {
                    if !COMBINED.contains(&word) {
                        break;
                    }
                    self.next()?;
                    if words.len() > 3 {
                        return Err(Diagnostic::new(self.since(span), "expected a type"));
                    }
                    words.push(word);
                }
                words.join(" ")
            }
            _ => first.to_owned(),
        };
        self.qualifiers()?;
        Ok(base)
    }

    fn qualifiers(&mut self) -> Parsed<()> {
        while self.eat_word("const")? || self.eat_word("volatile")? {}
        Ok(())
    }

    /// Reads the `*` that follow and returns their number; qualifiers between them are skipped.
    fn pointers(&mut self) -> Parsed<usize> {
        let mut pointers = 0;
        while self.eat("*")? {
            self.qualifiers()?;
            pointers += 1;
            if pointers > MOST_POINTERS {
                let message = format!("a pointer of more than {MOST_POINTERS} levels");
                return Err(Diagnostic::new(self.last, message));
            }
        }
        Ok(pointers)
    }

    /// Parses `(type)` before an operand if that comes next; otherwise nothing is read. `(x)` is a
    /// type if an operand follows and the name is neither a builtin nor a translator's input. `(x
    /// *)` is a type, too.
    pub(super) fn cast(&mut self) -> Parsed<Option<TypeName>> {
        let start = self.position();
        self.next()?;
        let TokenKind::Word(word) = self.peek()?.kind else {
            self.rewind(start);
            return Ok(None);
        };
        let certain = TYPE_WORDS.contains(&word);
        if !certain && !self.may_be_type(word) {
            self.rewind(start);
            return Ok(None);
        }
        let name = self.type_name();
        if certain {
            let name = name?;
            self.refuse("[", "casts to arrays are not offered; cast to a pointer")?;
            self.expect(")", "after the type")?;
            return Ok(Some(name));
        }
        if let Ok(name) = name
            && self.eat(")")?
            && (name.pointers > 0 || self.at_operand()?)
        {
            return Ok(Some(name));
        }
        self.rewind(start);
        Ok(None)
    }

    /// Checks whether the next token can only begin an operand.
    fn at_operand(&mut self) -> Parsed<bool> {
        Ok(match self.peek()?.kind {
            TokenKind::Word(_)
            | TokenKind::Number(_)
            | TokenKind::Text
            | TokenKind::Local(_)
            | TokenKind::Global(_)
            | TokenKind::Argument(_)
            | TokenKind::ArgumentCount => true,
            TokenKind::Punctuation(text) => text == "(",
            TokenKind::End => false,
        })
    }

    /// Parses `struct name { ... };`
    pub(super) fn structure(&mut self) -> Parsed<Structure> {
        let start = self.next()?.span;
        let (name, _) = self.expect_word("the structure's name")?;
        let members = self.members(name)?;
        // C needs it, bpftrace does not.
        self.eat(";")?;
        Ok(Structure {
            name: name.to_owned(),
            members,
            span: self.since(start),
        })
    }

    /// Parses `typedef struct tag { ... } name;`, with a structure for each of the two names.
    pub(super) fn typedef(&mut self) -> Parsed<Vec<Structure>> {
        let start = self.next()?.span;
        if !self.eat_word("struct")? {
            let message = "only structures can be defined; write the type itself where it is used";
            return Err(Diagnostic::new(self.here()?, message));
        }
        let mut found = Vec::new();
        if let TokenKind::Word(tag) = self.peek()?.kind {
            self.next()?;
            found.push(tag);
        }
        let members = self.members(found.first().unwrap_or(&"typedef"))?;
        let (name, _) = self.expect_word("the type's name")?;
        if !found.contains(&name) {
            found.push(name);
        }
        self.expect(";", "after the type's name")?;
        let span = self.since(start);
        Ok(found
            .into_iter()
            .map(|name| Structure {
                name: name.to_owned(),
                members: members.clone(),
                span,
            })
            .collect())
    }

    /// Parses `{ type name, name[3]; ... }`.
    fn members(&mut self, of: &str) -> Parsed<Vec<StructureMember>> {
        self.expect("{", &format!("after struct {of}"))?;
        let mut members = Vec::new();
        let mut names = BTreeSet::new();
        while !self.eat("}")? {
            let start = self.here()?;
            let base = self.type_name()?;
            if self.is("{")? {
                let message = "a structure inside another is not offered; define it by itself";
                return Err(Diagnostic::new(self.since(start), message));
            }
            let mut type_name = base.clone();
            loop {
                self.refuse("(", "pointers to functions are not offered; write void *")?;
                let (name, span) = self.expect_word("a member's name")?;
                if !names.insert(name) {
                    let message = format!("struct {of} has a member '{name}' already");
                    self.report(Diagnostic::new(span, message));
                }
                let elements = self.elements()?;
                let instead = "bit fields are not offered; take the whole number and its bits";
                self.refuse(":", instead)?;
                members.push(StructureMember {
                    type_name: type_name.clone(),
                    name: name.to_owned(),
                    elements,
                });
                if !self.eat(",")? {
                    break;
                }
                type_name = TypeName {
                    pointers: self.pointers()?,
                    ..base.clone()
                };
            }
            self.expect(";", "after the member")?;
        }
        Ok(members)
    }

    /// Parses `[16]`.
    fn elements(&mut self) -> Parsed<Option<u64>> {
        if !self.eat("[")? {
            return Ok(None);
        }
        let TokenKind::Number(elements) = self.peek()?.kind else {
            return Err(self.unexpected("the number of elements"));
        };
        self.next()?;
        self.expect("]", "after the number of elements")?;
        self.refuse("[", "arrays of arrays are not offered")?;
        Ok(Some(elements))
    }
}

//! Parses names of types, `sizeof` and `offsetof`, and structures.

use super::expressions::{MOST_ITEMS, node};
use super::tree::Tall;
use super::{Parsed, Parser};
use crate::ast::{Expression, ExpressionKind, Span, Structure, StructureMember, TypeName};
use crate::diagnostic::Diagnostic;
use crate::lex::normal::TokenKind;
use crate::names;
use std::collections::BTreeSet;

/// The words that occur only in types.
const TYPE_WORDS: &[&str] = &[
    "struct", "union", "enum", "const", "volatile", "unsigned", "signed", "long", "short", "int",
    "char", "void", "bool", "_Bool", "float", "double", "int8", "int16", "int32", "int64", "uint8",
    "uint16", "uint32", "uint64", "u8", "u16", "u32", "u64", "s8", "s16", "s32", "s64", TYPEOF,
];

/// The word before a value whose type is meant.
const TYPEOF: &str = "typeof";

/// The words of which several make one type.
const COMBINED: &[&str] = &["unsigned", "signed", "long", "short", "int", "char"];

/// The types of values that are no numbers, as bpftrace names them.
const OTHER_TYPES: &[&str] = &[
    "string",
    "buffer",
    "inet",
    "timestamp",
    "kstack_t",
    "ustack_t",
    "ksym_t",
    "usym_t",
    "mac_address",
    "cgroup_path_t",
    "strerror_t",
];

/// A part of the names of structures inside others.
const INNER: &str = "::";

/// The greatest number of `*` of a type.
const MOST_POINTERS: usize = 8;
/// The greatest number of dimensions of an array.
const MOST_DIMENSIONS: usize = 4;

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
            like: None,
            pointers,
            elements: None,
            span: self.since(start),
        })
    }

    /// Parses a type, or `typeof(x)` in the place of one. Returns also the height of `x`.
    pub(super) fn type_or_typeof(&mut self) -> Parsed<(TypeName, usize)> {
        let start = self.here()?;
        self.qualifiers()?;
        if !self.eat_word(TYPEOF)? {
            return Ok((self.type_name()?, 0));
        }
        self.expect("(", "after typeof")?;
        let (mut of, below) = match self.at_type()? {
            true => self.deeper(|parser| parser.inside(Self::type_or_typeof))?,
            false => {
                let like = self.deeper(|parser| parser.inside(Self::tall))?;
                (self.type_of(like.expression), like.height)
            }
        };
        self.expect(")", "after typeof's value")?;
        of.pointers += self.pointers()?;
        of.span = self.since(start);
        Ok((of, below))
    }

    /// Returns the type of a value.
    pub(super) fn type_of(&self, like: Expression) -> TypeName {
        TypeName {
            base: TYPEOF.to_owned(),
            span: like.span,
            like: Some(Box::new(like)),
            pointers: 0,
            elements: None,
        }
    }

    /// Parses `sizeof(type)` and `sizeof(expression)`.
    pub(super) fn size_of(&mut self) -> Parsed<Tall> {
        let start = self.next()?.span;
        self.expect("(", "after sizeof")?;
        let (kind, below) = if self.at_type()? {
            let (of, below) = self.type_or_typeof()?;
            let of = self.array_of(of)?;
            match of.like {
                Some(like) if of.pointers == 0 && of.elements.is_none() => {
                    (ExpressionKind::SizeOfValue(like), below)
                }
                _ => (ExpressionKind::SizeOfType(of), below),
            }
        } else {
            let of = self.inside(Self::tall)?;
            (
                ExpressionKind::SizeOfValue(Box::new(of.expression)),
                of.height,
            )
        };
        self.expect(")", "after sizeof's type")?;
        node(kind, self.since(start), below)
    }

    /// Parses `typeinfo(type)` and `typeinfo(expression)`.
    pub(super) fn type_info(&mut self) -> Parsed<Tall> {
        let start = self.next()?.span;
        self.expect("(", "after typeinfo")?;
        let (of, below) = match self.at_type()? {
            true => {
                let (of, below) = self.type_or_typeof()?;
                (self.array_of(of)?, below)
            }
            false => {
                let of = self.inside(Self::tall)?;
                (self.type_of(of.expression), of.height)
            }
        };
        self.expect(")", "after typeinfo's type")?;
        node(ExpressionKind::TypeInfo(of), self.since(start), below)
    }

    /// Parses `offsetof(type, member.member)` and `offsetof(expression, member)`.
    pub(super) fn offset_of(&mut self) -> Parsed<Tall> {
        let start = self.next()?.span;
        self.expect("(", "after offsetof")?;
        let (of, below) = match self.at_type()? {
            true => self.type_or_typeof()?,
            false => {
                let of = self.inside(Self::tall)?;
                (self.type_of(of.expression), of.height)
            }
        };
        self.expect(",", "after offsetof's type")?;
        let mut members = Vec::new();
        loop {
            members.push(self.expect_word("a member's name")?.0.to_owned());
            if members.len() > MOST_ITEMS {
                let message = format!("more than {MOST_ITEMS} members");
                return Err(Diagnostic::new(self.last, message));
            }
            if !self.eat(".")? {
                break;
            }
        }
        self.expect(")", "after offsetof's member")?;
        node(
            ExpressionKind::OffsetOf { of, members },
            self.since(start),
            below,
        )
    }

    /// Parses the type behind `:`. Returns one that a number can be cast to; texts and other
    /// values keep the type that they have.
    pub(super) fn annotation(&mut self) -> Parsed<Option<TypeName>> {
        let TokenKind::Word(word) = self.peek()?.kind else {
            return Err(self.unexpected("a type"));
        };
        let is_other = OTHER_TYPES.contains(&word);
        let of = match is_other {
            true => {
                self.next()?;
                None
            }
            false => Some(self.type_or_typeof()?.0),
        };
        let is_array = !self.elements()?.is_empty();
        Ok(of.filter(|_| !is_array))
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
    /// *)` is a type, too. Returns also the height of what is in it.
    pub(super) fn cast(&mut self) -> Parsed<Option<(TypeName, usize)>> {
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
        if certain {
            let (name, below) = self.type_or_typeof()?;
            let name = self.array_of(name)?;
            self.expect(")", "after the type")?;
            return Ok(Some((name, below)));
        }
        if let Ok(name) = self.type_name()
            && let Ok(name) = self.array_of(name)
            && self.eat(")")?
            && (name.pointers > 0 || self.at_operand()?)
        {
            return Ok(Some((name, 0)));
        }
        self.rewind(start);
        Ok(None)
    }

    /// Parses `[N]` or `[]` behind a type that a value is cast to.
    pub(super) fn array_of(&mut self, of: TypeName) -> Parsed<TypeName> {
        let start = of.span;
        if !self.eat("[")? {
            return Ok(of);
        }
        let elements = match self.eat("]")? {
            true => 0,
            false => {
                let found = self.number_of_elements()?;
                self.expect("]", "after the number of elements")?;
                found
            }
        };
        Ok(TypeName {
            elements: Some(elements),
            span: self.since(start),
            ..of
        })
    }

    /// Checks whether the next token can only begin an operand.
    pub(super) fn at_operand(&mut self) -> Parsed<bool> {
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

    /// Parses `struct name { ... };` and `union name { ... };`. Adds it, and those inside it.
    pub(super) fn structure(&mut self, found: &mut Vec<Structure>) -> Parsed<()> {
        let start = self.next()?.span;
        let is_union = self.is_union(start);
        let (name, _) = self.expect_word("the structure's name")?;
        let members = self.members(name, found)?;
        // C needs it, bpftrace does not.
        self.eat(";")?;
        found.push(Structure {
            name: name.to_owned(),
            is_union,
            members,
            span: self.since(start),
        });
        Ok(())
    }

    /// Checks whether the word read at `span` is `union`.
    fn is_union(&self, span: Span) -> bool {
        span.end - span.start == "union".len()
    }

    /// Parses `typedef struct tag { ... } name;`, with a structure for each of the two names.
    pub(super) fn typedef(&mut self, found: &mut Vec<Structure>) -> Parsed<()> {
        let start = self.next()?.span;
        let kind = self.here()?;
        if !self.eat_word("struct")? && !self.eat_word("union")? {
            let message = "only structures can be defined; write the type itself where it is used";
            return Err(Diagnostic::new(self.here()?, message));
        }
        let is_union = self.is_union(kind);
        let mut named = Vec::new();
        if let TokenKind::Word(tag) = self.peek()?.kind {
            self.next()?;
            named.push(tag);
        }
        let members = self.members(named.first().unwrap_or(&"typedef"), found)?;
        let (name, _) = self.expect_word("the type's name")?;
        if !named.contains(&name) {
            named.push(name);
        }
        self.expect(";", "after the type's name")?;
        let span = self.since(start);
        found.extend(named.into_iter().map(|name| Structure {
            name: name.to_owned(),
            is_union,
            members: members.clone(),
            span,
        }));
        Ok(())
    }

    /// Parses `{ type name, name[3]; ... }`. Adds the structures inside it.
    fn members(&mut self, of: &str, found: &mut Vec<Structure>) -> Parsed<Vec<StructureMember>> {
        self.expect("{", &format!("after struct {of}"))?;
        let mut members = Vec::new();
        let mut names = BTreeSet::new();
        while !self.eat("}")? {
            let base = match self.inner_structure(of, found)? {
                Some(inner) => inner,
                None => self.type_name()?,
            };
            let is_anonymous = base.base.contains(INNER);
            let mut type_name = base.clone();
            loop {
                self.refuse("(", "pointers to functions are not offered; write void *")?;
                let name = match self.peek()?.kind {
                    TokenKind::Punctuation(";") if is_anonymous => "",
                    TokenKind::Punctuation(":") => "",
                    _ => {
                        let (name, span) = self.expect_word("a member's name")?;
                        if !names.insert(name) {
                            let message = format!("struct {of} has a member '{name}' already");
                            self.report(Diagnostic::new(span, message));
                        }
                        name
                    }
                };
                let elements = self.elements()?;
                let bits = self.eat(":")?.then(|| self.bits()).transpose()?;
                members.push(StructureMember {
                    type_name: type_name.clone(),
                    name: name.to_owned(),
                    elements,
                    bits,
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

    /// Parses `struct { ... }` as a member's type, if that comes next: a structure with a name of
    /// its own.
    fn inner_structure(
        &mut self,
        of: &str,
        found: &mut Vec<Structure>,
    ) -> Parsed<Option<TypeName>> {
        let before = self.position();
        let start = self.here()?;
        if !self.eat_word("struct")? && !self.eat_word("union")? {
            return Ok(None);
        }
        let is_union = self.is_union(start);
        let tag = match self.peek()?.kind {
            TokenKind::Word(tag) => {
                self.next()?;
                Some(tag.to_owned())
            }
            _ => None,
        };
        if !self.is("{")? {
            self.rewind(before);
            return Ok(None);
        }
        // A structure with a tag is known by it everywhere, as in C, and has no members outside.
        let name = tag.unwrap_or_else(|| format!("{of}{INNER}{}", start.start));
        let members = self.deeper(|parser| parser.members(&name, found))?;
        let span = self.since(start);
        found.push(Structure {
            name: name.clone(),
            is_union,
            members,
            span,
        });
        Ok(Some(TypeName {
            base: format!("struct {name}"),
            like: None,
            pointers: self.pointers()?,
            elements: None,
            span,
        }))
    }

    /// Parses the width of a bit field.
    fn bits(&mut self) -> Parsed<u64> {
        let TokenKind::Number(bits @ 0..=64) = self.peek()?.kind else {
            return Err(self.unexpected("a number of bits, up to 64"));
        };
        self.next()?;
        Ok(bits)
    }

    /// Parses `[16]`, and `[2][16]`: the numbers of elements, the outermost first.
    fn elements(&mut self) -> Parsed<Vec<u64>> {
        let mut found = Vec::new();
        while self.eat("[")? {
            if found.len() >= MOST_DIMENSIONS {
                let message = format!("an array of more than {MOST_DIMENSIONS} dimensions");
                return Err(Diagnostic::new(self.last, message));
            }
            found.push(self.number_of_elements()?);
            self.expect("]", "after the number of elements")?;
        }
        Ok(found)
    }

    fn number_of_elements(&mut self) -> Parsed<u64> {
        let TokenKind::Number(elements) = self.peek()?.kind else {
            return Err(self.unexpected("the number of elements"));
        };
        self.next()?;
        Ok(elements)
    }
}

//! Compiles calls that write output: each emits its values, which the reader of the output formats.

use std::sync::Arc;

use super::settings::LONGEST_FILE;
use super::types::{MemoryType, Type};
use super::{RuleCompiler, text_of};
use crate::ast::{Expression, Span};
use crate::format::{Format, Takes};
use crate::program::{Emission, Operation};
use crate::render::Complaint;
use crate::run::MOST_STRINGS;
use crate::shape::Shape;

impl RuleCompiler<'_, '_> {
    /// Returns the place of a call, for the text that it writes.
    pub(super) fn complaint(&self, is_error: bool, span: Span) -> Complaint {
        let (line, first) = self.shared.script.position(span.start);
        let (_, last) = self.shared.script.position(span.end.saturating_sub(1));
        Complaint {
            is_error,
            file: self.shared.options.file.as_str().into(),
            line,
            columns: (first, last),
        }
    }

    /// Compiles `printf`, or `errorf` and `warnf` with their place.
    pub(super) fn printf(&mut self, arguments: &[Expression], complaint: Option<Arc<Complaint>>) {
        if let Some((format, types)) = self.formatted(arguments) {
            let emission = Emission::Printf {
                format,
                complaint,
                // %d shows the number of all of them.
                shapes: types.iter().map(Type::shape).collect(),
            };
            self.emit(emission, &types);
        }
    }

    /// Compiles `cat`: the file is read by whoever takes the output.
    pub(super) fn cat(&mut self, arguments: &[Expression]) {
        if let Some((format, types)) = self.formatted(arguments) {
            let emission = Emission::File {
                format,
                shapes: types.iter().map(Type::shape).collect(),
                most: self.shared.script.longest_file.unwrap_or(LONGEST_FILE),
            };
            self.emit(emission, &types);
        }
    }

    /// Compiles the values behind a format. Returns the format and the values' types, or `None` if
    /// the format is wrong.
    fn formatted(&mut self, arguments: &[Expression]) -> Option<(Arc<Format>, Vec<Type>)> {
        let (format, values) = arguments.split_first()?;
        let text = text_of(Some(format)).unwrap_or_default();
        let format = match Format::parse(text, self.dialect()) {
            Ok(format) => Arc::new(format),
            Err(error) => {
                self.refuse(format.span, error.to_string());
                return None;
            }
        };
        let takes = format.takes();
        let mut types = Vec::new();
        for (at, value) in values.iter().enumerate() {
            let wanted = takes.get(at).copied();
            let found = self.value(value);
            types.push(self.as_wanted(found, wanted, value.span));
        }
        Some((format, types))
    }

    /// Prepares the value on the stack for a conversion: text behind a pointer to text is read.
    fn as_wanted(&mut self, found: Type, takes: Option<Takes>, span: Span) -> Type {
        if self.is_strict() {
            return found;
        }
        let is_byte = |thing: &MemoryType| {
            matches!(
                thing,
                MemoryType::Char | MemoryType::Number { bytes: 1, .. }
            )
        };
        match (takes, &found) {
            (Some(Takes::Text), Type::Pointer(to)) if is_byte(to) => {
                let most = self.shared.options.longest_text;
                self.put(Operation::ReadText { most });
                Type::Text
            }
            (Some(Takes::Number), Type::Text) => {
                self.refuse(span, "this is text; %s shows it");
                found
            }
            _ => found,
        }
    }

    /// Compiles `print` of a value or a map.
    pub(super) fn print(&mut self, arguments: &[Expression]) {
        let Some(what) = arguments.first() else {
            return;
        };
        let [top, divisor] = [1, 2].map(|at| {
            let of = arguments.get(at)?;
            self.known_number(of)
        });
        if what.is_whole_global()
            && let Some(map) = self.whole_map(Some(what), what.span)
        {
            let emission = Emission::Map {
                map,
                top: top.and_then(|n| usize::try_from(n).ok()).filter(|n| *n > 0),
                divisor: divisor.filter(|n| *n > 0),
            };
            let emission = self.emission(emission, &[Type::Number]);
            return self.put(Operation::EmitMap { emission, map });
        }
        let of = self.value(what);
        let shape = match self.is_strict() {
            true => Shape::Plain,
            false => of.shape(),
        };
        self.emit(Emission::Print { shape }, &[of]);
    }

    /// Compiles `join`.
    pub(super) fn join(&mut self, arguments: &[Expression]) {
        let Some(array) = arguments.first() else {
            return;
        };
        self.number(Some(array));
        let separator: Arc<[u8]> = text_of(arguments.get(1)).unwrap_or(b" ").into();
        let types = vec![Type::Text; MOST_STRINGS];
        let emission = self.emission(Emission::Join { separator }, &types);
        let most = self.shared.options.longest_text;
        self.put(Operation::Join { emission, most });
    }
}

//! Compiles the settings of a script: the options of its command line, and its configuration.

use super::expressions::number_of;
use super::extent::Extent;
use super::types::Type;
use super::{RuleCompiler, shared_text, text_of};
use crate::ast::{Expression, ExpressionKind, MissingProbes};
use crate::program::Operation;
use crate::run::numbers;
use crate::value::{StackForm, Value};

/// The greatest number of bytes of a file that `cat()` prints, as in bpftrace (`max_cat_bytes`).
pub(super) const LONGEST_FILE: usize = 10 << 10;

impl RuleCompiler<'_, '_> {
    /// Compiles `getopt("name", default)`: the value of the script's argument `--name=value`, or of
    /// `--name` alone, which is true.
    pub(super) fn option(&mut self, arguments: &[Expression]) -> Type {
        let name = text_of(arguments.first()).unwrap_or_default();
        let given = self.shared.options.arguments.iter().find_map(|given| {
            match given.strip_prefix(b"--")?.strip_prefix(name)? {
                [] => Some(None),
                [b'=', value @ ..] => Some(Some(value.to_vec())),
                _ => None,
            }
        });
        match (given, arguments.get(1)) {
            (Some(Some(value)), default) => self.given_option(&value, default, name),
            (Some(None), _) => self.truth(true),
            (None, Some(default)) => self.value(default),
            (None, None) => self.truth(false),
        }
    }

    /// Compiles the value of an option of the script, which has its default's kind.
    fn given_option(&mut self, value: &[u8], default: Option<&Expression>, name: &[u8]) -> Type {
        let truth = match value.to_ascii_lowercase().as_slice() {
            b"true" => Some(true),
            b"false" => Some(false),
            _ => None,
        };
        let number = number_of(value);
        match (default.map(|of| (&of.kind, of.span)), number, truth) {
            (Some((ExpressionKind::Text(_), _)), ..) => {
                self.gives(Operation::Constant(Value::text(value)), Type::Text)
            }
            (None | Some((ExpressionKind::Boolean(_), _)), Some(number), _) => {
                self.truth(numbers::is_true(&number))
            }
            (None | Some((ExpressionKind::Boolean(_), _)), None, Some(truth)) => self.truth(truth),
            (_, Some(number), _) => self.gives(Operation::Constant(number), Type::Number),
            (_, None, Some(truth)) => self.constant(truth.into()),
            (default, None, None) => {
                let (name, value) = (shared_text(name), shared_text(value));
                let span = default.map(|(_, span)| span).unwrap_or_default();
                let message = format!("--{name}={value}: expected a number, true or false");
                self.refuse(span, message)
            }
        }
    }

    /// Compiles `config()`: a record of the settings.
    pub(super) fn config(&mut self) -> Type {
        let script = self.shared.script;
        let options = self.shared.options;
        let number = |number: usize| Value::Int(i64::try_from(number).unwrap_or(i64::MAX));
        let truth = |truth: bool| Value::Int(truth.into());
        let stack_mode = match script.stack_form {
            StackForm::Names => "bpftrace",
            StackForm::Both => "perf",
            StackForm::Addresses => "raw",
        };
        let missing = match script.missing_probes {
            MissingProbes::Error | MissingProbes::Alternatives => "error",
            MissingProbes::Warn => "warn",
            MissingProbes::Ignore => "ignore",
        };
        let text = |text: &str| Value::text(text.as_bytes());
        let longest_file = script.longest_file.unwrap_or(LONGEST_FILE);
        let settings = [
            ("cpp_demangle", truth(true), Type::Bool),
            ("max_cat_bytes", number(longest_file), Type::Number),
            ("max_map_keys", number(options.most_entries), Type::Number),
            ("max_strlen", number(options.longest_text), Type::Number),
            ("missing_probes", text(missing), Type::Text),
            ("print_maps_on_exit", truth(!script.omits_maps), Type::Bool),
            ("stack_mode", text(stack_mode), Type::Text),
        ];
        let extents = settings.iter().map(|(_, value, _)| match value {
            Value::Text(text) => Extent::Text(text.len() as u64 + 1),
            _ => Extent::WHOLE,
        });
        self.own_extent = Some(Extent::Items(extents.collect()));
        let mut members = Vec::new();
        for (name, value, of) in settings {
            self.put(Operation::Constant(value));
            members.push((name.into(), of));
        }
        self.record(members)
    }
}

//! From a script's tree to programs: names are looked up, types followed, and what cannot work is said, before anything touches the guest.
//!
//! The caller brings what is known of the guest ([`Guest`]) and has resolved the rules' probes. A rule is compiled once for each kind of
//! probe that it stands at: what `args.name` is depends on the probe.

mod calls;
mod expressions;
mod members;
mod places;
mod statements;
mod types;
mod variables;

use std::collections::HashMap;
use std::sync::Arc;

use introspect::kernel::btf::Btf;
use introspect::kernel::nearest::nearest as nearest_names;

use super::ast::{Aggregation, Dialect, Rule, Script, Span};
use super::diagnostic::Diagnostic;
use super::maps::{MapDeclaration, MapKind};
use super::program::{Code, Emission, Operation};
use super::record;
use super::run::MOST_BYTES;
use super::time::Zone;
use super::value::Value;
use crate::event::EventKind;
use crate::probe::{Argument, Probe, Signature};
use types::{Type, Types};

/// Names offered for one that is not there.
const SUGGESTIONS: usize = 3;
/// Levels of expressions within each other, with those that translators add.
const DEEPEST: usize = 400;
/// Expressions of one rule, with those that translators add.
const MOST_EXPRESSIONS: usize = 1 << 16;
/// Bytes of the texts that no rule reads from memory: a thread's name, an address, a time, the name of a usual probe.
const LEAST_TEXT: usize = 64;
/// Operations of one rule.
const MOST_OPERATIONS: usize = 1 << 16;
const TOO_LARGE: &str = "this rule is too large, with the translators it uses";

/// What the compiler asks of the guest.
pub trait Guest {
    /// The kernel's types.
    fn types(&self) -> Option<&Btf>;
    /// The address of a kernel symbol.
    fn symbol(&self, name: &str) -> Option<u64>;
    /// Names of kernel symbols that look like one.
    fn nearest_symbols(&self, name: &str) -> Vec<String>;
}

/// How a script is compiled.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// The language.
    pub dialect: Dialect,
    /// `$1` and so on.
    pub arguments: Vec<Vec<u8>>,
    /// Most bytes of a string that is read from the guest.
    pub longest_text: usize,
    /// Most entries of a map.
    pub most_entries: usize,
    /// The zone that times are shown in.
    pub zone: Zone,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            dialect: Dialect::Normal,
            arguments: Vec::new(),
            longest_text: 256,
            most_entries: 1 << 16,
            zone: Zone::local(),
        }
    }
}

/// What a rule must know of the probe it is compiled for.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub(super) struct ProbeKindInfo {
    /// `None` of BEGIN and END.
    pub(super) kind: Option<EventKind>,
    pub(super) is_system_call: bool,
    pub(super) arguments: Vec<Argument>,
    pub(super) returns: Option<String>,
    pub(super) signature_known: bool,
}

impl ProbeKindInfo {
    pub(super) fn of(probe: &Probe) -> Self {
        let Signature { arguments, returns } = probe.signature.clone().unwrap_or_default();
        Self {
            kind: Some(probe.kind()),
            is_system_call: probe.name.provider == crate::provider::system_calls::PROVIDER,
            arguments,
            returns,
            signature_known: probe.signature.is_some(),
        }
    }
}

/// The parts of a script that all of its rules share, and its maps' types as far as they have been met.
pub(super) struct Compiler<'c> {
    script: &'c Script,
    options: &'c Options,
    guest: &'c dyn Guest,
    types: Types<'c>,
    maps: Vec<MapDeclaration>,
    map_numbers: HashMap<String, usize>,
    map_keyed: Vec<bool>,
    map_types: Vec<Option<Type>>,
    /// Of their keys: what going through a map gives.
    key_types: Vec<Option<Type>>,
    emissions: Vec<Emission>,
    /// Bytes of the longest text that any rule can put out, as far as they have been met.
    longest_text: usize,
    /// Words of the largest record.
    words: usize,
    diagnostics: Vec<Diagnostic>,
}

/// What the rules share when all of them are compiled.
pub(super) struct Compiled {
    pub(super) maps: Vec<MapDeclaration>,
    pub(super) emissions: Vec<Emission>,
    pub(super) words: usize,
}

impl<'c> Compiler<'c> {
    pub(super) fn new(script: &'c Script, options: &'c Options, guest: &'c dyn Guest) -> Self {
        let mut compiler = Self {
            script,
            options,
            guest,
            types: Types::new(guest.types(), &script.structures),
            maps: Vec::new(),
            map_numbers: HashMap::new(),
            map_keyed: Vec::new(),
            map_types: Vec::new(),
            key_types: Vec::new(),
            emissions: Vec::new(),
            longest_text: options.longest_text.max(LEAST_TEXT),
            words: record::HEADER + 2,
            diagnostics: Vec::new(),
        };
        places::declare(script, &mut |name, aggregation, keyed| {
            compiler.declare(name, aggregation, keyed);
        });
        compiler
    }

    fn declare(&mut self, name: &str, aggregation: Option<Aggregation>, keyed: bool) {
        let number = *self.map_numbers.entry(name.to_owned()).or_insert_with(|| {
            self.maps.push(MapDeclaration {
                name: name.to_owned(),
                kind: MapKind::Scalar,
            });
            self.map_keyed.push(false);
            self.map_types.push(None);
            self.key_types.push(None);
            self.maps.len() - 1
        });
        let is_kept_apart = match aggregation {
            // In bt(5) an entry is a number that any of these may change.
            Some(Aggregation::Count | Aggregation::Sum | Aggregation::Min | Aggregation::Max) => {
                self.options.dialect == Dialect::Normal
            }
            Some(_) => true,
            None => false,
        };
        if let (true, Some(aggregation), Some(map)) =
            (is_kept_apart, aggregation, self.maps.get_mut(number))
        {
            map.kind = MapKind::Aggregation(aggregation);
        }
        if let Some(known) = self.map_keyed.get_mut(number) {
            *known |= keyed;
        }
    }

    /// Rules can put out a text that is as long as this.
    pub(super) fn may_put_out(&mut self, bytes: usize) {
        self.longest_text = self.longest_text.max(bytes);
    }

    /// Finds out what the maps hold and how long texts are: to be done for each rule before the first is compiled.
    pub(super) fn learn(&mut self, rule: &Rule, probe: &ProbeKindInfo) {
        let (emissions, words, said) = (self.emissions.len(), self.words, self.diagnostics.len());
        self.rule(rule, probe);
        self.emissions.truncate(emissions);
        self.words = words;
        self.diagnostics.truncate(said);
    }

    /// Compiles a rule for one kind of probe.
    pub(super) fn rule(&mut self, rule: &Rule, probe: &ProbeKindInfo) -> Code {
        let mut body = RuleCompiler {
            shared: self,
            probe,
            code: Vec::new(),
            locals: Vec::new(),
            slots: 0,
            scopes: Vec::new(),
            loops: Vec::new(),
            depth: 0,
            spent: 0,
        };
        if let Some(filter) = &rule.filter {
            body.value(filter);
            body.put(Operation::Filter);
        }
        body.block(&rule.body);
        body.put(Operation::Return);
        if body.code.len() >= MOST_OPERATIONS {
            let span = rule
                .probes
                .first()
                .map_or(Span::default(), |spec| spec.span);
            body.refuse(span, TOO_LARGE);
        }
        let slots = body.slots;
        Code {
            operations: body.code,
            locals: slots,
        }
    }

    /// The maps that are printed at the end, in order. bt(5) prints those of `assigned` and of these none that is one value.
    pub(super) fn printed_at_end(&self, assigned: &[&str]) -> Vec<usize> {
        if self.options.dialect == Dialect::Normal {
            return (0..self.maps.len()).collect();
        }
        let mut printed = Vec::new();
        for name in assigned {
            let map = self.map_numbers.get(*name).copied();
            let is_map = |map: &usize| {
                let gathers = self.maps.get(*map).map(|map| map.kind) != Some(MapKind::Scalar);
                gathers || self.map_keyed.get(*map) == Some(&true)
            };
            if let Some(map) = map.filter(is_map)
                && !printed.contains(&map)
            {
                printed.push(map);
            }
        }
        printed
    }

    /// What all rules share.
    ///
    /// # Errors
    /// What is wrong with them.
    pub(super) fn finish(self) -> Result<Compiled, Vec<Diagnostic>> {
        let mut diagnostics = self.diagnostics;
        diagnostics.sort_by_key(|found| (found.span.start, found.span.end));
        diagnostics.dedup();
        match diagnostics.is_empty() {
            true => Ok(Compiled {
                maps: self.maps,
                emissions: self.emissions,
                words: self.words.min(crate::ring::MAX_SLOT_WORDS),
            }),
            false => Err(diagnostics),
        }
    }

    fn complain(&mut self, diagnostic: Diagnostic) {
        self.diagnostics.push(diagnostic);
    }
}

/// Compiles one rule.
struct RuleCompiler<'r, 'c> {
    shared: &'r mut Compiler<'c>,
    probe: &'r ProbeKindInfo,
    code: Vec<Operation>,
    /// Local variables in scope.
    locals: Vec<Local>,
    /// Local variables of the whole rule.
    slots: usize,
    /// Inputs of the translators that are being compiled, the innermost last.
    scopes: Vec<(String, usize, Type)>,
    loops: Vec<Loop>,
    depth: usize,
    /// Expressions so far.
    spent: usize,
}

struct Local {
    name: String,
    slot: usize,
    of: Type,
}

/// A loop that is being compiled: jumps that do not know yet where they lead.
struct Loop {
    breaks: Vec<usize>,
    continues: Vec<usize>,
}

impl RuleCompiler<'_, '_> {
    fn dialect(&self) -> Dialect {
        self.shared.options.dialect
    }

    fn is_strict(&self) -> bool {
        self.dialect() == Dialect::Strict
    }

    /// Puts an operation, if the rule is not too large already.
    fn put(&mut self, operation: Operation) {
        self.shared.may_put_out(match &operation {
            Operation::Constant(Value::Text(text)) => text.len(),
            Operation::ReadText { most }
            | Operation::ReadTextOf { most }
            | Operation::ReadBytes { most } => (*most).min(MOST_BYTES),
            _ => 0,
        });
        if self.code.len() < MOST_OPERATIONS {
            self.code.push(operation);
        }
    }

    fn constant(&mut self, number: i64) {
        self.put(Operation::Constant(Value::Int(number)));
    }

    /// Says what is wrong. Compiling goes on, so that more can be found, but the code is none any more: what is on the stack does not matter.
    fn refuse(&mut self, span: Span, message: impl Into<String>) -> Type {
        self.refuse_with(Diagnostic::new(span, message))
    }

    fn refuse_with(&mut self, diagnostic: Diagnostic) -> Type {
        let dialect = self.dialect();
        self.shared.complain(Diagnostic {
            dialect,
            ..diagnostic
        });
        Type::Any
    }

    fn new_slot(&mut self) -> usize {
        self.slots += 1;
        self.slots - 1
    }

    /// Where the next operation will stand.
    fn here(&self) -> usize {
        self.code.len()
    }

    /// Puts a jump whose target comes later; see [`Self::land`].
    fn jump(&mut self, make: fn(usize) -> Operation) -> usize {
        self.put(make(usize::MAX));
        self.code.len() - 1
    }

    /// The jump at `from` leads here.
    fn land(&mut self, from: usize) {
        let here = self.here();
        self.lead(from, here);
    }

    fn lead(&mut self, from: usize, to: usize) {
        match self.code.get_mut(from) {
            Some(Operation::Jump(target) | Operation::JumpIfZero(target)) => *target = to,
            Some(Operation::Next { end, .. }) => *end = to,
            _ => {}
        }
    }

    /// A new emission, whose values are of these types.
    fn emission(&mut self, emission: Emission, values: &[Type]) -> usize {
        let longest = self.shared.longest_text;
        let words: usize = values.iter().map(|of| words_of(of, longest)).sum();
        self.shared.words = self.shared.words.max(record::HEADER + words);
        self.shared.emissions.push(emission);
        self.shared.emissions.len() - 1
    }
}

/// Words that a value of a type takes at most in a record.
fn words_of(of: &Type, longest_text: usize) -> usize {
    let text = 1 + longest_text.div_ceil(8);
    match of {
        Type::Number | Type::Pointer(_) => 2,
        Type::Shown => text.max(3),
        Type::Text => text,
        Type::Stack => 2 + crate::event::MAX_FRAMES,
        Type::Tuple(items) => {
            1 + items
                .iter()
                .map(|i| words_of(i, longest_text))
                .sum::<usize>()
        }
        Type::Any | Type::Lvalue(_) | Type::Translated { .. } => text,
    }
}

/// Names that look like one.
fn nearest<'n>(name: &str, names: impl Iterator<Item = &'n str>) -> Vec<String> {
    let found = nearest_names(name, names, SUGGESTIONS).into_iter();
    found.map(str::to_owned).collect()
}

/// A message with names that may have been meant.
fn with(span: Span, message: impl Into<String>, suggestions: Vec<String>) -> Diagnostic {
    Diagnostic {
        suggestions,
        ..Diagnostic::new(span, message)
    }
}

/// Text that is shared.
fn shared_text(text: &[u8]) -> Arc<str> {
    String::from_utf8_lossy(text).into()
}

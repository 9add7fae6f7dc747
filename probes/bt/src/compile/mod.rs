//! Compiles a script's tree to programs: looks up names, follows types, and reports errors before
//! anything touches the guest.
//!
//! The caller brings the facts about the guest ([`Guest`]) and has resolved the rules' probes. A
//! rule is compiled once for each kind of its probes, because the meaning of `args.name` depends on
//! the probe.

mod arrays;
mod blocks;
mod c_types;
mod calls;
mod cgroups;
mod expressions;
mod extent;
mod fields;
mod folding;
mod layout;
mod like;
mod members;
mod moments;
pub(crate) mod places;
mod printing;
mod records;
mod settings;
mod statements;
mod types;
mod variables;

pub(crate) use expressions::argument_number;

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use introspect::kernel::btf::Btf;
use introspect::kernel::nearest::nearest as nearest_names;
use probes::event::EventKind;
use probes::fields::Field;
use probes::probe::{Argument, Probe, Signature, Target};

use crate::ast::{Aggregation, Dialect, Expression, ExpressionKind, Iteration, Rule, Script, Span};
use crate::check::strict;
use crate::diagnostic::Diagnostic;
use crate::maps::{Capacity, MapDeclaration, MapKind};
use crate::program::{Code, Emission, Operation};
use crate::record;
use crate::run::MOST_BYTES;
use crate::shape::Shape;
use crate::time::Zone;
use crate::value::Value;
use extent::Extent;
use types::{Type, Types};

/// The number of names suggested for an unknown one.
const SUGGESTIONS: usize = 3;
/// The greatest depth of nested expressions, including those that translators add.
const DEEPEST: usize = 400;
/// The greatest number of expressions of one rule, including those that translators add.
const MOST_EXPRESSIONS: usize = 1 << 16;
/// Bytes of the texts that no rule reads from memory: a thread's name, an address, a time, the name
/// of a usual probe.
const LEAST_TEXT: usize = 64;
/// The greatest number of operations of one rule.
const MOST_OPERATIONS: usize = 1 << 16;
const TOO_LARGE: &str = "this rule is too large, with the translators it uses";

/// The facts about the guest that the compiler needs.
pub trait Guest {
    /// Returns the kernel's types.
    fn types(&self) -> Option<&Btf>;
    /// Returns the address of a kernel symbol.
    fn symbol(&self, name: &str) -> Option<u64>;
    /// Returns names of kernel symbols similar to `name`.
    fn nearest_symbols(&self, name: &str) -> Vec<String>;
    /// Returns the number of the control group at a path below the hierarchy's root; `None` if
    /// there is none.
    ///
    /// # Errors
    /// The reason why that is not known.
    fn cgroup(&self, _path: &str) -> Result<Option<u64>, String> {
        Err("there is no guest".to_owned())
    }
}

/// The options of a compilation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// The script's name in messages.
    pub file: String,
    /// The language.
    pub dialect: Dialect,
    /// The script's arguments: `$1` and so on.
    pub arguments: Vec<Vec<u8>>,
    /// The greatest number of bytes of a string read from the guest.
    pub longest_text: usize,
    /// The greatest number of entries of a map.
    pub most_entries: usize,
    /// The time zone in which times are shown.
    pub zone: Zone,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            file: "script".to_owned(),
            dialect: Dialect::Normal,
            arguments: Vec::new(),
            longest_text: 256,
            most_entries: 1 << 16,
            zone: Zone::local(),
        }
    }
}

/// The properties of the probe for which a rule is compiled.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub(crate) struct ProbeKindInfo {
    /// The kind of event; `None` for BEGIN and END.
    pub(crate) kind: Option<EventKind>,
    /// The number of the system call; it is known for rules that ask for it.
    pub(crate) call_number: Option<u64>,
    pub(crate) is_system_call: bool,
    pub(crate) arguments: Vec<Argument>,
    /// The formatted fields of a tracepoint's event.
    pub(crate) fields: Arc<[Field]>,
    pub(crate) returns: Option<String>,
    pub(crate) signature_known: bool,
    /// The iteration; `None` for an event.
    pub(crate) iteration: Option<Iteration>,
}

impl ProbeKindInfo {
    /// Returns the properties of an iteration.
    pub(crate) fn of_iteration(iteration: Iteration) -> Self {
        Self {
            iteration: Some(iteration),
            ..Self::default()
        }
    }

    pub(crate) fn of(probe: &Probe, with_number: bool) -> Self {
        let Signature { arguments, returns } = probe.signature.clone().unwrap_or_default();
        Self {
            kind: Some(probe.kind()),
            call_number: match probe.target {
                Target::SystemCall { number, .. } if with_number => Some(number.into()),
                _ => None,
            },
            is_system_call: probe.name.provider == probes::provider::system_calls::PROVIDER,
            arguments: arguments.to_vec(),
            fields: probe.fields().into(),
            returns,
            signature_known: probe.signature.is_some(),
            iteration: None,
        }
    }
}

/// The parts of a script that all of its rules share, and its maps' types as far as they are known.
pub(crate) struct Compiler<'c> {
    script: &'c Script,
    options: &'c Options,
    guest: &'c dyn Guest,
    types: Types<'c>,
    maps: Vec<Map>,
    map_numbers: HashMap<String, usize>,
    emissions: Vec<Emission>,
    /// The length in bytes of the longest text that any rule can emit, as far as they are known.
    longest_text: usize,
    /// The number of words of the largest record.
    words: usize,
    diagnostics: Vec<Diagnostic>,
    /// The names of the options that the script asks for.
    option_names: HashSet<&'c [u8]>,
}

/// A global variable.
struct Map {
    declaration: MapDeclaration,
    keyed: bool,
    /// The type of its values, as far as it is known.
    of: Option<Type>,
    /// The type of its keys, as far as it is known: what iterating over the map yields.
    key: Option<Type>,
    /// The extents of its values and keys, as far as they are known.
    extents: [Extent; 2],
}

impl Map {
    /// Returns the declaration, with the shapes of all that the rules put into the map.
    fn declared(self) -> MapDeclaration {
        let shape = |of: Option<Type>| of.map_or(Shape::Plain, |of| of.shape());
        MapDeclaration {
            key_shape: shape(self.key),
            is_keyed: self.keyed,
            shape: match self.declaration.kind {
                MapKind::Scalar => shape(self.of),
                MapKind::Aggregation(_) => Shape::Plain,
            },
            ..self.declaration
        }
    }
}

/// The parts that the rules share, once all of them are compiled.
pub(crate) struct Compiled {
    pub(crate) maps: Vec<MapDeclaration>,
    pub(crate) emissions: Vec<Emission>,
    pub(crate) words: usize,
}

impl<'c> Compiler<'c> {
    pub(crate) fn new(script: &'c Script, options: &'c Options, guest: &'c dyn Guest) -> Self {
        let mut compiler = Self {
            script,
            options,
            guest,
            types: Types::new(guest.types(), &script.structures, &script.enums),
            maps: Vec::new(),
            map_numbers: HashMap::new(),
            emissions: Vec::new(),
            longest_text: options.longest_text.max(LEAST_TEXT),
            words: record::HEADER + 2,
            diagnostics: Vec::new(),
            option_names: places::options(script),
        };
        places::declare(script, &mut |name, aggregation, keyed| {
            compiler.declare(name, aggregation, keyed);
        });
        compiler
    }

    fn declare(&mut self, name: &str, aggregation: Option<Aggregation>, keyed: bool) {
        let sizes = &self.script.map_sizes;
        let number = *self.map_numbers.entry(name.to_owned()).or_insert_with(|| {
            self.maps.push(Map {
                declaration: MapDeclaration {
                    size: sizes
                        .iter()
                        .find(|size| size.name == name)
                        .map(Capacity::of),
                    ..MapDeclaration::new(name, MapKind::Scalar)
                },
                keyed: false,
                of: None,
                key: None,
                extents: [Extent::Unset, Extent::Unset],
            });
            self.maps.len() - 1
        });
        let Some(map) = self.maps.get_mut(number) else {
            return;
        };
        map.keyed |= keyed;
        let is_kept_apart = match aggregation {
            // In bt(5) an entry is a number that any of these may change.
            Some(Aggregation::Count | Aggregation::Sum | Aggregation::Min | Aggregation::Max) => {
                self.options.dialect == Dialect::Normal
            }
            Some(_) => true,
            None => false,
        };
        if let Some(aggregation) = aggregation.filter(|_| is_kept_apart) {
            map.declaration.kind = MapKind::Aggregation(aggregation);
        }
    }

    fn kind_of(&self, map: usize) -> MapKind {
        let map = self.maps.get(map);
        map.map_or(MapKind::Scalar, |map| map.declaration.kind)
    }

    fn is_keyed(&self, map: usize) -> bool {
        self.maps.get(map).is_some_and(|map| map.keyed)
    }

    /// Returns the script's arguments that are no options of `getopt()`.
    fn positional_arguments(&self) -> impl Iterator<Item = &[u8]> {
        let given = self.options.arguments.iter();
        given
            .filter(|given| !is_option(given, &self.option_names))
            .map(Vec::as_slice)
    }

    /// Returns the argument `$number`; `None` if it was not given.
    fn argument(&self, number: usize) -> Option<&[u8]> {
        let at = number.checked_sub(1)?;
        self.positional_arguments().nth(at)
    }

    /// Notes that rules can emit a text of this length.
    pub(crate) fn may_put_out(&mut self, bytes: usize) {
        self.longest_text = self.longest_text.max(bytes);
    }

    /// Learns the maps' types and the texts' lengths. It must run for each rule before the first is
    /// compiled.
    pub(crate) fn learn(&mut self, rule: &Rule, probe: &ProbeKindInfo) {
        let (emissions, words, said) = (self.emissions.len(), self.words, self.diagnostics.len());
        self.rule(rule, probe);
        self.emissions.truncate(emissions);
        self.words = words;
        self.diagnostics.truncate(said);
    }

    /// Compiles a rule for one kind of probe.
    pub(crate) fn rule(&mut self, rule: &Rule, probe: &ProbeKindInfo) -> Code {
        let mut body = RuleCompiler {
            shared: self,
            probe,
            code: Vec::new(),
            locals: Vec::new(),
            slots: 0,
            scopes: Vec::new(),
            loops: Vec::new(),
            functions: Vec::new(),
            operands: 0,
            depth: 0,
            spent: 0,
            extent: Extent::Unknown,
            own_extent: None,
            declared: HashSet::new(),
        };
        if let Some(filter) = &rule.filter {
            if body.is_strict() && strict::is_too_deep(filter) {
                body.abort(strict::TOO_MANY_OPERANDS);
            }
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

    /// Returns the maps that are printed at the end, in order. bt(5) prints those of `named`
    /// that are not a single value.
    pub(crate) fn printed_at_end(&self, named: &[&str]) -> Vec<usize> {
        if self.options.dialect == Dialect::Normal {
            return (0..self.maps.len()).collect();
        }
        let mut printed = Vec::new();
        for name in named {
            let map = self.map_numbers.get(*name).copied();
            let is_map = |map: &usize| self.kind_of(*map) != MapKind::Scalar || self.is_keyed(*map);
            if let Some(map) = map.filter(is_map)
                && !printed.contains(&map)
            {
                printed.push(map);
            }
        }
        printed
    }

    /// Returns the parts that all rules share.
    ///
    /// # Errors
    /// The errors in the rules.
    pub(crate) fn finish(self) -> Result<Compiled, Vec<Diagnostic>> {
        let mut diagnostics = self.diagnostics;
        diagnostics.sort_by_key(|found| (found.span.start, found.span.end));
        diagnostics.dedup();
        match diagnostics.is_empty() {
            true => Ok(Compiled {
                maps: self.maps.into_iter().map(Map::declared).collect(),
                emissions: self.emissions,
                words: self.words.min(probes::ring::MAX_SLOT_WORDS),
            }),
            false => Err(diagnostics),
        }
    }
}

/// Returns those of a script's arguments that are no options of `getopt()`.
pub(crate) fn positional<'a>(
    script: &Script,
    arguments: &'a [Vec<u8>],
) -> impl Iterator<Item = &'a [u8]> {
    let options = places::options(script);
    let given = arguments.iter();
    given
        .filter(move |given| !is_option(given, &options))
        .map(Vec::as_slice)
}

/// Checks whether an argument of the script is one of these options: `--name`, `--name=value`.
fn is_option(given: &[u8], names: &HashSet<&[u8]>) -> bool {
    let name = given.strip_prefix(b"--").unwrap_or_default();
    let end = name.iter().position(|byte| *byte == b'=');
    name.get(..end.unwrap_or(name.len()))
        .is_some_and(|name| names.contains(name))
}

/// The compiler of one rule.
struct RuleCompiler<'r, 'c> {
    shared: &'r mut Compiler<'c>,
    probe: &'r ProbeKindInfo,
    code: Vec<Operation>,
    /// The local variables in scope.
    locals: Vec<Local>,
    /// The number of local variables of the whole rule.
    slots: usize,
    /// The inputs of the translators that are being compiled, the innermost last.
    scopes: Vec<(String, usize, Type)>,
    loops: Vec<Loop>,
    /// The functions that are being compiled, the innermost last.
    functions: Vec<blocks::Body>,
    /// The number of blocks in operands around, within the function.
    operands: usize,
    depth: usize,
    /// The number of expressions so far.
    spent: usize,
    /// The extent of the value that was compiled last.
    extent: Extent,
    /// The extent that the expression being compiled has found for itself.
    own_extent: Option<Extent>,
    /// The variables that `let $x` names.
    declared: HashSet<String>,
}

struct Local {
    name: String,
    slot: usize,
    of: Type,
    extent: Extent,
}

/// A loop that is being compiled: jumps whose targets are not known yet.
#[derive(Default)]
struct Loop {
    /// Whether it iterates over a map.
    is_of_map: bool,
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

    /// Puts an operation, unless the rule is too large already.
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

    /// Appends an operation and returns the type of what it leaves on the stack.
    fn gives(&mut self, operation: Operation, of: Type) -> Type {
        self.put(operation);
        of
    }

    fn constant(&mut self, number: i64) -> Type {
        self.gives(Operation::Constant(Value::Int(number)), Type::Number)
    }

    /// Appends a number of bytes or of other things.
    fn quantity(&mut self, number: u64) -> Type {
        self.constant(i64::try_from(number).unwrap_or(i64::MAX))
    }

    /// Reports an error. Compiling goes on to find more of them, but the code will not be used, so
    /// the stack's contents do not matter.
    fn refuse(&mut self, span: Span, message: impl Into<String>) -> Type {
        self.refuse_with(Diagnostic::new(span, message))
    }

    fn refuse_with(&mut self, diagnostic: Diagnostic) -> Type {
        self.shared.diagnostics.push(diagnostic);
        Type::Any
    }

    fn new_slot(&mut self) -> usize {
        self.slots += 1;
        self.slots - 1
    }

    /// Returns the index of the next operation.
    fn here(&self) -> usize {
        self.code.len()
    }

    /// Puts a jump whose target is set later; see [`Self::land`].
    fn jump(&mut self, make: fn(usize) -> Operation) -> usize {
        self.put(make(usize::MAX));
        self.code.len() - 1
    }

    /// Sets the target of the jump at `from` to here.
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

    /// Appends the output of the values on the stack.
    fn emit(&mut self, emission: Emission, of: &[Type]) {
        let emission = self.emission(emission, of);
        let values = of.len();
        self.put(Operation::Emit { emission, values });
    }

    /// Adds an emission whose values have these types.
    fn emission(&mut self, emission: Emission, values: &[Type]) -> usize {
        let longest = self.shared.longest_text;
        let words: usize = values.iter().map(|of| words_of(of, longest)).sum();
        self.shared.words = self.shared.words.max(record::HEADER + words);
        self.shared.emissions.push(emission);
        self.shared.emissions.len() - 1
    }
}

/// Returns the greatest number of words that a value of a type takes in a record.
fn words_of(of: &Type, longest_text: usize) -> usize {
    let text = 1 + longest_text.div_ceil(8);
    match of {
        Type::Number
        | Type::Unsigned
        | Type::Bool
        | Type::Enum(_)
        | Type::Cgroup
        | Type::Pointer(_) => 2,
        Type::Array { element, elements } => arrays::words_of(element, *elements),
        Type::Shown => text.max(3),
        Type::Text => text,
        Type::Stack(_) => 2 + probes::event::MAX_FRAMES,
        Type::Tuple(items) => {
            1 + items
                .iter()
                .map(|i| words_of(i, longest_text))
                .sum::<usize>()
        }
        Type::Record(members) => {
            let words = |(name, of): &(Arc<str>, Type)| {
                1 + name.len().div_ceil(8) + words_of(of, longest_text)
            };
            1 + members.iter().map(words).sum::<usize>()
        }
        Type::Any | Type::Lvalue(_) | Type::Translated { .. } => text,
    }
}

/// Returns the names similar to one.
fn nearest<'n>(name: &str, names: impl Iterator<Item = &'n str>) -> Vec<String> {
    let found = nearest_names(name, names, SUGGESTIONS).into_iter();
    found.map(str::to_owned).collect()
}

/// Makes a message with names that may have been meant.
fn with(span: Span, message: impl Into<String>, suggestions: Vec<String>) -> Diagnostic {
    Diagnostic {
        suggestions,
        ..Diagnostic::new(span, message)
    }
}

/// Returns the text of a literal.
fn text_of(of: Option<&Expression>) -> Option<&[u8]> {
    match of.map(|of| &of.kind) {
        Some(ExpressionKind::Text(text)) => Some(text),
        _ => None,
    }
}

/// Returns text that is shared.
fn shared_text(text: &[u8]) -> Arc<str> {
    String::from_utf8_lossy(text).into()
}

//! A script as a tree: [`parse`](crate::parse) makes it from text, and [`compile`](crate::compile)
//! makes programs of it.
//!
//! Every node knows the bytes of its text, so that a message can underline them. Nothing here is
//! checked against a guest: the compiler decides whether probes exist and types have members.
//! Sources: bt(5), the language of bpftrace, and for translators the D language as dtrace(1) and
//! SDT(9) use it.

mod iteration;
mod words;

pub use iteration::Iteration;
pub use words::{BinaryOperator, Builtin, Function, MissingProbes, TypeTest, UnaryOperator};

use crate::value::StackForm;

/// The bytes `start..end` of the script's text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
pub struct Span {
    /// The first byte.
    pub start: usize,
    /// The byte behind the last one.
    pub end: usize,
}

impl Span {
    /// Returns the span from the start of this one to the end of `last`.
    #[must_use]
    pub fn to(self, last: Self) -> Self {
        Self {
            start: self.start,
            end: last.end.max(self.end),
        }
    }
}

/// The language as which a script is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
pub enum Dialect {
    /// bt(5) with its oddities fixed, and what users of bpftrace expect.
    #[default]
    Normal,
    /// OpenBSD's bt(5), oddities included.
    Strict,
}

/// A whole script.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Script {
    /// The rules, in order.
    pub rules: Vec<Rule>,
    /// The translators; those of library files are put before them.
    pub translators: Vec<Translator>,
    /// The structures that the script defines.
    pub structures: Vec<Structure>,
    /// The macros, functions and constants that the script defines. Calls of them are gone: they
    /// are replaced while the script is parsed.
    pub macros: Vec<Macro>,
    /// The parts of the text that change nothing here, though they do in bpftrace.
    pub notes: Vec<(Span, String)>,
    /// The first bytes of the text's lines.
    pub lines: Vec<usize>,
    /// The enums that the script defines.
    pub enums: Vec<Enum>,
    /// The sizes that the script gives its maps: `let @x = hash(100);`.
    pub map_sizes: Vec<MapSize>,
    /// The form in which stacks are shown (`config = { stack_mode = perf }`).
    pub stack_form: StackForm,
    /// The handling of probes that do not exist (`config = { missing_probes = warn }`).
    pub missing_probes: MissingProbes,
    /// Set if the maps are not printed at the end (`config = { print_maps_on_exit = 0 }`).
    pub omits_maps: bool,
    /// The greatest number of entries of a map (`config = { max_map_keys = 100 }`).
    pub most_entries: Option<usize>,
    /// The greatest number of bytes of a text (`config = { max_strlen = 200 }`).
    pub longest_text: Option<usize>,
    /// The greatest number of bytes of a file that `cat()` prints (`config = { max_cat_bytes = 100
    /// }`).
    pub longest_file: Option<usize>,
}

impl Script {
    /// Returns the line and the column of a byte of the text, both from 1.
    #[must_use]
    pub fn position(&self, at: usize) -> (usize, usize) {
        let line = self.lines.partition_point(|start| *start <= at).max(1);
        let start = self.lines.get(line - 1).copied().unwrap_or(0);
        (line, at - start.min(at) + 1)
    }
}

/// Probes, a predicate, and actions.
#[derive(Debug, Clone, PartialEq)]
pub struct Rule {
    /// The probes at which the rule runs: at least one.
    pub probes: Vec<ProbeSpec>,
    /// The predicate: the rule runs only if this is not 0.
    pub filter: Option<Expression>,
    /// The actions.
    pub body: Block,
}

/// A probe at which a rule runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProbeSpec {
    /// The kind of probe.
    pub kind: ProbeKind,
    /// The text of the probe.
    pub span: Span,
}

/// The kinds of a rule's probes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ProbeKind {
    /// `BEGIN`: before all others.
    Begin,
    /// `END`: after all others.
    End,
    /// `iter:task` and others: once for each such thing of the guest, when the script begins.
    Iteration(Iteration),
    /// A pattern of probes, as [`ProbePattern`](probes::name::ProbePattern) reads it.
    Pattern(String),
}

/// A macro, a function or a constant: `macro name($x, @y, z) { ... }`,
/// `fn name($x : int64) { ... }` or `#define NAME value`.
#[derive(Debug, Clone, PartialEq)]
pub struct Macro {
    /// The name.
    pub name: String,
    /// The parameters, in order.
    pub parameters: Vec<Parameter>,
    /// The statements and the value.
    pub body: BlockExpression,
    /// The text of the name.
    pub span: Span,
}

impl Macro {
    /// Returns the name and the number of parameters, which tell macros apart.
    #[must_use]
    pub fn key(&self) -> (&str, usize) {
        (&self.name, self.parameters.len())
    }
}

/// An enum: `enum name { A, B = 5, ... };`
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Enum {
    /// The name without `enum`; empty if there is none.
    pub name: String,
    /// The names and values, in order.
    pub members: Vec<(String, i64)>,
}

/// A parameter of a macro.
#[derive(Debug, Clone, PartialEq)]
pub enum Parameter {
    /// `$x`: a variable, which the macro may change. In a function it is a copy.
    Variable(String),
    /// `@x`: a whole map.
    Map(String),
    /// `x`: any expression.
    Expression(String),
}

/// A block with a value: `{ $x = 1; $x + 1 }`.
#[derive(Debug, Clone, PartialEq)]
pub struct BlockExpression {
    /// The statements before the value.
    pub block: Block,
    /// The value; 0 if there is none.
    pub value: Option<Expression>,
    /// Whether this is a function's body, which `return` ends.
    pub is_function: bool,
}

/// The size of a map: `let @x = hash(100);`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MapSize {
    /// The map's name without `@`.
    pub name: String,
    /// The greatest number of entries.
    pub most: usize,
    /// Whether a full map drops the entry that was used least recently: `lruhash(100)`.
    pub evicts: bool,
    /// The text of the declaration.
    pub span: Span,
}

/// Statements in braces.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Block {
    /// The statements, in order.
    pub statements: Vec<Statement>,
}

/// A statement.
#[derive(Debug, Clone, PartialEq)]
pub struct Statement {
    /// The kind of statement.
    pub kind: StatementKind,
    /// The text of the statement.
    pub span: Span,
}

/// The kinds of statements.
#[derive(Debug, Clone, PartialEq)]
pub enum StatementKind {
    /// `place = value`, and `place op= value`.
    Assign {
        /// The variable: `$x`, `@x` or `@x[keys]`.
        place: Lvalue,
        /// The operator before `=`.
        operator: Option<BinaryOperator>,
        /// The right side.
        value: Expression,
    },
    /// An aggregation: `@x[keys] = count()` and the like.
    Aggregate {
        /// The variable: `@x` or `@x[keys]`.
        place: Lvalue,
        /// The aggregation's function.
        aggregation: Aggregation,
        /// The aggregated value; `None` for a count.
        value: Option<Expression>,
        /// Of a linear histogram, its bounds and step, if an argument of the script is one of
        /// them. Those of the aggregation are known when the arguments are.
        range: Vec<Expression>,
    },
    /// An expression as a statement: `printf(...)`, `$x++`.
    Expression(Expression),
    /// `let $x`: the variable is 0 until it is set.
    Declare {
        /// The variable's name without `$`.
        variable: String,
    },
    /// `if`.
    If {
        /// The condition: `then` runs if it is not 0.
        condition: Expression,
        /// The block that runs if the condition holds.
        then: Block,
        /// The block that runs if it does not; an `else if` is a block with one statement.
        otherwise: Block,
    },
    /// `while (condition) { ... }`.
    While {
        /// The condition: the loop goes on as long as it is not 0.
        condition: Expression,
        /// The repeated block.
        body: Block,
    },
    /// `unroll (n) { ... }`, which is a loop as well.
    Repeat {
        /// The number of repetitions.
        times: Expression,
        /// The repeated block.
        body: Block,
    },
    /// `for ($kv : @map) { ... }`: the variable is the tuple (key, value).
    ForMap {
        /// The variable's name without `$`.
        variable: String,
        /// The map's name without `@`.
        map: String,
        /// The repeated block.
        body: Block,
    },
    /// `for ($i : first..end) { ... }`.
    ForRange {
        /// The variable's name without `$`.
        variable: String,
        /// The first value.
        first: Expression,
        /// The value behind the last one.
        end: Expression,
        /// The repeated block.
        body: Block,
    },
    /// Ends the innermost loop.
    Break,
    /// Begins the next iteration of the innermost loop.
    Continue,
    /// Ends the rule, or the function with this value.
    Return(Option<Expression>),
}

/// A variable that can be assigned.
#[derive(Debug, Clone, PartialEq)]
pub struct Lvalue {
    /// The kind of variable.
    pub kind: LvalueKind,
    /// The text of the variable.
    pub span: Span,
}

/// The kinds of variables.
#[derive(Debug, Clone, PartialEq)]
pub enum LvalueKind {
    /// `$name`: local to one run of a rule. The name is without `$`.
    Local(String),
    /// `@name` or `@name[keys]`: global to the script. The name is without `@` and may be empty.
    Global {
        /// The name.
        name: String,
        /// The keys; none for a scalar.
        keys: Vec<Expression>,
    },
}

/// Functions that aggregate values under a map's key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Aggregation {
    /// The number of values.
    Count,
    /// The sum of the values.
    Sum,
    /// The smallest value.
    Min,
    /// The largest value.
    Max,
    /// The mean.
    Average,
    /// The number of values, their mean and their sum.
    Stats,
    /// A histogram with powers of two, each divided into 2 to the power of so many parts.
    PowerHistogram(u32),
    /// A histogram with equal steps.
    LinearHistogram {
        /// The lower bound. Values below it have a bucket of their own, or are dropped in the
        /// strict dialect.
        min: i64,
        /// The upper bound. Values above it have a bucket of their own, or are dropped in the
        /// strict dialect.
        max: i64,
        /// The width of a bucket, at least 1.
        step: i64,
    },
    /// The values of the newest intervals of time.
    TimeSeries(SeriesKind),
}

/// The form of a time series.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SeriesKind {
    /// The length of an interval in nanoseconds, at least 1.
    pub interval: u64,
    /// The greatest number of intervals, at least 1.
    pub intervals: u32,
    /// The value that stands for those of an interval.
    pub part: SeriesPart,
}

/// The value that stands for those of an interval.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SeriesPart {
    /// The last one.
    Last,
    /// The smallest.
    Min,
    /// The largest.
    Max,
    /// Their sum.
    Sum,
    /// Their mean.
    Average,
}

/// An expression.
#[derive(Debug, Clone, PartialEq)]
pub struct Expression {
    /// The kind of expression.
    pub kind: ExpressionKind,
    /// The text of the expression.
    pub span: Span,
}

impl Expression {
    /// Returns the name and the keys of the global variable that this is, if it is one.
    #[must_use]
    pub fn as_global(&self) -> Option<(&str, &[Expression])> {
        let ExpressionKind::Lvalue(place) = &self.kind else {
            return None;
        };
        match &place.kind {
            LvalueKind::Global { name, keys } => Some((name, keys)),
            LvalueKind::Local(_) => None,
        }
    }

    /// Returns the number that this is as written, if it is one.
    #[must_use]
    pub fn as_number(&self) -> Option<i64> {
        match self.kind {
            ExpressionKind::Number(number) | ExpressionKind::Enumerator { number, .. } => {
                Some(number)
            }
            _ => None,
        }
    }

    /// Checks whether this is a global variable without keys: a whole map, or one value.
    #[must_use]
    pub fn is_whole_global(&self) -> bool {
        self.as_global().is_some_and(|(_, keys)| keys.is_empty())
    }
}

/// The kinds of expressions.
#[derive(Debug, Clone, PartialEq)]
pub enum ExpressionKind {
    /// A number.
    Number(i64),
    /// A number above `i64::MAX`.
    Unsigned(u64),
    /// A string literal, escapes expanded.
    Text(Vec<u8>),
    /// A builtin: `pid`, `arg0`, `args`.
    Builtin(Builtin),
    /// `$1`: an argument of the script, from 1.
    Argument(usize),
    /// `$#`: the number of the script's arguments.
    ArgumentCount,
    /// `true` or `false`.
    Boolean(bool),
    /// A name of one of the kernel's enums: `IPPROTO_TCP`.
    Constant(String),
    /// A name of one of the script's enums.
    Enumerator {
        /// The enum's place in [`Script::enums`].
        of: usize,
        /// The number.
        number: i64,
    },
    /// The value of a variable.
    Lvalue(Box<Lvalue>),
    /// An operator with one operand: `-x`.
    Unary(UnaryOperator, Box<Expression>),
    /// An operator with two operands: `x + y`.
    Binary(BinaryOperator, Box<Expression>, Box<Expression>),
    /// `c ? x : y`, or `c ?: y`.
    Conditional {
        /// The condition.
        condition: Box<Expression>,
        /// The value if the condition is not 0; the condition itself if there is none.
        then: Option<Box<Expression>>,
        /// The value if the condition is 0.
        otherwise: Box<Expression>,
    },
    /// A step: `x++`, `--x`.
    Step {
        /// The changed variable.
        place: Box<Lvalue>,
        /// The step, 1 or -1.
        by: i64,
        /// Whether the value is the one before the change.
        postfix: bool,
    },
    /// A call: `name(arguments)`.
    Call(Call),
    /// A member: `of.name` and `of->name`.
    Member {
        /// The structure, or the pointer to one.
        of: Box<Expression>,
        /// The member's name.
        name: String,
        /// The text of the name.
        name_span: Span,
        /// Whether `of` is a pointer (`->`).
        arrow: bool,
    },
    /// An item of a tuple: `of.0`.
    Item {
        /// The tuple.
        of: Box<Expression>,
        /// The item's index, from 0.
        index: usize,
    },
    /// An element of an array or a pointer: `of[index]`.
    Index {
        /// The array.
        of: Box<Expression>,
        /// The element's index.
        index: Box<Expression>,
    },
    /// A cast: `(type)of`.
    Cast {
        /// The type.
        to: TypeName,
        /// The value.
        of: Box<Expression>,
    },
    /// The size of a type: `sizeof(type)`.
    SizeOfType(TypeName),
    /// The size of an expression's type: `sizeof(x)`. The expression is not evaluated.
    SizeOfValue(Box<Expression>),
    /// A record that describes a type: `typeinfo(type)`. An expression is given by its `typeof`,
    /// and not evaluated.
    TypeInfo(TypeName),
    /// A member's offset: `offsetof(type, member)`. An expression is given by its `typeof`.
    OffsetOf {
        /// The structure.
        of: TypeName,
        /// The path of members.
        members: Vec<String>,
    },
    /// A name that the parser does not know, with the arguments of a call: a macro's, or an
    /// enum's. There is none in a parsed script.
    Named {
        /// The name.
        name: String,
        /// The arguments; `None` without parentheses.
        arguments: Option<Vec<Expression>>,
    },
    /// A block with a value.
    Block(Box<BlockExpression>),
    /// A record: `(x = 1, y = 2)`.
    Record(Vec<(String, Expression)>),
    /// A tuple: `(x, y)`, `(x,)`, `()`.
    Tuple(Vec<Expression>),
    /// A translator's output: `xlate <type>(of)`.
    Translate {
        /// The output's type.
        to: TypeName,
        /// The input.
        of: Box<Expression>,
    },
}

/// A call of one of the language's functions.
#[derive(Debug, Clone, PartialEq)]
pub struct Call {
    /// The function.
    pub function: Function,
    /// The text of the function's name.
    pub name_span: Span,
    /// The arguments.
    pub arguments: Vec<Expression>,
}

/// A type, as C writes it.
#[derive(Debug, Clone, PartialEq)]
pub struct TypeName {
    /// The base: `int`, `unsigned long`, `struct file`, `uint8`, `pid_t`. It has no qualifiers, and
    /// one blank between words.
    pub base: String,
    /// Of `typeof(x)`, the value whose type is the base. It is not evaluated.
    pub like: Option<Box<Expression>>,
    /// The number of `*` that follow.
    pub pointers: usize,
    /// Of an array, the number of elements: 0 for `[]`, which a cast takes from its value.
    pub elements: Option<u64>,
    /// The text of the type.
    pub span: Span,
}

/// A translator: `translator output < input *name > { member = expression; ... };`
#[derive(Debug, Clone, PartialEq)]
pub struct Translator {
    /// The output's type: a structure.
    pub output: TypeName,
    /// The input's type.
    pub input: TypeName,
    /// The input's name in the expressions: a local variable without `$`.
    pub variable: String,
    /// The names and expressions of the members.
    pub members: Vec<(String, Expression)>,
    /// The text of the translator.
    pub span: Span,
}

/// A structure or union of a script or a translator's file: `struct name { type member; ... };`
#[derive(Debug, Clone, PartialEq)]
pub struct Structure {
    /// The name without `struct`. Those inside others have names that no script can write.
    pub name: String,
    /// Whether all members begin at the start.
    pub is_union: bool,
    /// The members, in order.
    pub members: Vec<StructureMember>,
    /// The text of the structure.
    pub span: Span,
}

/// A member of a [`Structure`].
#[derive(Debug, Clone, PartialEq)]
pub struct StructureMember {
    /// The member's type.
    pub type_name: TypeName,
    /// The member's name. It is empty for a structure whose members count as those of the one
    /// around it, and for bits between others.
    pub name: String,
    /// The numbers of elements, if it is an array: of one of arrays, the outermost first.
    pub elements: Vec<u64>,
    /// The number of bits, if it is a bit field.
    pub bits: Option<u64>,
}

//! A script as a tree: what [`parse`](super::parse) makes of text and [`compile`](super::compile) makes programs of.
//!
//! Every node knows the bytes of the text that it came from, so that a message can underline them. Nothing here is checked against a
//! guest: whether probes exist and types have members is the compiler's to say. Sources: bt(5), the language of bpftrace, and for
//! translators the D language as dtrace(1) and SDT(9) use it.

/// Bytes `start..end` of the script's text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
pub struct Span {
    /// First byte.
    pub start: usize,
    /// Behind the last one.
    pub end: usize,
}

impl Span {
    /// From the start of this to the end of `last`.
    #[must_use]
    pub fn to(self, last: Self) -> Self {
        Self {
            start: self.start,
            end: last.end.max(self.end),
        }
    }
}

/// Which language a script is read as.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
pub enum Dialect {
    /// bt(5) with its oddities mended, and what users of bpftrace expect.
    #[default]
    Normal,
    /// OpenBSD's bt(5), oddities included.
    Strict,
}

/// A whole script.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Script {
    /// Its rules, in order.
    pub rules: Vec<Rule>,
    /// Its translators; those of library files are put before them.
    pub translators: Vec<Translator>,
    /// Structures that it defines itself.
    pub structures: Vec<Structure>,
}

/// Probes, a predicate, and what is done.
#[derive(Debug, Clone, PartialEq)]
pub struct Rule {
    /// When: at least one.
    pub probes: Vec<ProbeSpec>,
    /// Only if this is not 0.
    pub filter: Option<Expression>,
    /// What.
    pub body: Block,
}

/// When a rule runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProbeSpec {
    /// Which.
    pub kind: ProbeKind,
    /// Where it stands.
    pub span: Span,
}

/// Probes of a rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ProbeKind {
    /// Before all others.
    Begin,
    /// After all others.
    End,
    /// A pattern of probes as [`ProbePattern`](crate::name::ProbePattern) reads it.
    Pattern(String),
}

/// Statements in braces.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Block {
    /// In order.
    pub statements: Vec<Statement>,
}

/// A statement.
#[derive(Debug, Clone, PartialEq)]
pub struct Statement {
    /// Which.
    pub kind: StatementKind,
    /// Where it stands.
    pub span: Span,
}

/// What a statement does.
#[derive(Debug, Clone, PartialEq)]
pub enum StatementKind {
    /// `place = value`, and `place op= value`.
    Assign {
        /// `$x`, `@x` or `@x[keys]`.
        place: Lvalue,
        /// The operator before `=`.
        operator: Option<BinaryOperator>,
        /// The right side.
        value: Expression,
    },
    /// `@x[keys] = count()` and its like.
    Aggregate {
        /// `@x` or `@x[keys]`.
        place: Lvalue,
        /// Which.
        aggregation: Aggregation,
        /// What it is of, if not a count.
        value: Option<Expression>,
    },
    /// `printf(...)`, `$x++`.
    Expression(Expression),
    /// `if`.
    If {
        /// Run `then` if this is not 0.
        condition: Expression,
        /// Then.
        then: Block,
        /// Else; an `else if` is a block with one statement.
        otherwise: Block,
    },
    /// `while (condition) { ... }`.
    While {
        /// As long as this is not 0.
        condition: Expression,
        /// What is repeated.
        body: Block,
    },
    /// `unroll (n) { ... }`, which repeats as well.
    Repeat {
        /// How often.
        times: Expression,
        /// What is repeated.
        body: Block,
    },
    /// `for ($kv : @map) { ... }`: the variable is the tuple (key, value).
    ForMap {
        /// Name without `$`.
        variable: String,
        /// Name without `@`.
        map: String,
        /// What is repeated.
        body: Block,
    },
    /// `for ($i : first..end) { ... }`.
    ForRange {
        /// Name without `$`.
        variable: String,
        /// The first value.
        first: Expression,
        /// Behind the last one.
        end: Expression,
        /// What is repeated.
        body: Block,
    },
    /// Ends the loop around.
    Break,
    /// Begins the next turn of the loop around.
    Continue,
    /// Ends the rule.
    Return,
}

/// Where a value is kept.
#[derive(Debug, Clone, PartialEq)]
pub struct Lvalue {
    /// Which.
    pub kind: LvalueKind,
    /// Where it stands.
    pub span: Span,
}

/// Variables.
#[derive(Debug, Clone, PartialEq)]
pub enum LvalueKind {
    /// `$name`: of one run of a rule. The name is without `$`.
    Local(String),
    /// `@name` or `@name[keys]`: of the whole script. The name is without `@` and may be empty.
    Global {
        /// The name.
        name: String,
        /// The keys; none for a scalar.
        keys: Vec<Expression>,
    },
}

/// Functions that gather values under a map's key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Aggregation {
    /// How often.
    Count,
    /// Sum of the values.
    Sum,
    /// The smallest.
    Min,
    /// The largest.
    Max,
    /// The mean.
    Average,
    /// How many, their mean and their sum.
    Stats,
    /// A histogram with powers of two.
    PowerHistogram,
    /// One with equal steps.
    LinearHistogram {
        /// Values below are told apart, or left out where the dialect is strict.
        min: i64,
        /// The same above.
        max: i64,
        /// Width of a bucket, at least 1.
        step: i64,
    },
}

/// An expression.
#[derive(Debug, Clone, PartialEq)]
pub struct Expression {
    /// Which.
    pub kind: ExpressionKind,
    /// Where it stands.
    pub span: Span,
}

impl Expression {
    /// The name and the keys of the global variable that this is, if it is one.
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

    /// Whether this is a global variable without keys: a whole map, or one value.
    #[must_use]
    pub fn is_whole_global(&self) -> bool {
        self.as_global().is_some_and(|(_, keys)| keys.is_empty())
    }
}

/// What an expression is.
#[derive(Debug, Clone, PartialEq)]
pub enum ExpressionKind {
    /// A number.
    Number(i64),
    /// One above `i64::MAX`.
    Unsigned(u64),
    /// A string literal, escapes expanded.
    Text(Vec<u8>),
    /// `pid`, `arg0`, `args`.
    Builtin(Builtin),
    /// `$1`: an argument of the script, from 1.
    Argument(usize),
    /// `$#`.
    ArgumentCount,
    /// `IPPROTO_TCP`: a name of one of the kernel's enums.
    Constant(String),
    /// The value of a variable.
    Lvalue(Box<Lvalue>),
    /// `-x`.
    Unary(UnaryOperator, Box<Expression>),
    /// `x + y`.
    Binary(BinaryOperator, Box<Expression>, Box<Expression>),
    /// `c ? x : y`.
    Conditional {
        /// Which of the two.
        condition: Box<Expression>,
        /// If it is not 0.
        then: Box<Expression>,
        /// If it is 0.
        otherwise: Box<Expression>,
    },
    /// `x++`, `--x`.
    Step {
        /// What is changed.
        place: Box<Lvalue>,
        /// 1 or -1.
        by: i64,
        /// Whether the value is that before the change.
        postfix: bool,
    },
    /// `name(arguments)`.
    Call(Call),
    /// `of.name` and `of->name`.
    Member {
        /// The structure, or the pointer to one.
        of: Box<Expression>,
        /// The member.
        name: String,
        /// Where the name stands.
        name_span: Span,
        /// Whether `of` is a pointer (`->`).
        arrow: bool,
    },
    /// `of.0`: an item of a tuple.
    Item {
        /// The tuple.
        of: Box<Expression>,
        /// Which, from 0.
        index: usize,
    },
    /// `of[index]`: of an array or a pointer.
    Index {
        /// The array.
        of: Box<Expression>,
        /// Which element.
        index: Box<Expression>,
    },
    /// `(type)of`.
    Cast {
        /// To what.
        to: TypeName,
        /// What.
        of: Box<Expression>,
    },
    /// `sizeof(type)`.
    SizeOfType(TypeName),
    /// `sizeof(x)`: of the type of an expression, which is not evaluated.
    SizeOfValue(Box<Expression>),
    /// `offsetof(type, member)`.
    OffsetOf {
        /// The structure.
        of: TypeName,
        /// The path of members.
        members: Vec<String>,
    },
    /// `(x, y)`: two at least.
    Tuple(Vec<Expression>),
    /// `xlate <type>(of)`: a translator's output.
    Translate {
        /// The output.
        to: TypeName,
        /// The input.
        of: Box<Expression>,
    },
}

/// A call of one of the language's functions.
#[derive(Debug, Clone, PartialEq)]
pub struct Call {
    /// Which.
    pub function: Function,
    /// Where its name stands.
    pub name_span: Span,
    /// With what.
    pub arguments: Vec<Expression>,
}

/// A type, as C writes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TypeName {
    /// `int`, `unsigned long`, `struct file`, `uint8`, `pid_t`; without qualifiers, words parted by one blank.
    pub base: String,
    /// How many `*` follow.
    pub pointers: usize,
    /// Where it stands.
    pub span: Span,
}

/// `translator output < input *name > { member = expression; ... };`
#[derive(Debug, Clone, PartialEq)]
pub struct Translator {
    /// What it makes: a structure.
    pub output: TypeName,
    /// What of.
    pub input: TypeName,
    /// What the input is called in the expressions: a local variable without `$`.
    pub variable: String,
    /// What each member is.
    pub members: Vec<(String, Expression)>,
    /// Where it stands.
    pub span: Span,
}

/// `struct name { type member; ... };` of a script or a translator's file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Structure {
    /// Its name without `struct`.
    pub name: String,
    /// Its members, in order.
    pub members: Vec<StructureMember>,
    /// Where it stands.
    pub span: Span,
}

/// A member of a [`Structure`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StructureMember {
    /// Its type.
    pub type_name: TypeName,
    /// Its name.
    pub name: String,
    /// Elements, if it is an array.
    pub elements: Option<u64>,
}

/// Operators with one operand.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum UnaryOperator {
    /// `-`.
    Negate,
    /// `!`.
    Not,
    /// `~`.
    Complement,
    /// `*`: what a pointer points to.
    Dereference,
}

/// Operators with two operands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(missing_docs)] // the names of C's operators
pub enum BinaryOperator {
    Add,
    Subtract,
    Multiply,
    Divide,
    Modulo,
    And,
    Or,
    Xor,
    ShiftLeft,
    ShiftRight,
    Equal,
    NotEqual,
    Less,
    LessOrEqual,
    Greater,
    GreaterOrEqual,
    LogicalAnd,
    LogicalOr,
}

/// What the language knows of a hit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Builtin {
    /// `arg0` to `arg9`.
    Argument(u8),
    /// `args`: the probe's arguments by name.
    Arguments,
    /// Name of the thread.
    Comm,
    /// The vCPU's number.
    Cpu,
    /// The time, in nanoseconds since 1970.
    Nsecs,
    /// Nanoseconds since the script began.
    Elapsed,
    /// The process.
    Pid,
    /// The thread.
    Tid,
    /// The probe's name.
    Probe,
    /// The function's name.
    Function,
    /// The value returned.
    ReturnValue,
    /// The kernel stack.
    KernelStack,
    /// The program's stack.
    UserStack,
    /// Address of the current `task_struct`.
    CurrentTask,
    /// The user's number.
    Uid,
    /// The group's number.
    Gid,
    /// The parent process's number.
    ParentPid,
    /// A random number of 32 bits.
    Random,
    /// The program counter.
    ProgramCounter,
}

/// The language's functions. `hist` and its like are no expressions: see [`StatementKind::Aggregate`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Function {
    /// `printf(format, ...)`.
    Printf,
    /// `print(value)`, `print(@map)`, `print(@map, n)`, `print(@map, n, divisor)`.
    Print,
    /// `time(format)`: prints the time of the event.
    Time,
    /// `strftime(format, nsecs)`.
    Strftime,
    /// `clear(@map)`.
    Clear,
    /// `zero(@map)`.
    Zero,
    /// `delete(@map[key])`, also `delete(@map, key)`.
    Delete,
    /// `has_key(@map, key)`.
    HasKey,
    /// `len(@map)`, `len(stack)`, `len(string)`.
    Len,
    /// `exit()`.
    Exit,
    /// `str(pointer [, length])`.
    Str,
    /// `buf(pointer, length)`: shown as `\x..`.
    Buf,
    /// `kstr(pointer [, length])`: as `str`, in the kernel's memory.
    KernelStr,
    /// `ustr(pointer [, length])`: as `str`, in the program's memory.
    UserStr,
    /// `ksym(address)`.
    KernelSymbol,
    /// `usym(address)`.
    UserSymbol,
    /// `kaddr("name")`.
    KernelAddress,
    /// `uaddr("name")`, which the compiler refuses with what to write instead.
    UserAddress,
    /// `kstack([frames])`.
    KernelStack,
    /// `ustack([frames])`.
    UserStack,
    /// `ntop([family,] address)`.
    Ntop,
    /// `strncmp(a, b, n)`.
    Strncmp,
    /// `strcontains(haystack, needle)`.
    StrContains,
    /// `reg("name")`.
    Register,
    /// `join(argv [, separator])`: prints the strings of an array of pointers.
    Join,
    /// `bswap(x)`: all bytes of a number, or those of the type that it is cast to.
    ByteSwap,
    /// `ntohs(x)`, `htons(x)`.
    NetworkShort,
    /// `ntohl(x)`, `htonl(x)`.
    NetworkLong,
    /// `inet_ntoa(pointer)`: D's text of an IPv4 address in memory.
    InetNtoa,
    /// `macaddr(pointer)`: text of an Ethernet address in memory.
    MacAddress,
    /// `kptr(x)` and `uptr(x)`: the value itself.
    Pointer,
    /// `assert(condition, message)`.
    Assert,
    /// `errorf(format, ...)`: to standard error.
    Errorf,
    /// `warnf(format, ...)`: to standard error.
    Warnf,
}

//! The words of the language: the builtins, and the names of functions and operators.
//!
//! Sources: bt(5), the language reference of bpftrace, and for foreign names dtrace(1).

use crate::ast::{Aggregation, BinaryOperator, Builtin, Function};

/// A function of the normal dialect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Signature {
    /// The function's name.
    pub name: &'static str,
    /// The function.
    pub function: Function,
    /// The least number of arguments.
    pub least: usize,
    /// The greatest number of arguments.
    pub most: usize,
    /// The kind of the first argument.
    pub first: FirstArgument,
    /// Whether a call is an expression; others are statements.
    pub gives_value: bool,
    /// The syntax of a call, for messages.
    pub usage: &'static str,
}

/// The kinds of a function's first argument.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FirstArgument {
    /// Anything.
    Any,
    /// A string literal.
    Text,
    /// A string literal that formats the other arguments.
    Format,
    /// A whole map: `@x`.
    Map,
    /// An entry: `@x[key]`, or `@x` with the key as the second argument.
    Entry,
}

/// Any number of arguments.
const MANY: usize = usize::MAX;

/// Returns the text before the parenthesis of a usage.
const fn name_of(usage: &'static str) -> &'static str {
    let mut end = 0;
    while usage.as_bytes()[end] != b'(' {
        end += 1;
    }
    usage.split_at(end).0
}

const fn statement(
    usage: &'static str,
    function: Function,
    (least, most): (usize, usize),
    first: FirstArgument,
) -> Signature {
    Signature {
        name: name_of(usage),
        function,
        least,
        most,
        first,
        gives_value: false,
        usage,
    }
}

const fn value(
    usage: &'static str,
    function: Function,
    arguments: (usize, usize),
    first: FirstArgument,
) -> Signature {
    Signature {
        gives_value: true,
        ..statement(usage, function, arguments, first)
    }
}

/// The functions.
pub const FUNCTIONS: &[Signature] = {
    use FirstArgument::{Any, Entry, Format, Map, Text};
    use Function as F;
    &[
        statement("printf(\"format\", ...)", F::Printf, (1, MANY), Format),
        statement("errorf(\"format\", ...)", F::Errorf, (1, MANY), Format),
        statement("warnf(\"format\", ...)", F::Warnf, (1, MANY), Format),
        statement(
            "print(value) or print(@map, top, divisor)",
            F::Print,
            (1, 3),
            Any,
        ),
        statement("time(\"format\")", F::Time, (0, 1), Text),
        statement("clear(@map)", F::Clear, (1, 1), Map),
        statement("zero(@map)", F::Zero, (1, 1), Map),
        statement("delete(@map[key])", F::Delete, (1, 2), Entry),
        statement("exit(status)", F::Exit, (0, 1), Any),
        statement("join(pointers, \"separator\")", F::Join, (1, 2), Any),
        statement("assert(condition, \"message\")", F::Assert, (2, 2), Any),
        value("strftime(\"format\", nsecs)", F::Strftime, (2, 2), Text),
        value("has_key(@map, key)", F::HasKey, (2, 2), Map),
        value("len(@map), len(string) or len(stack)", F::Len, (1, 1), Any),
        value("str(pointer, length)", F::Str, (1, 2), Any),
        value("buf(pointer, length)", F::Buf, (1, 2), Any),
        value("kstr(pointer, length)", F::KernelStr, (1, 2), Any),
        value("ustr(pointer, length)", F::UserStr, (1, 2), Any),
        value("ksym(address)", F::KernelSymbol, (1, 1), Any),
        value("usym(address)", F::UserSymbol, (1, 1), Any),
        value("kaddr(\"name\")", F::KernelAddress, (1, 1), Text),
        value("uaddr(\"name\")", F::UserAddress, (1, 1), Text),
        value("kstack(mode, frames)", F::KernelStack, (0, 2), Any),
        value("ustack(mode, frames)", F::UserStack, (0, 2), Any),
        value("ntop(family, address)", F::Ntop, (1, 2), Any),
        value("strncmp(a, b, length)", F::Strncmp, (3, 3), Any),
        value("strcontains(haystack, needle)", F::StrContains, (2, 2), Any),
        value("reg(\"name\")", F::Register, (1, 1), Text),
        value("bswap(number)", F::ByteSwap, (1, 1), Any),
        value("ntohs(number)", F::NetworkShort, (1, 1), Any),
        value("htons(number)", F::NetworkShort, (1, 1), Any),
        value("ntohl(number)", F::NetworkLong, (1, 1), Any),
        value("htonl(number)", F::NetworkLong, (1, 1), Any),
        value("inet_ntoa(pointer)", F::InetNtoa, (1, 1), Any),
        value("macaddr(pointer)", F::MacAddress, (1, 1), Any),
        value("strerror(number)", F::ErrorText, (1, 1), Any),
        value("signal_name(number)", F::SignalName, (1, 1), Any),
        value("syscall_name(number)", F::CallName, (1, 1), Any),
        value("strstr(haystack, needle)", F::Find, (2, 2), Any),
        value(
            "getopt(\"name\", default, \"description\")",
            F::Option,
            (1, 3),
            Text,
        ),
        value("pton(\"address\")", F::AddressBytes, (1, 1), Text),
        statement(
            "cat(\"path\")",
            F::Refused("it would read a file of the guest, which is not in memory as a whole"),
            (1, MANY),
            Any,
        ),
        statement(
            "system(\"command\")",
            F::Refused(
                "nothing is run in a guest that is only watched; run the script's output through a program of the host",
            ),
            (1, MANY),
            Any,
        ),
        statement(
            "signal(number)",
            F::Refused(
                "a process is not changed by being watched; see ptrace(3) of this machine for stopping one",
            ),
            (1, 1),
            Any,
        ),
        statement(
            "override(value)",
            F::Refused("a guest is not changed by being watched"),
            (1, 1),
            Any,
        ),
        statement(
            "unwatch(address)",
            F::Refused("there are no watchpoints"),
            (1, 1),
            Any,
        ),
        value(
            "cgroupid(\"path\")",
            F::Refused(
                "the guest's files are not at hand; compare cgroup with the number that ls -id shows in the guest",
            ),
            (1, 1),
            Text,
        ),
        value(
            "cgroup_path(cgroup)",
            F::Refused(
                "control groups have numbers here; see the column of exotrace ps for containers",
            ),
            (1, 2),
            Any,
        ),
        value(
            "skboutput(\"file\", skb)",
            F::Refused("packets are not written to files; see run --net"),
            (1, MANY),
            Any,
        ),
        value("kptr(pointer)", F::Pointer, (1, 1), Any),
        value("uptr(pointer)", F::Pointer, (1, 1), Any),
    ]
};

/// Returns the signature of the function of that name.
#[must_use]
pub fn signature(name: &str) -> Option<&'static Signature> {
    FUNCTIONS.iter().find(|signature| signature.name == name)
}

/// Returns the signature of a function; of those that differ by name alone, the first one's.
#[must_use]
pub fn signature_of(function: Function) -> Option<&'static Signature> {
    FUNCTIONS
        .iter()
        .find(|signature| signature.function == function)
}

/// Returns the message about `count` arguments of a function that accepts fewer or more.
#[must_use]
pub fn wrong_count(name: &str, count: usize, usage: &str) -> String {
    let s = if count == 1 { "" } else { "s" };
    format!("{name}() with {count} argument{s}; it is written {usage}")
}

/// A function that aggregates values, by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AggregateFn {
    /// The function's name.
    pub name: &'static str,
    /// The syntax of a call, for messages.
    pub usage: &'static str,
    /// The least number of arguments.
    pub least: usize,
    /// The greatest number of arguments.
    pub most: usize,
}

/// The functions that aggregate values in a map.
pub const GATHERERS: &[AggregateFn] = {
    const fn of(usage: &'static str, least: usize, most: usize) -> AggregateFn {
        AggregateFn {
            name: name_of(usage),
            usage,
            least,
            most,
        }
    }
    &[
        of("count()", 0, 0),
        of("sum(value)", 1, 1),
        of("min(value)", 1, 1),
        of("max(value)", 1, 1),
        of("avg(value)", 1, 1),
        of("stats(value)", 1, 1),
        of("hist(value)", 1, 2),
        of("lhist(value, min, max, step)", 4, 4),
    ]
};

/// Returns the aggregating function of that name.
#[must_use]
pub fn gatherer(name: &str) -> Option<&'static AggregateFn> {
    GATHERERS.iter().find(|gatherer| gatherer.name == name)
}

/// Returns the name of an aggregating function.
#[must_use]
pub fn aggregation_name(aggregation: Aggregation) -> &'static str {
    match aggregation {
        Aggregation::Count => "count()",
        Aggregation::Sum => "sum()",
        Aggregation::Min => "min()",
        Aggregation::Max => "max()",
        Aggregation::Average => "avg()",
        Aggregation::Stats => "stats()",
        Aggregation::PowerHistogram(_) => "hist()",
        Aggregation::LinearHistogram { .. } => "lhist()",
    }
}

/// The builtins, without `arg0` to `arg9`.
pub const BUILTINS: &[(&str, Builtin)] = &[
    ("args", Builtin::Arguments),
    ("comm", Builtin::Comm),
    ("cpu", Builtin::Cpu),
    ("nsecs", Builtin::Nsecs),
    ("elapsed", Builtin::Elapsed),
    ("pid", Builtin::Pid),
    ("tid", Builtin::Tid),
    ("probe", Builtin::Probe),
    ("func", Builtin::Function),
    ("retval", Builtin::ReturnValue),
    ("kstack", Builtin::KernelStack),
    ("ustack", Builtin::UserStack),
    ("curtask", Builtin::CurrentTask),
    ("uid", Builtin::Uid),
    ("gid", Builtin::Gid),
    ("ppid", Builtin::ParentPid),
    ("rand", Builtin::Random),
    ("pc", Builtin::ProgramCounter),
    ("ncpus", Builtin::CpuCount),
];

/// The modes of values, `pid(curr_ns)`, and the value or macro that each is.
const MODES: &[(&str, &[(&str, &str)])] = &[
    ("pid", &[("init", "pid"), ("curr_ns", "pid_curr_ns")]),
    ("tid", &[("init", "tid"), ("curr_ns", "tid_curr_ns")]),
    (
        "nsecs",
        &[
            ("boot", "nsecs"),
            ("monotonic", "nsecs"),
            ("tai", "nsecs_tai"),
            ("sw_tai", "nsecs_tai"),
        ],
    ),
];

/// Returns the modes of a value, and the value or macro that each is.
#[must_use]
pub fn modes(word: &str) -> &'static [(&'static str, &'static str)] {
    let found = MODES.iter().find(|(known, _)| *known == word);
    found.map_or(&[], |(_, modes)| modes)
}

/// The forms in which stacks are shown: `kstack(perf)`.
pub const STACK_MODES: &[&str] = &["bpftrace", "perf", "raw", "build_id"];

/// The names `arg0` to `arg9`.
const ARGUMENTS: &[&str] = &[
    "arg0", "arg1", "arg2", "arg3", "arg4", "arg5", "arg6", "arg7", "arg8", "arg9",
];

/// Returns the builtin of that name.
#[must_use]
pub fn builtin(name: &str) -> Option<Builtin> {
    let argument = ARGUMENTS.iter().position(|known| *known == name);
    match argument.and_then(|number| u8::try_from(number).ok()) {
        Some(number) => Some(Builtin::Argument(number)),
        None => BUILTINS
            .iter()
            .find(|(known, _)| *known == name)
            .map(|(_, builtin)| *builtin),
    }
}

/// Returns the name of a builtin.
#[must_use]
pub fn builtin_name(builtin: Builtin) -> &'static str {
    match builtin {
        Builtin::Argument(number) => ARGUMENTS.get(usize::from(number)).unwrap_or(&"argN"),
        _ => BUILTINS
            .iter()
            .find(|(_, known)| *known == builtin)
            .map_or("", |(name, _)| name),
    }
}

/// The words that stand for numbers.
pub const CONSTANTS: &[(&str, i64)] = &[("NULL", 0), ("false", 0), ("true", 1)];

/// Checks whether a word is a value or a part of the language, so that no type can have this name.
#[must_use]
pub fn is_taken(word: &str) -> bool {
    builtin(word).is_some()
        || signature(word).is_some()
        || CONSTANTS.iter().any(|(name, _)| *name == word)
        || KEYWORDS.contains(&word)
}

/// Checks whether a word is the name of a function, aggregating ones included.
#[must_use]
pub fn is_function(word: &str) -> bool {
    signature(word).is_some() || gatherer(word).is_some()
}

/// Checks whether a word has the form of a constant of the kernel's: capitals, digits and `_`.
#[must_use]
pub fn is_constant(word: &str) -> bool {
    let may = |byte: u8| byte.is_ascii_uppercase() || byte.is_ascii_digit() || byte == b'_';
    word.bytes().all(may) && word.bytes().any(|byte| byte.is_ascii_uppercase())
}

/// The words that begin statements, and those with a syntax of their own.
pub const KEYWORDS: &[&str] = &[
    "if", "else", "while", "for", "unroll", "break", "continue", "return", "let", "sizeof",
    "offsetof", "xlate",
];

/// Names of other languages and longer versions of this one, with their equivalents here.
const FOREIGN: &[(&str, &[&str])] = &[
    ("execname", &["comm"]),
    ("timestamp", &["nsecs"]),
    ("walltimestamp", &["nsecs"]),
    ("curthread", &["curtask"]),
    ("curcpu", &["cpu"]),
    ("probefunc", &["func"]),
    ("probename", &["probe"]),
    ("stack", &["kstack", "kstack()"]),
    ("jstack", &["ustack", "ustack()"]),
    ("caller", &["ksym()"]),
    ("trace", &["print()"]),
    ("printa", &["print()"]),
    ("trunc", &["clear()"]),
    ("quantize", &["hist()"]),
    ("lquantize", &["lhist()"]),
    ("stringof", &["str()"]),
    ("copyinstr", &["ustr()", "str()"]),
    ("copyin", &["buf()"]),
    ("func_name", &["func"]),
    ("sym", &["ksym()", "usym()"]),
];

/// Returns the words that may have been meant by an unknown name: the equivalent of another
/// language's word, or similar words.
pub fn candidates(name: &str) -> Vec<&'static str> {
    if let Some((_, meant)) = FOREIGN.iter().find(|(foreign, _)| *foreign == name) {
        return meant.to_vec();
    }
    let builtins = BUILTINS.iter().map(|(name, _)| *name);
    let functions = FUNCTIONS.iter().map(|signature| signature.name);
    let gatherers = GATHERERS.iter().map(|gatherer| gatherer.name);
    let all = builtins
        .chain(ARGUMENTS.iter().copied())
        .chain(functions)
        .chain(gatherers)
        .chain(KEYWORDS.iter().copied());
    crate::diagnostic::similar(name, all)
}

/// Operators with two operands: text, operator, and precedence, as in C. A higher precedence binds
/// tighter.
pub const BINARY_OPERATORS: &[(&str, BinaryOperator, u8)] = &[
    ("||", BinaryOperator::LogicalOr, 1),
    ("&&", BinaryOperator::LogicalAnd, 2),
    ("|", BinaryOperator::Or, 3),
    ("^", BinaryOperator::Xor, 4),
    ("&", BinaryOperator::And, 5),
    ("==", BinaryOperator::Equal, 6),
    ("!=", BinaryOperator::NotEqual, 6),
    ("<", BinaryOperator::Less, 7),
    ("<=", BinaryOperator::LessOrEqual, 7),
    (">", BinaryOperator::Greater, 7),
    (">=", BinaryOperator::GreaterOrEqual, 7),
    ("<<", BinaryOperator::ShiftLeft, 8),
    (">>", BinaryOperator::ShiftRight, 8),
    ("+", BinaryOperator::Add, 9),
    ("-", BinaryOperator::Subtract, 9),
    ("*", BinaryOperator::Multiply, 10),
    ("/", BinaryOperator::Divide, 10),
    ("%", BinaryOperator::Modulo, 10),
];

/// The operators before `=`.
pub const ASSIGNMENTS: &[(&str, BinaryOperator)] = &[
    ("+=", BinaryOperator::Add),
    ("-=", BinaryOperator::Subtract),
    ("*=", BinaryOperator::Multiply),
    ("/=", BinaryOperator::Divide),
    ("%=", BinaryOperator::Modulo),
    ("&=", BinaryOperator::And),
    ("|=", BinaryOperator::Or),
    ("^=", BinaryOperator::Xor),
    ("<<=", BinaryOperator::ShiftLeft),
    (">>=", BinaryOperator::ShiftRight),
];

/// A word of the strict dialect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)] // named as they are written
pub enum StrictWord {
    Begin,
    End,
    If,
    Else,
    /// `arg0` to `arg9`.
    ProbeArgument(u8),
    /// Any other word that is a value by itself.
    Builtin(Builtin),
    /// `clear` and `zero`.
    OfVariable(Function),
    Count,
    /// `max`, `min` and `sum`.
    OfValue(Aggregation),
    Delete,
    Exit,
    Hist,
    Lhist,
    Print,
    Printf,
    Str,
    Time,
}

/// Returns the word of the strict dialect with this text.
#[must_use]
pub fn strict_word(text: &str) -> Option<StrictWord> {
    Some(match text {
        "BEGIN" => StrictWord::Begin,
        "END" => StrictWord::End,
        "if" => StrictWord::If,
        "else" => StrictWord::Else,
        "clear" => StrictWord::OfVariable(Function::Clear),
        "zero" => StrictWord::OfVariable(Function::Zero),
        "count" => StrictWord::Count,
        "max" => StrictWord::OfValue(Aggregation::Max),
        "min" => StrictWord::OfValue(Aggregation::Min),
        "sum" => StrictWord::OfValue(Aggregation::Sum),
        "delete" => StrictWord::Delete,
        "exit" => StrictWord::Exit,
        "hist" => StrictWord::Hist,
        "lhist" => StrictWord::Lhist,
        "print" => StrictWord::Print,
        "printf" => StrictWord::Printf,
        "str" => StrictWord::Str,
        "time" => StrictWord::Time,
        "comm" | "cpu" | "kstack" | "nsecs" | "pid" | "probe" | "retval" | "tid" | "ustack" => {
            StrictWord::Builtin(builtin(text)?)
        }
        _ => match builtin(text)? {
            Builtin::Argument(number) => StrictWord::ProbeArgument(number),
            _ => return None,
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_builtin_is_found_by_the_name_it_is_shown_with() {
        let arguments = (0..10).map(Builtin::Argument);
        for known in BUILTINS.iter().map(|(_, known)| *known).chain(arguments) {
            assert_eq!(builtin(builtin_name(known)), Some(known));
        }
        assert_eq!(builtin("arg10"), None);
    }

    #[test]
    fn functions_are_found_by_their_names() {
        for known in FUNCTIONS {
            assert!(known.least <= known.most, "{}", known.name);
            assert_eq!(signature(known.name), Some(known));
        }
        for known in GATHERERS {
            assert_eq!(gatherer(known.name), Some(known));
            assert!(strict_word(known.name).is_some() || matches!(known.name, "avg" | "stats"));
        }
    }

    #[test]
    fn what_may_be_meant_is_known() {
        for (name, meant) in [
            ("prinft", "printf"),
            ("execname", "comm"),
            ("quantize", "hist()"),
            ("retvla", "retval"),
            ("pidd", "pid"),
            ("wihle", "while"),
            ("hits", "hist"),
        ] {
            assert!(
                candidates(name).contains(&meant),
                "{name}: {:?}",
                candidates(name)
            );
        }
        assert!(candidates("zyzzyva").is_empty());
    }

    #[test]
    fn the_strict_dialect_lacks_the_extensions() {
        for extension in [
            "args", "func", "elapsed", "curtask", "while", "avg", "arg10", "join",
        ] {
            assert_eq!(strict_word(extension), None, "{extension}");
        }
        assert_eq!(strict_word("arg9"), Some(StrictWord::ProbeArgument(9)));
    }
}

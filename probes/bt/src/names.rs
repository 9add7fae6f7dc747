//! The words of the language: the builtins, and the names of functions and operators.
//!
//! Sources: bt(5), the language reference of bpftrace, and for foreign names dtrace(1).

mod functions;

pub use functions::{FUNCTIONS, FirstArgument, Signature, signature, signature_of, wrong_count};

use crate::ast::{Aggregation, BinaryOperator, Builtin, Function};
use crate::value::StackForm;

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
            name: functions::name_of(usage),
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
        of("tseries(value, interval, intervals, \"avg\")", 3, 4),
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
        Aggregation::TimeSeries(_) => "tseries()",
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
    ("probetype", Builtin::ProbeType),
    ("ctx", Builtin::Context),
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
const STACK_MODES: &[(&str, StackForm)] = &[
    ("bpftrace", StackForm::Names),
    ("perf", StackForm::Both),
    ("raw", StackForm::Addresses),
    ("build_id", StackForm::Addresses),
];

/// Returns the form in which a stack is shown in a mode of that name.
#[must_use]
pub fn stack_form(mode: &str) -> Option<StackForm> {
    let found = STACK_MODES.iter().find(|(known, _)| *known == mode);
    found.map(|(_, form)| *form)
}

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
pub const CONSTANTS: &[&str] = &["NULL", "false", "true"];

/// Checks whether a word is a value or a part of the language, so that no type can have this name.
#[must_use]
pub fn is_taken(word: &str) -> bool {
    builtin(word).is_some()
        || signature(word).is_some()
        || CONSTANTS.contains(&word)
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
    "offsetof", "typeof", "xlate",
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
    let functions = FUNCTIONS
        .iter()
        .filter(|signature| !matches!(signature.function, Function::Refused(_)))
        .map(|signature| signature.name);
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
            let is_newer = matches!(known.name, "avg" | "stats" | "tseries");
            assert!(strict_word(known.name).is_some() || is_newer);
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

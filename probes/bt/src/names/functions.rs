//! The functions of the language, and how each is called.

use crate::ast::{Function, TypeTest};

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
pub(super) const fn name_of(usage: &'static str) -> &'static str {
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
        statement("cat(\"format of a path\", ...)", F::Cat, (1, MANY), Format),
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
        statement("snapshot(\"name\")", F::Snapshot, (1, 1), Text),
        statement("rewind(\"name\", ago)", F::Rewind, (1, 2), Text),
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
            "signal_thread(number)",
            F::Refused(
                "a thread is not changed by being watched; see ptrace(3) of this machine for stopping one",
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
            F::Refused("a watchpoint stays as long as its script"),
            (1, 1),
            Any,
        ),
        value("cgroupid(\"path\")", F::CgroupId, (1, 1), Text),
        value(
            "cgroup_path(cgroup, \"filter\")",
            F::CgroupPath,
            (1, 2),
            Any,
        ),
        value(
            "skboutput(\"file\", skb)",
            F::Refused("packets are not written to files; see run --net"),
            (1, MANY),
            Any,
        ),
        statement(
            "static_assert(condition, \"message\")",
            F::StaticAssert,
            (2, 2),
            Any,
        ),
        statement("fail(\"format\", ...)", F::FailScript, (1, MANY), Format),
        value("memcmp(a, b, length)", F::CompareBytes, (3, 3), Any),
        value("default_str_length()", F::LongestText, (0, 0), Any),
        value("strcap(string)", F::TextRoom, (1, 1), Any),
        value("globmatch(string, pattern)", F::GlobMatch, (2, 2), Any),
        value("config()", F::Config, (0, 0), Any),
        value("is_array(value)", F::TypeTest(TypeTest::Array), (1, 1), Any),
        value(
            "is_integer(value)",
            F::TypeTest(TypeTest::Integer),
            (1, 1),
            Any,
        ),
        value(
            "is_unsigned_integer(value)",
            F::TypeTest(TypeTest::UnsignedInteger),
            (1, 1),
            Any,
        ),
        value(
            "is_literal(value)",
            F::TypeTest(TypeTest::Literal),
            (1, 1),
            Any,
        ),
        value("is_ptr(value)", F::TypeTest(TypeTest::Pointer), (1, 1), Any),
        value("is_str(value)", F::TypeTest(TypeTest::Text), (1, 1), Any),
        value(
            "username()",
            F::Refused("users have numbers here; compare uid with the guest's /etc/passwd"),
            (0, 0),
            Any,
        ),
        value(
            "cpid()",
            F::Refused("no command is started in a guest that is only watched"),
            (0, 0),
            Any,
        ),
        value(
            "write_user(to, from, length)",
            F::Refused("a program's memory is not changed by being watched"),
            (3, 3),
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

//! The operators, builtins and functions of the language, as the tree has them.
//! Their spelling stands in `names`.

/// The handling of a script's probes that do not exist.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum MissingProbes {
    /// They are reported, and an error where a rule has no other.
    #[default]
    Alternatives,
    /// Each is an error.
    Error,
    /// They are reported, and an error only where the script has no other.
    Warn,
    /// They are an error only where the script has no other.
    Ignore,
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
    /// `*`: dereferences a pointer.
    Dereference,
    /// `&`: takes the address of a member or an element.
    Address,
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

/// The values of a hit that the language names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Builtin {
    /// `arg0` to `arg9`.
    Argument(u8),
    /// `args`: the probe's arguments by name.
    Arguments,
    /// The thread's name.
    Comm,
    /// The vCPU's number.
    Cpu,
    /// The time in nanoseconds since 1970.
    Nsecs,
    /// Nanoseconds since the script began.
    Elapsed,
    /// The process's number.
    Pid,
    /// The thread's number.
    Tid,
    /// The probe's name.
    Probe,
    /// The function's name.
    Function,
    /// The returned value.
    ReturnValue,
    /// The kernel stack.
    KernelStack,
    /// The program's stack.
    UserStack,
    /// The address of the current `task_struct`.
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
    /// The number of vCPUs.
    CpuCount,
    /// The kind of the probe, as bpftrace calls it: `kprobe`.
    ProbeType,
    /// The subject of an iteration: `ctx`, as in `ctx.task`.
    Context,
}

/// The questions about an expression's type.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TypeTest {
    /// Whether it is an array.
    Array,
    /// Whether it is a number.
    Integer,
    /// Whether it is a number without a sign.
    UnsignedInteger,
    /// Whether it is written as such: `1`, `true`, `"text"`.
    Literal,
    /// Whether it is a pointer.
    Pointer,
    /// Whether it is text.
    Text,
}

/// The language's functions. `hist` and the like are no expressions: see
/// [`StatementKind::Aggregate`](super::StatementKind::Aggregate).
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
    /// `exit()`, `exit(status)`.
    Exit,
    /// `strerror(number)`.
    ErrorText,
    /// `signal_name(number)`.
    SignalName,
    /// `syscall_name(number)`.
    CallName,
    /// `strstr(haystack, needle)`.
    Find,
    /// `pton("address")`.
    AddressBytes,
    /// `getopt("name", default, "description")`.
    Option,
    /// A function of bpftrace that cannot be offered, with the reason.
    Refused(&'static str),
    /// `str(pointer [, length])`.
    Str,
    /// `buf(pointer, length)`: bytes, shown as `\x..`.
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
    /// `uaddr("name")`, which the compiler refuses with a message that names the alternative.
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
    /// `cat(format, ...)`: prints a file of the guest.
    Cat,
    /// `join(argv [, separator])`: prints the strings of an array of pointers.
    Join,
    /// `bswap(x)`: swaps the bytes of a number, as many as its type has.
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
    /// `static_assert(condition, message)`, which is checked before the script runs.
    StaticAssert,
    /// `fail(format, ...)`, which refuses the script unless it stands in a branch never taken.
    FailScript,
    /// `is_str(x)` and the like: what is known of a value before the script runs.
    TypeTest(TypeTest),
    /// `memcmp(a, b, n)`.
    CompareBytes,
    /// `cgroupid("path")`.
    CgroupId,
    /// `cgroup_path(id, "filter")`.
    CgroupPath,
    /// `default_str_length()`.
    LongestText,
    /// `strcap(text)`: the bytes that there are for a text.
    TextRoom,
    /// `globmatch(text, pattern)`.
    GlobMatch,
    /// `config()`: the settings of the script.
    Config,
    /// `errorf(format, ...)`: to standard error.
    Errorf,
    /// `warnf(format, ...)`: to standard error.
    Warnf,
    /// `snapshot(name)`: the machine at this hit.
    Snapshot,
    /// `rewind(name, ago)`: the machine before this hit.
    Rewind,
}

//! The system calls of 64-bit x86 Linux by number and by name, with the types and names of their
//! arguments.
//!
//! The table has facts of the kernel's interface only. The caller reads the number (`rax`), the
//! arguments (`rdi`, `rsi`, `rdx`, `r10`, `r8`, `r9`, in this order: syscall(2)) and the strings.
//! The table does not say whether the running kernel has a call. A number that is not in it may
//! belong to a newer kernel. The 32-bit calls of `int 0x80` and those of the x32 ABI (numbers with
//! bit 30, and 512 to 547) are not included.
//!
//! The data is `syscall_table/x86_64.txt`, which also names its source.

use std::sync::LazyLock;

use introspect::kernel::nearest::nearest;

/// The most arguments of a system call: one for each register.
pub const MAX_ARGUMENTS: usize = 6;

const TEXT: &str = include_str!("syscall_table/x86_64.txt");
const STRING_MARK: &str = ":string";

/// One system call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Syscall {
    /// The number in `rax`.
    pub number: u32,
    /// The name in the kernel's table and in `<asm/unistd_64.h>`: `newfstatat`, not the C library's
    /// `fstatat`.
    pub name: &'static str,
    /// The arguments in the order of the registers, at most [`MAX_ARGUMENTS`]. Also empty for
    /// numbers that never had a meaning in any kernel (`tuxcall`).
    pub arguments: &'static [Argument],
}

/// One argument.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Argument {
    /// The C type in the kernel's declaration, without `__user` and `const` of the value itself:
    /// `const char *`. If the type is shorter than a register, the register's upper bits have no
    /// meaning.
    pub type_name: &'static str,
    /// The name in the kernel's declaration.
    pub name: &'static str,
    is_string: bool,
}

impl Argument {
    /// Checks whether the argument points to a NUL-terminated string from the caller, such as a
    /// path, which can be read at the entry. Not included are buffers with a length, buffers that
    /// the kernel fills, and arrays of strings (`argv`).
    #[must_use]
    pub fn is_string(&self) -> bool {
        self.is_string
    }
}

/// Returns all system calls, by ascending number.
#[must_use]
pub fn all() -> &'static [Syscall] {
    static TABLE: LazyLock<Vec<Syscall>> =
        LazyLock::new(|| lines().filter_map(parse_line).collect());
    &TABLE
}

/// Returns the system call with this number, the value of `rax`.
#[must_use]
pub fn by_number(number: u64) -> Option<&'static Syscall> {
    let found = all().binary_search_by_key(&number, |call| call.number.into());
    all().get(found.ok()?)
}

/// Returns the system call of exactly this name.
#[must_use]
pub fn by_name(name: &str) -> Option<&'static Syscall> {
    all().iter().find(|call| call.name == name)
}

/// Returns up to `count` names similar to `name`, best first.
#[must_use]
pub fn nearest_names(name: &str, count: usize) -> Vec<&'static str> {
    nearest(name, all().iter().map(|call| call.name), count)
}

/// Returns the lines that describe a system call.
fn lines() -> impl Iterator<Item = &'static str> {
    TEXT.lines().filter(|line| !line.starts_with('#'))
}

/// Parses `number name type argument, type argument`.
fn parse_line(line: &'static str) -> Option<Syscall> {
    let (number, rest) = line.split_once(' ')?;
    let (name, arguments) = rest.split_once(' ').unwrap_or((rest, ""));
    let arguments: Option<Vec<Argument>> = arguments
        .split(", ")
        .filter(|argument| !argument.is_empty())
        .map(parse_argument)
        .collect();
    Some(Syscall {
        number: number.parse().ok()?,
        name,
        // Leaked once, for the life of the process.
        arguments: arguments?.leak(),
    })
}

fn parse_argument(text: &'static str) -> Option<Argument> {
    let (type_name, name) = text.rsplit_once(' ')?;
    let plain = name.strip_suffix(STRING_MARK);
    Some(Argument {
        type_name,
        name: plain.unwrap_or(name),
        is_string: plain.is_some(),
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::collections::HashSet;

    use super::*;

    /// Returns a C declaration, with strings in quotes.
    fn declaration(call: &Syscall) -> String {
        let arguments = call.arguments.iter().map(|argument| {
            let quote = if argument.is_string() { "\"" } else { "" };
            format!("{} {quote}{}{quote}", argument.type_name, argument.name)
        });
        format!(
            "{}({})",
            call.name,
            arguments.collect::<Vec<_>>().join(", ")
        )
    }

    #[test]
    fn system_calls_are_found_by_number_and_by_name() {
        for (number, expected) in [
            (0, "read(unsigned int fd, char * buf, size_t count)"),
            (1, "write(unsigned int fd, const char * buf, size_t count)"),
            (
                9,
                "mmap(unsigned long addr, unsigned long len, unsigned long prot, unsigned long flags, \
                 unsigned long fd, unsigned long off)",
            ),
            (39, "getpid()"),
            (
                56,
                "clone(unsigned long clone_flags, unsigned long newsp, int * parent_tidptr, unsigned long tls, \
                 int * child_tidptr)",
            ),
            (
                59,
                "execve(const char * \"filename\", const char * const * argv, const char * const * envp)",
            ),
            (79, "getcwd(char * buf, unsigned long size)"),
            (
                86,
                "link(const char * \"oldname\", const char * \"newname\")",
            ),
            (
                165,
                "mount(char * \"dev_name\", char * \"dir_name\", char * \"type\", unsigned long flags, void * data)",
            ),
            (166, "umount2(char * \"name\", int flags)"),
            (170, "sethostname(char * name, int len)"),
            (184, "tuxcall()"),
            (
                202,
                "futex(u32 * uaddr, int op, u32 val, const struct __kernel_timespec * utime, u32 * uaddr2, u32 val3)",
            ),
            (231, "exit_group(int error_code)"),
            (
                257,
                "openat(int dfd, const char * \"filename\", int flags, umode_t mode)",
            ),
            (
                262,
                "newfstatat(int dfd, const char * \"filename\", struct stat * statbuf, int flag)",
            ),
            (
                334,
                "rseq(struct rseq * rseq, u32 rseq_len, int flags, u32 sig)",
            ),
            (335, "uretprobe()"),
            (
                424,
                "pidfd_send_signal(int pidfd, int sig, siginfo_t * info, unsigned int flags)",
            ),
            (435, "clone3(struct clone_args * uargs, size_t size)"),
            (
                462,
                "mseal(unsigned long start, size_t len, unsigned long flags)",
            ),
            (
                466,
                "removexattrat(int dfd, const char * \"pathname\", unsigned int at_flags, const char * \"name\")",
            ),
            (471, "rseq_slice_yield()"),
        ] {
            let call = by_number(number).unwrap();
            assert_eq!(declaration(call), expected);
            assert_eq!(by_name(call.name), Some(call));
        }
    }

    #[test]
    fn unknown_numbers_and_names_are_not_found() {
        for number in [337, 423, 472, 512, 1 << 32, u64::MAX] {
            assert_eq!(by_number(number), None, "{number}");
        }
        for name in ["", "Read", "fstatat", "read ", "sys_read"] {
            assert_eq!(by_name(name), None, "{name:?}");
        }
    }

    #[test]
    fn every_line_is_a_system_call_of_its_own() {
        assert_eq!(all().len(), lines().count());
        assert!(all().is_sorted_by(|a, b| a.number < b.number));
        let names: HashSet<_> = all().iter().map(|call| call.name).collect();
        assert_eq!(names.len(), all().len());
        let numbers = all().iter().map(|call| call.number);
        assert!(numbers.eq((0..=336).chain(424..=471)), "no gaps");
    }

    #[test]
    fn every_argument_is_whole() {
        let identifier = |text: &str| {
            !text.is_empty() && text.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_')
        };
        for call in all() {
            assert!(identifier(call.name), "{call:?}");
            assert!(call.arguments.len() <= MAX_ARGUMENTS, "{call:?}");
            let names: HashSet<_> = call.arguments.iter().map(|a| a.name).collect();
            assert_eq!(names.len(), call.arguments.len(), "{call:?}");
            for argument in call.arguments {
                assert!(identifier(argument.name), "{call:?}");
                let words = argument.type_name.split(' ');
                assert!(
                    { words }.all(|word| identifier(word) || word == "*" || word == "**"),
                    "{call:?}"
                );
                if argument.is_string() {
                    assert!(argument.type_name.ends_with("char *"), "{call:?}");
                }
            }
        }
    }

    #[test]
    fn a_mistyped_name_finds_its_neighbours() {
        assert_eq!(nearest_names("opanat", 1), ["openat"]);
        assert!(nearest_names("fstatat", 9).contains(&"newfstatat"));
        assert!(nearest_names("zzzzzzzzzz", 3).is_empty());
    }
}

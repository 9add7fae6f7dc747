//! Names of probes, DTrace's four parts `provider:module:function:name`, and patterns for them.
//!
//! A pattern may omit parts from the left, as in D, with two differences known from bpftrace and
//! bt(5). With three parts the module is omitted. With two parts the name is omitted as well
//! (`kprobe:vfs_read`, `tracepoint:sched:sched_switch`). An empty part matches everything; `*`, `?`
//! and `[...]` match as in a shell.
//!
//! Sources: dtrace(1), dt(4), SDT(9).

pub mod foreign;

use std::borrow::Cow;
use std::fmt;

/// The length of the longest pattern in bytes.
const LONGEST: usize = 1024;

/// The name of one probe.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ProbeName {
    /// The provider: `kprobe`, `syscall`, `pid42`.
    pub provider: String,
    /// `vmlinux`, or the name of a kernel module or of a program's file; may be empty.
    pub module: String,
    /// The function; for a tracepoint its system, for a timer its unit.
    pub function: String,
    /// `entry`, `return` or an offset; for a tracepoint its event, for a timer its rate.
    pub name: String,
}

impl fmt::Display for ProbeName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text())
    }
}

impl ProbeName {
    /// Returns the text that [`Display`](fmt::Display) writes, without the formatter: lists of
    /// probes are long.
    #[must_use]
    pub fn text(&self) -> String {
        [
            &*self.provider,
            ":",
            &self.module,
            ":",
            &self.function,
            ":",
            &self.name,
        ]
        .concat()
    }

    /// Creates a name of four parts.
    #[must_use]
    pub fn new(provider: &str, module: &str, function: &str, name: &str) -> Self {
        Self {
            provider: provider.to_owned(),
            module: module.to_owned(),
            function: function.to_owned(),
            name: name.to_owned(),
        }
    }
}

/// The reason that a text is no pattern of probes.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PatternError {
    /// The text is empty.
    #[error(
        "an empty probe name; write provider:module:function:name, such as kprobe::vfs_read:entry"
    )]
    Empty,
    /// The text has too many parts.
    #[error("{text:?} has {found} parts; a probe has four: provider:module:function:name")]
    Parts {
        /// The text.
        text: String,
        /// The number of its parts.
        found: usize,
    },
    /// The text is too long.
    #[error("a probe name of {found} bytes; {LONGEST} are the most")]
    Long {
        /// The length in bytes.
        found: usize,
    },
}

/// A pattern for the names of probes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProbePattern {
    /// The text that was parsed.
    pub text: String,
    /// See [`ProbeName::provider`].
    pub provider: String,
    /// See [`ProbeName::module`].
    pub module: String,
    /// See [`ProbeName::function`].
    pub function: String,
    /// See [`ProbeName::name`].
    pub name: String,
    /// Whether the text is a name as bpftrace writes it.
    pub is_foreign: bool,
}

impl ProbePattern {
    /// Parses one to four parts. A single part is a function (`vfs_read`).
    ///
    /// # Errors
    /// If the text is empty, too long or has too many parts.
    pub fn parse(text: &str) -> Result<Self, PatternError> {
        if text.len() > LONGEST {
            return Err(PatternError::Long { found: text.len() });
        }
        let parts: Vec<&str> = text.split(':').map(str::trim).collect();
        let of = |provider: &str, module: &str, function: &str, name: &str| Self {
            text: text.to_owned(),
            provider: provider.to_owned(),
            module: module.to_owned(),
            function: function.to_owned(),
            name: name.to_owned(),
            is_foreign: false,
        };
        if let Some([provider, module, function, name]) = foreign::parts(&parts) {
            let module = match provider {
                "kprobe" => module_name(module),
                _ => module.into(),
            };
            return Ok(Self {
                is_foreign: true,
                ..of(provider, &module, function, name)
            });
        }
        match parts.as_slice() {
            [""] => Err(PatternError::Empty),
            [function] => Ok(of("", "", function, "")),
            // A timer has no function: `profile:97` has only a rate.
            [provider @ ("profile" | "interval"), name] => Ok(of(provider, "", "", name)),
            [provider, function] => Ok(of(provider, "", function, "")),
            // Two colons, as in `syscall::openat:entry`, and the last part left out.
            [provider @ "syscall", "", function]
                if Self::is_exact(function) && !matches!(*function, "entry" | "return") =>
            {
                Ok(of(provider, "", function, ""))
            }
            [provider, function, name] => Ok(of(provider, "", function, name)),
            [provider, module, function, name] | [provider, module, function, name, ""] => {
                match *provider {
                    "kprobe" | "tracepoint" => {
                        Ok(of(provider, &module_name(module), function, name))
                    }
                    _ => Ok(of(provider, module, function, name)),
                }
            }
            _ => Err(PatternError::Parts {
                text: text.to_owned(),
                found: parts.len(),
            }),
        }
    }

    /// Checks whether the pattern matches a name.
    #[must_use]
    pub fn matches(&self, probe: &ProbeName) -> bool {
        matches_part(&self.provider, &probe.provider)
            && matches_part(&self.module, &probe.module)
            && matches_part(&self.function, &probe.function)
            && matches_part(&self.name, &probe.name)
    }

    /// Checks whether probes of this provider can match.
    #[must_use]
    pub fn matches_provider(&self, provider: &str) -> bool {
        matches_part(&self.provider, provider)
    }

    /// Checks whether the pattern names a single function, system call or event.
    #[must_use]
    pub fn is_one(&self) -> bool {
        let part = match self.provider.as_str() {
            "tracepoint" => &self.name,
            _ => &self.function,
        };
        Self::is_exact(part)
    }

    /// Checks whether a part is a plain name without wildcards.
    #[must_use]
    pub fn is_exact(part: &str) -> bool {
        !part.is_empty() && !part.contains(['*', '?', '['])
    }
}

/// Returns the name of a kernel module. The kernel has underscores there, and its tools take dashes
/// as well. A pattern stays as it is.
fn module_name(module: &str) -> Cow<'_, str> {
    match ProbePattern::is_exact(module) {
        true => module.replace('-', "_").into(),
        false => module.into(),
    }
}

impl fmt::Display for ProbePattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// Parses a name that is an offset.
pub(crate) fn offset(name: &str) -> Option<u64> {
    let digits = name.strip_prefix('+').unwrap_or(name);
    match digits.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16).ok(),
        None => digits.parse().ok(),
    }
}

/// Checks whether `name` matches one part of a pattern; an empty part matches everything.
#[must_use]
pub fn matches_part(pattern: &str, name: &str) -> bool {
    pattern.is_empty() || glob(pattern.as_bytes(), name.as_bytes())
}

/// Checks whether a whole text matches a pattern as in a shell. It backtracks to the last `*` only,
/// so the time is bounded by the product of the lengths.
#[must_use]
pub fn glob(pattern: &[u8], text: &[u8]) -> bool {
    let (mut p, mut t) = (0, 0);
    let mut star: Option<(usize, usize)> = None;
    while t < text.len() {
        let step = match pattern.get(p) {
            Some(b'*') => {
                star = Some((p + 1, t));
                p += 1;
                continue;
            }
            Some(b'?') => Some(1),
            Some(b'[') => class(pattern.get(p..).unwrap_or_default(), text.get(t).copied()),
            Some(byte) if text.get(t) == Some(byte) => Some(1),
            _ => None,
        };
        match (step, star) {
            (Some(length), _) => {
                p += length;
                t += 1;
            }
            (None, Some((after, from))) => {
                p = after;
                t = from + 1;
                star = Some((after, from + 1));
            }
            (None, None) => return false,
        }
    }
    pattern.iter().skip(p).all(|byte| *byte == b'*')
}

/// Returns the length of the `[...]` at the start of `pattern` if it contains `byte`. Without a
/// closing bracket it is a plain `[`.
fn class(pattern: &[u8], byte: Option<u8>) -> Option<usize> {
    let byte = byte?;
    let negated = matches!(pattern.get(1), Some(b'!' | b'^'));
    let first = 1 + usize::from(negated);
    let Some(length) = pattern
        .iter()
        .skip(first + 1)
        .position(|b| *b == b']')
        .map(|at| first + 1 + at)
    else {
        return (byte == b'[').then_some(1);
    };
    let set = pattern.get(first..length).unwrap_or_default();
    let mut found = false;
    let mut at = 0;
    while let Some(from) = set.get(at) {
        match (set.get(at + 1), set.get(at + 2)) {
            (Some(b'-'), Some(to)) => {
                found |= (*from..=*to).contains(&byte);
                at += 3;
            }
            _ => {
                found |= *from == byte;
                at += 1;
            }
        }
    }
    (found != negated).then_some(length + 1)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn parts_are_left_out_as_people_write_them() {
        for (text, expected) in [
            ("vfs_read", ["", "", "vfs_read", ""]),
            ("kprobe:vfs_read", ["kprobe", "", "vfs_read", "entry"]),
            ("kretprobe:vfs_read", ["kprobe", "", "vfs_read", "return"]),
            ("kprobe:vfs_*:return", ["kprobe", "", "vfs_*", "return"]),
            (
                "kprobe:brd:brd_*:entry",
                ["kprobe", "brd", "brd_*", "entry"],
            ),
            (
                "kprobe:virtio-net:virtnet_poll:",
                ["kprobe", "virtio_net", "virtnet_poll", ""],
            ),
            (
                "kprobe:[a-c]*:brd_init:",
                ["kprobe", "[a-c]*", "brd_init", ""],
            ),
            ("syscall:read", ["syscall", "", "read", ""]),
            ("syscall::read", ["syscall", "", "read", ""]),
            ("syscall::entry", ["syscall", "", "", "entry"]),
            (
                "tracepoint:sched:sched_switch",
                ["tracepoint", "", "sched", "sched_switch"],
            ),
            ("profile:97", ["profile", "", "", "97"]),
            ("profile:hz:97", ["profile", "", "hz", "97"]),
            (
                "uprobe:/bin/sh:main",
                ["uprobe", "/bin/sh", "main", "entry"],
            ),
            (
                "uretprobe:/bin/sh:main",
                ["uprobe", "/bin/sh", "main", "return"],
            ),
            (
                "pid42:libc.so.6:malloc:entry",
                ["pid42", "libc.so.6", "malloc", "entry"],
            ),
            ("syscall:::", ["syscall", "", "", ""]),
        ] {
            let pattern = ProbePattern::parse(text).unwrap();
            let parts = [
                pattern.provider,
                pattern.module,
                pattern.function,
                pattern.name,
            ];
            assert_eq!(parts, expected, "{text}");
        }
    }

    #[test]
    fn what_is_no_pattern_is_told() {
        for (text, part) in [
            ("", "empty"),
            ("a:b:c:d:e", "5 parts"),
            (&"x".repeat(2000), "2000"),
        ] {
            let error = ProbePattern::parse(text).unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        }
    }

    #[test]
    fn globs_match_as_in_a_shell() {
        for (pattern, name, matches) in [
            ("", "anything", true),
            ("vfs_*", "vfs_read", true),
            ("vfs_*", "ksys_read", false),
            ("*read*", "vfs_readv", true),
            ("*_*_read", "x_y_z_read", true),
            ("vfs_rea?", "vfs_read", true),
            ("vfs_rea?", "vfs_rea", false),
            ("[kv]fs_read", "vfs_read", true),
            ("[!kv]fs_read", "vfs_read", false),
            ("[a-z]fs", "vfs", true),
            ("[a-c]fs", "vfs", false),
            ("[v", "[v", true),
            ("***", "", true),
            ("a", "", false),
            ("/lib/*/libc.so*", "/lib/x86_64-linux-gnu/libc.so.6", true),
        ] {
            assert_eq!(matches_part(pattern, name), matches, "{pattern} {name}");
        }
    }

    #[test]
    fn a_pattern_of_many_stars_takes_no_long_time() {
        let pattern = "*a".repeat(200) + "b";
        assert!(!matches_part(&pattern, &"a".repeat(2000)));
    }

    #[test]
    fn all_four_parts_count() {
        let probe = ProbeName::new("kprobe", "vmlinux", "vfs_read", "entry");
        for (text, matches) in [
            ("vfs_read", true),
            ("kprobe:vfs_read", true),
            ("kretprobe:vfs_read", false),
            ("kprobe:vmlinux:vfs_read:entry", true),
            ("kprobe:brd:vfs_read:entry", false),
            ("k*:vm*:*:e*", true),
        ] {
            assert_eq!(
                ProbePattern::parse(text).unwrap().matches(&probe),
                matches,
                "{text}"
            );
        }
        assert_eq!(probe.to_string(), "kprobe:vmlinux:vfs_read:entry");
    }
}

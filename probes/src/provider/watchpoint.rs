//! Watchpoints: accesses to memory, such as `watchpoint:0xffffffff82a09fc0:8:w` or
//! `watchpoint:jiffies_64:8:w`.
//!
//! The parts of a name are the address or a symbol of the kernel, the number of bytes (1, 2, 4 or
//! 8), and the accesses: `w` for writes, `rw` for reads and writes. The CPU cannot leave out
//! writes, so `r` is none. A program's address is that of all processes, as the CPU compares it; a
//! filter selects one.

use introspect::Gva;
use vmm::machine::{Access, WatchError, Watchpoint};

use crate::kernel_view::KernelView;
use crate::name::{ProbeName, ProbePattern};
use crate::probe::{Probe, Signature, Target};

/// The name of the provider.
pub const PROVIDER: &str = "watchpoint";

/// A watchpoint that cannot be.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WatchpointError {
    /// The place is neither a number nor a symbol.
    #[error("{pattern}: {place:?} is neither an address nor a symbol of the guest's kernel")]
    Place {
        /// The pattern.
        pattern: String,
        /// Its place.
        place: String,
    },
    /// The length is no number.
    #[error("{pattern}: {length:?} is no number of bytes; 1, 2, 4 and 8 are")]
    Length {
        /// The pattern.
        pattern: String,
        /// Its length.
        length: String,
    },
    /// The accesses are none that the CPU can select.
    #[error("{pattern}: {access:?} is no kind of access that the CPU reports; w and rw are")]
    Access {
        /// The pattern.
        pattern: String,
        /// Its accesses.
        access: String,
    },
    /// The CPU has no such watchpoint.
    #[error("{pattern}: {source}")]
    Watchpoint {
        /// The pattern.
        pattern: String,
        /// The reason.
        source: WatchError,
    },
}

/// Checks whether a pattern is of this provider.
#[must_use]
pub fn is_meant(pattern: &ProbePattern) -> bool {
    pattern.provider == PROVIDER
}

/// Returns the watchpoint that a pattern stands for.
///
/// # Errors
/// If it stands for none.
pub fn find(view: &KernelView, pattern: &ProbePattern) -> Result<Probe, WatchpointError> {
    let text = || pattern.text.clone();
    let place = &pattern.module;
    let symbol = || view.kernel.symbols.address_of(place);
    let address = number(place)
        .or_else(symbol)
        .ok_or_else(|| WatchpointError::Place {
            pattern: text(),
            place: place.clone(),
        })?;
    let length = number(&pattern.function).ok_or_else(|| WatchpointError::Length {
        pattern: text(),
        length: pattern.function.clone(),
    })?;
    let access = match pattern.name.as_str() {
        "w" => Access::Write,
        "rw" | "wr" => Access::ReadWrite,
        other => {
            return Err(WatchpointError::Access {
                pattern: text(),
                access: other.to_owned(),
            });
        }
    };
    let watchpoint = Watchpoint::new(Gva(address), length, access);
    let watchpoint = watchpoint.map_err(|source| WatchpointError::Watchpoint {
        pattern: text(),
        source,
    })?;
    Ok(Probe {
        name: ProbeName::new(PROVIDER, place, &pattern.function, &pattern.name),
        signature: Some(Signature::default()),
        target: Target::Watchpoint(watchpoint),
    })
}

/// Returns a number, decimal or in hexadecimal after `0x`.
fn number(text: &str) -> Option<u64> {
    match text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")) {
        Some(digits) => u64::from_str_radix(digits, 16).ok(),
        None => text.parse().ok(),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use introspect::Gpa;
    use introspect::kernel::symbols::SymbolsBuilder;
    use introspect::x86_64::paging::AddressSpace;

    use super::*;

    #[test]
    fn a_pattern_is_an_address_a_length_and_accesses() {
        let mut symbols = SymbolsBuilder::default();
        let pushed = symbols.push(b"jiffies", 0xffff_ffff_8200_0000, b'D', false);
        pushed.unwrap();
        let space = AddressSpace {
            root: Gpa(0),
            levels: 4,
        };
        let view = KernelView::without_types(symbols.finish(None), space);
        let watch = |address, length, access| {
            let made = Watchpoint::new(Gva(address), length, access).unwrap();
            Ok(Target::Watchpoint(made))
        };
        for (pattern, expected) in [
            ("watchpoint:0x1000:8:w", watch(0x1000, 8, Access::Write)),
            ("watchpoint:4096:1:rw", watch(0x1000, 1, Access::ReadWrite)),
            (
                "watchpoint:jiffies:8:w",
                watch(0xffff_ffff_8200_0000, 8, Access::Write),
            ),
            (
                "watchpoint:none:8:w",
                Err("neither an address nor a symbol"),
            ),
            ("watchpoint:0x1000:x:w", Err("no number of bytes")),
            ("watchpoint:0x1000:3:w", Err("has 1, 2, 4 or 8 bytes")),
            ("watchpoint:0x1001:8:w", Err("a multiple of 8")),
            ("watchpoint:0x1000:8:r", Err("no kind of access")),
        ] {
            let parsed = ProbePattern::parse(pattern).unwrap();
            assert!(is_meant(&parsed), "{pattern}");
            match (find(&view, &parsed), expected) {
                (Ok(found), Ok(target)) => {
                    assert_eq!(found.target, target, "{pattern}");
                    assert_eq!(found.name.to_string(), pattern);
                }
                (Err(error), Err(part)) => {
                    assert!(error.to_string().contains(part), "{pattern}: {error}");
                }
                (found, _) => panic!("{pattern}: {found:?}"),
            }
        }
    }
}

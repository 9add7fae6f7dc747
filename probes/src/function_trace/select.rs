//! From the names a user gives to the functions to trace.
//!
//! Solves: names that several functions share (all are taken), one function under several names (taken once), typing
//! errors (told with the nearest names), and functions that a host's own assists stand on (refused).

use std::collections::HashSet;

use introspect::Gva;
use introspect::kernel::loaded_modules::LoadedModules;
use introspect::kernel::symbols::Symbols;
use vmm::host::{HostProfile, Int3};
use vmm::trap::ArmError;

use super::TraceOptions;
use crate::kernel_view::KernelView;
use crate::ring::RingSizeError;

/// Names offered for one that does not exist.
const SUGGESTIONS: usize = 3;
/// Problems spelled out in one message.
const SHOWN: usize = 8;

/// A function that is traced.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TracedFunction {
    /// Its name, as it was asked for.
    pub name: String,
    /// Its first byte in the running kernel.
    pub address: Gva,
    /// How many functions have this name; above 1, each is traced.
    pub namesakes: usize,
    /// Argument registers it is known to take, at most 4; `None` if not known.
    pub arguments: Option<usize>,
}

/// A name that stands for no function.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnknownFunction {
    /// What was asked for.
    pub name: String,
    /// Names that look like it, best first.
    pub nearest: Vec<String>,
}

impl std::fmt::Display for UnknownFunction {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?}", self.name)?;
        if !self.nearest.is_empty() {
            write!(f, " (did you mean {}?)", self.nearest.join(", "))?;
        }
        Ok(())
    }
}

/// Why one function cannot be trapped.
#[derive(Debug, thiserror::Error)]
pub enum RefusedReason {
    /// The trap itself.
    #[error(transparent)]
    Arm(#[from] ArmError),
    /// This host's assists need the place.
    #[error("on this host exotrace itself stands there: {why}")]
    OwnUse {
        /// For what.
        why: &'static str,
    },
}

/// A function that exists and cannot be trapped.
#[derive(Debug)]
pub struct RefusedFunction {
    /// Its name.
    pub name: String,
    /// Its address.
    pub address: Gva,
    /// Why.
    pub reason: RefusedReason,
}

impl std::fmt::Display for RefusedFunction {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} at {}: {}", self.name, self.address, self.reason)
    }
}

/// Functions cannot be traced. Nothing is armed then.
#[derive(Debug, thiserror::Error)]
pub enum ArmFunctionsError {
    /// Empty list.
    #[error("no functions to trace were given")]
    NoFunctions,
    /// Names without a function.
    #[error("the guest's kernel and its loaded modules have no function {}", list(.functions))]
    Unknown {
        /// Each of them.
        functions: Vec<UnknownFunction>,
    },
    /// More than the limit.
    #[error("{found} functions are to be traced, at most {limit} are allowed; name fewer")]
    TooMany {
        /// Functions the names stand for.
        found: usize,
        /// `max_functions` of the options.
        limit: usize,
    },
    /// Some cannot be trapped.
    #[error("cannot be traced: {}; leave them out", list(.functions))]
    Refused {
        /// Each of them.
        functions: Vec<RefusedFunction>,
    },
    /// Options.
    #[error(transparent)]
    Ring(#[from] RingSizeError),
}

fn list<T: std::fmt::Display>(items: &[T]) -> String {
    let mut shown: Vec<String> = items.iter().take(SHOWN).map(T::to_string).collect();
    if items.len() > SHOWN {
        shown.push(format!("and {} more", items.len() - SHOWN));
    }
    shown.join("; ")
}

/// Where functions called `name` are, in the kernel and in its modules.
fn addresses<'a>(
    symbols: &'a Symbols,
    modules: &'a LoadedModules,
    name: &'a str,
) -> impl Iterator<Item = u64> + 'a {
    let of_modules = modules.all_of(name, None).map(|found| found.symbol);
    symbols
        .all_of(name)
        .chain(of_modules)
        .filter(|symbol| symbol.is_text() && !symbol.absolute)
        .map(|symbol| symbol.address)
}

/// Those of `names` that stand for no function of the kernel or of its modules, in their order, with the kernel's names that
/// look like them.
#[must_use]
pub fn unknown_functions(
    symbols: &Symbols,
    modules: &LoadedModules,
    names: &[String],
) -> Vec<UnknownFunction> {
    let nearest = |name: &String| {
        let nearest = symbols.nearest_names(name, SUGGESTIONS).into_iter();
        nearest.map(str::to_owned).collect()
    };
    names
        .iter()
        .filter(|name| addresses(symbols, modules, name).next().is_none())
        .map(|name| UnknownFunction {
            name: name.clone(),
            nearest: nearest(name),
        })
        .collect()
}

/// The functions that `names` stand for, in their order.
pub(super) fn select(
    view: &KernelView,
    names: &[String],
    options: &TraceOptions,
) -> Result<Vec<TracedFunction>, ArmFunctionsError> {
    let functions = unknown_functions(&view.symbols, &view.modules, names);
    if !functions.is_empty() {
        return Err(ArmFunctionsError::Unknown { functions });
    }
    let mut selected = Vec::new();
    let mut taken = HashSet::new();
    for name in names {
        let found: Vec<u64> = addresses(&view.symbols, &view.modules, name).collect();
        // BTF describes one of several namesakes and does not say which.
        let arguments = match found.len() {
            1 => view.argument_registers(name).map(|count| count.min(4)),
            _ => None,
        };
        let namesakes = found.len();
        for address in found.into_iter().filter(|address| taken.insert(*address)) {
            let address = Gva(address);
            selected.push(TracedFunction {
                name: name.clone(),
                address,
                namesakes,
                arguments,
            });
        }
    }
    match selected.len() {
        0 => Err(ArmFunctionsError::NoFunctions),
        found if found > options.max_functions => Err(ArmFunctionsError::TooMany {
            found,
            limit: options.max_functions,
        }),
        _ => Ok(selected),
    }
}

/// Why a trap must not stand on the function `name` of a Linux guest on this host, if so.
pub(super) fn own_use(profile: &HostProfile, name: &str) -> Option<&'static str> {
    match name {
        "asm_exc_int3" if profile.int3_user == Int3::GuestHandler => {
            Some("traps in user programs arrive at the guest's int3 entry; trace exc_int3 instead")
        }
        "asm_exc_page_fault" if !profile.user_syscall => {
            Some("system calls are repaired at the page fault entry; trace exc_page_fault instead")
        }
        "entry_SYSCALL_64" if !profile.user_syscall => {
            Some("system calls are sent there by hand; trace do_syscall_64 instead")
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use introspect::Gpa;
    use introspect::kernel::symbols::SymbolsBuilder;
    use introspect::x86_64::paging::AddressSpace;

    use super::*;

    fn view() -> KernelView {
        let mut builder = SymbolsBuilder::default();
        for (name, address, kind) in [
            ("vfs_read", 0x1000, b'T'),
            ("vfs_write", 0x1100, b'T'),
            ("cleanup", 0x1200, b't'),
            ("cleanup", 0x1300, b't'),
            ("ksys_alias", 0x1100, b'T'),
            ("jiffies", 0x9000, b'D'),
        ] {
            builder
                .push(
                    name.as_bytes(),
                    0xffff_ffff_8100_0000 + address,
                    kind,
                    false,
                )
                .unwrap();
        }
        let space = AddressSpace {
            root: Gpa(0),
            levels: 4,
        };
        KernelView::without_types(builder.finish(None).with_slide(0x20_0000), space)
    }

    fn names(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn names_become_functions_once_each() {
        let view = view();
        for (asked, expected) in [
            (&["vfs_read"][..], &[("vfs_read", 0x1000, 1)][..]),
            (&["vfs_read", "vfs_read"], &[("vfs_read", 0x1000, 1)]),
            (&["vfs_write", "ksys_alias"], &[("vfs_write", 0x1100, 1)]),
            (
                &["cleanup", "vfs_read"],
                &[
                    ("cleanup", 0x1200, 2),
                    ("cleanup", 0x1300, 2),
                    ("vfs_read", 0x1000, 1),
                ],
            ),
        ] {
            let found = select(&view, &names(asked), &TraceOptions::default()).unwrap();
            let found: Vec<_> = found
                .iter()
                .map(|f| (f.name.as_str(), f.address.0, f.namesakes))
                .collect();
            let expected: Vec<_> = expected
                .iter()
                .map(|(n, a, k)| (*n, 0xffff_ffff_8120_0000 + a, *k))
                .collect();
            assert_eq!(found, expected, "{asked:?}");
        }
    }

    #[test]
    fn what_cannot_be_selected_is_told_by_name() {
        let view = view();
        let two = TraceOptions {
            max_functions: 2,
            ..TraceOptions::default()
        };
        for (asked, parts) in [
            (&[][..], &["no functions"][..]),
            (&["vfs_raed", "vfs_read"], &["\"vfs_raed\"", "vfs_read"]),
            (&["jiffies"], &["\"jiffies\""]),
            (&["cleanup", "vfs_read"], &["3 functions", "at most 2"]),
        ] {
            let error = select(&view, &names(asked), &two).unwrap_err().to_string();
            assert!(
                parts.iter().all(|part| error.contains(part)),
                "{asked:?}: {error}"
            );
        }
    }

    #[test]
    fn long_lists_are_cut() {
        let asked: Vec<String> = (0..20).map(|n| format!("nothing_like_it_{n}")).collect();
        let error = select(&view(), &asked, &TraceOptions::default())
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("nothing_like_it_7") && error.contains("and 12 more"),
            "{error}"
        );
        assert!(!error.contains("nothing_like_it_8"), "{error}");
    }

    #[test]
    fn only_hosts_that_stand_on_entries_refuse_them() {
        let (hardware, interpreted) = (
            HostProfile::hardware_example(),
            HostProfile::interpreted_example(),
        );
        for (name, refused) in [
            ("asm_exc_int3", true),
            ("asm_exc_page_fault", true),
            ("entry_SYSCALL_64", true),
            ("exc_int3", false),
            ("exc_page_fault", false),
            ("do_syscall_64", false),
        ] {
            assert_eq!(own_use(&interpreted, name).is_some(), refused, "{name}");
            assert_eq!(own_use(&hardware, name), None, "{name}");
        }
    }
}

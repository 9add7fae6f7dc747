//! The functions of a trace: those that begin in its range.

use probes::kernel_view::KernelView;

use crate::port::{PortError, Refusal};

/// The greatest number of functions of one trace, because each has traps in the guest.
pub(super) const MOST_FUNCTIONS: usize = 4096;
/// The number of arguments in an event's line.
pub(super) const LINE_ARGUMENTS: usize = 4;

/// A function that is traced.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Function {
    pub(super) address: u64,
    pub(super) name: String,
    /// The number of its arguments that a line shows.
    pub(super) arguments: usize,
}

/// Returns the kernel functions that begin from `start` to `end`, by address; of several names of
/// one function the first counts.
pub(super) fn in_range(
    view: &KernelView,
    start: u64,
    end: u64,
) -> Result<Vec<Function>, PortError> {
    let functions = view.text_functions().map(|f| f.symbol);
    let mut found: Vec<_> = functions
        .filter(|symbol| !symbol.absolute && (start..=end).contains(&symbol.address))
        .collect();
    found.sort_by_key(|symbol| symbol.address);
    found.dedup_by_key(|symbol| symbol.address);
    if found.is_empty() {
        return Err(PortError::new(
            Refusal::Invalid,
            "devtrace: invalid address range: no function begins in it",
        ));
    }
    if found.len() > MOST_FUNCTIONS {
        return Err(PortError::new(
            Refusal::NoRoom,
            format_args!(
                "too many exits: {} functions begin in this range, {MOST_FUNCTIONS} may",
                found.len()
            ),
        ));
    }
    let function = |symbol: introspect::kernel::symbols::Symbol<'_>| Function {
        address: symbol.address,
        name: symbol.name.to_owned(),
        // If the kernel does not describe a function, it may have as many arguments as are shown.
        arguments: view
            .argument_registers(symbol.name)
            .unwrap_or(LINE_ARGUMENTS)
            .min(LINE_ARGUMENTS),
    };
    Ok(found.into_iter().map(function).collect())
}

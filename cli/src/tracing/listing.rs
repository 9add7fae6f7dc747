//! The probes that a pattern stands for, as `list` shows them.

use probes::fields::Field;
use probes::name::ProbePattern;
use probes::provider::{self, Inspectable};

use crate::protocol::control::ListedProbe;
use crate::protocol::error::RequestError;

/// The pattern of all probes of the kernel.
pub const ALL: &str = "*:::";

/// Returns the probes of a guest that match `pattern`; those of its kernel for an empty one.
///
/// # Errors
/// If the pattern is none, or nothing matches it.
pub fn list(guest: &dyn Inspectable, pattern: &str) -> Result<Vec<ListedProbe>, RequestError> {
    let pattern = if pattern.is_empty() { ALL } else { pattern };
    let pattern = ProbePattern::parse(pattern)?;
    let probes = provider::find(guest, &pattern)?;
    let listed = probes.into_iter().map(|probe| {
        let fields = probe.fields().iter().map(Field::declaration).collect();
        ListedProbe {
            fields,
            ..ListedProbe::new(&probe.name, probe.signature)
        }
    });
    Ok(listed.collect())
}

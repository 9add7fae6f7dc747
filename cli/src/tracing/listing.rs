//! The probes that a pattern stands for, as `list` shows them.

use std::sync::Arc;

use probes::fields::Field;
use probes::name::ProbePattern;
use probes::probe::{Argument, Probe};
use probes::provider::{self, Inspectable};

use crate::protocol::control::{ListedProbe, declared};
use crate::protocol::error::RequestError;

/// The pattern of all probes of the kernel.
pub const ALL: &str = "*:::";

/// The arguments of a function, and what declares them.
type Declared = (Arc<[Argument]>, Arc<[String]>);

/// Returns the probes of a guest that match `pattern`; those of its kernel for an empty one.
///
/// # Errors
/// If the pattern is none, or nothing matches it.
pub fn list(guest: &dyn Inspectable, pattern: &str) -> Result<Vec<ListedProbe>, RequestError> {
    let pattern = if pattern.is_empty() { ALL } else { pattern };
    let pattern = ProbePattern::parse(pattern)?;
    let mut listed = Vec::new();
    // A function's entry and its return, which follows it, share their arguments.
    let mut last: Option<Declared> = None;
    let mut add = |probe: Probe| {
        let arguments = probe.signature.as_ref().map(|signature| {
            let of = &signature.arguments;
            match &last {
                Some((known, text)) if Arc::ptr_eq(known, of) => text.clone(),
                _ => last.insert((of.clone(), declared(of))).1.clone(),
            }
        });
        listed.push(ListedProbe {
            name: probe.name.text(),
            arguments,
            fields: probe.fields().iter().map(Field::declaration).collect(),
            returns: probe.signature.and_then(|signature| signature.returns),
        });
    };
    if let Err(why) = provider::find_each(guest, &pattern, &mut add) {
        let not_mapped = provider::find_at_path(guest, &pattern);
        if not_mapped.is_empty() {
            return Err(why.into());
        }
        not_mapped.into_iter().for_each(add);
    }
    Ok(listed)
}

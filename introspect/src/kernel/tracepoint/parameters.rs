//! The parameters that a tracepoint passes to its listeners, according to the kernel's types.
//!
//! `typedef void (*btf_trace_NAME)(void *__data, …)` (include/trace/bpf_probe.h) exists for each
//! tracepoint with an event, for BPF. Compilers leave out the names of such parameters. The
//! function `__traceiter_NAME`, which has the names, exists for each, but not in the types of every
//! kernel.

use crate::kernel::btf::{Btf, Parameter};

/// Returns the parameters of the tracepoint `name` of the kernel itself. The first (`__data`),
/// which is the listener's own, is left out. Returns `None` if the types do not describe them.
#[must_use]
pub fn parameters(btf: &Btf, name: &str) -> Option<Vec<Parameter>> {
    let own = |parameters: Vec<Parameter>| {
        let data = parameters.first()?;
        let is_data = data.type_name == "void *";
        is_data.then(|| parameters.into_iter().skip(1).collect::<Vec<_>>())
    };
    let typedef = btf.typedef_proto_args(&format!("btf_trace_{name}")).ok();
    let iterator = btf.func_proto_args(&format!("__traceiter_{name}")).ok();
    let typedef = typedef.and_then(|prototype| own(prototype.parameters));
    let iterator = iterator.and_then(|prototype| own(prototype.parameters));
    match (typedef, iterator) {
        (Some(mut typedef), Some(iterator)) if typedef.len() == iterator.len() => {
            for (parameter, named) in typedef.iter_mut().zip(iterator) {
                if parameter.name.is_empty() && parameter.type_name == named.type_name {
                    parameter.name = named.name;
                }
            }
            Some(typedef)
        }
        (typedef, iterator) => typedef.or(iterator),
    }
}

/// Returns their approximate size in memory, in bytes.
pub(super) fn bytes(parameters: &[Parameter]) -> usize {
    let bytes = |of: &Parameter| size_of::<Parameter>() + of.name.len() + of.type_name.len();
    parameters.iter().map(bytes).sum()
}

//! Probes of the kernel's tracepoints: `tracepoint:MODULE:SYSTEM:EVENT`. They are armed without
//! enabling tracing in the guest.
//!
//! Without a listener in the guest, a tracepoint is a NOP, and a trap is armed there. At a hit, the
//! code for listeners is followed by speculation up to the call of the listeners. The call's
//! arguments are the tracepoint's. With a listener in the guest, the NOP is a jump to the same
//! code. The module of the kernel's own tracepoints is `vmlinux`.
//!
//! Tracepoints that the kernel reaches only after something else is enabled have no site.
//! `page_fault_user` and `page_fault_kernel` are found behind the branch that leads to them. For
//! system calls, the provider `syscall` has more.

use introspect::kernel::jump_label::JumpLabelLayout;
use introspect::kernel::modules::Module;
use introspect::kernel::tracepoint::{Tracepoint, TracepointLayout};
use introspect::system::PausedSystem;
use introspect::{Gva, MemoryView, PausedMemory};
use vmm::machine::Handle;
use vmm::speculation::find_call;

use super::kprobe::KERNEL;
use crate::fields::{self, RecordText};
use crate::kernel_view::KernelView;
use crate::name::{ProbeName, ProbePattern, matches_part};
use crate::probe::{Argument, Probe, Signature, Target, TracepointText};

/// The name of the provider.
pub const PROVIDER: &str = "tracepoint";
/// The system of tracepoints without one.
const NO_SYSTEM: &str = "none";
/// The number of instructions behind a branch that are searched for the call.
const WAY: usize = 256;
/// The maximum size in bytes of all fields of events. A distribution kernel has about 3 MB.
const MOST_FIELDS: usize = 16 << 20;
/// The size that an event counts for whose fields could not be read.
const BROKEN_FIELDS: usize = 1 << 15;
/// Tracepoints behind a branch of another static key.
const GUARDS: [(&str, &str); 2] = [
    ("page_fault_user", "trace_pagefault_key"),
    ("page_fault_kernel", "trace_pagefault_key"),
];

/// The result of a search.
#[derive(Debug, Clone, Default)]
pub struct TracepointMatches {
    /// The probes.
    pub probes: Vec<Probe>,
    /// The parts that could not be read, one sentence each.
    pub incomplete: Vec<String>,
}

/// Finds the tracepoints that match `pattern` in a paused guest. Without a machine they cannot be
/// armed, and the branches that lead to their calls are not searched.
///
/// # Errors
/// If the kernel's types do not describe tracepoints.
pub fn find(
    look: &PausedSystem<'_>,
    machine: Option<&Handle>,
    view: &KernelView,
    pattern: &ProbePattern,
) -> Result<TracepointMatches, String> {
    if !pattern.matches_provider(PROVIDER) {
        return Ok(TracepointMatches::default());
    }
    let modules = look
        .modules()
        .map(|modules| modules.items)
        .unwrap_or_default();
    find_in(look.kernel(), &modules, machine, view, pattern)
}

/// Finds the tracepoints that match `pattern`, of the kernel and of these modules; `memory` is a
/// paused guest's.
///
/// # Errors
/// As [`find`].
pub(super) fn find_in(
    memory: MemoryView<'_>,
    modules: &[Module],
    machine: Option<&Handle>,
    view: &KernelView,
    pattern: &ProbePattern,
) -> Result<TracepointMatches, String> {
    let mut found = TracepointMatches::default();
    let Some(btf) = view.kernel.btf() else {
        return Err("the kernel has no types, without which tracepoints are not found".into());
    };
    let layout =
        TracepointLayout::new(btf, &view.kernel.symbols).map_err(|error| error.to_string())?;
    let all = layout.read_all(memory, modules);
    found.incomplete = all.unread.iter().map(ToString::to_string).collect();
    let labels = JumpLabelLayout::new(btf, &view.kernel.symbols)
        .map(|layout| layout.read_all(memory, modules))
        .unwrap_or_default();
    let mut left = Some(MOST_FIELDS);
    for tracepoint in &all.items {
        let module = tracepoint.module.as_deref().unwrap_or(KERNEL);
        let system = tracepoint.system.as_deref().unwrap_or(NO_SYSTEM);
        let matches = matches_part(&pattern.module, module)
            && matches_part(&pattern.function, system)
            && matches_part(&pattern.name, &tracepoint.name);
        if !matches {
            continue;
        }
        let guard = GUARDS.iter().find(|(name, _)| *name == tracepoint.name);
        let guard = guard.and_then(|(_, key)| view.kernel.symbols.address_of(key));
        let guards: Vec<(Gva, Gva)> = guard
            .map(|key| labels.of_key(Gva(key)))
            .unwrap_or_default()
            .iter()
            .filter(|entry| !entry.init)
            .map(|entry| (entry.code, entry.target))
            .collect();
        let mut probe = probe(tracepoint, &guards);
        if let (Target::Tracepoint(text), Some(bytes)) = (&mut probe.target, left) {
            let record = layout.record(memory, tracepoint);
            let used = match &record {
                Ok(record) => record.as_ref().map_or(0, fields::bytes),
                Err(_) => BROKEN_FIELDS,
            };
            left = bytes.checked_sub(used);
            match record {
                _ if left.is_none() => found.incomplete.push(format!(
                    "the fields of events from {} on take more than {MOST_FIELDS} bytes: refused",
                    probe.name
                )),
                Ok(record) => {
                    let symbols = &view.kernel.symbols;
                    text.record = record.and_then(|record| RecordText::of(&record, symbols));
                }
                Err(error) => found.incomplete.push(format!("{}: {error}", probe.name)),
            }
        }
        found.probes.push(probe);
    }
    // Branches that lead to the call are searched only if they may be armed.
    if let Some(machine) = machine
        && (ProbePattern::is_exact(&pattern.name) || found.probes.len() <= 64)
    {
        for probe in &mut found.probes {
            if let Target::Tracepoint(text) = &mut probe.target {
                keep_what_leads_to_the_call(text, machine, view);
            }
        }
    }
    Ok(found)
}

/// Returns the tracepoint `system:event` of the kernel itself, in a paused guest; `None` if there
/// is none.
#[must_use]
pub fn of_kernel(view: &KernelView, machine: &Handle, name: (&str, &str)) -> Option<Probe> {
    let layout = TracepointLayout::new(view.kernel.btf()?, &view.kernel.symbols).ok()?;
    let memory = PausedMemory::new(machine.ram());
    let all = layout.read_all(memory.view(view.kernel.space), &[]);
    let found = all.items.iter().find(|tracepoint| {
        tracepoint.system.as_deref() == Some(name.0) && tracepoint.name == name.1
    });
    Some(probe(found?, &[]))
}

fn probe(tracepoint: &Tracepoint, guards: &[(Gva, Gva)]) -> Probe {
    let module = tracepoint.module.as_deref().unwrap_or(KERNEL);
    let system = tracepoint.system.as_deref().unwrap_or(NO_SYSTEM);
    Probe {
        name: ProbeName::new(PROVIDER, module, system, &tracepoint.name),
        signature: signature(tracepoint),
        target: Target::Tracepoint(text(tracepoint, guards)),
    }
}

/// Removes branches that do not lead to the tracepoint's call, and notes the targets of the others.
pub fn keep_what_leads_to_the_call(text: &mut TracepointText, machine: &Handle, view: &KernelView) {
    let (branches, mut call_sites) = (text.branches.clone(), Vec::new());
    let divert = |at: Gva| {
        branches
            .iter()
            .find(|(from, _)| *from == at)
            .map(|(_, to)| *to)
    };
    text.sites.retain(|(_, target)| {
        let (traps, wanted) = (machine.traps(), &text.calls);
        let found = find_call(traps, view.kernel.space, *target, wanted, &divert, WAY);
        let call = found.filter(|found| found.is_call);
        call_sites.extend(call.map(|call| call.at));
        found.is_some()
    });
    text.call_sites = call_sites;
}

fn text(tracepoint: &Tracepoint, guards: &[(Gva, Gva)]) -> TracepointText {
    let sites = tracepoint.sites.iter().filter(|site| !site.init);
    let own: Vec<(Gva, Gva)> = sites.map(|site| (site.address, site.target)).collect();
    TracepointText {
        sites: if guards.is_empty() {
            own.clone()
        } else {
            guards.to_vec()
        },
        branches: own,
        calls: [tracepoint.call_trampoline, tracepoint.iterator]
            .into_iter()
            .flatten()
            .collect(),
        call_sites: Vec::new(),
        listeners: tracepoint.funcs,
        structure: tracepoint.address,
        record: None,
    }
}

fn signature(tracepoint: &Tracepoint) -> Option<Signature> {
    let parameters = tracepoint.parameters.as_ref()?.iter().cloned();
    Some(Signature {
        arguments: parameters.map(Argument::from).collect(),
        returns: None,
    })
}

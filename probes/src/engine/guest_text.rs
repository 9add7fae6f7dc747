//! The guest changes its own text: jump labels, static calls, its tracers, its own probes, alternatives, modules that come and go. Traps of
//! ours are out of the way while it looks at what stands there and while it writes, and look anew at what they stand on
//! afterwards.
//!
//! The functions by which it does so are watched while any probe is enabled:
//!
//! | Function | Who calls it | What is done |
//! |---|---|---|
//! | `__text_poke`, `text_poke_early` | all that writes text, bytes of one instruction at a time | out from entry to return |
//! | `arch_jump_label_transform_queue`, `arch_jump_label_transform` | jump labels, tracepoints with them: compare the old instruction | the same |
//! | `jump_label_text_reserved` | whoever places a kprobe: decodes the instructions of all jump labels, and dies of one of another length | what stands on such instructions |
//! | `arch_static_call_transform` | static calls: compare the old instruction, of the call and of its trampoline | the same |
//! | `bpf_arch_text_poke` | BPF: compares the old instruction | the same |
//! | `ftrace_replace_code`, `ftrace_make_call`, `ftrace_make_nop` | its function tracer: compares the first instruction of functions | what stands on those |
//! | `arch_prepare_kprobe`, `arch_prepare_optimized_kprobe` | the guest's own kprobes: decode the function from its start, copy instructions | the function's out |
//! | `arch_optimize_kprobes` | the same, later: copies what it will write over | what stands there |
//! | `module_memfree`, `execmem_free` (since 6.10), `free_init_pages` | memory of modules, and of code used at boot only | out for good |
//!
//! Probes of entries stand behind the instruction that the function tracer writes over (see [`crate::provider::kprobe`]); on it are only
//! those that were asked for by offset, and return addresses of calls that never return, with the next function behind them.
//!
//! Traps that are armed during such a call wait for its end, too. A call that had begun before the first probe is known by
//! its lock ([`text_locks`](super::text_locks)).
//!
//! While a trap is out, another vCPU may pass it unseen; how often that could be is counted. Where the guest's own probe has become a
//! jump over several instructions, those behind the first are not executed at their place, and traps there are not hit until the jump
//! is gone.

use std::collections::HashMap;
use std::iter;
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use introspect::kernel::btf::Btf;
use introspect::x86_64::PAGE;
use introspect::x86_64::paging::{AddressSpace, translate};
use introspect::x86_64::virtual_memory::{read_u32, read_u64};
use introspect::{Gva, PhysicalMemory};
use vmm::StoppedVcpu;
use vmm::trap::{Choice, Suspended, TrapTable};

use super::hit::{Hit, HitPath};
use super::returns::Returning;
use super::watch::Watch;
use crate::kernel_view::KernelView;
use crate::provider::kprobe::starts_with_tracers_nop;

/// Longest instruction that the kernel writes over or compares.
const PATCH: u64 = 8;
/// Most text that the guest's own kprobes decode of a function.
const FUNCTION: u64 = 0x4000;
/// First bytes of a function that a watch and its instruction may have: a landing pad, the tracer's call, and the longest instruction.
const ENTRY: u64 = 4 + 5 + LONGEST_INSTRUCTION;
/// Bytes of the longest instruction (Intel SDM volume 2, 2.3.11).
const LONGEST_INSTRUCTION: u64 = 15;
/// Most memory of one module.
const LARGEST_MODULE: u64 = 256 << 20;
/// The first byte of the function tracer's call.
const CALL: u8 = 0xe8;
/// Bytes of ENDBR64, which may stand before it.
const LANDING: u64 = 4;
/// How instructions of jump labels begin (`arch/x86/include/asm/nops.h`, `arch/x86/kernel/jump_label.c`).
const JUMP_LABELS: [&[u8]; 4] = [
    &[0x0f, 0x1f, 0x44, 0x00, 0x00],
    &[0x66, 0x90],
    &[0xe9],
    &[0xeb],
];
/// Most probes that the guest turns into jumps at once (`MAX_OPTIMIZE_PROBES`, kernel/kprobes.c).
const MOST_JUMPS: usize = 256;
/// Most watched calls that are under way at once; more are let go by.
const MOST_CALLS: usize = 4096;

/// Which part of its text a function of the guest is about to look at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    /// From an argument on, as many bytes as another says; written.
    Written { start: usize, length: usize },
    /// The instruction that a `struct jump_entry` is about, which an argument points to.
    JumpEntry { entry: usize },
    /// The instructions at one or two arguments.
    At { first: usize, second: Option<usize> },
    /// The function of a `struct kprobe`, which an argument points to.
    Kprobe { kprobe: usize, address: u64 },
    /// The first instructions of functions, where the tracer's call stands.
    Entries,
    /// The instructions of all jump labels.
    JumpLabels,
    /// What the `struct optimized_kprobe`s in a list will jump over; an argument points to the list.
    Jumps {
        list: usize,
        /// Offset of the list's links in the structure.
        links: u64,
        /// Offset of the place.
        address: u64,
    },
}

/// Which memory a function of the guest is about to free.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Freed {
    /// All that is mapped from an argument on.
    Region { start: usize },
    /// Between two arguments.
    Range { start: usize, end: usize },
}

/// The watches for a kernel, and the functions that they belong on.
pub(super) fn watches(view: &KernelView) -> Vec<(Gva, Arc<dyn Watch>)> {
    let Some(btf) = &view.btf else {
        return Vec::new();
    };
    let kprobe = |function: &str, argument| {
        Some(Part::Kprobe {
            kprobe: parameter(btf, function, argument)?,
            address: btf.member("kprobe.addr").ok()?.byte_offset,
        })
    };
    let written = |function: &str| {
        Some(Part::Written {
            start: parameter(btf, function, "addr")?,
            length: parameter(btf, function, "len")?,
        })
    };
    let jump = |function: &str| {
        let entry = parameter(btf, function, "entry")?;
        Some(Part::JumpEntry { entry })
    };
    let offset = |path: &str| Some(btf.member(path).ok()?.byte_offset);
    let jumps = || {
        Some(Part::Jumps {
            list: 0,
            links: offset("optimized_kprobe.list")?,
            address: offset("optimized_kprobe.kp")?.checked_add(offset("kprobe.addr")?)?,
        })
    };
    let jumps = jumps();
    let parts = [
        ("__text_poke", written("__text_poke")),
        ("text_poke_early", written("text_poke_early")),
        (
            "arch_jump_label_transform_queue",
            jump("arch_jump_label_transform_queue"),
        ),
        (
            "arch_jump_label_transform",
            jump("arch_jump_label_transform"),
        ),
        (
            "arch_static_call_transform",
            Some(Part::At {
                first: 0,
                second: Some(1),
            }),
        ),
        (
            "bpf_arch_text_poke",
            Some(Part::At {
                first: 0,
                second: None,
            }),
        ),
        ("arch_prepare_kprobe", kprobe("arch_prepare_kprobe", "p")),
        (
            "arch_prepare_optimized_kprobe",
            kprobe("arch_prepare_optimized_kprobe", "__unused"),
        ),
        ("arch_optimize_kprobes", jumps),
        ("jump_label_text_reserved", Some(Part::JumpLabels)),
        ("ftrace_replace_code", Some(Part::Entries)),
        ("ftrace_make_call", Some(Part::Entries)),
        ("ftrace_make_nop", Some(Part::Entries)),
    ];
    let found = parts.into_iter().filter_map(|(name, part)| {
        let address = view.symbols.address_of(name)?;
        // Kernels without modules need some of them at boot only.
        (!view.has_freed(address)).then_some((address, part?))
    });
    let found: Vec<(u64, Part)> = found.collect();
    let mut watched: Vec<u64> = found.iter().map(|(address, _)| *address).collect();
    watched.sort_unstable();
    let watched: Arc<[u64]> = watched.into();
    let mut watches: Vec<(Gva, Arc<dyn Watch>)> = Vec::new();
    for (address, part) in found {
        let watch = PartWatch::new(view, part, watched.clone());
        watches.push((Gva(address), Arc::new(watch)));
    }
    for (name, freed) in [
        ("module_memfree", Freed::Region { start: 0 }),
        ("execmem_free", Freed::Region { start: 0 }),
        ("free_init_pages", Freed::Range { start: 1, end: 2 }),
    ] {
        let address = view.symbols.address_of(name);
        if let Some(address) = address.filter(|address| !view.has_freed(*address)) {
            let space = view.space;
            watches.push((Gva(address), Arc::new(FreedWatch { space, freed })));
        }
    }
    watches
}

/// Position of a function's parameter.
fn parameter(btf: &Btf, function: &str, name: &str) -> Option<usize> {
    let prototype = btf.func_proto_args(function).ok()?;
    prototype
        .parameters
        .iter()
        .position(|parameter| parameter.name == name)
}

/// Takes sites out while the guest looks at their text.
struct PartWatch {
    part: Part,
    space: AddressSpace,
    /// First bytes of the kernel's functions, ascending.
    functions: Arc<[u64]>,
    /// First bytes of the functions that are watched, ascending: these stay, so that what is written meanwhile is seen.
    watched: Arc<[u64]>,
    /// Sites taken out for calls that are under way, by task and stack. `None` once the watch was taken off.
    out: Mutex<Option<HashMap<(u64, u64), Suspended>>>,
}

impl PartWatch {
    fn new(view: &KernelView, part: Part, watched: Arc<[u64]>) -> Self {
        let functions = match part {
            Part::Kprobe { .. } | Part::Entries => view
                .symbols
                .text_functions()
                .map(|f| f.symbol.address)
                .collect(),
            _ => Arc::default(),
        };
        Self {
            part,
            space: view.space,
            functions,
            watched,
            out: Mutex::new(Some(HashMap::new())),
        }
    }

    /// What the call with these arguments is about.
    fn ranges(&self, cpu: &StoppedVcpu<'_>, arguments: &[u64]) -> Vec<Range<u64>> {
        let memory = cpu.ram();
        let argument = |number: usize| arguments.get(number).copied();
        let at = |start: u64| start..start.saturating_add(PATCH);
        let ranges = match self.part {
            Part::Written { start, length } => {
                let (start, length) = (argument(start), argument(length));
                start.zip(length).map(|(start, length)| {
                    iter::once(start..start.saturating_add(length)).collect()
                })
            }
            Part::JumpEntry { entry } => argument(entry).and_then(|entry| {
                let distance = read_u32(memory, self.space, Gva(entry)).ok()?.cast_signed();
                Some(vec![at(entry.wrapping_add_signed(i64::from(distance)))])
            }),
            Part::At { first, second } => {
                let places = [Some(first), second].into_iter().flatten();
                let places = places.filter_map(argument).filter(|place| *place != 0);
                Some(places.map(at).collect())
            }
            Part::Kprobe { kprobe, address } => argument(kprobe).and_then(|kprobe| {
                let place = Gva(kprobe.wrapping_add(address));
                let place = read_u64(memory, self.space, place).ok()?;
                let after = self.functions.partition_point(|start| *start <= place);
                let start = self.functions.get(after.checked_sub(1)?).copied()?;
                let next = self.functions.get(after).copied().unwrap_or(u64::MAX);
                Some(iter::once(start..next.min(start.saturating_add(FUNCTION))).collect())
            }),
            // These are chosen by their instruction.
            Part::Entries | Part::JumpLabels => None,
            Part::Jumps {
                list,
                links,
                address,
            } => argument(list).map(|list| {
                let read = |at: u64| read_u64(memory, self.space, Gva(at)).ok();
                let next = |link: &u64| read(*link).filter(|next| *next != list);
                let all = iter::successors(next(&list), next).take(MOST_JUMPS);
                let place = |link: u64| read(link.wrapping_sub(links).wrapping_add(address));
                all.filter_map(place).map(at).collect()
            }),
        };
        let ranges = ranges.unwrap_or_default().into_iter();
        ranges
            .flat_map(|range| self.without_watched(range))
            .collect()
    }

    /// Returns which instructions the call looks at, wherever they stand, where it is about such: not those that the watches
    /// stand on, and not the one at `back`, where it returns to.
    fn choice(&self, back: Option<u64>) -> Option<Choice> {
        let is_looked_at: Choice = match self.part {
            Part::Entries => {
                let functions = self.functions.clone();
                Box::new(move |address, code| is_traced_entry(&functions, address, code))
            }
            Part::JumpLabels => Box::new(|_, code| may_be_jump_label(code)),
            _ => return None,
        };
        let watched = self.watched.clone();
        Some(Box::new(move |address, code| {
            is_looked_at(address, code) && back != Some(address.0) && !is_watched(&watched, address)
        }))
    }

    /// The parts of a range that no watch stands in.
    fn without_watched(&self, range: Range<u64>) -> Vec<Range<u64>> {
        let mut parts = vec![range];
        for watched in self.watched.iter() {
            parts = parts
                .into_iter()
                .flat_map(|part| without(part, *watched, ENTRY))
                .collect();
        }
        parts
    }
}

/// Returns whether the function tracer's call, or the NOP in its place, stands at `address`.
fn is_traced_entry(functions: &[u64], address: Gva, code: &[u8]) -> bool {
    let starts = |at: u64| functions.binary_search(&at).is_ok();
    let is_known = functions.first() <= Some(&address.0) && Some(&address.0) <= functions.last();
    // Of modules' functions it is not known where they start.
    let is_first = !is_known || starts(address.0) || starts(address.0.wrapping_sub(LANDING));
    is_first && (starts_with_tracers_nop(code) || code.first() == Some(&CALL))
}

/// Returns which instructions a call may look at that has begun before the watches were put in, whichever function it is of:
/// not those `watched`.
pub(super) fn any_patched(watched: Vec<Gva>) -> Choice {
    Box::new(move |address, code| {
        let may_change =
            may_be_jump_label(code) || starts_with_tracers_nop(code) || code.first() == Some(&CALL);
        may_change && !watched.contains(&address)
    })
}

/// Returns whether a watch may stand at `address`.
fn is_watched(watched: &[u64], address: Gva) -> bool {
    let after = watched.partition_point(|start| *start <= address.0);
    let start = after.checked_sub(1).and_then(|last| watched.get(last));
    start.is_some_and(|start| address.0 - start < ENTRY)
}

/// Returns whether code begins as a jump label does: a NOP of two or five bytes, or a jump of as many.
fn may_be_jump_label(code: &[u8]) -> bool {
    JUMP_LABELS.iter().any(|label| code.starts_with(label))
}

/// What is left of a range without `length` bytes at `start`.
fn without(range: Range<u64>, start: u64, length: u64) -> impl Iterator<Item = Range<u64>> {
    let before = range.start..range.end.min(start);
    let behind = range.start.max(start.saturating_add(length))..range.end;
    [before, behind].into_iter().filter(|part| !part.is_empty())
}

impl Watch for PartWatch {
    fn on_entry(&self, path: &HitPath, hit: &Hit<'_>) -> bool {
        let Some(cpu) = hit.cpu else { return false };
        // Where this call returns to a trap must stand, or the sites stay out.
        let back = read_u64(hit.memory, self.space, Gva(hit.registers.rsp)).ok();
        // Where none stands the place is kept free: somebody may be arming.
        let mut suspended = Suspended::default();
        if let Some(choice) = self.choice(back) {
            suspended.append(cpu.traps().suspend_chosen(choice));
        }
        for range in self.ranges(cpu, &hit.arguments()) {
            let (start, length) = back.map_or((0, 0), |back| (back, LONGEST_INSTRUCTION));
            for part in without(range, start, length) {
                suspended.append(cpu.traps().suspend(part));
            }
        }
        if suspended.is_nothing() {
            return false;
        }
        path.count_suspended(suspended.len());
        // As at the return, which takes the return address off the stack.
        let key = (
            hit.current.task().address,
            hit.registers.rsp.wrapping_add(8),
        );
        let mut out = self.out();
        let Some(calls) = out.as_mut().filter(|calls| calls.len() < MOST_CALLS) else {
            drop(out);
            self.resume_sites(cpu.traps(), suspended, None);
            return false;
        };
        let left = calls.insert(key, suspended);
        drop(out);
        // A call at the same place that never returned.
        if let Some(left) = left {
            self.resume_sites(cpu.traps(), left, None);
        }
        true
    }

    fn on_return(&self, _: &HitPath, hit: &Hit<'_>, call: &Returning, from_stack: Gva) {
        let Some(cpu) = hit.cpu else { return };
        let key = (hit.current.task().address, from_stack.0);
        let suspended = self.out().as_mut().and_then(|calls| calls.remove(&key));
        let Some(suspended) = suspended else { return };
        let written = match self.part {
            Part::Written { .. } => self.ranges(cpu, &call.arguments).into_iter().next(),
            _ => None,
        };
        self.resume_sites(cpu.traps(), suspended, written);
    }

    /// Resumes the sites that calls in progress keep out of memory.
    fn on_unwatch(&self, traps: &TrapTable) {
        let calls = self.out().take();
        for suspended in calls.into_iter().flat_map(HashMap::into_values) {
            self.resume_sites(traps, suspended, None);
        }
    }
}

impl PartWatch {
    fn out(&self) -> MutexGuard<'_, Option<HashMap<(u64, u64), Suspended>>> {
        self.out.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn resume_sites(&self, traps: &TrapTable, suspended: Suspended, written: Option<Range<u64>>) {
        traps.resume_sites(suspended, written, self.space);
    }
}

/// Takes sites out of memory that the guest frees.
struct FreedWatch {
    space: AddressSpace,
    freed: Freed,
}

impl Watch for FreedWatch {
    fn on_entry(&self, path: &HitPath, hit: &Hit<'_>) -> bool {
        let Some(cpu) = hit.cpu else { return false };
        let arguments = hit.arguments();
        let argument = |number: usize| arguments.get(number).copied().unwrap_or_default();
        let range = match self.freed {
            Freed::Range { start, end } => argument(start)..argument(end),
            Freed::Region { start } => {
                let start = argument(start);
                start..mapped_end(hit.memory, self.space, start)
            }
        };
        if range.is_empty() {
            return false;
        }
        let returns = path.kernel_returns.forget(range.clone());
        let mut freed = returns.len();
        for site in returns {
            cpu.traps().disarm(site);
        }
        freed += cpu.traps().evict(range);
        path.counters
            .freed
            .fetch_add(freed as u64, Ordering::Relaxed);
        false
    }
}

/// Where what is mapped from `start` on ends: regions of the kernel's have a page between them that is not.
fn mapped_end(memory: &dyn PhysicalMemory, space: AddressSpace, start: u64) -> u64 {
    let mut end = start;
    while end.wrapping_sub(start) < LARGEST_MODULE && translate(memory, space, Gva(end)).is_ok() {
        end = end.saturating_add(PAGE);
    }
    end
}

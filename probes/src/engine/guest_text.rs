//! Watches the guest's changes of its own text: jump labels, static calls, its tracers, its own
//! probes, alternatives, modules that come and go. Sites are suspended while the guest reads or
//! writes the text that they stand in. Afterwards their displaced instructions are read anew.
//!
//! These functions are watched while any probe is enabled:
//!
//! | Function | Caller | Action |
//! |---|---|---|
//! | `__text_poke`, `text_poke_early` | everything that writes text, bytes of one instruction at a time | suspended from entry to return |
//! | `arch_jump_label_transform_queue`, `arch_jump_label_transform` | jump labels, tracepoints with them: compare the old instruction | the same |
//! | `jump_label_text_reserved` | code that places a kprobe: decodes the instructions of all jump labels, and dies of one of another length | sites on jump labels |
//! | `arch_static_call_transform` | static calls: compare the old instruction, of the call and of its trampoline | the same |
//! | `bpf_arch_text_poke` | BPF: compares the old instruction | the same |
//! | `ftrace_replace_code`, `ftrace_make_call`, `ftrace_make_nop` | the guest's function tracer: compares the first instruction of functions | sites on those |
//! | `arch_prepare_kprobe`, `arch_prepare_optimized_kprobe` | the guest's own kprobes: decode the function from its start, copy instructions | the function's sites suspended |
//! | `arch_optimize_kprobes` | the same, later: copies what it will write over | sites there |
//! | `module_memfree`, `execmem_free` (since 6.10), `free_init_pages` | memory of modules, and of code used at boot only | evicted |
//!
//! Probes of entries stand behind the instruction that the function tracer writes over (see
//! [`crate::provider::kprobe`]). Sites on that instruction are of two kinds: probes placed by
//! offset, and return addresses of calls that never return, where the next function follows.
//!
//! Traps that are armed during such a call wait for its end, too. A call that had begun before the
//! first probe is known by its lock ([`text_locks`](super::text_locks)).
//!
//! While a trap is suspended, another vCPU may pass it unseen. The number of such chances is
//! counted. The guest's own probe can become a jump over several instructions. Those behind the
//! first are then not executed at their place, so traps there are not hit until the jump is gone.

use std::iter;
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};

use introspect::kernel::jump_label::JumpLabelLayout;
use introspect::x86_64::PAGE;
use introspect::x86_64::paging::{AddressSpace, translate};
use introspect::x86_64::virtual_memory::{read_u32, read_u64};
use introspect::{Gva, PausedMemory, PhysicalMemory};
use vmm::StoppedVcpu;
use vmm::trap::{Choice, Suspended, TrapTable};

use super::calls::Calls;
use super::hit::{Hit, HitPath};
use super::returns::Returning;
use super::watch::Watch;
use crate::kernel_view::{KernelView, parameter};
use crate::provider::kprobe::starts_with_tracers_nop;

/// The length in bytes of the longest instruction that the kernel writes over or compares.
const PATCH: u64 = 8;
/// The most text of a function, in bytes, that the guest's own kprobes decode.
const FUNCTION: u64 = 0x4000;
/// The first bytes of a function that a watch and its instruction can occupy: a landing pad, the
/// tracer's call, and the longest instruction.
const ENTRY: u64 = 4 + 5 + LONGEST_INSTRUCTION;
/// The length of the longest instruction in bytes (Intel SDM volume 2, 2.3.11).
const LONGEST_INSTRUCTION: u64 = 15;
/// The largest size of a module's memory.
const LARGEST_MODULE: u64 = 256 << 20;
/// The first byte of the function tracer's call.
const CALL: u8 = 0xe8;
/// The length of ENDBR64, which may precede it.
const LANDING: u64 = 4;
/// The first bytes of jump label instructions (`arch/x86/include/asm/nops.h`,
/// `arch/x86/kernel/jump_label.c`).
const JUMP_LABELS: [&[u8]; 4] = [
    &[0x0f, 0x1f, 0x44, 0x00, 0x00],
    &[0x66, 0x90],
    &[0xe9],
    &[0xeb],
];
/// The most probes that the guest turns into jumps at once (`MAX_OPTIMIZE_PROBES`,
/// kernel/kprobes.c).
const MOST_JUMPS: usize = 256;

/// The part of the guest's text that one of its functions is about to read or write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    /// The bytes to be written: the address is one argument, the length another.
    Written { start: usize, length: usize },
    /// The instruction of a `struct jump_entry`, to which an argument points.
    JumpEntry { entry: usize },
    /// The instructions at one or two arguments.
    At { first: usize, second: Option<usize> },
    /// The function of a `struct kprobe`, to which an argument points.
    Kprobe { kprobe: usize, address: u64 },
    /// The first instructions of functions, where the tracer's call stands.
    Entries,
    /// The instructions of all jump labels.
    JumpLabels,
    /// The text that the `struct optimized_kprobe`s in a list will jump over. An argument points to
    /// the list.
    Jumps {
        list: usize,
        /// The offset of the list's links in the structure.
        links: u64,
        /// The offset of the address.
        address: u64,
    },
}

/// The memory that a function of the guest is about to free.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Freed {
    /// Everything that is mapped from an argument on.
    Region { start: usize },
    /// The range between two arguments.
    Range { start: usize, end: usize },
}

/// Returns the watches for a kernel with the functions to put them on.
pub(super) fn watches(view: &KernelView) -> Vec<(Gva, Arc<dyn Watch>)> {
    let Some(btf) = view.kernel.btf() else {
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
        let address = view.kernel.symbols.address_of(name)?;
        // Kernels without modules need some of these functions at boot only.
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
        let address = view.kernel.symbols.address_of(name);
        if let Some(address) = address.filter(|address| !view.has_freed(*address)) {
            let space = view.kernel.space;
            watches.push((Gva(address), Arc::new(FreedWatch { space, freed })));
        }
    }
    watches
}

/// The jump labels of the kernel's image, read when they are first needed: a distribution's kernel
/// has some 15,000.
struct Labels {
    layout: Option<JumpLabelLayout>,
    /// The first bytes of their instructions, ascending; none if they cannot be read.
    found: OnceLock<Arc<[u64]>>,
}

impl Labels {
    fn new(view: &KernelView, part: Part) -> Self {
        let btf = view.kernel.btf().filter(|_| part == Part::JumpLabels);
        Self {
            layout: btf.and_then(|btf| JumpLabelLayout::new(btf, &view.kernel.symbols).ok()),
            found: OnceLock::new(),
        }
    }

    fn read(&self, memory: &dyn PhysicalMemory, space: AddressSpace) -> Arc<[u64]> {
        let found = self.found.get_or_init(|| {
            let memory = PausedMemory::new(memory);
            let all = self.layout.as_ref();
            let all = all.map(|layout| layout.read_all(memory.view(space), &[]));
            let all = all.filter(|all| all.unread.is_empty()).unwrap_or_default();
            let mut found: Vec<u64> = all.entries().iter().map(|label| label.code.0).collect();
            found.sort_unstable();
            found.into()
        });
        found.clone()
    }
}

/// Suspends sites while the guest reads or writes their text.
struct PartWatch {
    part: Part,
    space: AddressSpace,
    /// The first bytes of the kernel's functions, ascending.
    functions: Arc<[u64]>,
    /// The first bytes of the watched functions, ascending. Sites there stay armed, so that nested
    /// calls are seen.
    watched: Arc<[u64]>,
    /// The jump labels of the kernel's image.
    labels: Labels,
    /// The sites suspended for calls in progress.
    calls: Calls<Suspended>,
}

impl PartWatch {
    fn new(view: &KernelView, part: Part, watched: Arc<[u64]>) -> Self {
        let functions = match part {
            Part::Kprobe { .. } | Part::Entries => view
                .kernel
                .symbols
                .text_functions()
                .map(|f| f.symbol.address)
                .collect(),
            _ => Arc::default(),
        };
        Self {
            part,
            space: view.kernel.space,
            functions,
            watched,
            labels: Labels::new(view, part),
            calls: Calls::default(),
        }
    }

    /// Returns the ranges that a call with these arguments reads or writes.
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
            // These are selected by their instruction.
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

    /// Returns a selection of the instructions that the call reads, for parts that are selected by
    /// instruction instead of address. The watches and the return address `back` are excluded.
    fn choice(&self, memory: &dyn PhysicalMemory, back: Option<u64>) -> Option<Choice> {
        let is_looked_at: Choice = match self.part {
            Part::Entries => {
                let functions = self.functions.clone();
                Box::new(move |address, code| is_traced_entry(&functions, address, code))
            }
            Part::JumpLabels => {
                let labels = self.labels.read(memory, self.space);
                Box::new(move |address, code| is_jump_label(&labels, address, code))
            }
            _ => return None,
        };
        let watched = self.watched.clone();
        Some(Box::new(move |address, code| {
            is_looked_at(address, code) && back != Some(address.0) && !is_watched(&watched, address)
        }))
    }

    /// Returns the parts of a range without the watches.
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

/// Checks whether the function tracer's call, or the NOP in its place, is at `address`.
fn is_traced_entry(functions: &[u64], address: Gva, code: &[u8]) -> bool {
    let starts = |at: u64| functions.binary_search(&at).is_ok();
    let is_known = functions.first() <= Some(&address.0) && Some(&address.0) <= functions.last();
    // The starts of modules' functions are not known.
    let is_first = !is_known || starts(address.0) || starts(address.0.wrapping_sub(LANDING));
    is_first && (starts_with_tracers_nop(code) || code.first() == Some(&CALL))
}

/// Returns a selection of the instructions that any call may read that began before the watches
/// were armed. Those at `watched` are excluded.
pub(super) fn any_patched(watched: Vec<Gva>) -> Choice {
    Box::new(move |address, code| {
        let may_change =
            may_be_jump_label(code) || starts_with_tracers_nop(code) || code.first() == Some(&CALL);
        may_change && !watched.contains(&address)
    })
}

/// Checks whether a watch may stand at `address`.
fn is_watched(watched: &[u64], address: Gva) -> bool {
    let after = watched.partition_point(|start| *start <= address.0);
    let start = after.checked_sub(1).and_then(|last| watched.get(last));
    start.is_some_and(|start| address.0 - start < ENTRY)
}

/// Checks whether a jump label is at `address`, where `code` is. `labels` are those of the kernel's
/// image. Modules have their own, which only `code` tells.
fn is_jump_label(labels: &[u64], address: Gva, code: &[u8]) -> bool {
    let is_of_image = labels.first() <= Some(&address.0) && Some(&address.0) <= labels.last();
    may_be_jump_label(code) && (!is_of_image || labels.binary_search(&address.0).is_ok())
}

/// Checks whether code begins as a jump label does: a NOP of two or five bytes, or a jump of the
/// same length.
fn may_be_jump_label(code: &[u8]) -> bool {
    JUMP_LABELS.iter().any(|label| code.starts_with(label))
}

/// Returns the parts of a range without `length` bytes at `start`.
fn without(range: Range<u64>, start: u64, length: u64) -> impl Iterator<Item = Range<u64>> {
    let before = range.start..range.end.min(start);
    let behind = range.start.max(start.saturating_add(length))..range.end;
    [before, behind].into_iter().filter(|part| !part.is_empty())
}

impl Watch for PartWatch {
    fn on_entry(&self, path: &HitPath, hit: &Hit<'_>) -> bool {
        let Some(cpu) = hit.cpu else { return false };
        // The call's return trap must stay armed, or the sites stay suspended.
        let back = read_u64(hit.memory, self.space, Gva(hit.registers.rsp)).ok();
        // If no site is there, the range is kept free: another thread may be arming one.
        let mut suspended = Suspended::default();
        if let Some(choice) = self.choice(hit.memory, back) {
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
        let entered = self.calls.enter(hit, suspended);
        for suspended in entered.unreturned {
            self.resume_sites(cpu.traps(), suspended, None);
        }
        entered.is_kept
    }

    fn on_return(&self, _: &HitPath, hit: &Hit<'_>, call: &Returning, from_stack: Gva) {
        let Some(cpu) = hit.cpu else { return };
        let Some(suspended) = self.calls.leave(hit, from_stack) else {
            return;
        };
        let written = match self.part {
            Part::Written { .. } => self.ranges(cpu, &call.arguments).into_iter().next(),
            _ => None,
        };
        self.resume_sites(cpu.traps(), suspended, written);
    }

    /// Resumes the sites that calls in progress keep suspended.
    fn on_unwatch(&self, traps: &TrapTable) {
        for suspended in self.calls.close() {
            self.resume_sites(traps, suspended, None);
        }
    }
}

impl PartWatch {
    fn resume_sites(&self, traps: &TrapTable, suspended: Suspended, written: Option<Range<u64>>) {
        traps.resume_sites(suspended, written, self.space);
    }
}

/// Evicts sites in memory that the guest frees.
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

/// Returns the end of what is mapped from `start` on. The kernel leaves an unmapped page between
/// its regions.
fn mapped_end(memory: &dyn PhysicalMemory, space: AddressSpace, start: u64) -> u64 {
    let mut end = start;
    while end.wrapping_sub(start) < LARGEST_MODULE && translate(memory, space, Gva(end)).is_ok() {
        end = end.saturating_add(PAGE);
    }
    end
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jump_labels_are_known_in_the_image_and_told_by_their_code_in_modules() {
        const NOP: &[u8] = &[0x0f, 0x1f, 0x44, 0x00, 0x00];
        const MOV: &[u8] = &[0x48, 0x89, 0xe5];
        let labels = [0x1000, 0x1010, 0x2000];
        for (address, code, expected) in [
            (0x1010, NOP, true),
            // A jump behind a call, say.
            (0x1020, NOP, false),
            (0x3000, NOP, true),
            (0x3000, MOV, false),
        ] {
            let found = is_jump_label(&labels, Gva(address), code);
            assert_eq!(found, expected, "{address:#x}");
        }
        assert!(is_jump_label(&[], Gva(0x1020), NOP), "no label is known");
    }
}

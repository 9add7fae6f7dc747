//! Finds return addresses that the kernel's own tracing has replaced.
//!
//! Kretprobes and fprobes (rethooks, Linux 5.18 on) and the function graph tracer make a function
//! return to their own code. The task's lists keep the originals, by the stack slot that each was
//! taken from.

use super::frames::ReturnTrampoline;
use crate::kernel::btf::Btf;
use crate::kernel::layout::{first_offset, offset};
use crate::kernel::symbols::Symbols;
use crate::{Gva, MemoryView};

/// The maximum number of rethooks that one walk reads. The list is searched from the newest for
/// each replaced return address, so this is enough for some hundred of those.
pub(super) const MAX_HOOKS: usize = 1 << 16;
/// The size in bytes of a task's stack of traced functions: a page (`SHADOW_STACK_SIZE`,
/// kernel/trace/fgraph.c). Before Linux 6.11 it had 50 elements of at most 40 bytes, with those in
/// use first.
const GRAPH_STACK: u64 = 4096;
/// The symbols of the code to which functions are made to return.
const NAMES: [(&str, ReturnTrampoline); 4] = [
    ("arch_rethook_trampoline", ReturnTrampoline::Rethook),
    ("__kretprobe_trampoline", ReturnTrampoline::Rethook),
    ("kretprobe_trampoline", ReturnTrampoline::Rethook),
    ("return_to_handler", ReturnTrampoline::FunctionGraph),
];

/// The layout by which originals are found in one kernel.
#[derive(Debug, Clone)]
pub(super) struct ReturnTrampolines {
    known: Vec<(u64, ReturnTrampoline)>,
    hooks: Option<HookLayout>,
    graph: Option<GraphLayout>,
}

/// Offsets in `task_struct` and `struct rethook_node`.
#[derive(Debug, Clone, Copy)]
struct HookLayout {
    first: u64,
    link: u64,
    original: u64,
    place: u64,
}

/// Offsets in `task_struct` and `struct ftrace_ret_stack`.
#[derive(Debug, Clone, Copy)]
struct GraphLayout {
    stack: u64,
    original: u64,
    place: u64,
}

impl ReturnTrampolines {
    /// Finds the layout of a running kernel. `symbols` must have its slide.
    pub(super) fn new(btf: &Btf, symbols: &Symbols) -> Self {
        let hooks = || {
            Some(HookLayout {
                first: offset(btf, "task_struct.rethooks.first", 8).ok()?,
                link: first_offset(btf, &["rethook_node.llist.next", "rethook_node.llist"], 8)
                    .ok()?,
                original: offset(btf, "rethook_node.ret_addr", 8).ok()?,
                place: offset(btf, "rethook_node.frame", 8).ok()?,
            })
        };
        let graph = || {
            Some(GraphLayout {
                stack: offset(btf, "task_struct.ret_stack", 8).ok()?,
                original: offset(btf, "ftrace_ret_stack.ret", 8).ok()?,
                place: offset(btf, "ftrace_ret_stack.retp", 8).ok()?,
            })
        };
        let known = NAMES.iter();
        Self {
            known: known
                .filter_map(|(name, kind)| Some((symbols.address_of(name)?, *kind)))
                .collect(),
            hooks: hooks(),
            graph: graph(),
        }
    }

    /// Returns the kind of trampoline that `address` is in, if any.
    pub(super) fn at(&self, address: u64) -> Option<ReturnTrampoline> {
        let found = self.known.iter().find(|(known, _)| *known == address);
        found.map(|(_, kind)| *kind)
    }

    /// Finds the address that was in `slot` of the task's stack before a trampoline's address
    /// replaced it. `hooks_left` is the number of rethooks that may still be read ([`MAX_HOOKS`] in
    /// a walk).
    pub(super) fn original(
        &self,
        view: MemoryView<'_>,
        task: Gva,
        kind: ReturnTrampoline,
        slot: u64,
        hooks_left: &mut usize,
    ) -> Option<u64> {
        let original = match kind {
            ReturnTrampoline::Rethook => self.hooked(view, task, slot, hooks_left),
            ReturnTrampoline::FunctionGraph => self.graphed(view, task, slot),
        };
        original.filter(|address| self.at(*address).is_none())
    }

    fn hooked(
        &self,
        view: MemoryView<'_>,
        task: Gva,
        slot: u64,
        hooks_left: &mut usize,
    ) -> Option<u64> {
        let layout = self.hooks?;
        let at = |base: u64, offset: u64| Gva(base.wrapping_add(offset));
        let mut next = view.pointer(at(task.0, layout.first)).ok()?;
        loop {
            *hooks_left = hooks_left.checked_sub(1)?;
            let node = next?.0.wrapping_sub(layout.link);
            let original = view.u64(at(node, layout.original)).ok()?;
            // A function may be hooked more than once. Only the first hook saw the original.
            if view.u64(at(node, layout.place)).ok()? == slot && self.at(original).is_none() {
                return Some(original);
            }
            next = view.pointer(at(node, layout.link)).ok()?;
        }
    }

    /// Searches the stack of traced functions, which has had two layouts. In both an element is a
    /// `struct ftrace_ret_stack`, recognized by the stack slot that it names.
    fn graphed(&self, view: MemoryView<'_>, task: Gva, slot: u64) -> Option<u64> {
        let layout = self.graph?;
        let stack = view
            .pointer(Gva(task.0.wrapping_add(layout.stack)))
            .ok()??;
        let from = layout.place..GRAPH_STACK;
        let mut places = from.step_by(8).map(|offset| stack.0.wrapping_add(offset));
        // The array may end before the next page, which need not be mapped.
        let place = places.find_map(|at| match view.u64(Gva(at)) {
            Ok(value) => (value == slot).then_some(Ok(at)),
            Err(_) => Some(Err(())),
        })?;
        let element = place.ok()?.wrapping_sub(layout.place);
        view.u64(Gva(element.wrapping_add(layout.original))).ok()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::PausedMemory;
    use crate::kernel::btf::Kind;
    use crate::kernel::btf::test_types::TestBtf;
    use crate::kernel::test_kernel::symbols;
    use crate::test_memory::{Flags, TestMemory};

    const DATA: u64 = 0xffff_8880_0100_0000;
    const HOOK: u64 = 0xffff_ffff_8100_1000;
    const GRAPH: u64 = 0xffff_ffff_8100_2000;

    fn trampolines() -> ReturnTrampolines {
        let mut t = TestBtf::default();
        let long = t.add("long unsigned int", Kind::Int, 0, 8, &[0x40]);
        let head = t.composite("llist_head", Kind::Struct, false, 8, &[("first", long, 0)]);
        let link = t.composite("llist_node", Kind::Struct, false, 8, &[("next", long, 0)]);
        let task = [("rethooks", head, 0), ("ret_stack", long, 64)];
        t.composite("task_struct", Kind::Struct, false, 16, &task);
        let node = [
            ("llist", link, 128),
            ("ret_addr", long, 256),
            ("frame", long, 320),
        ];
        t.composite("rethook_node", Kind::Struct, false, 48, &node);
        let element = [("ret", long, 0), ("func", long, 64), ("retp", long, 192)];
        t.composite("ftrace_ret_stack", Kind::Struct, false, 32, &element);
        let symbols = symbols(&[
            ("arch_rethook_trampoline", HOOK),
            ("return_to_handler", GRAPH),
        ]);
        ReturnTrampolines::new(&Btf::parse(&t.bytes()).unwrap(), &symbols)
    }

    #[test]
    fn originals_are_found_by_their_place() {
        let mut memory = TestMemory::new(0x10_0000, 1 << 20);
        let space = memory.address_space(4);
        for page in [0, 4096] {
            let flags = Flags::default().writable();
            memory.map(space, DATA + page, 0x18_0000 + page, 4096, flags);
        }
        let mut word =
            |offset: u64, value: u64| memory.write(0x18_0000 + offset, &value.to_le_bytes());
        // A task with two rethooks on one slot (the newer first), one on another, and two traced
        // functions.
        word(0, DATA + 0x100 + 16);
        word(8, DATA + 0x800);
        for (node, next, original, place) in [
            (0x100, DATA + 0x200 + 16, HOOK, 0x7000),
            (0x200, DATA + 0x300 + 16, 0x1111, 0x7000),
            (0x300, 0, 0x2222, 0x8000),
        ] {
            word(node + 16, next);
            word(node + 32, original);
            word(node + 40, place);
        }
        for (element, original, place) in [
            (0x808, 0x3333, 0x7100),
            (0x838, GRAPH, 0x7200),
            // Near the end of the page that the array has since Linux 6.11.
            (0x17d8, 0x4444, 0x7400),
        ] {
            word(element, original);
            word(element + 24, place);
        }
        let paused = PausedMemory::new(&memory);
        let view = paused.view(space);
        let trampolines = trampolines();
        let (hook, graph) = (ReturnTrampoline::Rethook, ReturnTrampoline::FunctionGraph);
        for (kind, slot, expected) in [
            (hook, 0x7000, Some(0x1111)),
            (hook, 0x8000, Some(0x2222)),
            (hook, 0x9000, None),
            (graph, 0x7100, Some(0x3333)),
            (graph, 0x7200, None),
            (graph, 0x7300, None),
            (graph, 0x7400, Some(0x4444)),
        ] {
            let mut left = MAX_HOOKS;
            let found = trampolines.original(view, Gva(DATA), kind, slot, &mut left);
            assert_eq!(found, expected, "{kind:?} {slot:#x}");
        }
        assert_eq!(trampolines.at(HOOK), Some(hook));
        assert_eq!(trampolines.at(HOOK + 1), None);
    }

    #[test]
    fn a_list_that_loops_ends() {
        let mut memory = TestMemory::new(0x10_0000, 1 << 20);
        let space = memory.address_space(4);
        memory.map(space, DATA, 0x18_0000, 4096, Flags::default().writable());
        memory.write(0x18_0000, &(DATA + 0x110).to_le_bytes());
        memory.write(0x18_0110, &(DATA + 0x110).to_le_bytes());
        let paused = PausedMemory::new(&memory);
        let (mut left, kind) = (MAX_HOOKS, ReturnTrampoline::Rethook);
        for _ in 0..2 {
            let found = trampolines().original(paused.view(space), Gva(DATA), kind, 1, &mut left);
            assert_eq!((found, left), (None, 0));
        }
    }
}

//! The places where events are seen: functions of the guest's kernel, found by name.
//!
//! The chosen functions have a symbol in every kernel of the last ten years. Other files or
//! assembly code call them, or a table of functions leads to them. If a kernel lacks one, only its
//! event is lost.

mod interrupts;

use introspect::kernel::symbols::Symbol;
use probes::kernel_view::KernelView;
use probes::probe::{Moment, Probe};
use probes::provider::{self, kprobe, tracepoint};
use vmm::machine::Handle;

use super::layout::Layout;
use super::program::EventHook;
use super::record::EventType;

/// The first part of the names of the device's own probes.
const PROVIDER: &str = "ptrace";
/// The tracepoint of a wake-up, which fires in the waker's context.
const WAKING: (&str, &str) = ("sched", "sched_waking");

/// The functions, the events that they report, and the hooks that record them.
const FUNCTIONS: [(&str, EventType, EventHook); 9] = [
    ("__switch_to_asm", EventType::Run, EventHook::Switch),
    ("wake_up_new_task", EventType::Ready, EventHook::Made),
    ("do_exit", EventType::Dead, EventHook::Exits),
    ("__set_task_comm", EventType::Name, EventHook::Renamed),
    ("setup_new_exec", EventType::Name, EventHook::Executes),
    ("exc_page_fault", EventType::Trap, EventHook::Fault),
    ("switched_to_dl", EventType::Admit, EventHook::Admitted),
    ("switched_from_dl", EventType::Expel, EventHook::Expelled),
    ("dl_task_timer", EventType::Release, EventHook::Released),
];

/// Handlers of exceptions that programs cause, and their vectors (arch/x86/include/asm/trapnr.h).
/// Not every kernel has all of them.
const TRAPS: [(&str, u8); 15] = [
    ("exc_divide_error", 0),
    ("noist_exc_debug", 1),
    ("exc_int3", 3),
    ("exc_overflow", 4),
    ("exc_bounds", 5),
    ("exc_invalid_op", 6),
    ("exc_device_not_available", 7),
    ("exc_coproc_segment_overrun", 9),
    ("exc_invalid_tss", 10),
    ("exc_segment_not_present", 11),
    ("exc_stack_segment", 12),
    ("exc_general_protection", 13),
    ("exc_coprocessor_error", 16),
    ("exc_alignment_check", 17),
    ("exc_simd_coprocessor_error", 19),
];

/// Functions by which a program writes a marker: to trace_marker, or to a port of the
/// virtio-console, which may be in a module.
const MARKERS: [(&str, EventHook); 2] = [
    ("tracing_mark_write", EventHook::Marked),
    ("port_fops_write", EventHook::WritesPort),
];

/// A place where an event is seen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Source {
    pub(super) probe: Probe,
    pub(super) event: EventType,
    pub(super) what: EventHook,
}

/// All places that a kernel has.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Sources {
    pub(super) list: Vec<Source>,
    /// The events that are lost, and the reasons.
    pub(super) lost: Vec<String>,
}

/// Returns the sentence for an event that is lost.
pub(super) fn lost(event: EventType, why: impl std::fmt::Display) -> String {
    format!("no S{}: {why}", event.name())
}

fn function(name: &str, address: u64, moment: Moment, event: EventType, what: EventHook) -> Source {
    Source {
        probe: kprobe::of_function(PROVIDER, name, address, moment),
        event,
        what,
    }
}

impl Sources {
    /// Finds the sources in a paused guest.
    pub(super) fn find(view: &KernelView, layout: &Layout, machine: &Handle) -> Self {
        let mut sources = Self::of_functions(view, layout);
        let waking = tracepoint::of_kernel(view, machine, WAKING).map(|probe| Source {
            probe,
            event: EventType::Ready,
            what: EventHook::Wakes,
        });
        match waking {
            Some(source) => sources.list.push(source),
            None => sources.require(view, "try_to_wake_up", EventType::Ready, EventHook::WakesIf),
        }
        sources
    }

    /// Finds the sources that are functions.
    fn of_functions(view: &KernelView, layout: &Layout) -> Self {
        let mut sources = Self::default();
        for (name, event, what) in FUNCTIONS {
            sources.require(view, name, event, what);
        }
        for (name, vector) in TRAPS {
            sources.add(view, name, EventType::Trap, EventHook::Trap(vector));
        }
        match view.system_call_entry() {
            Some(entry) => {
                let what = EventHook::SystemCall(entry.number);
                let name = provider::system_calls::PROVIDER;
                let source = function(name, entry.address.0, Moment::Entry, EventType::Trap, what);
                sources.list.push(source);
            }
            None => sources.lose(
                EventType::Trap,
                "system calls pass no function that is known",
            ),
        }
        let markers = MARKERS.map(|(name, what)| sources.add(view, name, EventType::User, what));
        if markers == [false; MARKERS.len()] {
            sources.lose(
                EventType::User,
                "the kernel has neither trace_marker nor ports of a virtio-console",
            );
        }
        interrupts::find(view, &mut sources);
        if let Err(why) = &layout.running {
            sources.lose(EventType::Sleep, why);
        }
        if let Err(why) = &layout.deadline {
            sources.lose(EventType::Slice, why);
        }
        sources
    }

    /// Returns the sources that report a task's creation, its exit, and its taking over another's
    /// number by executing a program.
    pub(super) fn of_processes(&self) -> impl Iterator<Item = &Source> {
        let list = self.list.iter();
        list.filter(|source| {
            matches!(
                source.what,
                EventHook::Made | EventHook::Exits | EventHook::Executes
            )
        })
    }

    /// Adds the entry of a function. Returns whether the kernel has it.
    fn add(&mut self, view: &KernelView, name: &str, event: EventType, what: EventHook) -> bool {
        let address = address_of(view, name);
        let source = address.map(|at| function(name, at, Moment::Entry, event, what));
        self.list.extend(source);
        address.is_some()
    }

    /// Adds the entry of a function without which the event is lost.
    fn require(&mut self, view: &KernelView, name: &str, event: EventType, what: EventHook) {
        if !self.add(view, name, event, what) {
            self.lose(event, format_args!("the kernel names no function {name}"));
        }
    }

    fn lose(&mut self, event: EventType, why: impl std::fmt::Display) {
        self.lost.push(lost(event, why));
    }
}

/// Returns the address of a function of the kernel, or of a module that was loaded when the view
/// was made.
fn address_of(view: &KernelView, name: &str) -> Option<u64> {
    let is_function = |symbol: &Symbol<'_>| symbol.is_text() && !symbol.absolute;
    let own = view.kernel.symbols.all_of(name).find(is_function);
    let of_modules = || {
        let mut found = view.modules.all_of(name, None).map(|found| found.symbol);
        found.find(is_function)
    };
    own.or_else(of_modules).map(|symbol| symbol.address)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use introspect::Gpa;
    use introspect::kernel::symbols::SymbolsBuilder;
    use introspect::x86_64::paging::AddressSpace;

    use super::super::program::Vector;
    use super::super::program::tests::LAYOUT;
    use super::*;

    fn found(names: &[&str]) -> Sources {
        let mut builder = SymbolsBuilder::default();
        for (at, name) in (0u64..).zip(names) {
            let address = 0xffff_ffff_8100_0000 + at * 64;
            builder.push(name.as_bytes(), address, b'T', false).unwrap();
        }
        let space = AddressSpace {
            root: Gpa(0),
            levels: 4,
        };
        let view = KernelView::without_types(builder.finish(None), space);
        Sources::of_functions(&view, &LAYOUT)
    }

    #[test]
    fn what_a_kernel_lacks_loses_its_event_alone() {
        let none = found(&[]);
        assert!(none.list.is_empty());
        let lost: Vec<_> = none
            .lost
            .iter()
            .map(|line| line.split(':').next().unwrap())
            .collect();
        assert_eq!(
            lost,
            [
                "no SRun",
                "no SReady",
                "no SDead",
                "no SName",
                "no SName",
                "no STrap",
                "no SAdmit",
                "no SExpel",
                "no SRelease",
                "no STrap",
                "no SUser",
                "no SInts",
            ]
        );
        let some = found(&[
            "do_exit",
            "setup_new_exec",
            "exc_overflow",
            "tracing_mark_write",
            "do_syscall_64",
        ]);
        let whats: Vec<_> = some.list.iter().map(|source| source.what).collect();
        let expected = [
            EventHook::Exits,
            EventHook::Executes,
            EventHook::Trap(4),
            EventHook::SystemCall(1),
            EventHook::Marked,
        ];
        assert_eq!(whats, expected);
        assert!(!some.lost.iter().any(|line| line.starts_with("no SUser")));
        let followed: Vec<_> = some.of_processes().map(|source| source.what).collect();
        assert_eq!(followed, [EventHook::Exits, EventHook::Executes]);
    }

    /// A handler with a body of its own is seen there, because no switch of tasks comes between the
    /// body's beginning and end.
    #[test]
    fn interrupts_are_seen_at_their_handlers_bodies() {
        let sources = found(&[
            "common_interrupt",
            "__common_interrupt",
            "sysvec_reschedule_ipi",
            "sysvec_apic_timer_interrupt",
            "__sysvec_apic_timer_interrupt",
        ]);
        let found: Vec<_> = sources
            .list
            .iter()
            .map(|source| (source.probe.name.function.as_str(), source.what))
            .collect();
        assert_eq!(
            found,
            [
                (
                    "__common_interrupt",
                    EventHook::InterruptStarts(Vector::Argument)
                ),
                (
                    "__common_interrupt",
                    EventHook::InterruptEnds(Vector::Argument)
                ),
                (
                    "__sysvec_apic_timer_interrupt",
                    EventHook::InterruptStarts(Vector::Fixed(0xec))
                ),
                (
                    "__sysvec_apic_timer_interrupt",
                    EventHook::InterruptEnds(Vector::Fixed(0xec))
                ),
                (
                    "sysvec_reschedule_ipi",
                    EventHook::Interrupt(Vector::Fixed(0xfd))
                ),
            ]
        );
    }
}

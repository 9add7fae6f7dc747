//! Handlers of interrupts, and their vectors.
//!
//! The vector's entry (`common_interrupt`, `sysvec_X`) may switch to another task before it
//! returns. So the interrupt is taken to be the run of the function that it calls, named with two
//! underscores in front. If the compiler has inlined that function, it is short, and the interrupt
//! begins and ends at one moment.

use probes::kernel_view::KernelView;
use probes::probe::Moment;

use super::super::program::{EventHook, Vector};
use super::super::record::EventType;
use super::{Sources, address_of, function};

/// Handlers without their underscores (arch/x86/include/asm/idtentry.h, irq_vectors.h).
const HANDLERS: [(&str, Vector); 24] = [
    ("common_interrupt", Vector::Argument),
    ("spurious_interrupt", Vector::Argument),
    ("sysvec_irq_move_cleanup", Vector::Fixed(0x20)),
    ("sysvec_apic_timer_interrupt", Vector::Fixed(0xec)),
    ("sysvec_hyperv_stimer0", Vector::Fixed(0xed)),
    ("sysvec_hyperv_reenlightenment", Vector::Fixed(0xee)),
    ("sysvec_kvm_posted_intr_nested_ipi", Vector::Fixed(0xf0)),
    ("sysvec_kvm_posted_intr_wakeup_ipi", Vector::Fixed(0xf1)),
    ("sysvec_kvm_posted_intr_ipi", Vector::Fixed(0xf2)),
    ("sysvec_hyperv_callback", Vector::Fixed(0xf3)),
    ("sysvec_acrn_hv_callback", Vector::Fixed(0xf3)),
    ("sysvec_xen_hvm_callback", Vector::Fixed(0xf3)),
    ("sysvec_kvm_asyncpf_interrupt", Vector::Fixed(0xf3)),
    ("sysvec_deferred_error", Vector::Fixed(0xf4)),
    ("sysvec_irq_work", Vector::Fixed(0xf6)),
    ("sysvec_x86_platform_ipi", Vector::Fixed(0xf7)),
    ("sysvec_reboot", Vector::Fixed(0xf8)),
    ("sysvec_threshold", Vector::Fixed(0xf9)),
    ("sysvec_thermal", Vector::Fixed(0xfa)),
    ("sysvec_call_function_single", Vector::Fixed(0xfb)),
    ("sysvec_call_function", Vector::Fixed(0xfc)),
    ("sysvec_reschedule_ipi", Vector::Fixed(0xfd)),
    ("sysvec_error_interrupt", Vector::Fixed(0xfe)),
    ("sysvec_spurious_apic_interrupt", Vector::Fixed(0xff)),
];

/// Adds the handlers that a kernel has.
pub(super) fn find(view: &KernelView, sources: &mut Sources) {
    let before = sources.list.len();
    for (name, vector) in HANDLERS {
        let body = format!("__{name}");
        if let Some(address) = address_of(view, &body) {
            let starts = EventHook::InterruptStarts(vector);
            let ends = EventHook::InterruptEnds(vector);
            sources.list.extend([
                function(&body, address, Moment::Entry, EventType::Ints, starts),
                function(&body, address, Moment::Return, EventType::Inte, ends),
            ]);
        } else {
            sources.add(view, name, EventType::Ints, EventHook::Interrupt(vector));
        }
    }
    if sources.list.len() == before {
        sources.lose(
            EventType::Ints,
            "the kernel names no handler of interrupts that is known",
        );
    }
}

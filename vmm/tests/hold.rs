//! Hits that hold the machine before the trapped instruction.
#![allow(clippy::unwrap_used)]

mod support;

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::mpsc::{Sender, channel};
use std::time::Duration;

use introspect::Gva;
use support::{Guest, paused_before_program};
use vmm::machine::Paused;
use vmm::trap::{SiteId, Trap};
use vmm::{StoppedVcpu, TrapSink};

/// The number of calls that the guest's program makes.
const CALLS: u64 = 20;

/// A sink that sends each hit back three times.
#[derive(Default)]
struct Retrying(Mutex<BTreeMap<u64, u64>>);

impl TrapSink for Retrying {
    fn trap(&self, _: &Trap, cpu: &StoppedVcpu<'_>) {
        let mut seen = self.0.lock().unwrap();
        let hits = seen.entry(cpu.regs().rdi).or_default();
        *hits += 1;
        if *hits <= 3 {
            cpu.retry();
        }
    }

    fn may_hold(&self, _: SiteId) -> bool {
        true
    }
}

/// A sink that holds each hit, and passes RDI on with the hold.
struct Holding(Mutex<Sender<(u64, Paused)>>);

impl TrapSink for Holding {
    fn trap(&self, _: &Trap, cpu: &StoppedVcpu<'_>) {
        let held = (cpu.regs().rdi, cpu.hold_here());
        self.0.lock().unwrap().send(held).unwrap();
    }

    fn may_hold(&self, _: SiteId) -> bool {
        true
    }
}

/// Lets the guest call the function at `address` and checks that each call is held there once.
fn each_call_is_held_once(guest: &Guest, paused: Paused, address: Gva) {
    let (sender, held) = channel();
    let sink = Holding(Mutex::new(sender));
    guest.machine.set_sink(Some(Box::new(sink)));
    drop(paused);
    for call in 0..CALLS {
        let (argument, hold) = held.recv_timeout(support::LIMIT).unwrap();
        assert_eq!(argument, call, "{}", guest.situation());
        let paused = guest.machine.pause();
        let registers = guest.machine.registers(&paused, 0).unwrap();
        assert_eq!(
            (registers.regs.rip, registers.regs.rdi),
            (address.0, call),
            "{}",
            guest.situation()
        );
        drop(hold);
        // The machine is paused as long as one pause lasts.
        held.recv_timeout(Duration::from_millis(1)).unwrap_err();
    }
    assert_eq!(guest.count(), CALLS, "{}", guest.situation());
    held.try_recv().unwrap_err();
}

#[test]
fn a_hit_in_a_program_is_held_before_its_instruction_and_counts_once() {
    let host = host!();
    let (guest, paused) = paused_before_program(host, &format!("usercalls {CALLS}"), 1);
    let leaf = guest.symbol("micro_user_leaf");
    let site = guest.arm_user(leaf);
    each_call_is_held_once(&guest, paused, leaf);
    assert_eq!(guest.machine.traps().hits(), [(site, CALLS, 0)]);
}

#[test]
fn a_hit_that_is_sent_back_is_a_new_hit_and_the_instruction_is_executed_once() {
    let host = host!();
    for (program, function) in [("usercalls", "micro_user_leaf"), ("calls", "micro_leaf")] {
        let (guest, paused) = paused_before_program(host, &format!("{program} {CALLS}"), 1);
        let leaf = guest.symbol(function);
        let site = match program {
            "calls" => guest.arm_kernel(leaf),
            _ => guest.arm_user(leaf),
        };
        guest.machine.set_sink(Some(Box::new(Retrying::default())));
        drop(paused);
        assert_eq!(guest.count(), CALLS, "{program}: {}", guest.situation());
        assert_eq!(guest.machine.traps().hits(), [(site, 4 * CALLS, 0)]);
    }
}

#[test]
fn a_hit_in_the_kernel_is_held_before_its_instruction_and_counts_once() {
    let host = host!();
    let (guest, paused) = paused_before_program(host, &format!("calls {CALLS}"), 1);
    let leaf = guest.symbol("micro_leaf");
    let site = guest.arm_kernel(leaf);
    each_call_is_held_once(&guest, paused, leaf);
    assert_eq!(guest.machine.traps().hits(), [(site, CALLS, 0)]);
}

#[test]
fn a_hardware_breakpoint_holds_its_instruction_once() {
    let host = host!();
    let (guest, paused) = paused_before_program(host, &format!("calls {CALLS}"), 1);
    let leaf = guest.symbol("micro_leaf");
    guest.machine.set_breakpoint(1, Some(leaf)).unwrap();
    each_call_is_held_once(&guest, paused, leaf);
}

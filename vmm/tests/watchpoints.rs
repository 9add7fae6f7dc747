//! Watchpoints on memory that a program of the micro guest accesses a known number of times.
#![allow(clippy::unwrap_used)]

mod support;

use std::sync::Mutex;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use introspect::Gva;
use support::{Guest, Host, paused_before_program};
use vmm::machine::{Access, Paused, WatchError, Watchpoint};
use vmm::trap::{SiteId, Trap, TrapKind};
use vmm::{StoppedVcpu, TrapSink};

/// The number of calls that the guest's program makes.
const CALLS: u64 = 20;

/// The size in bytes of the function that is called: PUSH RBP, three more instructions, and RET.
const LEAF: u64 = 10;

/// A hit: its kind, the address of the next instruction, and the stack pointer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Hit {
    kind: TrapKind,
    address: u64,
    rsp: u64,
}

/// A sink that holds the machine at each hit, and passes it on.
struct Holding(Mutex<Sender<(Hit, Paused)>>);

impl TrapSink for Holding {
    fn trap(&self, trap: &Trap, cpu: &StoppedVcpu<'_>) {
        let hit = Hit {
            kind: trap.kind,
            address: trap.address.0,
            rsp: cpu.regs().rsp,
        };
        // The receiver ends before the guest does.
        let _ = self.0.lock().unwrap().send((hit, cpu.hold_here()));
    }

    fn may_hold(&self, _: SiteId) -> bool {
        true
    }
}

/// A program that calls a leaf with a frame pointer, stopped before its first call.
struct Calls {
    guest: Guest,
    leaf: Gva,
    site: SiteId,
    hits: Receiver<(Hit, Paused)>,
    /// The stack pointer at each call.
    rsp: u64,
    /// Keeps the machine at the first call.
    hold: Option<Paused>,
}

impl Calls {
    fn new(host: &Host, program: &str, function: &str) -> Self {
        let (guest, paused) = paused_before_program(host, &format!("{program} {CALLS}"), 1);
        let leaf = guest.symbol(function);
        let site = match program {
            "calls" => guest.arm_kernel(leaf),
            _ => guest.arm_user(leaf),
        };
        let (sender, hits) = channel();
        let sink = Holding(Mutex::new(sender));
        guest.machine.set_sink(Some(Box::new(sink)));
        drop(paused);
        let (hit, hold) = hits.recv_timeout(support::LIMIT).unwrap();
        Self {
            guest,
            leaf,
            site,
            hits,
            rsp: hit.rsp,
            hold: Some(hold),
        }
    }

    /// Returns the hits in the function until the machine has ended. What the program does with its
    /// stack at its end is left out.
    fn all(&mut self) -> Vec<Hit> {
        drop(self.hold.take());
        let mut all = Vec::new();
        while self.guest.machine.wait(Some(Duration::ZERO)).is_none() {
            if let Ok((hit, hold)) = self.hits.recv_timeout(Duration::from_millis(10)) {
                let paused = self.guest.machine.pause();
                let now = self.guest.machine.registers(&paused, 0).unwrap();
                assert_eq!(now.regs.rip, hit.address, "{}", self.guest.situation());
                all.push(hit);
                drop(hold);
            }
        }
        assert_eq!(self.guest.count(), CALLS, "{}", self.guest.situation());
        all.extend(self.hits.try_iter().map(|(hit, _)| hit));
        all.retain(|hit| (self.leaf.0..self.leaf.0 + LEAF).contains(&hit.address));
        all
    }
}

/// The programs, their functions, and whether the host reports their accesses.
fn programs(host: &Host) -> [(&'static str, &'static str, bool); 2] {
    let profile = &host.profile;
    [
        ("calls", "micro_leaf", profile.watch_kernel),
        ("usercalls", "micro_user_leaf", profile.watch_user),
    ]
}

#[test]
fn each_access_is_reported_behind_its_instruction() {
    let host = host!();
    for (program, function, is_reported) in programs(host) {
        for (access, each_call) in [(Access::Write, 1), (Access::ReadWrite, 2)] {
            for trapped in [false, true] {
                let case = format!("{program}, {access:?}, with a trap: {trapped}");
                let mut calls = Calls::new(host, program, function);
                // PUSH RBP and POP RBP of the function.
                let pushed = Watchpoint::new(Gva(calls.rsp - 8), 8, access).unwrap();
                if !is_reported {
                    let refused = host.profile.check_watchpoint(&pushed);
                    assert!(matches!(refused, Err(WatchError::Silent { .. })), "{case}");
                    continue;
                }
                let number = calls.guest.machine.watch(pushed).unwrap();
                if !trapped {
                    calls.guest.machine.disarm(calls.site);
                }
                let all = calls.all();
                let kind = TrapKind::Watchpoint(number);
                let (watched, traps): (Vec<Hit>, Vec<Hit>) =
                    all.iter().partition(|hit| hit.kind == kind);
                assert_eq!(watched.len() as u64, each_call * CALLS, "{case}: {all:?}");
                let behind_push = watched.iter().step_by(each_call as usize);
                for hit in behind_push {
                    let expected = (calls.leaf.0 + 1, calls.rsp - 8);
                    assert_eq!((hit.address, hit.rsp), expected, "{case}");
                }
                let expected = if trapped { CALLS - 1 } else { 0 };
                assert_eq!(traps.len() as u64, expected, "{case}: {all:?}");
            }
        }
    }
}

#[test]
fn a_removed_watchpoint_and_other_memory_are_not_reported() {
    let host = host!();
    for (program, function, is_reported) in programs(host) {
        if !is_reported {
            continue;
        }
        let mut calls = Calls::new(host, program, function);
        calls.guest.machine.disarm(calls.site);
        let watch = |below: u64| {
            let place = Watchpoint::new(Gva(calls.rsp - below), 8, Access::ReadWrite).unwrap();
            calls.guest.machine.watch(place).unwrap()
        };
        // The leaf uses nothing below its frame.
        watch(16);
        calls.guest.machine.unwatch(watch(8));
        assert_eq!(calls.all(), [], "{program}");
    }
}

#[test]
fn the_registers_of_the_cpu_are_given_out_once() {
    let host = host!();
    let Some((program, function, _)) = programs(host).into_iter().find(|program| program.2) else {
        return;
    };
    let mut calls = Calls::new(host, program, function);
    let machine = &calls.guest.machine;
    machine.disarm(calls.site);
    let watch = || {
        let place = Watchpoint::new(Gva(calls.rsp - 8), 8, Access::Write).unwrap();
        machine.watch(place)
    };
    let mut numbers = Vec::new();
    let full = loop {
        match watch() {
            Ok(number) => numbers.push(number),
            Err(error) => break error,
        }
    };
    let available = numbers.len();
    assert_eq!(full, WatchError::NoneFree { available });
    numbers.sort_unstable();
    numbers.dedup();
    assert_eq!(numbers.len(), available);
    // An emulated CPU may report only one of those that an access meets.
    assert!(calls.all().len() as u64 >= CALLS);
}

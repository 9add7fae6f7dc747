//! Speculation: a kernel's code followed on a copy of a vCPU's registers. No KVM is needed.
#![allow(clippy::unwrap_used)]

use std::ops::ControlFlow;
use std::sync::{Arc, Mutex};

use introspect::test_memory::{Flags, TestMemory};
use introspect::x86_64::paging::AddressSpace;
use introspect::{Gpa, Gva, PhysicalMemory};
use vmm::rehearsal::Rehearsal;
use vmm::speculation::SpeculationError;
use vmm::trap::Trap;
use vmm::{StoppedVcpu, TrapSink};

const MEMORY: u64 = 4 << 20;
/// The address of the page tables.
const TABLES: u64 = 0x10_0000;
const TABLES_SIZE: usize = 0x1_0000;
/// The address of the 2 MiB with all code and the stack.
const AREA: u64 = 0xffff_ffff_8100_0000;
const AREA_AT: u64 = 0x20_0000;
const AREA_SIZE: u64 = 0x20_0000;
/// The function in which the vCPU is stopped.
const FUNCTION: u64 = AREA + 0x40;
/// A function that the first one may call: `CALL LISTENER; RET`.
const HELPER: u64 = AREA + 0x100;
const LISTENER: u64 = AREA + 0x200;
const CALLER: u64 = AREA + 0x300;
const RSP: u64 = AREA + 0x10_0000;
const STEPS: usize = 100;

/// PUSH RBP, which a hit passes by the usual way.
const FIRST: u8 = 0x55;
const RET: u8 = 0xc3;

/// A sink that follows the code behind the hit site to the listener.
#[derive(Clone, Default)]
struct Follow {
    found: Arc<Mutex<Option<Result<u64, SpeculationError>>>>,
}

impl TrapSink for Follow {
    fn trap(&self, trap: &Trap, cpu: &StoppedVcpu<'_>) {
        let start = Gva(trap.address.0 + 1);
        let arrived = cpu.speculate(start, STEPS, &[], |at| match at.0 {
            LISTENER => ControlFlow::Break(()),
            _ => ControlFlow::Continue(at),
        });
        let rdi = arrived.map(|((), arrival)| arrival.registers().rdi);
        *self.found.lock().unwrap() = Some(rdi);
    }
}

/// Returns a CALL from `at` to `to`.
fn call(at: u64, to: u64) -> [u8; 5] {
    let distance = to.wrapping_sub(at + 5).to_le_bytes();
    [0xe8, distance[0], distance[1], distance[2], distance[3]]
}

/// Follows `code` in the function, behind its first instruction, which is hit.
fn follow(code: &[u8]) -> Result<u64, SpeculationError> {
    let mut tables = TestMemory::new(TABLES, TABLES_SIZE);
    let space: AddressSpace = tables.address_space(4);
    tables.map(space, AREA, AREA_AT, AREA_SIZE, Flags::default().writable());
    let mut machine = Rehearsal::new(MEMORY, space.root).unwrap();
    let handle = machine.handle();
    let write = |at: u64, bytes: &[u8]| handle.ram().write_physical(Gpa(at), bytes).unwrap();
    let put = |at: u64, bytes: &[u8]| write(AREA_AT + (at - AREA), bytes);
    let mut bytes = vec![0; TABLES_SIZE];
    tables.read_physical(Gpa(TABLES), &mut bytes).unwrap();
    write(TABLES, &bytes);
    put(FUNCTION, &[&[FIRST], code].concat());
    put(HELPER, &call(HELPER, LISTENER));
    put(HELPER + 5, &[RET]);
    put(RSP, &CALLER.to_le_bytes());
    let sink = Follow::default();
    handle.set_sink(Some(Box::new(sink.clone())));
    handle.traps().arm_kernel_by(Gva(FUNCTION), space).unwrap();
    let regs = machine.regs();
    (regs.rip, regs.rsp, regs.rdi) = (FUNCTION, RSP, 42);
    machine.hit();
    let found = sink.found.lock().unwrap().take();
    found.expect("the place is hit")
}

#[test]
fn a_call_of_a_called_function_is_reached() {
    let code = [&call(FUNCTION + 1, HELPER)[..], &[RET]].concat();
    assert_eq!(follow(&code).unwrap(), 42);
}

#[test]
fn a_function_that_returns_is_not_followed_into_its_caller() {
    // PUSH RDI; POP RDI; RET.
    let found = follow(&[0x57, 0x5f, RET]);
    assert!(
        matches!(found, Err(SpeculationError::Returned { to: Gva(CALLER) })),
        "{found:?}"
    );
}

#[test]
fn a_way_has_an_end() {
    // JMP to itself.
    let found = follow(&[0xeb, 0xfe]);
    assert!(
        matches!(found, Err(SpeculationError::TooLong { steps: STEPS, .. })),
        "{found:?}"
    );
}

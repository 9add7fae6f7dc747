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

/// A function that fills a record: see [`record`].
const WRITER: u64 = AREA + 0x400;
const RESERVE: u64 = AREA + 0x500;
const COMMIT: u64 = AREA + 0x600;
/// Memory that the guest does not have.
const SCRATCH: u64 = 0xffff_ffff_fff0_0000;

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
    let sink = Follow::default();
    hit(&[(FUNCTION + 1, code)], Box::new(sink.clone()));
    let found = sink.found.lock().unwrap().take();
    found.expect("the place is hit")
}

/// Puts pieces of code into a guest, and hits the function.
fn hit(pieces: &[(u64, &[u8])], sink: Box<dyn TrapSink>) {
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
    put(FUNCTION, &[FIRST]);
    for (at, code) in pieces {
        put(*at, code);
    }
    put(HELPER, &call(HELPER, LISTENER));
    put(HELPER + 5, &[RET]);
    put(RSP, &CALLER.to_le_bytes());
    handle.set_sink(Some(sink));
    handle.traps().arm_kernel_by(Gva(FUNCTION), space).unwrap();
    let regs = machine.regs();
    (regs.rip, regs.rsp, regs.rdi) = (FUNCTION, RSP, 42);
    machine.hit();
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

/// What was stored, once there is a hit.
type Stored = Option<Result<Vec<u8>, SpeculationError>>;

/// A sink that turns the listener's call into one of the function that fills a record. It takes
/// what the function has stored.
#[derive(Clone, Default)]
struct Record {
    found: Arc<Mutex<Stored>>,
}

/// Returns what the function has stored, and what the memory of the guest has.
fn record(trap: &Trap, cpu: &StoppedVcpu<'_>) -> Result<Vec<u8>, SpeculationError> {
    let until = |end: u64| {
        move |at: Gva| match at.0 == end {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(at),
        }
    };
    let start = Gva(trap.address.0 + 1);
    let ((), mut path) = cpu.speculate(start, STEPS, &[], until(LISTENER))?;
    path.put_scratch(Gva(SCRATCH), 64);
    path.enter(Gva(WRITER), SCRATCH, true)?;
    path.follow(STEPS, until(RESERVE))?;
    path.return_at_once(SCRATCH + 32)?;
    path.follow(STEPS, until(COMMIT))?;
    Ok(path.scratch().to_vec())
}

impl TrapSink for Record {
    fn trap(&self, trap: &Trap, cpu: &StoppedVcpu<'_>) {
        *self.found.lock().unwrap() = Some(record(trap, cpu));
    }
}

/// Follows `code` as the function that fills a record.
fn fill(code: &[u8]) -> Result<Vec<u8>, SpeculationError> {
    let sink = Record::default();
    let caller = [&call(FUNCTION + 1, HELPER)[..], &[RET]].concat();
    hit(
        &[(FUNCTION + 1, &caller), (WRITER, code)],
        Box::new(sink.clone()),
    );
    let found = sink.found.lock().unwrap().take();
    found.expect("the place is hit")
}

#[test]
fn a_function_fills_memory_that_the_guest_does_not_have() {
    let to_reserve = call(WRITER, RESERVE);
    // XCHG RDI, RAX; MOV AL, 7; MOV ECX, 5; REP STOSB; LEA RSI, [RDI-3]; MOV ECX, 1;
    // REP MOVSQ.
    let body = [
        0x48, 0x97, 0xb0, 7, 0xb9, 5, 0, 0, 0, 0xf3, 0xaa, 0x48, 0x8d, 0x77, 0xfd, 0xb9, 1, 0, 0,
        0, 0xf3, 0x48, 0xa5,
    ];
    let to_commit = call(WRITER + 5 + body.len() as u64, COMMIT);
    let found = fill(&[&to_reserve[..], &body, &to_commit].concat()).unwrap();
    let mut expected = vec![0; 64];
    expected[32..37].fill(7);
    // Eight bytes from three before the end on: three sevens and five zeros.
    expected[37..40].fill(7);
    assert_eq!(found, expected);
}

#[test]
fn what_cannot_be_followed_is_told() {
    // MOV ECX, -1; REP STOSB.
    let endless = [0xb9, 0xff, 0xff, 0xff, 0xff, 0xf3, 0xaa];
    for (code, part) in [
        (&[RET][..], "returns to 0x0"),
        (&endless, "cannot be written"),
        // STD; MOVSB, downwards.
        (&[0xfd, 0xa4], "is not emulated"),
        // HLT.
        (&[0xf4], "cannot halt"),
    ] {
        let error = fill(code).unwrap_err().to_string();
        assert!(error.contains(part), "{code:02x?}: {error}");
    }
}

//! int3 sites in guest kernel text.
//!
//! Every execution is a hit, the guest's results are as without sites, and a removed site leaves
//! nothing behind.
#![allow(clippy::unwrap_used)]

mod support;

use std::time::{Duration, Instant};

use iced_x86::code_asm::*;
use iced_x86::{Decoder, DecoderOptions, Mnemonic};
use introspect::{Gpa, Gva, PhysicalMemory};
use support::{Guest, LIMIT, SPARE, bare, micro, micro_on, paused_before_program};
use vmm::RunEnd;
use vmm::trap::{ArmError, INT3, SiteId, TrapKind};

/// Returns (hits, hits that were stepped) of a site.
fn hits(guest: &Guest, site: SiteId) -> (u64, u64) {
    let all = guest.machine.traps().hits();
    let found = all.iter().find(|(id, ..)| *id == site);
    found.map_or_else(
        || panic!("no {site:?} in {all:?}"),
        |(_, hits, stepped)| (*hits, *stepped),
    )
}

fn byte(guest: &Guest, at: Gva) -> u8 {
    guest.machine.ram().read_byte(Gpa(at.0)).unwrap()
}

/// Returns the address of an instruction of `code`, which is at `start`.
fn nth_instruction(code: &[u8], start: u64, index: usize) -> Gva {
    let mut decoder = Decoder::with_ip(64, code, start, DecoderOptions::NONE);
    Gva(decoder.iter().nth(index).unwrap().ip())
}

/// Returns the address of the first instruction of its kind in a function.
fn first_of(guest: &Guest, function: &str, mnemonic: Mnemonic) -> Gva {
    let instructions = guest.instructions(function);
    let found = instructions.iter().find(|i| i.mnemonic() == mnemonic);
    Gva(found.unwrap().ip())
}

#[test]
fn each_call_of_a_function_is_one_trap_with_its_argument() {
    let host = host!();
    let mut guest = micro(host, "calls 500");
    let before = guest.text();
    let leaf = guest.symbol("micro_leaf");
    let recorder = guest.record();
    let site = guest.arm_kernel(leaf);
    assert_eq!(byte(&guest, leaf), INT3);
    let mut hidden = [0];
    guest
        .machine
        .traps()
        .read_unpatched(Gpa(leaf.0), &mut hidden)
        .unwrap();
    assert_eq!(
        hidden[0],
        before[(leaf.0 - guest.symbol("micro_start").0) as usize]
    );
    guest.machine.start();
    assert_eq!(guest.count(), 500, "{}", guest.situation());
    assert_eq!(recorder.rdi(), (0..500).collect::<Vec<_>>());
    for seen in recorder.seen() {
        assert_eq!(
            (seen.trap.vcpu, seen.trap.kind, seen.trap.site),
            (0, TrapKind::Kernel, Some(site))
        );
        assert_eq!(
            (seen.trap.address, seen.rip, seen.user_mode),
            (leaf, leaf.0, false)
        );
    }
    assert_eq!(hits(&guest, site), (500, 0));
    assert_eq!(guest.machine.stats().traps, 500);
    assert!(guest.machine.traps().disarm(site));
    assert!(
        !guest.machine.traps().disarm(site),
        "there is nothing left to disarm"
    );
    assert!(guest.text() == before, "a byte of the text has changed");
}

#[test]
fn two_users_share_a_site_until_both_have_left() {
    let host = host!();
    let mut guest = micro(host, "calls 100");
    let leaf = guest.symbol("micro_leaf");
    let before = byte(&guest, leaf);
    let (traps, space) = (guest.machine.traps(), guest.space());
    let first = traps.arm_kernel(leaf, space).unwrap();
    let second = traps.arm_kernel(leaf, space).unwrap();
    assert_eq!(first, second);
    assert!(traps.disarm(first));
    assert_eq!(byte(&guest, leaf), INT3, "the second user still wants it");
    guest.machine.start();
    assert_eq!(guest.count(), 100);
    assert_eq!(
        hits(&guest, second).0,
        100,
        "one hit a call, however many users"
    );
    assert!(guest.machine.traps().disarm(second));
    assert_eq!(byte(&guest, leaf), before);
}

#[test]
fn a_site_on_every_instruction_of_a_function_changes_nothing() {
    let host = host!();
    for (program, function, count) in [
        ("step 60", "micro_step", 60),
        ("nested 20", "micro_recurse", 100),
    ] {
        let mut guest = micro(host, program);
        let before = guest.text();
        let space = guest.space();
        let instructions = guest.instructions(function);
        let arm = |i: &iced_x86::Instruction| {
            guest
                .machine
                .traps()
                .arm_kernel(Gva(i.ip()), space)
                .unwrap()
        };
        let sites: Vec<SiteId> = instructions.iter().map(arm).collect();
        guest.machine.start();
        assert_eq!(guest.count(), count, "{program}: {}", guest.situation());
        for (site, instruction) in sites.iter().zip(&instructions) {
            // The innermost of five entries does not call.
            let expected = match (function, instruction.mnemonic()) {
                ("micro_recurse", Mnemonic::Call) => count - count / 5,
                _ => count,
            };
            assert_eq!(hits(&guest, *site).0, expected, "{program}, {instruction}");
            guest.machine.traps().disarm(*site);
        }
        assert!(
            guest.text() == before,
            "{program}: a byte of the text has changed"
        );
    }
}

/// Tests instructions that are stepped, not emulated, between others in a loop of 50 rounds.
#[test]
fn an_instruction_that_is_not_emulated_is_stepped() {
    let host = host!();
    type Write = fn(&mut CodeAssembler);
    const ROUNDS: u64 = 50;
    let cases: [(&str, Write); 7] = [
        ("out", |a| a.out(0x80, al).unwrap()),
        ("in", |a| a.in_(al, 0x61).unwrap()),
        ("mov from cr", |a| a.mov(rax, cr3).unwrap()),
        ("mov to cr", |a| a.mov(cr3, rsi).unwrap()),
        ("rep stos", |a| a.rep().stosq().unwrap()),
        ("rdmsr", |a| a.rdmsr().unwrap()),
        ("ltr-free segment load", |a| a.mov(es, r8d).unwrap()),
    ];
    for (name, instruction) in cases {
        let mut place = 0;
        let kernel = bare::kernel(|a| {
            let mut again = a.create_label();
            a.mov(ebx, ROUNDS as u32).unwrap();
            a.xor(ebp, ebp).unwrap();
            a.mov(rsi, cr3).unwrap();
            a.mov(r8d, ds).unwrap();
            a.set_label(&mut again).unwrap();
            a.mov(
                ecx,
                if name == "rdmsr" {
                    0xc000_0080u32
                } else {
                    40u32
                },
            )
            .unwrap();
            a.mov(edi, 0x10_2000).unwrap();
            a.inc(rbp).unwrap();
            place = a.instructions().len();
            instruction(a);
            a.inc(rbp).unwrap();
            a.dec(ebx).unwrap();
            a.jnz(again).unwrap();
            bare::reset(a);
        });
        let mut guest = Guest::boot(host, kernel, "", 1);
        let site = run_with_site(&mut guest, place, name);
        assert_eq!(
            hits(&guest, site),
            (ROUNDS, ROUNDS),
            "{name}: {}",
            guest.situation()
        );
        let paused = guest.machine.pause();
        let registers = guest.machine.registers(&paused, 0).unwrap();
        assert_eq!(registers.regs.rbp, 2 * ROUNDS, "{name}");
    }
}

/// Tests that a pause does not wait for the interrupt that ends a HLT.
#[test]
fn a_site_on_hlt_neither_stops_the_guest_nor_a_pause() {
    let host = host!();
    // Whenever a pause comes, the interrupt that ends a HLT must still arrive.
    const TICKS: u64 = 60;
    let mut guest = micro(host, &format!("tick {TICKS}"));
    let site = guest.arm_kernel(first_of(&guest, "micro_tick", Mnemonic::Hlt));
    guest.machine.start();
    while guest.machine.wait(Some(Duration::ZERO)).is_none() {
        drop(guest.machine.pause());
        std::thread::sleep(Duration::from_micros(700));
    }
    assert_eq!(guest.count(), TICKS);
    assert!(hits(&guest, site).0 > 0, "{}", guest.situation());

    let mut guest = micro_on(host, "dead", 2);
    guest.arm_kernel(first_of(&guest, "micro_dead", Mnemonic::Hlt));
    guest.machine.start();
    guest.wait_for("micro: dead 1\n");
    let before = Instant::now();
    drop(guest.machine.pause());
    assert!(before.elapsed() < LIMIT);
    assert!(
        matches!(guest.end(), RunEnd::Halted),
        "{}",
        guest.situation()
    );
}

/// Tests kernel code in the place of `calls` that writes to the two pages that the guest maps in
/// turn, so that each write faults.
#[test]
fn a_displaced_instruction_that_faults_is_one_hit_and_the_guests_own_fault() {
    let host = host!();
    const WRITES: u32 = 40;
    for string in [false, true] {
        let (guest, paused) = paused_before_program(host, "calls 1", 1);
        let mut a = CodeAssembler::new(64).unwrap();
        let mut again = a.create_label();
        a.mov(ebx, WRITES).unwrap();
        a.mov(edi, 0x10_e000).unwrap();
        a.set_label(&mut again).unwrap();
        a.mov(ecx, 1).unwrap();
        let place = a.instructions().len();
        if string {
            a.rep().stosq().unwrap();
            a.sub(rdi, 8).unwrap();
        } else {
            a.mov(qword_ptr(rdi), rbx).unwrap();
        }
        a.xor(edi, 0x1000).unwrap();
        a.dec(ebx).unwrap();
        a.jnz(again).unwrap();
        a.ret().unwrap();
        let code = a.assemble(SPARE).unwrap();
        guest.write(SPARE, &code);
        guest.write_jump(guest.symbol("micro_calls").0, SPARE);
        let site = guest.arm_kernel(nth_instruction(&code, SPARE, place));
        drop(paused);
        assert_eq!(
            guest.count(),
            u64::from(WRITES),
            "faults the guest has counted: {}",
            guest.situation()
        );
        assert_eq!(
            hits(&guest, site).0,
            u64::from(WRITES),
            "string: {string}; {}",
            guest.situation()
        );
        assert_eq!(guest.machine.stats().traps, u64::from(WRITES));
        assert_eq!(
            guest.variable("micro_debug_count"),
            0,
            "the step shows in the guest"
        );
    }
}

/// Arms the instruction at `place` of a bare kernel and runs the guest to its reset.
fn run_with_site(guest: &mut Guest, place: usize, name: &str) -> SiteId {
    let mut code = [0; 128];
    let ram = guest.machine.ram();
    ram.read_physical(Gpa(bare::START), &mut code).unwrap();
    let site = guest.arm_kernel(nth_instruction(&code, bare::START, place));
    guest.machine.start();
    let end = guest.end();
    assert!(
        matches!(end, RunEnd::Reset { .. }),
        "{name}: {end}; {}",
        guest.situation()
    );
    site
}

/// Tests masking behind STI. VMX does not enter a guest whose interrupts are masked and held off by
/// STI as well.
#[test]
fn interrupts_are_masked_by_a_displaced_instruction_behind_sti() {
    let host = host!();
    const ROUNDS: u64 = 50;
    type Write = fn(&mut CodeAssembler);
    let cases: [(&str, Write); 2] = [
        ("cli", |a| a.cli().unwrap()),
        ("popf", |a| a.popfq().unwrap()),
    ];
    for (name, mask) in cases {
        let mut place = 0;
        let kernel = bare::kernel(|a| {
            let mut again = a.create_label();
            a.mov(ebx, ROUNDS as u32).unwrap();
            a.cli().unwrap();
            a.set_label(&mut again).unwrap();
            a.mov(rbp, rsp).unwrap();
            a.pushfq().unwrap();
            a.sti().unwrap();
            place = a.instructions().len();
            mask(a);
            a.mov(rsp, rbp).unwrap();
            a.dec(ebx).unwrap();
            a.jnz(again).unwrap();
            bare::reset(a);
        });
        let mut guest = Guest::boot(host, kernel, "", 1);
        let site = run_with_site(&mut guest, place, name);
        assert_eq!(hits(&guest, site), (ROUNDS, 0), "{name}");
    }
}

/// Tests that interrupts come between a `nop` and a `cli` alone, not between STI and the `nop`.
#[test]
fn interrupts_come_behind_a_displaced_instruction_that_sti_precedes() {
    let host = host!();
    const TICKS: i32 = 3;
    let (guest, paused) = paused_before_program(host, "calls 1", 1);
    let ticks = guest.symbol("micro_ticks").0;
    let start_timer = guest.symbol("micro_start_timer").0;
    let mut a = CodeAssembler::new(64).unwrap();
    let mut again = a.create_label();
    a.call(start_timer).unwrap();
    a.set_label(&mut again).unwrap();
    a.sti().unwrap();
    let place = a.instructions().len();
    a.nop().unwrap();
    a.cli().unwrap();
    a.cmp(qword_ptr(ticks as i32), TICKS).unwrap();
    a.jb(again).unwrap();
    a.ret().unwrap();
    let code = a.assemble(SPARE).unwrap();
    guest.write(SPARE, &code);
    guest.write_jump(guest.symbol("micro_calls").0, SPARE);
    let site = guest.arm_kernel(nth_instruction(&code, SPARE, place));
    drop(paused);
    let end = guest.end();
    assert!(
        matches!(end, RunEnd::Reset { .. }),
        "{end}; {}",
        guest.situation()
    );
    let (all, stepped) = hits(&guest, site);
    assert!(all > 0 && stepped == 0, "{}", guest.situation());
}

#[test]
fn an_exception_of_the_displaced_instruction_reaches_the_guest() {
    let host = host!();
    let mut guest = micro(host, "triple");
    let ud2 = first_of(&guest, "micro_triple", Mnemonic::Ud2);
    let site = guest.arm_kernel(ud2);
    guest.machine.start();
    let end = guest.end();
    let RunEnd::TripleFault { registers, .. } = &end else {
        panic!("{end}; {}", guest.situation())
    };
    assert_eq!(
        registers.is_some(),
        host.profile.triple_fault_keeps_registers
    );
    if let Some(registers) = registers {
        assert_eq!(registers.regs.rip, ud2.0);
    }
    assert_eq!(hits(&guest, site).0, 1);
}

/// Tests a handler whose first instruction faults, with a site on it. The guest loops for ever, and
/// the host does not recurse with it.
#[test]
fn a_site_in_a_handler_that_faults_itself_is_only_a_busy_guest() {
    let host = host!();
    let (guest, paused) = paused_before_program(host, "fault 1", 1);
    // The handler's `nop` becomes a read of the page that is not present. Every round faults again
    // on a lower stack.
    let entry = guest.symbol("micro_page_fault_entry");
    let code = [&[0x48, 0x8b, 0x04, 0x25][..], &0x10_e000u32.to_le_bytes()].concat();
    guest.write(entry.0, &code);
    let site = guest.arm_kernel(entry);
    drop(paused);
    guest.wait_until("gone round", || {
        hits(&guest, site).0 > 20 || guest.machine.wait(Some(Duration::ZERO)).is_some()
    });
    drop(guest.machine.pause());
    if let Some(end) = guest.machine.wait(Some(Duration::ZERO)) {
        assert!(!end.to_string().contains("panicked"), "{end}");
    }
}

#[test]
fn what_cannot_be_armed_says_why() {
    let host = host!();
    let guest = micro(host, "calls 1");
    let space = guest.space();
    let traps = guest.machine.traps();
    let not_mapped = traps
        .arm_kernel(Gva(0xffff_8000_0000_0000), space)
        .unwrap_err();
    assert!(
        matches!(not_mapped, ArmError::NotMapped { .. }),
        "{not_mapped}"
    );
    assert!(
        not_mapped.to_string().contains("0xffff800000000000"),
        "{not_mapped}"
    );
    let not_ram = traps.arm_kernel(Gva(support::MEMORY), space).unwrap_err();
    assert!(matches!(not_ram, ArmError::NotRam { .. }), "{not_ram}");
    // 0x06 (PUSH ES) is no instruction in 64-bit mode.
    guest.write(SPARE, &[0x06; 16]);
    let none = traps.arm_kernel(Gva(SPARE), space).unwrap_err();
    assert!(matches!(none, ArmError::NoInstruction { .. }), "{none}");
    assert!(none.to_string().contains("06 06"), "{none}");
    assert!(traps.hits().is_empty());
    assert_eq!(
        byte(&guest, Gva(SPARE)),
        0x06,
        "a refused site leaves its byte alone"
    );
}

/// Tests a kernel with a probe of its own at the address of one of ours: both see every hit.
#[test]
fn a_site_on_an_int3_of_the_guest_is_hit_and_the_guest_gets_its_own() {
    let host = host!();
    let mut guest = micro(host, "int3k 40");
    let own = first_of(&guest, "micro_int3", Mnemonic::Int3);
    let site = guest
        .machine
        .traps()
        .arm_kernel(own, guest.space())
        .unwrap();
    guest.machine.start();
    assert_eq!(guest.count(), 40, "the guest has handled each of its own");
    assert_eq!(hits(&guest, site).0, 40);
    assert!(guest.machine.traps().disarm(site));
    assert_eq!(byte(&guest, own), INT3);
}

/// A generator of repeatable numbers (SplitMix64).
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (x ^ (x >> 31)) % limit
    }
}

#[test]
fn arming_and_removing_while_the_guest_runs_through_it_changes_nothing() {
    let host = host!();
    for (program, cpus, count) in [("calls 30000", 1u8, 30_000), ("smp 15000 2", 2, 30_000)] {
        let mut guest = micro_on(host, program, cpus);
        let before = guest.text();
        let space = guest.space();
        let mut places: Vec<Gva> = guest
            .instructions("micro_leaf")
            .iter()
            .map(|i| Gva(i.ip()))
            .collect();
        places.extend(
            guest
                .instructions("micro_call_loop")
                .iter()
                .skip(2)
                .map(|i| Gva(i.ip())),
        );
        let mut random = Random(0xe807_ace5);
        let mut armed: Vec<SiteId> = Vec::new();
        // Armed before the guest runs, so that it is hit however late this thread gets its next
        // turn.
        armed.push(guest.machine.traps().arm_kernel(places[0], space).unwrap());
        guest.machine.start();
        guest.wait_until("hit", || guest.machine.stats().traps > 0);
        let mut rounds = 0;
        while rounds < 2000 && guest.machine.wait(Some(Duration::ZERO)).is_none() {
            rounds += 1;
            let traps = guest.machine.traps();
            if armed.len() < 3 && random.below(2) == 0 {
                let place = places[random.below(places.len() as u64) as usize];
                armed.push(traps.arm_kernel(place, space).unwrap());
            } else if !armed.is_empty() {
                let index = random.below(armed.len() as u64) as usize;
                assert!(traps.disarm(armed.swap_remove(index)));
            }
            if random.below(4) == 0 {
                std::thread::sleep(Duration::from_micros(random.below(60)));
            }
        }
        for site in armed {
            assert!(guest.machine.traps().disarm(site));
        }
        assert_eq!(
            guest.count(),
            count,
            "{program} after {rounds} rounds: {}",
            guest.situation()
        );
        assert_eq!(
            guest.machine.stats().guest_int3,
            0,
            "no int3 of ours is the guest's"
        );
        assert!(
            guest.text() == before,
            "{program}: a byte of the text has changed"
        );
    }
}

/// Tests removal of a stepped site, whose int3 is removed and restored at each step.
#[test]
fn removing_a_site_that_is_being_stepped_leaves_no_int3() {
    let host = host!();
    let kernel = bare::kernel(|a| {
        let mut again = a.create_label();
        a.set_label(&mut again).unwrap();
        a.mov(rax, cr3).unwrap();
        a.jmp(again).unwrap();
    });
    let mut guest = Guest::boot(host, kernel, "", 1);
    let space = guest.space();
    let original = byte(&guest, Gva(bare::START));
    guest.machine.start();
    let deadline = Instant::now() + Duration::from_millis(700);
    let mut random = Random(7);
    let mut rounds = 0;
    // At least this many rounds, however slow the host is.
    while Instant::now() < deadline || rounds < 20 {
        rounds += 1;
        let site = guest
            .machine
            .traps()
            .arm_kernel(Gva(bare::START), space)
            .unwrap();
        for _ in 0..random.below(2000) {
            std::hint::spin_loop();
        }
        guest.machine.traps().disarm(site);
        let paused = guest.machine.pause();
        let now = byte(&guest, Gva(bare::START));
        drop(paused);
        assert_eq!(
            now,
            original,
            "round {rounds}: a stray byte; {}",
            guest.situation()
        );
        assert!(
            guest.machine.wait(Some(Duration::ZERO)).is_none(),
            "round {rounds}: {}",
            guest.situation()
        );
    }
}

#[test]
fn the_guests_own_int3s_stay_its_own_beside_a_site() {
    let host = host!();
    let mut guest = micro(host, "int3k 200");
    let print = guest.symbol("micro_print_decimal");
    let site = guest.arm_kernel(print);
    guest.machine.start();
    assert_eq!(guest.count(), 200, "{}", guest.situation());
    assert_eq!(guest.machine.stats().guest_int3, 200);
    assert_eq!(hits(&guest, site).0, 2, "both lines with a number");
}

//! A hostile guest: with any values in its registers and tables, its run ends or goes on, and the
//! host is not harmed.
#![allow(clippy::unwrap_used)]

mod support;

use std::time::Duration;

use iced_x86::code_asm::*;
use introspect::{Gpa, Gva};
use support::{Guest, Host, SPARE, bare, paused_before_program};
use vmm::RunEnd;

/// Boots a bare kernel and runs it to its end.
fn run(host: &Host, write: impl FnOnce(&mut CodeAssembler)) -> RunEnd {
    let mut guest = Guest::boot(host, bare::kernel(write), "", 1);
    guest.machine.start();
    let end = guest.end();
    assert!(!end.to_string().contains("panicked"), "{end}");
    end
}

fn wrmsr(a: &mut CodeAssembler, index: u32, value: u64) {
    a.mov(ecx, index).unwrap();
    a.mov(eax, value as u32).unwrap();
    a.mov(edx, (value >> 32) as u32).unwrap();
    a.wrmsr().unwrap();
}

/// Loads an interrupt descriptor table of 4096 bytes at `base`.
fn lidt(a: &mut CodeAssembler, base: u64) {
    a.mov(rax, base).unwrap();
    a.push(rax).unwrap();
    a.sub(rsp, 2).unwrap();
    a.mov(word_ptr(rsp), 0xfff).unwrap();
    a.lidt(ptr(rsp)).unwrap();
}

const STAR: u32 = 0xc000_0081;
const LSTAR: u32 = 0xc000_0082;

#[test]
fn a_descriptor_table_anywhere_does_no_harm() {
    let host = host!();
    for base in [
        0,
        0x10_0000,
        0x3f_fff8,
        0xffff_ffff_ffff_ff80,
        0xffff_ffff_ffff_fff8,
        0xdead_0000,
        0xffff_8000_0000_0000,
    ] {
        // Setting up SYSCALL makes a host that repairs it read the page-fault gate.
        let end = run(host, |a| {
            lidt(a, base);
            wrmsr(a, LSTAR, 0xffff_ffff_8000_0000);
            a.int3().unwrap();
            bare::reset(a);
        });
        let expected = matches!(end, RunEnd::TripleFault { .. } | RunEnd::Reset { .. });
        assert!(expected, "table at {base:#x}: {end}");
    }
}

/// Tests an instruction that nobody executes. The guest takes #UD, for which it has no handler
/// here.
#[test]
fn an_instruction_that_nobody_executes_is_the_guests_own_exception() {
    let host = host!();
    let instructions: [&[u8]; 4] = [
        &[0xc5, 0xfc, 0x58, 0xc1],       // vaddps ymm0, ymm0, ymm1: not switched on
        &[0xd9, 0xfe],                   // fsin, with CR0.EM set
        &[0x0f, 0x0b],                   // ud2
        &[0x66, 0x66, 0x66, 0x0f, 0xff], // ud0, cut short
    ];
    for bytes in instructions {
        let end = run(host, |a| {
            a.mov(rax, cr0).unwrap();
            a.or(rax, 4).unwrap();
            a.mov(cr0, rax).unwrap();
            a.db(bytes).unwrap();
            bare::reset(a);
        });
        assert!(
            matches!(end, RunEnd::TripleFault { .. }),
            "{bytes:02x?}: {end}"
        );
    }
}

#[test]
fn any_value_of_the_syscall_registers_does_no_harm() {
    let host = host!();
    for (index, value) in [
        (STAR, u64::MAX),
        (STAR, 0xffff_ffff_0000_0000),
        (LSTAR, 0),
        (LSTAR, 0x1234),
        (0xc000_0084, u64::from(u32::MAX)),
    ] {
        let end = run(host, |a| {
            wrmsr(a, index, value);
            bare::reset(a);
        });
        assert!(
            matches!(end, RunEnd::Reset { .. } | RunEnd::Host { .. }),
            "{index:#x} = {value:#x}: {end}"
        );
    }
    // Not an address: #GP, which ends the run because there is no table to handle it.
    let end = run(host, |a| {
        wrmsr(a, LSTAR, 0x8000_0000_0000_0000);
        bare::reset(a);
    });
    assert!(matches!(end, RunEnd::TripleFault { .. }), "{end}");
}

/// Tests the selectors that a repaired SYSCALL takes from STAR.
#[test]
fn system_calls_with_a_wild_star_end_the_guest_at_most() {
    let host = host!();
    let (guest, paused) = paused_before_program(host, "syscalls 5", 1);
    // In place of the program: the kernel writes STAR and calls it again.
    let mut code = CodeAssembler::new(64).unwrap();
    wrmsr(&mut code, STAR, u64::MAX);
    code.mov(esi, guest.symbol("micro_user_syscalls").0 as u32)
        .unwrap();
    code.mov(edi, 5).unwrap();
    code.mov(rax, guest.symbol("micro_enter_user").0).unwrap();
    code.jmp(rax).unwrap();
    let code = code.assemble(SPARE).unwrap();
    guest.write(SPARE, &code);
    guest.write_jump(guest.symbol("micro_start_user_syscalls").0, SPARE);
    drop(paused);
    let end = guest.machine.wait(Some(Duration::from_secs(3)));
    if let Some(end) = &end {
        assert!(!end.to_string().contains("panicked"), "{end}");
    }
    drop(guest.machine.pause());
}

/// Tests the stack pointer from which the exception entries read their frame.
#[test]
fn a_wild_stack_at_the_guests_entries_does_no_harm() {
    let host = host!();
    for program in ["fault 5", "int3u 5"] {
        for stack in [
            0u64,
            0x10,
            0xffff_ffff_ffff_fff0,
            0x7fff_ffff_fff8,
            0xd000_0000,
            support::MEMORY - 8,
        ] {
            let (guest, paused) = paused_before_program(host, program, 1);
            guest.arm_user(guest.symbol("micro_user_leaf"));
            // RSP0 of the task-state segment.
            let tss = guest.symbol("micro_gdt").0 + 0x90;
            guest.write(tss + 4, &stack.to_le_bytes());
            drop(paused);
            let end = guest.machine.wait(Some(Duration::from_secs(2)));
            if let Some(end) = &end {
                assert!(
                    !end.to_string().contains("panicked"),
                    "{program}, stack {stack:#x}: {end}"
                );
            }
            drop(guest.machine.pause());
        }
    }
}

/// Tests that a guest that overwrites its text under a site has its own bytes afterwards.
#[test]
fn text_that_the_guest_rewrites_under_a_site_is_the_guests() {
    let host = host!();
    let mut guest = Guest::boot(
        host,
        bare::kernel(|a| {
            let mut target = a.create_label();
            a.lea(rdi, ptr(target)).unwrap();
            a.mov(byte_ptr(rdi), 0xf8).unwrap(); // clc
            a.call(target).unwrap();
            bare::reset(a);
            a.set_label(&mut target).unwrap();
            a.nop().unwrap();
            a.ret().unwrap();
        }),
        "",
        1,
    );
    let mut code = [0; 64];
    introspect::PhysicalMemory::read_physical(guest.machine.ram(), Gpa(bare::START), &mut code)
        .unwrap();
    let target = bare::START + code.iter().rposition(|b| *b == 0x90).unwrap() as u64;
    let site = guest.arm_kernel(Gva(target));
    guest.machine.start();
    assert!(
        matches!(guest.end(), RunEnd::Reset { .. }),
        "{}",
        guest.situation()
    );
    assert!(guest.machine.disarm(site));
    assert_eq!(guest.machine.ram().read_byte(Gpa(target)).unwrap(), 0xf8);
}

/// Tests text mapped a second time: the site's one byte is hit at another address.
#[test]
fn a_site_is_hit_through_another_mapping_of_its_page() {
    let host = host!();
    let (guest, paused) = paused_before_program(host, "usercalls 50", 1);
    let leaf = guest.symbol("micro_user_leaf");
    let recorder = guest.record();
    guest.arm_user(leaf);
    // Page 0x10e000 of the user's is not mapped at first. Now it maps the user's text once more.
    let page = leaf.0 & !0xfff;
    let alias = 0x10_e000u64;
    let entry = 0x10_9000 + (alias >> 12) * 8;
    guest.write(entry, &(page | 0x67).to_le_bytes());
    // `mov esi, program` in the function that starts it.
    let start = guest.symbol("micro_start_user_calls").0;
    let program = guest.symbol("micro_user_calls").0 - page + alias;
    guest.write(start + 1, &(program as u32).to_le_bytes());
    drop(paused);
    // The program's exit path knows only the original address, so the guest then reports a trap and
    // resets.
    assert!(
        matches!(guest.end(), RunEnd::Reset { .. }),
        "{}",
        guest.situation()
    );
    assert_eq!(
        recorder.rdi(),
        (0..50).collect::<Vec<_>>(),
        "{}",
        guest.situation()
    );
    assert!(
        recorder
            .seen()
            .iter()
            .all(|s| s.rip == leaf.0 - page + alias)
    );
}

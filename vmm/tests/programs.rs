//! The micro guest's programs on a machine without traps.
//!
//! Each runs to its own right count, whatever the host's KVM lacks. The end of a run reports its
//! cause.
#![allow(clippy::unwrap_used)]

mod support;

use std::time::Duration;

use introspect::Gva;
use introspect::x86_64::paging::AddressSpace;
use introspect::x86_64::virtual_memory::read_u64;
use support::{config, micro, micro_kernel, micro_on, running};
use vmm::boot::{BootError, EntryProtocol};
use vmm::machine::{Handle, MachineError, PanicReport, PanicWitness};
use vmm::{MachineConfig, RunEnd};

#[test]
fn every_program_that_ends_counts_right() {
    let host = host!();
    let cases = [
        ("calls 2000", 1, 2000),
        ("nested 100", 1, 500),
        ("out 500", 1, 500),
        ("usermmio 300", 1, 300),
        ("syscalls 300", 1, 300),
        ("usercalls 100000", 1, 100_000),
        ("int3k 100", 1, 100),
        ("int3u 100", 1, 100),
        ("ud 100", 1, 100),
        ("fault 100", 1, 100),
        ("step 200", 1, 200),
        ("tick 5", 1, 5),
        ("smp 1000 2", 2, 2000),
        ("tempty 50", 1, 50),
        ("tout 50", 1, 50),
        ("tcall 50", 1, 50),
        ("tstep 50", 1, 50),
        ("tnop 50", 1, 50),
        ("tunop 50", 1, 50),
        ("tnested 50", 1, 50),
        ("tuempty 70000", 1, 70_000),
        ("tucall 50", 1, 50),
        ("tmmio 50", 1, 50),
        ("uloop 50", 1, 50),
        ("sysloop 50", 1, 50),
    ];
    for (command_line, cpus, count) in cases {
        let mut guest = micro_on(host, command_line, cpus);
        guest.machine.start();
        assert_eq!(
            guest.count(),
            count,
            "{command_line}: {}",
            guest.situation()
        );
    }
}

#[test]
fn a_program_gets_what_is_typed() {
    let host = host!();
    let guest = running(host, "echo");
    guest.wait_for("micro: echo 1\n");
    for line in ["one\n", "and two\n", "quit\n"] {
        let mut rest = line.as_bytes();
        while !rest.is_empty() {
            let taken = guest.machine.serial_input(rest);
            rest = &rest[taken..];
            std::thread::yield_now();
        }
    }
    assert_eq!(guest.count(), 2);
    assert!(
        guest.serial.text().contains("one\nand two\n"),
        "{}",
        guest.situation()
    );
}

#[test]
fn each_end_says_how_it_came() {
    let host = host!();
    let guest = running(host, "dead");
    assert!(
        matches!(guest.end(), RunEnd::Halted),
        "{}",
        guest.situation()
    );

    let guest = running(host, "triple");
    let end = guest.end();
    let RunEnd::TripleFault { vcpu: 0, registers } = &end else {
        panic!("{end}")
    };
    let function = guest.symbol("micro_triple").0;
    assert_eq!(
        registers.is_some(),
        host.profile.triple_fault_keeps_registers
    );
    if let Some(registers) = registers {
        let place = registers.regs.rip;
        assert!(
            (function..function + 16).contains(&place),
            "{end}: {registers}"
        );
    }
    assert!(!end.is_orderly());

    let guest = running(host, "calls 1");
    let RunEnd::Reset { cause: Some(cause) } = guest.end() else {
        panic!("{}", guest.situation())
    };
    assert!(cause.contains("keyboard"), "{cause}");

    let guest = running(host, "spin");
    guest.wait_for("micro: spin 1\n");
    guest.machine.stop();
    assert!(matches!(guest.end(), RunEnd::Stopped));
}

#[test]
fn a_place_that_the_host_does_not_keep_is_not_told() {
    let host = host!();
    let mut profile = host.profile.clone();
    profile.triple_fault_keeps_registers = false;
    let kernel = micro_kernel();
    let booted = vmm::machine::boot(&host.kvm, &profile, config(&kernel, "triple"));
    let mut machine = booted.unwrap().machine;
    machine.start();
    let end = machine.wait(Some(support::LIMIT)).unwrap();
    assert!(
        matches!(
            end,
            RunEnd::TripleFault {
                vcpu: 0,
                registers: None
            }
        ),
        "{end:?}"
    );
    assert!(end.to_string().contains("not known"), "{end}");
}

#[test]
fn the_first_reason_of_an_end_counts() {
    let host = host!();
    let guest = running(host, "triple");
    assert!(matches!(guest.end(), RunEnd::TripleFault { .. }));
    guest.machine.stop();
    assert!(matches!(guest.end(), RunEnd::TripleFault { .. }));
}

/// Tests with `micro_leaf` in place of a kernel's `panic`.
#[test]
fn a_panic_is_reported_with_its_registers_once_the_guest_resets() {
    let host = host!();
    let mut guest = micro(host, "calls 3");
    let function = guest.symbol("micro_leaf");
    guest.machine.watch_panic(function, guest.space()).unwrap();
    guest.machine.start();
    let RunEnd::Panic(report) = guest.end() else {
        panic!("{}", guest.situation())
    };
    let registers = report.registers.unwrap();
    assert_eq!(
        (report.vcpu, registers.regs.rip, registers.regs.rdi),
        (Some(0), function.0, 0)
    );
    assert!(
        guest.serial.text().contains("micro: count 3\n"),
        "the guest goes on: {}",
        guest.situation()
    );
}

/// A witness that reports a panic once the guest has counted to a number.
struct Counted {
    count: Gva,
    space: AddressSpace,
    at_least: u64,
}

impl PanicWitness for Counted {
    fn look(&self, machine: &Handle, _ended: bool) -> Option<PanicReport> {
        let count = read_u64(machine.ram(), self.space, self.count).ok()?;
        (count >= self.at_least).then(|| PanicReport {
            text: Some("counted enough".into()),
            ..PanicReport::default()
        })
    }

    fn patience(&self) -> Duration {
        Duration::from_secs(1)
    }
}

#[test]
fn a_panic_that_only_memory_shows_is_reported_however_the_run_ends() {
    let host = host!();
    for (program, at_least, expected) in [
        (
            "calls 3",
            4,
            "guest reset by keyboard controller (port 0x64)",
        ),
        ("calls 3", 3, "guest kernel panic: counted enough"),
        ("dead", 0, "guest kernel panic: counted enough"),
        ("triple", 0, "guest kernel panic: counted enough"),
        // Runs for ever, like a panicked kernel that is not to reboot.
        ("spin", 0, "guest kernel panic: counted enough"),
    ] {
        let mut guest = micro(host, program);
        let witness = Counted {
            count: guest.symbol("micro_count"),
            space: guest.space(),
            at_least,
        };
        guest.machine.set_panic_witness(Box::new(witness));
        guest.machine.start();
        let end = guest.end();
        let told = match &end {
            RunEnd::Panic(PanicReport {
                text: Some(text), ..
            }) => format!("{end}: {text}"),
            end => end.to_string(),
        };
        assert_eq!(told, expected, "{program}: {}", guest.situation());
        assert_eq!(end.is_orderly(), at_least == 4);
    }
}

#[test]
fn a_machine_that_is_stopped_after_its_panic_tells_of_it() {
    let host = host!();
    let mut guest = micro(host, "spin");
    let witness = Counted {
        count: guest.symbol("micro_count"),
        space: guest.space(),
        at_least: 0,
    };
    guest.machine.set_panic_witness(Box::new(witness));
    guest.machine.start();
    guest.wait_for("micro: spin 1\n");
    guest.machine.stop();
    assert!(matches!(guest.end(), RunEnd::Panic(_)));
}

#[test]
fn a_kernel_without_pvh_note_is_refused_for_pvh_only() {
    let host = host!();
    let kernel = micro_kernel();
    let boot = |protocol| {
        vmm::machine::boot(
            &host.kvm,
            &host.profile,
            MachineConfig {
                protocol,
                ..config(&kernel, "calls 1")
            },
        )
    };
    let error = boot(Some(EntryProtocol::Pvh)).err().unwrap();
    assert!(
        matches!(error, MachineError::Boot(BootError::NoPvhEntry)),
        "{error}"
    );
    assert!(error.to_string().contains("64-bit entry"), "{error}");
    boot(Some(EntryProtocol::Linux64)).unwrap();
}

//! The ACPI registers of a machine: power-off, reset, and the power button, also after a restore.
#![allow(clippy::unwrap_used)]

mod support;

use std::path::Path;

use guest::elf::{Load, program};
use support::{Host, LIMIT, config};
use vmm::boot::{AcpiConfig, AcpiError, BootError, KernelFile, place};
use vmm::machine::{MachineError, VirtioConfig};
use vmm::snapshot::{RestoredDisks, SnapshotInfo, restore, save};
use vmm::{Machine, MachineConfig, RunEnd};

/// `mov dx, PORT; mov al, VALUE; out dx, al; hlt`, with interrupts off.
const fn write(port: u16, value: u8) -> [u8; 8] {
    let [low, high] = port.to_le_bytes();
    [0x66, 0xba, low, high, 0xb0, value, 0xee, 0xf4]
}

/// `mov dx, 0x603; wait: in al, dx; test al, 1; jz wait`.
const WAIT_FOR_BUTTON: [u8; 9] = [0x66, 0xba, 0x03, 0x06, 0xec, 0xa8, 0x01, 0x74, 0xfb];
/// The sleep type of S5 and SLP_EN, to the sleep control register.
const POWER_OFF: [u8; 8] = write(0x600, 5 << 2 | 0x20);

fn kernel(code: &[u8]) -> KernelFile {
    let segment = Load {
        offset: 120,
        address: place::HIGH_MEMORY,
        size: code.len() as u64,
        memory: 0x1000,
    };
    let elf = program(place::HIGH_MEMORY, &[segment], code).unwrap();
    KernelFile::from_bytes(elf, Path::new("kernel")).unwrap()
}

fn machine(host: &Host, code: &[u8], acpi: Option<AcpiConfig>) -> Machine {
    let kernel = kernel(code);
    let asked = MachineConfig {
        acpi,
        ..config(&kernel, "")
    };
    let booted = vmm::machine::boot(&host.kvm, &host.profile, asked).unwrap();
    booted.machine
}

fn end(machine: &mut Machine) -> RunEnd {
    machine.start();
    machine.wait(Some(LIMIT)).expect("an end")
}

#[test]
fn a_guest_powers_off_and_resets_by_the_registers() {
    let host = host!();
    let with = Some(AcpiConfig::new(1));
    let mut off = machine(host, &POWER_OFF, with);
    let off = end(&mut off);
    assert!(matches!(off, RunEnd::PoweredOff), "{off}");
    assert!(off.is_orderly());
    let mut reset = machine(host, &write(0x602, 1), with);
    let reset = end(&mut reset);
    assert_eq!(reset.to_string(), "guest reset by ACPI reset register");
    // Without ACPI there is nothing at these ports.
    let mut without = machine(host, &POWER_OFF, None);
    assert!(!without.press_power_button());
    let halted = end(&mut without);
    assert!(matches!(halted, RunEnd::Halted), "{halted}");
}

#[test]
fn a_press_of_the_power_button_reaches_the_guest_also_after_a_restore() {
    let host = host!();
    let code = [&WAIT_FOR_BUTTON[..], &POWER_OFF[..]].concat();
    let mut first = machine(host, &code, Some(AcpiConfig::new(1)));
    assert!(first.press_power_button());
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path().join("snapshot");
    let info = SnapshotInfo {
        command_line: String::new(),
        kernel: None,
    };
    save(&host.kvm, &first, &info, &folder).unwrap();
    let pressed = end(&mut first);
    assert!(matches!(pressed, RunEnd::PoweredOff), "{pressed}");
    let disks = RestoredDisks::Named(Vec::new());
    let serial = devices::ConsoleOutput::null();
    let restored = restore(&host.kvm, &host.profile, &folder, &disks, serial).unwrap();
    let mut second = restored.machine;
    let pressed = end(&mut second);
    assert!(matches!(pressed, RunEnd::PoweredOff), "{pressed}");
}

#[test]
fn the_power_button_shares_no_interrupt_with_a_virtio_device() {
    let host = host!();
    let kernel = kernel(&POWER_OFF);
    let asked = MachineConfig {
        acpi: Some(AcpiConfig {
            power_button_gsi: 5,
            ..AcpiConfig::new(1)
        }),
        virtio: VirtioConfig {
            rng: true,
            ..VirtioConfig::default()
        },
        ..config(&kernel, "")
    };
    let refused = vmm::machine::boot(&host.kvm, &host.profile, asked).err();
    assert!(matches!(
        refused,
        Some(MachineError::Boot(BootError::Acpi(
            AcpiError::PowerButtonGsi { found: 5 }
        )))
    ));
}

#![allow(clippy::unwrap_used)]

use std::path::Path;

use guest::elf::{Load, program};

use super::super::{BootConfig, BootError, EntryProtocol, KernelFile, load};
use super::*;
use crate::memory::{HOLE_END, HOLE_START};

const RAM: u64 = 16 << 20;

/// A configuration with every option.
fn full(cpus: u8) -> AcpiConfig {
    AcpiConfig {
        ecam: Ecam {
            base: 0xe000_0000,
            buses: 256,
        },
        mmio64: Some(MmioWindow {
            start: 1 << 38,
            size: 1 << 36,
        }),
        ..AcpiConfig::new(cpus)
    }
}

fn read(ram: &GuestRam, address: u64, length: usize) -> Vec<u8> {
    (address..)
        .take(length)
        .map(|address| ram.read_byte(Gpa(address)).unwrap())
        .collect()
}

fn number(bytes: &[u8], at: usize, size: usize) -> u64 {
    let mut word = [0; 8];
    word[..size].copy_from_slice(&bytes[at..at + size]);
    u64::from_le_bytes(word)
}

fn sum(bytes: &[u8]) -> u8 {
    bytes.iter().fold(0, |sum, byte| sum.wrapping_add(*byte))
}

fn contains(bytes: &[u8], part: &[u8]) -> bool {
    bytes.windows(part.len()).any(|window| window == part)
}

/// Returns the table at `address`, after a check of its header.
fn table(ram: &GuestRam, address: u64, signature: &[u8; 4]) -> Vec<u8> {
    let header = read(ram, address, 36);
    assert_eq!(&header[..4], signature);
    let length = number(&header, 4, 4);
    assert!(address >= place::ACPI_TABLES && address + length <= place::HIGH_MEMORY);
    let table = read(ram, address, length as usize);
    assert_eq!(sum(&table), 0, "{signature:?}");
    table
}

/// The tables as a kernel finds them: FADT, MADT, MCFG and DSDT.
struct Found {
    fadt: Vec<u8>,
    madt: Vec<u8>,
    mcfg: Vec<u8>,
    dsdt: Vec<u8>,
}

fn find(ram: &GuestRam) -> Found {
    let scan = (0xe0000..place::HIGH_MEMORY).step_by(16);
    let at = scan
        .into_iter()
        .find(|at| read(ram, *at, 8) == *b"RSD PTR ")
        .unwrap();
    assert_eq!(at, place::RSDP);
    let rsdp = read(ram, at, 36);
    assert_eq!((sum(&rsdp[..20]), sum(&rsdp)), (0, 0));
    assert_eq!(rsdp[15], 2, "revision");
    assert_eq!(number(&rsdp, 20, 4), 36, "length");
    let xsdt = table(ram, number(&rsdp, 24, 8), b"XSDT");
    let listed: Vec<u64> = xsdt[36..]
        .chunks(8)
        .map(|entry| number(entry, 0, 8))
        .collect();
    let [fadt, madt, mcfg] = listed[..] else {
        panic!("{listed:x?}");
    };
    let fadt = table(ram, fadt, b"FACP");
    let dsdt = table(ram, number(&fadt, 140, 8), b"DSDT");
    Found {
        madt: table(ram, madt, b"APIC"),
        mcfg: table(ram, mcfg, b"MCFG"),
        fadt,
        dsdt,
    }
}

fn written(config: &AcpiConfig) -> Found {
    config.check(RAM, config.cpus).unwrap();
    let ram = GuestRam::new(RAM).unwrap();
    write(&ram, config).unwrap();
    find(&ram)
}

#[test]
fn tables_do_not_overlap() {
    for cpus in [1, 4, MAX_ACPI_CPUS] {
        let mut tables = build(&full(cpus));
        tables.sort_by_key(|table| table.address);
        for pair in tables.windows(2) {
            assert!(pair[0].address + pair[0].bytes.len() as u64 <= pair[1].address);
        }
        let last = tables.last().unwrap();
        assert!(last.address + last.bytes.len() as u64 <= place::HIGH_MEMORY);
    }
}

#[test]
fn the_fadt_describes_a_reduced_machine_with_its_registers() {
    let fadt = written(&AcpiConfig::new(1)).fadt;
    assert_eq!((fadt.len(), fadt[8], fadt[131]), (276, 6, 5), "ACPI 6.5");
    // Of the fixed hardware, from the SCI to the century register, nothing exists.
    assert!(fadt[46..109].iter().all(|byte| *byte == 0));
    // PM1a to GPE1, extended.
    assert!(fadt[148..244].iter().all(|byte| *byte == 0));
    let boot_architecture = number(&fadt, 109, 2);
    assert_eq!(boot_architecture, 0b00_0111);
    let (reduced, reset) = (1 << 20, 1 << 10);
    assert_eq!(number(&fadt, 112, 4), reduced | reset | 0b111_0001);
    // Port, 8 bits from bit 0, by byte accesses.
    for (at, port) in [(116, 0x602), (244, 0x600), (256, 0x601)] {
        assert_eq!(fadt[at..at + 4], [1, 8, 0, 1]);
        assert_eq!(number(&fadt, at + 4, 8), port);
    }
    assert_eq!(fadt[128], devices::acpi::RESET_VALUE);
}

/// Returns the entries of a MADT.
fn entries(madt: &[u8]) -> Vec<&[u8]> {
    let mut rest = &madt[44..];
    let mut entries = Vec::new();
    while !rest.is_empty() {
        let (entry, after) = rest.split_at(usize::from(rest[1]));
        entries.push(entry);
        rest = after;
    }
    entries
}

#[test]
fn the_madt_lists_up_to_64_processors_and_edge_triggered_isa_interrupts() {
    for cpus in [1, 4, MAX_ACPI_CPUS] {
        let madt = written(&full(cpus)).madt;
        assert_eq!(number(&madt, 36, 4), 0xfee0_0000);
        assert_eq!(number(&madt, 40, 4), 1, "PCAT_COMPAT");
        let entries = entries(&madt);
        let of = |kind| entries.iter().filter(move |entry| entry[0] == kind);
        let processors: Vec<_> = of(0)
            .map(|entry| (entry[2], entry[3], number(entry, 4, 4)))
            .collect();
        let expected: Vec<_> = (0..cpus).map(|index| (index, index, 1)).collect();
        assert_eq!(processors, expected);
        let io_apics: Vec<_> = of(1).collect();
        assert_eq!(io_apics, [&[1, 12, cpus, 0, 0, 0, 0xc0, 0xfe, 0, 0, 0, 0]]);
        for entry in of(2) {
            let (bus, source, gsi) = (entry[2], entry[3], number(entry, 4, 4));
            assert_eq!((bus, number(entry, 8, 2)), (0, 0b0101));
            assert_eq!(u64::from(source), gsi);
            assert!(source != 0 && source != 2);
        }
        assert_eq!(of(2).count(), 14);
        assert_eq!(of(4).collect::<Vec<_>>(), [&[4, 6, 0xff, 0, 0, 1]]);
    }
}

#[test]
fn the_mcfg_has_the_ecam_that_the_motherboard_reserves() {
    for (ecam, memory_32_fixed) in [
        (AcpiConfig::new(1).ecam, true),
        (full(1).ecam, true),
        (
            Ecam {
                base: 1 << 40,
                buses: 3,
            },
            false,
        ),
    ] {
        let config = AcpiConfig {
            ecam,
            mmio32: MmioWindow {
                start: HOLE_START,
                size: 1 << 28,
            },
            ..AcpiConfig::new(1)
        };
        let found = written(&config);
        assert_eq!(found.mcfg.len(), 36 + 8 + 16);
        assert_eq!(number(&found.mcfg, 44, 8), ecam.base);
        assert_eq!(number(&found.mcfg, 52, 2), 0, "segment");
        let last = (ecam.buses - 1) as u8;
        assert_eq!(found.mcfg[54..56], [0, last]);
        let size = u64::from(ecam.buses) << 20;
        let mut reservation;
        if memory_32_fixed {
            reservation = vec![0x86, 9, 0, 1];
            reservation.extend((ecam.base as u32).to_le_bytes());
            reservation.extend((size as u32).to_le_bytes());
        } else {
            reservation = vec![0x8a, 43, 0, 0, 0b1100, 1];
            for word in [0, ecam.base, ecam.base + size - 1, 0, size] {
                reservation.extend(word.to_le_bytes());
            }
        }
        assert!(contains(&found.dsdt, &reservation));
    }
}

#[test]
fn the_dsdt_names_the_devices() {
    let dsdt = written(&full(MAX_ACPI_CPUS)).dsdt;
    for name in [
        b"PCI0", b"MBRD", b"COM1", b"RTC_", b"PWRB", b"GED_", b"_EVT", b"C000", b"C03F",
    ] {
        assert!(contains(&dsdt, name), "{name:?}");
    }
    assert!(!contains(&dsdt, b"C040"));
    let soft_off = b"\x08\\_S5_\x12\x07\x04\x0a\x05\x00\x00\x00";
    assert!(contains(&dsdt, soft_off));
    let with = contains(&dsdt, &(1u64 << 38).to_le_bytes());
    let without = written(&AcpiConfig::new(1)).dsdt;
    assert!(with && !contains(&without, &(1u64 << 38).to_le_bytes()));
}

type Change<'a> = &'a dyn Fn(&mut AcpiConfig);

#[test]
fn wrong_values_are_refused() {
    let good = AcpiConfig::new(2);
    let check = |change: Change<'_>| {
        let mut config = good;
        change(&mut config);
        let error = config.check(5 << 30, 2).unwrap_err();
        assert!(!error.to_string().is_empty());
        error
    };
    good.check(5 << 30, 2).unwrap();
    assert!(matches!(good.check(RAM, 3), Err(AcpiError::Cpus { .. })));
    let many = AcpiConfig::new(65).check(RAM, 65);
    assert!(matches!(many, Err(AcpiError::Cpus { .. })));
    for buses in [0, 257] {
        let error = check(&|config| config.ecam.buses = buses);
        assert!(matches!(error, AcpiError::Ecam(_)));
    }
    let error = check(&|config| config.ecam.base += 1 << 12);
    assert!(matches!(error, AcpiError::Ecam(_)));
    let error = check(&|config| config.ecam.buses = 129);
    assert!(matches!(error, AcpiError::Ecam(_)), "alignment");
    for gsi in [0, 4, 24, u32::MAX] {
        let error = check(&|config| config.power_button_gsi = gsi);
        assert_eq!(error, AcpiError::PowerButtonGsi { found: gsi });
    }
    let error = check(&|config| config.registers = 0xfffd);
    assert_eq!(error, AcpiError::Registers { found: 0xfffd });
    for (start, size) in [(HOLE_START, 0), (HOLE_START, 1 << 31), (u64::MAX, 2)] {
        let error = check(&|config| config.mmio32 = MmioWindow { start, size });
        assert!(matches!(error, AcpiError::Window { .. }), "{start:#x}");
    }
    let below = MmioWindow {
        start: HOLE_START,
        size: 1,
    };
    let error = check(&|config| config.mmio64 = Some(below));
    assert!(matches!(error, AcpiError::Window { .. }));
    let overlaps: [(Change<'_>, _, _); 4] = [
        (
            &|config| config.ecam.base = HOLE_START,
            "the ECAM",
            "the 32-bit window",
        ),
        (
            &|config| config.mmio32.size = 0x3ec0_0001,
            "the 32-bit window",
            "the ECAM",
        ),
        (
            &|config| config.ecam.base = 0xfec0_0000,
            "the interrupt controllers",
            "the ECAM",
        ),
        (
            &|config| {
                config.mmio64 = Some(MmioWindow {
                    start: HOLE_END + (2 << 30) - 1,
                    size: 1,
                });
            },
            "RAM",
            "the 64-bit window",
        ),
    ];
    for (change, one, other) in overlaps {
        let AcpiError::Overlap { first, second } = check(change) else {
            panic!("{one}, {other}");
        };
        let found = [first, second];
        assert!(found.contains(&one) && found.contains(&other), "{found:?}");
    }
}

/// A kernel is led to the tables by either protocol, and finds the ECAM reserved.
#[test]
fn a_boot_leads_to_the_tables() {
    let load_at = Load {
        offset: 120,
        address: place::HIGH_MEMORY,
        size: 1,
        memory: 0x1000,
    };
    let elf = program(place::HIGH_MEMORY, &[load_at], &[0xf4]).unwrap();
    let kernel = KernelFile::from_bytes(elf, Path::new("kernel")).unwrap();
    let boot = |acpi, cpus| {
        let ram = GuestRam::new(RAM).unwrap();
        let config = BootConfig {
            kernel: &kernel,
            initramfs: None,
            command_line: "",
            cpus,
            acpi,
            interrupts: 16,
            protocol: Some(EntryProtocol::Linux64),
            rng_seed: [0; 32],
        };
        load(&ram, &config).map(|_| ram)
    };
    let ram = boot(Some(AcpiConfig::new(1)), 1).unwrap();
    find(&ram);
    let pointer = |ram: &GuestRam| number(&read(ram, place::ZERO_PAGE + 0x70, 8), 0, 8);
    assert_eq!(pointer(&ram), place::RSDP);
    let map = read(&ram, place::ZERO_PAGE + 0x2d0, 20 * 4);
    let reserved: Vec<_> = map
        .chunks(20)
        .filter(|row| number(row, 16, 4) == 2)
        .map(|row| (number(row, 0, 8), number(row, 8, 8)))
        .collect();
    assert_eq!(reserved[1], (0xe800_0000, 1 << 20));
    let (start, size) = reserved[0];
    assert!(start <= place::RSDP && start + size == place::HIGH_MEMORY);

    let none = boot(None, 1).unwrap();
    assert_eq!(pointer(&none), 0);
    assert_eq!(read(&none, place::RSDP, 8), [0; 8]);
    let other = boot(Some(AcpiConfig::new(1)), 2);
    assert!(matches!(
        other,
        Err(BootError::Acpi(AcpiError::Cpus { .. }))
    ));
}

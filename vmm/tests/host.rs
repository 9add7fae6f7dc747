//! Tests of the host record, and of errors for impossible requests.
#![allow(clippy::unwrap_used)]

mod support;

use std::path::Path;

use support::{MEMORY, bare, config, micro_kernel};
use vmm::MachineConfig;
use vmm::boot::KernelFile;
use vmm::host::{Breakpoint, HostProfile, Int3};
use vmm::machine::{DiskConfig, VirtioConfig};

#[test]
fn the_record_is_what_this_kind_of_host_does() {
    let host = host!();
    let profile = &host.profile;
    println!("{}", serde_json::to_string_pretty(profile).unwrap());
    if profile.kernel_mode.is_interpreted() {
        assert_eq!(
            (profile.int3_kernel, profile.int3_user),
            (Int3::EmulationFailure, Int3::GuestHandler)
        );
        assert_eq!(profile.breakpoint_kernel, Breakpoint::IgnoresResumeFlag);
        assert_eq!(profile.breakpoint_user, Breakpoint::Silent);
        assert_eq!((profile.step_kernel, profile.step_user), (true, false));
        assert_eq!((profile.watch_kernel, profile.watch_user), (false, false));
        assert!(!profile.user_syscall && !profile.tsc_settable && profile.cpu_flag.is_none());
        // The cost of thousands of interpreted instructions, with a user exit dearer than a kernel
        // one.
        assert!(
            profile.exit_kernel_ns > 1_000 && profile.exit_user_ns > profile.exit_kernel_ns,
            "{profile:?}"
        );
    } else {
        assert_eq!(
            (profile.int3_kernel, profile.int3_user),
            (Int3::DebugExit, Int3::DebugExit)
        );
        assert!(
            profile.step_kernel && profile.step_user && profile.user_syscall,
            "{profile:?}"
        );
        assert_eq!(profile.breakpoint_kernel, Breakpoint::Works);
        assert_eq!(profile.breakpoint_user, Breakpoint::Works);
        assert!(profile.watch_kernel && profile.watch_user, "{profile:?}");
        assert!(profile.cpu_flag.is_some(), "{profile:?}");
    }
    // Every KVM with controllers in the kernel has had these for fifteen years.
    assert!(profile.ioeventfd && profile.irqfd, "{profile:?}");
    assert!(
        profile.sync_regs && profile.recommended_vcpus >= 1,
        "{profile:?}"
    );
    assert!(!vmm::assist::needed(profile).syscall_repair || !profile.user_syscall);
}

#[test]
fn the_record_is_measured_once_and_then_read() {
    let host = host!();
    let folder = tempfile::tempdir().unwrap();
    let cache = folder.path().join("sub/host.json");
    let measured = HostProfile::load_or_probe(&host.kvm, guest::micro::elf, &cache).unwrap();
    // A micro guest that does not run proves that nothing is measured again.
    let read = HostProfile::load_or_probe(&host.kvm, || b"no kernel".to_vec(), &cache).unwrap();
    assert_eq!(read, measured);
    std::fs::write(&cache, b"{ damaged").unwrap();
    let again = HostProfile::load_or_probe(&host.kvm, guest::micro::elf, &cache).unwrap();
    assert_eq!(again.kernel_mode, measured.kernel_mode);
    // As written by a build that mistook a second call's stop for the first call's.
    let mut old = serde_json::to_value(&measured).unwrap();
    old["format"] = 2.into();
    old["exit_kernel_ns"] = 1.into();
    std::fs::write(&cache, old.to_string()).unwrap();
    let anew = HostProfile::load_or_probe(&host.kvm, guest::micro::elf, &cache).unwrap();
    assert_ne!(
        anew.exit_kernel_ns, 1,
        "an older build's record was believed"
    );
    let error = HostProfile::probe(&host.kvm, b"no kernel")
        .unwrap_err()
        .to_string();
    assert!(error.contains("neither an ELF nor a bzImage"), "{error}");
}

#[test]
fn a_device_that_is_not_kvm_is_told_with_its_remedy() {
    let folder = tempfile::tempdir().unwrap();
    let cases = [
        (
            "/dev/null".to_owned(),
            ["/dev/null", "is this a KVM device?"],
        ),
        (
            "/nonexistent/kvm".to_owned(),
            ["/nonexistent/kvm", "modprobe"],
        ),
        (
            folder.path().to_str().unwrap().to_owned(),
            ["cannot be opened", "irectory"],
        ),
    ];
    for (path, words) in cases {
        let error = vmm::host::open(Path::new(&path)).err().unwrap().to_string();
        for word in words {
            assert!(error.contains(word), "{path}: {error}");
        }
    }
}

#[test]
fn what_is_no_kernel_is_refused_with_what_was_found() {
    let whole = guest::micro::elf();
    let mut other_machine = whole.clone();
    other_machine[18] = 183; // AArch64
    let mut narrow = whole.clone();
    narrow[4] = 1; // ELFCLASS32
    let cases: [(&str, Vec<u8>, &[&str]); 7] = [
        ("empty", vec![], &["0 bytes"]),
        (
            "text",
            b"#!/bin/sh\necho\n".to_vec(),
            &["neither", "23 21 2f 62", "vmlinux"],
        ),
        ("magic only", b"\x7fELF".to_vec(), &["4 bytes"]),
        ("a cut header", whole[..40].to_vec(), &["40 bytes"]),
        (
            "a cut segment",
            whole[..0x1800].to_vec(),
            &["truncated", "6144"],
        ),
        ("another machine", other_machine, &["183"]),
        ("32-bit", narrow, &["64-bit"]),
    ];
    for (name, bytes, words) in cases {
        let error = KernelFile::from_bytes(bytes, Path::new("/boot/thing")).err();
        let error = error.unwrap_or_else(|| panic!("{name}: taken")).to_string();
        assert!(error.contains("/boot/thing"), "{name}: {error}");
        for word in words {
            assert!(
                error.contains(word),
                "{name}: {error:?} does not say {word:?}"
            );
        }
    }
    let error = KernelFile::open(Path::new("/nonexistent/vmlinux"))
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("/nonexistent/vmlinux") && error.contains("No such file"),
        "{error}"
    );
}

#[test]
fn a_machine_that_cannot_be_is_refused_with_the_value_and_a_remedy() {
    let host = host!();
    let kernel = micro_kernel();
    let good = || MachineConfig {
        pit: true,
        acpi: None,
        ..config(&kernel, "calls 1")
    };
    let large = vec![1u8; 3 << 20];
    let longest = "x".repeat(2047);
    let too_long = "x".repeat(2048);
    let disks = |count, path: &str| VirtioConfig {
        disks: vec![DiskConfig::new(path, true); count],
        ..VirtioConfig::default()
    };
    let cases: [(&str, MachineConfig<'_>, &[&str]); 12] = [
        (
            "no disk",
            MachineConfig {
                virtio: disks(1, "/nowhere/disk.img"),
                ..good()
            },
            &["/nowhere/disk.img", "No such file"],
        ),
        (
            "a disk that is none",
            MachineConfig {
                virtio: disks(1, "/dev/null"),
                ..good()
            },
            &["/dev/null", "neither a regular file nor a block device"],
        ),
        (
            "too many disks",
            MachineConfig {
                virtio: disks(17, "/dev/null"),
                ..good()
            },
            &["17 virtio devices", "at most 16"],
        ),
        (
            "no memory",
            MachineConfig {
                memory: 0,
                ..good()
            },
            &["0 bytes", "multiple of 4096"],
        ),
        (
            "odd memory",
            MachineConfig {
                memory: MEMORY + 1,
                ..good()
            },
            &["4194305", "multiple of 4096"],
        ),
        (
            "too little memory",
            MachineConfig {
                memory: 1 << 20,
                ..good()
            },
            &["1048576", "2M"],
        ),
        (
            "too much memory",
            MachineConfig {
                memory: 1 << 50,
                ..good()
            },
            &["1125899906842624", "512G"],
        ),
        (
            "more than the host has",
            MachineConfig {
                memory: 512 << 30,
                ..good()
            },
            &["549755813888", "ask for less"],
        ),
        (
            "no CPU",
            MachineConfig { cpus: 0, ..good() },
            &["0 vCPUs", "1 to 64"],
        ),
        (
            "65 CPUs",
            MachineConfig { cpus: 65, ..good() },
            &["65 vCPUs", "1 to 64"],
        ),
        (
            "a large initramfs",
            MachineConfig {
                initramfs: Some(&large),
                ..good()
            },
            &["3145728", "--memory at least"],
        ),
        (
            "a long command line",
            MachineConfig {
                command_line: &too_long,
                ..good()
            },
            &["2048 bytes", "2047"],
        ),
    ];
    let boot = |asked| vmm::machine::boot(&host.kvm, &host.profile, asked);
    for (name, asked, words) in cases {
        let error = boot(asked)
            .err()
            .unwrap_or_else(|| panic!("{name}: made"))
            .to_string();
        for word in words {
            assert!(
                error.contains(word),
                "{name}: {error:?} does not say {word:?}"
            );
        }
    }
    for fits in [
        good(),
        MachineConfig {
            command_line: &longest,
            ..good()
        },
        MachineConfig { cpus: 64, ..good() },
    ] {
        boot(fits).unwrap();
    }
}

#[test]
fn a_kernel_that_is_larger_than_memory_is_refused() {
    let host = host!();
    let mut elf = bare::elf(&[0xf4]);
    // The segment's size in memory: 1 GiB.
    elf[64 + 40..64 + 48].copy_from_slice(&(1u64 << 30).to_le_bytes());
    let kernel = KernelFile::from_bytes(elf, Path::new("big")).unwrap();
    let result = vmm::machine::boot(&host.kvm, &host.profile, config(&kernel, ""));
    let error = result.err().unwrap().to_string();
    assert!(
        error.contains("0x40100000") && error.contains("--memory"),
        "{error}"
    );
}

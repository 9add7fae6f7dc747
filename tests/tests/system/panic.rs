//! A guest's panic ends its run with status 1 and in the kernel's own words, whatever its cause and
//! its end.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use support::command::{Ended, World, words};
use support::shell::BOOT_LIMIT;
use support::{Kernel, host};
use vmm::boot::KernelFile;
use vmm::machine::{MachineConfig, SerialOutput};
use vmm::snapshot::{self, KernelHash, KernelReference, SnapshotInfo};

/// The number of words that the kernel does not know, more than it accepts (`MAX_INIT_ARGS` in
/// init/main.c). It reports that as soon as it has a console: long before it can be located.
const WORDS: usize = 40;
const TOO_MANY: &str = "Too many boot init vars at `word";
/// The memory of the guests in bytes.
const MEMORY: u64 = 64 << 20;

/// Returns the small kernel with its table of symbol names destroyed: it boots, and cannot be
/// located.
fn nameless(world: &World) -> PathBuf {
    let mut bytes = Kernel::small().image.bytes().to_vec();
    // In the table of 256 tokens, the digits are their own tokens, one after the other.
    let digits: Vec<u8> = (b'0'..=b'9').flat_map(|digit| [digit, 0]).collect();
    let at = bytes.windows(digits.len()).position(|part| part == digits);
    let at = at.unwrap_or_else(|| panic!("no table of tokens"));
    for digit in bytes[at..at + digits.len()].iter_mut().step_by(2) {
        *digit = b'x';
    }
    let path = world.path("nameless");
    fs::write(&path, bytes).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    path
}

fn too_many_words() -> String {
    let words: Vec<String> = (0..WORDS).map(|number| format!("word{number}")).collect();
    format!("{} {}", guest::build::kernel::cmdline(), words.join(" "))
}

fn run(world: &World, kernel: &Path, more: &str) -> Ended {
    let command_line = format!("{} {more}", too_many_words());
    let mut line = words("run --memory 64M --serial null --cmdline");
    line.extend([command_line.into(), "--kernel".into()]);
    line.push(kernel.into());
    world.run(line, BOOT_LIMIT)
}

/// Checks for status 1, the console's end, and in the last line the message and `place`, the
/// position of the panic.
fn assert_told(ended: &Ended, place: &str, what: &str) {
    assert_eq!(
        (ended.status, ended.stdout.as_str()),
        (1, ""),
        "{what}: {ended:?}"
    );
    let last = ended.stderr.lines().last().unwrap_or_default();
    assert!(
        last.starts_with(&format!("exotrace: guest kernel panic{place}: {TOO_MANY}")),
        "{what}: {last}"
    );
    let console = ended.stderr.split_once("the console's last lines:\n");
    let (_, lines) = console.unwrap_or_else(|| panic!("{what}: {ended:?}"));
    let printed = format!("Kernel panic - not syncing: {TOO_MANY}");
    assert!(lines.contains(&printed), "{what}: {ended:?}");
}

#[test]
fn a_panic_before_the_kernel_is_located_is_told_however_it_goes_on() {
    let _ = host!();
    let world = World::new();
    // It resets at once, hangs, or ends by a triple fault.
    for words in ["panic=-1", "panic=0", "panic=-1 reboot=t"] {
        let ended = run(&world, &Kernel::small().path, words);
        assert_told(&ended, " on vCPU 0", words);
    }
}

#[test]
fn a_panic_is_told_of_a_kernel_that_cannot_be_located() {
    let _ = host!();
    let world = World::new();
    let kernel = nameless(&world);
    for words in ["panic=-1", "panic=0"] {
        let ended = run(&world, &kernel, words);
        // Only the log reports the panic, and without the vCPU.
        assert_told(&ended, "", words);
    }
}

#[test]
fn a_panic_is_told_of_a_restored_machine() {
    let host = host!();
    let world = World::new();
    let kernel = Kernel::small();
    let file = KernelFile::open(&kernel.path).unwrap_or_else(|e| panic!("{e}"));
    let booted = vmm::machine::boot(
        &host.kvm,
        &host.profile,
        MachineConfig {
            memory: MEMORY,
            cpus: 1,
            kernel: &file,
            initramfs: None,
            command_line: &too_many_words(),
            add_words: true,
            protocol: None,
            pit: true,
            acpi: None,
            virtio: Default::default(),
            serial: SerialOutput::null(),
        },
    );
    let booted = booted.unwrap_or_else(|e| panic!("{e}"));
    // Saved before its first instruction, so that no host is too fast. The kernel's file may be
    // lost since, and its tables with it.
    for (name, path, hash) in [
        ("kept", kernel.path.as_path(), kernel.reference.hash),
        ("lost", Path::new("/nowhere/vmlinux"), KernelHash([7; 32])),
    ] {
        let info = SnapshotInfo {
            command_line: booted.command_line.clone(),
            kernel: Some(KernelReference {
                path: path.into(),
                hash,
                ..kernel.reference.clone()
            }),
        };
        let folder = world.path(name);
        snapshot::save(&host.kvm, &booted.machine, &info, &folder)
            .unwrap_or_else(|e| panic!("{e}"));
        let mut line: Vec<OsString> = words("run --serial null --restore");
        line.push(folder.into());
        let ended = world.run(line, BOOT_LIMIT);
        // Without its file the kernel is found in memory, unless it ends too soon.
        let place = match name == "kept" || ended.stderr.contains("panic on vCPU 0") {
            true => " on vCPU 0",
            false => "",
        };
        assert_told(&ended, place, name);
    }
}

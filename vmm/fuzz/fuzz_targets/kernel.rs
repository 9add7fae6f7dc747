//! Fuzzes a kernel's file, and the placement of it, the initramfs and the command line in a
//! machine's memory.
//!
//! The first byte selects the input's kind: the file itself; a bzImage whose header, codec and
//! recorded size are from the input; or an ELF whose segments and notes are. Loaded
//! bytes are checked against their addresses, and no file may claim more than it may unpack to.
#![no_main]

use std::path::Path;
use std::sync::LazyLock;

use hostile::{Input, limit_memory};
use libfuzzer_sys::fuzz_target;
use vmm::boot::payload::MAX_UNPACKED;
use vmm::boot::{BootConfig, EntryProtocol, KernelFile, load, place};
use vmm::memory::GuestRam;

const RAM: u64 = 16 << 20;
/// The machine's memory, reused by each run: leftovers of the last one do no harm.
static MEMORY: LazyLock<GuestRam> = LazyLock::new(|| GuestRam::new(RAM).expect("16 MiB"));

const MAGICS: [&[u8]; 8] = [
    b"\x7fELF",
    &[0x1f, 0x8b, 8, 0],
    b"BZh9",
    &[0x5d, 0, 0, 1, 0],
    b"\xfd7zXZ\0",
    &[0x28, 0xb5, 0x2f, 0xfd],
    &[0x02, 0x21, 0x4c, 0x18],
    b"",
];

/// Returns a bzImage with the rest of the input as payload.
fn bzimage(mut input: Input<'_>) -> Vec<u8> {
    let sectors = input.value::<u8>() % 5;
    let version: u16 = input.value();
    let offset = u32::from(input.value::<u16>()) % 1024;
    let claimed = input.value::<i16>();
    let [magic, more]: [u8; 2] = input.value();
    let size = input.value::<u32>() % (4 << 20);
    let mut payload = MAGICS[usize::from(magic) % MAGICS.len()].to_vec();
    payload.extend_from_slice(input.rest());
    if more & 1 != 0 {
        payload.extend_from_slice(&size.to_le_bytes());
    }
    let length = (payload.len() as u32).wrapping_add_signed(claimed.into());
    let start = (usize::from(if sectors == 0 { 4 } else { sectors }) + 1) * 512;
    let mut file = vec![0; start.max(0x250) + offset as usize];
    file[0x1f1] = sectors;
    file[0x1fe..0x200].copy_from_slice(&[0x55, 0xaa]);
    file[0x202..0x206].copy_from_slice(b"HdrS");
    let version = if more & 2 == 0 { 0x020f } else { version };
    file[0x206..0x208].copy_from_slice(&version.to_le_bytes());
    file[0x248..0x24c].copy_from_slice(&offset.to_le_bytes());
    let length = if more & 4 == 0 {
        payload.len() as u32
    } else {
        length
    };
    file[0x24c..0x250].copy_from_slice(&length.to_le_bytes());
    file.truncate(start + offset as usize);
    file.extend_from_slice(&payload);
    file
}

/// Returns an address somewhere in memory, at its end, or anywhere.
fn address(input: &mut Input<'_>) -> u64 {
    match input.value::<u8>() % 4 {
        0 => place::HIGH_MEMORY + u64::from(input.value::<u16>()) * 64,
        1 => u64::from(input.value::<u32>()) % (RAM + 4096),
        2 => u64::from(input.value::<u16>()),
        _ => input.value(),
    }
}

/// Returns an ELF of program headers, followed by the rest of the input.
fn elf(mut input: Input<'_>) -> Vec<u8> {
    const HEADER: usize = 64;
    const SEGMENT: usize = 56;
    let count = usize::from(input.value::<u8>() % 6);
    let mut file = vec![0; HEADER];
    file[..8].copy_from_slice(b"\x7fELF\x02\x01\x01\0");
    file[16..20].copy_from_slice(&[2, 0, 62, 0]);
    file[20] = 1;
    file[24..32].copy_from_slice(&address(&mut input).to_le_bytes());
    file[32..40].copy_from_slice(&(HEADER as u64).to_le_bytes());
    file[52..60].copy_from_slice(&[HEADER as u8, 0, SEGMENT as u8, 0, count as u8, 0, 64, 0]);
    for _ in 0..count {
        let [kind, flags]: [u8; 2] = input.value();
        let kind = match kind % 4 {
            0 | 1 => 1,
            2 => 4,
            _ => u32::from(kind),
        };
        let mut header = [kind.to_le_bytes(), u32::from(flags).to_le_bytes()].concat();
        let offset = u64::from(input.value::<u16>()) % 1024;
        let (place, size) = (address(&mut input), u64::from(input.value::<u16>()) % 1024);
        let more = match flags & 8 {
            0 => u64::from(input.value::<u16>()),
            _ => input.value(),
        };
        let align = u64::from(input.value::<u16>());
        for word in [offset, place, place, size, size.wrapping_add(more), align] {
            header.extend_from_slice(&word.to_le_bytes());
        }
        file.extend_from_slice(&header);
    }
    file.extend_from_slice(input.rest());
    file
}

/// The most bytes allocated at once: a kernel may unpack to 1 GiB.
const MEMORY_LIMIT: usize = 1280 << 20;

fuzz_target!(|bytes: &[u8]| {
    limit_memory(MEMORY_LIMIT);
    let mut input = Input::new(bytes);
    let [kind, which]: [u8; 2] = input.value();
    let initramfs = usize::from(input.value::<u16>()) * 256;
    let words = usize::from(input.value::<u16>()) % 2100;
    let file = match kind % 3 {
        0 => input.rest().to_vec(),
        1 => bzimage(input),
        _ => elf(input),
    };
    let length = file.len();
    let kernel = match KernelFile::from_bytes(file, Path::new("kernel")) {
        Ok(kernel) => kernel,
        Err(error) => {
            assert!(!error.to_string().is_empty());
            return;
        }
    };
    assert!(kernel.elf().len() <= MAX_UNPACKED.max(length));
    let initramfs = vec![0x5a; initramfs];
    let command_line = "w".repeat(words);
    let config = BootConfig {
        kernel: &kernel,
        initramfs: (which & 1 != 0).then_some(&initramfs),
        command_line: &command_line,
        cpus: which >> 4 & 3,
        acpi: None,
        interrupts: 16 + (which >> 6),
        protocol: match which >> 1 & 3 {
            0 => None,
            1 => Some(EntryProtocol::Pvh),
            _ => Some(EntryProtocol::Linux64),
        },
        rng_seed: [7; 32],
    };
    match load(&MEMORY, &config) {
        Ok(entry) => {
            assert!(command_line.len() < place::COMMAND_LINE_MAX);
            assert!(kernel.physical_end() <= RAM, "{:#x}", kernel.physical_end());
            let _ = entry;
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
});

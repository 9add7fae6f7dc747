#![allow(clippy::unwrap_used)]
use super::super::test_elf::{TEXT, TestElf};
use super::*;
use crate::test_memory::TestMemory;

/// The link and load address of the image's variables.
const DATA: (u64, u64) = (0xffff_ffff_8120_0000, 0x120_0000);
/// The address of the log's text. `panic_cpu` is at the start of the variables.
const LOG: u64 = DATA.1 + 0x1000;
/// Size of memory in bytes, from the image's start on.
const RAM: usize = 0x60_0000;
const CONSTANTS: &[u8] = b"\x010Kernel panic - not syncing: %s\n\0";
const NO_CPU: [u8; 4] = [0xff; 4];
/// The id of a log's first record, with 4,096 descriptors.
const FIRST_ID: u64 = (1 << 62) - 1 - 4096;

fn image() -> KernelImage {
    let elf = TestElf::default()
        .segment(TEXT, CONSTANTS, 0)
        .segment(DATA, &NO_CPU, 0x30_0000);
    KernelImage::parse(elf.bytes()).unwrap()
}

/// Makes a guest in which `image` was loaded.
fn booted() -> TestMemory {
    let mut memory = TestMemory::new(TEXT.1, RAM);
    memory.write(TEXT.1, CONSTANTS);
    memory.write(DATA.1, &NO_CPU);
    memory
}

/// Makes blocks of a log as in kernels since 5.12: the level is removed by moving the text.
fn moved(records: &[(u64, &str)]) -> Vec<u8> {
    let block = |(id, text): &(u64, &str)| {
        let end = &text[text.len().saturating_sub(2)..];
        let mut block = id.to_le_bytes().to_vec();
        block.extend(format!("{text}{end}\n\0").bytes());
        block.resize(block.len().next_multiple_of(8), 0);
        block
    };
    records.iter().flat_map(block).collect()
}

/// Makes blocks as in Linux 5.10 and 5.11: only the text.
fn plain(records: &[(u64, &str)]) -> Vec<u8> {
    let block = |(id, text): &(u64, &str)| {
        let mut block = [&id.to_le_bytes(), text.as_bytes()].concat();
        block.resize(block.len().next_multiple_of(8), 0);
        block
    };
    records.iter().flat_map(block).collect()
}

const VFS: &str = "VFS: Unable to mount root fs on unknown-block(0,0)";

fn panic_line(text: &str) -> String {
    format!("Kernel panic - not syncing: {text}")
}

fn names_the_variable() -> PanicFinder {
    PanicFinder::of_image(&image(), Some(DATA.0)).unwrap()
}

fn functions_only() -> PanicFinder {
    PanicFinder::of_image(&image(), None).unwrap()
}

#[test]
fn a_kernel_that_names_the_variable_is_judged_by_it() {
    let mut memory = booted();
    assert_eq!(names_the_variable().find(&memory), None);
    // A similar line that a program wrote to the log.
    let lines = moved(&[(FIRST_ID, "Linux"), (FIRST_ID + 1, &panic_line("made up"))]);
    memory.write(LOG, &lines);
    assert_eq!(names_the_variable().find(&memory), None);
    memory.write(LOG, &vec![0; lines.len()]);
    memory.write(DATA.1, &1u32.to_le_bytes());
    let mut found = KernelPanic {
        cpu: Some(1),
        text: None,
    };
    assert_eq!(names_the_variable().find(&memory), Some(found.clone()));
    memory.write(LOG, &moved(&[(7, "Linux"), (8, &panic_line(VFS))]));
    found.text = Some(VFS.to_owned());
    assert_eq!(names_the_variable().find(&memory), Some(found));
    // Not a CPU's number.
    memory.write(DATA.1, &MAX_CPUS.to_le_bytes());
    assert_eq!(names_the_variable().find(&memory), None);
}

#[test]
fn a_kernel_without_variables_is_judged_by_its_log() {
    let last = (1 << 62) - 1;
    let long = "x".repeat(900);
    for text in [VFS, "exitcode=0x00000000", "a", &long, "of aa"] {
        let line = panic_line(text);
        let first = [(FIRST_ID, "Linux version 6.1"), (FIRST_ID + 1, &line)];
        let middle = [(last, "Run /init"), (0, &line), (1, "CPU: 0 PID: 1")];
        let behind = [(5, line.as_str()), (6, "CPU: 0 PID: 1")];
        for records in [&first[..], &middle, &behind] {
            for log in [moved(records), plain(records)] {
                let mut memory = booted();
                memory.write(LOG, &log);
                let found = functions_only().find(&memory).unwrap();
                assert_eq!(found.text.as_deref(), Some(text), "{records:?}");
                assert_eq!(found.cpu, None);
            }
        }
    }
}

#[test]
fn a_record_is_found_wherever_the_parts_of_memory_end() {
    let log = moved(&[(1, "Run /init"), (2, &panic_line(VFS)), (3, "CPU: 0")]);
    for before in (0..3 * record::REACH).step_by(8) {
        let mut memory = booted();
        memory.write(DATA.1 + PART + record::REACH + 64 - before, &log);
        let found = functions_only().find(&memory);
        let text = found.and_then(|found| found.text);
        assert_eq!(text.as_deref(), Some(VFS), "{before}");
    }
}

#[test]
fn what_only_looks_like_a_panic_is_none() {
    let line = panic_line(VFS);
    let page_of_a_log_file = format!("[    1.0] Run /init\n[    1.1] {line}\n[    1.2] CPU: 0\n");
    let on_a_heap = [&0x41u64.to_le_bytes(), line.as_bytes(), &[0; 8]].concat();
    let at_no_multiple = [&[0; 4], moved(&[(7, "Run"), (8, &line)]).as_slice()].concat();
    let no_neighbours = moved(&[(7, "Run"), (19, &line), (40, "CPU")]);
    let no_ids = moved(&[(u64::MAX - 1, "Run"), (u64::MAX, &line)]);
    for bytes in [
        CONSTANTS,
        page_of_a_log_file.as_bytes(),
        &on_a_heap,
        &at_no_multiple,
        &no_neighbours,
        &no_ids,
    ] {
        let mut memory = booted();
        memory.write(LOG, bytes);
        let found = functions_only().find(&memory);
        assert_eq!(found, None, "{}", String::from_utf8_lossy(bytes));
    }
    // None of that hides a panic beside it.
    let mut memory = booted();
    memory.write(LOG, page_of_a_log_file.as_bytes());
    memory.write(LOG + 0x1000, &moved(&[(7, "Run"), (8, &line)]));
    assert!(functions_only().find(&memory).is_some());
}

#[test]
fn another_kernel_in_its_place_is_not_spoken_for() {
    let mut memory = booted();
    memory.write(DATA.1, &0u32.to_le_bytes());
    memory.write(LOG, &moved(&[(7, "Run"), (8, &panic_line(VFS))]));
    memory.write(TEXT.1, &vec![0x90; CONSTANTS.len()]);
    assert_eq!(names_the_variable().find(&memory), None);
    assert_eq!(functions_only().find(&memory), None);
}

#[test]
fn without_an_image_all_memory_is_searched() {
    let mut memory = booted();
    let finder = |memory: &TestMemory| PanicFinder::of_memory(memory, None);
    assert_eq!(finder(&memory).find(&memory), None);
    let near_the_end = TEXT.1 + RAM as u64 - 0x1000;
    memory.write(near_the_end, &moved(&[(7, "Run"), (8, &panic_line(VFS))]));
    let found = finder(&memory).find(&memory).unwrap();
    assert_eq!(found.text.as_deref(), Some(VFS));
}

#[test]
fn an_image_that_reaches_past_memory_is_read_as_far_as_it_goes() {
    let memory = {
        let mut memory = TestMemory::new(TEXT.1, 0x21_0000);
        memory.write(TEXT.1, CONSTANTS);
        memory
    };
    assert_eq!(functions_only().find(&memory), None);
    let text = TestElf::default().segment(TEXT, b"no Linux", 0);
    let no_linux = KernelImage::parse(text.bytes()).unwrap();
    assert!(PanicFinder::of_image(&no_linux, None).is_none());
}

#![allow(clippy::unwrap_used)]
use super::*;
use crate::kernel::btf::test_types::task_types;
use crate::kernel::kallsyms::Layout;
use crate::kernel::kallsyms::test_tables::{BASE, TestSymbol, Variant, kernel_like, write_at};
use crate::test_memory::{Flags, TestMemory};
use crate::test_says::assert_says;
use crate::x86_64::PAGE;
use crate::{PausedMemory, PhysicalMemory};

const PAGES: u64 = 128;
const IDT: u64 = 0xffff_fe00_0000_0000;
/// Offsets in the image.
const DIVIDE: u64 = 0x1_0000;
const FAULT: u64 = 0x1_0100;
const TABLES: u64 = 0x2_0000;
const BTF: u64 = 0x5_0000;
const NOTES: u64 = 0x6_0000;
const BANNER: u64 = 0x6_1000;
const CRASH_DATA: u64 = 0x6_2000;
const CRASH_SIZE: u64 = 0x6_2008;
const CRASH_TEXT: u64 = 0x6_3000;
/// The kernel's own page tables; a page of zeroes unless a test fills it.
const OWN_TABLES: u64 = 0x7_0000;
const END: u64 = PAGES * PAGE;
const KASLR: u64 = 0x1e20_0000;

/// The differences from an intact kernel.
struct Case {
    slide: u64,
    layout: Layout,
    /// Text of vmcoreinfo.
    crash: &'static str,
    /// A name that the tables lack.
    without: &'static str,
    /// The offset of the page-fault handler from the base.
    fault: u64,
    btf: Vec<u8>,
}

impl Default for Case {
    fn default() -> Self {
        Self {
            slide: KASLR,
            layout: Layout::AddressesFirst,
            crash: "OSRELEASE=6.1\nKERNELOFFSET=1e200000\nPAGESIZE=4096\n",
            without: "",
            fault: FAULT,
            btf: task_types().bytes(),
        }
    }
}

impl Case {
    fn symbols(&self) -> Vec<TestSymbol> {
        let mut symbols = kernel_like(600, self.absolute_per_cpu());
        for (name, offset, kind) in [
            ("asm_exc_divide_error", DIVIDE, b'T'),
            ("asm_exc_page_fault", FAULT, b'T'),
            ("__start_BTF", BTF, b'R'),
            ("__stop_BTF", BTF + self.btf.len() as u64, b'R'),
            ("__start_notes", NOTES, b'R'),
            ("__stop_notes", NOTES + 60, b'R'),
            ("linux_banner", BANNER, b'D'),
            ("vmcoreinfo_data", CRASH_DATA, b'b'),
            ("vmcoreinfo_size", CRASH_SIZE, b'b'),
            ("init_top_pgt", OWN_TABLES, b'D'),
            ("_end", END, b'B'),
        ] {
            if name != self.without {
                let (address, name) = (BASE + offset, name.to_owned());
                symbols.push(TestSymbol {
                    address,
                    kind,
                    name,
                });
            }
        }
        symbols
    }

    /// Checks whether symbols may be absolute. No kernel has both those and addresses that count
    /// from themselves.
    fn absolute_per_cpu(&self) -> bool {
        self.layout != Layout::AddressesFromEntries
    }

    /// Makes the image as it is in memory, relocated.
    fn image(&self) -> Vec<u8> {
        let mut tables = write_at(
            BASE + TABLES,
            &self.symbols(),
            Variant {
                layout: self.layout,
                sequences: true,
                absolute_per_cpu: self.absolute_per_cpu(),
            },
        );
        if let Some(base) = memchr::memmem::find(&tables, &BASE.to_le_bytes()) {
            tables[base..base + 8].copy_from_slice(&(BASE + self.slide).to_le_bytes());
        }
        assert!(TABLES as usize + tables.len() < BTF as usize);
        let note = |name: &[u8], kind: u32, value: &[u8]| {
            let words = [name.len() as u32, value.len() as u32, kind];
            let words = words.iter().flat_map(|word| word.to_le_bytes());
            words.chain(name.iter().chain(value).copied()).collect()
        };
        let notes: [Vec<u8>; 2] = [
            note(b"Xen\0", 18, &[0x50, 8, 0, 1]),
            note(b"GNU\0", 3, &[7; 20]),
        ];
        let crash_text = BASE + self.slide + CRASH_TEXT;
        let mut image = vec![0; END as usize];
        for (offset, bytes) in [
            (TABLES, tables),
            (BTF, self.btf.clone()),
            (NOTES, notes.concat()),
            (BANNER, b"Linux version 6.1.0 (me@here) #1 SMP\n".to_vec()),
            (CRASH_DATA, crash_text.to_le_bytes().to_vec()),
            (CRASH_SIZE, self.crash.len().to_le_bytes().to_vec()),
            (CRASH_TEXT, self.crash.as_bytes().to_vec()),
        ] {
            let start = offset as usize;
            image[start..start + bytes.len()].copy_from_slice(&bytes);
        }
        image
    }

    /// Makes a machine with the image, whose pages are scattered in memory. In user mode it runs
    /// with page table isolation.
    fn machine(&self, user_mode: bool) -> (TestMemory, CpuState) {
        let mut memory = TestMemory::new(0x40_0000, 4 << 20);
        let kernel = memory.address_space(4);
        let user = memory.address_space(4);
        assert_eq!(kernel.root.0 | PAGE, user.root.0);
        let mut idt = vec![0; PAGE as usize];
        for (vector, handler) in [(0, DIVIDE), (14, self.fault)] {
            let [a, b, rest @ ..] = (BASE + self.slide + handler).to_le_bytes();
            let gate = [&[a, b, 0x10, 0, 0, 0x8e], &rest[..], &[0; 4]].concat();
            idt[vector * 16..vector * 16 + 16].copy_from_slice(&gate);
        }
        memory.write(0x60_0000, &idt);
        for space in [kernel, user] {
            memory.map(space, IDT, 0x60_0000, PAGE, Flags::default().no_execute());
        }
        for (page, bytes) in (0..).zip(self.image().chunks(PAGE as usize)) {
            let gva = BASE + self.slide + page * PAGE;
            let gpa = physical(page * PAGE);
            let flags = match page * PAGE {
                ..TABLES => Flags::default(),
                CRASH_DATA.. => Flags::default().no_execute().writable(),
                _ => Flags::default().no_execute(),
            };
            memory.map(kernel, gva, gpa, PAGE, flags);
            memory.write(gpa, bytes);
            if page * PAGE == DIVIDE {
                memory.map(user, gva, gpa, PAGE, flags);
            }
        }
        let (cs, root) = match user_mode {
            true => (0x33, user.root),
            false => (0x10, kernel.root),
        };
        let cpu = CpuState {
            cs,
            cr3: root.0,
            idt_base: IDT,
            ..CpuState::default()
        };
        (memory, cpu)
    }

    fn find(&self) -> Result<RunningKernel, LiveError> {
        let (memory, cpu) = self.machine(false);
        find(&memory, &cpu)
    }
}

/// Returns the physical address of a page of the image.
fn physical(offset: u64) -> u64 {
    0x70_0000 + offset / PAGE * 37 % PAGES * PAGE
}

fn find(memory: &TestMemory, cpu: &CpuState) -> Result<RunningKernel, LiveError> {
    let paused = PausedMemory::new(memory);
    RunningKernel::find(paused.view(cpu.address_space()), cpu, 0)
}

/// Returns the name and address of each symbol, and whether it is absolute.
fn shown(symbols: &Symbols) -> Vec<(String, u64, bool)> {
    let symbols = symbols.iter();
    symbols
        .map(|s| (s.name.to_owned(), s.address, s.absolute))
        .collect()
}

fn expected(case: &Case) -> Vec<(String, u64, bool)> {
    let symbols = case.symbols().into_iter();
    symbols
        .map(|s| match s.address < BASE {
            true => (s.name, s.address, true),
            false => (s.name, s.address + case.slide, false),
        })
        .collect()
}

#[test]
fn a_kernel_is_found_wherever_it_runs() {
    for (slide, crash) in [
        (0, "KERNELOFFSET=0\n"),
        (KASLR, "A=1\nKERNELOFFSET=1e200000\n"),
    ] {
        for layout in [
            Layout::AddressesFirst,
            Layout::AddressesLast,
            Layout::AddressesFromEntries,
        ] {
            let case = Case {
                slide,
                layout,
                crash,
                ..Case::default()
            };
            let found = case.find().unwrap();
            assert_eq!(shown(&found.symbols), expected(&case), "{slide:#x}");
            assert_eq!(found.slide, Some(slide));
            assert_eq!(found.symbols.slide(), slide);
            let linked = found.symbols.with_slide(0);
            assert_eq!(linked.address_of("linux_banner"), Some(BASE + BANNER));
            let past_end = BASE + slide + END + 1;
            assert_eq!(found.symbols.resolve(past_end), None);
            assert_eq!(
                found.banner.as_deref(),
                Some("Linux version 6.1.0 (me@here) #1 SMP")
            );
            let id = found.build_id.map(|id| id.as_bytes().to_vec());
            assert_eq!(id, Some(vec![7; 20]));
            assert_eq!(found.types.unwrap().size_of("task_struct"), Some(128));
        }
    }
}

#[test]
fn a_kernel_that_does_not_tell_its_slide_has_running_addresses() {
    for (crash, without) in [
        ("", "vmcoreinfo_data"),
        ("OSRELEASE=6.1\n", ""),
        ("KERNELOFFSET=1234\n", ""),
        ("KERNELOFFSET=many\n", ""),
    ] {
        let case = Case {
            crash,
            without,
            ..Case::default()
        };
        let found = case.find().unwrap();
        assert_eq!((found.slide, found.symbols.slide()), (None, 0), "{crash}");
        assert_eq!(shown(&found.symbols), expected(&case));
    }
}

#[test]
fn with_page_table_isolation_the_kernels_own_tables_are_taken() {
    let case = Case::default();
    let (memory, cpu) = case.machine(true);
    let found = find(&memory, &cpu).unwrap();
    assert_eq!(found.space, cpu.address_space().isolated_kernel_view());
    assert_eq!(shown(&found.symbols), expected(&case));
}

#[test]
fn the_kernels_own_tables_are_preferred_to_a_processs() {
    let case = Case::default();
    let (mut memory, cpu) = case.machine(false);
    assert_eq!(find(&memory, &cpu).unwrap().space, cpu.address_space());
    let mut process = vec![0; PAGE as usize];
    memory.read_physical(Gpa(cpu.cr3), &mut process).unwrap();
    let own = physical(OWN_TABLES);
    memory.write(own, &process);
    assert_eq!(find(&memory, &cpu).unwrap().space.root, Gpa(own));
}

#[test]
fn what_is_missing_is_named() {
    let other = Case {
        fault: FAULT + 0x40,
        ..Case::default()
    };
    assert_says(
        other.find().unwrap_err(),
        "are not those of the running kernel: asm_exc_page_fault",
    );
    let (memory, cpu) = Case::default().machine(false);
    let elsewhere = CpuState {
        cr3: 0x45_0000,
        ..cpu
    };
    assert_says(
        find(&memory, &elsewhere).unwrap_err(),
        "at 0x450000 map no RAM",
    );
    let odd = CpuState {
        cr3: 0x45_1000,
        ..cpu
    };
    assert_says(find(&memory, &odd).unwrap_err(), "at 0x451000 map no RAM");
    let (mut memory, cpu) = Case::default().machine(false);
    memory.write(0x70_0000, &vec![0; (PAGES * PAGE) as usize]);
    let text = find(&memory, &cpu).unwrap_err().to_string();
    assert!(
        text.starts_with(
            "no kallsyms in the 0x80000 bytes of kernel memory from 0xffffffff9f200000"
        ),
        "{text}"
    );
}

#[test]
fn of_several_broken_tables_the_one_that_came_furthest_is_told() {
    let case = Case::default();
    let (mut memory, cpu) = case.machine(false);
    let image = case.image();
    let running_base = (BASE + case.slide).to_le_bytes();
    let tables = &image[TABLES as usize..BTF as usize];
    let base = TABLES + memchr::memmem::find(tables, &running_base).unwrap() as u64;
    let digits = memchr::memmem::find(tables, b"0\x001\x002\x003\0").unwrap();
    let tokens = &tables[(digits - 64) & !7..][..2048];
    // The kernel's own tables lack their addresses. A copy of the tokens, searched after them, has
    // no names either.
    memory.write(physical(base) + base % PAGE, &[0; 8]);
    memory.write(physical(OWN_TABLES), tokens);
    let text = find(&memory, &cpu).unwrap_err().to_string();
    assert!(
        text.contains("found 611 symbol names") && text.contains("no table of their addresses"),
        "{text}"
    );
}

#[test]
fn types_that_cannot_be_had_do_not_hide_the_symbols() {
    for (without, btf, expected) in [
        ("__stop_BTF", task_types().bytes(), "no __start_BTF"),
        ("", Vec::new(), "to 0xffffffff9f250000"),
        (
            "",
            b"no BTF".to_vec(),
            "cannot be used: the magic number is 0x6f6e",
        ),
    ] {
        let case = Case {
            without,
            btf,
            ..Case::default()
        };
        let found = case.find().unwrap();
        assert_says(found.types.unwrap_err(), expected);
        assert!(found.symbols.address_of("linux_banner").is_some());
    }
}

#![allow(clippy::unwrap_used)]
use super::*;
use crate::Gva;
use crate::kernel::list::Partial;
use crate::kernel::loaded_modules::{LoadedModules, ModuleSymbols};
use crate::kernel::module_memory::RangeKind;
use crate::kernel::task_list::{TaskInfo, TaskState};
use crate::kernel::test_kernel::{self, BASE, Member, TestKernel};
use crate::kernel::vma::tests as areas;
use crate::stack::frames::SavedRegisters;
use crate::x86_64::GeneralRegisters;

const NO_TYPES: &str = "the kernel image has no .BTF section";
const TEXT: u64 = 0xffff_ffff_8100_0000;
const MODULE: u64 = TEXT + 0x1_0000;

fn symbols() -> Symbols {
    test_kernel::symbols(&[
        ("_stext", TEXT),
        ("shared_name", TEXT + 0x1000),
        ("_end", TEXT + 0x10_0000),
    ])
}

/// Calls a closure with a paused system.
fn look<T>(
    kernel: &TestKernel,
    types: Result<&Btf, &str>,
    with: impl FnOnce(PausedSystem<'_>) -> T,
) -> T {
    let paused = PausedMemory::new(&kernel.memory);
    let types = types.cloned().map_err(str::to_owned);
    let system = System::new(&RunningKernel::new(symbols(), types, kernel.space), &paused);
    with(system.look(&paused, &[]))
}

fn task(mm: Option<u64>, is_kernel_thread: bool) -> TaskInfo {
    TaskInfo {
        address: Gva(BASE),
        pid: 7,
        tgid: 7,
        parent: 1,
        process_group: 7,
        session: 7,
        state: TaskState::Sleeping,
        comm: *b"a name\0\0\0\0\0\0\0\0\0\0",
        start_time: 0,
        flags: if is_kernel_thread { 0x0020_0000 } else { 0 },
        mm: mm.map(Gva),
        threads: 1,
        priority: 20,
        nice: 0,
        cpu: 0,
        on_cpu: Some(false),
    }
}

/// Returns a module with a page of text.
fn modules() -> LoadedModules {
    let end = MODULE + 0x1000;
    let module = test_kernel::module(BASE, "a_module", &[(RangeKind::Text, MODULE..end)]);
    let symbols = [("module_start", 0), ("shared_name", 0x800)];
    let symbols = symbols.map(|(name, offset)| (name, MODULE + offset, b't', false));
    let symbols = test_kernel::all_symbols(symbols, Some(end));
    LoadedModules::new(vec![ModuleSymbols::new(module, symbols)])
}

#[test]
fn a_kernel_without_types_names_each_question_that_it_leaves_open() {
    let user = task(Some(BASE), false);
    look(&TestKernel::default(), Err(NO_TYPES), |look| {
        let lost: Vec<_> = look.system().lost().map(|lost| lost.what).collect();
        let expected = [
            "which task a CPU runs",
            "processes",
            "what a process is made of",
            "namespaces",
            "users",
            "open files",
            "mappings",
            "the page cache",
            "the vdso",
            "modules",
            "the load",
            "the uptime",
            "kernel stacks",
        ];
        assert_eq!(lost, expected);
        assert!(look.system().lost().all(|lost| lost.reason == NO_TYPES));
        let no_modules = Partial {
            items: Vec::new(),
            error: None,
        };
        let asked = [
            ("processes", look.processes().err()),
            ("processes", look.threads().err()),
            ("processes", look.threads_of(&user).err()),
            ("processes", look.process(1).err()),
            ("what a process is made of", look.program(&user, 99).err()),
            ("namespaces", look.namespace_pid(&user).err()),
            ("open files", look.open_files(&user).err()),
            ("mappings", look.maps(&user).err()),
            ("mappings", look.objects(&user, None).err()),
            ("modules", look.modules().err()),
            ("modules", look.module_symbols(no_modules).err()),
            ("kernel stacks", look.kernel_unwinder(&[]).err()),
        ];
        for (what, lost) in asked {
            let text = lost.map(|lost| lost.to_string());
            let expected = format!("{what} cannot be read: {NO_TYPES}");
            assert_eq!(text, Some(expected));
        }
        assert!(look.cpu_of(&user).is_none() && look.process_view(&user).is_none());
        // Queries that need no types still work.
        assert_eq!(look.name(&user), b"a name");
        assert!(look.place(TEXT + 0x1004, None).is_some());
    });
}

#[test]
fn what_a_kernel_does_not_tell_is_lost_alone() {
    let types = areas::types(areas::Era::Maple).finish();
    let kernel = areas::guest(areas::Era::Maple, &areas::PROCESS);
    look(&kernel, Ok(&types), |look| {
        let lost: Vec<_> = look.system().lost().map(|lost| lost.what).collect();
        assert!(lost.contains(&"what a process is made of"), "{lost:?}");
        assert!(!lost.contains(&"mappings"), "{lost:?}");
        let maps = look.maps(&task(Some(areas::MM), false)).unwrap().unwrap();
        assert_eq!(maps.error, None);
        let areas: Vec<_> = maps
            .areas
            .iter()
            .map(|area| (area.area.start, area.file.inode))
            .collect();
        let expected = areas::PROCESS.map(|area| (area[0], if area[4] == 0 { 0 } else { 42 }));
        assert_eq!(areas, expected);
        // Another part finds the path.
        let name = String::from_utf8(maps.areas[0].name.clone()).unwrap();
        let reason = "[what a process is made of cannot be read: ";
        assert!(name.starts_with(reason), "{name}");
        assert_eq!(maps.areas[2].name, b"[heap]");
    });
}

#[test]
fn threads_of_the_kernel_and_what_has_ended_have_no_areas_and_no_objects() {
    let types = areas::types(areas::Era::Maple).finish();
    let kernel = areas::guest(areas::Era::Maple, &areas::PROCESS);
    look(&kernel, Ok(&types), |look| {
        for task in [
            task(None, true),
            task(Some(areas::MM), true),
            task(None, false),
        ] {
            assert_eq!(look.maps(&task), Ok(None));
            let objects = look.objects(&task, None).unwrap();
            assert!(objects.objects.is_empty() && objects.incomplete.is_empty());
        }
    });
}

#[test]
fn threads_of_the_kernel_and_what_has_ended_run_no_program() {
    let types = crate::kernel::process::tests::types();
    look(&TestKernel::default(), Ok(&types), |look| {
        for task in [task(None, true), task(Some(BASE), true), task(None, false)] {
            assert_eq!(look.program(&task, 99), Ok(None));
        }
        let broken = look.program(&task(Some(0x1000), false), 99).unwrap();
        let error = broken.unwrap().unwrap_err().to_string();
        assert!(
            error.starts_with("mm_struct: its pointer is 0x1000"),
            "{error}"
        );
    });
}

#[test]
fn modules_are_asked_before_the_kernel() {
    let modules = modules();
    look(&TestKernel::default(), Err(NO_TYPES), |look| {
        let named = |address, modules| {
            let place: Option<SymbolizedAddress> = look.place(address, modules);
            place.map(|place| (place.name, place.offset, place.module))
        };
        let of_module = Some("a_module".to_owned());
        for (address, expected) in [
            (TEXT - 1, None),
            (TEXT + 0x1004, Some(("shared_name", 4, None))),
            (MODULE - 1, Some(("shared_name", 0xefff, None))),
            (MODULE + 8, Some(("module_start", 8, of_module.clone()))),
            (MODULE + 0x801, Some(("shared_name", 1, of_module.clone()))),
            (MODULE + 0x1000, Some(("shared_name", 0x1_0000, None))),
            (TEXT + 0x20_0000, None),
            (0x1000, None),
        ] {
            let expected = expected.map(|(name, offset, module)| (name.to_owned(), offset, module));
            assert_eq!(named(address, Some(&modules)), expected, "{address:#x}");
        }
        // Without the modules, their addresses resolve to the kernel.
        let kernel = Some(("shared_name".to_owned(), 0xf008, None));
        assert_eq!(named(MODULE + 8, None), kernel);
        let places = look.places_named("shared_name", Some(&modules));
        let places: Vec<_> = places
            .iter()
            .map(|p| (p.address, p.module.as_deref()))
            .collect();
        let expected = [(TEXT + 0x1000, None), (MODULE + 0x800, Some("a_module"))];
        assert_eq!(places, expected);
        assert_eq!(look.places_named("no_such", Some(&modules)), []);
    });
}

#[test]
fn a_program_in_user_mode_is_in_no_system_call() {
    let cpu = CpuState {
        general: GeneralRegisters {
            rip: 0x40_1000,
            ..GeneralRegisters::default()
        },
        cs: 0x33,
        ..CpuState::default()
    };
    let registers = SavedRegisters::of_cpu(&cpu);
    assert_eq!(registers.general.rip, 0x40_1000);
    assert!(registers.in_user_mode());
    assert_eq!(registers.orig_rax, u64::MAX);
}

/// While a CPU switches tasks, it is on the next task's stack before the kernel marks that task
/// current.
#[test]
fn a_cpu_that_switches_tasks_runs_the_one_whose_stack_it_is_on() {
    const WORD: Member = Member::Bytes(8);
    const CURRENT: u64 = BASE + 0x800;
    const TASKS: [u64; 2] = [BASE + 0x1000, BASE + 0x2000];
    const INTERRUPT: u64 = BASE + 0x808;
    // The stacks of the next task, of the current one and of interrupts, in a row.
    const STACKS: [u64; 2] = [BASE + 0x10_4000, BASE + 0x10_0000];
    const INTERRUPTS: u64 = BASE + 0x10_8000;
    let types = test_kernel::types(&[
        ("thread_struct", &[("sp", 0, WORD)]),
        (
            "task_struct",
            &[
                ("stack", 0, WORD),
                ("thread", 8, Member::Of("thread_struct")),
                ("pid", 16, Member::Bytes(4)),
                ("tgid", 20, Member::Bytes(4)),
                ("comm", 24, Member::Bytes(16)),
                ("mm", 40, WORD),
            ],
        ),
    ]);
    let symbols = test_kernel::symbols(&[
        ("current_task", CURRENT),
        ("schedule", TEXT),
        ("hardirq_stack_ptr", INTERRUPT),
        ("_end", TEXT + 0x1000),
    ]);
    let mut kernel = TestKernel::default();
    kernel.words(CURRENT, &[TASKS[0], INTERRUPTS + 0x3ff8]);
    for (task, stack) in TASKS.into_iter().zip(STACKS) {
        kernel.words(task, &[stack]);
    }
    let paused = PausedMemory::new(&kernel.memory);
    let running = RunningKernel::new(symbols, Ok(types), kernel.space);
    let system = System::new(&running, &paused);
    for (what, rsp, cs, runs) in [
        ("on its own stack", STACKS[0] + 0x3000, 0x10, 0),
        (
            "on its own stack, which is empty",
            STACKS[0] + 0x4000,
            0x10,
            0,
        ),
        ("on the next one's", STACKS[1] + 0x3000, 0x10, 1),
        (
            "on the next one's, which is empty",
            STACKS[1] + 0x4000,
            0x10,
            1,
        ),
        ("on the interrupts'", INTERRUPTS + 0x3000, 0x10, 0),
        ("with the program's stack pointer", 0x7ffc_0000, 0x10, 0),
        ("in user mode", STACKS[1] + 0x3000, 0x33, 0),
    ] {
        let cpu = CpuState {
            general: GeneralRegisters {
                rsp,
                ..GeneralRegisters::default()
            },
            cs,
            ..CpuState::default()
        };
        let cpus = [cpu];
        let look = system.look(&paused, &cpus);
        let found = TASKS.map(|address| {
            let task = TaskInfo {
                address: Gva(address),
                ..task(None, true)
            };
            look.cpu_of(&task).is_some()
        });
        assert_eq!(found, [runs == 0, runs == 1], "{what}");
    }
}

#[test]
fn a_broken_list_of_modules_is_told_with_their_symbols() {
    const WORD: Member = Member::Bytes(8);
    const HALF: Member = Member::Bytes(4);
    const HEAD: u64 = BASE;
    let types = test_kernel::types(&[
        ("list_head", &[("next", 0, WORD), ("prev", 8, WORD)]),
        ("module_memory", &[("base", 0, WORD), ("size", 8, HALF)]),
        (
            "module",
            &[
                ("state", 0, HALF),
                ("list", 8, Member::Of("list_head")),
                ("name", 24, Member::Bytes(56)),
                ("mem", 320, Member::Bytes(7 * 12)),
                ("kallsyms", 512, WORD),
            ],
        ),
        (
            "mod_kallsyms",
            &[
                ("symtab", 0, WORD),
                ("num_symtab", 8, HALF),
                ("strtab", 16, WORD),
            ],
        ),
    ]);
    let symbols = test_kernel::symbols(&[("modules", HEAD), ("_end", TEXT)]);
    for (next, expected) in [
        (HEAD, None),
        (
            0x1000,
            Some("the list modules is broken: its link at 0xffff888001000000 leads to 0x1000"),
        ),
    ] {
        let mut kernel = TestKernel::default();
        kernel.words(HEAD, &[next]);
        let paused = PausedMemory::new(&kernel.memory);
        let running = RunningKernel::new(symbols.clone(), Ok(types.clone()), kernel.space);
        let system = System::new(&running, &paused);
        let look = system.look(&paused, &[]);
        let modules = look.modules().unwrap();
        let (loaded, errors) = look.module_symbols(modules).unwrap();
        assert!(loaded.modules().is_empty());
        let told = errors.first().map(ToString::to_string);
        assert_eq!(errors.len(), usize::from(expected.is_some()));
        assert!(
            told.as_deref()
                .zip(expected)
                .is_none_or(|(told, part)| told.starts_with(part)),
            "{told:?}"
        );
    }
}

#[test]
fn objects_that_cannot_be_read_are_bounded_too() {
    let types = areas::types(areas::Era::List).finish();
    let programs: Vec<areas::Area> = (0..5000)
        .map(|number| {
            let [_, _, rest @ ..] = areas::PROCESS[0];
            let start = 0x40_0000 + number * 0x2000;
            let mut area = [start, start + 0x1000, 0, 0, 0, 0, 0, 0];
            area[2..].copy_from_slice(&rest);
            area
        })
        .collect();
    let kernel = areas::guest(areas::Era::List, &programs);
    look(&kernel, Ok(&types), |look| {
        let user = task(Some(areas::MM), false);
        let found = look.objects(&user, None).unwrap();
        // One sentence for each, because this kernel's page cache layout is unknown, and one for
        // the rest.
        assert_eq!((found.objects.len(), found.incomplete.len()), (0, 4097));
        let last = found.incomplete.last().unwrap();
        assert_eq!(
            last,
            "only the first 4096 mapped objects are read, 904 are omitted"
        );
        // Ranges that are omitted may be executed all the same.
        assert_eq!(found.other_code.len(), programs.len());
    });
}

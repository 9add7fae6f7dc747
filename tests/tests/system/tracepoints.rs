//! Tracepoints, jump labels and the owners of pages, read from outside. They agree with the
//! kernel's image, with the guest's lists in tracefs, and with its behaviour when it traces.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use iced_x86::{Code, Decoder, DecoderOptions, FlowControl, Instruction};
use introspect::kernel::btf::Btf;
use introspect::kernel::jump_label::{JumpEntry, JumpLabelLayout, JumpLabels};
use introspect::kernel::page_cache::{PageCacheLayout, PageOwner};
use introspect::kernel::process::ProcessLayout;
use introspect::kernel::tracepoint::{Tracepoint, TracepointLayout, Tracepoints};
use introspect::system::PausedSystem;
use introspect::{Gpa, Gva, MemoryView};
use support::rich::{self, BRD};
use support::shell::COMMAND_LIMIT;
use support::{Kernel, Shell, crowd, host};

/// The size of a page in bytes.
const PAGE: u64 = 4096;
/// The size of the longest instruction in bytes.
const INSTRUCTION: usize = 15;
/// The number of instructions behind a branch that are searched for the call of its tracepoint.
const WAY_TO_CALL: usize = 64;
/// The tracepoint that is turned on in the guest, and those that the kernel then listens to itself,
/// to know the names of tasks.
const TURNED_ON: &str = "sched_process_exec";
const TURNED_ON_TOO: [&str; 3] = ["sched_switch", "sched_wakeup", "sched_wakeup_new"];

fn types(kernel: &Kernel) -> Btf {
    kernel.image.btf().unwrap_or_else(|e| panic!("{e}"))
}

/// Returns the tracepoints and jump labels of a guest, including those of its modules.
fn read(look: &PausedSystem<'_>, btf: &Btf) -> (Tracepoints, JumpLabels) {
    let symbols = look.system().symbols();
    let modules = look.modules().unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(modules.error, None);
    let tracepoints = TracepointLayout::new(btf, symbols).unwrap_or_else(|e| panic!("{e}"));
    let tracepoints = tracepoints.read_all(look.kernel(), &modules.items);
    assert_eq!(tracepoints.unread, []);
    let labels = JumpLabelLayout::new(btf, symbols).unwrap_or_else(|e| panic!("{e}"));
    let labels = labels.read_all(look.kernel(), &modules.items);
    assert_eq!(labels.unread, []);
    (tracepoints, labels)
}

fn find<'a>(all: &'a Tracepoints, name: &str) -> &'a Tracepoint {
    let found = all.items.iter().find(|item| item.name == name);
    found.unwrap_or_else(|| panic!("no tracepoint {name}"))
}

/// Returns the instruction at an address, as the guest has it in memory.
fn instruction(view: MemoryView<'_>, at: Gva) -> Instruction {
    let bytes = view.bytes(at, INSTRUCTION);
    let bytes = bytes.unwrap_or_else(|e| panic!("{e}"));
    Decoder::with_ip(64, &bytes, at.0, DecoderOptions::NONE).decode()
}

/// Returns whether a branch has one of the kernel's two forms: a NOP, or a JMP to its target.
fn is_rewritten(view: MemoryView<'_>, code: Gva, target: Gva) -> Result<bool, String> {
    let found = instruction(view, code);
    let fits = matches!(found.len(), 2 | 5);
    match found.code() {
        Code::Nop_rm32 | Code::Nopw | Code::Nopd if fits => Ok(false),
        Code::Jmp_rel8_64 | Code::Jmp_rel32_64
            if fits && found.near_branch_target() == target.0 =>
        {
            Ok(true)
        }
        _ => Err(format!("{code}: {found}, to {target}")),
    }
}

/// Returns whether the code from `at` on calls the tracepoint's functions, wherever it branches to
/// on the way.
fn calls(view: MemoryView<'_>, tracepoint: &Tracepoint, at: Gva) -> bool {
    let wanted = [tracepoint.call_trampoline, tracepoint.iterator].map(|to| to.map(|to| to.0));
    let (mut open, mut seen) = (vec![at.0], HashSet::new());
    while let Some(at) = open.pop() {
        if seen.len() > WAY_TO_CALL || !seen.insert(at) {
            continue;
        }
        let found = instruction(view, Gva(at));
        let to = found.near_branch_target();
        match found.flow_control() {
            FlowControl::Call if wanted.contains(&Some(to)) => return true,
            FlowControl::UnconditionalBranch if wanted.contains(&Some(to)) => return true,
            FlowControl::Next | FlowControl::Call | FlowControl::IndirectCall => {
                open.push(found.next_ip());
            }
            FlowControl::ConditionalBranch => open.extend([to, found.next_ip()]),
            FlowControl::UnconditionalBranch => open.push(to),
            _ => {}
        }
    }
    false
}

/// Returns the jump table of the kernel's file, which the kernel sorts when it starts: (code,
/// target, key, likely), ascending.
fn labels_of_image(kernel: &Kernel, slide: u64) -> Vec<(u64, u64, u64, bool)> {
    let symbols = kernel.image.symbols().unwrap_or_else(|e| panic!("{e}"));
    let bound = |name| symbols.address_of(name).unwrap_or_else(|| panic!("{name}"));
    let (start, end) = (bound("__start___jump_table"), bound("__stop___jump_table"));
    let length = usize::try_from(end - start).unwrap_or_else(|e| panic!("{e}"));
    let bytes = kernel.image.read_at_vaddr(start, length);
    let bytes = bytes.unwrap_or_else(|| panic!("no jump table in the image"));
    let entries = (start..).step_by(16).zip(bytes.as_chunks::<16>().0);
    let mut all: Vec<_> = entries
        .map(|(at, bytes)| {
            let word = u128::from_le_bytes(*bytes);
            let near = |shift: u32| i64::from((word >> shift) as u32 as i32);
            let key = (word >> 64) as u64;
            let running =
                |at: u64, distance: i64| at.wrapping_add_signed(distance).wrapping_add(slide);
            (
                running(at, near(0)),
                running(at + 4, near(32)),
                running(at + 8, (key & !3).cast_signed()),
                key & 1 == 1,
            )
        })
        .collect();
    all.sort_unstable();
    all
}

#[test]
fn the_tracepoints_are_those_of_the_image_and_of_tracefs() {
    let host = host!();
    let shell = rich::guest(host);
    let kernel = shell.linux.kernel;
    let btf = types(kernel);
    let events = shell
        .start("mount -t tracefs t /sys/kernel/tracing; cat /sys/kernel/tracing/available_events")
        .answer(4 * COMMAND_LIMIT);
    assert_eq!(events.status, 0, "{events:?}");
    // The events of system calls have no tracepoint of their own.
    let events: BTreeSet<(&str, &str)> = events
        .output
        .lines()
        .filter_map(|line| line.trim().split_once(':'))
        .filter(|(system, _)| *system != "syscalls")
        .collect();
    shell.linux.look(|look| {
        let (found, labels) = read(&look, &btf);
        let symbols = look.system().symbols();

        // Each with its name and at its address, and no other. Since Linux 6.16 some have a
        // `tracepoint_ext` besides.
        let is_extension = |name: &str| {
            let of = name.strip_prefix("ext_").map(|of| format!("__tracepoint_{of}"));
            of.is_some_and(|of| symbols.address_of(&of).is_some())
        };
        let mut named: Vec<(&str, u64)> = symbols
            .iter()
            .filter(|symbol| !symbol.is_text())
            .filter_map(|symbol| {
                let name = symbol.name.strip_prefix("__tracepoint_")?;
                (!is_extension(name)).then_some((name, symbol.address))
            })
            .collect();
        let items = found.items.iter();
        let mut read: Vec<_> = items.map(|item| (&item.name[..], item.address.0)).collect();
        named.sort_unstable();
        read.sort_unstable();
        assert_eq!(read, named);

        let systems: BTreeSet<(&str, &str)> = found
            .items
            .iter()
            .filter_map(|item| Some((item.system.as_deref()?, &item.name[..])))
            .collect();
        assert_eq!(systems, events);

        let view = look.kernel();
        let (mut sites, mut taken, mut init, mut calling, mut without) = (0, 0, 0, 0, Vec::new());
        let mut not_calling = Vec::new();
        let mut parameters = 0;
        for item in &found.items {
            let name = &item.name;
            let address_of = |prefix: &str| symbols.address_of(&format!("{prefix}{name}")).map(Gva);
            assert_eq!(item.iterator, address_of("__traceiter_"), "{name}");
            assert_eq!(item.call_trampoline, address_of("__SCT__tp_func_"), "{name}");
            assert_eq!(item.module, None, "{name}");
            // A tracepoint that must be registered has the function for it.
            let funcs = view.pointer(item.funcs).unwrap_or_else(|e| panic!("{e}"));
            assert_eq!(item.listening, funcs.is_some(), "{name}");
            assert!(!item.listening, "nobody traces: {name}");
            parameters += usize::from(item.parameters.is_some());
            if item.sites.is_empty() {
                without.push(&name[..]);
            }
            let mut own_calls = 0;
            for site in &item.sites {
                sites += 1;
                if site.init {
                    init += 1;
                    continue;
                }
                let is_jump = is_rewritten(view, site.address, site.target);
                taken += usize::from(is_jump.unwrap_or_else(|what| panic!("{name}: {what}")));
                own_calls += usize::from(calls(view, item, site.target));
            }
            calling += own_calls;
            if own_calls == 0 && item.sites.iter().any(|site| !site.init) {
                not_calling.push(&name[..]);
            }
        }
        let of_systems: BTreeSet<_> = systems.iter().map(|(system, _)| system).collect();
        println!(
            "{} tracepoints, {} of them with an event in one of {} systems, {parameters} with parameters; {sites} sites, \
             {init} of them in code that is freed, {calling} lead to the call; {} jump entries",
            found.items.len(),
            systems.len(),
            of_systems.len(),
            labels.entries().len()
        );
        println!("without sites: {without:?}\nwith sites of which none is before the call: {not_calling:?}");
        assert_eq!(taken, 0, "nobody traces");
        // Many sites only check whether the key is on, such as all that take the lock of a
        // process's memory. But somewhere is the call.
        assert!(not_calling.len() * 20 <= found.items.len(), "{not_calling:?}");
        assert!(without.len() * 5 <= found.items.len(), "{without:?}");
        assert_eq!(parameters, found.items.len());

        let registered: Vec<_> = found.items.iter().filter(|item| item.has_registration).collect();
        println!("to be registered: {:?}", registered.iter().map(|i| &i.name).collect::<Vec<_>>());
        for (name, expected) in [("sys_enter", true), ("sys_exit", true), ("sched_switch", false)] {
            assert_eq!(find(&found, name).has_registration, expected, "{name}");
        }
        let switch = find(&found, "sched_switch");
        assert_eq!(switch.system.as_deref(), Some("sched"));
        let declared: Vec<String> = switch.parameters.iter().flatten()
            .map(|p| format!("{} {}", p.type_name, p.name))
            .collect();
        // The last since Linux 5.18.
        let expected = [
            "bool preempt",
            "struct task_struct * prev",
            "struct task_struct * next",
            "unsigned int prev_state",
        ];
        assert!(declared == expected || declared == expected[..3], "{declared:?}");
        // In the scheduler and nowhere else.
        let place = switch.sites.iter().filter_map(|site| symbols.resolve(site.address.0));
        let places: Vec<&str> = place.map(|(symbol, _)| symbol.name).collect();
        assert_eq!(places, ["__schedule"]);

        let mut read: Vec<_> = labels.entries().iter().map(|entry| {
            let JumpEntry { code, target, key, likely, .. } = *entry;
            (code.0, target.0, key.0, likely)
        }).collect();
        read.sort_unstable();
        let slide = symbols.slide();
        assert!(read == labels_of_image(kernel, slide), "the jump table is not that of the image");
        for entry in labels.entries().iter().filter(|entry| !entry.init) {
            is_rewritten(view, entry.code, entry.target).unwrap_or_else(|what| panic!("{what}"));
        }
    });
}

#[test]
fn what_the_guest_traces_is_seen_to_be_traced() {
    let host = host!();
    let shell = rich::guest(host);
    let btf = types(shell.linux.kernel);
    let look = |expected: bool| {
        shell.linux.look(|look| {
            let (found, _) = read(&look, &btf);
            for item in &found.items {
                let name = &item.name[..];
                let traced = expected && (name == TURNED_ON || TURNED_ON_TOO.contains(&name));
                assert_eq!(item.listening, traced, "{}", item.name);
                for site in item.sites.iter().filter(|site| !site.init) {
                    let is_jump = is_rewritten(look.kernel(), site.address, site.target);
                    assert_eq!(is_jump, Ok(traced), "{}", item.name);
                }
            }
            let item = find(&found, TURNED_ON);
            assert!(!item.sites.is_empty());
            item.system.clone().unwrap_or_default()
        })
    };
    let system = look(false);
    let file = format!("/sys/kernel/tracing/events/{system}/{TURNED_ON}/enable");
    shell.type_lines(&[
        "mount -t tracefs t /sys/kernel/tracing",
        &format!("echo 1 > {file}"),
    ]);
    look(true);
    shell.type_lines(&[&format!("echo 0 > {file}")]);
    look(false);
}

#[test]
fn a_module_without_any_adds_none() {
    let host = host!();
    let shell = rich::guest(host);
    let btf = types(shell.linux.kernel);
    // It may have jump labels of its own: those in its text are ignored.
    let found = || {
        shell.linux.look(|look| {
            let (tracepoints, labels) = read(&look, &btf);
            let modules = look.modules().unwrap_or_else(|e| panic!("{e}")).items;
            let is_of_kernel = |label: &&JumpEntry| {
                let mut modules = modules.iter();
                modules.all(|module| module.range_of(label.code.0).is_none())
            };
            let labels: Vec<JumpEntry> = labels
                .entries()
                .iter()
                .filter(is_of_kernel)
                .copied()
                .collect();
            (tracepoints.items, labels)
        })
    };
    let before = found();
    shell.type_lines(&[&format!("insmod {BRD}")]);
    let after = found();
    let added = after.0.iter().filter(|it| !before.0.contains(it));
    assert_eq!(added.map(|it| &it.name).collect::<Vec<_>>(), [""; 0]);
    assert!(after == before, "of those before some are gone, or others");
}

#[test]
fn a_kernel_without_tracepoints_has_an_empty_list() {
    let host = host!();
    let shell = Shell::new(host);
    let btf = types(shell.linux.kernel);
    shell.linux.look(|look| {
        let layout = TracepointLayout::new(&btf, look.system().symbols());
        let layout = layout.unwrap_or_else(|e| panic!("{e}"));
        let found = layout.read_all(look.kernel(), &[]);
        assert_eq!(found, Tracepoints::default());
    });
}

/// Compares the owners of all pages with the files that processes have mapped. Returns the number
/// of pages of RAM that are a file's, and the number of compared mapped pages.
fn owners(look: &PausedSystem<'_>, btf: &Btf) -> (usize, usize) {
    let view = look.kernel();
    let cache = PageCacheLayout::new(btf, look.system().symbols());
    let cache = cache.unwrap_or_else(|e| panic!("{e}"));
    let layout = ProcessLayout::new(btf).unwrap_or_else(|e| panic!("{e}"));
    let mut owners = BTreeMap::<u64, PageOwner>::new();
    for range in view.physical().ram() {
        for gpa in range.step_by(PAGE as usize) {
            let owner = cache.owner(view, Gpa(gpa));
            if let Some(owner) = owner.unwrap_or_else(|e| panic!("{gpa:#x}: {e}")) {
                owners.insert(gpa, owner);
            }
        }
    }
    let places: HashSet<_> = owners.values().map(|it| (it.mapping, it.index)).collect();
    assert_eq!(places.len(), owners.len(), "a page for each place");

    let mut compared = 0;
    let processes = look.processes().unwrap_or_else(|e| panic!("{e}"));
    for process in &processes.items {
        let maps = look.maps(process).unwrap_or_else(|e| panic!("{e}"));
        let (Some(maps), Some(mm)) = (maps, process.user_mm()) else {
            continue;
        };
        let space = layout.address_space(view, mm);
        let user = view.with_space(space.unwrap_or_else(|e| panic!("{e}")));
        for area in maps.areas.iter().map(|named| named.area) {
            let file = area.file.map(|file| {
                let file = cache.open_file(view, file);
                file.unwrap_or_else(|e| panic!("{e}"))
            });
            let is_text = area.flags.permissions()[2] == b'x';
            for at in (area.start..area.end).step_by(PAGE as usize) {
                let Ok((gpa, _)) = user.locate(Gva(at)) else {
                    continue;
                };
                let owner = owners.get(&gpa.0).copied();
                let expected = file.map(|file| PageOwner {
                    mapping: file.mapping,
                    index: (area.file_offset + (at - area.start)) / PAGE,
                });
                let what = || format!("{} at {at:#x} in {area:?}", process.pid);
                match expected {
                    // Its own copy, because it wrote there, maybe before it dropped write
                    // permission: but never its code.
                    Some(_) if !is_text && owner.is_none() => continue,
                    _ => assert_eq!(owner, expected, "{}", what()),
                }
                compared += usize::from(expected.is_some());
            }
        }
    }
    (owners.len(), compared)
}

#[test]
fn pages_belong_to_the_files_that_map_them() {
    let host = host!();
    for shell in [rich::guest(host), crowd::guest(host)] {
        let btf = types(shell.linux.kernel);
        let (files, compared) = shell.linux.look(|look| owners(&look, &btf));
        println!("{files} pages of files, {compared} mapped ones compared");
        assert!(compared > 500 && files > compared / 100);
    }
}

//! Tests of the counterparts of OpenBSD's probes in a kernel, and their arguments.
#![allow(clippy::unwrap_used)]

use introspect::Gpa;
use introspect::kernel::symbols::SymbolsBuilder;
use introspect::x86_64::AddressSpace;
use probes::event::EventKind;
use probes::probe::{Signature, TracepointText};

use super::*;

/// Creates a kernel without types that has these functions.
pub(in crate::dt) fn kernel(functions: &[&str]) -> KernelView {
    let mut builder = SymbolsBuilder::default();
    for (index, name) in functions.iter().enumerate() {
        let address = 0xffff_ffff_8100_0000 + 0x100 * index as u64;
        builder.push(name.as_bytes(), address, b'T', false).unwrap();
    }
    let space = AddressSpace {
        root: Gpa(0),
        levels: 4,
    };
    KernelView::without_types(builder.finish(None), space)
}

/// Creates a tracepoint with arguments of these names and types.
pub(in crate::dt) fn tracepoint(system: &str, event: &str, arguments: &[(&str, &str)]) -> Probe {
    let arguments = arguments.iter().map(|(name, type_name)| Argument {
        name: (*name).to_owned(),
        type_name: (*type_name).to_owned(),
        is_string: false,
        translated: None,
    });
    Probe {
        name: ProbeName::new("tracepoint", KERNEL, system, event),
        signature: Some(Signature {
            arguments: arguments.collect(),
            returns: None,
        }),
        target: Target::Tracepoint(TracepointText {
            sites: vec![(Gva(1), Gva(2))],
            branches: vec![(Gva(1), Gva(2))],
            calls: vec![Gva(3)],
            call_sites: Vec::new(),
            listeners: Gva(4),
            structure: Gva(5),
            record: None,
        }),
    }
}

fn switch() -> Probe {
    let arguments = [
        ("preempt", "bool"),
        ("prev", "struct task_struct *"),
        ("next", "struct task_struct *"),
        ("prev_state", "unsigned int"),
    ];
    tracepoint("sched", "sched_switch", &arguments)
}

fn hit(arguments: &[u64]) -> Event {
    Event {
        probe: 0,
        kind: EventKind::Point,
        vcpu: 0,
        tsc: 0,
        pid: Some(1),
        tid: Some(1),
        pc: 0,
        arguments: arguments.to_vec(),
        comm: None,
        kernel_stack: Vec::new(),
        user_stack: Vec::new(),
        strings: Vec::new(),
    }
}

/// Returns a thread whose numbers derive from its address.
fn thread(task: u64) -> Thread {
    let task = task as u32;
    Thread {
        tid: task + 1,
        pid: task,
        cpu: task & 3,
    }
}

fn find<'a>(aliases: &'a Aliases, name: &str) -> &'a AliasProbe {
    let mut found = aliases.found.iter();
    let found = found.find(|alias| format!("{}:{}", alias.group, alias.event) == name);
    found.unwrap_or_else(|| panic!("no {name}: {:?}", aliases.missing))
}

#[test]
fn a_switch_is_off_cpu_with_who_comes_and_sleep_only_where_the_thread_waits() {
    let aliases = Aliases::new(&kernel(&["finish_task_switch.isra.0"]), &[switch()]);
    let off = find(&aliases, "sched:off__cpu");
    let sleep = find(&aliases, "sched:sleep");
    // The upper bits of a bool and an int have no meaning.
    let junk = 0xdead_0000_0000_0000;
    for (preempt, state, sleeps) in [
        (0, 1, true),
        (junk, junk | 2, true),
        (0, 0, false),
        (0, junk, false),
        (1, 1, false),
    ] {
        let event = hit(&[preempt, 0x500, 0x700, state]);
        let found = off.arguments(&event, 0, 100_000, thread).unwrap();
        assert_eq!(found, [0x701 + 100_000, 0x700]);
        let found = sleep.arguments(&event, 0, 0, thread);
        assert_eq!(found, sleeps.then(Vec::new), "{preempt:#x} {state:#x}");
    }
    let on = find(&aliases, "sched:on__cpu");
    assert_eq!(on.probes.len(), 1);
    assert!(on.types.is_empty());
}

#[test]
fn arguments_are_found_by_their_names() {
    let word = "unsigned long";
    let tracepoints = [
        tracepoint("sched", "sched_wakeup", &[("p", "struct task_struct *")]),
        tracepoint(
            "sched",
            "sched_migrate_task",
            &[("p", "struct task_struct *"), ("dest_cpu", "int")],
        ),
        tracepoint(
            "kmem",
            "kmalloc",
            &[
                ("call_site", word),
                ("ptr", "const void *"),
                ("bytes_req", "size_t"),
                ("bytes_alloc", "size_t"),
                ("gfp_flags", "gfp_t"),
            ],
        ),
        // Without the cache argument that other kernels have.
        tracepoint(
            "kmem",
            "kmem_cache_free",
            &[("call_site", word), ("ptr", "const void *")],
        ),
    ];
    let aliases = Aliases::new(&kernel(&[]), &tracepoints);
    for (name, arguments, expected, types) in [
        (
            "sched:wakeup",
            &[0x702][..],
            &[0x703, 0x702, 2][..],
            &["pid_t", "pid_t", "int"][..],
        ),
        (
            "sched:steal",
            &[0x702, 5],
            &[0x703, 0x702, 5],
            &["pid_t", "pid_t", "int"],
        ),
        (
            "uvm:malloc",
            &[1, 0x1000, 24, 32, 0xcc0],
            &[0, 0x1000, 24, 0xcc0],
            &["int", "void *", "size_t", "int"],
        ),
    ] {
        let alias = find(&aliases, name);
        let found = alias.arguments(&hit(arguments), 0, 0, thread).unwrap();
        assert_eq!(
            (found.as_slice(), alias.types.as_slice()),
            (expected, types),
            "{name}"
        );
    }
    let missing = aliases.missing.join("\n");
    for sentence in [
        "uvm:pool_put: the kernel's types do not describe an argument s of tracepoint kmem:kmem_cache_free",
        "uvm:pool_get: the kernel has no tracepoint kmem:kmem_cache_alloc",
        "uvm:fault: the kernel has no function handle_mm_fault",
        "vfs:cleaner: Linux has a page cache",
        "raw_syscalls:sys_enter: the kernel has neither x64_sys_call nor do_syscall_64",
        "rwlock:*: ",
    ] {
        assert!(missing.contains(sentence), "{sentence}: {missing}");
    }
}

#[test]
fn raw_system_calls_tell_their_number_of_every_call() {
    let aliases = Aliases::new(&kernel(&["x64_sys_call"]), &[]);
    let enter = find(&aliases, "raw_syscalls:sys_enter");
    // Without types, the registers are the first argument and the number the second.
    let found = enter.arguments(&hit(&[0x1000, 0xffff_ffff_0000_0001]), 0, 0, thread);
    assert_eq!(found, Some(vec![1]));
    let exit = find(&aliases, "raw_syscalls:sys_exit");
    assert_eq!(exit.probes.len(), syscall_table::all().len());
    assert_eq!(exit.arguments(&hit(&[7]), 39, 0, thread), Some(vec![39]));
}

#[test]
fn an_access_and_rights_are_prot_bits() {
    let alias = |value| AliasProbe {
        group: "uvm",
        event: "test",
        types: vec!["vm_prot_t"],
        probes: Vec::new(),
        values: vec![value],
        sleeping: None,
    };
    for (value, word, expected) in [
        (Found::Access(0), 0, PROT_READ),
        (Found::Access(0), FAULT_WRITE | 0x10, PROT_WRITE),
        (Found::Access(0), FAULT_INSTRUCTION, PROT_EXEC),
        (Found::Rights(0), 0x75, PROT_READ | PROT_EXEC),
        (Found::Rights(0), 0x73, PROT_READ | PROT_WRITE),
    ] {
        let found = alias(value).arguments(&hit(&[word]), 0, 0, thread);
        assert_eq!(found, Some(vec![expected]), "{value:?} {word:#x}");
    }
}

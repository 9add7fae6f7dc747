#![allow(clippy::unwrap_used)]
use proptest::prelude::*;

use super::*;
use crate::kernel::btf::Kind;
use crate::kernel::btf::test_types::TestBtf;
use crate::kernel::jump_label::tests::put as put_label;
use crate::kernel::test_kernel::{BASE, TestKernel, WILD, module, symbols};
use crate::test_says::assert_says;

const POINTERS: u64 = BASE + 0x1000;
const LABELS: u64 = BASE + 0x2000;
const HEAD: u64 = BASE + 0x3000;
const SWITCH: u64 = BASE + 0x4000;
const ENTER: u64 = BASE + 0x4100;
const BARE: u64 = BASE + 0x4200;
const IN_MODULE: u64 = BASE + 0x4300;
const EVENTS: u64 = BASE + 0x5000;
const CLASS: u64 = BASE + 0x6000;
const TEXTS: u64 = BASE + 0x7000;
const MODULE: u64 = BASE + 0x8000;
const MODULES_POINTERS: u64 = BASE + 0x8100;
const MODULES_LABELS: u64 = BASE + 0x8200;
const TEXT: u64 = BASE + 0x9000;
const EXTENSION: u64 = BASE + 0xa000;

/// The differences between kernels.
#[derive(Clone, Copy)]
struct Form {
    /// Whether pointers to tracepoints are distances.
    relative: bool,
    /// Whether `regfunc` is in the structure that `ext` points to.
    extended: bool,
}

const LINUX_6_1: Form = Form {
    relative: true,
    extended: false,
};

fn types(form: Form) -> Btf {
    let mut t = TestBtf::default();
    let int = t.add("int", Kind::Int, 0, 4, &[32]);
    let long = t.add("long int", Kind::Int, 0, 8, &[64]);
    let bool = t.add("bool", Kind::Int, 0, 1, &[8]);
    let data = t.add("", Kind::Pointer, 0, 0, &[]);
    let mut structure = |name, members: &[(&str, u32, u32)]| {
        let members: Vec<_> = members
            .iter()
            .map(|(name, offset, kind)| (*name, *kind, offset * 8))
            .collect();
        t.composite(name, Kind::Struct, false, 96, &members)
    };
    structure("jump_entry_of_another", &[]);
    let list = structure("list_head", &[("next", 0, long), ("prev", 8, long)]);
    let key = structure("static_key", &[("enabled", 0, int)]);
    let mut tracepoint = vec![
        ("name", 0, long),
        ("key", 8, key),
        ("static_call_tramp", 32, long),
        ("iterator", 40, long),
        ("funcs", 64, long),
    ];
    match form.extended {
        true => tracepoint.push(("ext", 72, long)),
        false => tracepoint.push(("regfunc", 48, long)),
    }
    structure("tracepoint", &tracepoint);
    structure("tracepoint_ext", &[("regfunc", 8, long)]);
    structure(
        "trace_event_call",
        &[("list", 0, list), ("class", 16, long), ("tp", 24, long)],
    );
    structure("trace_event_class", &[("system", 8, long)]);
    structure(
        "module",
        &[
            ("state", 0, int),
            ("num_tracepoints", 4, int),
            ("tracepoints_ptrs", 8, long),
            ("jump_entries", 16, long),
            ("num_jump_entries", 24, int),
        ],
    );
    let members = [("code", int, 0), ("target", int, 32), ("key", long, 64)];
    t.composite("jump_entry", Kind::Struct, false, 16, &members);
    let pointer = if form.relative { int } else { data };
    t.add("tracepoint_ptr_t", Kind::Typedef, 0, pointer, &[]);
    let task = t.add("task_struct", Kind::Struct, 0, 0, &[]);
    let task = t.add("", Kind::Pointer, 0, task, &[]);
    let [own, preempt, prev] = ["__data", "preempt", "prev"].map(|name| t.string(name));
    let named = [own, data, preempt, bool, prev, task];
    let unnamed = [0, data, 0, bool, 0, task];
    let named = t.add("", Kind::Prototype, 3, int, &named);
    t.add("__traceiter_sched_switch", Kind::Function, 0, named, &[]);
    // Ignored, because its length differs from the typedef's.
    t.add("__traceiter_sys_enter", Kind::Function, 0, named, &[]);
    let unnamed = t.add("", Kind::Prototype, 3, 0, &unnamed);
    let unnamed = t.add("", Kind::Pointer, 0, unnamed, &[]);
    t.add("btf_trace_sched_switch", Kind::Typedef, 0, unnamed, &[]);
    let enter = t.add("", Kind::Prototype, 2, 0, &[0, data, 0, long]);
    let enter = t.add("", Kind::Pointer, 0, enter, &[]);
    t.add("btf_trace_sys_enter", Kind::Typedef, 0, enter, &[]);
    // The module's tracepoint is not this one.
    t.add("btf_trace_brd_done", Kind::Typedef, 0, enter, &[]);
    Btf::parse(&t.bytes()).unwrap()
}

fn layout(form: Form) -> TracepointLayout {
    let size = if form.relative { 4 } else { 8 };
    let bounds = symbols(&[
        ("__start___tracepoints_ptrs", POINTERS),
        ("__stop___tracepoints_ptrs", POINTERS + 3 * size),
        ("__start___jump_table", LABELS),
        ("__stop___jump_table", LABELS + 3 * 16),
        ("ftrace_events", HEAD),
    ]);
    TracepointLayout::new(&types(form), &bounds).unwrap()
}

/// Makes three tracepoints of the kernel, of which the third has no event, and one of a module.
fn kernel(form: Form) -> TestKernel {
    let mut kernel = TestKernel::default();
    let names = ["sched_switch", "sys_enter", "bare_tp", "brd_done"];
    let all = [SWITCH, ENTER, BARE, IN_MODULE];
    for (index, (name, at)) in (0..).zip(names.into_iter().zip(all)) {
        let text = TEXTS + index * 0x20;
        kernel.put(text, format!("{name}\0"));
        let (trampoline, iterator) = (TEXT + index * 16, TEXT + 0x800 + index * 16);
        kernel.words(at, &[text, 0, 0, 0, trampoline, iterator]);
    }
    // `sys_enter` must be registered, and has a listener.
    kernel.words(ENTER + 64, &[BASE + 0xb000]);
    match form.extended {
        true => {
            kernel.words(ENTER + 72, &[EXTENSION]);
            kernel.words(EXTENSION + 8, &[TEXT]);
            kernel.words(BARE + 72, &[EXTENSION + 0x100]);
        }
        false => kernel.words(ENTER + 48, &[TEXT]),
    }
    for (index, at) in (0..).zip(&all[..3]) {
        match form.relative {
            true => {
                let entry = POINTERS + index * 4;
                kernel.put_all(&[(entry, at.wrapping_sub(entry), 4)]);
            }
            false => kernel.words(POINTERS + index * 8, &[*at]),
        }
    }
    let pointer = match form.relative {
        true => IN_MODULE.wrapping_sub(MODULES_POINTERS) & 0xffff_ffff,
        false => IN_MODULE,
    };
    kernel.words(MODULES_POINTERS, &[pointer]);
    kernel.put_all(&[
        (MODULE + 4, 1, 4),
        (MODULE + 8, MODULES_POINTERS, 8),
        (MODULE + 16, MODULES_LABELS, 8),
        (MODULE + 24, 1, 4),
    ]);
    put_label(&mut kernel, LABELS, 0, [TEXT + 9, TEXT + 0x90, SWITCH + 8]);
    put_label(
        &mut kernel,
        LABELS,
        1,
        [TEXT + 4, TEXT + 0x40, SWITCH + 8 + 2],
    );
    put_label(
        &mut kernel,
        LABELS,
        2,
        [TEXT + 1, TEXT + 0x10, BASE + 0xf000],
    );
    put_label(
        &mut kernel,
        MODULES_LABELS,
        0,
        [TEXT + 0x500, TEXT + 0x550, SWITCH + 8],
    );
    // The newest first: the module's, one of a system call, a second one of sched_switch, the
    // kernel's own.
    let events = [
        (IN_MODULE, CLASS + 0x40, "brd"),
        (TEXTS, CLASS + 0x80, "syscalls"),
        (SWITCH, CLASS + 0xc0, "custom"),
        (ENTER, CLASS + 0x100, "raw_syscalls"),
        (SWITCH, CLASS, "sched"),
    ];
    let mut link = HEAD;
    for (index, (tracepoint, class, system)) in (0..).zip(events) {
        let event = EVENTS + index * 0x40;
        kernel.words(link, &[event]);
        kernel.words(event, &[HEAD, 0, class, tracepoint]);
        kernel.words(class + 8, &[class + 0x20]);
        kernel.put(class + 0x20, format!("{system}\0"));
        link = event;
    }
    kernel
}

fn read(kernel: &TestKernel, form: Form) -> Tracepoints {
    kernel.look(|view| layout(form).read_all(view, &[module(MODULE, "brd", &[])]))
}

fn names(found: &Tracepoints) -> Vec<&str> {
    found.items.iter().map(|item| &item.name[..]).collect()
}

fn site(address: u64, target: u64, init: bool) -> Site {
    let (address, target) = (Gva(TEXT + address), Gva(TEXT + target));
    Site {
        address,
        target,
        init,
    }
}

#[test]
fn every_tracepoint_is_told_with_its_sites_system_and_parameters() {
    for (relative, extended) in [(true, false), (true, true), (false, false)] {
        let form = Form { relative, extended };
        let found = read(&kernel(form), form);
        assert_eq!(found.unread, []);
        let [switch, enter, bare, in_module] = &found.items[..] else {
            panic!("{:?}", names(&found))
        };
        for (item, name, system, of_module, address, index) in [
            (switch, "sched_switch", Some("sched"), None, SWITCH, 0),
            (enter, "sys_enter", Some("raw_syscalls"), None, ENTER, 1),
            (bare, "bare_tp", None, None, BARE, 2),
            (
                in_module,
                "brd_done",
                Some("brd"),
                Some("brd"),
                IN_MODULE,
                3,
            ),
        ] {
            assert_eq!(item.name, name);
            assert_eq!(item.system.as_deref(), system, "{name}");
            assert_eq!(item.module.as_deref(), of_module, "{name}");
            let places = [item.address, item.key, item.funcs].map(|at| at.0 - address);
            assert_eq!(places, [0, 8, 64], "{name}");
            assert_eq!(item.call_trampoline, Some(Gva(TEXT + index * 16)));
            assert_eq!(item.iterator, Some(Gva(TEXT + 0x800 + index * 16)));
            let own = item.address.0 == ENTER;
            assert_eq!(
                (item.listening, item.has_registration),
                (own, own),
                "{name}"
            );
        }
        let sites = [
            site(4, 0x40, true),
            site(9, 0x90, false),
            site(0x500, 0x550, false),
        ];
        assert_eq!(switch.sites, sites, "one of them in the module");
        assert!(enter.sites.is_empty() && in_module.sites.is_empty());
        let shown = |item: &Tracepoint| -> Option<Vec<String>> {
            let all = item.parameters.as_ref()?.iter();
            Some(all.map(|p| format!("{} {}", p.type_name, p.name)).collect())
        };
        let of_switch = ["bool preempt", "struct task_struct * prev"].map(str::to_owned);
        assert_eq!(shown(switch), Some(of_switch.to_vec()));
        assert_eq!(shown(enter), Some(vec!["long int ".to_owned()]));
        assert_eq!((shown(bare), shown(in_module)), (None, None));
    }
    assert_eq!(layout(LINUX_6_1).funcs_offset(), Some(64));
}

#[test]
fn what_is_damaged_is_lost_alone_and_told() {
    let all = ["sched_switch", "sys_enter", "bare_tp", "brd_done"];
    for (address, word, lost, part) in [
        (
            ENTER,
            WILD,
            "sys_enter",
            "the kernel: name of a tracepoint at",
        ),
        (ENTER, 0, "sys_enter", ": found \"\""),
        (ENTER, CLASS, "sys_enter", ": found \"\""),
        (
            IN_MODULE,
            0x40_0000,
            "brd_done",
            "module brd: name of a tracepoint: its pointer is 0x400000",
        ),
        (
            TEXTS,
            0x20_6120,
            "sched_switch",
            "at 0xffff888001004000: found \" a \"",
        ),
        (
            MODULE + 8,
            WILD,
            "brd_done",
            "module brd: list of tracepoints at",
        ),
        (
            MODULE + 4,
            0xffff_ffff,
            "brd_done",
            "module brd: invalid list of tracepoints",
        ),
        (POINTERS, 0x7fff_ffff, "sched_switch", "tracepoint at"),
        (
            MODULES_POINTERS,
            SWITCH.wrapping_sub(MODULES_POINTERS),
            "brd_done",
            "module brd: the tracepoint at 0xffff888001004000 is listed twice",
        ),
        (
            MODULE + 16,
            0,
            "",
            "module brd: jump table: its pointer is 0x0",
        ),
        (
            LABELS + 8,
            0x7fff << 48,
            "",
            "the kernel: 1 entries of the jump table are damaged",
        ),
        (
            CLASS + 0x100 + 8,
            0,
            "",
            "the event at 0xffff8880010050c0 has no system",
        ),
        (EVENTS + 0xc0 + 16, WILD, "", "trace_event_class at"),
        (EVENTS + 0x80, 0, "", "the list ftrace_events is broken"),
    ] {
        let mut kernel = kernel(LINUX_6_1);
        kernel.words(address, &[word]);
        let found = read(&kernel, LINUX_6_1);
        let mut expected: Vec<_> = all.into_iter().filter(|name| *name != lost).collect();
        if address == POINTERS {
            // The word is two pointers.
            expected.retain(|name| *name != "sys_enter");
        }
        assert_eq!(names(&found), expected, "{address:#x}");
        let told: Vec<String> = found.unread.iter().map(|error| error.to_string()).collect();
        assert!(
            told.iter().any(|told| told.contains(part)),
            "{part}: {told:?}"
        );
    }
}

#[test]
fn kernels_without_tracepoints_have_an_empty_list() {
    let found = |btf: &Btf, symbols: &Symbols| {
        let layout = TracepointLayout::new(btf, symbols).unwrap();
        let found = TestKernel::default().look(|view| layout.read_all(view, &[]));
        assert_eq!(found, Tracepoints::default());
        layout.funcs_offset()
    };
    let none = TestBtf::default();
    assert_eq!(
        found(&Btf::parse(&none.bytes()).unwrap(), &symbols(&[])),
        None
    );
    // Their types exist, but there are no tracepoints, events or jump labels.
    let empty = symbols(&[
        ("__start___tracepoints_ptrs", POINTERS),
        ("__stop___tracepoints_ptrs", POINTERS),
        ("__start___jump_table", 0),
        ("__stop___jump_table", 0),
    ]);
    assert_eq!(found(&types(LINUX_6_1), &empty), Some(64));
    let error = TracepointLayout::new(&types(LINUX_6_1), &symbols(&[])).unwrap_err();
    let text = error.to_string();
    assert_says(
        &text,
        "names no __start___tracepoints_ptrs, which lists its tracepoints",
    );
}

#[test]
fn types_that_name_too_much_are_refused() {
    // 127 parameters, each of a type with a name of the maximum length.
    let mut t = TestBtf::default();
    let data = t.add("", Kind::Pointer, 0, 0, &[]);
    let long = t.add(&"l".repeat(500), Kind::Struct, 0, 8, &[]);
    let mut words = vec![0, data];
    words.extend(std::iter::repeat_n([0, long], 127).flatten());
    let all = t.add("", Kind::Prototype, 128, 0, &words);
    let all = t.add("", Kind::Pointer, 0, all, &[]);
    t.add("btf_trace_sched_switch", Kind::Typedef, 0, all, &[]);
    let wide = Btf::parse(&t.bytes()).unwrap();
    let each = parameters::bytes(&parameters(&wide, "sched_switch").unwrap());
    // As many tracepoints of that name as needed.
    let count = (MAX_PARAMETER_BYTES / each) as u64 + 3;
    let mut kernel = kernel(LINUX_6_1);
    let list = BASE + 0x10_0000;
    for index in 0..count {
        let (entry, tracepoint) = (list + index * 4, list + 0x4_0000 + index * 80);
        kernel.put_all(&[
            (entry, tracepoint.wrapping_sub(entry), 4),
            (tracepoint, TEXTS, 8),
        ]);
    }
    let bounds = symbols(&[
        ("__start___tracepoints_ptrs", list),
        ("__stop___tracepoints_ptrs", list + count * 4),
        ("__start___jump_table", LABELS),
        ("__stop___jump_table", LABELS),
    ]);
    let mut layout = TracepointLayout::new(&types(LINUX_6_1), &bounds).unwrap();
    layout.btf = wide;
    let found = kernel.look(|view| layout.read_all(view, &[]));
    let told = found.items.iter().filter(|item| item.parameters.is_some());
    assert_eq!(
        (found.items.len() as u64, told.count() as u64),
        (count, count - 3)
    );
    let [error] = &found.unread[..] else {
        panic!("{:?}", found.unread)
    };
    let text = error.to_string();
    assert_says(&text, "from sched_switch on take more than");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]
    /// Reading ends and never panics, whatever memory holds.
    #[test]
    fn damage_never_panics(damage in prop::collection::vec((0u64..0xb000, any::<u64>()), 1..60)) {
        let mut kernel = kernel(LINUX_6_1);
        for (offset, word) in damage {
            kernel.words(BASE + 0x1000 + offset, &[word]);
        }
        let found = read(&kernel, LINUX_6_1);
        prop_assert!(found.items.len() as u64 <= 1 << 14);
        prop_assert!(found.items.iter().all(|item| !item.name.is_empty()));
    }
}

//! Current tasks of made-up kernels, and the errors of CPUs that have none.
#![allow(clippy::unwrap_used)]
use super::*;
use crate::kernel::btf::Kind;
use crate::kernel::btf::test_types::task_types;
use crate::kernel::test_kernel::all_symbols;
use crate::test_memory::{Flags, TestMemory};
use crate::test_says::assert_says;

const PER_CPU: u64 = 0xffff_8880_0700_0000;
const TASK: u64 = 0xffff_8880_0310_0fd0;
const SLIDE: u64 = 0x20_0000;

fn btf() -> Btf {
    Btf::parse(&task_types().bytes()).unwrap()
}

fn symbols(names: &[(&str, u64, bool)]) -> Symbols {
    let names = names.iter();
    let all = names.map(|(name, address, absolute)| (*name, *address, b'D', *absolute));
    all_symbols(all, None).with_slide(SLIDE)
}

/// Makes a CPU that runs a task across two pages that are apart in physical memory.
fn guest(current: u64, preempt: u64) -> (TestMemory, AddressSpace) {
    let mut memory = TestMemory::new(0x10_0000, 1 << 20);
    let space = memory.address_space(4);
    let flags = Flags::default().writable();
    memory.map(space, PER_CPU, 0x18_0000, 4096, flags);
    memory.map(space, TASK & !0xfff, 0x19_0000, 4096, flags);
    memory.map(space, (TASK & !0xfff) + 4096, 0x1a_0000, 4096, flags);
    memory.write(0x18_0000 + current, &TASK.to_le_bytes());
    memory.write(0x18_0000 + preempt, &0x8001_0000u32.to_le_bytes());
    // pid at offset 32 and tgid at 36 are before the page's end, comm at 48 is after it.
    memory.write(0x19_0ff0, &1234i32.to_le_bytes());
    memory.write(0x19_0ff4, &1200i32.to_le_bytes());
    memory.write(0x1a_0000, b"nginx: worker\0\0\0");
    (memory, space)
}

#[test]
fn a_task_in_the_direct_map_is_read_without_a_walk_and_another_one_by_a_walk() {
    const DIRECT: u64 = 0xffff_8880_0000_0000;
    const ELSEWHERE: u64 = 0xffff_ffff_8300_0000;
    let layout = TaskLayout {
        current: 0x100,
        preempt_count: None,
        preempt_form: PreemptForm::Int,
        pid: 0x20,
        tgid: 0x24,
        comm: 0x30,
    };
    let mut memory = TestMemory::new(0x10_0000, 1 << 20);
    let space = memory.address_space(4);
    let flags = Flags::default().writable();
    for page in [0x18_0000, 0x19_0000] {
        memory.map(space, DIRECT + page, page, 4096, flags);
    }
    memory.map(space, ELSEWHERE, 0x1a_0000, 4096, flags);
    for (place, pid) in [(0x19_0000, 41), (0x1a_0000, 0), (0x1b_0000, 43)] {
        memory.write(
            place + layout.pid,
            &[pid, 40u32].map(u32::to_le_bytes).concat(),
        );
    }
    let base = Gva(DIRECT + 0x18_0000);
    let walked = layout.per_cpu(&memory, space, base).unwrap();
    let [direct, other] = [DIRECT + 0x19_0000, ELSEWHERE].map(|task| {
        assert_eq!(walked.direct_map, None);
        walked.in_direct_map(&memory, space, Gva(task))
    });
    assert_eq!((direct.direct_map, other.direct_map), (Some(DIRECT), None));
    // The last is not mapped, so it is found only through the direct map.
    for (task, pids) in [
        (DIRECT + 0x19_0000, [Some(41), Some(41)]),
        (ELSEWHERE, [Some(0), Some(0)]),
        (DIRECT + 0x1b_0000, [None, Some(43)]),
    ] {
        memory.write(0x18_0000 + layout.current, &task.to_le_bytes());
        let found = [walked, direct].map(|per_cpu| {
            let thread = layout.current_thread_at(&memory, space, &per_cpu).ok()?;
            assert_eq!((thread.task, thread.tgid), (Gva(task), 40));
            Some(thread.pid)
        });
        assert_eq!(found, pids, "{task:#x}");
    }
}

#[test]
fn the_current_task_is_read_in_every_kernel_layout() {
    let in_image = 0xffff_ffff_8300_0000u64;
    for (names, base) in [
        (
            &[
                ("current_task", 0x100, true),
                ("__preempt_count", 0x80, true),
            ][..],
            PER_CPU,
        ),
        (&[("pcpu_hot", 0x100, true)], PER_CPU),
        (
            &[
                ("current_task", in_image + 0x100, false),
                ("__preempt_count", in_image + 0x80, false),
            ],
            PER_CPU.wrapping_sub(in_image + SLIDE),
        ),
    ] {
        let hot = names.len() == 1;
        let (memory, space) = guest(0x100, if hot { 0x108 } else { 0x80 });
        let layout = TaskLayout::new(&btf(), &symbols(names)).unwrap();
        let task = layout.current(&memory, space, Gva(base)).unwrap();
        assert_eq!(
            (task.pid, task.tgid, task.name()),
            (1234, 1200, &b"nginx: worker"[..]),
            "{names:?}"
        );
        assert_eq!(task.address, Gva(TASK));
        let per_cpu = layout.per_cpu(&memory, space, Gva(base)).unwrap();
        assert_eq!(layout.current_at(&memory, space, &per_cpu), Ok(task));
        assert_eq!(
            layout.current_thread_at(&memory, space, &per_cpu),
            Ok(Thread {
                task: task.address,
                pid: task.pid,
                tgid: task.tgid,
            })
        );
        assert_eq!(layout.comm(&memory, space, task.address), Ok(task.comm));
        let comm = layout.current_comm(&memory, space, &per_cpu, task.address);
        assert_eq!(comm, Some(task.comm));
        let count = layout.preempt_count(&memory, &per_cpu).unwrap().unwrap();
        assert!(count.in_hard_interrupt() && !count.in_nmi(), "{count:?}");
    }
}

#[test]
fn a_preemption_counter_of_64_bits_has_others_than_one_of_32() {
    let symbols = symbols(&[
        ("current_task", 0x100, true),
        ("__preempt_count", 0x80, true),
    ]);
    for (size, form) in [(4, PreemptForm::Int), (8, PreemptForm::Long)] {
        let mut types = task_types();
        let number = types.add("number", Kind::Int, 0, size, &[size * 8]);
        types.add("__preempt_count", Kind::Variable, 0, number, &[1]);
        let btf = Btf::parse(&types.bytes()).unwrap();
        let layout = TaskLayout::new(&btf, &symbols).unwrap();
        assert_eq!(layout.preempt_form, form);
    }
}

#[test]
fn cpus_that_run_no_task_say_why() {
    let layout = TaskLayout::new(&btf(), &symbols(&[("current_task", 0x100, true)])).unwrap();
    let (mut memory, space) = guest(0x100, 0x80);
    assert_says(
        layout.current(&memory, space, Gva(0)).unwrap_err(),
        "per-CPU data at 0x0 is not mapped",
    );
    memory.write(0x18_0100, &0x1000u64.to_le_bytes());
    assert_eq!(
        layout.current(&memory, space, Gva(PER_CPU)),
        Err(TaskError::NotATask { found: Gva(0x1000) })
    );
    memory.write(0x18_0100, &u64::MAX.to_le_bytes());
    let wild = layout.current(&memory, space, Gva(PER_CPU)).unwrap_err();
    assert!(
        matches!(
            wild,
            TaskError::Unreadable {
                task: Gva(u64::MAX),
                ..
            }
        ),
        "{wild}"
    );
    let per_cpu = layout.per_cpu(&memory, space, Gva(PER_CPU)).unwrap();
    assert_eq!(
        layout.preempt_count(&memory, &per_cpu),
        Ok(None),
        "not named by this kernel"
    );
}

#[test]
fn kernels_without_the_names_are_refused() {
    assert_eq!(
        TaskLayout::new(&btf(), &symbols(&[])),
        Err(TaskLayoutError::NoCurrent)
    );
    let empty = Btf::parse(&crate::kernel::btf::test_types::TestBtf::default().bytes()).unwrap();
    let error = TaskLayout::new(&empty, &symbols(&[("current_task", 0x100, true)])).unwrap_err();
    assert_says(&error, "no struct, union or typedef \"task_struct\"");
}

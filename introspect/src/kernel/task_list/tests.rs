#![allow(clippy::unwrap_used)]
use proptest::prelude::*;

use super::*;
use crate::PausedMemory;
use crate::kernel::test_kernel::{BASE, HALF, Member, TestKernel, WORD, symbols, types};
use crate::test_says::assert_says;

/// The offsets used by the tests.
const FLAGS: u64 = 0x2c;
const PID: u64 = 0x50;
const THREAD_NODE: u64 = 0xb0;
const TASKS: u64 = 0x40;
const SIGNAL: u64 = 0x70;
const SIGHAND: u64 = 0x78;
const COMM: u64 = 0x80;
const KTHREAD: u64 = 0x90;
const THREAD_HEAD: u64 = 0x10;
/// Structures of 256 bytes each: the first task, two processes, a thread of the second; their
/// shared structures, and a `struct pid` for their groups.
const INIT: u64 = BASE;
const SHELL: u64 = BASE + 0x100;
const WORKER: u64 = BASE + 0x200;
const THREAD: u64 = BASE + 0x300;
const SHELL_SIGNAL: u64 = BASE + 0x400;
const WORKER_SIGNAL: u64 = BASE + 0x500;
const GROUP: u64 = BASE + 0x600;
const INIT_SIGNAL: u64 = BASE + 0x700;
const WORKER_KTHREAD: u64 = BASE + 0x800;
const WORKER_DATA: u64 = BASE + 0x900;

/// The kernels whose tasks differ: the name and size of the state, and the member with a kernel
/// thread's pointer.
const KERNELS: [(&str, Member, &str, &str); 2] = [
    ("__state", HALF, "start_boottime", "worker_private"),
    ("state", WORD, "real_start_time", "set_child_tid"),
];

fn layout(kernel: (&'static str, Member, &'static str, &'static str)) -> TaskListLayout {
    let (state, size, start, kthread) = kernel;
    let task = [
        (state, 0, size),
        ("exit_state", 0x28, HALF),
        ("flags", FLAGS as u32, HALF),
        ("prio", 0x30, HALF),
        ("static_prio", 0x34, HALF),
        ("cpu", 0x38, HALF),
        ("on_cpu", 0x3c, HALF),
        ("tasks", TASKS as u32, Member::Bytes(16)),
        ("pid", PID as u32, HALF),
        ("tgid", 0x54, HALF),
        ("real_parent", 0x58, WORD),
        ("mm", 0x60, WORD),
        ("signal", SIGNAL as u32, WORD),
        ("sighand", SIGHAND as u32, WORD),
        ("comm", COMM as u32, Member::Bytes(16)),
        (kthread, KTHREAD as u32, WORD),
        (start, 0x98, WORD),
        ("thread_node", THREAD_NODE as u32, Member::Bytes(16)),
    ];
    let btf = types(&[
        ("task_struct", &task),
        (
            "signal_struct",
            &[
                ("nr_threads", 8, HALF),
                ("thread_head", THREAD_HEAD as u32, Member::Bytes(16)),
                ("pids", 0x20, Member::Bytes(32)),
            ],
        ),
        ("upid", &[("nr", 4, HALF)]),
        ("pid", &[("numbers", 0x60, Member::Of("upid"))]),
        (
            "kthread",
            &[("data", 0x18, WORD), ("full_name", 0x20, WORD)],
        ),
        (
            "worker",
            &[
                ("current_work", 0, WORD),
                ("pool", 8, WORD),
                ("desc", 16, Member::Bytes(24)),
            ],
        ),
    ]);
    TaskListLayout::new(&btf, &symbols(&[("init_task", INIT)])).unwrap()
}

/// Makes a shell with one thread, and a kernel worker that for the test has a second one.
fn guest() -> TestKernel {
    let mut kernel = TestKernel::default();
    for (task, pid, tgid, parent, signal, comm) in [
        (INIT, 0u64, 0u64, INIT, INIT_SIGNAL, "swapper/0"),
        (SHELL, 10, 10, INIT, SHELL_SIGNAL, "sh"),
        (WORKER, 20, 20, SHELL, WORKER_SIGNAL, "kworker/0:1"),
        (THREAD, 21, 20, SHELL, WORKER_SIGNAL, "second thread"),
    ] {
        kernel.put_all(&[
            (task + PID, pid, 4),
            (task + 0x54, tgid, 4),
            (task + 0x58, parent, 8),
            (task + SIGNAL, signal, 8),
            (task + SIGHAND, BASE, 8),
            (task + 0x98, 1_239_999_999, 8),
            (task + 0x30, 120, 4),
            (task + 0x34, 120, 4),
        ]);
        kernel.put(task + COMM, comm);
    }
    for (place, next) in [
        (INIT + TASKS, SHELL + TASKS),
        (SHELL + TASKS, WORKER + TASKS),
        (WORKER + TASKS, INIT + TASKS),
        (SHELL_SIGNAL + THREAD_HEAD, SHELL + THREAD_NODE),
        (SHELL + THREAD_NODE, SHELL_SIGNAL + THREAD_HEAD),
        (WORKER_SIGNAL + THREAD_HEAD, WORKER + THREAD_NODE),
        (WORKER + THREAD_NODE, THREAD + THREAD_NODE),
        (THREAD + THREAD_NODE, WORKER_SIGNAL + THREAD_HEAD),
    ] {
        kernel.put_all(&[(place, next, 8)]);
    }
    kernel.put_all(&[
        (SHELL, 1, 4),
        (SHELL + 0x30, 115, 4),
        (SHELL + 0x34, 115, 4),
        (SHELL + 0x38, 3, 4),
        (SHELL + 0x3c, 1, 4),
        (SHELL + 0x60, BASE + 0x5000, 8),
        (SHELL + 0x68, BASE + 0x5000, 8),
        (SHELL_SIGNAL + 8, 1, 4),
        // Its group is 9; it has no session.
        (SHELL_SIGNAL + 0x30, GROUP, 8),
        (GROUP + 0x64, 9, 4),
        (WORKER, 0x402, 4),
        (WORKER + FLAGS, 0x0020_0020, 4),
        (WORKER + KTHREAD, WORKER_KTHREAD, 8),
        (WORKER_SIGNAL + 8, 2, 4),
        (WORKER_KTHREAD + 0x18, WORKER_DATA, 8),
        (WORKER_DATA + 8, BASE, 8),
    ]);
    kernel.put(WORKER_DATA + 16, b"events\0");
    kernel
}

fn pids(tasks: &Tasks) -> Vec<i32> {
    tasks.items.iter().map(|task| task.pid).collect()
}

#[test]
fn a_task_is_read_in_every_layout() {
    for names in KERNELS {
        let kernel = guest();
        let paused = PausedMemory::new(&kernel.memory);
        let found = layout(names).process(kernel.view(&paused), 10);
        let task = found.unwrap().unwrap();
        let expected = TaskInfo {
            address: Gva(SHELL),
            pid: 10,
            tgid: 10,
            parent: 0,
            process_group: 9,
            session: 0,
            state: TaskState::Sleeping,
            comm: *b"sh\0\0\0\0\0\0\0\0\0\0\0\0\0\0",
            start_time: 1_239_999_999,
            flags: 0,
            mm: Some(Gva(BASE + 0x5000)),
            threads: 1,
            priority: 15,
            nice: -5,
            cpu: 3,
            on_cpu: Some(true),
        };
        assert_eq!(task, expected);
        assert_eq!((task.name(), task.start_ticks()), (&b"sh"[..], 123));
        assert!(!task.is_kernel_thread());
    }
}

#[test]
fn processes_and_threads_are_listed_and_found() {
    let kernel = guest();
    let paused = PausedMemory::new(&kernel.memory);
    let view = kernel.view(&paused);
    let layout = layout(KERNELS[0]);
    let processes = layout.processes(view);
    assert_eq!((pids(&processes), processes.error), (vec![10, 20], None));
    assert_eq!(layout.first_process(view).map(|task| task.pid), Ok(10));
    let threads = layout.threads(view, &processes.items[1]);
    assert_eq!((pids(&threads), threads.error), (vec![20, 21], None));
    let all = layout.all_threads(view);
    assert_eq!((pids(&all), all.error), (vec![10, 20, 21], None));
    for (pid, process, thread) in [
        (10, Some(SHELL), Some(SHELL)),
        (21, None, Some(THREAD)),
        (0, None, None),
        (-1, None, None),
    ] {
        let address = |found: Result<Option<TaskInfo>, _>| found.map(|t| t.map(|t| t.address.0));
        assert_eq!(address(layout.process(view, pid)), Ok(process), "{pid}");
        assert_eq!(address(layout.thread(view, pid)), Ok(thread), "{pid}");
    }
    for (name, expected) in [
        (&b"sh"[..], &[10][..]),
        (b"s", &[]),
        (b"kworker/0:1", &[20]),
        (b"kworker/0:1-events", &[20]),
    ] {
        assert_eq!(pids(&layout.named(view, name)), expected);
    }
}

#[test]
fn a_task_that_is_being_removed_has_no_relatives() {
    let mut kernel = guest();
    kernel.put_all(&[
        (SHELL + SIGHAND, 0, 8),
        (SHELL, 0x80, 4),
        (SHELL + 0x28, 0x10, 4),
    ]);
    let paused = PausedMemory::new(&kernel.memory);
    let task = layout(KERNELS[0]).process(kernel.view(&paused), 10);
    let task = task.unwrap().unwrap();
    let found = (
        task.state,
        task.parent,
        task.process_group,
        task.session,
        task.threads,
    );
    assert_eq!(found, (TaskState::Dead, 0, -1, -1, 0));
}

#[test]
fn kernel_threads_have_their_long_names() {
    const NAME: u64 = BASE + 0xa00;
    for (changes, expected) in [
        (&[][..], "kworker/0:1-events"),
        (&[(WORKER_DATA, BASE, 8)], "kworker/0:1+events"),
        (&[(WORKER_DATA + 8, 0, 8)], "kworker/0:1"),
        (&[(WORKER_DATA + 16, 0, 8)], "kworker/0:1"),
        // Before Linux 6.10 the long name does not apply to workers.
        (&[(WORKER_KTHREAD + 0x20, NAME, 8)], "kworker/0:1-events"),
        (
            &[
                (WORKER_KTHREAD + 0x20, NAME, 8),
                (WORKER + FLAGS, 0x0020_0000, 4),
            ],
            "a name of more than 15 bytes",
        ),
        (&[(WORKER + FLAGS, 0x0020_0000, 4)], "kworker/0:1"),
        (&[(WORKER + FLAGS, 0, 4)], "kworker/0:1"),
        (&[(WORKER + KTHREAD, 0, 8)], "kworker/0:1"),
    ] {
        for names in KERNELS {
            let mut kernel = guest();
            kernel.put(NAME, b"a name of more than 15 bytes\0");
            kernel.put_all(changes);
            let paused = PausedMemory::new(&kernel.memory);
            let view = kernel.view(&paused);
            let layout = layout(names);
            let task = layout.process(view, 20).unwrap().unwrap();
            let name = layout.full_name(view, &task).unwrap();
            assert_eq!(String::from_utf8(name).unwrap(), expected);
        }
    }
}

#[test]
fn a_broken_task_is_left_out_and_told() {
    for (broken, expected, part) in [
        (
            (SHELL + SIGNAL, 0, 8),
            &[20][..],
            "the task at 0xffff888001000100 is left out: signal_struct: its pointer is 0x0",
        ),
        (
            (SHELL + 0x58, 0x1000, 8),
            &[20],
            "task_struct (real_parent): its pointer is 0x1000",
        ),
        (
            (SHELL_SIGNAL + 0x30, u64::MAX - 3, 8),
            &[20],
            "pid at 0xfffffffffffffffc cannot be read",
        ),
        (
            (SHELL + TASKS, SHELL + TASKS, 8),
            &[10],
            "the list init_task.tasks is broken: it comes back to 0xffff888001000140",
        ),
        (
            (WORKER + TASKS, 0, 8),
            &[10, 20],
            "its link at 0xffff888001000240 leads to 0x0",
        ),
    ] {
        let mut kernel = guest();
        kernel.put_all(&[broken]);
        let paused = PausedMemory::new(&kernel.memory);
        let view = kernel.view(&paused);
        let layout = layout(KERNELS[0]);
        let processes = layout.processes(view);
        assert_eq!(pids(&processes), expected, "{part}");
        let error = processes.error.unwrap().to_string();
        assert_says(&error, part);
        assert_eq!(
            layout.all_threads(view).error.map(|e| e.to_string()),
            Some(error)
        );
    }
}

#[test]
fn a_number_that_a_broken_list_may_hide_is_no_clean_miss() {
    let mut kernel = guest();
    kernel.put_all(&[(WORKER + THREAD_NODE, 0, 8)]);
    let paused = PausedMemory::new(&kernel.memory);
    let view = kernel.view(&paused);
    let layout = layout(KERNELS[0]);
    assert_eq!(layout.process(view, 21), Ok(None));
    assert_says(
        layout.thread(view, 21).unwrap_err(),
        "signal_struct.thread_head is broken",
    );
    assert!(layout.thread(view, 20).is_ok_and(|found| found.is_some()));
}

#[test]
fn kernels_that_do_not_name_their_first_task_are_refused() {
    let error = TaskListLayout::new(
        &types(&[("task_struct", &[("tasks", 0, Member::Bytes(16))])]),
        &symbols(&[]),
    );
    let error = error.err().unwrap().to_string();
    assert_says(&error, "names no init_task, which starts the list");
}

proptest! {
    #[test]
    fn damage_ends_in_bounded_lists(damage in prop::collection::vec((0..10u64, 0..32u64, 0..42u64), 1..8)) {
        let mut kernel = guest();
        for (structure, word, value) in damage {
            // Pointers to structures and to links, and non-pointers.
            let value = match value {
                0..40 => BASE + 0x100 * (value / 4) + [0, TASKS, THREAD_NODE, THREAD_HEAD][(value % 4) as usize],
                40 => 0,
                _ => u64::MAX,
            };
            kernel.put_all(&[(BASE + 0x100 * structure + 8 * word, value, 8)]);
        }
        let paused = PausedMemory::new(&kernel.memory);
        let view = kernel.view(&paused);
        let layout = layout(KERNELS[0]);
        // There are as many links as places for them.
        prop_assert!(layout.processes(view).items.len() <= 40);
        let all = layout.all_threads(view);
        prop_assert!(all.items.len() <= 40 * 40);
        for task in &all.items {
            prop_assert!(layout.full_name(view, task).map_or(0, |name| name.len()) <= 63);
        }
    }
}

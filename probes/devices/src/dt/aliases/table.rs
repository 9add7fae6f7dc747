//! The table of OpenBSD's static probes, with their places and arguments in Linux.

use AliasTarget::{Functions, Nowhere, SystemCallEntry, SystemCallReturn, Tracepoint};
use Value::{Access, Cpu, End, Number, Pid, Rights, Tid, Untold, Word};

/// The place in Linux at which an alias fires.
#[derive(Debug, Clone, Copy)]
pub(super) enum AliasTarget {
    /// A tracepoint: system and event.
    Tracepoint(&'static str, &'static str),
    /// The entry of the first of these functions that the kernel has.
    Functions(&'static [&'static str]),
    /// Every system call's entry.
    SystemCallEntry,
    /// Every system call's return.
    SystemCallReturn,
    /// No place, for this reason.
    Nowhere(&'static str),
}

/// The source of an OpenBSD argument. Names are those of Linux's arguments.
#[derive(Debug, Clone, Copy)]
pub(super) enum Value {
    /// The number of a task's thread.
    Tid(&'static str),
    /// The number of a task's process.
    Pid(&'static str),
    /// The CPU of a task.
    Cpu(&'static str),
    /// An argument unchanged.
    Word(&'static str),
    /// An end: the sum of a start and a length, or the argument `end` if there is one.
    End {
        start: &'static str,
        length: &'static str,
        end: &'static str,
    },
    /// The protection in a `vm_flags`: VM_READ, VM_WRITE and VM_EXEC as PROT_READ, PROT_WRITE and
    /// PROT_EXEC. Linux 7.3 passes a structure of the same bits under another name.
    Rights([&'static str; 2]),
    /// The access in a `fault_flag`, as PROT_ bits.
    Access(&'static str),
    /// The number of the system call.
    Number,
    /// Not available in Linux.
    Untold,
}

/// The hits that count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Condition {
    All,
    /// Those of `sched_switch` in which the previous thread sleeps and was not preempted.
    Sleeping,
}

/// One of OpenBSD's probes.
pub(super) struct Alias {
    pub(super) group: &'static str,
    pub(super) event: &'static str,
    /// OpenBSD's types, with the sources of the values.
    pub(super) arguments: &'static [(&'static str, Value)],
    pub(super) place: AliasTarget,
    pub(super) only: Condition,
}

const fn alias(
    group: &'static str,
    event: &'static str,
    place: AliasTarget,
    arguments: &'static [(&'static str, Value)],
) -> Alias {
    Alias {
        group,
        event,
        arguments,
        place,
        only: Condition::All,
    }
}

const TID_PID: &[(&str, Value)] = &[("pid_t", Tid("p")), ("pid_t", Pid("p"))];
const TID_PID_CPU: &[(&str, Value)] =
    &[("pid_t", Tid("p")), ("pid_t", Pid("p")), ("int", Cpu("p"))];
const NO_BUFFER_CACHE: &str =
    "Linux has a page cache and no buffer cache; see filemap:mm_filemap_add_to_page_cache";
const NO_STOP: &str =
    "Linux stops and continues threads by signals in no one place; see signal:signal_deliver";

/// The probes of all groups with a counterpart in Linux.
pub(super) static ALIASES: &[Alias] = &[
    // Threads of the fair class; others use methods of their own classes. Since 6.12 all share
    // functions, but compilers inline these into their callers, so not all calls would be seen
    // there.
    alias(
        "sched",
        "dequeue",
        Functions(&["dequeue_task_fair", "dequeue_task"]),
        TID_PID,
    ),
    alias(
        "sched",
        "enqueue",
        Functions(&["enqueue_task_fair", "enqueue_task"]),
        TID_PID,
    ),
    alias(
        "sched",
        "fork",
        Tracepoint("sched", "sched_wakeup_new"),
        TID_PID_CPU,
    ),
    alias(
        "sched",
        "off__cpu",
        Tracepoint("sched", "sched_switch"),
        &[("pid_t", Tid("next")), ("pid_t", Pid("next"))],
    ),
    // The first function that runs in the incoming thread.
    alias(
        "sched",
        "on__cpu",
        Functions(&["finish_task_switch", "finish_task_switch.isra.0"]),
        &[],
    ),
    alias(
        "sched",
        "remain__cpu",
        Nowhere("Linux does not mark that its scheduler picks the running thread again"),
        &[],
    ),
    Alias {
        group: "sched",
        event: "sleep",
        arguments: &[],
        place: Tracepoint("sched", "sched_switch"),
        only: Condition::Sleeping,
    },
    alias(
        "sched",
        "steal",
        Tracepoint("sched", "sched_migrate_task"),
        &[
            ("pid_t", Tid("p")),
            ("pid_t", Pid("p")),
            ("int", Word("dest_cpu")),
        ],
    ),
    alias("sched", "stop", Nowhere(NO_STOP), &[]),
    alias(
        "sched",
        "unsleep",
        Tracepoint("sched", "sched_waking"),
        TID_PID,
    ),
    alias("sched", "unstop", Nowhere(NO_STOP), &[]),
    alias(
        "sched",
        "wakeup",
        Tracepoint("sched", "sched_wakeup"),
        TID_PID_CPU,
    ),
    alias(
        "raw_syscalls",
        "sys_enter",
        SystemCallEntry,
        &[("register_t", Number)],
    ),
    alias(
        "raw_syscalls",
        "sys_exit",
        SystemCallReturn,
        &[("register_t", Number)],
    ),
    // Linux finds out the kind of fault later, so it is 0.
    alias(
        "uvm",
        "fault",
        Functions(&["handle_mm_fault"]),
        &[
            ("vaddr_t", Word("address")),
            ("vm_fault_t", Untold),
            ("vm_prot_t", Access("flags")),
        ],
    ),
    alias(
        "uvm",
        "map_insert",
        Functions(&["mmap_region"]),
        &[
            ("vaddr_t", Word("addr")),
            (
                "vaddr_t",
                End {
                    start: "addr",
                    length: "len",
                    end: "",
                },
            ),
            ("vm_prot_t", Rights(["vm_flags", "vma_flags"])),
        ],
    ),
    // The unmapped pages may have several protections.
    alias(
        "uvm",
        "map_remove",
        Functions(&[
            "do_vmi_align_munmap",
            "do_mas_align_munmap",
            "do_vmi_munmap",
            "do_mas_munmap",
            "__do_munmap",
        ]),
        &[
            ("vaddr_t", Word("start")),
            (
                "vaddr_t",
                End {
                    start: "start",
                    length: "len",
                    end: "end",
                },
            ),
            ("vm_prot_t", Untold),
        ],
    ),
    // Linux's allocations have no type.
    alias(
        "uvm",
        "malloc",
        Tracepoint("kmem", "kmalloc"),
        &[
            ("int", Untold),
            ("void *", Word("ptr")),
            ("size_t", Word("bytes_req")),
            ("int", Word("gfp_flags")),
        ],
    ),
    alias(
        "uvm",
        "free",
        Tracepoint("kmem", "kfree"),
        &[("int", Untold), ("void *", Word("ptr")), ("size_t", Untold)],
    ),
    alias(
        "uvm",
        "pool_get",
        Tracepoint("kmem", "kmem_cache_alloc"),
        &[
            ("void *", Word("s")),
            ("void *", Word("ptr")),
            ("int", Word("gfp_flags")),
        ],
    ),
    alias(
        "uvm",
        "pool_put",
        Tracepoint("kmem", "kmem_cache_free"),
        &[("void *", Word("s")), ("void *", Word("ptr"))],
    ),
    alias("vfs", "bufcache_rel", Nowhere(NO_BUFFER_CACHE), &[]),
    alias("vfs", "bufcache_take", Nowhere(NO_BUFFER_CACHE), &[]),
    alias("vfs", "cleaner", Nowhere(NO_BUFFER_CACHE), &[]),
];

/// OpenBSD's groups without a counterpart in Linux.
pub(super) const GROUPS_WITHOUT: [(&str, &str); 4] = [
    (
        "vmm",
        "a guest that runs guests has Linux's own tracepoints of the group kvm",
    ),
    ("smr", "Linux reclaims memory by RCU; see the group rcu"),
    ("refcnt", "Linux does not mark where references are counted"),
    (
        "rwlock",
        "Linux's locks are others; see lock:contention_begin",
    ),
];

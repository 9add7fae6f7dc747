//! gdb(1) on the kernel of a guest.

use support::command::{Running, World, words};
use support::shell::{COMMAND_LIMIT, snapshot_folder};
use support::{host, rich};

use super::{Session, gdb, restored, talk};

/// The kernel, without a file of it, and one of its modules.
const KERNEL: Session = &[
    ("info threads", &["kthreadd (S)", " in __schedule ("]),
    ("info symbol brd_submit_bio", &["in section .text.brd"]),
    ("x/s &linux_banner", &["Linux version "]),
    ("print *(long *)&jiffies > 0", &["= 1"]),
    (
        "ptype struct list_head",
        &["struct list_head *next;", "struct list_head *prev;"],
    ),
    (
        "print ((struct task_struct *)&init_task)->comm",
        &["= \"swapper"],
    ),
    ("print (enum pid_type)1", &["= PIDTYPE_TGID"]),
    ("print sizeof(struct list_head)", &["= 16"]),
    (
        "print ((struct task_struct *)&init_task)->sched_class->pick_next_task",
        &["<pick_next_task_idle>"],
    ),
    ("thread find kthreadd", &["has extra info 'kthreadd (S)'"]),
    ("thread 3", &["[Switching to thread 3"]),
    (
        "bt",
        &[" in __schedule (", " in schedule (", " in kthreadd ("],
    ),
    ("print $rax", &["= <unavailable>"]),
    ("up", &[" in schedule ("]),
    ("print $rbx", &["= <not saved>"]),
    ("tbreak *vfs_write", &["Temporary breakpoint 1 at"]),
    // Within an instruction.
    ("break *vfs_write+1", &["Breakpoint 2 at"]),
    ("continue", &["Cannot insert breakpoint 2."]),
    ("delete 2", &[]),
];

/// A stop in the kernel, called by a program.
const IN_KERNEL: Session = &[
    (
        "bt",
        &[
            " vfs_write (file=0x",
            ", count=",
            " in ksys_write (fd=",
            " in do_syscall_64 (",
            "<signal handler called>",
            " in ?? ()",
        ],
    ),
    ("delete", &[]),
    ("set $from = $rsp", &[]),
    ("print *(char *)$rsi != 0", &["= 1"]),
    ("print count > 0 && file->f_path.dentry != 0", &["= 1"]),
    ("print *file->f_op", &["<"]),
    ("stepi", &[" in vfs_write ("]),
    (
        "finish",
        &[" in ksys_write (", "Value returned is $", " = "],
    ),
    ("print $rsp == $from + 8", &["= 1"]),
    ("set var *(long *)&jiffies = 5", &["Cannot access memory"]),
    ("detach", &["detached"]),
];

/// The same in a kernel that has frame pointers, and no unwind information.
const WITH_FRAME_POINTERS: Session = &[
    (
        "bt",
        &[
            " vfs_write (file=0x",
            " in ksys_write (",
            " in do_syscall_64 (",
            " in entry_SYSCALL_64_after_hwframe (",
            " in ?? ()",
        ],
    ),
    // The frame is being made.
    ("stepi", &[" in vfs_write ("]),
    ("bt 2", &[" in vfs_write (", " in ksys_write ("]),
    ("stepi", &[" in vfs_write ("]),
    ("bt 2", &[" in vfs_write (", " in ksys_write ("]),
    ("finish", &[" in ksys_write (", "Value returned is $"]),
    ("thread find kthreadd", &["has extra info 'kthreadd (S)'"]),
    (
        "thread apply all -s bt",
        &[" in schedule (", " in kthreadd (", " in ret_from_fork ("],
    ),
    ("detach", &["detached"]),
];

/// Lets the guest's shell write, and waits until gdb has stopped it at its breakpoint.
fn stop_in_a_write(machine: &mut Running, gdb: &mut Running) {
    gdb.type_line("continue");
    machine.type_line("echo written");
    gdb.wait_until("write", COMMAND_LIMIT, |stdout, _| {
        stdout.contains("hit Temporary breakpoint 1, ")
    });
}

#[test]
fn the_kernel_is_debugged_without_a_file_of_it() {
    let host = host!();
    let world = World::new();
    let mut line = words("run --name g");
    line.extend(rich::restore(host));
    let mut machine = world.start(line);
    machine.type_line(&format!("insmod {} && echo loaded=$((6*7))", rich::BRD));
    machine.wait_until("module", COMMAND_LIMIT, |stdout, _| {
        stdout.contains("loaded=42")
    });
    let mut gdb = gdb(&world, "--kernel");
    talk(&mut gdb, KERNEL);
    stop_in_a_write(&mut machine, &mut gdb);
    talk(&mut gdb, IN_KERNEL);
    gdb.type_line("quit");
    assert_eq!(gdb.finish(COMMAND_LIMIT).status, 0);
    machine.wait_until("shell", COMMAND_LIMIT, |stdout, _| {
        stdout.contains("written")
    });
    world.stop("g", machine);
}

#[test]
fn stacks_of_a_kernel_with_frame_pointers_reach_their_ends() {
    let host = host!();
    let world = World::new();
    let mut machine = restored(&world, snapshot_folder(host));
    machine.type_line("echo begun=$((6*7))");
    machine.wait_until("shell", COMMAND_LIMIT, |stdout, _| {
        stdout.contains("begun=42")
    });
    let mut gdb = gdb(&world, "--kernel");
    talk(
        &mut gdb,
        &[("tbreak vfs_write", &["Temporary breakpoint 1 at"])],
    );
    stop_in_a_write(&mut machine, &mut gdb);
    talk(&mut gdb, WITH_FRAME_POINTERS);
    gdb.type_line("quit");
    assert_eq!(gdb.finish(COMMAND_LIMIT).status, 0);
    world.stop("g", machine);
}

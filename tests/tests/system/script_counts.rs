//! Scripts' counts equal the guest's own, exactly: those of programs that know their calls, and the
//! kernel's own numbers in /proc.
//!
//! The kernel's numbers change all the time. Each script therefore counts between two readings of
//! the number. It has a probe at the kernel function that shows it, and counts while that was
//! entered once. These guests have one vCPU and a kernel that is not preempted. So only interrupts
//! run between that entry and the reading of the number.

use support::scripts::ScriptGuest;
use support::traced::Traced;
use support::user_guest::{ALLOCS, UserGuest};
use support::{host, strace};

/// Faults that the kernel does not count: those with VM_FAULT_OOM, SIGBUS, HWPOISON,
/// HWPOISON_LARGE, SIGSEGV, RETRY or FALLBACK (include/linux/mm_types.h; mm_account_fault() in
/// mm/memory.c).
const NOT_COUNTED: u32 = 0xc73;

/// A command for the totals of switches and of processes; the rest of the file would take the
/// serial port long.
const TOTALS: &str = "grep -e ctxt -e processes /proc/stat";

/// Returns the words of a line in the output of a command, from the one behind `name` on, as
/// numbers.
fn numbers(output: &str, name: &str) -> Vec<u64> {
    let words = output.lines().filter_map(|line| {
        let (_, rest) = line.split_once(name)?;
        rest.split_whitespace().next()
    });
    let numbers = words.map(|word| word.parse());
    let numbers: Result<Vec<u64>, _> = numbers.collect();
    numbers.unwrap_or_else(|e| panic!("{name}: {e}: {output}"))
}

/// Returns the growth of a number between its two readings.
fn growth(output: &str, name: &str) -> u64 {
    match numbers(output, name)[..] {
        [before, after] => after - before,
        _ => panic!("{name} twice: {output}"),
    }
}

#[test]
fn system_calls_by_name_are_those_that_programs_make() {
    let host = host!();
    let guest = UserGuest::new(host);
    let scripts = ScriptGuest::from(&guest);
    let (ran, answer) = scripts.run(
        r#"syscall:::entry /comm == "fsload" || comm == "syscount" || comm == "forks"/ { @[comm, func] = count(); }"#,
        "fsload 7 0; syscount 30; forks 5",
    );
    assert_eq!(answer.output, "fsload: 7 rounds\nsyscount: 30\nforks: 5\n");
    ran.assert_whole();
    let mut lines = ran.lines();
    lines.sort_unstable();
    assert_eq!(
        lines,
        [
            // Each child, too.
            "@[forks, exit]: 6",
            "@[forks, fork]: 5",
            "@[forks, wait4]: 5",
            "@[forks, write]: 1",
            "@[fsload, close]: 14",
            "@[fsload, exit]: 1",
            "@[fsload, open]: 14",
            "@[fsload, read]: 7",
            "@[fsload, rename]: 7",
            "@[fsload, stat]: 7",
            "@[fsload, unlink]: 7",
            "@[fsload, write]: 8",
            "@[syscount, exit]: 1",
            "@[syscount, getppid]: 30",
            "@[syscount, write]: 1",
        ]
    );
}

/// Checks a program under strace, while the script watches: both see the same calls, and as many
/// that fail.
#[test]
fn system_calls_by_name_are_those_that_strace_counts() {
    let host = host!();
    let guest = UserGuest::of(strace::guest(host));
    let scripts = ScriptGuest::from(&guest);
    let (ran, answer) = scripts.run(
        r#"syscall:::entry /comm == "allocs"/ { @[func] = count(); }
           syscall:::return /comm == "allocs" && retval < 0/ { @failed = count(); }"#,
        "strace -c -o /tmp/counts allocs 20 1 > /dev/null; sed -n 's/^ *[0-9]/&/p' /tmp/counts",
    );
    ran.assert_whole();
    // % time, seconds, usecs/call, calls, errors or nothing, name; the last line is their sum.
    let rows = answer.output.lines().map(|line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let number = |at: usize| words.get(at).and_then(|word| word.parse::<u64>().ok());
        let name = words.last().copied().unwrap_or_default();
        let calls = number(3).unwrap_or_else(|| panic!("{line:?} in {answer:?}"));
        (name, calls, number(4).unwrap_or_default())
    });
    let rows: Vec<(&str, u64, u64)> = rows.collect();
    let Some((("total", total, errors), calls)) = rows.split_last() else {
        panic!("{answer:?}")
    };
    assert!(*total > 40 && *errors > 0, "{answer:?}");
    // execve begins under the name of its caller. exit_group has no row, because it does not
    // return.
    let mut expected: Vec<String> = calls
        .iter()
        .filter(|(name, ..)| *name != "execve")
        .map(|(name, calls, _)| format!("@[{name}]: {calls}"))
        .collect();
    expected.push("@[exit_group]: 1".to_owned());
    expected.push(format!("@failed: {errors}"));
    expected.sort_unstable();
    let mut counted = ran.lines();
    counted.sort_unstable();
    assert_eq!(counted, expected, "{answer:?}");
}

#[test]
fn bytes_written_are_the_size_of_the_file() {
    let host = host!();
    let guest = UserGuest::new(host);
    let scripts = ScriptGuest::from(&guest);
    let (ran, answer) = scripts.run(
        r#"syscall::write:entry /comm == "dd" && args.fd == 1/ { @inside[tid] = args.count; }
           syscall::write:return /@inside[tid]/ {
               @asked = sum(@inside[tid]); @bytes = sum(retval); @writes = count(); delete(@inside[tid]);
           }
           kprobe:vfs_write:return /comm == "dd" && retval == 777/ { @whole = count(); }"#,
        "cat /bin/fsload /bin/forks > /tmp/in; dd if=/tmp/in of=/tmp/out bs=777; stat -c size=%s /tmp/out",
    );
    ran.assert_whole();
    let size = numbers(&answer.output, "size=");
    assert_eq!([ran.number("@bytes"), ran.number("@asked")], [size[0]; 2]);
    let (whole, rest) = (size[0] / 777, u64::from(!size[0].is_multiple_of(777)));
    assert!(
        answer
            .output
            .contains(&format!("{whole}+{rest} records out")),
        "{answer:?}"
    );
    assert_eq!(ran.number("@writes"), whole + rest, "{ran:?}");
    assert_eq!(ran.number("@whole"), whole, "{ran:?}");
}

#[test]
fn page_faults_of_a_process_are_those_in_its_stat() {
    let host = host!();
    let guest = UserGuest::new(host);
    let scripts = ScriptGuest::from(&guest);
    let (ran, answer) = scripts.run(
        &format!(
            "kprobe:do_task_stat:entry {{ @reads[args.task->tgid]++; }}
             kprobe:handle_mm_fault:return /@reads[pid] == 1 && !(retval & {NOT_COUNTED})/ {{ @[pid] = count(); }}
             END {{ clear(@reads); }}"
        ),
        "sh -c 'echo pid=$$; cat /proc/$$/stat; x=12345678; x=$x$x$x$x$x$x$x$x; x=$x$x$x$x$x$x$x$x; x=$x$x$x$x$x$x$x$x; \
         x=$x$x$x$x$x$x$x$x; cat /proc/$$/stat; :'",
    );
    ran.assert_whole();
    let pid = numbers(&answer.output, "pid=")[0];
    let stat = answer.output.lines().skip(1).map(|line| {
        // minflt and majflt, proc(5).
        let words: Vec<&str> = line.split_whitespace().collect();
        let number = |at: usize| words.get(at).and_then(|word| word.parse::<u64>().ok());
        let faults = number(9)
            .zip(number(11))
            .map(|(minor, major)| minor + major);
        faults.unwrap_or_else(|| panic!("{line}"))
    });
    let stat: Vec<u64> = stat.collect();
    let [before, after] = stat[..] else {
        panic!("{answer:?}")
    };
    let counted = ran.number(&format!("@[{pid}]"));
    assert!(counted >= 8, "32 kB of new memory: {ran:?}");
    assert_eq!(counted, after - before, "{ran:?} {answer:?}");
}

#[test]
fn switches_and_forks_are_those_in_stat() {
    let host = host!();
    let guest = UserGuest::new(host);
    let scripts = ScriptGuest::from(&guest);
    let (ran, answer) = scripts.run(
        "kprobe:show_stat:entry { @reads++; }
         kprobe:__switch_to:entry /@reads == 1/ { @to = count(); }
         kprobe:finish_task_switch*:entry /@reads == 1/ { @finished = count(); }
         kprobe:wake_up_new_task:entry /@reads == 1/ { @woken = count(); }
         kprobe:kernel_clone:return /@reads == 1/ { @cloned = count(); }",
        &format!("{TOTALS}; forks 8; syscount 20; busybox usleep 30000; {TOTALS}"),
    );
    ran.assert_whole();
    assert_eq!(ran.number("@reads"), 2, "{ran:?}");
    let switches = growth(&answer.output, "ctxt ");
    assert_eq!(
        [ran.number("@to"), ran.number("@finished")],
        [switches; 2],
        "{ran:?}"
    );
    let forks = growth(&answer.output, "processes ");
    assert!(forks >= 8 + 4, "the programs' own and the shell's");
    assert_eq!(
        [ran.number("@woken"), ran.number("@cloned")],
        [forks; 2],
        "{ran:?}"
    );
}

#[test]
fn switches_of_a_process_are_those_in_its_status() {
    let host = host!();
    let guest = UserGuest::new(host);
    let scripts = ScriptGuest::from(&guest);
    let sleeper = guest.spawn(&format!("{ALLOCS} 0 100"));
    let (ran, answer) = scripts.run(
        "kprobe:proc_pid_status:entry { @reads[args.task->pid]++; }
         kprobe:__switch_to:entry /@reads[args.prev_p->pid] == 1/ { @[args.prev_p->pid] = count(); }
         END { clear(@reads); }",
        &work_between_readings(sleeper),
    );
    ran.assert_whole();
    assert_status(&answer.output, sleeper, |pid| {
        ran.number(&format!("@[{pid}]"))
    });
    guest.kill(sleeper);
}

/// Returns a command for a shell that reads its own status and a sleeper's, works, waits, and reads
/// them again.
fn work_between_readings(sleeper: u32) -> String {
    let read = format!("grep -h ctxt /proc/{sleeper}/status /proc/$$/status");
    let work = "i=0; while [ $i -lt 300 ]; do i=$((i+1)); done; busybox usleep 200000";
    format!("sh -c 'echo pid=$$; {read}; {work}; {read}; :'")
}

/// Checks that the counts match two readings of the status of the sleeper and of the shell.
fn assert_status(output: &str, sleeper: u32, counted: impl Fn(u32) -> u64) {
    let shell = numbers(output, "pid=")[0];
    let pids = [
        sleeper,
        u32::try_from(shell).unwrap_or_else(|e| panic!("{e}: {output}")),
    ];
    // "voluntary_ctxt_switches:" ends both names; four readings, two lines each.
    let all = numbers(output, "voluntary_ctxt_switches:");
    let sums: Vec<u64> = all.chunks(2).map(|pair| pair.iter().sum()).collect();
    let [before_first, before_second, after_first, after_second] = sums[..] else {
        panic!("{output}")
    };
    let grown = [after_first - before_first, after_second - before_second];
    assert!(grown.iter().all(|grown| *grown > 0), "{output}");
    assert_eq!(pids.map(counted), grown, "{output}");
}

#[test]
fn interrupts_of_the_serial_port_are_those_in_interrupts() {
    let host = host!();
    let guest = UserGuest::new(host);
    let scripts = ScriptGuest::from(&guest);
    // Row 4 is of IRQ 4. The port is quiet while the rows are read.
    let (ran, answer) = scripts.run(
        "kprobe:show_interrupts:entry / *(int64 *)arg1 == 4/ { @reads++; }
         kprobe:serial8250_interrupt:entry /@reads == 1/ { @[arg0] = count(); }",
        "busybox usleep 20000; cat /proc/interrupts > /tmp/a; seq 9; busybox usleep 20000; cat /proc/interrupts > /tmp/b; \
         grep ttyS0 /tmp/a /tmp/b",
    );
    ran.assert_whole();
    assert_eq!(ran.number("@reads"), 2, "{ran:?}");
    let interrupts = growth(&answer.output, " 4:");
    assert!(interrupts > 0, "{answer:?}");
    assert_eq!(ran.number("@[4]"), interrupts, "{ran:?} {answer:?}");
}

#[test]
fn switches_at_the_tracepoint_are_those_in_status_and_stat() {
    let host = host!();
    let traced = Traced::new(host, &[]);
    let scripts = ScriptGuest::from(&traced);
    let spawned = traced.tell("(allocs 0 100 > /dev/null & echo $!)");
    let sleeper = spawned.parse().unwrap_or_else(|e| panic!("{spawned}: {e}"));
    let (ran, answer) = scripts.run(
        "kprobe:proc_pid_status:entry { @reads[args.task->pid]++; }
         kprobe:show_stat:entry { @all_reads++; }
         tracepoint:sched:sched_switch /@reads[args.prev->pid] == 1/ { @[args.prev->pid] = count(); }
         tracepoint:sched:sched_switch /@all_reads == 1/ { @all = count(); }
         tracepoint:sched:sched_process_fork /@all_reads == 1/ { @forks = count(); }
         END { clear(@reads); }",
        &format!("{TOTALS}; {}; {TOTALS}", work_between_readings(sleeper)),
    );
    ran.assert_whole();
    assert_status(&answer.output, sleeper, |pid| {
        ran.number(&format!("@[{pid}]"))
    });
    assert_eq!(ran.number("@all"), growth(&answer.output, "ctxt "));
    assert_eq!(ran.number("@forks"), growth(&answer.output, "processes "));
    traced.assert_well();
}

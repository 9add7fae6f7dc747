//! A crowded guest, read from outside: everything agrees with the guest's own /proc.

use std::collections::BTreeMap;

use introspect::PausedMemory;
use introspect::kernel::task_list::TaskInfo;
use introspect::stack::frames::End;
use introspect::system::PausedSystem;
use support::crowd::{self, Asked};
use support::proc_comparison::{Comparison, Told, compare_stacks, compare_stat, lossy};
use support::shell::COMMAND_LIMIT;
use support::{Shell, host};

/// The least number of processes and threads that sleep for good.
const STILL_PROCESSES: usize = 20;
const STILL_THREADS: usize = 25;

/// Compares a process's own files in `/proc`.
fn compare_process(it: &mut Comparison, look: &PausedSystem<'_>, guest: &Told, task: &TaskInfo) {
    let pid = task.pid;
    let program = look
        .program(task, 1 << 16)
        .unwrap_or_else(|e| panic!("{e}"));
    let program = program.map(|p| p.unwrap_or_else(|e| panic!("{pid}: {e}")));
    if let Some(told) = guest.texts.get(&format!("{pid}/cmdline")) {
        let found = program.as_ref().map(|p| lossy(&p.arguments.bytes));
        it.equal(
            &format!("{pid} cmdline"),
            found.unwrap_or_default(),
            told.to_owned(),
        );
    }
    let told = guest.texts.get(&format!("{pid}/exe")).map(str::to_owned);
    let found = program.and_then(|p| p.path).map(|path| lossy(&path));
    it.equal(&format!("{pid} exe"), found, told);
    let open = look.open_files(task).unwrap_or_else(|e| panic!("{e}"));
    for file in &open.items {
        let path = format!("{pid}/fd/{}", file.number);
        let Some(told) = guest.texts.get(&path) else {
            continue;
        };
        it.equal(
            &path,
            lossy(&look.path_of(file.file.address)),
            told.to_owned(),
        );
    }
    let prefix = format!("{pid}/fd/");
    let told = guest.texts.iter();
    let told = told.filter(|(path, _)| path.starts_with(&prefix));
    it.equal(&format!("{pid} fds"), open.items.len(), told.count());
}

fn compare_maps(it: &mut Comparison, look: &PausedSystem<'_>, guest: &Told, task: &TaskInfo) {
    let pid = task.pid;
    let Some(told) = guest.texts.get(&format!("{pid}/maps")) else {
        return;
    };
    let maps = look.maps(task).unwrap_or_else(|e| panic!("{e}"));
    let areas = maps.map_or(Vec::new(), |maps| {
        assert_eq!(maps.error, None, "{pid}");
        maps.areas
    });
    let told: Vec<&str> = told.lines().collect();
    it.equal(&format!("{pid} mappings"), areas.len(), told.len());
    for (area, told) in areas.iter().zip(told) {
        let offset = area.area.file.map_or(0, |_| area.area.file_offset);
        let found = format!(
            "{:08x}-{:08x} {} {offset:08x} {:02x}:{:02x} {}",
            area.area.start,
            area.area.end,
            lossy(&area.area.flags.permissions()),
            area.file.major,
            area.file.minor,
            area.file.inode,
        );
        let (head, name) = told.split_at(told.len().min(73));
        it.equal(&format!("{pid} area"), found, head.trim_end().to_owned());
        it.equal(&format!("{pid} name"), lossy(&area.name), name.to_owned());
    }
}

#[test]
fn what_is_read_from_outside_is_what_the_guest_says() {
    let host = host!();
    let shell = crowd::guest(host);
    let system = shell.linux.system();
    let (guest, moment) = Told::ask(&shell, Asked::Everything);
    let lost: Vec<_> = system.lost().collect();
    assert!(lost.is_empty(), "{lost:?}");
    let memory = PausedMemory::new(&moment.memory);
    let look = system.look(&memory, &moment.cpus);
    // The kernel is built without modules.
    let modules = look.modules().unwrap_or_else(|e| panic!("{e}"));
    assert!(modules.items.is_empty() && modules.error.is_none());

    let processes = look.processes().unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(processes.error, None);
    let (mut stat, mut files, mut maps, mut stacks) = Default::default();
    let (mut still_processes, mut still_threads) = (0, 0);
    for process in &processes.items {
        let pid = process.pid;
        let path = format!("{pid}/task/{pid}");
        let threads = look.threads_of(process).unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(threads.error, None, "{pid}");
        for thread in &threads.items {
            let path = format!("{pid}/task/{}", thread.pid);
            compare_stat(&mut stat, &look, &guest, thread, &path);
            still_threads += usize::from(guest.slept(&path));
        }
        if guest.slept(&path) {
            still_processes += 1;
            compare_process(&mut files, &look, &guest, process);
            compare_maps(&mut maps, &look, &guest, process);
        }
        compare_stacks(&mut stacks, &look, &guest, process, &threads.items);
    }
    // No process is missing.
    for pid in guest.texts.processes() {
        let Some(process) = processes.items.iter().find(|process| process.pid == pid) else {
            let lives_on = guest.lives_on(&format!("{pid}/task/{pid}"));
            assert!(!lives_on, "process {pid} was not found");
            continue;
        };
        let threads = look.threads_of(process).unwrap_or_else(|e| panic!("{e}"));
        let mut found: Vec<i32> = threads.items.iter().map(|thread| thread.pid).collect();
        let mut told = guest.texts.threads(pid);
        found.sort_unstable();
        told.sort_unstable();
        assert_eq!(found, told, "threads of {pid}");
    }
    println!("{still_processes} processes and {still_threads} threads slept");
    assert!(still_processes >= STILL_PROCESSES, "{still_processes}");
    assert!(still_threads >= STILL_THREADS, "{still_threads}");
    Comparison::finish(stat, "stat", 500);
    Comparison::finish(files, "cmdline, exe and files", 100);
    Comparison::finish(maps, "maps", 300);
    Comparison::finish(stacks, "kernel stacks", STILL_THREADS);
}

/// A container as Docker makes it: a control group, namespaces with a host name.
const CONTAINER: &str = "busybox unshare -p -u -f sh -c 'mkdir -p /tmp/cg/system.slice/docker-0a.scope; \
    echo 0 > /tmp/cg/system.slice/docker-0a.scope/cgroup.procs; hostname web-1; echo > /tmp/begun; exec sleep 9000' \
    || echo > /tmp/begun & while [ ! -e /tmp/begun ]; do sleep 0.1; done";

/// Returns the last word of a line of each process's file in /proc.
fn told_lines(shell: &Shell, pattern: &str, file: &str) -> BTreeMap<i32, String> {
    let command = format!("(cd /proc; grep -s {pattern} [0-9]*/{file}) || true");
    let answer = shell.start(&command).answer(4 * COMMAND_LIMIT);
    let lines = answer.output.lines().filter_map(|line| {
        let (pid, rest) = line.split_once('/')?;
        let word = rest.rsplit([':', '\t']).next()?;
        Some((pid.parse().ok()?, word.to_owned()))
    });
    lines.collect()
}

/// A kernel may have neither control groups nor namespaces. Then nothing is in a container.
#[test]
fn containers_are_those_that_the_guest_made() {
    let host = host!();
    let shell = crowd::guest(host);
    let groups = shell.start("mkdir /tmp/cg; mount -t cgroup2 none /tmp/cg 2> /dev/null");
    let has_groups = groups.answer(COMMAND_LIMIT).status == 0;
    shell.start(CONTAINER).answer(COMMAND_LIMIT);
    let groups = told_lines(&shell, "^0::", "cgroup");
    let numbers = told_lines(&shell, "^NSpid:", "status");
    assert_eq!(has_groups, !groups.is_empty());
    let (mut it, mut contained) = (Comparison::default(), 0);
    shell.linux.look(|look| {
        let processes = look.processes().unwrap_or_else(|e| panic!("{e}"));
        for task in &processes.items {
            let node = look.cgroup_node(task).unwrap_or_else(|e| panic!("{e}"));
            let path = node.map(|node| look.cgroup_path(node));
            let path = path.map(|path| path.unwrap_or_else(|e| panic!("{e}")));
            assert_eq!(path.is_some(), has_groups, "{}", task.pid);
            let pid = look.namespace_pid(task).unwrap_or_else(|e| panic!("{e}"));
            let pid = pid.unwrap_or_else(|e| panic!("{e}"));
            if let Some(told) = groups.get(&task.pid) {
                let found = path.flatten().map(|path| lossy(&path));
                it.equal("cgroup", found.unwrap_or_default(), told.to_owned());
            }
            let Some(pid) = pid else { continue };
            // A kernel without pid namespaces does not print the line.
            let told = numbers.get(&task.pid);
            let told = told.map_or(task.pid.to_string(), String::to_owned);
            it.equal("pid", pid.number.to_string(), told);
            let name = look.own_host_name(task).unwrap_or_else(|e| panic!("{e}"));
            let name = name.unwrap_or_else(|e| panic!("{e}"));
            if pid.level > 0 {
                contained += 1;
                assert_eq!(name.as_deref(), Some(&b"web-1"[..]));
            } else if task.name() != b"busybox" {
                // The parent of the container sees its host name, and is not inside.
                assert_eq!(name, None, "{}", task.pid);
            }
        }
    });
    println!("control groups: {has_groups}, {contained} contained");
    assert_eq!(contained, usize::from(!numbers.is_empty()));
    Comparison::finish(it, "containers", STILL_PROCESSES);
}

#[test]
fn user_stacks_reach_the_programs_start_through_every_call() {
    let host = host!();
    let shell = crowd::guest(host);
    // A worker that just enters or leaves the kernel has no readable stack. Then the guest runs on,
    // until its shell has answered.
    while !shell.linux.look(|look| user_stacks_are_whole(&look)) {
        shell.run("true");
    }
}

/// Compares the stacks of all workers with the calls that they make. Returns `false` if one is at
/// the border of the kernel.
fn user_stacks_are_whole(look: &PausedSystem<'_>) -> bool {
    let processes = look.processes().unwrap_or_else(|e| panic!("{e}"));
    let workers: Vec<_> = processes
        .items
        .iter()
        .filter(|process| process.name() == b"workers")
        .collect();
    assert_eq!(workers.len(), 2, "{:?}", processes.items);
    let modules = look.modules().unwrap_or_else(|e| panic!("{e}"));
    let unwinder = look.kernel_unwinder(&modules.items);
    let unwinder = unwinder.unwrap_or_else(|e| panic!("{e}"));
    for (process, (threads, depth)) in workers.iter().zip([(4, 20), (1, 3)]) {
        let objects = look
            .objects(process, None)
            .unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(objects.incomplete, Vec::<String>::new());
        let mut user = objects.unwinder();
        let all = look.threads_of(process).unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(all.items.len(), threads + 1);
        for thread in &all.items {
            let stack = look.stack(thread, &unwinder, &mut user);
            let Some(stack) = stack.user else {
                panic!("{thread:?} has no user stack")
            };
            if stack.end == End::AtBorder {
                return false;
            }
            assert!(stack.is_reliable(), "{thread:?}: {stack:?}");
            let names: Vec<String> = stack
                .frames
                .iter()
                .filter_map(|frame| {
                    let address = frame.lookup_address();
                    Some(objects.at(address)?.resolve(address)?.0)
                })
                .collect();
            let calls = names.iter().filter(|name| *name == "descend").count();
            let is_main = thread.pid == process.pid;
            assert_eq!(calls, if is_main { 0 } else { depth }, "{names:?}");
            let outer = if is_main { "_start" } else { "worker" };
            assert!(names.iter().any(|name| name == outer), "{names:?}");
        }
    }
    true
}

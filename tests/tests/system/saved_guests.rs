//! Guests that do not run: a snapshot and a core file have the machine's processes, mappings,
//! symbols, stacks, probes and iterations.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;

use introspect::core_file::write_core;
use introspect::{Gpa, PhysicalMemory};
use support::command::{Ended, World, words};
use support::crowd;
use support::shell::COMMAND_LIMIT;
use support::{Kernel, host};
use vmm::snapshot::look_into;

const PAGE: usize = 4096;

/// Writes the guest in a snapshot as a core file, as one without CPUs, and as its bare memory.
fn write_as_core(snapshot: &Path, [core, bare, raw]: [&Path; 3]) {
    let still = look_into(snapshot).unwrap_or_else(|e| panic!("{e}"));
    let memory = fs::File::create(raw).unwrap_or_else(|e| panic!("{}: {e}", raw.display()));
    let end = still.ram.ram().last().map_or(0, |range| range.end);
    let grown = memory.set_len(end);
    grown.unwrap_or_else(|e| panic!("{}: {e}", raw.display()));
    let mut pages = Vec::new();
    for range in still.ram.ram() {
        for address in range.step_by(PAGE) {
            let mut page = vec![0; PAGE];
            let read = still.ram.read_physical(Gpa(address), &mut page);
            read.unwrap_or_else(|e| panic!("{e}"));
            if page.iter().any(|byte| *byte != 0) {
                let written = memory.write_all_at(&page, address);
                written.unwrap_or_else(|e| panic!("{}: {e}", raw.display()));
                pages.push((Gpa(address), page));
            }
        }
    }
    for (core, cpus) in [(core, still.cpus.as_slice()), (bare, &[])] {
        let ranges = pages
            .iter()
            .map(|(address, page)| (*address, page.as_slice()));
        let file = fs::File::create(core);
        let written = file.and_then(|mut file| write_core(&mut file, cpus, ranges));
        written.unwrap_or_else(|e| panic!("{}: {e}", core.display()));
    }
}

/// Asks for a guest that does not run.
fn ask(world: &World, line: &str, core: &Path) -> Ended {
    let mut line = words(line);
    line.extend([OsString::from("--core"), core.into()]);
    if core.is_file() {
        // It has no types in its memory, and a core file names no kernel.
        line.extend(["--kernel".into(), Kernel::small().path.clone().into()]);
    }
    let ended = world.run(line, COMMAND_LIMIT);
    assert_eq!(ended.status, 0, "{ended:?}");
    ended
}

fn lines(text: &str) -> BTreeSet<&str> {
    text.lines().collect()
}

#[test]
fn a_snapshot_a_core_file_and_bare_memory_say_what_the_machine_says() {
    let host = host!();
    let world = World::new();
    let snapshot = &crowd::snapshot_folder(host);
    let [core, bare, raw] = ["core", "bare", "raw"].map(|name| world.path(name));
    write_as_core(snapshot, [&core, &bare, &raw]);

    let mut line = words("run --name crowd --serial null --restore");
    line.push(snapshot.into());
    let mut machine = world.start(line);
    machine.wait_until("machine", COMMAND_LIMIT, |_, _| {
        let vms = world.run(words("vms"), COMMAND_LIMIT);
        vms.stdout.contains("crowd")
    });
    let running = |line: &str| world.run(words(line), COMMAND_LIMIT).stdout;
    let still = |line: &str| {
        let found = ask(&world, line, snapshot).stdout;
        for core in [&core, &bare, &raw] {
            assert_eq!(found, ask(&world, line, core).stdout, "{core:?}: {line}");
        }
        found
    };

    let sleeping = " sleep ";
    let ps = (running("ps"), still("ps"));
    assert!(
        ps.1.lines().count() > 20 && ps.1.contains(sleeping),
        "{ps:?}"
    );
    // Those that only sleep have neither changed their state nor their CPU.
    let sleepers = |text: &str| {
        let lines = text.lines().filter(|line| line.contains(sleeping));
        lines.map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(sleepers(&ps.0), sleepers(&ps.1));
    let pid = sleepers(&ps.1)
        .first()
        .and_then(|line| line.split_whitespace().next())
        .unwrap_or_default()
        .to_owned();
    for line in [
        format!("maps -p {pid}"),
        format!("stack -p {pid}"),
        format!(r#"trace -e BEGIN{{cat("/proc/version");cat("/proc/%d/maps",{pid});cat("/init");}}"#),
        "sym vfs_read init_task".to_owned(),
        "list kprobe:vfs_read".to_owned(),
        "list syscall::read:".to_owned(),
        r#"trace -e iter:task/comm=="sleep"/{printf("%d_%s\n",ctx.task->pid,kstack(3));}"#.to_owned(),
        format!(r#"trace -e iter:task/pid=={pid}/{{print(ustack(1));}}"#),
        r#"trace -e iter:task_file/comm=="sleep"/{@[ctx.fd,str(ctx.file->f_path.dentry->d_name.name)]=count();}"#.to_owned(),
        format!(r#"trace -e iter:task_vma/pid=={pid}/{{printf("%lx-%lx\n",ctx.vma->vm_start,ctx.vma->vm_end);}}"#),
    ] {
        let (running, still) = (running(&line), still(&line));
        assert_eq!(lines(&running), lines(&still), "{line}");
        assert!(!still.is_empty(), "{line}");
    }
    let refused = [
        ("trace -e kprobe:vfs_read{} --core", "has no hits"),
        ("trace vfs_read --core", "has no hits"),
        ("list kprobe:vfs_raed --core", "did you mean vfs_read"),
    ];
    for (line, message) in refused {
        let mut line = words(line);
        line.push(snapshot.into());
        let ended = world.run(line, COMMAND_LIMIT);
        assert_ne!(ended.status, 0, "{ended:?}");
        assert!(ended.stderr.contains(message), "{ended:?}");
    }
    world.stop("crowd", machine);
}

#[test]
fn what_is_no_guest_is_told() {
    let world = World::new();
    let write = |name: &str, bytes: &[u8]| {
        let path = world.path(name);
        fs::write(&path, bytes).unwrap_or_else(|e| panic!("{name}: {e}"));
        path
    };
    let mut core = Vec::new();
    write_core(&mut core, &[], [(Gpa(0), [1; PAGE].as_slice())]).unwrap_or_else(|e| panic!("{e}"));
    let cut = core.get(..core.len() - 1).unwrap_or_default().to_vec();
    for (path, message) in [
        (
            world.path("none"),
            "No such file or directory (os error 2); name a core file",
        ),
        (write("text", b"no core"), "not an ELF core file"),
        (write("cut", &cut), "lies outside the file"),
        (write("bare", &core), "no kernel is found in this memory"),
        (
            write("raw", &vec![1; 1 << 20]),
            "no kernel is found in this memory",
        ),
        (world.path("run"), "run/state: No such file or directory"),
        (
            std::env::current_exe().unwrap_or_default(),
            "expected a core file (type 4)",
        ),
    ] {
        let mut line = words("ps --core");
        line.push(path.clone().into());
        let ended = world.run(line, COMMAND_LIMIT);
        assert_eq!(ended.status, 1, "{path:?}: {ended:?}");
        assert!(ended.stderr.contains(message), "{path:?}: {ended:?}");
        assert_eq!(ended.stderr.lines().count(), 1, "{ended:?}");
    }
}

//! Machines from the outside: exact traces, and other commands on a running machine.
#![allow(clippy::unwrap_used)]

mod support;

use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::time::{Duration, Instant};

use exotrace::Vm;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use rustix::process::Signal;
use support::{Running, World, has_kvm};

/// A user that does not exist.
const USER: &str = "12345:54321";

#[test]
fn root_runs_a_machine_as_another_user() {
    if !has_kvm() {
        return;
    }
    let world = World::new();
    if rustix::process::geteuid().is_root() {
        let machine = world.start_as(USER, "spin", "--serial null");
        let status = machine.proc("status");
        for line in [
            "Uid:\t12345\t12345\t12345\t12345\n",
            "Gid:\t54321\t54321\t54321\t54321\n",
            "Groups:\t \n",
        ] {
            assert!(status.contains(line), "{line}: {status}");
        }
        machine.signal(Signal::TERM);
        assert_eq!(machine.finish().status, 0);
        assert_eq!(world.registered(), Vec::<String>::new());
    } else {
        let refused = world.micro("spin", &format!("--user {USER}"));
        assert_eq!(refused.status, 1, "{refused:?}");
        assert!(refused.stderr.contains("only root"), "{refused:?}");
    }
}

#[test]
fn doctor_describes_the_host_for_people_and_programs() {
    if !has_kvm() {
        return;
    }
    let world = World::new();
    let text = world.run("doctor");
    assert_eq!(text.status, 0, "{text:?}");
    for what in [
        "confinement",
        "guest kernel mode",
        "int3 in the kernel",
        "int3 in programs",
        "one exit from kernel mode",
    ] {
        assert!(text.stdout.contains(what), "{what}: {text:?}");
    }
    for line in ["doctor --json", "doctor --json --fresh"] {
        let json = world.run(line);
        let record: serde_json::Value = serde_json::from_str(&json.stdout).unwrap();
        let mode = record.get("kernel_mode").and_then(|m| m.as_str()).unwrap();
        assert!(["native", "interpreted"].contains(&mode), "{mode}");
        assert!(
            record
                .get("exit_kernel_ns")
                .and_then(|n| n.as_u64())
                .unwrap()
                > 0
        );
    }
}

#[test]
fn a_traced_function_gives_a_line_for_each_entry_and_each_exit() {
    if !has_kvm() {
        return;
    }
    let world = World::new();
    let ended = world.micro("calls 50", "--trace micro_leaf");
    assert_eq!(ended.status, 0, "{ended:?}");
    assert!(
        ended.stderr.contains("micro: count 50"),
        "the guest's own count is right: {ended:?}"
    );
    assert!(
        ended
            .stderr
            .contains("100 events: 50 entries, 50 exits, 0 dropped"),
        "{ended:?}"
    );
    let lines: Vec<&str> = ended.stdout.lines().collect();
    assert_eq!((lines.len(), ended.stdout.len()), (100, 100 * 121));
    for (index, pair) in lines.chunks(2).enumerate() {
        let fields = |line: &str| line.split(' ').map(str::to_owned).collect::<Vec<_>>();
        let (entry, exit) = (fields(pair[0]), fields(pair[1]));
        assert_eq!(
            (entry[0].as_str(), exit[0].as_str()),
            ("E", "X"),
            "pair {index}"
        );
        // micro_leaf(n) returns n + 1.
        assert_eq!(
            entry[4],
            format!("{index:016x}"),
            "argument of call {index}"
        );
        assert_eq!(
            exit[4],
            format!("{:016x}", index + 1),
            "result of call {index}"
        );
        assert!(entry[2] < exit[2], "times of call {index}");
    }
    assert_eq!(world.registered(), Vec::<String>::new());
}

#[test]
fn a_trace_file_leaves_standard_output_to_the_guest() {
    if !has_kvm() {
        return;
    }
    let world = World::new();
    let ended = world.micro(
        "nested 2",
        "--trace micro_recurse,micro_outer -o trace --format json",
    );
    assert_eq!(ended.status, 0, "{ended:?}");
    assert!(ended.stdout.contains("micro: count 10"), "{ended:?}");
    let trace = std::fs::read_to_string(world.path("trace")).unwrap();
    let events: Vec<serde_json::Value> = trace
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let count = |event: &str, function: &str| {
        events
            .iter()
            .filter(|e| e["event"] == event && e["function"] == function)
            .count()
    };
    assert_eq!(events[0]["event"], "clock");
    assert_eq!(
        (
            count("entry", "micro_outer"),
            count("return", "micro_outer")
        ),
        (2, 2)
    );
    assert_eq!(
        (
            count("entry", "micro_recurse"),
            count("return", "micro_recurse")
        ),
        (10, 10)
    );
    assert_eq!(events.len(), 25);
}

#[test]
fn the_serial_port_goes_where_it_is_told() {
    if !has_kvm() {
        return;
    }
    let world = World::new();
    let file = world.micro("out 3", "--serial out");
    assert_eq!((file.status, file.stdout.as_str()), (0, ""), "{file:?}");
    let text = std::fs::read_to_string(world.path("out")).unwrap();
    assert!(text.contains("micro: count 3"), "{text}");
    let null = world.micro("out 3", "--serial null");
    assert_eq!((null.status, null.stdout.as_str()), (0, ""), "{null:?}");
    assert!(!null.stderr.contains("micro: count"), "{null:?}");
}

/// Runs a program in the world's folder, which must succeed.
fn run(world: &World, line: &str) {
    let mut words = line.split(' ');
    let mut command = Command::new(words.next().unwrap());
    let ran = command.args(words).current_dir(world.path("")).output();
    let ran = ran.unwrap_or_else(|e| panic!("{line}: {e}"));
    assert!(ran.status.success(), "{line}: {ran:?}");
}

#[test]
fn a_program_boots_an_image_with_a_network_and_leaves_the_image_as_it_is() {
    if !has_kvm() {
        return;
    }
    let world = World::new();
    std::fs::create_dir_all(world.path("root/boot/grub")).unwrap();
    world.write("root/boot/vmlinuz", &guest::micro::elf());
    let entry = b"menuentry 'Traced' {\n linux /boot/vmlinuz out 3\n}\n";
    world.write("root/boot/grub/grub.cfg", entry);
    run(&world, "mke2fs -q -t ext4 -d root image 8M");
    let before = std::fs::read(world.path("image")).unwrap();
    let builder = Vm::builder().image(world.path("image")).memory(8 << 20);
    let builder = builder.overlay().network("user".parse().unwrap());
    let vm = builder.start().unwrap();
    let end = Instant::now() + support::PATIENCE;
    while !vm.console_lines().concat().contains("micro: count 3") {
        assert!(Instant::now() < end, "{:#?}", vm.console_lines());
        std::thread::sleep(Duration::from_millis(10));
    }
    drop(vm);
    assert!(
        before == std::fs::read(world.path("image")).unwrap(),
        "the image has changed"
    );
}

#[test]
fn what_is_typed_reaches_the_guest() {
    if !has_kvm() {
        return;
    }
    let world = World::new();
    world.write("typed", b"hello\nquit\n");
    let mut command = world.micro_command("echo", "");
    command.stdin(std::fs::File::open(world.path("typed")).unwrap());
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && text.contains("hello") && text.contains("micro: count 1"),
        "{text}"
    );
}

/// Waits until all threads of a machine are confined, or none: a new thread has yet to confine
/// itself.
fn wait_for_threads(world: &World, machine: &Running, confined: bool) {
    let walls = world.confinement();
    let is_right = |status: &String| {
        let is = |field: &str, value: &str| status.contains(&format!("\n{field}:\t{value}\n"));
        let none = "0000000000000000";
        // SIGHUP, SIGINT and SIGTERM are for threads that may handle them.
        let is_vcpu = status.starts_with("Name:\tvcpu");
        let blocks_stops = status.contains("\nSigBlk:\t0000000000004003\n");
        // A thread of KVM's own, in the kernel, is none of ours.
        status.starts_with("Name:\tkvm-")
            || is("NoNewPrivs", "1") == confined
                && is("Seccomp", "2") == (confined && walls.seccomp)
                && (!is_vcpu || blocks_stops == confined)
                && (!confined || is("CapEff", none) && is("CapBnd", none))
    };
    world.wait_until("confinement as wanted of all threads", || {
        let threads = machine.threads("status");
        threads.len() > 5 && threads.iter().all(is_right)
    });
}

#[test]
fn a_machine_gives_up_what_it_does_not_need() {
    if !has_kvm() {
        return;
    }
    for confined in [true, false] {
        let world = World::new();
        let mode = if confined { "on" } else { "off" };
        let machine = world.start("spin", &format!("--serial null --confine {mode}"));
        wait_for_threads(&world, &machine, confined);
        // The guest's memory, a file of 4 MiB, is in no core dump ("dd", proc(5)).
        let smaps = machine.proc("smaps");
        let (_, memory) = smaps.split_once("/memfd:exotrace-guest-ram").unwrap();
        let flags = memory.lines().find(|line| line.starts_with("VmFlags:"));
        assert!(
            flags.unwrap().split(' ').any(|flag| flag == "dd"),
            "{flags:?}"
        );
        assert_eq!(world.run("snapshot saved").status, 0);
        assert_eq!(world.run("stop").status, 0);
        machine.finish();
        let restore = format!("run --restore saved --serial null --confine {mode}");
        let restored = Running::of(world.command(&restore));
        world.wait_until("machine", || world.run("vms").stdout.lines().count() > 1);
        wait_for_threads(&world, &restored, confined);
        assert_eq!(world.run("stop").status, 0);
        restored.finish();
    }
}

#[test]
fn a_running_machine_answers_and_stops() {
    if !has_kvm() {
        return;
    }
    let world = World::new();
    let machine = world.start("hlt", "--name web");
    let vms = world.run("vms --json");
    let info: serde_json::Value = serde_json::from_str(&vms.stdout).unwrap();
    assert_eq!(
        (info["name"].as_str(), info["memory"].as_u64()),
        (Some("web"), Some(4 << 20))
    );
    assert!(world.run("vms").stdout.contains("web"));

    let taken = world.micro("out 1", "--name web");
    assert_eq!(taken.status, 1);
    assert!(
        taken.stderr.contains("a machine named web runs already"),
        "{taken:?}"
    );

    let stat = world.run("stat --json");
    let stat: serde_json::Value = serde_json::from_str(&stat.stdout).unwrap();
    assert!(stat["port_exits"].as_u64().unwrap() > 0, "{stat}");
    assert!(world.run("stat --vm web").stdout.contains("port exits"));

    let other = world.run("stop --vm other");
    assert!(
        other.status == 1 && other.stderr.contains("these do: web"),
        "{other:?}"
    );
    let gracefully = world.run("stop --gracefully");
    assert!(
        gracefully.status == 1 && gracefully.stderr.contains("has no power button"),
        "{gracefully:?}"
    );
    assert_eq!(world.run("stop").status, 0);
    let ended = machine.finish();
    assert_eq!(ended.status, 0, "{ended:?}");
    assert_eq!(world.registered(), Vec::<String>::new());
}

#[test]
fn a_snapshot_goes_on_where_it_was_taken_and_can_be_traced() {
    if !has_kvm() {
        return;
    }
    let world = World::new();
    let machine = world.start("hlt", "");
    let saved = world.run("snapshot saved");
    assert_eq!(saved.status, 0, "{saved:?}");
    assert!(
        saved.stderr.contains("the guest was paused for"),
        "{saved:?}"
    );
    let again = world.run("snapshot saved");
    assert!(
        again.status == 1 && again.stderr.contains("already there"),
        "{again:?}"
    );
    assert_eq!(world.run("stop").status, 0);
    assert_eq!(machine.finish().status, 0);

    let line = "run --restore saved --serial null --trace micro_timer_entry";
    let restored = world.started(world.command(line));
    world.wait_for_hits();
    assert_eq!(world.run("stop").status, 0);
    let restored = restored.finish();
    assert_eq!(restored.status, 0, "{restored:?}");
    assert!(
        restored.stdout.starts_with("E "),
        "the timer goes on: {restored:?}"
    );

    world.write("other", &[guest::micro::elf(), vec![0]].concat());
    let other = world.run("run --restore saved --kernel other");
    assert!(
        other.status == 1 && other.stderr.contains("not the one that the snapshot runs"),
        "{other:?}"
    );

    let whole = world.run("snapshot --verify saved");
    assert!(
        whole.status == 0 && whole.stderr.contains("all as they were written"),
        "{whole:?}"
    );
    // In the guest's memory region, and in no page that the guest uses.
    let memory = std::fs::OpenOptions::new()
        .write(true)
        .open(world.path("saved/memory"))
        .unwrap();
    memory.write_all_at(b"x", (2 << 20) - 100).unwrap();
    let piece = "bytes 0x0 to 0x200000 have changed";
    for line in ["snapshot --verify saved", "run --restore saved --verify"] {
        let refused = world.run(line);
        assert!(
            refused.status == 1 && refused.stderr.contains(piece),
            "{line}: {refused:?}"
        );
    }
    let running = world.started(world.command("run --restore saved --serial null"));
    let damage = format!("snapshot's memory: {piece}");
    world.wait_until("damage", || world.run("stat").stdout.contains(&damage));
    assert_eq!(world.run("stop").status, 0);
    let ended = running.finish();
    assert!(
        ended.stderr.contains("ran on damaged memory: 1 of"),
        "{ended:?}"
    );

    let state = world.path("saved/state");
    let mut bytes = std::fs::read(&state).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&state, bytes).unwrap();
    let damaged = world.run("run --restore saved");
    assert!(
        damaged.status == 1 && damaged.stderr.contains("damaged"),
        "{damaged:?}"
    );
    assert_eq!(world.registered(), Vec::<String>::new());
}

#[test]
fn an_image_that_has_changed_since_the_save_is_reported() {
    if !has_kvm() {
        return;
    }
    let world = World::new();
    world.write("image", &[0; 512]);
    let machine = world.start("hlt", "--disk image,overlay");
    assert_eq!(world.run("snapshot saved").status, 0);
    assert!(world.path("saved/overlay0").exists());
    assert_eq!(world.run("stop").status, 0);
    assert_eq!(machine.finish().status, 0);
    let restore = "run --restore saved --serial null --disk image --for 0.1";
    for is_changed in [false, true] {
        if is_changed {
            let image = std::fs::File::open(world.path("image")).unwrap();
            image
                .set_modified(std::time::SystemTime::UNIX_EPOCH)
                .unwrap();
        }
        let restored = world.run(restore);
        assert_eq!(restored.status, 0, "{restored:?}");
        let told = restored
            .stderr
            .contains("changed since the machine was saved");
        assert_eq!(told, is_changed, "{restored:?}");
    }
}

#[test]
fn completions_and_man_pages_name_every_command() {
    let world = World::new();
    let bash = world.run("completions bash");
    assert!(
        bash.status == 0 && bash.stdout.contains("snapshot"),
        "{bash:?}"
    );
    assert_eq!(world.run("man man/pages").status, 0);
    for page in [
        "exotrace.1",
        "exotrace-run.1",
        "exotrace-doctor.1",
        "exotrace-snapshot.1",
    ] {
        let text = std::fs::read_to_string(world.path("man/pages").join(page)).unwrap();
        assert!(text.contains(".TH"), "{page}");
    }
    std::fs::write(world.path("file"), "").unwrap();
    let refused = world.run("man file");
    assert!(
        refused.status == 1 && refused.stderr.contains("file"),
        "{refused:?}"
    );
}

#[test]
fn a_reader_that_has_gone_is_no_failure() {
    let world = World::new();
    for line in ["completions bash", "guest micro guest"] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let output = world.command(line).stdout(writer).output().unwrap();
        assert!(
            output.status.success() && output.stderr.is_empty(),
            "{line}: {output:?}"
        );
    }
}

/// Checks a client that was killed, for instance. Its files stay without a state, so they are not
/// mistaken for a snapshot.
#[test]
fn a_save_ends_with_its_client() {
    if !has_kvm() {
        return;
    }
    let world = World::new();
    let machine = world.start("hlt", "");
    let files = [(); 2].map(|()| tempfile::tempfile().unwrap());
    // The machine reads the request when the client has gone.
    machine.signal(Signal::STOP);
    let client = UnixStream::connect(world.path("run/exotrace/vm1/control")).unwrap();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let descriptors = files.each_ref().map(AsFd::as_fd);
    assert!(control.push(SendAncillaryMessage::ScmRights(&descriptors)));
    let line = [IoSlice::new(b"{\"version\":2,\"command\":\"snapshot\"}\n")];
    sendmsg(&client, &line, &mut control, SendFlags::empty()).unwrap();
    drop(client);
    machine.signal(Signal::CONT);
    // The next save starts when that one has ended.
    world.wait_until("the save", || files[1].metadata().unwrap().len() > 0);
    assert_eq!(world.run("snapshot saved").status, 0);
    assert_eq!(files[0].metadata().unwrap().len(), 0, "a state");
    assert_eq!(world.run("stop").status, 0);
    assert_eq!(machine.finish().status, 0);
}

#[test]
fn a_client_whose_machine_dies_leaves_no_folder() {
    if !has_kvm() {
        return;
    }
    let world = World::new();
    let machine = world.start("hlt", "");
    machine.signal(Signal::STOP);
    std::fs::create_dir(world.path("place")).unwrap();
    let entries = || std::fs::read_dir(world.path("place")).unwrap().count();
    let client = Running::of(world.command("snapshot place/saved"));
    world.wait_until("partial folder", || entries() == 1);
    machine.signal(Signal::KILL);
    let ended = client.finish();
    assert_eq!(ended.status, 1, "{ended:?}");
    assert!(ended.stderr.contains("vm1"), "{ended:?}");
    assert_eq!(entries(), 0, "{ended:?}");
}

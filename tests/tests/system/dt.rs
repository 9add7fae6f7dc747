//! The device dt(4) of a running machine, used by a C program over its socket, in both layouts.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::Command;

use support::command::{Running, World, words};
use support::compiled::Program;
use support::host;
use support::host::Host;
use support::rich;
use support::shell::{COMMAND_LIMIT, snapshot_folder};

const NAME: &str = "dt";
/// A size of reads that nothing else in the guest uses.
const SIZE: &str = "size 777 ";

/// Builds the C program with the older layout or today's.
fn client(world: &World, old: bool) -> PathBuf {
    let program = world.path(if old { "client-old" } else { "client" });
    let made = if old {
        Program::OldDtClient
    } else {
        Program::DtClient
    };
    made.make(&program);
    program
}

fn start(world: &World, host: &Host, options: &str) -> Running {
    let mut line = words(&format!("run --name {NAME} {options} --restore"));
    line.push(snapshot_folder(host).into());
    let mut machine = world.start(line);
    machine.wait_until("machine", COMMAND_LIMIT, |_, _| socket(world).exists());
    machine
}

fn socket(world: &World) -> PathBuf {
    world.path("run/exotrace").join(NAME).join("dt")
}

fn stop(world: &World, machine: Running) {
    world.stop(NAME, machine);
    assert!(!socket(world).exists());
}

/// Returns the rest behind `before` of a line that begins so.
fn after<'t>(text: &'t str, before: &str) -> &'t str {
    let mut lines = text.lines();
    let found = lines.find_map(|line| line.strip_prefix(before));
    found.unwrap_or_else(|| panic!("no {before:?} in\n{text}"))
}

/// Returns the length of its program as printed by the guest.
fn length(printed: &str) -> Option<u64> {
    let mut parts = printed
        .split("len=")
        .filter_map(|part| part.split_once('='));
    parts.find_map(|(number, _)| number.parse().ok())
}

#[test]
fn a_c_program_traces_reads_and_finds_the_readers_program() {
    let host = host!();
    let world = World::new();
    let clients = [(client(&world, false), false), (client(&world, true), true)];
    let mut machine = start(&world, host, "");
    machine.type_line("echo len=$(stat -c %s /bin/busybox)=");
    machine.wait_until("length", COMMAND_LIMIT, |stdout, _| {
        length(stdout).is_some()
    });
    let length = length(&machine.printed().0).unwrap_or_default();
    for (program, old) in clients {
        let output = world.path("printed");
        let file = std::fs::File::create(&output).unwrap_or_else(|e| panic!("{e}"));
        let mut child = Command::new(&program)
            .arg(socket(&world))
            .stdout(file)
            .spawn()
            .unwrap_or_else(|e| panic!("{}: {e}", program.display()));
        let printed = || std::fs::read_to_string(&output).unwrap_or_default();
        machine.wait_until("recording", COMMAND_LIMIT, |_, _| {
            printed().contains("recording")
        });
        machine.type_line("dd if=/bin/busybox of=/dev/null bs=777 count=2000; read x < /nosuch");
        machine.wait_until("counts", COMMAND_LIMIT, |_, _| {
            printed().contains("of 2097152:")
        });
        let ended = child.wait().unwrap_or_else(|e| panic!("{e}"));
        let printed = printed();
        assert!(ended.success(), "{printed}");

        let probes: usize = after(&printed, "probes ").parse().unwrap_or(0);
        assert!(probes > 1000, "{printed}");
        assert_eq!(after(&printed, "tracing "), "syscall:read:entry");
        let events = |kind: &str| printed.lines().filter(|l| l.starts_with(kind)).count();
        assert_eq!(events("entry ") + events("return "), 16, "{printed}");
        let of_dd = |line: &&str| line.contains(" dd fd 0 ") && line.contains(SIZE);
        let reads: Vec<&str> = printed.lines().filter(of_dd).collect();
        assert!(!reads.is_empty(), "{printed}");
        let with_stack = reads.iter().all(|line| !line.ends_with("kstack 0"));
        assert!(with_stack, "{printed}");
        assert!(printed.contains(" dd value 777 error 0\n"), "{printed}");
        assert!(printed.contains("stats 16 read "), "{printed}");
        assert!(
            printed.contains("of 2097152: No such process\n"),
            "{printed}"
        );
        if !old {
            let resolved = printed.lines().find(|line| line.starts_with("resolved "));
            let resolved = resolved.unwrap_or_default();
            let expected = format!("length {length} elf 1");
            assert!(resolved.ends_with(&expected), "{expected}: {printed}");
        }
    }
    stop(&world, machine);
}

/// Reads an answer: its error and its bytes.
fn answer(stream: &mut UnixStream) -> (u32, Vec<u8>) {
    let mut word = || {
        let mut bytes = [0; 4];
        stream
            .read_exact(&mut bytes)
            .unwrap_or_else(|e| panic!("{e}"));
        u32::from_le_bytes(bytes)
    };
    let (error, length) = (word(), word());
    let mut bytes = vec![0; length as usize];
    stream
        .read_exact(&mut bytes)
        .unwrap_or_else(|e| panic!("{e}"));
    (error, bytes)
}

fn send(stream: &mut UnixStream, words: &[u32]) {
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    stream.write_all(&bytes).unwrap_or_else(|e| panic!("{e}"));
}

fn connect(world: &World) -> UnixStream {
    let stream = UnixStream::connect(socket(world)).unwrap_or_else(|e| panic!("{e}"));
    let limit = Some(COMMAND_LIMIT);
    stream
        .set_read_timeout(limit)
        .unwrap_or_else(|e| panic!("{e}"));
    stream
}

const MAGIC: u32 = u32::from_le_bytes(*b"DT4\x01");
const RECORD: u32 = 0x8004_4403;
const ENABLE: u32 = 0x8018_4404;
const ARGUMENTS: u32 = 0xC018_4406;
const RESOLVE: u32 = 0xC028_4408;
const EINVAL: u32 = 22;
const ENOSPC: u32 = 28;
const EPERM: u32 = 1;
const EINTR: u32 = 4;

fn traps(world: &World) -> bool {
    let stat = world.run(words(&format!("stat --vm {NAME} --json")), COMMAND_LIMIT);
    assert_eq!(stat.status, 0, "{stat:?}");
    !stat.stdout.contains("\"sites\":[]")
}

#[test]
fn a_client_that_goes_away_takes_its_probes_with_it_and_a_hostile_one_harms_nobody() {
    let host = host!();
    let world = World::new();
    let mut machine = start(&world, host, "");
    for garbage in [&[0x2054_4547, 1, 0][..], &[MAGIC, 9, 0], &[MAGIC, 1, 0xff]] {
        let mut stream = connect(&world);
        send(&mut stream, garbage);
        assert_eq!(answer(&mut stream), (EINVAL, Vec::new()));
    }
    // The client disconnects in the middle of an open.
    let mut stream = connect(&world);
    send(&mut stream, &[MAGIC]);
    drop(stream);

    let mut stream = connect(&world);
    send(&mut stream, &[MAGIC, 1, 0]);
    assert_eq!(answer(&mut stream), (0, Vec::new()));
    // Entry of system call 0, behind two timers.
    send(&mut stream, &[ENABLE, 24, 3, 0, 0, 0, 0, 0]);
    assert_eq!(answer(&mut stream), (0, Vec::new()));
    send(&mut stream, &[RECORD, 4, 1]);
    assert_eq!(answer(&mut stream), (0, Vec::new()));
    assert!(traps(&world));
    // It waits for events that do not come, because nothing is typed. Earlier data has been read.
    send(&mut stream, &[0, 8, 456, 0]);
    drop(stream);
    machine.wait_until("traps gone", COMMAND_LIMIT, |_, _| !traps(&world));

    let mut stream = connect(&world);
    send(&mut stream, &[MAGIC, 1, 0]);
    assert_eq!(answer(&mut stream), (0, Vec::new()));
    send(&mut stream, &[RECORD, u32::MAX]);
    assert_eq!(answer(&mut stream), (EINVAL, Vec::new()));
    let mut byte = [0];
    let end = stream.read(&mut byte).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(end, 0, "where the next request begins is not known");
    stop(&world, machine);
}

#[test]
fn a_machine_that_does_not_allow_it_refuses_an_open_and_an_end_ends_a_read() {
    let host = host!();
    let world = World::new();
    let machine = start(&world, host, "--dt off");
    let mut stream = connect(&world);
    send(&mut stream, &[MAGIC, 1, 0]);
    assert_eq!(answer(&mut stream), (EPERM, Vec::new()));
    stop(&world, machine);

    let machine = start(&world, host, "");
    let mut stream = connect(&world);
    send(&mut stream, &[MAGIC, 1, 0]);
    assert_eq!(answer(&mut stream), (0, Vec::new()));
    // The same with another request, which is answered then.
    send(&mut stream, &[0, 8, 456, 0]);
    send(&mut stream, &[RECORD, 4, 0]);
    assert_eq!(answer(&mut stream), (EINTR, Vec::new()));
    assert_eq!(answer(&mut stream), (0, Vec::new()));
    send(&mut stream, &[0, 8, 456, 0]);
    stop(&world, machine);
    let mut told = Vec::new();
    // The answer may have come before the end did.
    let read = stream.read_to_end(&mut told);
    assert!(
        read.is_ok() && (told.is_empty() || told.starts_with(&[6, 0, 0, 0])),
        "{told:?}"
    );
}

/// A client in one of the layouts.
struct Client {
    stream: UnixStream,
    old: bool,
}

/// The numbers of an event.
#[derive(Debug, Clone, Copy)]
struct Event {
    probe: u32,
    cpu: u32,
    pid: u32,
    tid: u32,
    /// The time in seconds and nanoseconds.
    time: [u64; 2],
    arguments: [u64; 4],
}

const LIST: u32 = 0xC010_4401;
const EVENT_SIZE: usize = 456;
const OLD_EVENT_SIZE: usize = 296;

impl Client {
    fn open(world: &World, old: bool) -> Self {
        let mut stream = connect(world);
        send(&mut stream, &[MAGIC, u32::from(!old), 0]);
        let answer = answer(&mut stream);
        assert_eq!(answer, (0, Vec::new()), "{}", why(&mut stream));
        Self { stream, old }
    }

    fn ask(&mut self, words: &[u32]) -> Vec<u8> {
        send(&mut self.stream, words);
        let (error, bytes) = answer(&mut self.stream);
        assert_eq!(error, 0, "{words:x?}: {}", why(&mut self.stream));
        bytes
    }

    /// Returns the probe of a full name.
    fn probe(&mut self, name: &str) -> u32 {
        let parts: Vec<&str> = name.split(':').collect();
        let [provider, function, event] = parts.as_slice() else {
            panic!("{name}")
        };
        let list = self.ask(&[LIST, 16, u32::MAX, 0, 0, 0]);
        let text = |record: &[u8], at: usize| {
            let field = record.get(at..at + 16).unwrap_or_default();
            let end = field.iter().position(|byte| *byte == 0).unwrap_or(16);
            String::from_utf8_lossy(field.get(..end).unwrap_or_default()).into_owned()
        };
        let found = list
            .get(16..)
            .unwrap_or_default()
            .chunks_exact(56)
            .find(|record| {
                text(record, 5) == *provider
                    && text(record, 21) == *function
                    && text(record, 37) == *event
            });
        let Some(found) = found else {
            send(&mut self.stream, &[2, 0]);
            let missing = answer(&mut self.stream).1;
            panic!("no probe {name}: {}", String::from_utf8_lossy(&missing))
        };
        u32_at(found, 0)
    }

    /// Enables a probe; the filter is for the older layout.
    fn enable(&mut self, probe: u32, filter: [u32; 3]) {
        let [operand, variable, value] = filter;
        match self.old {
            true => self.ask(&[0x8020_4404, 32, probe, operand, variable, value, 0, 0, 8, 0]),
            false => self.ask(&[ENABLE, 24, probe, 0, 8, 0, 0, 0]),
        };
    }

    fn record(&mut self, on: u32) {
        self.ask(&[RECORD, 4, on]);
    }

    /// Returns the numbers of read and of dropped events.
    fn stats(&mut self) -> (u64, u64) {
        let code = if self.old { 0x4010_4402 } else { 0x4020_4402 };
        let bytes = self.ask(&[code, 0]);
        (u64_at(&bytes, 0), u64_at(&bytes, 8))
    }

    /// Waits for events, and reads those that are there.
    fn events(&mut self) -> Vec<Event> {
        let (size, arguments) = match self.old {
            true => (OLD_EVENT_SIZE, 216),
            false => (EVENT_SIZE, 376),
        };
        let bytes = self.ask(&[0, 8, (size * 4096) as u32, 0]);
        let event = |bytes: &[u8]| Event {
            probe: u32_at(bytes, 0),
            cpu: u32_at(bytes, 4),
            pid: u32_at(bytes, 8),
            tid: u32_at(bytes, 12),
            time: [16, 24].map(|at| u64_at(bytes, at)),
            arguments: [0, 8, 16, 24].map(|at| u64_at(bytes, arguments + at)),
        };
        bytes.chunks_exact(size).map(event).collect()
    }
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    let field = bytes
        .get(at..at + 4)
        .and_then(|field| field.try_into().ok());
    u32::from_le_bytes(field.unwrap_or_else(|| panic!("{} bytes, {at}", bytes.len())))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) | u64::from(u32_at(bytes, at + 4)) << 32
}

/// Returns the reason why the last request was refused.
fn why(stream: &mut UnixStream) -> String {
    if stream.write_all(&[1, 0, 0, 0, 0, 0, 0, 0]).is_err() {
        return String::new();
    }
    String::from_utf8_lossy(&answer(stream).1).into_owned()
}

#[test]
fn filters_divide_the_events_of_a_probe_among_sessions() {
    let host = host!();
    let world = World::new();
    let mut machine = start(&world, host, "");
    let command = |machine: &mut Running, answer: &str| {
        machine.type_line(&format!(
            "dd if=/bin/busybox of=/dev/null bs=777 count=40; echo {answer}=$((40+2))"
        ));
        let done = format!("{answer}=42");
        machine.wait_until("answer", COMMAND_LIMIT, |stdout, _| stdout.contains(&done));
    };
    let mut first = Client::open(&world, true);
    let read = first.probe("syscall:read:entry");
    first.enable(read, [0, 0, 0]);
    first.record(1);
    // The shell began to read the first line before this records, and reads the second meanwhile.
    command(&mut machine, "first");
    command(&mut machine, "again");
    let events = first.events();
    let of_dd = |event: &Event| event.arguments.get(2) == Some(&777);
    let shell = events
        .iter()
        .find(|event| !of_dd(event))
        .map(|event| event.pid);
    let shell = shell.unwrap_or_else(|| panic!("{events:?}"));

    // Operand (1 equal, 2 not), variable (1 process, 2 thread).
    let filters = [
        [0, 0, 0],
        [1, 1, shell],
        [2, 1, shell],
        [1, 2, shell],
        [2, 2, shell],
    ];
    let mut clients = filters.map(|filter| {
        let mut client = Client::open(&world, true);
        client.enable(read, filter);
        client.record(1);
        client
    });
    command(&mut machine, "second");
    // By then the shell has begun to read this line, in all sessions.
    command(&mut machine, "third");
    for client in &mut clients {
        client.record(0);
    }
    let mut found = clients.each_mut().map(Client::events);
    for (client, events) in clients.iter_mut().zip(&found) {
        assert_eq!(client.stats(), (events.len() as u64, 0));
    }
    // They are started and stopped one after the other, while the shell reads. Each has its own
    // time of an event.
    let times = found.iter().flatten().filter(|event| of_dd(event));
    let times: Vec<_> = times.map(|event| event.time).collect();
    let (Some(first), Some(last)) = (times.iter().min(), times.iter().max()) else {
        panic!("{found:?}")
    };
    for events in &mut found {
        events.retain(|event| (*first..=*last).contains(&event.time));
    }
    let [all, same, other, same_thread, other_thread] = &found;
    assert!(
        same.iter().all(|e| e.pid == shell) && !same.is_empty(),
        "{same:?}"
    );
    assert!(other.iter().all(|e| e.pid != shell), "{other:?}");
    assert!(other.iter().filter(|e| of_dd(e)).count() >= 40, "{other:?}");
    assert!(same_thread.iter().all(|e| e.tid == shell));
    assert!(other_thread.iter().all(|e| e.tid != shell));
    assert_eq!(all.len(), same.len() + other.len());
    assert_eq!(all.len(), same_thread.len() + other_thread.len());
    stop(&world, machine);
}

/// Requests the types of a probe's arguments with room for none, for all, and for one too few.
fn arguments_are_told_by_size(client: &mut Client, probe: u32, types: &[&str]) {
    let all = 24 * types.len() as u32;
    for (size, told, records, errno) in [
        (0, all, 0, 0),
        (all, all, types.len(), 0),
        (all + 100, all, types.len(), 0),
        (all - 1, all - 1, types.len() - 1, ENOSPC),
    ] {
        send(
            &mut client.stream,
            &[ARGUMENTS, 24, probe, 0, size, 0, 0, 0],
        );
        let (error, bytes) = answer(&mut client.stream);
        assert_eq!(error, errno, "{size}");
        assert_eq!(
            (u32_at(&bytes, 0), u32_at(&bytes, 8)),
            (probe, told),
            "{size}"
        );
        let (_, found) = bytes.split_at(24);
        assert_eq!(found.len(), 24 * records, "{size}");
        for (number, (record, name)) in found.chunks(24).zip(types).enumerate() {
            assert_eq!(
                (u32_at(record, 0), u32_at(record, 4) & 0xff),
                (probe, number as u32)
            );
            let text = record.get(5..5 + name.len());
            assert_eq!(text, Some(name.as_bytes()));
        }
    }
}

#[test]
fn openbsds_groups_fire_in_linux_with_openbsds_arguments() {
    let host = host!();
    let world = World::new();
    let mut line = words(&format!("run --name {NAME}"));
    line.extend(rich::restore(host));
    let mut machine = world.start(line);
    machine.wait_until("machine", COMMAND_LIMIT, |_, _| socket(&world).exists());
    let mut client = Client::open(&world, false);
    let names = [
        "sched:off__cpu",
        "sched:on__cpu",
        "sched:sleep",
        "sched:wakeup",
        "sched:unsleep",
        "sched:fork",
        "sched:enqueue",
        "sched:dequeue",
        "raw_syscalls:sys_enter",
        "raw_syscalls:sys_exit",
        "uvm:fault",
        "uvm:map_insert",
        "uvm:map_remove",
    ];
    let probes = names.map(|name| {
        let probe = client.probe(&format!("tracepoint:{name}"));
        client.enable(probe, [0, 0, 0]);
        probe
    });
    let types = ["pid_t", "pid_t", "int"];
    arguments_are_told_by_size(&mut client, probes[3], &types);
    // There is no mapping there, and no process has that number.
    for (pid, errno) in [(1, 2), (u32::MAX, 3), (1 << 21, 3)] {
        send(
            &mut client.stream,
            &[RESOLVE, 40, pid, 0, 0x1000, 0, 0, 0, 0, 0, 0, 0],
        );
        assert_eq!(answer(&mut client.stream), (errno, Vec::new()), "{pid}");
    }
    client.record(1);
    // The memory into which bzcat has decompressed is freed before it ends.
    machine.type_line(
        "{ cat /proc/uptime; echo a | busybox bzip2 | busybox bzcat; } > /dev/null; echo done=$((40+2))",
    );
    let mut events = Vec::new();
    let finished = std::time::Instant::now() + COMMAND_LIMIT;
    while !machine.printed().0.contains("done=42") {
        events.extend(client.events());
        assert!(
            std::time::Instant::now() < finished,
            "{:?}",
            machine.printed()
        );
    }
    client.record(0);
    let (read, dropped) = client.stats();
    assert_eq!((read, dropped), (events.len() as u64, 0));
    let of = |name: &str| -> Vec<Event> {
        let at = names.iter().position(|known| *known == name);
        let probe = at.and_then(|at| probes.get(at)).copied();
        let own = events.iter().filter(|event| Some(event.probe) == probe);
        own.copied().collect()
    };
    for name in names {
        assert!(!of(name).is_empty(), "{name}");
    }
    // The thread that a switch announces is the one that comes.
    let [off, on] = [of("sched:off__cpu"), of("sched:on__cpu")];
    let mut switches: Vec<Event> = events.clone();
    switches.retain(|e| off.iter().chain(&on).any(|known| known.probe == e.probe));
    let mut pairs = 0;
    for pair in switches.windows(2) {
        let [before, after] = pair else { continue };
        let is_switch = off.first().map(|e| e.probe) == Some(before.probe);
        if is_switch && before.cpu == after.cpu {
            let [tid, pid, ..] = before.arguments;
            assert_eq!((tid, pid), (after.tid.into(), after.pid.into()), "{pair:?}");
            pairs += 1;
        }
    }
    assert!(pairs > 10, "{pairs} switches");
    // Each call that returns was entered.
    let entered = of("raw_syscalls:sys_enter");
    let count = |events: &[Event], number: u64| {
        events
            .iter()
            .filter(|e| e.arguments.first() == Some(&number))
            .count()
    };
    let left = of("raw_syscalls:sys_exit");
    let (close, openat) = (3, 257);
    for number in [close, openat] {
        assert!(count(&entered, number) > 0, "{number}");
        assert_eq!(count(&entered, number), count(&left, number), "{number}");
    }
    for event in of("uvm:fault") {
        let [address, kind, access, _] = event.arguments;
        assert!(
            address < 1 << 47 && kind == 0 && [1, 2, 4].contains(&access),
            "{event:?}"
        );
    }
    for event in of("uvm:map_insert").iter().chain(&of("uvm:map_remove")) {
        let [start, end, rights, _] = event.arguments;
        assert!(start < end && end < 1 << 47 && rights <= 7, "{event:?}");
        assert_eq!((start % 4096, end % 4096), (0, 0), "{event:?}");
    }
    stop(&world, machine);
}

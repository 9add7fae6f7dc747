//! The device dt(4) on the micro guest: every error of its requests, its list, events, timers and
//! drops.
#![allow(clippy::unwrap_used)]

#[path = "../../tests/support/mod.rs"]
mod support;

use std::fs::File;
use std::io::Read;
use std::sync::Arc;
use std::time::{Duration, Instant};

use probes::engine::Waiter;
use probes::kernel_view::KernelView;
use probes::probe::Probe;
use support::{Micro, micro};
use trace_devices::dt::codes::Request;
use trace_devices::dt::device::MAX_SESSIONS;
use trace_devices::dt::{
    Abi, Device, Errno, Guest, Mapped, Mode, OpenOptions, Refused, Reply, Session,
};

const PROCESS: i32 = 7;

/// A text file of every host, in the place of a guest's file.
const MAPPED_FILE: &str = "/proc/version";

/// A guest with one process that has one file mapped.
struct OneProcess;

impl Guest for OneProcess {
    fn tracepoints(&self, _: &KernelView) -> Result<Vec<Probe>, String> {
        Err("the kernel has none".into())
    }

    fn resolve(&self, pid: i32, address: u64) -> Result<Mapped, Refused> {
        match (pid, address) {
            (PROCESS, 0x40_0000..0x40_1000) => Ok(Mapped {
                start: 0x40_0000,
                offset: 0x1000,
                length: 5,
                file: File::open(MAPPED_FILE).unwrap().into(),
                incomplete: None,
            }),
            (PROCESS, _) => Err(Refused::new(Errno::Enoent, "nothing")),
            _ => Err(Refused::new(Errno::Esrch, "nobody")),
        }
    }
}

fn device(micro: &Micro) -> Device {
    Device::new(micro.engine.clone(), Arc::new(OneProcess))
}

fn options(abi: Abi, mode: Mode) -> OpenOptions {
    OpenOptions {
        abi,
        mode,
        privileged: true,
    }
}

fn open(device: &Device, abi: Abi, mode: Mode) -> Session {
    device.open(options(abi, mode)).unwrap()
}

/// Sends a request with its argument as 32-bit words.
fn ask(session: &mut Session, request: Request, words: &[u32]) -> Result<Reply, Errno> {
    let argument: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    let code = request.code(session.abi());
    let answered = session.ioctl(code, &argument);
    answered.map_err(|refused| refused.errno)
}

fn errno(session: &mut Session, request: Request, words: &[u32]) -> Option<Errno> {
    ask(session, request, words).err()
}

/// Returns a request for a probe in the current layout.
fn request(probe: u32, flags: u32, period: u64) -> [u32; 6] {
    [probe, 0, flags, 0, period as u32, (period >> 32) as u32]
}

/// Returns a request for a probe in the older layout.
fn old_request(probe: u32, filter: [u32; 3], rate: u32, flags: u32) -> [u32; 8] {
    let [operand, variable, value] = filter;
    [probe, operand, variable, value, rate, 0, flags, 0]
}

fn number(session: &Session, name: &str) -> u32 {
    let mut probes = session.table().iter();
    let found = probes.find(|(_, listed)| listed.full_name() == name);
    found.unwrap().0
}

fn word(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap())
}

/// Returns read, dropped, skipped, recursive.
fn stats(session: &mut Session) -> [u64; 4] {
    let bytes = ask(session, Request::Stats, &[]).unwrap().bytes;
    assert_eq!(bytes.len(), 32);
    [0, 8, 16, 24].map(|at| word(&bytes, at))
}

/// Reads available events without waiting.
fn read(session: &mut Session, bytes: u64) -> Result<Vec<u8>, Errno> {
    let mut no_wait = |_: Option<&Waiter>| Err(Refused::new(Errno::Eintr, "nothing there"));
    session
        .read(bytes, &mut no_wait)
        .map_err(|refused| refused.errno)
}

const MS: u64 = 1_000_000;

#[test]
fn every_request_gives_openbsds_errors() {
    let Some(micro) = micro("hlt", 1) else { return };
    let device = device(&micro);
    let session = &mut open(&device, Abi::Current, Mode::Normal);
    let (none, first) = (
        session.table().len() as u32 + 1,
        number(session, "profile:hz:97"),
    );
    let leaf = number(session, "kprobe:micro_leaf:entry");
    let enable = Request::Enable;
    for (asked, words, expected) in [
        (Request::Record, &[1][..], Some(Errno::Enoent)),
        (Request::Record, &[0], None),
        (enable, &request(0, 0, MS), Some(Errno::Enoent)),
        (enable, &request(none, 0, MS), Some(Errno::Enoent)),
        (enable, &request(first, 0, 199_999), Some(Errno::Einval)),
        (
            enable,
            &request(first, 0, u64::from(u32::MAX) * 1000 * MS + 1),
            Some(Errno::Einval),
        ),
        (enable, &request(first, 0, 0), Some(Errno::Einval)),
        (
            enable,
            &request(first, 0, u64::from(u32::MAX) * 1000 * MS),
            None,
        ),
        (enable, &request(first, 0, 0), Some(Errno::Eexist)),
        (enable, &request(leaf, 0, 0), None),
        (enable, &request(leaf, 8, 0), Some(Errno::Eexist)),
        (enable, &[leaf], Some(Errno::Einval)),
        (Request::Record, &[1], None),
        (Request::Record, &[1], Some(Errno::Ebusy)),
        (Request::Record, &[0], None),
        (Request::Record, &[0], None),
        (Request::Record, &[0x8000_0000], None),
        (Request::Disable, &request(none, 0, 0), Some(Errno::Enoent)),
        (Request::Disable, &request(leaf + 1, 0, 0), None),
        (Request::Disable, &request(leaf, 0, 0), None),
        (Request::Disable, &request(leaf, 0, 0), None),
        (enable, &request(leaf, 0, 0), None),
        (Request::Arguments, &[0, 0, 0, 0, 0, 0], Some(Errno::Einval)),
        (
            Request::Arguments,
            &[none, 0, 0, 0, 0, 0],
            Some(Errno::Einval),
        ),
        (Request::Arguments, &[leaf, 0, 0, 0, 0, 0], None),
        (Request::Arguments, &[leaf, 0, 1, 0, 0, 0], None),
        (
            Request::Resolve,
            &[99, 0, 0x40_0000, 0, 0, 0, 0, 0, 0, 0],
            Some(Errno::Esrch),
        ),
        (
            Request::Resolve,
            &[7, 0, 0x50_0000, 0, 0, 0, 0, 0, 0, 0],
            Some(Errno::Enoent),
        ),
        (Request::Stats, &[1], Some(Errno::Einval)),
    ] {
        assert_eq!(
            errno(session, asked, words),
            expected,
            "{asked:?} {words:?}"
        );
    }
    for code in [0, 7, 0xC010_4407, 0x4010_4402, 0x8020_4404, u32::MAX] {
        let refused = session.ioctl(code, &[]).unwrap_err();
        assert_eq!(refused.errno, Errno::Enotty, "{code:#x}");
    }
    assert_eq!(read(session, 0), Err(Errno::Emsgsize));
    assert_eq!(
        read(session, 456),
        Err(Errno::Eintr),
        "it waits when there is nothing"
    );
    drop(micro.machine);
}

#[test]
fn the_older_layout_has_filters_and_rates_of_its_own() {
    let Some(micro) = micro("hlt", 1) else { return };
    let device = device(&micro);
    for (mode, fastest) in [(Mode::Normal, 5000), (Mode::Strict, 100)] {
        let session = &mut open(&device, Abi::Old, mode);
        let (profile, all) = (number(session, "profile:hz:97"), [0, 0, 0]);
        for (words, expected) in [
            (old_request(profile, [3, 1, 1], 97, 0), Some(Errno::Einval)),
            (old_request(profile, [1, 3, 1], 97, 0), Some(Errno::Einval)),
            // The filter is checked before the probe.
            (old_request(u32::MAX, [3, 0, 0], 97, 0), Some(Errno::Einval)),
            (old_request(u32::MAX, all, 97, 0), Some(Errno::Enoent)),
            (old_request(profile, all, 0, 0), Some(Errno::Eopnotsupp)),
            (
                old_request(profile, all, fastest + 1, 0),
                Some(Errno::Eopnotsupp),
            ),
            (old_request(profile, all, fastest, 0), None),
            (old_request(profile, all, 1, 0), Some(Errno::Eexist)),
        ] {
            assert_eq!(
                errno(session, Request::Enable, &words),
                expected,
                "{words:?}"
            );
        }
        let wrong = old_request(profile, [9, 0, 0], 0, 0);
        assert_eq!(
            errno(session, Request::Disable, &wrong),
            Some(Errno::Einval)
        );
        let counts = ask(session, Request::Stats, &[]).unwrap().bytes;
        assert_eq!(counts, [0; 16]);
        // The older layout has no request for the arguments of a probe.
        let refused = session.ioctl(0xC018_4406, &[0; 24]).unwrap_err();
        assert_eq!(refused.errno, Errno::Enotty);
    }
}

#[test]
fn opens_are_counted_and_privileged() {
    let Some(micro) = micro("hlt", 1) else { return };
    let device = device(&micro);
    let plain = OpenOptions {
        privileged: false,
        ..options(Abi::Current, Mode::Normal)
    };
    let session = &mut device.open(plain).unwrap();
    let resolve = [7, 0, 0x40_0000, 0, 0, 0, 0, 0, 0, 0];
    for (asked, words, expected) in [
        (Request::ListProbes, &[0; 4][..], None),
        (Request::Stats, &[], None),
        (Request::Arguments, &[1, 0, 0, 0, 0, 0], None),
        (Request::Record, &[0], Some(Errno::Eperm)),
        (Request::Enable, &request(1, 0, MS), Some(Errno::Eperm)),
        (Request::Disable, &request(1, 0, MS), Some(Errno::Eperm)),
        (Request::Resolve, &resolve, Some(Errno::Eperm)),
    ] {
        assert_eq!(errno(session, asked, words), expected, "{asked:?}");
    }
    let mut more: Vec<Session> = (1..MAX_SESSIONS)
        .map(|_| open(&device, Abi::Current, Mode::Normal))
        .collect();
    let refused = device.open(plain).err().unwrap();
    assert_eq!(refused.errno, Errno::Enomem);
    more.pop();
    device.open(plain).unwrap();
}

#[test]
fn the_list_follows_the_size_protocol() {
    let Some(micro) = micro("hlt", 1) else { return };
    let device = device(&micro);
    let session = &mut open(&device, Abi::Current, Mode::Normal);
    let list = |session: &mut Session, size: u32| {
        ask(
            session,
            Request::ListProbes,
            &[size, 0, 0xaaaa_aaaa, 0xbbbb_bbbb],
        )
        .unwrap()
    };
    let asked = list(session, 0);
    let all = word(&asked.bytes, 0);
    assert_eq!((asked.partial, asked.bytes.len()), (None, 16));
    assert_eq!(all, 56 * session.table().len() as u64);
    let whole = list(session, all as u32);
    assert_eq!((whole.partial, word(&whole.bytes, 0)), (None, all));
    assert_eq!(whole.bytes.len() as u64, 16 + all);
    assert_eq!(whole.bytes[16 + 5..16 + 12], *b"profile");
    for (size, records) in [
        (1, 0),
        (56, 1),
        (111, 1),
        (all as u32 - 1, all as usize / 56 - 1),
    ] {
        let part = list(session, size);
        assert_eq!(part.partial, Some(Errno::Enospc), "{size}");
        assert_eq!(word(&part.bytes, 0), u64::from(size), "the size stays");
        assert_eq!(part.bytes[16..], whole.bytes[16..16 + 56 * records]);
    }
    let why = session.table().missing().join("\n");
    assert!(why.contains("tracepoints: the kernel has none"), "{why}");
    let mut found = ask(
        session,
        Request::Resolve,
        &[7, 0, 0x40_0123, 0, 0, 0, 0, 0, 0, 0],
    )
    .unwrap();
    let (offset, start, length) = (16, 24, 32);
    let of = |at| word(&found.bytes, at);
    assert_eq!((of(offset), of(start), of(length)), (0x1000, 0x40_0000, 5));
    let mut text = String::new();
    let file = found.descriptor.take().unwrap();
    File::from(file).read_to_string(&mut text).unwrap();
    assert!(text.starts_with("Linux version"), "{text}");
}

fn int(event: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(event[at..at + 4].try_into().unwrap())
}

#[test]
fn calls_are_events_in_both_layouts_and_the_sixteenth_is_dropped_in_strict_mode() {
    const CALLS: u64 = 100;
    for (abi, mode) in [
        (Abi::Current, Mode::Strict),
        (Abi::Current, Mode::Normal),
        (Abi::Old, Mode::Strict),
        (Abi::Old, Mode::Normal),
    ] {
        let Some(mut micro) = micro(&format!("calls {CALLS}"), 1) else {
            return;
        };
        let before = micro.text_hash();
        let device = device(&micro);
        let mut session = open(&device, abi, mode);
        let entry = number(&session, "kprobe:micro_leaf:entry");
        let exit = entry + 1;
        let ask_for = |session: &mut Session, probe| match abi {
            Abi::Current => errno(session, Request::Enable, &request(probe, 0xf, 0)),
            Abi::Old => {
                let words = old_request(probe, [0, 0, 0], 0, 0xf);
                errno(session, Request::Enable, &words)
            }
        };
        assert_eq!(ask_for(&mut session, entry), None);
        assert_eq!(errno(&mut session, Request::Record, &[1]), None);
        // Not before the next start.
        assert_eq!(ask_for(&mut session, exit), None);
        assert_eq!(errno(&mut session, Request::Record, &[0]), None);
        assert_eq!(errno(&mut session, Request::Record, &[1]), None);
        let began = std::time::SystemTime::now();
        micro.run(|| {});
        let size = abi.event_size() as u64;
        let (comm, arguments) = match abi {
            Abi::Current => (352, 376),
            Abi::Old => (192, 216),
        };
        let (kept, offset) = match mode {
            Mode::Strict => (15, 100_000),
            Mode::Normal => (2 * CALLS, 0),
        };
        let dropped = 2 * CALLS - kept;
        let counts = match abi {
            Abi::Current => stats(&mut session),
            Abi::Old => {
                let bytes = ask(&mut session, Request::Stats, &[]).unwrap().bytes;
                [word(&bytes, 0), word(&bytes, 8), 0, 0]
            }
        };
        assert_eq!(counts, [0, dropped, 0, 0], "{abi:?} {mode:?}");
        // Three events begin within two and a half.
        let first = read(&mut session, size * 5 / 2).unwrap();
        assert_eq!(first.len() as u64, size * 5 / 2);
        let rest = read(&mut session, size * 1000).unwrap();
        assert_eq!(rest.len() as u64, size * (kept - 3));
        assert_eq!(read(&mut session, size), Err(Errno::Eintr));
        assert_eq!(session.counts().read, kept);
        let events = first.chunks_exact(size as usize);
        let events = events.chain(rest.chunks_exact(size as usize));
        // The third one is cut.
        let positions = (0..2).chain(3..);
        for (position, event) in positions.zip(events) {
            let is_entry = position % 2 == 0;
            let expected = if is_entry { entry } else { exit };
            assert_eq!((int(event, 0), int(event, 4)), (expected, 0));
            assert_eq!((int(event, 8), int(event, 12)), (0, offset), "of nobody");
            let time = Duration::new(word(event, 16), word(event, 24) as u32);
            let since = began.duration_since(std::time::UNIX_EPOCH).unwrap();
            let far = time.abs_diff(since);
            assert!(far < Duration::from_secs(600), "{time:?} {since:?}");
            assert_ne!(int(event, 32), 0, "a stack");
            assert_eq!(event[comm..comm + 24], [0; 24], "nobody has a name");
            let call = position / 2;
            let value = word(event, arguments);
            assert_eq!(value, if is_entry { call } else { call + 1 });
            if !is_entry {
                assert_eq!(word(event, arguments + 8), 0);
                assert_eq!(int(event, arguments + 16), 0);
            }
        }
        drop(session);
        micro.assert_untouched(&before);
    }
}

#[test]
fn a_disabled_probe_is_silent_and_only_in_normal_mode_enabled_again() {
    for (mode, expected) in [(Mode::Normal, None), (Mode::Strict, Some(Errno::Eexist))] {
        let Some(mut micro) = micro("calls 10", 1) else {
            return;
        };
        let device = device(&micro);
        let session = &mut open(&device, Abi::Current, mode);
        let other = &mut open(&device, Abi::Current, mode);
        let leaf = number(session, "kprobe:micro_leaf:entry");
        for session in [&mut *session, &mut *other] {
            assert_eq!(errno(session, Request::Enable, &request(leaf, 0, 0)), None);
            assert_eq!(errno(session, Request::Record, &[1]), None);
        }
        assert_eq!(errno(session, Request::Disable, &request(leaf, 0, 0)), None);
        micro.run(|| {});
        assert_eq!(stats(session), [0; 4]);
        assert_eq!(read(session, 456), Err(Errno::Eintr));
        let told = errno(session, Request::Enable, &request(leaf, 0, 0));
        assert_eq!(told, expected, "{mode:?}");
        assert_eq!(
            read(other, 456 * 20).unwrap().len(),
            4560,
            "the other's own"
        );
    }
}

#[test]
fn ticks_are_events_or_counted_as_skipped() {
    let Some(mut micro) = micro("spin", 1) else {
        return;
    };
    let device = device(&micro);
    let session = &mut open(&device, Abi::Current, Mode::Normal);
    micro.machine.start();
    micro.until("first line", |micro| micro.output.text().contains('\n'));
    let profile = number(session, "profile:hz:97");
    let words = request(profile, 0, 2 * MS);
    assert_eq!(errno(session, Request::Enable, &words), None);
    let began = Instant::now();
    assert_eq!(errno(session, Request::Record, &[1]), None);
    let mut wait = |_: Option<&Waiter>| {
        std::thread::sleep(Duration::from_millis(1));
        match began.elapsed() < support::LIMIT {
            true => Ok(()),
            false => Err(Refused::new(Errno::Eintr, "no tick")),
        }
    };
    let first = session.read(456, &mut wait).unwrap();
    assert_eq!((int(&first, 0), int(&first, 4)), (profile, 0));
    // A stopped vCPU takes at most one tick.
    let paused = micro.machine.pause();
    let before = session.counts();
    micro.until("skipped ticks", |_| {
        session.counts().skipped >= before.skipped + 20
    });
    drop(paused);
    assert_eq!(errno(session, Request::Record, &[0]), None);
    let most = began.elapsed().as_millis() as u64 / 2 + 1;
    let mut events = 1;
    while let Ok(bytes) = read(session, 456 * 64) {
        events += bytes.len() as u64 / 456;
    }
    let [read, dropped, skipped, recursive] = stats(session);
    assert_eq!((read, dropped, recursive), (events, 0, 0));
    assert!(skipped + events <= most, "{skipped} {events} {most}");
    micro.machine.stop();
}

//! Static probes of programs in a running Linux guest, probed from outside: each firing is seen
//! once, with its arguments. The counters (semaphores) by which programs detect listeners are
//! maintained.

use std::collections::{BTreeMap, BTreeSet};

use bt::library::SCRIPTS;
use guest::build::initramfs::ExtraFile;
use probes::engine::{Capture, Engine, Filter, RingSize, Session, StringArgument};
use probes::event::{Event, MAX_STATIC_ARGUMENTS};
use probes::probe::{Probe, Target};
use support::compiled::Program;
use support::linux::BootOptions;
use support::scripts::ScriptGuest;
use support::tracing::{self, SLOTS};
use support::user_guest::{FOR_EVER, STATICS, UserGuest};
use support::{
    Kernel, Linux, host,
    shell::{self, Shell},
};

const ROUNDS: u64 = 20;

fn whole_capture() -> Capture {
    Capture {
        arguments: MAX_STATIC_ARGUMENTS,
        strings: vec![StringArgument {
            argument: 0,
            length: 16,
        }],
        ..Capture::default()
    }
}

/// Makes a session with probes, all enabled at once.
fn enabled(guest: &UserGuest, engine: &Engine, probes: &[Probe], filter: &Filter) -> Session {
    let _paused = guest.shell.linux.machine().pause();
    let capture = whole_capture();
    let size = RingSize::for_capture(SLOTS, &capture);
    let mut session = engine.session(size).unwrap_or_else(|e| panic!("{e}"));
    for probe in probes {
        session
            .enable(probe, filter.clone(), capture.clone())
            .unwrap_or_else(|e| panic!("{e}"));
    }
    session
}

/// Ends a session, and returns its events by the probes' names, in order.
fn finish(
    guest: &UserGuest,
    mut session: Session,
    probes: &[Probe],
) -> BTreeMap<String, Vec<Event>> {
    let paused = guest.shell.linux.machine().pause();
    session.disable_all();
    drop(paused);
    let mut found: BTreeMap<String, Vec<Event>> = BTreeMap::new();
    for event in tracing::all_events(&mut session) {
        let name = &probes[event.probe as usize].name.name;
        found.entry(name.clone()).or_default().push(event);
    }
    assert_eq!(session.stats().probes.dropped, 0);
    found
}

fn negative(number: i64) -> u64 {
    number.cast_unsigned()
}

/// Returns the arguments of each probe of the program in a round, as its source says; `None` for an
/// address or an unknown value.
fn expected(round: u64) -> Vec<(&'static str, Vec<Option<u64>>)> {
    let signed = round.cast_signed();
    let byte = |number: u64| number & 0xff;
    let all = |values: &[u64]| values.iter().copied().map(Some).collect();
    let mut twelve: Vec<u64> = (1..=10).collect();
    twelve.extend([round, !round]);
    vec![
        ("none", vec![]),
        (
            "in-registers",
            all(&[
                round * 0x1_0000_0001,
                negative(-1 - signed),
                0x8000 + round,
                negative(-signed),
                byte(200 + round),
                negative(-1 - signed),
            ]),
        ),
        (
            "second-byte",
            all(&[
                round,
                negative(i64::from(((0xf0 - round) as u8).cast_signed())),
                0xf0f0 - (round << 8),
            ]),
        ),
        (
            "in-memory",
            all(&[
                negative(-1000 - signed),
                negative(-7 * signed),
                3 * round,
                1000 + round,
                negative(-7 * signed) & 0xffff_ffff,
            ]),
        ),
        (
            "by-symbol",
            all(&[3 * round, 3 * round, 1000 + (round & !3)]),
        ),
        (
            "con-stants",
            all(&[negative(-5), 0xffff_fffb, 1 << 40, negative(-1), 0x2345]),
        ),
        ("twelve", all(&twelve)),
        ("twice", all(&[round, 1])),
        ("twice", all(&[round, 2])),
        ("item-sold", vec![None, None, Some(negative(-signed))]),
        (
            "not-all",
            vec![
                Some(0),
                Some((1.5 * round as f64).to_bits()),
                Some(0),
                Some(4),
            ],
        ),
        ("guarded", all(&[round])),
        ("quiet", all(&[round])),
    ]
}

#[test]
fn every_firing_is_seen_once_with_its_arguments() {
    let host = host!();
    let guest = UserGuest::new(host);
    guest.spawn_sleeper(&format!("statics 0 {FOR_EVER}"));
    let probes = guest.probes(&format!("usdt:{STATICS}:statics:*"));
    let session = enabled(&guest, &guest.engine, &probes, &Filter::default());
    let sites = guest.user_sites();
    assert_eq!(guest.standing(&sites), sites);
    assert_eq!(sites.len(), 13);
    let answer = guest.shell.output(&format!("statics {ROUNDS} 0"));
    let last = answer.lines().last();
    let said = format!("statics: {ROUNDS} rounds, {ROUNDS} guarded by 1, {ROUNDS} quiet by 1");
    assert_eq!(last, Some(said.as_str()), "{answer}");
    let engine = guest.engine.stats();
    let found = finish(&guest, session, &probes);

    let mut wanted: BTreeMap<&str, Vec<Vec<Option<u64>>>> = BTreeMap::new();
    for (name, arguments) in (0..ROUNDS).flat_map(expected) {
        wanted.entry(name).or_default().push(arguments);
    }
    let names: Vec<&str> = found.keys().map(String::as_str).collect();
    assert_eq!(names, wanted.keys().copied().collect::<Vec<_>>());
    for (name, wanted) in &wanted {
        let events = &found[*name];
        assert_eq!(events.len(), wanted.len(), "{name}");
        for (event, wanted) in events.iter().zip(wanted) {
            assert_eq!(event.arguments.len(), wanted.len(), "{name}");
            for (found, wanted) in event.arguments.iter().zip(wanted) {
                assert!(
                    wanted.is_none_or(|wanted| *found == wanted),
                    "{name}: {event:x?}, {wanted:x?}"
                );
            }
        }
    }
    // Of one probe alone not all arguments are known.
    assert_eq!(engine.without_arguments, ROUNDS);
    let sold: Vec<&[u8]> = found["item-sold"]
        .iter()
        .map(|event| &*event.strings[0].bytes)
        .collect();
    let names = [&b"apple"[..], b"pear"];
    assert!(
        sold.iter()
            .zip(names.iter().cycle())
            .all(|(found, name)| found == name),
        "{sold:?}"
    );
    guest.assert_clean(&sites);
}

#[test]
fn probes_are_listed_with_names_and_types() {
    let host = host!();
    let guest = UserGuest::new(host);
    let pid = guest.spawn_sleeper(&format!("statics 0 {FOR_EVER}"));
    for (pattern, expected) in [
        (
            "usdt:/bin/statics:in-registers",
            "statics:statics:registers:in-registers uint64_t int32_t uint16_t int16_t uint8_t int8_t",
        ),
        (
            "usdt:/bin/stat*:stat*:in__reg*",
            "statics:statics:registers:in-registers uint64_t int32_t uint16_t int16_t uint8_t int8_t",
        ),
        ("usdt:statics:none", "statics:statics:one_round:none"),
        (
            "statics:::twice",
            "statics:statics:two_places:twice uint64_t int32_t",
        ),
        (
            "stat*:statics:con*:",
            "statics:statics:constants:con-stants int32_t uint32_t uint64_t int8_t uint16_t",
        ),
        (
            "statics:shop::",
            "statics:shop:till:item-sold const char * struct price * int",
        ),
        (
            "statics:::not-all",
            "statics:statics:one_round:not-all double double uint64_t uint64_t",
        ),
    ] {
        let probes = guest.probes(pattern);
        let [probe] = probes.as_slice() else {
            panic!("{pattern}: {probes:?}")
        };
        let arguments = probe.signature.iter().flat_map(|s| s.arguments.iter());
        let mut text = probe.name.to_string();
        for argument in arguments {
            text += &format!(" {}", argument.type_name);
        }
        assert_eq!(text, expected, "{pattern}");
    }
    let twice = guest.probes("statics:::twice");
    let Target::Static(text) = &twice[0].target else {
        panic!("{twice:?}")
    };
    assert_eq!((text.sites.len(), text.process), (2, None));
    let sold = guest.probes("statics:::item-sold");
    let arguments = sold[0].signature.iter().flat_map(|s| s.arguments.iter());
    let translated: Vec<_> = arguments.map(|a| a.translated.as_deref()).collect();
    assert_eq!(translated, [None, Some("priceinfo_t *"), None]);
    // Of one process.
    let own = guest.probes(&format!("statics{pid}:::guarded"));
    let Target::Static(text) = &own[0].target else {
        panic!("{own:?}")
    };
    assert_eq!(text.process, Some(pid.cast_signed()));
    assert_eq!(own[0].name.provider, format!("statics{pid}"));
}

/// Lets a program that waits for a line from `/tmp/go` go on for one round, and returns its output.
fn one_round(shell: &Shell, round: u64) -> String {
    // By the shell itself: a program that looks would be started again and again.
    shell.output(&format!(
        "echo >&9; said=; until [ \"$said\" ]; do while read -r line; do case \"$line\" in \
         'round {round}:'*) said=$line;; esac; done < /tmp/out; done 2> /dev/null; echo \"$said\""
    ))
}

fn said(round: u64, seen: u64, listeners: u64) -> String {
    format!("round {round}: {seen} guarded by {listeners}, {seen} quiet by {listeners}")
}

#[test]
fn programs_see_that_somebody_listens_only_then() {
    let host = host!();
    let guest = UserGuest::new(host);
    let shell = &guest.shell;
    shell.type_lines(&["mkfifo /tmp/go", "exec 9<>/tmp/go"]);
    guest.spawn_sleeper(&format!("statics 0 {FOR_EVER}"));
    let whole = || guest.file(STATICS, |file| file.bytes_at(0, 1 << 20));
    // It lives before the probes are enabled, and after.
    guest.spawn("sh -c 'exec statics 5 -1 < /tmp/go > /tmp/out'");
    assert_eq!(one_round(shell, 1), said(1, 0, 0));
    let (before, hash) = (whole(), shell.output("md5sum /bin/statics"));
    let mut probes = guest.probes("statics:::guarded");
    probes.extend(guest.probes("statics:::quiet"));

    let first = enabled(&guest, &guest.engine, &probes, &Filter::default());
    assert_eq!(one_round(shell, 2), said(2, 1, 1));
    let second = enabled(&guest, &guest.engine, &probes, &Filter::default());
    assert_eq!(one_round(shell, 3), said(3, 2, 2));
    // New ones, and their children, see it from the start.
    let answer = shell.output("statics 2 0");
    assert!(
        answer.ends_with("statics: 2 rounds, 2 guarded by 2, 2 quiet by 2"),
        "{answer}"
    );
    // The file itself keeps its bytes, however it is read.
    assert_eq!(shell.output("md5sum /bin/statics"), hash);
    shell.output("cp /bin/statics /tmp/copy; cat /bin/statics > /tmp/copy2");
    let hashes = shell.output("cat /tmp/copy | md5sum; cat /tmp/copy2 | md5sum");
    for copy in hashes.lines() {
        assert_eq!(copy.split(' ').next(), hash.split(' ').next(), "{hashes}");
    }
    let seen = finish(&guest, first, &probes);
    let counts: Vec<_> = seen.values().map(Vec::len).collect();
    assert_eq!(counts, [4, 4]);
    assert_eq!(one_round(shell, 4), said(4, 3, 1));
    // A client that disconnects without a request, as a killed one does.
    drop(second);
    assert_eq!(one_round(shell, 5), said(5, 3, 0));
    let answer = shell.output("statics 2 0");
    assert!(
        answer.ends_with("statics: 2 rounds, 0 guarded by 0, 0 quiet by 0"),
        "{answer}"
    );
    assert_eq!(whole(), before);
    assert_eq!(shell.output("md5sum /bin/statics"), hash);
    guest.assert_clean(&BTreeSet::new());
}

#[test]
fn one_process_is_probed_alone() {
    let host = host!();
    let guest = UserGuest::new(host);
    let shell = &guest.shell;
    shell.type_lines(&["mkfifo /tmp/go", "exec 9<>/tmp/go"]);
    let pid = guest.spawn("sh -c 'exec statics 3 -1 < /tmp/go > /tmp/out'");
    assert_eq!(one_round(shell, 1), said(1, 0, 0));
    let probes = guest.probes(&format!("statics{pid}:::twelve"));
    let filter = Filter {
        pids: probes::engine::Match::In(vec![pid]),
        ..Filter::default()
    };
    let session = enabled(&guest, &guest.engine, &probes, &filter);
    shell.output("statics 7 0");
    assert_eq!(one_round(shell, 2), said(2, 0, 0));
    let stats = session.probe_stats(0).unwrap_or_default();
    assert_eq!((stats.hits, stats.filtered, stats.recorded), (8, 7, 1));
    let found = finish(&guest, session, &probes);
    assert_eq!(found["twelve"][0].pid, Some(pid));
    guest.assert_clean(&BTreeSet::new());
}

/// The C++ library of the machine that runs this, and its dependencies.
const CPP_LIBRARY: &str = "usr/lib/x86_64-linux-gnu/libstdc++.so.6";
const CPP_NEEDS: [&str; 2] = [
    "usr/lib/x86_64-linux-gnu/libm.so.6",
    "usr/lib/x86_64-linux-gnu/libgcc_s.so.1",
];

/// Returns the examples of the macros of SDT(9), as gcc and rustc make them: the name in the guest,
/// and the bytes.
fn examples() -> [(&'static str, Vec<u8>); 2] {
    let folder = tempfile::tempdir().unwrap_or_else(|e| panic!("{e}"));
    let made = |program: Program| {
        let path = folder.path().join("program");
        program.make(&path);
        std::fs::read(&path).unwrap_or_else(|e| panic!("{path:?}: {e}"))
    };
    [
        ("bin/icmp", made(Program::SdtC)),
        ("bin/icmp-rust", made(Program::SdtRust)),
    ]
}

/// Checks both with one script, whatever the name of the program's own structure.
fn check_examples(guest: &UserGuest) {
    const PACKETS: usize = 20;
    // A packet takes nanoseconds: more of them than any wait lasts.
    const ENDLESS: &str = "1000000000000000000";
    for program in ["icmp", "icmp-rust"] {
        // Probes are known of programs that some process has.
        let pid = guest.spawn(&format!("{program} {ENDLESS}"));
        // Not while it is still the shell's copy.
        guest.wait_for_process(pid, "the program", |task| {
            task.is_some_and(|task| task.name() == program.as_bytes())
        });
        guest.shell.output(&format!("kill -STOP {pid}"));
        guest.wait_until_stopped(pid);
    }
    let script = SCRIPTS.iter().find(|(name, _)| *name == "icmp.bt");
    let script = script.map(|(_, text)| text.replace("/bin/icmp:", "/bin/icmp*:"));
    let script = script.unwrap_or_else(|| panic!("no icmp.bt among {SCRIPTS:?}"));
    for program in ["icmp", "icmp-rust"] {
        let command = format!("{program} {PACKETS}");
        let filtered = script.replace("\n{\n", &format!("\n/comm == \"{program}\"/\n{{\n"));
        let (ran, answer) = ScriptGuest::from(guest).run(&filtered, &command);
        assert_eq!(answer.output.trim_end(), format!("icmp: {PACKETS} packets"));
        ran.assert_whole();
        let lines: Vec<&str> = ran.out.lines().filter(|l| l.contains(": type")).collect();
        let wanted: Vec<String> = (0..PACKETS)
            .map(|n| format!("{n}: type 3, code {}, sequence {n}", n % 16))
            .collect();
        assert_eq!(lines, wanted, "{program}");
        for code in 0..16 {
            let times = if code < PACKETS % 16 { 2 } else { 1 };
            assert_eq!(
                ran.number(&format!("@codes[3, {code}]")),
                times,
                "{program}: {ran:?}"
            );
        }
    }
}

#[test]
fn the_probes_of_a_library_as_it_is_shipped_and_of_our_macros_fire() {
    const EXCEPTIONS: usize = 5;
    let host = host!();
    let libraries = std::iter::once(CPP_LIBRARY)
        .chain(CPP_NEEDS)
        .map(|path| ExtraFile {
            path: path.replacen("usr/", "", 1),
            mode: 0o755,
            content: std::fs::read(format!("/{path}")).unwrap_or_else(|e| panic!("{path}: {e}")),
        });
    let own = examples().map(|(path, content)| ExtraFile {
        path: path.to_owned(),
        mode: 0o755,
        content,
    });
    let libraries = libraries.chain(own);
    let linux = Linux::boot(
        host,
        &BootOptions {
            kernel: Kernel::small(),
            initramfs: Some(&shell::full_initramfs_with(libraries.collect())),
            command_line: &guest::build::kernel::cmdline(),
            cpus: 1,
            protocol: None,
            virtio: Default::default(),
        },
    );
    let guest = UserGuest::of(Shell::at_prompt(linux));
    guest.spawn_sleeper(&format!("throws 0 {FOR_EVER}"));
    let probes = guest.probes("usdt:libstdc++.so.6:libstdcxx:*");
    let names: BTreeSet<&str> = probes.iter().map(|probe| &*probe.name.name).collect();
    assert_eq!(names, BTreeSet::from(["catch", "rethrow", "throw"]));
    let throw = guest.probes("libstdcxx:::throw");
    assert_eq!(
        throw[0].name.to_string(),
        "libstdcxx:libstdc++.so.6:__cxa_throw:throw"
    );

    let session = enabled(&guest, &guest.engine, &probes, &Filter::default());
    let answer = guest.shell.output(&format!("throws {EXCEPTIONS}"));
    assert_eq!(answer, format!("throws: {EXCEPTIONS} exceptions"));
    let found = finish(&guest, session, &probes);
    let of =
        |name: &str| -> Vec<&[u64]> { found[name].iter().map(|event| &*event.arguments).collect() };
    let thrown: Vec<&[u64]> = of("throw");
    assert_eq!(thrown.len(), EXCEPTIONS);
    assert!(!found.contains_key("rethrow"));
    // Exception and type. If no handler was found, the library has no object for one.
    let objects: BTreeSet<u64> = thrown.iter().map(|arguments| arguments[0]).collect();
    assert_eq!(objects.len(), EXCEPTIONS, "{thrown:x?}");
    let types: Vec<[u64; 2]> = thrown.iter().map(|arguments| [0, arguments[1]]).collect();
    assert_eq!(of("catch"), types);
    check_examples(&guest);
    guest.assert_clean(&BTreeSet::new());
}

//! Functions of programs and libraries in a running Linux guest, probed from outside: nothing of
//! ours is in any byte that the guest reads, copies, runs or frees. `user_text.rs` checks that all
//! calls are seen; programs that have text of their own are in `user_text_copies.rs`.

use std::collections::BTreeSet;
use std::time::Instant;

use iced_x86::{Decoder, DecoderOptions};
use probes::engine::Filter;
use probes::event::EventKind;
use probes::probe::Target;
use support::host;
use support::user_guest::{ALLOCS, FOR_EVER, FSLOAD, LIBC, UserGuest};

const BUSYBOX: &str = "/bin/busybox";
/// The number of busybox's instructions that are probed, from its first on.
const POINTS: usize = 200;

/// Returns instruction starts of busybox, which has no symbols, from its entry point on.
fn busybox_points(guest: &UserGuest) -> Vec<u64> {
    guest.file(BUSYBOX, |file| {
        let header = file.bytes_at(0, 64);
        let entry = u64::from_le_bytes(header[24..32].try_into().unwrap_or_default());
        let segments = file.segments();
        let place = segments.iter().find_map(|s| s.file_offset_of(entry));
        let (offset, _) = place.unwrap_or_else(|| panic!("no segment has {entry:#x}"));
        let code = file.bytes_at(offset, 4 * POINTS);
        assert_eq!(
            code.len(),
            4 * POINTS,
            "the text at {entry:#x} is not in memory"
        );
        let decoder = Decoder::with_ip(64, &code, offset, DecoderOptions::NONE);
        let starts = decoder
            .into_iter()
            .take_while(|i| !i.is_invalid() && i.next_ip() < offset + 3 * POINTS as u64);
        starts.map(|instruction| instruction.ip()).collect()
    })
}

#[test]
fn whoever_reads_or_copies_traced_programs_gets_their_own_bytes() {
    let host = host!();
    let guest = UserGuest::new(host);
    let shell = &guest.shell;
    let holder = guest.spawn_sleeper(&format!("fsload 0 {FOR_EVER}"));
    guest.spawn_sleeper(&format!("allocs 0 {FOR_EVER}"));
    shell.type_lines(&["mkdir /tmp/d"]);
    // Pieces of large files around the sites, of odd lengths at odd offsets.
    let malloc = guest.probes(&format!("uprobe:{LIBC}:malloc:entry"));
    let Some(Target::User { text: malloc, .. }) = malloc.first().map(|probe| &probe.target) else {
        panic!("{malloc:?}")
    };
    let piece = |file: &str, offset: u64| {
        let skip = (offset / 333).saturating_sub(20);
        format!("dd if={file} bs=333 skip={skip} count=40 2> /dev/null | busybox sha256sum")
    };
    let points = busybox_points(&guest);
    let mut commands = vec![
        format!("busybox sha256sum {FSLOAD} {ALLOCS} {LIBC}"),
        piece(LIBC, malloc.offset),
        piece(BUSYBOX, points[0]),
        // Copies run as the originals do.
        format!(
            "cp {FSLOAD} /tmp/d/fsload && busybox cmp {FSLOAD} /tmp/d/fsload && /tmp/d/fsload 2 0"
        ),
        format!("dd if={FSLOAD} bs=13 skip=7 2> /dev/null | busybox sha256sum"),
        format!(
            "dd if={FSLOAD} bs=177 of=/tmp/d/odd 2> /dev/null; busybox cmp {FSLOAD} /tmp/d/odd"
        ),
        format!(
            "tail -c 1501 {FSLOAD} | busybox sha256sum; head -c 5001 {ALLOCS} | busybox sha256sum"
        ),
        // Several segments.
        format!("scatter {FSLOAD}; scatter {ALLOCS}"),
        // As another process has it in memory.
        format!(
            "dd if=/proc/{holder}/mem bs=4096 skip=1024 count=1 2> /dev/null | busybox sha256sum"
        ),
        format!(
            "dd if=/proc/{holder}/mem bs=333 skip=12597 count=7 2> /dev/null | busybox sha256sum"
        ),
    ];
    for file in [FSLOAD, ALLOCS] {
        // sendfile(2) to a pipe, where the pages themselves lie until they are read; and to a file.
        commands.push(format!("cat {file} | busybox sha256sum"));
        commands.push(format!(
            "cat {file} > /tmp/d/cat; busybox cmp {file} /tmp/d/cat"
        ));
    }
    let started = Instant::now();
    let before = guest.answers(&commands);
    println!("untraced: {:?}", started.elapsed());
    for (command, answer) in commands.iter().zip(&before) {
        assert_eq!(answer.status, 0, "{command}: {answer:?}");
    }

    let mut traced = guest.session();
    let any = Filter::default();
    traced.enable_fsload(FSLOAD);
    traced.enable(&format!("uprobe:{ALLOCS}:one_round:entry"), &any);
    traced.enable(&format!("uprobe:{ALLOCS}:one_round:return"), &any);
    for function in ["malloc", "free"] {
        for moment in ["entry", "return"] {
            traced.enable(&format!("uprobe:{LIBC}:{function}:{moment}"), &any);
        }
    }
    let mut armed_points = 0;
    for offset in points {
        let probe = guest.probes(&format!("uprobe:{BUSYBOX}:-:{offset:#x}"));
        match traced.enable_one(&probe[0], &any) {
            Ok(_) => armed_points += 1,
            Err(error) => println!("{error}"),
        }
    }
    println!("{armed_points} points in busybox");
    assert!(armed_points > 50, "{armed_points}");
    // Their return addresses get traps, too.
    for (command, printed) in [
        ("fsload 2 0", "fsload: 2 rounds"),
        ("allocs 3 0 | tail -n 1", "allocs: 3 rounds"),
    ] {
        assert_eq!(shell.output(command), printed);
    }
    assert_eq!(traced.recorded("one_round"), (5, 5));
    let mut sites = guest.user_sites();
    assert_eq!(guest.standing(&sites), sites, "before anything reads them");
    let armed = sites.len();

    let started = Instant::now();
    let after = guest.answers(&commands);
    println!("traced, {armed} sites: {:?}", started.elapsed());
    for (command, (before, after)) in commands.iter().zip(before.iter().zip(&after)) {
        assert_eq!(after, before, "{command}");
    }
    let stats = guest.engine.stats();
    println!("{stats:?}");
    assert!(stats.hidden > armed as u64, "{stats:?}");
    assert!(stats.suspended > 0, "cat to a file: {stats:?}");
    // They are still there, and hit.
    let rounds = traced.recorded("one_round");
    assert_eq!(shell.output("fsload 4 0"), "fsload: 4 rounds");
    assert_eq!(traced.recorded("one_round"), (rounds.0 + 4, rounds.1 + 4));
    assert_eq!(guest.engine.stats().waiting_pages, 0);
    sites.extend(guest.user_sites());
    traced.finish();
    guest.assert_clean(&sites);
    assert_eq!(guest.answers(&commands[..2]), before[..2]);
}

#[test]
fn pages_that_are_freed_while_traced_hold_nothing_of_ours() {
    let host = host!();
    let guest = UserGuest::new(host);
    let shell = &guest.shell;
    let part = format!("dd if={BUSYBOX} bs=64k count=4 2> /dev/null");
    let sum = shell.output(&format!("{part} | busybox sha256sum"));
    shell.type_lines(&[&format!("cp {FSLOAD} /tmp/y")]);
    let holder = guest.spawn_sleeper(&format!("/tmp/y 0 {FOR_EVER}"));
    let mut traced = guest.session();
    traced.enable_fsload("/tmp/y");
    assert_eq!(shell.output("/tmp/y 3 0"), "fsload: 3 rounds");
    assert_eq!(traced.recorded("one_round"), (3, 3));
    let sites = guest.user_sites();
    let entries = traced
        .probes
        .iter()
        .filter(|probe| probe.kind() == EventKind::Entry)
        .count();
    assert!(
        sites.len() > entries,
        "{} sites, no return addresses",
        sites.len()
    );
    assert_eq!(guest.standing(&sites), sites);
    // Other files' pages are its pages' neighbours in memory.
    shell.type_lines(&[
        "for n in 1 2 3; do cp /tmp/y /tmp/y$n; done; rm /tmp/y1 /tmp/y3",
        "dd if=/dev/zero of=/tmp/near bs=4k count=64 2> /dev/null; rm /tmp/near /tmp/y2",
    ]);
    assert_eq!(guest.user_sites(), sites, "what is written next to it");

    guest.kill(holder);
    assert_eq!(guest.user_sites(), sites, "the file is still there");
    shell.type_lines(&["rm /tmp/y"]);
    assert_eq!(guest.user_sites(), BTreeSet::new());
    assert_eq!(guest.standing(&sites), BTreeSet::new());
    // The memory is reused: by zeros, and other files.
    shell.type_lines(&[
        "dd if=/dev/zero of=/tmp/zeros bs=64k count=4 2> /dev/null",
        &format!("{part} > /tmp/b1; cp /tmp/b1 /tmp/b2; cp {FSLOAD} /tmp/y"),
    ]);
    for copy in ["b1", "b2"] {
        assert_eq!(
            shell.output(&format!("busybox sha256sum < /tmp/{copy}")),
            sum
        );
    }
    assert_eq!(
        shell.output("busybox tr -d '\\000' < /tmp/zeros | wc -c"),
        "0"
    );
    // A file of the same name is another file.
    assert_eq!(shell.output("/tmp/y 2 0"), "fsload: 2 rounds");
    assert_eq!(traced.recorded("one_round"), (3, 3));
    assert_eq!(guest.engine.stats().waiting_pages, 0);
    let events = traced.finish();
    assert!(!events.is_empty());
    assert_eq!(guest.engine.stats().waiting_returns, 0);
    guest.assert_clean(&BTreeSet::new());
}

#[test]
fn a_traced_file_that_is_written_is_what_was_written() {
    let host = host!();
    let guest = UserGuest::new(host);
    let shell = &guest.shell;
    shell.type_lines(&[&format!("cp {FSLOAD} /tmp/y; cp {FSLOAD} /tmp/z")]);
    let holder = guest.spawn_sleeper(&format!("/tmp/y 0 {FOR_EVER}"));
    let mut traced = guest.session();
    traced.enable_fsload("/tmp/y");
    shell.output("/tmp/y 2 0");
    guest.kill(holder);
    let sites = guest.user_sites();
    let stats = guest.engine.stats();
    assert!(
        !sites.is_empty(),
        "{stats:?} {:?}",
        traced.recorded("one_round")
    );
    let overwrite = |file: &str| {
        shell.output(&format!(
            "dd if={BUSYBOX} of=/tmp/{file} bs=100 seek=3 skip=50 count=5 conv=notrunc 2> /dev/null; busybox sha256sum < /tmp/{file}"
        ))
    };
    assert_eq!(overwrite("y"), overwrite("z"));
    assert_eq!(guest.user_sites(), BTreeSet::new());
    assert!(guest.engine.stats().waiting_pages > 0);
    // The original content: its functions are found again when it is run.
    shell.type_lines(&[
        &format!("dd if={FSLOAD} of=/tmp/y conv=notrunc 2> /dev/null"),
        &format!("busybox cmp {FSLOAD} /tmp/y"),
    ]);
    let before = traced.recorded("one_round");
    assert_eq!(shell.output("/tmp/y 3 0"), "fsload: 3 rounds");
    assert_eq!(traced.recorded("one_round"), (before.0 + 3, before.1 + 3));
    assert_eq!(guest.engine.stats().waiting_pages, 0);
    assert_eq!(
        shell.output(&format!("busybox cmp {FSLOAD} /tmp/y && echo same")),
        "same"
    );
    traced.finish();
    guest.assert_clean(&sites);
}

//! The guest changes its own text while probes are armed in it: its tracers, probes and modules. It
//! finds the bytes that it expects, no hit is lost, and nothing of the probes is left. Its branches
//! are in `guest_patches_branches.rs`.

use std::time::{Duration, Instant};

use iced_x86::{FlowControl, Mnemonic};
use introspect::{Gpa, Gva};
use probes::engine::Filter;
use probes::event::{Event, EventKind};
use probes::provider;
use support::shell::COMMAND_LIMIT;
use support::traced::{COPY_SIZE, Traced, events};
use support::{host, tracing};
use vmm::trap::{INT3, SiteStats};

/// The first byte of a jump over code that the guest probes.
const JUMP: u8 = 0xe9;

/// Returns the entries and returns of [`Traced::copy`] that probes of `vfs_read` and `vfs_write`
/// have seen.
fn copies(events: &[Event]) -> Vec<usize> {
    let mut counts = vec![0; 4];
    for event in events {
        let of_copy = match event.kind {
            EventKind::Return => event.arguments.first() == Some(&COPY_SIZE),
            _ => event.arguments.get(2) == Some(&COPY_SIZE),
        };
        if let Some(count) = counts.get_mut(event.probe as usize) {
            *count += usize::from(of_copy);
        }
    }
    counts
}

/// Returns the function tracer's numbers of the functions at `addresses`, and of `more` functions
/// behind each. A request by name would make the guest format the names of all functions.
fn tracer_numbers(traced: &Traced, addresses: &[Gva], more: usize) -> String {
    let kernel = traced.shell.linux.kernel;
    let linked = kernel.image.symbols().unwrap_or_else(|e| panic!("{e}"));
    let bound = |name: &str| linked.address_of(name).unwrap_or_else(|| panic!("{name}"));
    let (start, end) = (bound("__start_mcount_loc"), bound("__stop_mcount_loc"));
    let table = kernel.image.read_at_vaddr(start, (end - start) as usize);
    let table = table.unwrap_or_else(|| panic!("no table of functions"));
    let mut functions: Vec<u64> = table
        .as_chunks::<8>()
        .0
        .iter()
        .map(|word| u64::from_le_bytes(*word))
        // Overridden functions leave only a zero.
        .filter(|function| *function != 0)
        .collect();
    functions.sort_unstable();
    let slide = traced.view.slide();
    let mut numbers = Vec::new();
    for address in addresses {
        let function = address.0.wrapping_sub(slide);
        // Behind a landing pad, if the kernel has those.
        let place = functions
            .binary_search(&function)
            .or_else(|_| functions.binary_search(&(function + 4)));
        let place = place.unwrap_or_else(|_| panic!("{address} is not traced")) + 1;
        numbers.extend((place..=place + more).map(|number| number.to_string()));
    }
    numbers.join(" ")
}

#[test]
fn function_tracers_over_armed_probes() {
    const COPIES: usize = 20;
    let host = host!();
    let traced = Traced::new(host, &[]);
    let before = traced.hash();
    let mut session = traced.session(&[
        "kprobe::vfs_read:entry",
        "kprobe::vfs_read:return",
        "kprobe::vfs_write:entry",
        "kprobe::vfs_write:return",
        // The bytes that the tracer itself overwrites.
        "kprobe::vfs_read:0",
        "kprobe::ksys_read:0",
    ]);
    let mut round = |what: &str| {
        traced.copy(COPIES);
        let seen = events(&mut session);
        println!("{what}: {:?}, {:?}", copies(&seen), traced.engine.stats());
        assert_eq!(copies(&seen), [COPIES; 4], "{what}");
        let first = seen
            .iter()
            .filter(|event| event.probe == 4 && event.arguments[2] == COPY_SIZE);
        assert_eq!(first.count(), COPIES, "{what}");
    };
    round("no tracer");
    let names = ["vfs_read", "vfs_write"].map(|name| traced.address(name));
    traced.tell(&format!(
        "echo {} > set_ftrace_filter",
        tracer_numbers(&traced, &names, 25)
    ));
    assert_eq!(traced.tell("head -n 1 set_ftrace_filter"), "vfs_read");
    traced.tell("echo function > current_tracer");
    round("function");
    traced.tell("echo function_graph > current_tracer");
    round("function_graph");
    traced.tell("echo nop > current_tracer");
    round("nop");
    drop(session);
    assert_eq!(traced.hash(), before);
    traced.assert_well();
}

/// Waits until the guest has written `wanted` there, or neither a jump nor an int3: it does so some
/// time later.
fn wait_for_instruction(traced: &Traced, at: Gva, wanted: Option<u8>) {
    let deadline = Instant::now() + 4 * COMMAND_LIMIT;
    loop {
        let found = traced.code(at, 1).first().copied().unwrap_or_default();
        let is_there = wanted.map_or(![JUMP, INT3].contains(&found), |wanted| wanted == found);
        if is_there {
            return;
        }
        assert!(
            Instant::now() < deadline,
            "{found:#x} stays, {wanted:x?} is wanted"
        );
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn the_guests_own_probes_where_ours_stand() {
    const COPIES: usize = 20;
    let host = host!();
    let traced = Traced::new(host, &[]);
    let before = traced.hash();
    let function = traced.address("vfs_read");
    let instructions = traced.instructions(function, 48);
    /// The size in bytes of the NOP that a tracer's call replaces. A landing pad before it may be a
    /// NOP of four.
    const TRACERS_NOP: usize = 5;
    // Behind it: the site of the entry's trap, and further ones.
    let straight: Vec<u64> = instructions
        .iter()
        .take_while(|i| i.flow_control() == FlowControl::Next)
        .skip_while(|i| i.mnemonic() != Mnemonic::Nop || i.len() != TRACERS_NOP)
        .skip(1)
        .map(|i| i.ip() - function.0)
        .collect();
    println!("vfs_read: {straight:x?}");
    let [entry, same, inside, ..] = &straight[..] else {
        panic!("{straight:?}")
    };
    let mut session = traced.session(&[
        "kprobe::vfs_read:entry",
        "kprobe::vfs_read:return",
        &format!("kprobe::vfs_read:{same}"),
        &format!("kprobe::vfs_read:{inside}"),
    ]);
    let mut round = |what: &str, expected: Option<[usize; 2]>| {
        traced.copy(COPIES);
        let counts = copies(&events(&mut session));
        println!("{what}: {counts:?}, {:?}", traced.engine.stats());
        assert_eq!(counts[..2], [COPIES; 2], "{what}");
        assert!(
            expected.is_none_or(|expected| counts[2..] == expected),
            "{what}: {counts:?}, not {expected:?}"
        );
    };
    round("alone", Some([COPIES; 2]));
    for (name, offset) in [("mine0", 0), ("mine1", *entry), ("mine2", *same)] {
        traced.tell(&format!(
            "echo 'p:{name} vfs_read+{offset} count=%dx' > kprobe_events"
        ));
        traced.tell(&format!("echo 'count=={COPY_SIZE}' > events/kprobes/{name}/filter; echo 1 > events/kprobes/{name}/enable"));
        // On the tracer's call the guest uses that call. Elsewhere it has an int3 at first, and a
        // jump in the end.
        let optimised = offset > 0;
        if optimised {
            round("by its int3, or already by its jump", None);
            wait_for_instruction(&traced, Gva(function.0 + offset), Some(JUMP));
        }
        // Instructions under the guest's jump are not executed at their own address.
        let passed = |at: u64| optimised && (offset + 1..offset + 5).contains(&at);
        let times = |at: u64| if passed(at) { 0 } else { COPIES };
        // The round ends when the guest has finished its writes.
        round(name, Some([times(*same), times(*inside)]));
        let suspended: Vec<u64> = traced
            .engine
            .machine()
            .traps()
            .stats()
            .iter()
            .filter(|site| site.suspended)
            .map(|site| site.address.0.wrapping_sub(function.0))
            .collect();
        println!("suspended: {suspended:x?}");
        for at in [*same, *inside] {
            assert_eq!(
                suspended.contains(&at),
                passed(at),
                "{name}: {at:#x} in {suspended:x?}"
            );
        }
        let rounds = if optimised { 2 } else { 1 };
        assert_eq!(
            traced.in_buffer(),
            rounds * COPIES,
            "{name}: the guest's own"
        );
        traced.tell(&format!(
            "echo 0 > events/kprobes/{name}/enable; echo > kprobe_events; echo > trace"
        ));
        wait_for_instruction(&traced, Gva(function.0 + offset), None);
        round("after", Some([COPIES; 2]));
    }
    drop(session);
    assert_eq!(traced.hash(), before);
    traced.assert_well();
}

#[test]
fn modules_come_and_go_under_armed_probes() {
    let host = host!();
    let traced = Traced::new(host, &["insmod /lib/brd.ko"]);
    let before = traced.hash();
    let machine = traced.engine.machine().clone();
    let mut session = traced.session(&["kprobe:brd:*:entry", "kprobe:brd:*:return"]);
    let write = "dd if=/dev/zero of=/dev/ram0 bs=4096 count=2 conv=fsync 2> /dev/null";
    traced.tell(write);
    let seen = events(&mut session);
    let of = |kind| seen.iter().filter(|event| event.kind == kind).count();
    assert!(of(EventKind::Entry) > 0);
    assert_eq!(of(EventKind::Entry), of(EventKind::Return));
    let module = traced
        .view
        .modules
        .modules()
        .first()
        .unwrap_or_else(|| panic!("no module"));
    let sites: Vec<_> = machine
        .traps()
        .stats()
        .into_iter()
        .filter(|site| module.module.range_of(site.address.0).is_some())
        .collect();
    println!("{} sites in the module", sites.len());
    let bytes = || {
        let _paused = machine.pause();
        let byte = |site: &SiteStats| traced.shell.linux.byte(site.site.0);
        sites.iter().map(byte).collect::<Vec<_>>()
    };
    assert!(sites.len() > 6 && bytes().iter().all(|byte| *byte == INT3));
    traced.tell("rmmod brd");
    let stats = traced.engine.stats();
    println!("{stats:?}");
    assert!(stats.freed >= sites.len() as u64, "{stats:?}");
    // Since Linux 6.13 the kernel fills text that it frees with int3, also where there was no site.
    let is_filled = {
        let _paused = machine.pause();
        let behind = |site: &SiteStats| traced.shell.linux.byte(Gpa(site.site.0.0 + 1));
        sites.iter().all(|site| behind(site) == INT3)
    };
    let left = bytes();
    assert!(is_filled || !left.contains(&INT3), "{left:x?} at {sites:?}");
    // It may get the same memory again, with no traps in it.
    traced.tell("insmod /lib/brd.ko");
    traced.tell(write);
    let again = traced
        .look(|look| look.modules().map(|modules| modules.items))
        .unwrap_or_else(|e| panic!("{e}"));
    println!(
        "{:x?} then {:x?}",
        module.module.base(),
        again.iter().map(|module| module.base()).collect::<Vec<_>>()
    );
    // Probes of the new module, while the old ones have not been disabled.
    let view = traced.shell.linux.view();
    let mut second = traced.empty_session();
    let pattern = tracing::pattern("kprobe:brd:brd_submit_bio:entry");
    for probe in provider::kernel_probes(&view, &pattern).probes {
        tracing::enable(&mut second, &probe, &Filter::default());
    }
    events(&mut session);
    traced.tell(write);
    let (new, old) = (events(&mut second), events(&mut session));
    assert!(!new.is_empty() && old.is_empty(), "{new:?} {old:?}");
    drop(second);
    let was = bytes();
    drop(session);
    assert_eq!(bytes(), was);
    assert_eq!(machine.traps().stats(), []);
    traced.tell(write);
    traced.tell("rmmod brd");
    assert_eq!(traced.hash(), before);
    traced.assert_well();
}

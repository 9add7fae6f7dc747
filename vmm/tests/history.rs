//! Checkpoints of a running machine: each is the machine at its moment, also at a hit, and can be
//! written as a snapshot while the machine runs on.
#![allow(clippy::unwrap_used)]

mod support;

use std::fs;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Mutex;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use support::{Captured, Guest, Host, micro, paused_before_program};
use vmm::machine::Paused;
use vmm::snapshot::{
    Extent, History, HistoryError, Kept, NewFolder, RestoredDisks, SnapshotInfo, Source, restore,
    save,
};
use vmm::trap::{SiteId, Trap};
use vmm::{StoppedVcpu, TrapSink};

/// The number of calls that the guest's program makes.
const CALLS: u64 = 40;
/// A ring without bounds.
const ALL: Extent = Extent::Ring {
    window: Duration::MAX,
    most: u64::MAX,
};

fn info() -> SnapshotInfo {
    SnapshotInfo {
        command_line: "micro".into(),
        kernel: None,
    }
}

fn source<'m>(host: &'m Host, guest: &'m Guest, info: &'m SnapshotInfo) -> Source<'m> {
    Source {
        kvm: &host.kvm,
        machine: &guest.machine,
        info,
    }
}

fn write(kept: &Kept, folder: &Path) {
    let mut new = NewFolder::create(folder).unwrap();
    new.add_overlays(kept.overlays()).unwrap();
    let mut watch = |_| ControlFlow::Continue(());
    kept.write(new.files().unwrap(), &mut watch).unwrap();
    new.finish().unwrap();
}

fn restored(host: &Host, folder: &Path) -> Guest {
    let serial = Captured::default();
    let none = RestoredDisks::Named(Vec::new());
    let restored = restore(&host.kvm, &host.profile, folder, &none, serial.output());
    Guest::restored(restored.unwrap().machine, serial)
}

/// A sink that holds each hit, and passes RDI on with the hold.
struct Holding(Mutex<Sender<(u64, Paused)>>);

impl TrapSink for Holding {
    fn trap(&self, _: &Trap, cpu: &StoppedVcpu<'_>) {
        let held = (cpu.regs().rdi, cpu.hold_here());
        // The test may have seen enough.
        let _ = self.0.lock().unwrap().send(held);
    }

    fn may_hold(&self, _: SiteId) -> bool {
        true
    }
}

/// A guest that stops at each of its calls, before the first one.
fn stopping(host: &Host, program: &str) -> (Guest, u64, Receiver<(u64, Paused)>) {
    let (guest, paused) = paused_before_program(host, &format!("{program} {CALLS}"), 1);
    let leaf = match program {
        "calls" => {
            let leaf = guest.symbol("micro_leaf");
            guest.arm_kernel(leaf);
            leaf
        }
        _ => {
            let leaf = guest.symbol("micro_user_leaf");
            guest.arm_user(leaf);
            leaf
        }
    };
    let (sender, held) = channel();
    let sink = Holding(Mutex::new(sender));
    guest.machine.set_sink(Some(Box::new(sink)));
    drop(paused);
    (guest, leaf.0, held)
}

#[test]
fn a_checkpoint_of_a_hit_is_restored_before_the_instruction_that_was_hit() {
    let host = host!();
    for program in ["calls", "usercalls"] {
        let (guest, leaf, held) = stopping(host, program);
        let info = info();
        let source = source(host, &guest, &info);
        let mut history = History::start(source, ALL).unwrap();
        let mut numbers = Vec::new();
        for call in 0..CALLS {
            let (argument, hold) = held.recv_timeout(support::LIMIT).unwrap();
            assert_eq!(argument, call, "{program}: {}", guest.situation());
            numbers.push(history.checkpoint(source).unwrap().number);
            drop(hold);
        }
        assert_eq!(guest.count(), CALLS, "{program}: {}", guest.situation());
        // Each is another machine, also those in the middle of the ring.
        for call in [0, 7, CALLS - 1] {
            let folder = tempfile::tempdir().unwrap();
            let folder = folder.path().join("saved");
            write(&history.keep(numbers[call as usize]).unwrap(), &folder);
            let mut copy = restored(host, &folder);
            let paused = copy.machine.pause();
            let at = copy.machine.registers(&paused, 0).unwrap().regs;
            assert_eq!((at.rip, at.rdi), (leaf, call), "{program}");
            drop(paused);
            copy.machine.start();
            assert_eq!(copy.count(), CALLS, "{program}: {}", copy.situation());
        }
    }
}

#[test]
fn a_checkpoint_has_the_memory_of_its_moment_in_a_ring_and_as_the_newest_one() {
    let host = host!();
    let short = Extent::Ring {
        window: Duration::ZERO,
        most: u64::MAX,
    };
    for extent in [ALL, short, Extent::Newest] {
        let (guest, _, held) = stopping(host, "usercalls");
        let info = info();
        let source = source(host, &guest, &info);
        let mut history = History::start(source, extent).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let mut kept = Vec::new();
        for call in 0..CALLS {
            let (_, hold) = held.recv_timeout(support::LIMIT).unwrap();
            if call % 7 == 3 {
                let checkpoint = history.checkpoint(source).unwrap();
                let plain = folder.path().join(format!("plain{call}"));
                save(&host.kvm, &guest.machine, &info, &plain).unwrap();
                kept.push((call, history.keep(checkpoint.number).unwrap(), plain));
            } else {
                history.refresh(&guest.machine).unwrap();
            }
            drop(hold);
            // Of some moments, later checkpoints come while they are kept.
            if kept.len() < 2 {
                continue;
            }
            for (call, kept, plain) in kept.drain(..) {
                let own = folder.path().join(format!("own{call}"));
                write(&kept, &own);
                let memory = |folder: &Path| fs::read(folder.join("memory")).unwrap();
                assert!(memory(&own) == memory(&plain), "{extent:?}: call {call}");
            }
        }
        kept.clear();
        history.refresh(&guest.machine).unwrap();
        let left = history.checkpoints().count();
        assert_eq!(left > 1, extent == ALL, "{extent:?}: {left} checkpoints");
    }
}

#[test]
fn a_history_has_the_log_alone_and_keeps_to_its_room() {
    let host = host!();
    let guest = micro(host, "calls 1");
    let info = info();
    let source = source(host, &guest, &info);
    let tiny = Extent::Ring {
        window: Duration::MAX,
        most: 4096,
    };
    let refused = History::start(source, tiny).unwrap_err();
    assert!(matches!(refused, HistoryError::NoRoom { .. }), "{refused}");
    let history = History::start(source, ALL).unwrap();
    let second = History::start(source, ALL).unwrap_err();
    assert!(matches!(second, HistoryError::NoLog), "{second}");
    // A snapshot needs no log.
    let folder = tempfile::tempdir().unwrap();
    save(
        &host.kvm,
        &guest.machine,
        &info,
        &folder.path().join("saved"),
    )
    .unwrap();
    assert!(history.keep(2).is_none());
    drop(history);
    History::start(source, ALL).unwrap();
}

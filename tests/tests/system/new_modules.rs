//! Probes of a kernel module that is not loaded wait for it. They see its initialisation, go with
//! it, and come back with it. Traces and scripts do so alike.

use std::thread;
use std::time::Duration;

use exotrace::{MapLine, MapValue, Script};
use probes::engine::{Capture, Filter, ProbeStats, Session};
use probes::event::Event;
use probes::module_probes::ModuleProbes;
use probes::provider::{self, module};
use support::traced::{Traced, events};
use support::{host, tracing};

/// Loads the module.
const LOAD: &str = "insmod /lib/brd.ko";
/// Makes the module work.
const WRITE: &str = "dd if=/dev/zero of=/dev/ram0 bs=4096 count=5 conv=fsync 2> /dev/null";
/// Removes the module.
const REMOVE: &str = "rmmod brd";
/// The longest time between two looks at a session that was not woken.
const LONGEST: Duration = Duration::from_millis(100);

/// Runs a command in the guest. Meanwhile `follow` is called again and again.
fn tell(traced: &Traced, command: &str, mut follow: impl FnMut()) {
    thread::scope(|scope| {
        let told = scope.spawn(|| traced.tell(command));
        while !told.is_finished() {
            follow();
        }
        told.join().unwrap_or_else(|_| panic!("{command}"));
    });
    follow();
}

/// A session whose probes come and go with modules.
struct Followed {
    session: Session,
    modules: ModuleProbes,
    names: Vec<String>,
}

impl Followed {
    fn new(traced: &Traced, patterns: &[&str]) -> Self {
        let patterns: Vec<_> = patterns.iter().map(|text| tracing::pattern(text)).collect();
        let guest = traced.shell.linux.vm.traceable(&traced.view);
        for pattern in &patterns {
            assert!(provider::find(&guest, pattern).is_err(), "{pattern}");
            assert_eq!(module::to_come(&traced.view, pattern), Some("brd"));
        }
        let session = traced.empty_session();
        let modules = ModuleProbes::follow(&session, patterns, []);
        Self {
            session,
            modules: modules.unwrap_or_else(|| panic!("the kernel does not report modules")),
            names: Vec::new(),
        }
    }

    fn tell(&mut self, traced: &Traced, command: &str) {
        let Self {
            session,
            modules,
            names,
        } = self;
        let waiter = session.waiter();
        tell(traced, command, || {
            let _ = waiter.wait_at_most(LONGEST, None);
            modules.take_up(session, &mut |session, probe| {
                let number = session.enable(&probe, Filter::default(), Capture::default())?;
                assert_eq!(number as usize, names.len());
                names.push(probe.name.to_string());
                Ok(Some(number))
            });
        });
    }

    fn waiting(&self) -> usize {
        self.modules.waiting().count()
    }

    /// Returns the hits of a probe so far.
    fn hits(&self, name: &str) -> u64 {
        let number = self.names.iter().position(|known| known == name);
        let number = number.unwrap_or_else(|| panic!("{name}: {:?}", self.names));
        let stats = self.session.probe_stats(number as u32);
        stats.unwrap_or_default().hits
    }
}

#[test]
fn probes_wait_for_a_module_and_come_back_with_it() {
    let host = host!();
    let traced = Traced::new(host, &[]);
    let before = traced.hash();
    let machine = traced.engine.machine().clone();
    let mut followed = Followed::new(
        &traced,
        &[
            "kprobe:brd:brd_init:",
            "kprobe:brd:brd_exit:entry",
            "kprobe:brd:brd_submit_bio:",
        ],
    );
    assert_eq!(followed.waiting(), 3);
    let mut expected_bios = 0;
    for round in 1..=3 {
        followed.tell(&traced, LOAD);
        assert_eq!(followed.waiting(), 0);
        assert_eq!(
            followed.names,
            [
                "kprobe:brd:brd_init:entry",
                "kprobe:brd:brd_init:return",
                "kprobe:brd:brd_exit:entry",
                "kprobe:brd:brd_submit_bio:entry",
                "kprobe:brd:brd_submit_bio:return",
            ]
        );
        // Initialisation was seen, once each time.
        assert_eq!(followed.hits("kprobe:brd:brd_init:entry"), round);
        assert_eq!(followed.hits("kprobe:brd:brd_init:return"), round);
        // A usual probe of the loaded module counts as many from now on.
        let view = traced.shell.linux.view();
        let bios = "kprobe:brd:brd_submit_bio:entry";
        let mut usual = traced.empty_session();
        let probe = tracing::probe(&view, bios);
        let number = tracing::enable(&mut usual, &probe, &Filter::default());
        let seen = followed.hits(bios);
        followed.tell(&traced, WRITE);
        let stats: Option<ProbeStats> = usual.probe_stats(number);
        let counted = stats.unwrap_or_default().hits;
        println!("round {round}: {seen} bios before, {counted} of the command");
        assert!(counted > 0);
        expected_bios = seen + counted;
        assert_eq!(followed.hits(bios), expected_bios);
        assert_eq!(
            followed.hits("kprobe:brd:brd_submit_bio:return"),
            expected_bios
        );
        drop(usual);
        assert_eq!(followed.hits("kprobe:brd:brd_exit:entry"), round - 1);
        followed.tell(&traced, REMOVE);
        assert_eq!(followed.hits("kprobe:brd:brd_exit:entry"), round);
    }
    assert!(expected_bios > 0);
    let events: Vec<Event> = events(&mut followed.session);
    let total: u64 = followed.names.iter().map(|name| followed.hits(name)).sum();
    assert_eq!(events.len() as u64, total);
    drop(followed);
    assert_eq!(machine.traps().stats(), []);
    assert_eq!(traced.hash(), before);
    traced.assert_well();
}

#[test]
fn a_script_waits_for_a_module_and_counts_each_load() {
    let host = host!();
    let traced = Traced::new(host, &[]);
    let script = traced.shell.linux.vm.script(
        "kprobe:brd:brd_init:entry { @init = count(); } \
         kprobe:brd:brd_init:entry, kprobe:brd:brd_*:entry { @any = count(); } \
         kprobe:brd:brd_exit:entry { @exit = count(); }",
    );
    let mut script = script.unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(script.waiting().len(), 3, "{:?}", script.waiting());
    for round in 1..=2 {
        for command in [LOAD, REMOVE] {
            follow(&traced, &mut script, command);
        }
        assert_eq!(script.waiting(), [""; 0]);
        let maps = script.maps();
        let numbers = ["init", "exit", "any"].map(|name| number(&maps, name));
        let [init, exit, any] = numbers;
        assert_eq!([init, exit], [round, round]);
        assert!(any >= init + exit, "{numbers:?}");
    }
    // Names of the same probe twice: no more probes than functions.
    let names = script.probes();
    let mut once = names.clone();
    once.sort();
    once.dedup();
    assert_eq!(once.len(), names.len(), "{names:?}");
    drop(script);
    traced.assert_well();
}

/// Returns the value of a map without keys.
fn number(maps: &[MapLine], name: &str) -> i64 {
    let map = maps.iter().find(|map| map.name == name);
    match map
        .and_then(|map| map.entries.first())
        .map(|entry| &entry.value)
    {
        Some(MapValue::Number(number)) => *number,
        other => panic!("{name}: {other:?}"),
    }
}

fn follow(traced: &Traced, script: &mut Script, command: &str) {
    tell(traced, command, || {
        script.wait(LONGEST);
        script.output();
    });
}

//! Tests of probes of a program's functions, by the physical byte of their text.
#![allow(clippy::unwrap_used)]

mod support;

use std::time::Duration;

use introspect::Gva;
use introspect::kernel::page_cache::CachedFile;
use introspect::x86_64::paging::translate;
use probes::engine::EnableError;
use probes::event::EventKind;
use probes::name::ProbeName;
use probes::probe::{Moment, Probe, Target, UserText};
use support::{Micro, before_program, drained, enable, hits};
use vmm::machine::Paused;

fn user_probe(micro: &Micro, paused: &Paused, function: &str, moment: Moment) -> Probe {
    let registers = micro.machine.registers(paused, 0).unwrap();
    let address = Gva(micro.address(function));
    let place = translate(micro.machine.ram(), registers.address_space(), address).unwrap();
    let mut code = vec![0; 16];
    let traps = micro.machine.traps();
    traps.read_unpatched(place.gpa, &mut code).unwrap();
    Probe {
        name: ProbeName::new("uprobe", "micro", function, moment.name()),
        signature: None,
        target: Target::User {
            text: UserText {
                path: "/micro".into(),
                file: CachedFile {
                    mapping: Gva(0),
                    inode: Gva(0),
                    size: 0,
                },
                offset: place.gpa.0,
                physical: Some(place.gpa),
                code,
            },
            moment,
        },
    }
}

#[test]
fn each_call_of_a_programs_function_is_an_entry_and_a_return() {
    const CALLS: u64 = 3_000;
    let Some((micro, paused)) = before_program("usercalls 3000", 1) else {
        return;
    };
    let before = micro.text_hash();
    let mut session = micro.session(1 << 14, &[]);
    let mut other = micro.session(1 << 14, &[]);
    for moment in [Moment::Entry, Moment::Return] {
        let leaf = user_probe(&micro, &paused, "micro_user_leaf", moment);
        enable(&mut session, &leaf).unwrap();
        enable(&mut other, &leaf).unwrap();
    }
    // Of two sessions' probes, the first may be removed.
    assert!(other.disable(1));
    drop(paused);
    micro.finish(&mut || {});
    micro.assert_count(CALLS);

    assert_eq!((hits(&session, 0), hits(&session, 1)), (CALLS, CALLS));
    assert_eq!(hits(&other, 0), CALLS);
    let events = drained(&mut session);
    assert_eq!(events.len() as u64, 2 * CALLS);
    let leaf = micro.address("micro_user_leaf");
    for (number, pair) in (0..).zip(events.chunks_exact(2)) {
        let [entry, exit] = pair else { panic!("pairs") };
        let found = (entry.kind, entry.pc, entry.arguments[0]);
        assert_eq!(found, (EventKind::Entry, leaf, number));
        assert_eq!(exit.kind, EventKind::Return);
        assert_eq!(exit.arguments, [number + 1]);
        let caller = micro.view.kernel.symbols.resolve(exit.pc);
        assert_eq!(caller.map(|(s, _)| s.name), Some("micro_user_calls"));
    }
    let stats = micro.engine.stats();
    assert_eq!(
        (
            stats.unpaired_returns,
            stats.lost_returns,
            stats.without_return
        ),
        (0, 0, 0),
        "{stats:?}"
    );
    drop((session, other));
    micro.assert_untouched(&before);
}

#[test]
fn sessions_of_a_programs_function_come_and_go_while_it_runs() {
    const CALLS: u64 = 200_000_000;
    let Some((micro, paused)) = before_program("usercalls 200000000", 1) else {
        return;
    };
    let before = micro.text_hash();
    let probes = [Moment::Entry, Moment::Return]
        .map(|moment| user_probe(&micro, &paused, "micro_user_leaf", moment));
    drop(paused);
    let mut rounds = 0;
    let has_ended = |micro: &Micro| micro.machine.wait(Some(Duration::ZERO)).is_some();
    // On a busy host the program may end before this thread does.
    while rounds < 100 && !has_ended(&micro) {
        let mut session = micro.session(64, &[]);
        // In one pause. Otherwise calls between the two would be entries without a return.
        let paused = micro.machine.pause();
        for probe in &probes {
            enable(&mut session, probe).unwrap();
        }
        drop(paused);
        // At once, or after hits.
        if rounds % 4 == 0 {
            micro.until("hit", |micro| {
                has_ended(micro) || session.stats().probes.hits > 10
            });
            let paused = micro.machine.pause();
            session.disable_all();
            drop(paused);
            let [mut entries, mut returns] = [0; 2];
            session.drain(|event| {
                assert!(
                    event.probe == 0 || entries > 0,
                    "no return without its call"
                );
                *[&mut entries, &mut returns][event.probe as usize] += 1;
            });
            let unpaired = micro.engine.stats().unpaired_returns;
            assert!(
                entries - returns <= 1 && unpaired == 0,
                "{entries} {returns} {unpaired}"
            );
        }
        rounds += 1;
    }
    println!("{rounds} rounds");
    assert!(rounds > 4);
    micro.assert_untouched(&before);
    micro.finish(&mut || {});
    micro.assert_count(CALLS);
}

#[test]
fn text_that_is_no_code_is_refused_and_text_that_is_not_in_memory_is_waited_for() {
    let Some((micro, paused)) = before_program("usercalls 1", 1) else {
        return;
    };
    let before = micro.text_hash();
    let mut session = micro.session(64, &[]);
    let good = user_probe(&micro, &paused, "micro_user_leaf", Moment::Return);
    let Target::User { text, moment } = good.target.clone() else {
        panic!("{good:?}")
    };
    // 06 is no instruction in 64-bit mode.
    for code in [Vec::new(), vec![0x06]] {
        let text = UserText {
            code,
            ..text.clone()
        };
        let bad = Probe {
            target: Target::User { text, moment },
            ..good.clone()
        };
        let error = enable(&mut session, &bad).unwrap_err();
        assert!(matches!(error, EnableError::Arm { .. }), "{error}");
        assert!(error.to_string().contains("micro_user_leaf"), "{error}");
    }
    let absent = UserText {
        physical: None,
        ..text
    };
    let absent = Probe {
        target: Target::User {
            text: absent,
            moment,
        },
        ..good.clone()
    };
    let number = enable(&mut session, &absent).unwrap();
    assert_eq!(session.engine().stats().waiting_pages, 1);
    assert!(session.disable(number));
    assert_eq!(session.engine().stats().waiting_pages, 0);
    micro.assert_untouched(&before);
}

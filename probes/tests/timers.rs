//! Tests of the host's clock: ticks on every vCPU in any state.
#![allow(clippy::unwrap_used)]

mod support;

use std::time::{Duration, Instant};

use probes::engine::Session;
use probes::event::EventKind;
use support::{drained, hits, micro};

const PERIOD: Duration = Duration::from_millis(10);
const TIME: Duration = Duration::from_millis(300);
/// A busy host gets further attempts.
const ATTEMPTS: usize = 10;

fn seen(session: &Session, number: u32) -> bool {
    session.probe_stats(number).unwrap().recorded > 0
}

#[test]
fn a_profile_ticks_on_every_vcpu_and_an_interval_on_the_first() {
    for (program, cpus) in [
        ("spin", 1),
        ("uspin", 1),
        ("hlt", 1),
        // The second vCPU has not been started.
        ("hlt", 2),
        ("smp 100000000 2", 2),
    ] {
        let Some(mut micro) = micro(program, cpus) else {
            return;
        };
        micro.machine.start();
        micro.until("first line", |micro| micro.output.text().contains('\n'));
        let mut told = Vec::new();
        let good = (0..ATTEMPTS).any(|_| {
            let begin = Instant::now();
            let mut session = micro.session(1024, &["profile:hz:100", "interval:ms:10"]);
            std::thread::sleep(TIME);
            let paused = micro.machine.pause();
            // The ticks counted are the ticks read.
            let counted = hits(&session, 0) + hits(&session, 1);
            let expected = (begin.elapsed().as_nanos() / PERIOD.as_nanos()) as usize;
            let events = drained(&mut session);
            drop(paused);
            assert_eq!(events.len() as u64, counted);
            assert!(events.iter().all(|e| e.kind == EventKind::Tick));
            let of = |probe, vcpu| {
                let own = events.iter().filter(|e| (e.probe, e.vcpu) == (probe, vcpu));
                own.count()
            };
            assert!((1..4).all(|vcpu| of(1, vcpu) == 0), "{events:?}");
            let counts: Vec<usize> = (0..u16::from(cpus))
                .map(|vcpu| of(0, vcpu))
                .chain([of(1, 0)])
                .collect();
            // Never more than were due.
            assert!(counts.iter().all(|count| *count <= expected), "{counts:?}");
            let good = counts.iter().all(|count| *count >= expected / 2);
            told.push((expected, counts));
            good
        });
        assert!(good, "{program} on {cpus}: {told:?}");
        // A tick's address is where the guest is.
        let mut session = micro.session(1024, &["profile:hz:1000"]);
        micro.until("tick", |_| seen(&session, 0));
        session.disable_all();
        let events = drained(&mut session);
        let place = events.iter().find(|e| e.vcpu == 0).map(|e| e.pc);
        let symbol = place.and_then(|pc| micro.view.kernel.symbols.resolve(pc));
        let name = symbol.map(|(symbol, _)| symbol.name);
        match program {
            "spin" => assert_eq!(name, Some("micro_spin")),
            "uspin" => assert_eq!(name, Some("micro_user_spin")),
            _ => {}
        }
        micro.machine.stop();
    }
}

#[test]
fn sixty_four_timers_tick_and_no_more() {
    let Some(mut micro) = micro("hlt", 1) else {
        return;
    };
    let mut session = micro.session(64, &["interval:s:1000"; 63]);
    support::enable(&mut session, &micro.probe("profile:hz:1000")).unwrap();
    let other = &micro.probe("interval:ms:1");
    let error = support::enable(&mut session, other).unwrap_err();
    assert!(error.to_string().contains("64 timers"), "{error}");
    micro.machine.start();
    micro.until("tick of the last", |_| seen(&session, 63));
    assert!(!seen(&session, 0));
    assert!(session.disable(0));
    support::enable(&mut session, other).unwrap();
    micro.until("tick in its place", |_| seen(&session, 64));
    drop(session);
    micro.machine.stop();
}

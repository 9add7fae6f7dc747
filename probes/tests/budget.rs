//! Budgets on a real KVM: probes that cost too much rest, others do not notice.
#![allow(clippy::unwrap_used)]

mod support;

use support::{hits, micro, ring, trap_ns};

/// The function that the guest calls, entered and left.
const LEAF: [&str; 2] = ["kprobe::micro_leaf:entry", "kprobe::micro_leaf:return"];

/// Returns a number of calls whose hits take some seconds on this host: a budget is spent many
/// times meanwhile. `None` without KVM.
fn calls() -> Option<u64> {
    const NANOSECONDS: u64 = 3_000_000_000;
    Some(NANOSECONDS / trap_ns()?.max(1))
}

#[test]
fn a_session_over_its_budget_rests_and_no_other_misses_a_hit() {
    let Some(calls) = calls() else { return };
    let Some(mut micro) = micro(&format!("calls {calls}"), 1) else {
        return;
    };
    let before = micro.text_hash();
    let mut whole = micro.session(64, &[]);
    support::enable(&mut whole, &micro.probe(LEAF[0])).unwrap();
    let mut thrifty = micro.engine.session(ring(64)).unwrap();
    thrifty.set_budget(Some("2%".parse().unwrap()));
    thrifty.set_label("thrifty");
    for pattern in LEAF {
        support::enable(&mut thrifty, &micro.probe(pattern)).unwrap();
    }
    micro.machine.start();
    let times = |session: &probes::engine::Session| session.unwatched(0).unwrap().times;
    micro.until("second rest", |_| times(&thrifty) >= 2);
    let [own, all] = [thrifty.cost(), micro.engine.cost()];
    assert!(
        own.hits > 0 && own.ticks > 0 && own.hits <= all.hits,
        "{own:?} {all:?}"
    );
    let listed = micro.engine.session_costs();
    let listed = listed
        .iter()
        .find(|session| session.label == "thrifty")
        .unwrap();
    assert_eq!(listed.budget.unwrap().to_string(), "2%");
    assert_eq!(listed.probes, 2);
    micro.finish(&mut || {});
    micro.assert_count(calls);
    assert_eq!(
        hits(&whole, 0),
        calls,
        "a session without a budget misses nothing"
    );
    let [entries, returns] = [0, 1].map(|number| hits(&thrifty, number));
    assert!(entries > 0 && entries < calls, "{entries}");
    // A call that was entered before the rest returns unseen.
    assert!(returns <= entries, "{returns} of {entries}");
    let unwatched = thrifty.unwatched(0).unwrap();
    assert!(
        unwatched.ticks > 0 && unwatched.ticks < unwatched.passed,
        "{unwatched:?}"
    );
    assert_eq!(whole.unwatched(0).unwrap().times, 0);
    drop((whole, thrifty));
    micro.assert_untouched(&before);
}

#[test]
fn the_budget_of_all_spares_what_must_be_whole() {
    let Some(calls) = calls() else { return };
    let Some(mut micro) = micro(&format!("calls {calls}"), 1) else {
        return;
    };
    let before = micro.text_hash();
    micro.engine.set_budget(Some("2%".parse().unwrap()));
    let mut whole = micro.engine.session(ring(64)).unwrap();
    whole.watch_always();
    support::enable(&mut whole, &micro.probe(LEAF[0])).unwrap();
    let mut other = micro.engine.session(ring(64)).unwrap();
    support::enable(&mut other, &micro.probe(LEAF[1])).unwrap();
    micro.machine.start();
    micro.until("rest", |_| other.unwatched(0).unwrap().times >= 1);
    micro.finish(&mut || {});
    assert_eq!(hits(&whole, 0), calls);
    assert!(hits(&other, 0) < calls);
    // Those that rest are disabled like others.
    drop((whole, other));
    micro.assert_untouched(&before);
}

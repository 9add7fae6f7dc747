//! A trace under a budget, as its user sees it: its cost is reported, and the time for which probes
//! were not watched.

use support::host;
use support::watched::Watched;

/// A share that a busy guest's probes exceed on every host.
const LITTLE: &str = "0.02%";

#[test]
fn a_trace_over_its_budget_tells_its_cost_and_what_it_has_not_watched() {
    let host = host!();
    let mut guest = Watched::new(host);
    guest.run("while :; do : < /proc/version; done & echo $! > /tmp/busy");
    // The script's own clock ticks on while its probe rests.
    let program = "kprobe:vfs_open:entry { @ = count(); } interval:ms:100 { printf(\"tick\\n\"); }";
    let script = guest.trace(&["--budget", LITTLE, "-e", program]);
    let mut stat = String::new();
    // It rests for most of the time.
    while !stat.contains("1 of 2 probes stopped") {
        stat = guest.ask(&["stat"]).stdout;
    }
    assert!(stat.contains(&format!(", of at most {LITTLE}")), "{stat}");
    assert!(stat.contains("cost of all traces"), "{stat}");
    let ended = script.interrupted();
    assert!(ended.stdout.contains("tick\n"), "{ended:?}");
    for told in [
        "exotrace: cost: ",
        "exotrace: kprobe:vmlinux:vfs_open:entry was not watched for ",
        " hits were seen",
    ] {
        assert!(ended.stderr.contains(told), "{told}: {ended:?}");
    }
    let timer = ended.stderr.lines().find(|line| line.contains("interval"));
    assert_eq!(timer, None, "a clock never rests");
    // Nothing is left in the guest, which works.
    let stat = guest.ask(&["stat"]).stdout;
    assert!(!stat.contains("traps in the guest"), "{stat}");
    assert_eq!(guest.run("kill $(cat /tmp/busy); echo well"), "well\n");
    guest.stop();
}

#[test]
fn a_budget_that_is_none_is_refused_and_the_guest_runs_on() {
    let host = host!();
    let mut guest = Watched::new(host);
    for budget in ["0", "0%", "101%", "much"] {
        let refused = guest.ask(&["trace", "--budget", budget, "vfs_open"]);
        assert_eq!(refused.status, 2, "{refused:?}");
        let wrong = format!(
            "exotrace: invalid value '{budget}' for '--budget <PERCENT>': invalid budget \"{budget}\": expected a \
             percentage above 0 and up to 100, such as 5% (see --help)\n"
        );
        assert_eq!(refused.stderr, wrong);
    }
    assert_eq!(guest.run("echo well"), "well\n");
    guest.stop();
}

//! The last messages of a trace: its counts, its cost, and the probes that were not watched to the
//! end.

use std::cmp::Reverse;

use crate::protocol::cost::{Cost, Unwatched};
use crate::protocol::trace::Counts;
use crate::report::{printable, say};

/// Reports a trace's counts to the user.
pub fn tell(counts: &Counts) {
    let mut kinds = format!("{} entries, {} exits", counts.entries, counts.exits);
    if counts.others > 0 {
        kinds += &format!(", {} others", counts.others);
    }
    say(format_args!(
        "{} events: {kinds}, {} dropped",
        counts.entries + counts.exits + counts.others,
        counts.dropped
    ));
    for (count, one, several) in [
        (
            counts.filtered,
            "hit was left out by filters",
            "hits were left out by filters",
        ),
        (
            counts.waiting_returns,
            "call had not returned yet",
            "calls had not returned yet",
        ),
        (
            counts.unpaired_returns,
            "return of a call that is not traced was left out",
            "returns of calls that are not traced were left out",
        ),
        (
            counts.lost_returns,
            "call never returned, or too many waited",
            "calls never returned, or too many waited",
        ),
        (
            counts.without_return,
            "call whose return could not be trapped",
            "calls whose returns could not be trapped",
        ),
        (
            counts.unknown_task,
            "hit whose process could not be read",
            "hits whose process could not be read",
        ),
    ] {
        match count {
            0 => {}
            1 => say(format_args!("1 {one}")),
            _ => say(format_args!("{count} {several}")),
        }
    }
    tell_given_up(&counts.given_up);
}

/// Reports what a trace has cost the guest, and the probes that a budget has stopped.
pub fn tell_cost(cost: &Cost, unwatched: &[Unwatched]) {
    /// The number of probes shown.
    const SHOWN: usize = 10;
    if cost.hits > 0 {
        say(format_args!("cost: {cost}"));
    }
    let mut busiest: Vec<&Unwatched> = unwatched.iter().collect();
    busiest.sort_by_key(|probe| Reverse(probe.seen));
    for probe in busiest.iter().take(SHOWN) {
        say(format_args!("{probe}"));
    }
    if let Some(more @ 1..) = unwatched.len().checked_sub(SHOWN) {
        say(format_args!(
            "{more} more probes were stopped by the budget"
        ));
    }
}

/// Names the probes with given-up sites.
pub fn tell_given_up(probes: &[String]) {
    /// The number of names shown.
    const SHOWN: usize = 10;
    if probes.is_empty() {
        return;
    }
    let shown: Vec<_> = probes
        .iter()
        .take(SHOWN)
        .map(|name| printable(name))
        .collect();
    let more = match probes.len().saturating_sub(SHOWN) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    say(format_args!(
        "not traced to the end: {}{more}; this host cannot execute the instruction there in the state that a program was in",
        shown.join(", ")
    ));
}

//! Tests of filters, values and captures. Requests are tested on a guest
//! (`probes/devices/tests/dt.rs`).
#![allow(clippy::unwrap_used)]

use probes::engine::Match;

use super::events::returned;
use super::*;
use crate::dt::abi::{FLAG_FUNCARGS, FLAG_KSTACK, FLAG_USTACK, Values};

#[test]
fn filters_are_the_engines() {
    let only = |pids, tids| Filter {
        pids,
        tids,
        ..Filter::default()
    };
    let nobody = || only(Match::In(Vec::new()), Match::Any);
    for (operand, variable, value, mode, expected) in [
        (0, 1, 7, Mode::Normal, Filter::default()),
        (1, 1, 7, Mode::Normal, only(Match::In(vec![7]), Match::Any)),
        (
            2,
            1,
            7,
            Mode::Normal,
            only(Match::NotIn(vec![7]), Match::Any),
        ),
        (1, 2, 7, Mode::Normal, only(Match::Any, Match::In(vec![7]))),
        (
            2,
            2,
            7,
            Mode::Normal,
            only(Match::Any, Match::NotIn(vec![7])),
        ),
        (
            1,
            2,
            100_007,
            Mode::Strict,
            only(Match::Any, Match::In(vec![7])),
        ),
        (
            2,
            2,
            100_007,
            Mode::Strict,
            only(Match::Any, Match::NotIn(vec![7])),
        ),
        (
            1,
            2,
            7,
            Mode::Strict,
            only(Match::Any, Match::In(Vec::new())),
        ),
        (2, 2, 7, Mode::Strict, Filter::default()),
        (1, 1, 7, Mode::Strict, only(Match::In(vec![7]), Match::Any)),
        // Without a variable, the value is compared with 0.
        (1, 0, 7, Mode::Normal, nobody()),
        (1, 0, 0, Mode::Normal, Filter::default()),
        (2, 0, 7, Mode::Normal, Filter::default()),
        (2, 0, 0, Mode::Normal, nobody()),
    ] {
        let wanted = abi::Filter {
            operand,
            variable,
            value,
        };
        check_filter(&wanted).unwrap();
        assert_eq!(filter(&wanted, mode), expected, "{wanted:?} {mode:?}");
    }
    for (operand, variable) in [(3, 0), (0, 3), (u32::MAX, 1)] {
        let wanted = abi::Filter {
            operand,
            variable,
            value: 0,
        };
        let errno = check_filter(&wanted).map_err(|refused| refused.errno);
        assert_eq!(errno, Err(Errno::Einval));
    }
}

#[test]
fn small_negative_results_of_system_calls_are_errors() {
    let value = |value: i64, error| Values::Return {
        values: [value, 0],
        error,
    };
    for (result, expected) in [
        (0, value(0, 0)),
        (777, value(777, 0)),
        (-1, value(-1, 1)),
        (-4095, value(-1, 4095)),
        (-4096, value(-4096, 0)),
        (i64::MIN, value(i64::MIN, 0)),
        (0x7fff_dead_b000, value(0x7fff_dead_b000, 0)),
        // A mapping at the end of an int's range is no error.
        (0xffff_f001, value(0xffff_f001, 0)),
    ] {
        assert_eq!(returned(result.cast_unsigned()), expected, "{result:#x}");
    }
}

#[test]
fn what_is_kept_follows_flags_and_provider() {
    let listed = |source, arguments| Listed {
        provider: "",
        function: "".into(),
        name: "".into(),
        arguments,
        source,
    };
    let call = |moment| Source::SystemCall { number: 0, moment };
    let function = |moment| Source::Function {
        address: introspect::Gva(0),
        moment,
    };
    use probes::probe::Moment::{Entry, Return};
    for (source, flags, arguments) in [
        (Source::Timer { every_vcpu: true }, 15, 0),
        (call(Entry), FLAG_FUNCARGS, 3),
        (call(Entry), 0, 0),
        (call(Return), 0, 1),
        (function(Entry), FLAG_FUNCARGS, 6),
        (function(Entry), 0, 0),
        (function(Return), 0, 1),
    ] {
        let told = format!("{source:?} {flags}");
        let listed = listed(source, 3);
        assert_eq!(
            capture(&listed, flags, Abi::Current).arguments,
            arguments,
            "{told}"
        );
    }
    let listed = listed(function(Entry), 3);
    for (flags, abi, stacks) in [
        (0, Abi::Current, (0, 0)),
        (FLAG_KSTACK, Abi::Current, (19, 0)),
        (FLAG_USTACK, Abi::Current, (0, 19)),
        (FLAG_KSTACK | FLAG_USTACK, Abi::Current, (19, 19)),
        (0, Abi::Old, (0, 0)),
        // One place for both.
        (FLAG_KSTACK, Abi::Old, (19, 0)),
        (FLAG_USTACK, Abi::Old, (19, 0)),
    ] {
        let found = capture(&listed, flags, abi);
        let found = (found.kernel_stack, found.user_stack);
        assert_eq!(found, stacks, "{flags} {abi:?}");
    }
}

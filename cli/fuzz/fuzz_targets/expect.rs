//! Fuzzes the argument of `--expect`: its rule and its count mean the same when they are read
//! again.
#![no_main]

use exotrace::hostile::expectation;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    let Some((rule, bound)) = expectation(text) else {
        return;
    };
    let again = expectation(&format!("{rule}{bound}"));
    assert_eq!(again, Some((rule, bound)));
});

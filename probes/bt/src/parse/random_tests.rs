//! Parses random texts: the parser neither fails nor takes long, and its messages can be shown.

#![allow(clippy::unwrap_used)]

use super::{LONGEST, parse};
use crate::ast::Dialect;
use proptest::prelude::*;
use std::time::Instant;

/// Pieces of scripts, with blanks between them.
const PIECES: &str = r##"
    BEGIN END kprobe:f kprobe:f:entry profile:hz:99 uprobe:/bin/*:x if else while for unroll
    break return let pid arg0 args kstack printf print str clear delete count hist lhist sum
    struct translator typedef config xlate sizeof offsetof typeof int x $x $1 $# @x @ 1 0x 5ms
    99999999999999999999 "a" "%d\n" " \ / // /* */ ( ) { } [ ] ; , . .. -> ++ -- + - * % & && |
    || ^ ! ~ < << > = == += ? : # #! é
"##;

fn pieces() -> Vec<&'static str> {
    let blanks = ["\n", " ", "\t"];
    PIECES.split_whitespace().chain(blanks).collect()
}

fn look_at(text: &[u8]) {
    for dialect in [Dialect::Normal, Dialect::Strict] {
        let Err(errors) = parse(text, dialect) else {
            continue;
        };
        assert!(!errors.is_empty());
        for error in errors {
            assert!(error.span.start <= error.span.end, "{error:?}");
            assert!(error.span.end <= text.len() + 1, "{error:?}");
            let shown = error.render("file", text);
            assert!(
                shown.starts_with("file:") && shown.ends_with('\n'),
                "{shown}"
            );
        }
    }
}

/// Any step that takes quadratic time would take minutes for these texts.
#[test]
fn long_texts_take_no_long_time() {
    const LENGTH: usize = LONGEST / 16;
    for before in ["", "BEGIN { $x = "] {
        for piece in pieces() {
            let text = before.to_owned() + &piece.repeat(LENGTH / piece.len());
            let start = Instant::now();
            look_at(text.as_bytes());
            let taken = start.elapsed();
            assert!(taken.as_secs() < 5, "{before}{piece}...: {taken:?}");
        }
    }
}

/// Texts with many names that are compared with one another.
#[test]
fn many_names_take_no_long_time() {
    let many = |count: usize, each: &dyn Fn(usize) -> String| (0..count).map(each).collect();
    let members: String = many(80_000, &|at| format!("int a{at}; "));
    let translated: String = many(80_000, &|at| format!("a{at} = 1; "));
    let locals: String = many(10_000, &|at| format!("$a{at} = $b{at}; "));
    let globals: String = many(10_000, &|at| format!("@a{at} = @b{at}; "));
    for text in [
        format!("struct x {{ {members} }}"),
        format!("translator x < y *z > {{ {translated} }}"),
        format!("BEGIN {{ {locals} }}"),
        format!("BEGIN {{ {globals} }}"),
    ] {
        let start = Instant::now();
        look_at(text.as_bytes());
        let taken = start.elapsed();
        let of: String = text.chars().take(20).collect();
        assert!(taken.as_secs() < 5, "{of}...: {taken:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 2000,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn any_bytes(text in prop::collection::vec(any::<u8>(), 0..200)) {
        look_at(&text);
    }

    #[test]
    fn any_pieces(
        pieces in prop::collection::vec((prop::sample::select(pieces()), any::<bool>()), 0..60),
    ) {
        let mut text = String::new();
        for (piece, parted) in pieces {
            text += piece;
            if parted {
                text.push(' ');
            }
        }
        look_at(text.as_bytes());
    }

    #[test]
    fn pieces_in_a_rule(
        pieces in prop::collection::vec(prop::sample::select(pieces()), 0..40),
    ) {
        look_at(format!("BEGIN {{ {} }}", pieces.join(" ")).as_bytes());
    }
}

/// If a wrong text cannot be skipped, reading it still ends.
#[test]
fn a_text_that_fuzzing_found_to_be_read_for_ever_ends() {
    let text = include_bytes!("../../../fuzz/seeds/script/recovery");
    for dialect in [Dialect::Normal, Dialect::Strict] {
        parse(text, dialect).unwrap_err();
    }
}

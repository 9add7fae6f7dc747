//! Runs the scripts of both dialects in `tests/parse`, and compares each with its tree or its
//! messages.

#![allow(clippy::unwrap_used)]

use super::{HIGHEST, LONGEST, dump, parse};
use crate::ast::{Dialect, ExpressionKind, StatementKind};
use crate::diagnostic::Diagnostic;
use crate::script_tests;

/// Returns a script's tree, or its messages as they are shown.
fn outcome(text: &[u8], file: &str, dialect: Dialect) -> String {
    match parse(text, dialect) {
        Ok(script) => dump::script(&script),
        Err(errors) => errors
            .iter()
            .map(|error| error.render(file, text))
            .collect(),
    }
}

#[test]
fn scripts_have_the_trees_or_messages_of_their_files() {
    for (folder, least, dialect) in [
        ("parse/strict", 20, Dialect::Strict),
        ("parse/normal", 25, Dialect::Normal),
    ] {
        script_tests::compare(folder, least, |path, text| {
            outcome(text, path.file_name().unwrap().to_str().unwrap(), dialect)
        });
    }
}

/// Returns the tree of an expression, or the first message.
fn expression(text: &str, dialect: Dialect) -> String {
    let variables = match dialect {
        Dialect::Normal => "$a = 1; $b = 1; $c = 1; ",
        Dialect::Strict => "",
    };
    let script = format!("kprobe:f:entry {{ {variables}$x = {text} ; }}");
    match parse(script.as_bytes(), dialect) {
        Ok(script) => {
            let statement = script.rules[0].body.statements.last().unwrap();
            match &statement.kind {
                StatementKind::Assign { value, .. } => dump::expression(value),
                other => format!("{other:?}"),
            }
        }
        Err(errors) => errors[0].message.clone(),
    }
}

#[test]
fn operators_rank_as_in_c_or_as_in_btrace() {
    for (text, normal, strict) in [
        ("1 + 2 * 3", "(+ 1 (* 2 3))", "(+ 1 (* 2 3))"),
        ("1 - 2 - 3", "(- (- 1 2) 3)", "(- (- 1 2) 3)"),
        ("3 == 1 + 2", "(== 3 (+ 1 2))", "(+ (== 3 1) 2)"),
        ("1 + 2 == 3", "(== (+ 1 2) 3)", "(== (+ 1 2) 3)"),
        ("1 & 2 == 2", "(& 1 (== 2 2))", "(== (& 1 2) 2)"),
        (
            "1 | 2 ^ 3 & 4",
            "(| 1 (^ 2 (& 3 4)))",
            "(& (^ (| 1 2) 3) 4)",
        ),
        ("1 || 2 && 3", "(|| 1 (&& 2 3))", "(&& (|| 1 2) 3)"),
        ("1 && 2 || 3", "(|| (&& 1 2) 3)", "(|| (&& 1 2) 3)"),
        ("1 < 2 == 3", "(== (< 1 2) 3)", "(== (< 1 2) 3)"),
        ("1 == 2 < 3", "(== 1 (< 2 3))", "(< (== 1 2) 3)"),
        ("8 / 4 % 3", "(% (/ 8 4) 3)", "(% (/ 8 4) 3)"),
        ("( 1 + 2 ) * 3", "(* (+ 1 2) 3)", "(* (+ 1 2) 3)"),
        (
            "1 != 2 && 3 >= 4",
            "(&& (!= 1 2) (>= 3 4))",
            "(&& (!= 1 2) (>= 3 4))",
        ),
        ("1 << 2", "(<< 1 2)", "syntax error"),
        ("-1", "-1", "syntax error"),
        ("!pid", "(! pid)", "syntax error"),
        ("pid ? 1 : 2", "(? pid 1 2)", "syntax error"),
        ("1+2", "(+ 1 2)", "syntax error"),
        ("str($1)", "(str $1)", "(str $1)"),
        ("str(arg0)", "(str arg0)", "syntax error"),
        (
            "( 1, \"b\", pid)",
            "(tuple 1 \"b\" pid)",
            "(tuple 1 \"b\" pid)",
        ),
        ("$#", "$#", "$#"),
    ] {
        assert_eq!(expression(text, Dialect::Normal), normal, "{text}");
        assert_eq!(expression(text, Dialect::Strict), strict, "{text}");
    }
}

#[test]
fn the_strict_dialect_has_no_extensions() {
    for (text, column) in [
        ("BEGIN { $x = -1; }", 14),
        ("BEGIN { $x++; }", 11),
        ("BEGIN { while (1) { } }", 13),
        ("BEGIN { for ($kv : @m) { } }", 11),
        ("BEGIN { @x = count(); }", 18),
        ("BEGIN { @x += 1; }", 12),
        ("BEGIN { @x = 1 << 2; }", 17),
        ("BEGIN { printf(\"%s\", str(arg1)); }", 29),
        ("BEGIN { $x = args; }", 17),
        ("BEGIN { @x[1] = avg(2); }", 19),
        ("BEGIN { @x[1] = hist(2); }", 20),
        ("BEGIN { $x = elapsed; }", 20),
        ("BEGIN { $x = $y->z; }", 17),
        ("BEGIN { $x = $y[0] ; }", 16),
        ("BEGIN { return; }", 14),
        ("kprobe:f { }", 10),
        ("kprobe:vfs_*:entry { }", 12),
        ("begin { }", 7),
        ("struct x { int y; };", 8),
    ] {
        let errors = parse(text.as_bytes(), Dialect::Strict).unwrap_err();
        let syntax = errors.iter().find(|e| e.message == "syntax error");
        let shown = syntax.map(|error| error.render("f", text.as_bytes()));
        let shown = shown.unwrap_or_default();
        let place = format!("f:1:{column}: ");
        assert!(shown.starts_with(&place), "{text}: {errors:?}");
    }
}

#[test]
fn the_normal_dialect_has_the_rest_of_c() {
    for (text, tree) in [
        ("1 + 2 << 3 + 4", "(<< (+ 1 2) (+ 3 4))"),
        ("1 << 2 < 3", "(< (<< 1 2) 3)"),
        ("-$a * !$b", "(* (- $a) (! $b))"),
        ("~$a & *$b", "(& (~ $a) (* $b))"),
        ("-$a->x.y", "(- (. (-> $a x) y))"),
        ("*$a++", "(* ($a ++))"),
        ("- -1", "(- -1)"),
        ("--$a - $b--", "(- (-- $a) ($b --))"),
        ("$a ? $b : $c ? 1 : 2", "(? $a $b (? $c 1 2))"),
        ("$a ? $b ? 1 : 2 : 3", "(? $a (? $b 1 2) 3)"),
        ("$a || $b ? 1 : 2", "(? (|| $a $b) 1 2)"),
        ("(struct file *)arg0", "(cast \"struct file*\" arg0)"),
        (
            "((struct file *)arg0)->f_mode",
            "(-> (cast \"struct file*\" arg0) f_mode)",
        ),
        (
            "(struct file *)arg0->x",
            "(cast \"struct file*\" (-> arg0 x))",
        ),
        ("(const char *)*$a", "(cast \"char*\" (* $a))"),
        ("(uint64)arg0 + 1", "(+ (cast \"uint64\" arg0) 1)"),
        ("(unsigned long long)-1", "(cast \"unsigned long long\" -1)"),
        ("(pid_t)arg0", "(cast \"pid_t\" arg0)"),
        ("(pid_t *)(arg0 + 8)", "(cast \"pid_t*\" (+ arg0 8))"),
        ("(pid) * 2", "(* pid 2)"),
        ("(pid) - 2", "(- pid 2)"),
        ("(int32)-(pid)", "(cast \"int32\" (- pid))"),
        ("args.fd", "(. args fd)"),
        ("args->fd", "(-> args fd)"),
        ("args[0]->x[2]", "([] (-> ([] args 0) x) 2)"),
        ("$a.0.1", "(. (. $a 0) 1)"),
        ("sizeof(struct file)", "(sizeof \"struct file\")"),
        ("sizeof(pid_t)", "(sizeof \"pid_t\")"),
        ("sizeof($a + 1)", "(sizeof (+ $a 1))"),
        ("sizeof(*args)", "(sizeof (* args))"),
        ("offsetof(struct a, b.c)", "(offsetof \"struct a\" b.c)"),
        ("offsetof(*args, b)", "(offsetof \"typeof (* args)\" b)"),
        ("(typeof($a + 1) *)pid", "(cast \"typeof (+ $a 1)*\" pid)"),
        ("(typeof(int *) *)pid", "(cast \"int**\" pid)"),
        ("sizeof(typeof(*args))", "(sizeof (* args))"),
        (
            "xlate <psinfo_t *>(curtask)->pr_pid",
            "(-> (xlate \"psinfo_t*\" curtask) pr_pid)",
        ),
        ("\"a\\x41\" \"\\n\"", "\"aA\\n\""),
        ("0xffffffffffffffff", "18446744073709551615u"),
        ("-9223372036854775808", "-9223372036854775808"),
        (
            "-9223372036854775809",
            "the number -9223372036854775809 is below -9223372036854775808",
        ),
        ("1_000 + 1e3 + 5us", "(+ (+ 1000 1000) 5000)"),
        ("arg0 == NULL", "(== arg0 0)"),
        ("kstack(3)", "(kstack 3)"),
        ("kstack", "kstack"),
        ("ntohs(1)", "(ntohs 1)"),
        ("htons(1)", "(ntohs 1)"),
    ] {
        assert_eq!(expression(text, Dialect::Normal), tree, "{text}");
    }
}

#[test]
fn spans_cover_what_a_message_underlines() {
    let text = b"kprobe:f / pid == 1 + 2 / { $x = (1 + args.fd) * 2; }";
    let script = parse(text, Dialect::Normal).unwrap();
    let rule = &script.rules[0];
    let of =
        |span: crate::ast::Span| String::from_utf8_lossy(&text[span.start..span.end]).into_owned();
    assert_eq!(of(rule.probes[0].span), "kprobe:f");
    assert_eq!(of(rule.filter.as_ref().unwrap().span), "pid == 1 + 2");
    let statement = &rule.body.statements[0];
    assert_eq!(of(statement.span), "$x = (1 + args.fd) * 2");
    let StatementKind::Assign { value, .. } = &statement.kind else {
        panic!("{statement:?}");
    };
    assert_eq!(of(value.span), "(1 + args.fd) * 2");
    let ExpressionKind::Binary(_, left, _) = &value.kind else {
        panic!("{value:?}");
    };
    assert_eq!(of(left.span), "(1 + args.fd)");
}

/// Returns scripts that would make trees as high as `levels`.
fn towers(levels: usize) -> Vec<String> {
    let many = |text: &str| text.repeat(levels);
    [
        format!("$x = {}1{};", many("("), many(")")),
        format!("$x = 1{};", many(" + 1")),
        format!("$x = {}1;", many("- ")),
        format!("$x = {}1;", many("(int)")),
        format!("$x = 1; $x = $x{};", many("->a")),
        format!("$x = 1; $x = $x{};", many("[0]")),
        format!("$x = 1; $x = {}1{};", many("$x ? 1 : "), ""),
        format!("@x = {}1{};", many("@x["), many("]")),
        format!("{}{}", many("{"), many("}")),
        format!("{} ; ", many("if (1) ")),
        format!("{} ;", many("if (1) ; else ")),
        format!("{}{}", many("while (1) {"), many("}")),
        format!("$x = {}0{};", many("str("), many(")")),
        format!("$x = {}0{};", many("sizeof("), many(")")),
        format!("$x = {}0{};", many("(typeof("), many(")0)")),
        format!("$x = {}0{};", many("sizeof(typeof("), many("))")),
    ]
    .map(|body| format!("kprobe:f:entry {{ {body} }}"))
    .into()
}

#[test]
fn no_text_makes_the_parser_or_its_tree_too_deep() {
    for dialect in [Dialect::Normal, Dialect::Strict] {
        for text in towers(20_000) {
            let errors = parse(text.as_bytes(), dialect).unwrap_err();
            let start: String = text.chars().take(60).collect();
            if dialect == Dialect::Normal {
                let told = |error: &Diagnostic| error.message.contains("levels deep");
                assert!(errors.iter().any(told), "{start}: {:?}", errors[0]);
            }
        }
    }
    // Scripts that people write are far lower.
    for text in towers(HIGHEST / 4) {
        if let Err(errors) = parse(text.as_bytes(), Dialect::Normal) {
            let told = errors.iter().any(|error| error.message.contains("levels"));
            assert!(!told, "{text}: {errors:?}");
        }
    }
}

#[test]
fn a_text_that_is_too_long_is_told() {
    for dialect in [Dialect::Normal, Dialect::Strict] {
        let errors = parse(&vec![b' '; LONGEST + 1], dialect).unwrap_err();
        assert!(errors[0].message.contains("1048577 bytes"), "{errors:?}");
        assert_eq!(parse(&vec![b' '; LONGEST], dialect).unwrap().rules, []);
    }
}

#[test]
fn the_number_of_messages_is_bounded() {
    for text in [
        "BEGIN { ".to_owned() + &"foo(); ".repeat(1000) + "}",
        "}".repeat(1000),
        "#x\n".repeat(1000),
        "kprobe:f; {}\n".repeat(1000),
        "BEGIN { $x = $y; foo }\n".repeat(1000),
        "BEGIN { ".to_owned() + &"$x = arg0; ".repeat(1000) + "}",
        "BEGIN { @x = lhist(1, 0, 1, 1".to_owned() + &", 1".repeat(1000) + "); $y = $z; }",
        (0..1000).fold("BEGIN { ".to_owned(), |text, at| {
            text + &format!("@a[@b{at}] = $c{at} / arg0; ")
        }) + "}",
    ] {
        for dialect in [Dialect::Normal, Dialect::Strict] {
            let count = parse(text.as_bytes(), dialect).unwrap_err().len();
            assert!((1..=super::MOST_ERRORS).contains(&count), "{count}");
        }
    }
}

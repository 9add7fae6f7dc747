//! Renders formats and compares the bytes. Results of the numeric conversions are those of C's
//! printf.
#![allow(clippy::unwrap_used)]

use super::*;
use crate::render::tests::Fixed;

fn text(text: &str) -> Value {
    Value::text(text.as_bytes())
}

fn rendered(dialect: Dialect, format: &str, arguments: &[Value]) -> String {
    let format = Format::parse(format.as_bytes(), dialect).unwrap();
    String::from_utf8(format.render(arguments, &Fixed)).unwrap()
}

fn check(dialect: Dialect, cases: &[(&str, &[Value], &str)]) {
    for &(format, arguments, expected) in cases {
        assert_eq!(
            rendered(dialect, format, arguments),
            expected,
            "{format} of {arguments:?}"
        );
    }
}

#[test]
fn normal_formats_convert_numbers() {
    let int = Value::Int;
    check(
        Dialect::Normal,
        &[
            ("plain %% text\n", &[], "plain % text\n"),
            ("%d %i", &[int(-5), int(7)], "-5 7"),
            (
                "[%5d] [%-5d] [%05d] [%+d] [% d]",
                &[int(42), int(42), int(-42), int(42), int(42)],
                "[   42] [42   ] [-0042] [+42] [ 42]",
            ),
            (
                "[%.3d] [%6.3d] [%06.3d] [%.0d]",
                &[int(7), int(-7), int(7), int(0)],
                "[007] [  -007] [   007] []",
            ),
            ("%u", &[int(-1)], "18446744073709551615"),
            ("%d", &[Value::Unsigned(u64::MAX)], "-1"),
            ("%d", &[int(i64::MIN)], "-9223372036854775808"),
            (
                "%x %X %#x %#X %#x",
                &[int(255), int(255), int(255), int(255), int(0)],
                "ff FF 0xff 0XFF 0",
            ),
            (
                "[%#8x] [%#08x] [%-#8x]",
                &[int(255), int(255), int(255)],
                "[    0xff] [0x0000ff] [0xff    ]",
            ),
            ("%o %#o %#o", &[int(8), int(8), int(0)], "10 010 0"),
            (
                "%llx %lu %hhd %zu",
                &[int(-1), int(3), int(300), int(4)],
                "ffffffffffffffff 3 44 4",
            ),
            (
                "%p %p",
                &[Value::Unsigned(0xffff_8880_0000_1000), int(0)],
                "0xffff888000001000 0x0",
            ),
            ("[%c] [%3c]", &[int(65), int(0x142)], "[A] [  B]"),
            (
                "[%*d] [%*d]",
                &[int(4), int(1), int(-4), int(1)],
                "[   1] [1   ]",
            ),
            // Missing and surplus values, and values that are no numbers.
            ("%d|%s|", &[], "0||"),
            ("%d", &[int(1), int(2)], "1"),
            ("%d", &[text("12")], "0"),
            ("%d", &[Value::Tuple([int(1)].into())], "0"),
        ],
    );
}

#[test]
fn normal_formats_show_all_values() {
    let bytes = Value::Bytes([0, b'a', b'\\', 0x7f, b' ', 0xff].as_slice().into());
    check(
        Dialect::Normal,
        &[
            (
                "[%s] [%5s] [%-5s] [%.2s] [%05s]",
                &[
                    text("abc"),
                    text("abc"),
                    text("abc"),
                    text("abc"),
                    text("abc"),
                ],
                "[abc] [  abc] [abc  ] [ab] [  abc]",
            ),
            (
                "%s %s",
                &[Value::Int(-3), Value::Unsigned(u64::MAX)],
                "-3 18446744073709551615",
            ),
            ("%r", std::slice::from_ref(&bytes), "\\x00a\\\\x7f \\xff"),
            (
                "%rx",
                std::slice::from_ref(&bytes),
                "\\x00\\x61\\x5c\\x7f\\x20\\xff",
            ),
            ("%rh|", std::slice::from_ref(&bytes), "00 61 5c 7f 20 ff|"),
            ("[%12r]", &[text("ab\n")], "[      ab\\x0a]"),
            ("%s", std::slice::from_ref(&bytes), "\\x00a\\\\x7f \\xff"),
            (
                "%s",
                &[Value::Tuple([Value::Int(1), text("x")].into())],
                "(1, x)",
            ),
            (
                "%s %d",
                &[Value::KernelSymbol(0x1010), Value::KernelSymbol(0x1010)],
                "k1000 4112",
            ),
            (
                "%s|",
                &[Value::KernelStack([0x1010, 0x2000, 0x9000].into())],
                "\n    k1000+16\n    k2000+0\n    0x9000\n|",
            ),
        ],
    );
    // Bytes that are no UTF-8 pass unchanged.
    let format = Format::parse(b"\xff%s", Dialect::Normal).unwrap();
    assert_eq!(format.render(&[Value::text(&[0x80])], &Fixed), [0xff, 0x80]);
}

#[test]
fn strict_formats_convert_text() {
    let int = Value::Int;
    check(
        Dialect::Strict,
        &[
            (
                "%d %i %u %o %x %X",
                &[int(-1), int(2), int(-1), int(8), int(255), int(255)],
                "-1 2 18446744073709551615 10 ff FF",
            ),
            (
                "%d|%d|%d|%d|%d",
                &[
                    text("12abc"),
                    text("abc"),
                    text(" 0x1f"),
                    text("010"),
                    text("'A"),
                ],
                "12|0|31|8|65",
            ),
            (
                "%d %d",
                &[text("99999999999999999999"), text("-99999999999999999999")],
                "9223372036854775807 -9223372036854775808",
            ),
            (
                "%u %u",
                &[text("99999999999999999999"), text("0xfg")],
                "18446744073709551615 15",
            ),
            // A byte is the first of the text, also of a number's.
            ("[%c] [%3c]", &[text("xyz"), int(65)], "[x] [  A]"),
            (
                "[%5s] [%-5s] [%.2s]",
                &[text("abc"), int(42), text("xyz")],
                "[  abc] [42   ] [xy]",
            ),
            (
                "[%*d] [%*.*d]",
                &[int(5), int(42), int(-6), int(3), int(7)],
                "[   42] [007   ]",
            ),
            // A value that is no number is no width.
            ("[%*d]", &[text("x")], "[0]"),
            (
                "%#o %#x %+d % d",
                &[int(8), int(255), int(1), int(1)],
                "010 0xff +1  1",
            ),
            ("%s", &[Value::Tuple([int(1), text("x")].into())], "(1, x)"),
        ],
    );
    assert_eq!(rendered(Dialect::Strict, "%c", &[]), "\0");
}

#[test]
fn strict_formats_are_used_again_while_values_are_left() {
    let int = Value::Int;
    check(
        Dialect::Strict,
        &[
            ("%d\n", &[int(1), int(2), int(3)], "1\n2\n3\n"),
            ("%d=%s;", &[int(1), text("a"), int(2)], "1=a;2=;"),
            ("%s %d", &[], " 0"),
            ("no conversion\n", &[int(1)], "no conversion\n"),
            ("", &[int(1)], ""),
        ],
    );
}

#[test]
fn strict_formats_expand_escapes() {
    check(
        Dialect::Strict,
        &[
            (r"a\tb\n\\ \101 \x41 \q", &[], "a\tb\n\\ A A q"),
            ("end\\", &[], "end"),
            ("[%b]", &[text(r"x\ty\0101z\101")], "[x\tyAzA]"),
            // `\c` stops everything.
            (
                "%b and more %d\n",
                &[text(r"stop\chere"), Value::Int(1)],
                "stop",
            ),
            // Elsewhere it is no escape.
            ("[%s]", &[text(r"x\ty")], r"[x\ty]"),
        ],
    );
    check(Dialect::Normal, &[(r"a\tb", &[], r"a\tb")]);
}

#[test]
fn strict_formats_show_floating_point() {
    let cases: &[(&str, &str, &str)] = &[
        ("%f", "3.14159", "3.141590"),
        ("%.2f", "2.675", "2.67"),
        ("%.0f", "2.5", "2"),
        ("%#.0f", "3", "3."),
        ("%8.2f|", "-1.5", "   -1.50|"),
        ("%08.2f", "-1.5", "-0001.50"),
        ("%e", "12345.678", "1.234568e+04"),
        ("%.0E", "0.00015", "1E-04"),
        ("%e", "0", "0.000000e+00"),
        ("%e", "1e-300", "1.000000e-300"),
        ("%g", "100000", "100000"),
        ("%g", "1000000", "1e+06"),
        ("%g", "0.0001", "0.0001"),
        ("%g", "0.00001234", "1.234e-05"),
        ("%g", "0", "0"),
        ("%G", "1e-10", "1E-10"),
        ("%#g", "1", "1.00000"),
        ("%.3g", "999.6", "1e+03"),
        ("%+g % g", "7", "+7  0"),
        ("%a", "1", "0x1p+0"),
        ("%a", "0.5", "0x1p-1"),
        ("%A", "10", "0X1.4P+3"),
        ("%.1a", "1.96875", "0x2.0p+0"),
        ("%.2a", "1", "0x1.00p+0"),
        ("%a", "0", "0x0p+0"),
        ("%f %f", "inf", "inf 0.000000"),
        ("%5F", "-infinity", " -INF"),
        ("%05f", "nan", "  nan"),
        ("%f", "0x10", "16.000000"),
        ("%f", "0x1.8p1", "3.000000"),
        ("%f", "1.5e", "1.500000"),
        ("%f", ".5x", "0.500000"),
        ("%f", "zero", "0.000000"),
    ];
    for &(format, argument, expected) in cases {
        assert_eq!(
            rendered(Dialect::Strict, format, &[text(argument)]),
            expected,
            "{format} of {argument}"
        );
    }
}

#[test]
fn what_is_no_format_is_refused() {
    use Dialect::{Normal, Strict};
    for (dialect, format, message) in [
        (Normal, "ab%", "incomplete conversion %:"),
        (Normal, "%d %-5", "incomplete conversion %-5:"),
        (Normal, "%y", "unknown conversion %y: expected %c %d"),
        (Normal, "%f", "unknown conversion %f:"),
        (Normal, "%b", "unknown conversion %b:"),
        (Strict, "%ld", "unknown conversion %l:"),
        (Strict, "%p", "unknown conversion %p:"),
        (Strict, "%5b", "unknown conversion %5b:"),
        (Strict, "%5%", "unknown conversion %5%:"),
        (Strict, "%4097d", "%4097 asks for more than 4096"),
        (Normal, "x%.99999d", "%.99999 asks for more than 4096"),
        (Normal, "%99999999999999999999d", "asks for more than 4096"),
    ] {
        let error = Format::parse(format.as_bytes(), dialect).unwrap_err();
        assert!(error.to_string().contains(message), "{format}: {error}");
    }
}

#[test]
fn columns_that_values_ask_for_are_bounded() {
    use Dialect::{Normal, Strict};
    for (dialect, format, columns) in [
        (Normal, "%*d", i64::MAX),
        (Normal, "%.*d", i64::MAX),
        (Strict, "%*d", i64::MAX),
        (Strict, "%.*d", i64::MAX),
        (Normal, "%*d", i64::MIN),
    ] {
        let line = rendered(dialect, format, &[Value::Int(columns), Value::Int(1)]);
        assert_eq!(line.len(), MOST_COLUMNS, "{dialect:?} {format} {columns}");
    }
    let line = rendered(Strict, "%.4096a", &[text("1")]);
    assert_eq!(line.len(), 4096 + "0x1.p+0".len());
}

#[test]
fn a_format_tells_what_it_takes() {
    use Takes::{Buffer, Number, Text};
    let format = Format::parse(b"%d %-*s %% %r %c", Dialect::Normal).unwrap();
    assert_eq!(format.takes(), [Number, Number, Text, Buffer, Number]);
}

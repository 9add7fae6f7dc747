#![allow(clippy::unwrap_used)]
use proptest::prelude::*;

use super::super::register::distinct_registers;
use super::*;

const BIAS: u64 = 0x5555_0000_0000;

fn symbol(name: &str) -> Option<u64> {
    match name {
        "counter" => Some(0x4010),
        "_ZN3one3twoE.lto_priv.0" => Some(0x4020),
        _ => None,
    }
}

/// Returns the value and the address read, in memory whose every byte is the lowest of its address.
fn value(text: &str) -> (Option<u64>, Option<u64>) {
    let asked = std::cell::Cell::new(None);
    let read = |address: u64, buf: &mut [u8]| {
        asked.set(Some(address));
        for (at, byte) in (address..).zip(buf.iter_mut()) {
            *byte = at as u8;
        }
        true
    };
    let argument = SiteArgument::parse(text, &symbol);
    (
        argument.value(&distinct_registers(), BIAS, &read),
        asked.get(),
    )
}

#[test]
fn values_are_cut_and_extended_by_their_size() {
    for (text, expected) in [
        ("8@%rdi", 0x8182_8384_8586_8705),
        ("-8@%rdi", 0x8182_8384_8586_8705),
        ("4@%edi", 0x8586_8705),
        ("-4@%edi", 0xffff_ffff_8586_8705),
        // The size counts, whatever the width of the register.
        ("-4@%rdi", 0xffff_ffff_8586_8705),
        ("4@%di", 0x8586_8705),
        ("2@%di", 0x8705),
        ("-2@%di", 0xffff_ffff_ffff_8705),
        ("1@%dil", 5),
        ("1@%ah", 0x87),
        ("-1@%ah", 0xffff_ffff_ffff_ff87),
        ("4@%ah", 0x87),
        ("-1@%r12b", 12),
        ("4@%r12d", 0x8586_870c),
        ("4f@%eax", 0x8586_8700),
        ("-8f@%rax", 0x8182_8384_8586_8700),
        ("-4@$-1", u64::MAX),
        ("4@$-1", 0xffff_ffff),
        ("-4@$5", 5),
        ("-1@$255", u64::MAX),
        ("2@$0x12345", 0x2345),
        ("8@$-9223372036854775808", 1 << 63),
        ("8@$18446744073709551615", u64::MAX),
        ("8@$010", 8),
        ("8@$counter", BIAS + 0x4010),
        ("8@$counter+16", BIAS + 0x4020),
        // From notes without sizes.
        ("%eax", 0x8586_8700),
        ("%al", 0),
        ("$-2", u64::MAX - 1),
    ] {
        assert_eq!(value(text), (Some(expected), None), "{text}");
    }
}

#[test]
fn addresses_are_made_of_all_their_parts() {
    let r = distinct_registers();
    for (text, expected) in [
        ("8@(%rbx)", r.rbx),
        ("8@16(%rsp)", r.rsp.wrapping_add(16)),
        ("8@-80(%rbx)", r.rbx.wrapping_sub(80)),
        ("8@0x10(%rsp)", r.rsp.wrapping_add(16)),
        ("8@-4+8-20(%rsp)", r.rsp.wrapping_sub(16)),
        ("8@(%rax,%rcx)", r.rax.wrapping_add(r.rcx)),
        (
            "8@8(%rax,%rcx,4)",
            r.rax.wrapping_add(r.rcx.wrapping_mul(4)).wrapping_add(8),
        ),
        ("8@-8(,%r9,8)", r.r9.wrapping_mul(8).wrapping_sub(8)),
        ("8@(,%r9)", r.r9),
        ("8@(%rax,)", r.rax),
        (
            "8@(%eax,%ecx,2)",
            r.rax.wrapping_add(r.rcx.wrapping_mul(2)) & 0xffff_ffff,
        ),
        ("8@8(%rip)", r.rip.wrapping_add(8)),
        ("8@counter(%rip)", BIAS + 0x4010),
        ("8@counter+4(%rip)", BIAS + 0x4014),
        ("8@counter-4(%rip)", BIAS + 0x400c),
        ("8@counter+-4(%rip)", BIAS + 0x400c),
        ("8@4+counter(%rip)", BIAS + 0x4014),
        ("8@-4+counter(%rip)", BIAS + 0x400c),
        ("8@_ZN3one3twoE.lto_priv.0(%rip)", BIAS + 0x4020),
        ("8@counter", BIAS + 0x4010),
        (
            "8@counter+8(,%rcx,4)",
            (BIAS + 0x4018).wrapping_add(r.rcx.wrapping_mul(4)),
        ),
        ("8@4096", 4096),
        ("(%rbx)", r.rbx),
    ] {
        let expected = expected.into();
        assert_eq!(value(text).1, expected, "{text}");
    }
    assert_eq!(
        value("-4@0x7e(%rip)").0,
        Some(0xffff_ffff_9190_8f8e),
        "four bytes"
    );
    assert_eq!(value("1@counter(%rip)").0, Some(0x10));
    let gone = SiteArgument::parse("8@(%rbx)", &symbol);
    assert_eq!(gone.value(&r, 0, &|_, _| false), None, "not readable");
}

#[test]
fn what_is_not_understood_says_why() {
    let syntax = |text: &str| ArgumentError::Syntax(text.to_owned());
    for (text, expected) in [
        ("16@%rax", ArgumentError::Size("16".into())),
        ("-3@%rax", ArgumentError::Size("-3".into())),
        ("8f@%xmm0", ArgumentError::Register("xmm0".into())),
        ("8@%st(1)", ArgumentError::Register("st(1)".into())),
        ("8@%fs:0x28", ArgumentError::Register("fs:0x28".into())),
        ("8@(%xmm0)", ArgumentError::Register("xmm0".into())),
        ("8@other(%rip)", ArgumentError::Symbol("other".into())),
        (".LC0(%rip)", ArgumentError::Symbol(".LC0".into())),
        ("8@", syntax("")),
        ("8@$", syntax("")),
        ("8@()", syntax("()")),
        ("8@8(%rax", syntax("8(%rax")),
        ("8@(%rax,%rbx,3)", syntax("(%rax,%rbx,3)")),
        ("8@(%rax,%rbx,2,1)", syntax("(%rax,%rbx,2,1)")),
        ("8@(rax)", syntax("rax")),
        ("8@(%al)", syntax("(%al)")),
        ("8@counter+counter(%rip)", syntax("counter+counter")),
        ("8@-counter(%rip)", syntax("-counter")),
        ("8@counter@GOTPCREL(%rip)", syntax("counter@GOTPCREL")),
        ("8@$18446744073709551616", syntax("18446744073709551616")),
        ("8@4+(%rip)", syntax("4+")),
    ] {
        let argument = SiteArgument::parse(text, &symbol);
        assert_eq!(argument.error(), Some(&expected), "{text}");
        assert_eq!(argument.text(), text);
        assert_eq!(value(text), (None, None), "{text}");
    }
    let long = SiteArgument::parse(&"x".repeat(5000), &symbol);
    assert_eq!(long.error(), Some(&ArgumentError::Long { found: 5000 }));
}

#[test]
fn arguments_are_told_from_each_other_and_named_by_their_size() {
    let text = " -4@%edi 8@-16(%rbp)  16@%rax 1@$3 8f@(%rsp) 4f@%eax";
    let arguments = SiteArgument::parse_all(text, &symbol);
    let types: Vec<_> = arguments
        .iter()
        .map(|argument| argument.kind().map(ValueKind::type_name))
        .collect();
    let expected = ["int32_t", "uint64_t", "", "uint8_t", "double", "float"];
    assert_eq!(
        types,
        expected.map(|name| Some(name).filter(|n| !n.is_empty()))
    );
    let many = "8@%rax ".repeat(20);
    assert_eq!(SiteArgument::parse_all(&many, &symbol).len(), MAX_ARGUMENTS);
    let named: Vec<&str> = symbols_in("8@%rax 4@one+4(%rip) 8@two.0(,%rcx,8) 8@$three").collect();
    for name in ["one", "two.0", "three"] {
        assert!(named.contains(&name), "{named:?}");
    }
}

proptest! {
    #[test]
    fn any_text_is_read_without_harm(
        text in "[-+$%@(),.0-9a-fx_ risplbq]{0,60}",
        bias: u64,
    ) {
        for argument in SiteArgument::parse_all(&text, &|name| Some(name.len() as u64)) {
            let _ = argument.value(&distinct_registers(), bias, &|_, _| true);
            // An argument that is understood has a size.
            prop_assert!(argument.error().is_some() || argument.kind().is_some());
        }
    }

    #[test]
    fn any_bytes_are_read_without_harm(text in ".{0,60}") {
        let _ = SiteArgument::parse_all(&text, &symbol);
    }
}

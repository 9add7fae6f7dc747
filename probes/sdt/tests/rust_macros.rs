//! The macros for Rust: the notes of programs compiled in many ways, read with other projects'
//! tools.

#![allow(clippy::unwrap_used)]

mod support;

use support::{Program, program};

/// The definitions of `programs/forms.rs`: provider, module, function, name, then for each argument
/// type and translated type.
const DEFINITIONS: &str = "\
forms||unreach|pkt-receive|struct icmp *|
forms|||five|a||b||c||d||e|
forms|||four--new|a||b||c||d|
forms|||seven|a||b||c||d||e||f||g|
forms|||six|a||b||c||d||e||f|
forms|||xfive|a|A|b|B|c|C|d|D|e|E
forms|||xfour|a|A|b|B|c|C|d|D
forms|||xone|struct icmp *|struct icmp_hdr_dt *
forms|||xseven|a|A|b|B|c|C|d|D|e|E|f|F|g|G
forms|||xsix|a|A|b|B|c|C|d|D|e|E|f|F
forms|||xthree|a|A|b|B|c|C
forms|||xtwo|a|A|b|
forms|||xzero
forms|||zero
forms|module|function|three-_new|a||b||c|
forms|module||_two-|int||long|";

/// The names and sizes of the sites of `programs/forms.rs`. A site compiled for two types counts
/// twice.
const SIZES: &[&str] = &[
    "costs 8 -4 8",
    "five 1 4 -8 8 8",
    "four____new -2 2 -1 1",
    "generic -2",
    "generic 8",
    "pkt__receive 8",
    "seven 8 -4 8 -8 4 8 1",
    "six -4 -4 -4 -4 -4 -4",
    "three___new 4 8 8",
    "_two__ -4 -8",
    "zero ",
];

/// With and without optimisation, for each way of linking.
const WAYS: &[&[&str]] = &[
    &["-Copt-level=0", "-Cdebug-assertions=on"],
    &["-Copt-level=1"],
    &["-Copt-level=3"],
    &["-Copt-level=s", "-Ccodegen-units=1"],
    &["-Copt-level=3", "-Clto=fat"],
    &["-Copt-level=3", "-Ctarget-feature=+crt-static"],
    &["-Copt-level=3", "-Crelocation-model=static"],
    &["-Copt-level=3", "-Clink-arg=-fuse-ld=bfd"],
];

#[test]
fn each_form_leaves_its_notes_however_it_is_compiled() {
    for options in WAYS {
        let built = Program::rust(&program("forms.rs"), &[], options);
        built.check_sites();
        assert_eq!(
            built.definitions(),
            support::sorted(DEFINITIONS.lines()),
            "{options:?}"
        );
        assert_eq!(built.sizes(), support::sorted(SIZES.iter()), "{options:?}");
        support::output(&built.path, &[]);
    }
}

#[test]
fn a_site_is_one_nop() {
    for options in [
        ["-Copt-level=3"].as_slice(),
        &["-Copt-level=3", "-Clto=fat"],
    ] {
        let with = Program::rust(&program("forms.rs"), &[], options);
        // Arguments of 4 and 8 bytes, in the registers of the calling convention.
        for function in ["zero", "one", "two", "three", "six"] {
            assert_eq!(
                with.instructions(function),
                ["nop", "ret"],
                "{options:?}: {function}"
            );
        }
        // Rust guarantees no order of arguments, but the set of instructions does not depend on it.
        let without = Program::rust(
            &program("forms.rs"),
            &[],
            &[options, ["--cfg", "without"].as_slice()].concat(),
        );
        let expected = [vec!["nop".to_owned()], without.instructions("costs")].concat();
        assert_eq!(with.instructions("costs"), expected, "{options:?}");
    }
}

#[test]
fn sites_name_module_and_function() {
    let built = Program::rust(&program("forms.rs"), &[], &["-O"]);
    built.check_names(&[
        ["forms", "", "unreach", "pkt-receive"],
        ["forms", "module", "", "_two-"],
        ["forms", "module", "function", "three-_new"],
        ["forms", "", "", "four--new"],
    ]);
}

#[test]
fn gdb_reads_the_values_of_the_example() {
    for options in &WAYS[..3] {
        let built = Program::rust("examples/icmp.rs", &[], options);
        built.check_example("pkt__receive");
    }
}

#[test]
fn long_names_do_not_compile() {
    let name = "a".repeat(64);
    for (item, fits) in [
        (
            format!("exotrace_sdt::sdt_probe_define0!(p, , , {});", &name[1..]),
            true,
        ),
        (
            format!("exotrace_sdt::sdt_probe_define0!(p, , , {name});"),
            false,
        ),
        (
            format!("exotrace_sdt::sdt_probe_define0!(p, {name}, , a);"),
            false,
        ),
        (format!("exotrace_sdt::sdt_provider!({name});"), false),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let source = folder.path().join("long.rs");
        std::fs::write(&source, format!("{item}\nfn main() {{}}\n")).unwrap();
        // An absolute path stays as it is when it is joined to the package's folder.
        let built = std::panic::catch_unwind(|| Program::rust(source.to_str().unwrap(), &[], &[]));
        assert_eq!(built.is_ok(), fits, "{item}");
    }
}

#[test]
fn a_library_brings_its_definitions() {
    for options in WAYS {
        let built = Program::rust(&program("uses_library.rs"), &["library"], options);
        built.check_sites();
        assert_eq!(
            built.definitions(),
            ["library|||generic|T|", "library|||inlined|int|"],
            "{options:?}"
        );
        assert_eq!(
            built.sizes(),
            ["generic 1", "generic 8", "inlined -4"],
            "{options:?}"
        );
    }
}

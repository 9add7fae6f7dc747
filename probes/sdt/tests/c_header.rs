//! The C header: the notes of programs compiled in many ways, read with other projects' tools.

#![allow(clippy::unwrap_used)]

mod support;

use support::{Program, outcome, package, program};

/// The definitions of `programs/forms.c`: provider, module, function, name, then for each argument
/// type and translated type.
const DEFINITIONS: &str = "\
forms||unreach|pkt-receive|struct icmp *|
forms|||_two_new|int||long|
forms|||five-old|a||b||c||d||e|
forms|||five|a||b||c||d||e|
forms|||four--new|a||b||c||d|
forms|||four-old|a||b||c||d|
forms|||none-new
forms|||none-old
forms|||one-|int|
forms|||seven-old|a||b||c||d||e||f||g|
forms|||seven|struct icmp *||int||unsigned char||signed char||short||unsigned long||int|
forms|||six-old|a||b||c||d||e||f|
forms|||six|a||b||c||d||e||f|
forms|||three-_new|a||b||c|
forms|||xfive-old|a|A|b|B|c|C|d|D|e|E
forms|||xfive|a|A|b|B|c|C|d|D|e|E
forms|||xfour-old|a|A|b|B|c|C|d|D
forms|||xfour|a|A|b|B|c|C|d|D
forms|||xone-old|a|A
forms|||xone|struct icmp *|struct icmp_hdr_dt *
forms|||xseven-old|a|A|b|B|c|C|d|D|e|E|f|F|g|G
forms|||xseven|a|A|b|B|c|C|d|D|e|E|f|F|g|G
forms|||xsix-old|a|A|b|B|c|C|d|D|e|E|f|F
forms|||xsix|a|A|b|B|c|C|d|D|e|E|f|F
forms|||xthree-old|a|A|b|B|c|C
forms|||xthree|a|A|b|B|c|C
forms|||xtwo-old|a|A|b|B
forms|||xtwo|a|A|b|
forms|||xzero
forms|||xzero-old
forms|||zero-old
forms|module|function|three-old|a||b||c|
forms|module||two-old|int||long|
linux|unix|linux|zero-new";

/// The arguments of the sites of `programs/forms.c`, by the calling convention's registers.
const ARGUMENTS: &[(&str, &str)] = &[
    ("zero__new", ""),
    ("pkt_receive", "8@%rdi"),
    ("two_old", "-4@%edi -8@%rsi"),
    ("three_old", "4@%edi 8@%rsi 8@%rdx"),
    ("four____new", "-2@%di 2@%si -1@%dl 1@%cl"),
    ("five", "-4@%edi -4@%esi -4@%edx -4@%ecx -4@%r8d"),
    ("six", "-4@%edi -4@%esi -4@%edx -4@%ecx -4@%r8d -4@%r9d"),
    ("seven", "8@%rdi -4@%esi 1@%dl -1@%cl -2@%r8w 8@%r9 -4@$5"),
    ("constants", "-4@$-7 4@$7 -8@$-1 8@$0"),
];

/// Compilers and options: each language standard that the header names, and each way of linking.
const WAYS: &[(&str, &[&str])] = &[
    ("gcc", &["-O0"]),
    ("gcc", &["-O2", "-std=c99", "-pedantic"]),
    ("gcc", &["-O2", "-static"]),
    ("gcc", &["-O2", "-no-pie", "-fno-pie"]),
    ("gcc", &["-O2", "-fPIC"]),
    ("gcc", &["-O2", "-flto"]),
    ("gcc", &["-O2", "-ffunction-sections", "-Wl,--gc-sections"]),
    ("g++", &["-O0", "-xc++", "-std=c++11"]),
    ("g++", &["-O2", "-xc++", "-std=c++20", "-pedantic"]),
];

/// Returns `WAYS`, and clang's if it is installed.
fn ways() -> Vec<(&'static str, &'static [&'static str])> {
    let mut ways = WAYS.to_vec();
    if std::process::Command::new("clang")
        .arg("--version")
        .output()
        .is_ok()
    {
        ways.extend([("clang", ["-O0"].as_slice()), ("clang", ["-O2"].as_slice())]);
        ways.push((
            "clang++",
            ["-O2", "-xc++", "-std=c++11", "-Wno-deprecated"].as_slice(),
        ));
    }
    ways
}

#[test]
fn each_form_leaves_its_notes_however_it_is_compiled() {
    for (compiler, options) in ways() {
        let built = Program::c(compiler, &program("forms.c"), options);
        built.check_sites();
        assert_eq!(
            built.definitions(),
            support::sorted(DEFINITIONS.lines()),
            "{compiler} {options:?}"
        );
        let sites = built.sites();
        assert!(
            sites.iter().all(|site| site.semaphore == 0),
            "{compiler} {options:?}: {sites:?}"
        );
        if options.contains(&"-O2") && !options.contains(&"-flto") {
            for (name, arguments) in ARGUMENTS {
                assert!(
                    sites
                        .iter()
                        .any(|site| site.name == *name && site.arguments == *arguments),
                    "{compiler} {options:?}: no {name} with {arguments:?} in {sites:#?}"
                );
            }
        }
        support::output(&built.path, &[]);
    }
}

#[test]
fn sites_name_module_and_function() {
    let built = Program::c("gcc", &program("forms.c"), &["-O2"]);
    built.check_names(&[
        ["forms", "", "unreach", "pkt_receive"],
        ["forms", "module", "", "two_old"],
        ["forms", "module", "function", "three_old"],
        ["linux", "unix", "linux", "zero-new"],
        ["forms", "", "", "four--new"],
        ["forms", "", "", "plain7"],
    ]);
}

#[test]
fn a_site_is_one_nop() {
    for (compiler, options) in ways() {
        if !options.contains(&"-O2") {
            continue;
        }
        let with = Program::c(compiler, &program("forms.c"), options);
        let without = Program::c(
            compiler,
            &program("forms.c"),
            &[options, &["-DWITHOUT"]].concat(),
        );
        for function in [
            "zero", "one", "two", "three", "four", "five", "six", "seven",
        ] {
            assert_eq!(
                with.instructions(function),
                ["nop", "ret"],
                "{compiler} {options:?}: {function}"
            );
        }
        let expected = [vec!["nop".to_owned()], without.operations("costs")].concat();
        assert_eq!(with.operations("costs"), expected, "{compiler} {options:?}");
    }
}

#[test]
fn semaphores_are_counters_that_guard_their_probe() {
    let built = Program::c(
        "gcc",
        &program("forms.c"),
        &["-O2", "-DEXOTRACE_SDT_SEMAPHORES"],
    );
    built.check_sites();
    let sections = support::output("readelf", &["-W", "-S", &built.path]);
    assert!(
        sections
            .lines()
            .any(|line| line.contains(" .probes ") && line.contains(" WA ")),
        "{sections}"
    );
    let symbols = support::output("nm", &[&built.path]);
    for (provider, name, symbol) in [
        ("forms", "five", "sdt_forms___five_semaphore"),
        (
            "forms",
            "pkt_receive",
            "sdt_forms__unreach_pkt_receive_semaphore",
        ),
        (
            "linux",
            "zero__new",
            "sdt_linux_unix_linux_zero__new_semaphore",
        ),
    ] {
        let symbol = symbols
            .lines()
            .find(|line| line.ends_with(&format!(" {symbol}")))
            .unwrap();
        let address = u64::from_str_radix(symbol.split(' ').next().unwrap(), 16).unwrap();
        let sites: Vec<_> = built
            .sites()
            .into_iter()
            .filter(|s| s.provider == provider && s.name == name)
            .collect();
        assert!(
            !sites.is_empty() && sites.iter().all(|site| site.semaphore == address),
            "{sites:?} at {address:#x}"
        );
    }
    // The guarded site stands after the test of its counter; gdb raises the counter, as a tracer
    // does.
    let hits = |function: &str| {
        let commands = [
            &format!("break {function}"),
            "run",
            "break -probe-stap forms:five",
            "continue",
            "info symbol $pc",
        ];
        built.gdb(&commands)
    };
    assert!(hits("enabled").contains("enabled"), "{}", hits("enabled"));
    let without_definition = built
        .sites()
        .into_iter()
        .find(|site| site.name == "plain")
        .unwrap();
    assert_eq!(without_definition.semaphore, 0);
}

#[test]
fn cplusplus_values() {
    for (compiler, options) in ways()
        .into_iter()
        .filter(|(compiler, _)| compiler.ends_with("++"))
    {
        let built = Program::c(compiler, &program("values.cc"), options);
        built.check_sites();
        assert_eq!(
            built.sizes(),
            ["generic -4 -4 8 8", "generic -8 -8 8 8", "scoped -2 1 8"],
            "{compiler} {options:?}"
        );
    }
}

#[test]
fn mistakes_do_not_compile() {
    let include = package().join("include");
    let source = package().join(program("wrong.c"));
    let compile = |compiler: &str, case: u32| {
        let case = format!("-DCASE={case}");
        let arguments = [
            "-fsyntax-only",
            "-xc",
            &case,
            "-I",
            include.to_str().unwrap(),
            source.to_str().unwrap(),
        ]
        .map(str::to_owned);
        let arguments = arguments.map(|argument| {
            if compiler == "g++" && argument == "-xc" {
                "-xc++".into()
            } else {
                argument
            }
        });
        outcome(compiler, &arguments.each_ref().map(String::as_str))
    };
    for compiler in ["gcc", "g++"] {
        assert!(
            compile(compiler, 0).status.success(),
            "{compiler}: the rest of the program is right"
        );
        for (case, expected) in [
            (1, "sdt_provider_worng"),
            (2, "sdt_wrong___defnied"),
            (3, "expected"),
            (
                4,
                if compiler == "gcc" {
                    "negative"
                } else {
                    "exo_sdt_value<double>"
                },
            ),
            (
                5,
                if compiler == "gcc" {
                    "negative"
                } else {
                    "at most 8 bytes"
                },
            ),
            (6, "array"),
            (7, "sdt_wrong___defnied"),
        ] {
            let output = compile(compiler, case);
            let errors = String::from_utf8_lossy(&output.stderr);
            assert!(
                !output.status.success() && errors.contains(expected),
                "{compiler}, case {case}: {errors}"
            );
        }
    }
}

#[test]
fn gdb_reads_the_values_of_the_example() {
    for options in [["-O0"], ["-O2"]] {
        let built = Program::c("gcc", "examples/icmp.c", &options);
        built.check_example("pkt_receive");
    }
}

//! The project's own test programs on a host: `cargo host svm --tests`.
//!
//! It runs every test program of the packages that run guests, except those in [`ELSEWHERE`], which
//! has the reasons. They run one after the other, with one thread and a line each. If one fails,
//! all lines are printed again at the end. The modules of [`SYSTEM`] are programs here: each is
//! chosen, limited and reported by itself.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::process::Command;

use guest::failed;

use crate::Arguments;
use crate::cargo::{self, Built, CargoError, TEST_DATA};
use crate::job::{Job, JobError, add_entry, quoted};

/// The packages whose tests run guests, and their folders.
const PACKAGES: [(&str, &str); 5] = [
    ("exotrace-vmm", "vmm"),
    ("exotrace-probes", "probes"),
    ("exotrace-trace-devices", "probes/devices"),
    ("exotrace-tests", "tests"),
    ("exotrace", "cli"),
];
/// The test program whose modules are run one by one: package, name.
const SYSTEM: (&str, &str) = ("exotrace-tests", "system");

/// Test programs that do not run on the hosts: package, name, reason.
const ELSEWHERE: [(&str, &str, &str); 6] = [
    (
        "exotrace-tests",
        "gdb",
        "runs gdb, which the host has not: see tests/images/gdb.sh",
    ),
    (
        "exotrace-tests",
        "second_opinion",
        "compares with pahole, which no host changes",
    ),
    (
        "exotrace-tests",
        "read_events",
        "reads recorded events with Python, which no host changes",
    ),
    (
        "exotrace-tests",
        "demo",
        "makes its guest of Debian's packages, which the host cannot fetch",
    ),
    (
        "exotrace-tests",
        "qemu_guests",
        "runs QEMU's emulated CPU, which no host changes",
    ),
    (
        "exotrace-tests",
        "perfetto",
        "reads timelines with Perfetto's Python library, which no host changes",
    ),
];

/// A test program, or a module of one.
#[derive(Debug)]
struct Part {
    package: String,
    /// The name of the program or of the module.
    name: String,
    /// The program's path on the host.
    program: String,
    /// The module's tests; none: the whole program.
    tests: Vec<String>,
}

/// Builds the test programs, runs them on the host and prints a line for each. Returns 0 if all
/// passed.
///
/// # Errors
/// If they cannot be built or the host does not end in order.
pub fn run(arguments: &Arguments) -> Result<i32, JobError> {
    let mut words: Vec<String> = ["build", "--workspace", "--example", TEST_DATA]
        .map(str::to_owned)
        .into();
    // Only requested programs are built, unless a package is requested.
    let names = arguments.command.iter();
    let names: Vec<&str> = names
        .map(|name| name.rsplit('/').next().unwrap_or(name))
        .collect();
    let is_package = |name: &&str| PACKAGES.iter().any(|(package, _)| package == name);
    if names.is_empty() || names.iter().any(is_package) {
        words.push("--tests".to_owned());
    } else {
        let targets = names.iter().flat_map(|name| targets(name));
        words.extend(targets.flat_map(|target| ["--test".to_owned(), target]));
    }
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let built = cargo::build(&words, &["test", "example"])?;
    let mut programs = Vec::new();
    let mut parts = Vec::new();
    for built in &built {
        let found = parts_of(built, &arguments.command)?;
        if !found.is_empty() {
            programs.push(built);
        }
        parts.extend(found);
    }
    let mut job = Job::new(script(&parts, arguments), arguments)?;
    let log = job.cache().root().join("host.log");
    for built in programs {
        job.tree.built(&path(built), &built.path, &log)?;
    }
    let cache = job.cache().clone();
    // A folder of this run alone: the suites of both hosts may run side by side.
    let data = tempfile::tempdir().map_err(failed("make a folder in", &std::env::temp_dir()))?;
    test_data(&built, data.path())?;
    job.tree.copy("source", data.path());
    add_entry(&mut job.tree, &cache, "kernel-rich-");
    let status = job.run(arguments)?;
    let table = fs::read_to_string(arguments.out.join("tests.txt")).unwrap_or_default();
    // The lines have been shown as they came; failures lie between them.
    if status != 0 {
        println!("{table}");
    }
    for (package, name, reason) in ELSEWHERE {
        println!("not run on this host: {package} {name}: {reason}");
    }
    Ok(status)
}

/// Returns cargo's names of the test programs that a name stands for.
fn targets(name: &str) -> Vec<String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let file = format!("{name}.rs");
    let is_module = root
        .join("tests/tests")
        .join(SYSTEM.1)
        .join(&file)
        .is_file();
    let mut folders = PACKAGES.iter();
    let is_program =
        folders.any(|(_, folder)| root.join(folder).join("tests").join(&file).is_file());
    let system = is_module.then(|| SYSTEM.1.to_owned());
    // A name that is neither is left to cargo, which lists what there is.
    let program = (is_program || !is_module).then(|| name.to_owned());
    system.into_iter().chain(program).collect()
}

/// Fills the folder with the files that test programs read when they run elsewhere.
fn test_data(built: &[Built], folder: &Path) -> Result<(), JobError> {
    let program = built.iter().find(|built| built.name == TEST_DATA);
    let program = program.ok_or_else(|| CargoError::Nothing(TEST_DATA.to_owned()))?;
    let status = Command::new(&program.path).arg(folder).status();
    match status.map_err(CargoError::Start)?.success() {
        true => Ok(()),
        false => Err(CargoError::Failed(TEST_DATA.to_owned()).into()),
    }
}

/// Returns the parts of a program that run: all that are not elsewhere, or those with the given
/// names.
///
/// # Errors
/// If the program does not list its tests.
fn parts_of(built: &Built, names: &[String]) -> Result<Vec<Part>, CargoError> {
    let part = |name: &str, tests| Part {
        package: built.package.clone(),
        name: name.to_owned(),
        program: path(built),
        tests,
    };
    let is_ours = PACKAGES
        .iter()
        .any(|(package, _)| *package == built.package);
    if !is_ours || built.name == TEST_DATA {
        return Ok(Vec::new());
    }
    if (built.package.as_str(), built.name.as_str()) != SYSTEM {
        let wanted = is_wanted(&built.package, &built.name, names);
        return Ok(wanted
            .then(|| part(&built.name, Vec::new()))
            .into_iter()
            .collect());
    }
    let listed = Command::new(&built.path).arg("--list").output();
    let listed = listed.map_err(CargoError::Start)?;
    let mut modules = modules(&String::from_utf8_lossy(&listed.stdout));
    // All of them, if the program itself is named.
    if !names.contains(&built.name) {
        modules.retain(|name, _| is_wanted(&built.package, name, names));
    }
    let parts = modules.into_iter().map(|(name, tests)| part(&name, tests));
    Ok(parts.collect())
}

/// Returns the modules in a program's list of its tests, each with its tests.
fn modules(list: &str) -> BTreeMap<String, Vec<String>> {
    let mut modules: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for test in list.lines().filter_map(|line| line.strip_suffix(": test")) {
        let module = test.split_once("::").map_or(test, |(module, _)| module);
        let tests = modules.entry(module.to_owned()).or_default();
        tests.push(test.to_owned());
    }
    modules
}

/// Returns whether a program or module runs: all that are not elsewhere, or those with the given
/// names.
fn is_wanted(package: &str, name: &str, names: &[String]) -> bool {
    let elsewhere = ELSEWHERE
        .iter()
        .any(|(other, not, _)| (*other, *not) == (package, name));
    let whole = format!("{package}/{name}");
    match names {
        [] => !elsewhere,
        names => names
            .iter()
            .any(|given| given == name || given == package || *given == whole),
    }
}

/// Returns the program's path on the host.
fn path(built: &Built) -> String {
    format!("tests/{}/{}", built.package, built.name)
}

/// Returns the script that runs the programs, with a line for each in `/out/tests.txt`.
fn script(parts: &[Part], arguments: &Arguments) -> String {
    let each = arguments.each;
    let words: String = arguments
        .words
        .split_whitespace()
        .fold(String::new(), |mut line, word| {
            let _ = write!(line, " {}", quoted(word));
            line
        });
    let mut script = format!(
        "export EXOTRACE_BIN=/bin/exotrace EXOTRACE_TEST_DATA=/source\n\
         exotrace doctor\n\
         failed=0\n\
         passed_tests=0\n\
         one() {{\n\
         \x20   package=$1 name=$2 program=$3\n\
         \x20   shift 3\n\
         \x20   log=/out/$package.$name.log\n\
         \x20   begun=$(cut -d. -f1 /proc/uptime)\n\
         \x20   timeout -k 10 {each} /$program \"$@\" --test-threads=1{words} >$log 2>&1 </dev/null\n\
         \x20   status=$?\n\
         \x20   seconds=$(($(cut -d. -f1 /proc/uptime) - begun))\n\
         \x20   result=$(grep -a '^test result:' $log | sed 's/^test result: //; s/; finished.*//')\n\
         \x20   [ $status = 124 ] && result=\"not done in {each} s: $(grep -ac '^test .* ok$' $log) passed\"\n\
         \x20   line=$(printf '%-16s %-24s %4d s  %s' $package $name $seconds \"$result\")\n\
         \x20   echo \"$line\"\n\
         \x20   echo \"$line\" >>/out/tests.txt\n\
         \x20   [ $status = 0 ] && return\n\
         \x20   failed=1\n\
         \x20   grep -aE '^test .*FAILED' $log\n\
         \x20   sed -n '/^failures:/,$p' $log | head -c 20000\n\
         }}\n"
    );
    for part in parts {
        let words = [&part.package, &part.name, &part.program].map(|word| quoted(word));
        let _ = write!(script, "one {}", words.join(" "));
        if !part.tests.is_empty() {
            script.push_str(" --exact");
        }
        for test in &part.tests {
            let _ = write!(script, " {}", quoted(test));
        }
        script.push('\n');
    }
    script.push_str("exit $failed\n");
    script
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use clap::Parser;

    #[test]
    fn programs_are_chosen_by_name_or_package() {
        let is_wanted = |program: (&str, &str), names: &[&str]| {
            let names: Vec<String> = names.iter().map(|n| (*n).to_owned()).collect();
            super::is_wanted(program.0, program.1, &names)
        };
        let traps = ("exotrace-vmm", "traps");
        assert!(is_wanted(traps, &[]));
        assert!(is_wanted(traps, &["patching", "traps"]));
        assert!(is_wanted(traps, &["exotrace-vmm"]));
        assert!(is_wanted(traps, &["exotrace-vmm/traps"]));
        assert!(!is_wanted(traps, &["exotrace-probes/traps"]));
        let (package, name, _) = ELSEWHERE[0];
        assert!(!is_wanted((package, name), &[]));
        assert!(is_wanted((package, name), &[name]));
    }

    #[test]
    fn a_name_stands_for_programs_and_modules() {
        assert_eq!(targets("traps"), ["traps"]);
        assert_eq!(targets("ptrace"), ["system"]);
        // One in another package, too.
        assert_eq!(targets("dt"), ["system", "dt"]);
        let list = "a::one: test\na::in::two: test\nb::one: test\n\n3 tests, 0 benchmarks\n";
        let modules = modules(list);
        assert_eq!(modules.keys().collect::<Vec<_>>(), ["a", "b"]);
        assert_eq!(modules["a"], ["a::one", "a::in::two"]);
    }

    #[test]
    fn the_script_is_one_that_a_shell_takes() {
        let line = ["host", "svm", "--tests", "--words", "--for 20"];
        let arguments = Arguments::try_parse_from(line).unwrap();
        let part = |name: &str, tests: &[&str]| Part {
            package: "exotrace-tests".to_owned(),
            name: name.to_owned(),
            program: "tests/exotrace-tests/system".to_owned(),
            tests: tests.iter().map(|test| (*test).to_owned()).collect(),
        };
        let parts = [part("torture", &[]), part("a", &["a::one", "a::two"])];
        let script = script(&parts, &arguments);
        let checked = Command::new("sh")
            .args(["-n", "-c", &script])
            .output()
            .unwrap();
        assert!(checked.status.success(), "{checked:?}");
        let program = "'tests/exotrace-tests/system'";
        assert!(script.contains(&format!("one 'exotrace-tests' 'torture' {program}\n")));
        let line = format!("one 'exotrace-tests' 'a' {program} --exact 'a::one' 'a::two'\n");
        assert!(script.contains(&line));
        assert!(script.contains("\"$@\" --test-threads=1 '--for' '20' >"));
    }
}

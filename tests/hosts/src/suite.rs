//! The project's own test programs on a host: `cargo host svm --tests`.
//!
//! It runs every test program of the packages that run guests, except those in [`ELSEWHERE`], which
//! has the reasons. They run one after the other, with one thread and a line each. If one fails,
//! all lines are printed again at the end.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use guest::failed;

use crate::Arguments;
use crate::cargo::{self, Built};
use crate::job::{Job, JobError, add_entry, quoted};

/// The packages whose tests run guests.
const PACKAGES: [&str; 5] = [
    "exotrace-vmm",
    "exotrace-probes",
    "exotrace-trace-devices",
    "exotrace-tests",
    "exotrace",
];

/// Test programs that do not run on the hosts: package, name, reason.
const ELSEWHERE: [(&str, &str, &str); 4] = [
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
        "perfetto",
        "reads timelines with Perfetto's Python library, which no host changes",
    ),
];

/// Builds the test programs, runs them on the host and prints a line for each. Returns 0 if all
/// passed.
///
/// # Errors
/// If they cannot be built or the host does not end in order.
pub fn run(arguments: &Arguments) -> Result<i32, JobError> {
    let mut words = vec!["test", "--no-run"];
    for package in PACKAGES {
        words.extend(["-p", package]);
    }
    // Only requested programs are built, unless a package is requested.
    let names = arguments.command.iter();
    let names: Vec<&str> = names
        .map(|name| name.rsplit('/').next().unwrap_or(name))
        .collect();
    if names.is_empty() || names.iter().any(|name| PACKAGES.contains(name)) {
        words.push("--tests");
    } else {
        words.extend(names.iter().flat_map(|name| ["--test", *name]));
    }
    let programs: Vec<Built> = cargo::build(&words, "test")?
        .into_iter()
        .filter(|built| is_wanted(built, &arguments.command))
        .collect();
    let mut job = Job::new(script(&programs, arguments), arguments)?;
    let log = job.cache().root().join("host.log");
    for built in &programs {
        job.tree.built(&path(built), &built.path, &log)?;
    }
    let cache = job.cache().clone();
    // A folder of this run alone: the suites of both hosts may run side by side.
    let data = tempfile::tempdir().map_err(failed("make a folder in", &std::env::temp_dir()))?;
    test_data(data.path())?;
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

/// Fills the folder with the files that test programs read when they run elsewhere.
fn test_data(folder: &Path) -> Result<(), JobError> {
    let path = folder.display().to_string();
    let words = [
        "run",
        "-p",
        "exotrace-tests",
        "--example",
        "test-data",
        "--",
        &path,
    ];
    Ok(cargo::run(&words)?)
}

/// Returns whether a program runs: all that are not elsewhere, or those with the given names.
fn is_wanted(built: &Built, names: &[String]) -> bool {
    let key = (built.package.as_str(), built.name.as_str());
    let elsewhere = ELSEWHERE
        .iter()
        .any(|(package, name, _)| (*package, *name) == key);
    let whole = format!("{}/{}", built.package, built.name);
    match names {
        [] => !elsewhere,
        names => names
            .iter()
            .any(|name| *name == built.name || *name == built.package || *name == whole),
    }
}

/// Returns the program's path on the host.
fn path(built: &Built) -> String {
    format!("tests/{}/{}", built.package, built.name)
}

/// Returns the script that runs the programs, with a line for each in `/out/tests.txt`.
fn script(programs: &[Built], arguments: &Arguments) -> String {
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
         \x20   log=/out/$1.$2.log\n\
         \x20   begun=$(cut -d. -f1 /proc/uptime)\n\
         \x20   timeout -k 10 {each} /tests/$1/$2 --test-threads=1{words} >$log 2>&1 </dev/null\n\
         \x20   status=$?\n\
         \x20   seconds=$(($(cut -d. -f1 /proc/uptime) - begun))\n\
         \x20   result=$(grep -a '^test result:' $log | sed 's/^test result: //; s/; finished.*//')\n\
         \x20   [ $status = 124 ] && result=\"not done in {each} s: $(grep -ac '^test .* ok$' $log) passed\"\n\
         \x20   line=$(printf '%-16s %-24s %4d s  %s' $1 $2 $seconds \"$result\")\n\
         \x20   echo \"$line\"\n\
         \x20   echo \"$line\" >>/out/tests.txt\n\
         \x20   [ $status = 0 ] && return\n\
         \x20   failed=1\n\
         \x20   grep -aE '^test .*FAILED' $log\n\
         \x20   sed -n '/^failures:/,$p' $log | head -c 20000\n\
         }}\n"
    );
    for built in programs {
        let _ = writeln!(
            script,
            "one {} {}",
            quoted(&built.package),
            quoted(&built.name)
        );
    }
    script.push_str("exit $failed\n");
    script
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use clap::Parser;
    use std::path::PathBuf;

    fn built(package: &str, name: &str) -> Built {
        Built {
            package: package.to_owned(),
            name: name.to_owned(),
            path: PathBuf::new(),
        }
    }

    #[test]
    fn programs_are_chosen_by_name_or_package() {
        let traps = built("exotrace-vmm", "traps");
        let names = |names: &[&str]| names.iter().map(|n| (*n).to_owned()).collect::<Vec<_>>();
        assert!(is_wanted(&traps, &[]));
        assert!(is_wanted(&traps, &names(&["patching", "traps"])));
        assert!(is_wanted(&traps, &names(&["exotrace-vmm"])));
        assert!(is_wanted(&traps, &names(&["exotrace-vmm/traps"])));
        assert!(!is_wanted(&traps, &names(&["exotrace-probes/traps"])));
        let (package, name, _) = ELSEWHERE[0];
        assert!(!is_wanted(&built(package, name), &[]));
        assert!(is_wanted(&built(package, name), &names(&[name])));
    }

    #[test]
    fn the_script_is_one_that_a_shell_takes() {
        let line = ["host", "svm", "--tests", "--words", "--for 20"];
        let arguments = Arguments::try_parse_from(line).unwrap();
        let script = script(&[built("exotrace-vmm", "traps")], &arguments);
        let checked = std::process::Command::new("sh")
            .args(["-n", "-c", &script])
            .output()
            .unwrap();
        assert!(checked.status.success(), "{checked:?}");
        assert!(script.contains("one 'exotrace-vmm' 'traps'\n"));
        assert!(script.contains("--test-threads=1 '--for' '20' >"));
    }
}

//! Runs whole scripts without probes and compares their output. A case is `NAME.bt`, its output or
//! its errors in `NAME.ok`, and its arguments, one a line, in `NAME.args`. Those in `strict` are
//! OpenBSD's language.
#![allow(clippy::unwrap_used)]

use std::fs;
use std::path::Path;

use introspect::kernel::btf::Btf;
use probes::probe::Probe;

use crate::Clock;
use crate::ast::Dialect;
use crate::compile::{Guest, Options};
use crate::diagnostic::Diagnostic;
use crate::parse::parse;
use crate::render::text;
use crate::session::{Finder, NotFound, Prepared};
use crate::time::Zone;
use crate::value::Names;

/// 2009-02-13 23:31:30 UTC.
const NOW: u64 = 1_234_567_890_000_000_000;

pub(crate) struct Nobody;

impl Guest for Nobody {
    fn types(&self) -> Option<&Btf> {
        None
    }

    fn symbol(&self, _: &str) -> Option<u64> {
        None
    }

    fn nearest_symbols(&self, _: &str) -> Vec<String> {
        vec!["jiffies".to_owned()]
    }
}

impl Finder for Nobody {
    fn find(&self, pattern: &str) -> Result<Vec<Probe>, NotFound> {
        Err(NotFound {
            message: format!("no probe {pattern}"),
            nearest: vec!["vfs_read".to_owned()],
        })
    }
}

impl Names for Nobody {
    fn kernel(&self, address: u64) -> String {
        format!("{address:#x}")
    }

    fn user(&self, _: u32, address: u64) -> String {
        format!("{address:#x}")
    }
}

fn outcome(script: &[u8], arguments: &str, dialect: Dialect) -> String {
    let rendered = |wrong: Vec<Diagnostic>| -> String {
        wrong.iter().map(|d| d.render("script", script)).collect()
    };
    let parsed = match parse(script, dialect) {
        Ok(parsed) => parsed,
        Err(wrong) => return rendered(wrong),
    };
    let options = Options {
        dialect,
        arguments: arguments.lines().map(|a| a.as_bytes().to_vec()).collect(),
        zone: Zone::utc(),
        ..Options::default()
    };
    let clock = Clock {
        tsc: vmm::host_tsc(),
        unix_ns: NOW,
        // So slow that no time passes.
        hz: u64::MAX,
    };
    let prepared = match Prepared::new(&parsed, &options, &Nobody, &Nobody, 1, clock) {
        Ok(prepared) => prepared,
        Err(wrong) => return rendered(wrong),
    };
    let mut out = Vec::new();
    let each = &mut |output| out.extend(text::render(&output, dialect, &Nobody));
    prepared
        .run_alone(None, each)
        .unwrap_or_else(|e| panic!("{e}"));
    String::from_utf8_lossy(&out).into_owned()
}

/// Compares the outcome of each `NAME.bt` of a folder with its `NAME.ok`. There are at least
/// `least`.
pub(crate) fn compare(folder: &str, least: usize, outcome: impl Fn(&Path, &[u8]) -> String) {
    let folder = crate::test_data::source("probes/bt/src/tests").join(folder);
    let entries = fs::read_dir(&folder).unwrap();
    let mut paths: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
    paths.retain(|path| path.extension().is_some_and(|ending| ending == "bt"));
    paths.sort();
    let mut wrong = String::new();
    for path in &paths {
        let read =
            |path: &Path| fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let expected = String::from_utf8(read(&path.with_extension("ok"))).unwrap();
        let found = outcome(path, &read(path));
        if found != expected {
            wrong += &format!("{}:\n{found}--- expected:\n{expected}\n", path.display());
        }
    }
    assert!(wrong.is_empty(), "{wrong}");
    assert!(paths.len() >= least, "{}", folder.display());
}

#[test]
fn scripts_put_out_what_their_files_say() {
    for (folder, least, dialect) in [
        ("run", 20, Dialect::Normal),
        ("strict", 15, Dialect::Strict),
    ] {
        compare(folder, least, |path, script| {
            let arguments = fs::read_to_string(path.with_extension("args")).unwrap_or_default();
            outcome(script, &arguments, dialect)
        });
    }
}

/// Compares the output of each line of a table: a script's statements, a tab, and the lines that
/// they put out, with `;` between. `#` begins a comment. There are at least `least` cases.
fn compare_table(name: &str, least: usize, script: impl Fn(&str) -> String) {
    let path = crate::test_data::source("probes/bt/src/tests").join(name);
    let table = fs::read_to_string(path).unwrap();
    let cases = table.lines().filter(|line| !line.starts_with('#'));
    let (mut wrong, mut count) = (String::new(), 0);
    for case in cases {
        let (statements, expected) = case.split_once('\t').unwrap();
        let found = outcome(script(statements).as_bytes(), "", Dialect::Normal);
        let found = found.trim_end_matches('\n').replace('\n', ";");
        count += 1;
        if found != expected {
            wrong += &format!("{statements}\t{found}\texpected: {expected}\n");
        }
    }
    assert!(wrong.is_empty(), "{wrong}");
    assert!(count >= least, "{count} cases in {name}");
}

#[test]
fn expressions_have_the_values_of_c_and_bpftrace() {
    compare_table("values.txt", 650, |value| {
        format!("BEGIN {{ print({value}); }}")
    });
}

#[test]
fn statements_put_out_what_bpftrace_does() {
    const TYPES: &str = "\
struct t { int a; int b[2]; struct { bool d; char *e; enum e f; } c; uint8 g[2][3]; };
enum e { A, B };
";
    compare_table("statements.txt", 100, |text| {
        format!("{TYPES}BEGIN {{ {text} }}")
    });
}

#[test]
fn what_comes_with_exotrace_is_read() {
    use crate::library::{SCRIPTS, TEXTS};
    for (name, script) in SCRIPTS.iter().chain(&TEXTS) {
        let parsed = parse(script.as_bytes(), Dialect::Normal);
        let wrong = parsed.err().unwrap_or_default();
        let shown: String = wrong
            .iter()
            .map(|d| d.render(name, script.as_bytes()))
            .collect();
        assert_eq!(shown, "");
    }
}

#[test]
fn every_script_says_what_it_is_in_one_line() {
    for (name, script) in crate::library::SCRIPTS {
        let about = crate::library::about(script);
        let stem = name.trim_end_matches(".bt");
        assert!(
            about.starts_with(&format!("{stem} - ")),
            "{name}: {about:?}"
        );
    }
}

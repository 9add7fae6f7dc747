//! The habits of the source: layers that point down, comments that fit.
//!
//! The modules of each crate depend in one direction, but for rings that are named here. It is read
//! from the source which top-level modules each names by `crate::`. Tests may name any.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// The folders of the crates.
const CRATES: [&str; 10] = [
    "devices",
    "devices/image",
    "introspect",
    "vmm",
    "probes",
    "probes/bt",
    "probes/devices",
    "probes/gdb",
    "guest",
    "cli",
];

/// Rings that stay: a machine owns its vCPUs' threads, and a vCPU works on what its machine shares.
const RINGS: [(&str, [&str; 2]); 1] = [("vmm", ["machine", "vcpu"])];

/// Modules of a crate, and those that they must not name, directly or by way of others.
const BELOW: [(&str, &str, &[&str]); 10] = [
    (
        "cli",
        "protocol",
        &["vm", "server", "client", "commands", "args"],
    ),
    ("cli", "vm", &["server", "client", "commands", "args"]),
    ("cli", "server", &["client", "commands", "args"]),
    ("cli", "client", &["vm", "commands", "args"]),
    ("cli", "embed", &["server", "client", "commands", "args"]),
    (
        "vmm",
        "x86_64",
        &["boot", "host", "machine", "trap", "vcpu"],
    ),
    ("probes", "provider", &["engine"]),
    ("probes/bt", "parse", &["compile", "run", "session"]),
    ("probes/bt", "run", &["compile", "parse", "session"]),
    ("probes/devices", "port", &["dt", "ptrace", "trace"]),
];

type Graph = BTreeMap<String, BTreeSet<String>>;

fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    let entries = fs::read_dir(folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
    for entry in entries.flatten() {
        let path = entry.path();
        match path.is_dir() {
            true => sources(&path, found),
            false if path.extension().is_some_and(|end| end == "rs") => found.push(path),
            false => {}
        }
    }
}

/// Returns the code of a file: no comments, and nothing of its test module.
fn code(path: &Path) -> String {
    let text = fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let text = text
        .split("#[cfg(test)]\nmod tests {")
        .next()
        .unwrap_or_default();
    let lines = text
        .lines()
        .map(|line| line.split("//").next().unwrap_or_default());
    lines.collect::<Vec<_>>().join("\n")
}

/// Returns the names that stand directly behind `crate::`, those in braces included.
fn named(code: &str) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for rest in code.split("crate::").skip(1) {
        let Some(list) = rest.strip_prefix('{') else {
            names.insert(word(rest));
            continue;
        };
        let mut depth = 0;
        let mut part = String::new();
        for character in list.chars() {
            match character {
                '{' => depth += 1,
                '}' if depth == 0 => break,
                '}' => depth -= 1,
                ',' if depth == 0 => {
                    names.insert(word(&std::mem::take(&mut part)));
                    continue;
                }
                _ => {}
            }
            part.push(character);
        }
        names.insert(word(&part));
    }
    names
}

fn word(text: &str) -> String {
    let text = text.trim_start();
    let end = text.find(|c: char| !(c.is_alphanumeric() || c == '_'));
    text.get(..end.unwrap_or(text.len()))
        .unwrap_or_default()
        .to_owned()
}

/// Returns which top-level modules of a crate name which others.
fn graph(crate_name: &str) -> Graph {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("..")
        .join(crate_name)
        .join("src");
    let mut files = Vec::new();
    sources(&folder, &mut files);
    let mut graph = Graph::new();
    for file in files {
        let place = file
            .strip_prefix(&folder)
            .unwrap_or(&file)
            .with_extension("");
        let mut parts = place.iter().map(|part| part.to_string_lossy().into_owned());
        let top = parts.next().unwrap_or_default();
        let is_test = place.to_string_lossy().contains("test");
        if ["lib", "main"].contains(&top.as_str()) || is_test {
            continue;
        }
        graph.entry(top).or_default().extend(named(&code(&file)));
    }
    let modules: BTreeSet<String> = graph.keys().cloned().collect();
    for (module, uses) in &mut graph {
        uses.retain(|name| name != module && modules.contains(name));
    }
    graph
}

/// Returns all modules that one depends on, directly or by way of others.
fn reach(graph: &Graph, from: &str) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let mut left = vec![from.to_owned()];
    while let Some(module) = left.pop() {
        for next in graph.get(&module).into_iter().flatten() {
            if found.insert(next.clone()) {
                left.push(next.clone());
            }
        }
    }
    found
}

#[test]
fn modules_depend_in_one_direction() {
    let mut wrong = Vec::new();
    for name in CRATES {
        let graph = graph(name);
        assert!(graph.len() > 3, "{name}: {graph:?}");
        println!("{name}:");
        for (module, uses) in &graph {
            println!(
                "  {module} -> {}",
                uses.iter().cloned().collect::<Vec<_>>().join(" ")
            );
            let is_named = |other: &String| {
                RINGS.iter().any(|(of, ring)| {
                    *of == name && ring.contains(&module.as_str()) && ring.contains(&other.as_str())
                })
            };
            let back = uses
                .iter()
                .filter(|other| reach(&graph, other).contains(module));
            wrong.extend(
                back.filter(|other| !is_named(other))
                    .map(|other| format!("{name}: {module} uses {other}, which leads back to it")),
            );
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn layers_point_down() {
    for (name, module, forbidden) in BELOW {
        let graph = graph(name);
        assert!(
            graph.contains_key(module),
            "{name} has no {module}: {graph:?}"
        );
        let found = reach(&graph, module);
        for other in forbidden {
            assert!(graph.contains_key(*other), "{name} has no {other}");
            assert!(
                !found.contains(*other),
                "{name}: {module} depends on {other}"
            );
        }
    }
}

/// The columns at which comments wrap.
const COLUMNS: usize = 100;

#[test]
fn comments_wrap() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut files = Vec::new();
    // A folder has those below it.
    let folders = CRATES.into_iter().filter(|name| !name.contains('/'));
    for name in folders.chain(["tests"]) {
        sources(&root.join(name), &mut files);
    }
    let mut wrong = Vec::new();
    for file in files
        .iter()
        .filter(|file| !file.iter().any(|part| part == "target"))
    {
        let text = fs::read_to_string(file).unwrap_or_else(|e| panic!("{}: {e}", file.display()));
        for (number, line) in text.lines().enumerate() {
            let is_comment = line.trim_start().starts_with("//");
            // A row of a table, and a word that is longer, stay as they are.
            let is_whole = line.contains(" | ") || line.split_whitespace().count() < 3;
            if is_comment && !is_whole && line.chars().count() > COLUMNS {
                wrong.push(format!("{}:{}", file.display(), number + 1));
            }
        }
    }
    assert!(
        wrong.is_empty(),
        "over {COLUMNS} columns:\n{}",
        wrong.join("\n")
    );
}

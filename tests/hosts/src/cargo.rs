//! The project's own programs, built by cargo.

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Command, Stdio};

use serde::Deserialize;

/// cargo could not build a program for the host.
#[derive(Debug, thiserror::Error)]
pub enum CargoError {
    /// cargo could not be started, or its output could not be read.
    #[error("cannot run cargo: {0}")]
    Start(#[from] std::io::Error),
    /// cargo failed and has printed the reason.
    #[error("cargo {0} failed")]
    Failed(String),
    /// cargo built no such program.
    #[error("cargo {0} built no program")]
    Nothing(String),
}

/// The example that makes the files of test programs that run elsewhere. It is built with every
/// debug program of a host: cargo then gives all of them the features that tests need, and compiles
/// the crates once.
pub const TEST_DATA: &str = "test-data";

/// A program that cargo has built.
#[derive(Debug, Clone)]
pub struct Built {
    /// The package.
    pub package: String,
    /// The target: the name of the binary, test or bench.
    pub name: String,
    /// The file.
    pub path: PathBuf,
}

/// A line of cargo's messages (the cargo book, "External tools").
#[derive(Deserialize)]
struct Message {
    reason: String,
    #[serde(default)]
    package_id: String,
    target: Option<Target>,
    executable: Option<PathBuf>,
}

#[derive(Deserialize)]
struct Target {
    name: String,
    kind: Vec<String>,
}

/// Runs cargo with `words` and returns the programs of `kinds` (`bin`, `test`, `example`) that it
/// has built.
///
/// # Errors
/// If the build fails or has no such program.
pub fn build(words: &[&str], kinds: &[&str]) -> Result<Vec<Built>, CargoError> {
    let mut child = cargo()
        .args(words)
        .args([
            "--locked",
            "--quiet",
            "--message-format=json-render-diagnostics",
        ])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()?;
    let mut built = Vec::new();
    if let Some(output) = child.stdout.take() {
        for line in BufReader::new(output).lines() {
            built.extend(program(&line?, kinds));
        }
    }
    if !child.wait()?.success() {
        return Err(CargoError::Failed(words.join(" ")));
    }
    match built.is_empty() {
        true => Err(CargoError::Nothing(words.join(" "))),
        false => Ok(built),
    }
}

/// Returns a command that runs the cargo that runs this program.
fn cargo() -> Command {
    Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
}

/// Returns the program that a message names, if it is of `kinds`.
fn program(line: &str, kinds: &[&str]) -> Option<Built> {
    let message: Message = serde_json::from_str(line).ok()?;
    let target = message.target?;
    let is_of_kind = |kind: &String| kinds.contains(&kind.as_str());
    let wanted = message.reason == "compiler-artifact" && target.kind.iter().any(is_of_kind);
    // `path+file:///FOLDER#NAME@VERSION`, or `...FOLDER#VERSION` if the folder has the package's
    // name.
    let package = message.package_id.rsplit_once('#')?;
    let folder = package.0.rsplit('/').next().unwrap_or_default();
    let name = package.1.split_once('@').map_or(folder, |(name, _)| name);
    Some(Built {
        package: name.to_owned(),
        name: target.name,
        path: message.executable.filter(|_| wanted)?,
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn programs_are_read_from_cargos_messages() {
        let line =
            r#"{"reason":"compiler-artifact","package_id":"path+file:///x/vmm#exotrace-vmm@0.1.0",
            "target":{"kind":["test"],"name":"traps"},"executable":"/x/target/debug/deps/traps-1"}"#
                .replace('\n', " ");
        let built = program(&line, &["bin", "test"]).unwrap();
        assert_eq!(
            (built.package.as_str(), built.name.as_str()),
            ("exotrace-vmm", "traps")
        );
        assert_eq!(built.path, PathBuf::from("/x/target/debug/deps/traps-1"));
        assert!(program(&line, &["bin"]).is_none());
        assert!(program(r#"{"reason":"build-finished","success":true}"#, &["test"]).is_none());
    }
}

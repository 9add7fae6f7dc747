//! Debian packages that a build needs: finds missing ones, and installs them if permitted.
//!
//! The caller owns the list. Only Debian-like systems are supported, by dpkg-query and apt-get.

use std::path::Path;
use std::process::Command;

use crate::build::apt;
use crate::build::command::CommandError;
use crate::progress::Progress;

/// Packages are missing and could not be installed.
#[derive(Debug, thiserror::Error)]
pub enum PackageError {
    /// dpkg-query cannot be run.
    #[error(
        "this needs Debian's packages, and dpkg-query cannot be run ({0}); build on a Debian 12 machine, or copy its cache here"
    )]
    NotDebian(std::io::Error),
    /// Packages are missing, and only root may install them.
    #[error(
        "packages are missing; as root:\n  apt-get update && apt-get install -y --no-install-recommends {}",
        .0.join(" ")
    )]
    Missing(Vec<String>),
    /// apt-get failed.
    #[error(transparent)]
    Command(#[from] CommandError),
}

/// Returns the installed version of `package`; `None` if it is not installed.
///
/// # Errors
/// If dpkg-query cannot be run at all.
pub fn version(package: &str) -> Result<Option<String>, PackageError> {
    let output = Command::new("dpkg-query")
        .args(["-W", "-f=${db:Status-Status} ${Version}\n", package])
        .output()
        .map_err(PackageError::NotDebian)?;
    Ok(installed_version(&String::from_utf8_lossy(&output.stdout)))
}

/// Returns the version in dpkg-query's output, `STATUS VERSION`; a removed package still has a
/// line.
fn installed_version(answer: &str) -> Option<String> {
    let versions = answer
        .lines()
        .filter_map(|line| line.strip_prefix("installed "));
    versions.map(str::to_owned).next()
}

/// Installs the missing ones of `packages` if this process is root.
///
/// # Errors
/// [`PackageError::Missing`] names the command to run if it is not root.
pub fn require(packages: &[&str], log: &Path, progress: &dyn Progress) -> Result<(), PackageError> {
    let mut missing = Vec::new();
    for package in packages {
        if version(package)?.is_none() {
            missing.push((*package).to_owned());
        }
    }
    if missing.is_empty() {
        return Ok(());
    }
    if !rustix::process::geteuid().is_root() {
        return Err(PackageError::Missing(missing));
    }
    progress.phase(&format!("installing {}", missing.join(" ")));
    let mut update = Command::new("apt-get");
    update.arg("update");
    apt::run("apt-get update", &mut update, log, progress)?;
    let mut install = Command::new("apt-get");
    install.env("DEBIAN_FRONTEND", "noninteractive");
    install.args(["install", "-y", "--no-install-recommends"]);
    install.args(&missing);
    apt::run("apt-get install", &mut install, log, progress)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_an_installed_package_has_a_version() {
        for (answer, expected) in [
            ("installed 6.1.192-2\n", Some("6.1.192-2")),
            ("config-files 1.0\n", None),
            ("not-installed \n", None),
            ("", None),
        ] {
            assert_eq!(installed_version(answer).as_deref(), expected, "{answer:?}");
        }
    }

    #[test]
    fn the_error_is_a_line_to_copy() {
        let error = PackageError::Missing(vec!["flex".into(), "bc".into()]).to_string();
        let line = error.lines().last().unwrap_or_default().trim();
        assert_eq!(
            line,
            "apt-get update && apt-get install -y --no-install-recommends flex bc"
        );
    }
}

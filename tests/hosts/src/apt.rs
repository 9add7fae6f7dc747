//! Fetches source packages from any suite of Debian, without changing the lists of this machine.
//!
//! The caller names package and suite. apt runs with a sources file and lists of its own; it checks
//! signatures.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use guest::build::command::{self, CommandError};
use guest::{CacheError, Progress, failed};

/// The mirror if this machine's sources name none.
const DEFAULT_MIRROR: &str = "http://deb.debian.org/debian";
/// Seconds to wait for another apt that holds a lock.
const LOCK_TIMEOUT: &str = "DPkg::Lock::Timeout=300";

/// A source package could not be fetched.
#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    /// A file operation failed.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// apt failed: no mirror, no room, no such package.
    #[error(
        "cannot fetch the source of {package} ({suite}) from {mirror}; apt's output is in {}{}",
        log.display(),
        reason.as_deref().map(|line| format!(": {line}")).unwrap_or_default()
    )]
    Apt {
        /// The package.
        package: &'static str,
        /// The suite.
        suite: &'static str,
        /// The mirror that was tried.
        mirror: String,
        /// The file with apt's output.
        log: PathBuf,
        /// The first error line of apt.
        reason: Option<String>,
    },
    /// tar or patch failed.
    #[error(transparent)]
    Command(#[from] CommandError),
    /// apt fetched the package, and its archives are missing.
    #[error("apt-get source {package} left no {package}_VERSION.orig.tar and .debian.tar in {}", place.display())]
    NoArchive {
        /// The package.
        package: &'static str,
        /// The place searched.
        place: PathBuf,
    },
}

/// Fetches the source of `package` from `suite` into `place`, with Debian's patches applied.
/// Returns its folder.
///
/// # Errors
/// If apt cannot fetch or unpack it.
pub fn source(
    package: &'static str,
    suite: &'static str,
    place: &Path,
    log: &Path,
    progress: &dyn Progress,
) -> Result<PathBuf, SourceError> {
    progress.phase(&format!(
        "fetching the source of {package} from Debian's {suite}"
    ));
    let mirror = mirror();
    let lists = place.join("lists/partial");
    fs::create_dir_all(&lists).map_err(failed("make the directory", &lists))?;
    let sources = place.join("source.sources");
    let text = format!(
        "Types: deb-src\nURIs: {mirror}\nSuites: {suite}\nComponents: main\n\
         Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg\n"
    );
    fs::write(&sources, text).map_err(failed("write", &sources))?;
    for words in [&["update"][..], &["source", "--download-only", package]] {
        let mut apt = Command::new("apt-get");
        apt.current_dir(place)
            .env("LC_ALL", "C")
            .args(["-o", LOCK_TIMEOUT, "-o", "APT::Sandbox::User=root"])
            .args([
                "-o",
                "Acquire::Retries=3",
                "-o",
                "Dir::Etc::sourceparts=/dev/null",
            ])
            .args([
                "-o",
                "Dir::Cache::pkgcache=",
                "-o",
                "Dir::Cache::srcpkgcache=",
            ])
            .args(["-o", "APT::Update::Error-Mode=any"])
            .arg("-o")
            .arg(format!("Dir::Etc::sourcelist={}", sources.display()))
            .arg("-o")
            .arg(format!(
                "Dir::State::lists={}",
                place.join("lists").display()
            ))
            .args(words);
        let done = command::run(
            &format!("apt-get {}", words.join(" ")),
            &mut apt,
            log,
            |_| {},
        );
        if let Err(error) = done {
            // A mirror may lack the description, which is not needed: apt has checked the archives
            // against the suite's signed index.
            if words.contains(&package) && archives(package, place).is_some() {
                continue;
            }
            return Err(SourceError::Apt {
                package,
                suite,
                mirror,
                log: log.to_owned(),
                reason: first_error(&error),
            });
        }
    }
    let [original, debian] = archives(package, place).ok_or_else(|| SourceError::NoArchive {
        package,
        place: place.to_owned(),
    })?;
    let folder = place.join(package);
    fs::create_dir(&folder).map_err(failed("make the directory", &folder))?;
    for (archive, strip) in [
        (original, "--strip-components=1"),
        (debian, "--strip-components=0"),
    ] {
        let mut tar = Command::new("tar");
        tar.arg("-C")
            .arg(&folder)
            .arg(strip)
            .arg("-xf")
            .arg(&archive);
        command::run("tar", &mut tar, log, |_| {})?;
    }
    apply_series(&folder, log)?;
    Ok(folder)
}

/// Returns the archives that apt has put into `place`: the original source and Debian's changes.
fn archives(package: &str, place: &Path) -> Option<[PathBuf; 2]> {
    let archive = |kind: &str| find(place, |name| is_archive(name, package, kind));
    Some([archive("orig")?, archive("debian")?])
}

/// Applies Debian's own patches, in the order of their list.
fn apply_series(folder: &Path, log: &Path) -> Result<(), SourceError> {
    let patches = folder.join("debian/patches");
    // A package may have none.
    let series = fs::read_to_string(patches.join("series")).unwrap_or_default();
    for name in series.lines().filter_map(patch_name) {
        let mut patch = Command::new("patch");
        patch
            .current_dir(folder)
            .args(["-s", "-p1", "-i"])
            .arg(patches.join(name));
        command::run(&format!("patch < {name}"), &mut patch, log, |_| {})?;
    }
    Ok(())
}

/// Returns the name of a patch in a line of quilt's series file; `None` for comments and empty
/// lines.
fn patch_name(line: &str) -> Option<&str> {
    let before = line.split('#').next().unwrap_or_default();
    before.split_whitespace().next()
}

/// Returns whether a file is the archive of `kind`: `PACKAGE_VERSION.orig.tar.xz`,
/// `PACKAGE_VERSION.debian.tar.xz`.
fn is_archive(name: &str, package: &str, kind: &str) -> bool {
    let rest = name
        .strip_prefix(package)
        .and_then(|rest| rest.strip_prefix('_'));
    rest.is_some_and(|rest| {
        let mut parts = rest.rsplitn(3, '.');
        let compressed = matches!(parts.next(), Some("xz" | "gz" | "bz2" | "zst"));
        let before = parts.nth(1).unwrap_or_default();
        compressed && before.ends_with(&format!(".{kind}"))
    })
}

/// Returns a file of the folder whose name fits.
fn find(folder: &Path, fits: impl Fn(&str) -> bool) -> Option<PathBuf> {
    let entries = fs::read_dir(folder).ok()?.flatten();
    let mut fitting = entries.filter(|entry| fits(&entry.file_name().to_string_lossy()));
    fitting.next().map(|entry| entry.path())
}

/// Returns the first line of apt's output that begins with `E:`.
fn first_error(error: &CommandError) -> Option<String> {
    let CommandError::Failed { tail, .. } = error else {
        return Some(error.to_string());
    };
    let mut lines = tail.lines().filter_map(|line| line.strip_prefix("E: "));
    lines.next().map(str::to_owned)
}

/// Returns the mirror from which this machine's apt fetches Debian.
fn mirror() -> String {
    let files = [
        "/etc/apt/sources.list.d/debian.sources",
        "/etc/apt/sources.list",
    ];
    let texts = files
        .iter()
        .filter_map(|file| fs::read_to_string(file).ok());
    let found = texts.filter_map(|text| mirror_in(&text)).next();
    found.unwrap_or_else(|| DEFAULT_MIRROR.to_owned())
}

/// Returns the first mirror with Debian's main archive in a sources file of either format.
fn mirror_in(text: &str) -> Option<String> {
    let is_main = |uri: &&str| uri.trim_end_matches('/').ends_with("/debian");
    let uris = text.lines().flat_map(|line| {
        let words = match line.strip_prefix("URIs:") {
            Some(rest) => rest.split_whitespace(),
            None if line.starts_with("deb ") => line.split_whitespace(),
            None => "".split_whitespace(),
        };
        words.filter(|word| word.contains("://"))
    });
    uris.filter(is_main).map(str::to_owned).next()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_archives_of_a_package_are_known_by_their_names() {
        for (name, kind, expected) in [
            ("qemu_7.2+dfsg.orig.tar.xz", "orig", true),
            ("qemu_7.2+dfsg-7+deb12u18.debian.tar.xz", "debian", true),
            ("qemu_7.2+dfsg-7+deb12u18.debian.tar.xz", "orig", false),
            ("qemu_7.2+dfsg-7+deb12u18.dsc", "debian", false),
            ("qemu_7.2+dfsg.orig.tar.xz.FAILED", "orig", false),
            ("qemu-extra_1.orig.tar.xz", "orig", false),
        ] {
            assert_eq!(is_archive(name, "qemu", kind), expected, "{name} {kind}");
        }
    }

    #[test]
    fn patches_are_read_from_quilts_series() {
        for (line, expected) in [
            ("v7.2.1.diff", Some("v7.2.1.diff")),
            ("fix.patch -p1 # why", Some("fix.patch")),
            ("# nothing", None),
            ("", None),
        ] {
            assert_eq!(patch_name(line), expected);
        }
    }

    #[test]
    fn the_machines_own_mirror_is_used() {
        let deb822 = "Types: deb\n# http://snapshot.example/debian\nURIs: http://mirror.example/debian\nSuites: bookworm\n";
        let security = "URIs: http://deb.debian.org/debian-security\n";
        let old = "deb https://packages.example/apt x main\ndeb [arch=amd64] http://old.example/debian/ bookworm main\n";
        for (text, expected) in [
            (deb822, Some("http://mirror.example/debian")),
            (security, None),
            (old, Some("http://old.example/debian/")),
            ("", None),
        ] {
            assert_eq!(mirror_in(text).as_deref(), expected, "{text:?}");
        }
    }
}

//! Debian's suites as apt sees them: the machine's own, or another by a folder of lists in the
//! cache. The machine's own lists are not changed.
//!
//! The mirror is the one that the machine's apt uses for Debian. The second is
//! `archive.debian.org`, which has old suites.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::build::apt;
use crate::build::command::CommandError;
use crate::cache::{Cache, CacheError, Lock, failed};
use crate::progress::Progress;

/// The mirror of Debian if the machine's apt names none.
const MIRROR: &str = "http://deb.debian.org/debian";
/// The mirror with suites that Debian no longer supports.
const OLD: &str = "http://archive.debian.org/debian";
/// The keys that Debian signs with.
const KEYS: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";
/// apt's words for a suite that a mirror does not have.
const NO_SUITE: &str = "does not have a Release file";

/// A suite could not be read.
#[derive(Debug, thiserror::Error)]
pub enum SuiteError {
    /// The name is not a suite's name.
    #[error(
        "invalid Debian suite {0:?}: expected a name such as bookworm, trixie-backports or sid"
    )]
    Name(String),
    /// No mirror has it.
    #[error(
        "Debian has no suite {suite} at {mirrors}: such as bullseye, bookworm, trixie, trixie-backports or sid"
    )]
    Unknown {
        /// The name of the suite.
        suite: String,
        /// The mirrors that were tried.
        mirrors: String,
    },
    /// The lists of the suite cannot be fetched.
    #[error("the suite {suite} cannot be read from {mirror}: {why} (apt's output is in {})", log.display())]
    Mirror {
        /// The name of the suite.
        suite: String,
        /// The mirror.
        mirror: String,
        /// apt's first complaint.
        why: String,
        /// The log with all of apt's output.
        log: PathBuf,
    },
}

/// The suites that apt reads.
#[derive(Debug)]
pub(crate) struct Archive {
    options: Vec<String>,
    /// The suite, unless it is the machine's own sources.
    suite: Option<String>,
}

impl Archive {
    /// Returns the machine's own sources.
    pub(crate) fn of_machine() -> Self {
        Self {
            // apt's own unprivileged user may not write to the cache, and would only warn about
            // that.
            options: vec!["APT::Sandbox::User=root".to_owned()],
            suite: None,
        }
    }

    /// Returns one suite, whose lists are fetched anew.
    ///
    /// # Errors
    /// If there is no such suite, or no mirror can be reached.
    pub(crate) fn of_suite(
        suite: &str,
        cache: &Cache,
        _lock: &Lock,
        log: &Path,
        progress: &dyn Progress,
    ) -> Result<Self, ArchiveError> {
        let well_formed = suite.starts_with(|c: char| c.is_ascii_lowercase())
            && suite
                .chars()
                .all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-');
        if !well_formed {
            return Err(SuiteError::Name(suite.to_owned()).into());
        }
        let own = mirror_of_machine(Path::new("/etc/apt"));
        let unknown = |looked_at: String| SuiteError::Unknown {
            suite: suite.to_owned(),
            mirrors: looked_at,
        };
        progress.phase(&format!("reading the lists of Debian's {suite}"));
        let folder = cache.root().join(format!("apt-{suite}"));
        let security = security_of(&own.uri);
        let places = [
            (own.uri.as_str(), security.as_deref()),
            (&own.uri, None),
            (OLD, None),
        ];
        for (mirror, security) in places {
            let archive = Self::in_folder(&folder, suite, (mirror, security), &own.keys)?;
            let mut update = archive.command("apt-get");
            update.arg("update");
            let tail = match apt::run("apt-get update", &mut update, log, progress) {
                Ok(()) => return Ok(archive),
                Err(CommandError::Failed { tail, .. }) => tail,
                Err(error) => return Err(error.into()),
            };
            let has_it_not = tail.contains(NO_SUITE);
            match (mirror == OLD, has_it_not) {
                (false, true) => {}
                (true, true) => break,
                // The machine's own mirror has answered already.
                (true, false) => {
                    let looked_at = format!("{} ({OLD} cannot be read)", own.uri);
                    return Err(unknown(looked_at).into());
                }
                (false, false) => {
                    return Err(SuiteError::Mirror {
                        suite: suite.to_owned(),
                        mirror: mirror.to_owned(),
                        why: complaint(&tail),
                        log: log.to_owned(),
                    }
                    .into());
                }
            }
        }
        Err(unknown(format!("{} or {OLD}", own.uri)).into())
    }

    /// Makes a folder with apt's whole state of `suite`, and of its security updates if their
    /// mirror is given.
    fn in_folder(
        folder: &Path,
        suite: &str,
        (mirror, security): (&str, Option<&str>),
        keys: &str,
    ) -> Result<Self, ArchiveError> {
        for part in ["lists/partial", "cache/archives/partial"] {
            let path = folder.join(part);
            fs::create_dir_all(&path).map_err(failed("make the directory", &path))?;
        }
        let sources = folder.join("suite.sources");
        let part = |uri: &str, suite: &str| {
            format!(
                "Types: deb\nURIs: {uri}\nSuites: {suite}\nComponents: main\nSigned-By: {keys}\n\n"
            )
        };
        let mut text = part(mirror, suite);
        if let Some(security) = security {
            text += &part(security, &format!("{suite}-security"));
        }
        fs::write(&sources, text).map_err(failed("write", &sources))?;
        let mut archive = Self::of_machine();
        archive.suite = Some(suite.to_owned());
        archive.options.extend([
            format!("Dir::Etc::sourcelist={}", sources.display()),
            "Dir::Etc::sourceparts=/dev/null".to_owned(),
            format!("Dir::State::lists={}", folder.join("lists").display()),
            format!("Dir::Cache={}", folder.join("cache").display()),
            "Acquire::Languages=none".to_owned(),
            "APT::Update::Error-Mode=any".to_owned(),
            // An unsupported suite is not signed anew.
            format!(
                "Acquire::Check-Valid-Until={}",
                if mirror == OLD { "no" } else { "yes" }
            ),
        ]);
        Ok(archive)
    }

    /// Returns the suite, unless it is the machine's own sources.
    pub(crate) fn suite(&self) -> Option<&str> {
        self.suite.as_deref()
    }

    /// Returns an apt-get or apt-cache command for this archive.
    pub(crate) fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command.env("LC_ALL", "C");
        for option in &self.options {
            command.args(["-o", option]);
        }
        command
    }
}

/// An [`Archive`] could not be made.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ArchiveError {
    #[error(transparent)]
    Cache(#[from] CacheError),
    #[error(transparent)]
    Command(#[from] CommandError),
    #[error(transparent)]
    Suite(#[from] SuiteError),
}

/// Returns the first of apt's lines that names the error.
fn complaint(tail: &str) -> String {
    let lines = || tail.lines().map(str::trim);
    let found = lines()
        .find(|line| line.starts_with("E:"))
        .or_else(|| lines().find(|line| line.starts_with("Err:") || line.starts_with("W:")));
    found
        .or_else(|| lines().next_back())
        .unwrap_or_default()
        .to_owned()
}

/// Returns the address of a mirror's security updates, which have newer kernels of a stable suite.
/// It is beside the mirror, as on `deb.debian.org`.
fn security_of(mirror: &str) -> Option<String> {
    let beside = mirror.trim_end_matches('/').strip_suffix("/debian")?;
    Some(format!("{beside}/debian-security"))
}

/// A mirror, and the file of the keys that it is checked with.
#[derive(Debug, PartialEq, Eq)]
struct Mirror {
    uri: String,
    keys: String,
}

/// Returns the mirror from which the apt configured in `folder` fetches Debian itself.
fn mirror_of_machine(folder: &Path) -> Mirror {
    let parts = fs::read_dir(folder.join("sources.list.d"));
    let mut files: Vec<PathBuf> = parts
        .into_iter()
        .flatten()
        .flatten()
        .map(|e| e.path())
        .collect();
    files.push(folder.join("sources.list"));
    files.sort();
    let texts = files
        .iter()
        .filter_map(|file| fs::read_to_string(file).ok());
    let found = texts
        .into_iter()
        .find_map(|text| in_stanzas(&text).or_else(|| in_lines(&text)));
    found.unwrap_or_else(|| Mirror {
        uri: MIRROR.to_owned(),
        keys: KEYS.to_owned(),
    })
}

/// Returns whether an address is of Debian itself, not of its security updates or of other
/// packages.
fn is_debian(uri: &str) -> bool {
    uri.starts_with("http") && uri.trim_end_matches('/').ends_with("/debian")
}

/// Returns the mirror in sources of apt's newer format (stanzas).
fn in_stanzas(text: &str) -> Option<Mirror> {
    text.split("\n\n").find_map(|stanza| {
        let field = |name: &str| {
            let mut lines = stanza.lines();
            let value = lines.find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
            value.map(str::trim)
        };
        let uri = field("URIs")?
            .split_whitespace()
            .find(|uri| is_debian(uri))?;
        let keys = field("Signed-By").filter(|keys| keys.starts_with('/'));
        Some(Mirror {
            uri: uri.to_owned(),
            keys: keys.unwrap_or(KEYS).to_owned(),
        })
    })
}

/// Returns the mirror in sources of one line each.
fn in_lines(text: &str) -> Option<Mirror> {
    let lines = text.lines().map(str::trim);
    let mut uris = lines
        .filter(|line| line.starts_with("deb "))
        .filter_map(|line| line.split_whitespace().find(|word| is_debian(word)));
    uris.next().map(|uri| Mirror {
        uri: uri.to_owned(),
        keys: KEYS.to_owned(),
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::progress::Silent;

    #[test]
    fn the_machines_mirror_is_taken() {
        let folder = tempfile::tempdir().unwrap();
        let parts = folder.path().join("sources.list.d");
        fs::create_dir(&parts).unwrap();
        let expect = |uri: &str, keys: &str| {
            let found = mirror_of_machine(folder.path());
            assert_eq!((found.uri.as_str(), found.keys.as_str()), (uri, keys));
        };
        expect(MIRROR, KEYS);
        let line = "# deb http://old.example/debian x main\ndeb [arch=amd64] https://m.example/debian/ bookworm main\n";
        fs::write(folder.path().join("sources.list"), line).unwrap();
        expect("https://m.example/debian/", KEYS);
        let other = "Types: deb\nURIs: https://deb.nodesource.com/node_20.x\nSuites: nodistro\n";
        fs::write(parts.join("a.sources"), other).unwrap();
        let debian = "Types: deb\nURIs: http://n.example/debian-security\nSuites: bookworm-security\n\n\
            Types: deb\nURIs: http://n.example/debian\nSuites: bookworm\nSigned-By: /keys/d.gpg\n";
        fs::write(parts.join("debian.sources"), debian).unwrap();
        fs::write(folder.path().join("sources.list"), "").unwrap();
        expect("http://n.example/debian", "/keys/d.gpg");
    }

    #[test]
    fn a_name_that_is_no_suites_never_comes_to_apt() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::at(folder.path()).unwrap();
        let lock = cache.lock("debian-package", &Silent).unwrap();
        let log = folder.path().join("log");
        for name in ["", "../x", "Bookworm", "-o", "trixie main\nDeb", "7"] {
            let made = Archive::of_suite(name, &cache, &lock, &log, &Silent);
            let text = made.err().unwrap().to_string();
            assert!(text.contains("invalid Debian suite"), "{text}");
        }
        assert!(!log.exists());
    }

    /// Checks with apt's output about a mirror that does not exist.
    #[test]
    fn apts_first_complaint_is_told() {
        let unreachable = "Err:1 http://m.invalid/debian sid InRelease\n  Could not resolve 'm.invalid'\n\
            Reading package lists...\nE: Failed to fetch http://m.invalid/debian/dists/sid/InRelease  Could not resolve 'm.invalid'\n\
            E: Some index files failed to download.";
        assert_eq!(
            complaint(unreachable),
            "E: Failed to fetch http://m.invalid/debian/dists/sid/InRelease  Could not resolve 'm.invalid'"
        );
        assert_eq!(complaint("W: one\nend"), "W: one");
        assert_eq!(complaint("end"), "end");
    }

    #[test]
    fn apt_is_told_to_leave_the_machines_lists_alone() {
        let folder = tempfile::tempdir().unwrap();
        let archive = Archive::in_folder(folder.path(), "sid", (MIRROR, None), KEYS).unwrap();
        let command = archive.command("apt-get");
        let words: Vec<_> = command.get_args().map(|w| w.to_string_lossy()).collect();
        for name in ["Dir::Etc::sourcelist", "Dir::State::lists", "Dir::Cache"] {
            let option = format!("{name}={}", folder.path().display());
            assert!(
                words.iter().any(|word| word.starts_with(&option)),
                "{words:?}"
            );
        }
        assert!(
            words
                .iter()
                .any(|word| word == "Dir::Etc::sourceparts=/dev/null")
        );
        let sources = fs::read_to_string(folder.path().join("suite.sources")).unwrap();
        assert!(sources.contains("Suites: sid\n"), "{sources}");
        assert_eq!(sources.matches("Types:").count(), 1, "{sources}");
    }

    #[test]
    fn newer_kernels_of_a_stable_suite_are_among_its_security_updates() {
        let folder = tempfile::tempdir().unwrap();
        let security = security_of("http://n.example/debian/");
        assert_eq!(
            security.as_deref(),
            Some("http://n.example/debian-security")
        );
        assert_eq!(security_of("http://n.example/mirror"), None);
        let mirrors = (MIRROR, security.as_deref());
        Archive::in_folder(folder.path(), "bookworm", mirrors, KEYS).unwrap();
        let sources = fs::read_to_string(folder.path().join("suite.sources")).unwrap();
        let places = in_stanzas(&sources).map(|found| found.uri);
        assert_eq!(places.as_deref(), Some(MIRROR));
        let expected = "URIs: http://n.example/debian-security\nSuites: bookworm-security\n";
        assert!(sources.contains(expected), "{sources}");
    }
}

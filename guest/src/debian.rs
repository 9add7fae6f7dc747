//! Debian's own packages as files: the cloud kernel, fetched with apt and unpacked, not installed.
//!
//! The caller owns what is done with the files; apt's configuration decides which archive they come from, and apt checks signatures.
//! A package once fetched is kept and not asked for again: remove it from the cache to get a newer one.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::cache::{Cache, CacheError, Lock, failed};
use crate::command::{self, CommandError};
use crate::progress::Progress;

/// The package that depends on the current cloud kernel.
const META_PACKAGE: &str = "linux-image-cloud-amd64";
/// The file in the cache that holds the name of the package that was current.
const CURRENT: &str = "current-cloud-kernel";
const PREFIX: &str = "linux-image-";
const SUFFIX: &str = "-cloud-amd64";

/// A package could not be fetched.
#[derive(Debug, thiserror::Error)]
pub enum DebianError {
    /// The cache.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// apt or dpkg-deb failed.
    #[error(transparent)]
    Command(#[from] CommandError),
    /// apt knows no such kernel.
    #[error(
        "apt knows no cloud kernel {asked}; it has: {}. `apt-get update`, or add the suite that has it (such as bookworm-backports) to its sources",
        if known.is_empty() { "none".to_owned() } else { known.join(", ") }
    )]
    NoKernel {
        /// Which was asked for.
        asked: String,
        /// Releases there are.
        known: Vec<String>,
    },
    /// A package has not what it should have.
    #[error("the package {package} has no {what} in {}", directory.display())]
    Contents {
        /// The package.
        package: String,
        /// What was looked for.
        what: &'static str,
        /// Where it was unpacked.
        directory: PathBuf,
    },
}

/// A kernel of Debian's, unpacked in the cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DebianKernel {
    /// Its release, as `uname -r` says, such as `6.1.0-56-cloud-amd64`.
    pub release: String,
    /// The bzImage.
    pub image: PathBuf,
    /// The directory of its modules.
    pub modules: PathBuf,
}

/// The cloud kernel: of `version` such as `6.12` or `6.1.0-56`, or else the one that was current when this was first asked.
///
/// # Errors
/// If apt is not there, knows no such kernel, or cannot fetch it; and if the package is not as expected.
pub fn cloud_kernel(
    cache: &Cache,
    version: Option<&str>,
    progress: &dyn Progress,
) -> Result<DebianKernel, DebianError> {
    if let Some(found) = fetched(cache, version) {
        return found;
    }
    let lock = cache.lock("debian-package", progress)?;
    if let Some(found) = fetched(cache, version) {
        return found;
    }
    let log = cache.root().join("debian.log");
    let package = match resolve(version, &log) {
        // a fresh machine has no package lists
        Err(DebianError::NoKernel { .. }) if rustix::process::geteuid().is_root() => {
            progress.phase("reading Debian's package lists");
            let mut update = Command::new("apt-get");
            command::run("apt-get update", update.arg("update"), &log, |_| {})?;
            resolve(version, &log)?
        }
        answer => answer?,
    };
    let directory = match cache.entry(&entry_name(&package)) {
        Some(directory) => directory,
        None => download(&package, cache, &lock, &log, progress)?,
    };
    if version.is_none() {
        let path = cache.root().join(CURRENT);
        fs::write(&path, &package).map_err(failed("write", &path))?;
    }
    kernel_in(&package, &directory)
}

/// The package `name`, unpacked: a directory with its files.
///
/// # Errors
/// If apt cannot fetch it.
pub fn fetch(name: &str, cache: &Cache, progress: &dyn Progress) -> Result<PathBuf, DebianError> {
    if let Some(directory) = cache.entry(&entry_name(name)) {
        return Ok(directory);
    }
    let lock = cache.lock("debian-package", progress)?;
    if let Some(directory) = cache.entry(&entry_name(name)) {
        return Ok(directory);
    }
    let log = cache.root().join("debian.log");
    download(name, cache, &lock, &log, progress)
}

fn entry_name(package: &str) -> String {
    format!("debian-{package}")
}

/// A kernel that was fetched before.
fn fetched(cache: &Cache, version: Option<&str>) -> Option<Result<DebianKernel, DebianError>> {
    let package = match version {
        None => fs::read_to_string(cache.root().join(CURRENT)).ok()?,
        Some(_) => {
            let entries = fs::read_dir(cache.root()).ok()?;
            let packages: Vec<String> = entries
                .flatten()
                .filter_map(|entry| entry.file_name().into_string().ok())
                .filter_map(|name| name.strip_prefix("debian-").map(str::to_owned))
                .collect();
            choose(packages.iter().map(String::as_str), version)?
        }
    };
    let directory = cache.entry(&entry_name(&package))?;
    Some(kernel_in(&package, &directory))
}

/// The package that apt would take.
fn resolve(version: Option<&str>, log: &Path) -> Result<String, DebianError> {
    if version.is_none() {
        let mut depends = Command::new("apt-cache");
        depends
            .args(["depends", "--important", META_PACKAGE])
            .env("LC_ALL", "C");
        // a package that apt does not know is an error of apt's; the list below is the better message
        if let Ok(text) = command::output("apt-cache depends", &mut depends, log)
            && let Some(package) = dependency(&text)
        {
            return Ok(package.to_owned());
        }
    }
    let mut names = Command::new("apt-cache");
    names.args(["pkgnames", PREFIX]);
    let text = command::output("apt-cache pkgnames", &mut names, log)?;
    choose(text.lines(), version).ok_or_else(|| {
        let mut known: Vec<_> = text
            .lines()
            .filter_map(release_of)
            .map(str::to_owned)
            .collect();
        known.sort_by_key(|release| version_key(release));
        DebianError::NoKernel {
            asked: version.unwrap_or("of any version").to_owned(),
            known,
        }
    })
}

/// The kernel that the meta package depends on, from `apt-cache depends`.
fn dependency(text: &str) -> Option<&str> {
    let mut dependencies = text
        .lines()
        .filter_map(|line| line.trim().strip_prefix("Depends: "));
    dependencies.rfind(|name| release_of(name).is_some())
}

/// The release in a cloud kernel's package name; `None` for meta packages and the unsigned and debugging ones.
fn release_of(package: &str) -> Option<&str> {
    let release = package.strip_prefix(PREFIX)?;
    let version = release.strip_suffix(SUFFIX)?;
    // `6.12` alone is a meta package's
    (version_key(version).len() > 2).then_some(release)
}

/// The newest cloud kernel of `version` among package names.
fn choose<'a>(packages: impl Iterator<Item = &'a str>, version: Option<&str>) -> Option<String> {
    packages
        .filter(|package| {
            release_of(package).is_some_and(|release| matches_version(release, version))
        })
        .max_by_key(|package| version_key(package.trim_end_matches(SUFFIX)))
        .map(str::to_owned)
}

/// Whether `release` is of `version`, which may leave out later parts: 6.1 means 6.1.0-56 but not 6.12.
fn matches_version(release: &str, version: Option<&str>) -> bool {
    version.is_none_or(|version| {
        let rest = release.strip_prefix(version);
        rest.is_some_and(|rest| !rest.starts_with(|c: char| c.is_ascii_digit()))
    })
}

/// The numbers in a name, so that 6.1.0-9 comes before 6.1.0-10.
fn version_key(name: &str) -> Vec<u64> {
    let numbers = name.split(|c: char| !c.is_ascii_digit());
    numbers.filter_map(|number| number.parse().ok()).collect()
}

/// Fetches and unpacks `package` as a cache entry.
fn download(
    package: &str,
    cache: &Cache,
    lock: &Lock,
    log: &Path,
    progress: &dyn Progress,
) -> Result<PathBuf, DebianError> {
    progress.phase(&format!("fetching {package} from Debian"));
    let scratch = cache.scratch("debian-package", lock)?;
    let mut apt = Command::new("apt-get");
    // apt's own unprivileged user may not write here, and says so in vain
    apt.args(["-o", "APT::Sandbox::User=root", "download", package]);
    apt.current_dir(scratch.path());
    command::run("apt-get download", &mut apt, log, |_| {})?;
    let files = fs::read_dir(scratch.path()).map_err(failed("list", scratch.path()))?;
    let archive = files
        .flatten()
        .map(|file| file.path())
        .find(|path| path.extension().is_some_and(|e| e == "deb"))
        .ok_or_else(|| DebianError::Contents {
            package: package.to_owned(),
            what: ".deb file",
            directory: scratch.path().to_owned(),
        })?;
    let out = scratch.path().join("out");
    let mut unpack = Command::new("dpkg-deb");
    unpack.arg("-x").arg(&archive).arg(&out);
    command::run("dpkg-deb -x", &mut unpack, log, |_| {})?;
    Ok(cache.publish(&out, &entry_name(package))?)
}

/// Image and modules of an unpacked package.
fn kernel_in(package: &str, directory: &Path) -> Result<DebianKernel, DebianError> {
    let missing = |what| DebianError::Contents {
        package: package.to_owned(),
        what,
        directory: directory.to_owned(),
    };
    let release = release_of(package).ok_or_else(|| missing("kernel release in its name"))?;
    let image = directory.join("boot").join(format!("vmlinuz-{release}"));
    if !image.is_file() {
        return Err(missing("boot/vmlinuz-RELEASE"));
    }
    // merged /usr: newer packages have everything there
    let places =
        ["lib/modules", "usr/lib/modules"].map(|place| directory.join(place).join(release));
    let modules = places.iter().find(|path| path.is_dir());
    Ok(DebianKernel {
        release: release.to_owned(),
        image,
        modules: modules
            .cloned()
            .ok_or_else(|| missing("lib/modules/RELEASE"))?,
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::progress::Silent;

    const PACKAGES: &str = "linux-image-6.1.0-9-cloud-amd64\nlinux-image-6.1.0-56-cloud-amd64\n\
        linux-image-6.1.0-57-cloud-amd64-unsigned\nlinux-image-6.12.9+deb12-cloud-amd64-dbg\n\
        linux-image-6.12.9+deb12-cloud-amd64\nlinux-image-6.12.12+deb12-cloud-amd64\n\
        linux-image-cloud-amd64\nlinux-image-amd64\nlinux-image-6.12-cloud-amd64\nlinux-image-6.1.0-58-amd64\n";

    #[test]
    fn the_newest_signed_cloud_kernel_of_the_version_is_chosen() {
        for (version, expected) in [
            (None, Some("linux-image-6.12.12+deb12-cloud-amd64")),
            (Some("6.1"), Some("linux-image-6.1.0-56-cloud-amd64")),
            (Some("6.1.0-9"), Some("linux-image-6.1.0-9-cloud-amd64")),
            (Some("6.12"), Some("linux-image-6.12.12+deb12-cloud-amd64")),
            (Some("6.12.9"), Some("linux-image-6.12.9+deb12-cloud-amd64")),
            (Some("5.10"), None),
        ] {
            assert_eq!(
                choose(PACKAGES.lines(), version).as_deref(),
                expected,
                "{version:?}"
            );
        }
    }

    #[test]
    fn the_meta_packages_dependency_is_read() {
        let text = "linux-image-cloud-amd64\n  Depends: linux-image-6.1.0-56-cloud-amd64\n";
        assert_eq!(dependency(text), Some("linux-image-6.1.0-56-cloud-amd64"));
        assert_eq!(dependency("linux-image-cloud-amd64\n"), None);
    }

    #[test]
    fn an_unknown_kernel_is_answered_with_what_there_is() {
        let error = DebianError::NoKernel {
            asked: "7.0".to_owned(),
            known: vec!["6.1.0-56-cloud-amd64".to_owned()],
        };
        let message = error.to_string();
        assert!(
            message.contains("no cloud kernel 7.0; it has: 6.1.0-56-cloud-amd64"),
            "{message}"
        );
    }

    #[test]
    fn a_fetched_kernel_is_found_without_apt() {
        let directory = tempfile::tempdir().unwrap();
        let cache = Cache::at(directory.path()).unwrap();
        let release = "6.1.0-56-cloud-amd64";
        let entry = directory
            .path()
            .join(format!("debian-linux-image-{release}"));
        fs::create_dir_all(entry.join("boot")).unwrap();
        fs::create_dir_all(entry.join("lib/modules").join(release)).unwrap();
        fs::write(entry.join("boot").join(format!("vmlinuz-{release}")), "x").unwrap();
        assert!(fetched(&cache, None).is_none());
        fs::write(
            directory.path().join(CURRENT),
            format!("linux-image-{release}"),
        )
        .unwrap();
        for version in [None, Some("6.1")] {
            let kernel = cloud_kernel(&cache, version, &Silent).unwrap();
            assert_eq!(kernel.release, release);
            assert!(kernel.image.is_file() && kernel.modules.is_dir());
        }
        assert!(fetched(&cache, Some("6.12")).is_none());
    }

    #[test]
    fn a_package_without_an_image_is_named() {
        let directory = tempfile::tempdir().unwrap();
        let package = "linux-image-6.1.0-56-cloud-amd64";
        let error = kernel_in(package, directory.path())
            .unwrap_err()
            .to_string();
        assert!(
            error.contains(package) && error.contains("vmlinuz"),
            "{error}"
        );
    }
}

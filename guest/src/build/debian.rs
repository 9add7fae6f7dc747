//! Fetches Debian's own packages as files: kernels are unpacked, not installed.
//!
//! The caller owns the use of the files. apt's configuration selects the archive, or the name of a
//! suite does ([`suite_kernel`]); apt checks signatures. A fetched package is kept and not
//! requested again: remove it from the cache to get a newer one. Since 6.19 a kernel is several
//! packages, which become one folder.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::build::apt;
use crate::build::archive::{Archive, ArchiveError, SuiteError};
use crate::build::command::{self, CommandError};
use crate::cache::{Cache, CacheError, Lock, failed};
use crate::progress::Progress;

/// The file in the cache that holds the name of the package that was current.
const CURRENT: &str = "current-cloud-kernel";
const PREFIX: &str = "linux-image-";
const SUFFIX: &str = "-amd64";
/// The name prefixes, before the release, of the packages that accompany an image's since 6.19.
const PARTS: [&str; 2] = ["linux-binary-", "linux-modules-"];

/// The kind of machines that a kernel is built for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Flavour {
    /// Virtual machines.
    Cloud,
    /// Virtual and physical machines.
    Generic,
}

impl Flavour {
    /// Returns the package that depends on the current kernel.
    fn meta_package(self) -> &'static str {
        match self {
            Self::Cloud => "linux-image-cloud-amd64",
            Self::Generic => "linux-image-amd64",
        }
    }

    /// Returns whether `release` is of this flavour.
    fn is_of(self, release: &str) -> bool {
        let version = release.strip_suffix(SUFFIX).unwrap_or_default();
        let cloud = version.ends_with("-cloud");
        match self {
            Self::Cloud => cloud,
            Self::Generic => !cloud && !version.ends_with("-rt"),
        }
    }
}

/// A package could not be fetched.
#[derive(Debug, thiserror::Error)]
pub enum DebianError {
    /// The cache cannot be used.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// apt or dpkg-deb failed.
    #[error(transparent)]
    Command(#[from] CommandError),
    /// apt has no such kernel.
    #[error(
        "apt knows no cloud kernel {asked}; it has: {}. `apt-get update`, or add the suite that has it (such as bookworm-backports) to its sources",
        if known.is_empty() { "none".to_owned() } else { known.join(", ") }
    )]
    NoKernel {
        /// The requested kernel.
        asked: String,
        /// The available releases.
        known: Vec<String>,
    },
    /// There is no such suite, or no mirror has it.
    #[error(transparent)]
    Suite(#[from] SuiteError),
    /// The suite has no such kernel.
    #[error("Debian's {suite} has no package {package}, or it depends on no kernel")]
    NotInSuite {
        /// The suite.
        suite: String,
        /// The package that should depend on a kernel.
        package: &'static str,
    },
    /// A package lacks an expected file.
    #[error("the package {package} has no {what} in {}", directory.display())]
    Contents {
        /// The package.
        package: String,
        /// The missing file.
        what: &'static str,
        /// The folder into which it was unpacked.
        directory: PathBuf,
    },
}

/// A Debian kernel, unpacked in the cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DebianKernel {
    /// The release, as `uname -r` prints it, such as `6.1.0-56-cloud-amd64`.
    pub release: String,
    /// The bzImage.
    pub image: PathBuf,
    /// The directory of its modules.
    pub modules: PathBuf,
}

/// Returns the cloud kernel of `version`, such as `6.12` or `6.1.0-56`. Without a version it is the
/// one that was current at the first request.
///
/// # Errors
/// If apt is not there, knows no such kernel, or cannot fetch it; and if the package is not as
/// expected.
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
    let archive = Archive::of_machine();
    let package = match resolve(version, &log) {
        // A fresh machine has no package lists.
        Err(DebianError::NoKernel { .. }) if rustix::process::geteuid().is_root() => {
            progress.phase("reading Debian's package lists");
            let mut update = Command::new("apt-get");
            apt::run("apt-get update", update.arg("update"), &log, progress)?;
            resolve(version, &log)?
        }
        answer => answer?,
    };
    let kernel = download_kernel(&package, &archive, cache, &lock, &log, progress)?;
    if version.is_none() {
        let path = cache.root().join(CURRENT);
        fs::write(&path, &package).map_err(failed("write", &path))?;
    }
    Ok(kernel)
}

/// Returns the kernel that was current in a suite such as `trixie-backports` at the first request.
/// The machine's own package lists are not changed.
///
/// # Errors
/// If apt is not there, there is no such suite or kernel, it cannot be fetched, or the package is
/// not as expected.
pub fn suite_kernel(
    cache: &Cache,
    suite: &str,
    flavour: Flavour,
    progress: &dyn Progress,
) -> Result<DebianKernel, DebianError> {
    let meta = flavour.meta_package();
    let current = cache.root().join(format!("current-{meta}-of-{suite}"));
    let kept = || {
        let package = fs::read_to_string(&current).ok()?;
        let directory = cache.entry(&entry_name(Some(suite), &package))?;
        Some(kernel_in(&package, &directory))
    };
    if let Some(found) = kept() {
        return found;
    }
    let lock = cache.lock("debian-package", progress)?;
    if let Some(found) = kept() {
        return found;
    }
    let log = cache.root().join("debian.log");
    let archive = Archive::of_suite(suite, cache, &lock, &log, progress)?;
    let missing = || DebianError::NotInSuite {
        suite: suite.to_owned(),
        package: meta,
    };
    let text = depends(meta, &archive, &log).map_err(|_| missing())?;
    let package = dependency(&text, flavour).ok_or_else(missing)?;
    let kernel = download_kernel(package, &archive, cache, &lock, &log, progress)?;
    fs::write(&current, package).map_err(failed("write", &current))?;
    Ok(kernel)
}

/// Returns the kernel of `package`, from the cache or fetched with the packages of its parts.
fn download_kernel(
    package: &str,
    archive: &Archive,
    cache: &Cache,
    lock: &Lock,
    log: &Path,
    progress: &dyn Progress,
) -> Result<DebianKernel, DebianError> {
    if let Some(directory) = cache.entry(&entry_name(archive.suite(), package)) {
        return kernel_in(package, &directory);
    }
    let text = depends(package, archive, log)?;
    let packages: Vec<&str> = std::iter::once(package)
        .chain(parts(package, &text))
        .collect();
    let check = |directory: &Path| kernel_in(package, directory).map(drop);
    let directory = download(&packages, archive, cache, lock, log, progress, &check)?;
    kernel_in(package, &directory)
}

/// Returns the package `name`, unpacked: a directory with its files.
///
/// # Errors
/// If apt cannot fetch it.
pub fn fetch(name: &str, cache: &Cache, progress: &dyn Progress) -> Result<PathBuf, DebianError> {
    if let Some(directory) = cache.entry(&entry_name(None, name)) {
        return Ok(directory);
    }
    let lock = cache.lock("debian-package", progress)?;
    if let Some(directory) = cache.entry(&entry_name(None, name)) {
        return Ok(directory);
    }
    let log = cache.root().join("debian.log");
    let archive = Archive::of_machine();
    download(&[name], &archive, cache, &lock, &log, progress, &|_| Ok(()))
}

/// Returns the name of a package's entry in the cache. A package of another suite does not serve
/// requests to the machine's own apt, which lacks the packages that belong to it.
fn entry_name(suite: Option<&str>, package: &str) -> String {
    match suite {
        Some(suite) => format!("debian-of-{suite}-{package}"),
        None => format!("debian-{package}"),
    }
}

/// Returns a kernel that was fetched before.
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
    let directory = cache.entry(&entry_name(None, &package))?;
    Some(kernel_in(&package, &directory))
}

/// Returns the package that apt would install.
fn resolve(version: Option<&str>, log: &Path) -> Result<String, DebianError> {
    if version.is_none() {
        // An unknown package is an error of apt's, for which the list below makes the better
        // message.
        let meta = Flavour::Cloud.meta_package();
        if let Ok(text) = depends(meta, &Archive::of_machine(), log)
            && let Some(package) = dependency(&text, Flavour::Cloud)
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
            .filter(|release| Flavour::Cloud.is_of(release))
            .map(str::to_owned)
            .collect();
        known.sort_by_key(|release| version_key(release));
        DebianError::NoKernel {
            asked: version.unwrap_or("of any version").to_owned(),
            known,
        }
    })
}

/// Returns the dependencies of a package, by apt-cache.
fn depends(package: &str, archive: &Archive, log: &Path) -> Result<String, CommandError> {
    let mut depends = archive.command("apt-cache");
    depends.args(["depends", "--important", package]);
    command::output("apt-cache depends", &mut depends, log)
}

/// Returns the packages that `apt-cache depends` names.
fn dependencies(text: &str) -> impl DoubleEndedIterator<Item = &str> {
    let lines = text.lines().map(str::trim);
    lines.filter_map(|line| line.strip_prefix("Depends: "))
}

/// Returns the kernel that the meta package depends on, from `apt-cache depends`.
fn dependency(text: &str, flavour: Flavour) -> Option<&str> {
    dependencies(text).rfind(|name| release_of(name).is_some_and(|release| flavour.is_of(release)))
}

/// Returns the packages with the parts of the kernel of `package`, from the `apt-cache depends` of
/// that.
fn parts<'a>(package: &str, text: &'a str) -> impl Iterator<Item = &'a str> {
    let release = release_of(package).unwrap_or_default().to_owned();
    dependencies(text).filter(move |name| {
        let of_part = PARTS.iter().find_map(|part| name.strip_prefix(part));
        of_part.is_some_and(|rest| rest == release)
    })
}

/// Returns the release in a kernel's package name; `None` for meta packages and the unsigned and
/// debugging ones.
fn release_of(package: &str) -> Option<&str> {
    let release = package.strip_prefix(PREFIX)?;
    let version = release.strip_suffix(SUFFIX)?;
    // `6.12` alone is a meta package's.
    (version_key(version).len() > 2).then_some(release)
}

/// Returns the newest cloud kernel of `version` among package names.
fn choose<'a>(packages: impl Iterator<Item = &'a str>, version: Option<&str>) -> Option<String> {
    packages
        .filter(|package| {
            release_of(package).is_some_and(|release| {
                Flavour::Cloud.is_of(release) && matches_version(release, version)
            })
        })
        .max_by_key(|package| version_key(package.trim_end_matches(SUFFIX)))
        .map(str::to_owned)
}

/// Returns whether `release` is of `version`, which may omit later parts: 6.1 means 6.1.0-56 but
/// not 6.12.
fn matches_version(release: &str, version: Option<&str>) -> bool {
    version.is_none_or(|version| {
        let rest = release.strip_prefix(version);
        rest.is_some_and(|rest| !rest.starts_with(|c: char| c.is_ascii_digit()))
    })
}

/// Returns the numbers in a name, so that 6.1.0-9 comes before 6.1.0-10.
fn version_key(name: &str) -> Vec<u64> {
    let numbers = name.split(|c: char| !c.is_ascii_digit());
    numbers.filter_map(|number| number.parse().ok()).collect()
}

/// Fetches `packages` and unpacks them as the cache entry of the first, if `check` finds the
/// expected files there.
fn download(
    packages: &[&str],
    archive: &Archive,
    cache: &Cache,
    lock: &Lock,
    log: &Path,
    progress: &dyn Progress,
    check: &dyn Fn(&Path) -> Result<(), DebianError>,
) -> Result<PathBuf, DebianError> {
    let first = packages.first().copied().unwrap_or_default();
    progress.phase(&format!("fetching {first} from Debian"));
    let scratch = cache.scratch("debian-package", lock)?;
    let mut apt = archive.command("apt-get");
    apt.arg("download").args(packages);
    apt.current_dir(scratch.path());
    apt::run("apt-get download", &mut apt, log, progress)?;
    let listed = fs::read_dir(scratch.path()).map_err(failed("list", scratch.path()))?;
    let files: Vec<PathBuf> = listed
        .flatten()
        .map(|file| file.path())
        .filter(|path| path.extension().is_some_and(|e| e == "deb"))
        .collect();
    if files.len() < packages.len() {
        return Err(DebianError::Contents {
            package: first.to_owned(),
            what: ".deb file",
            directory: scratch.path().to_owned(),
        });
    }
    let out = scratch.path().join("out");
    for file in files {
        let mut unpack = Command::new("dpkg-deb");
        unpack.arg("-x").arg(&file).arg(&out);
        command::run("dpkg-deb -x", &mut unpack, log, |_| {})?;
    }
    check(&out)?;
    Ok(cache.publish(&out, &entry_name(archive.suite(), first))?)
}

/// Returns the image and modules of an unpacked package.
fn kernel_in(package: &str, directory: &Path) -> Result<DebianKernel, DebianError> {
    let missing = |what| DebianError::Contents {
        package: package.to_owned(),
        what,
        directory: directory.to_owned(),
    };
    let release = release_of(package).ok_or_else(|| missing("kernel release in its name"))?;
    // Merged /usr: newer packages have everything there, and then the image beside the modules.
    let places =
        ["lib/modules", "usr/lib/modules"].map(|place| directory.join(place).join(release));
    let modules = places.iter().find(|path| path.join("kernel").is_dir());
    let modules = modules.ok_or_else(|| missing("lib/modules/RELEASE"))?;
    let images = [
        directory.join("boot").join(format!("vmlinuz-{release}")),
        modules.join("vmlinuz"),
    ];
    let image = images.into_iter().find(|path| path.is_file());
    Ok(DebianKernel {
        release: release.to_owned(),
        image: image
            .ok_or_else(|| missing("boot/vmlinuz-RELEASE or lib/modules/RELEASE/vmlinuz"))?,
        modules: modules.clone(),
    })
}

impl From<ArchiveError> for DebianError {
    fn from(error: ArchiveError) -> Self {
        match error {
            ArchiveError::Cache(error) => error.into(),
            ArchiveError::Command(error) => error.into(),
            ArchiveError::Suite(error) => error.into(),
        }
    }
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
        let cloud = |text| dependency(text, Flavour::Cloud);
        assert_eq!(cloud(text), Some("linux-image-6.1.0-56-cloud-amd64"));
        assert_eq!(cloud("linux-image-cloud-amd64\n"), None);
        let generic = "linux-image-amd64\n  Depends: linux-image-6.1.0-56-amd64\n";
        assert_eq!(cloud(generic), None);
        let found = dependency(generic, Flavour::Generic);
        assert_eq!(found, Some("linux-image-6.1.0-56-amd64"));
        assert_eq!(dependency(text, Flavour::Generic), None);
    }

    /// Checks with apt-cache's output for trixie-backports.
    #[test]
    fn a_kernel_of_several_packages_is_fetched_whole() {
        let meta = "linux-image-cloud-amd64\n  Depends: linux-base-cloud-amd64\n\
            \x20 Depends: linux-image-7.3.4+deb13-cloud-amd64\n  Depends: linux-modules-cloud-amd64\n";
        let package = "linux-image-7.3.4+deb13-cloud-amd64";
        assert_eq!(dependency(meta, Flavour::Cloud), Some(package));
        let text = "linux-image-7.3.4+deb13-cloud-amd64\n |Depends: dracut\n  Depends: initramfs-tools\n\
            \x20 Depends: linux-base-7.3.4+deb13-cloud-amd64\n  Depends: linux-binary-7.3.4+deb13-cloud-amd64\n\
            \x20 Depends: linux-modules-7.3.4+deb13-cloud-amd64\n";
        let found: Vec<&str> = parts(package, text).collect();
        assert_eq!(
            found,
            [
                "linux-binary-7.3.4+deb13-cloud-amd64",
                "linux-modules-7.3.4+deb13-cloud-amd64"
            ]
        );
    }

    #[test]
    fn the_image_is_found_wherever_packages_have_had_it() {
        let release = "7.2.13+deb14-cloud-amd64";
        let package = format!("{PREFIX}{release}");
        for (image, modules) in [
            (format!("boot/vmlinuz-{release}"), "lib/modules"),
            (format!("boot/vmlinuz-{release}"), "usr/lib/modules"),
            (
                format!("usr/lib/modules/{release}/vmlinuz"),
                "usr/lib/modules",
            ),
        ] {
            let folder = tempfile::tempdir().unwrap();
            let modules = folder.path().join(modules).join(release);
            fs::create_dir_all(modules.join("kernel")).unwrap();
            fs::create_dir_all(folder.path().join("boot")).unwrap();
            fs::write(folder.path().join(&image), "x").unwrap();
            let kernel = kernel_in(&package, folder.path()).unwrap();
            assert_eq!(kernel.image, folder.path().join(image));
            assert_eq!(kernel.modules, modules);
        }
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
        fs::create_dir_all(entry.join("lib/modules").join(release).join("kernel")).unwrap();
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
        let modules = directory
            .path()
            .join("lib/modules/6.1.0-56-cloud-amd64/kernel");
        fs::create_dir_all(modules).unwrap();
        let error = kernel_in(package, directory.path())
            .unwrap_err()
            .to_string();
        assert!(
            error.contains(package) && error.contains("vmlinuz"),
            "{error}"
        );
    }
}

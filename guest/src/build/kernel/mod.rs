//! Kernels for demos and tests, built from Debian's unchanged `linux-source-6.1`.
//!
//! The caller owns the machine and the words that a particular host needs on the command line. This
//! module owns packages, configuration, build and caching. The first call takes minutes; later ones
//! find the result and do nothing.
//!
//! * [`small`] boots fast where guest kernel code is interpreted: no tracing code, no modules. The
//!   file describes its types (BTF) in a section that is not loaded.
//! * [`rich`] adds what distributions have: ftrace, kprobes, jump labels, tracepoints, BPF,
//!   modules, BTF in memory.
//! * [`pc`] is the small one for a machine as distributions know it: its devices are on a PCI bus,
//!   and ACPI describes it.
//!
//! All are stripped of symbols and debug information, as a distribution's are; `System.map` lies
//! beside them.

mod build;
mod config;

use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use crate::build::make_error::MakeError;
use crate::build::packages;
use crate::cache::{Cache, short};
use crate::progress::Progress;

/// The version of the build steps, counted up with changes that the configuration does not show;
/// part of the cache key.
const BUILDER: u32 = 1;
/// The package with the source.
const SOURCE_PACKAGE: &str = "linux-source-6.1";
/// The packages of all programs that the build runs.
const PACKAGES: [&str; 14] = [
    SOURCE_PACKAGE,
    "gcc",
    "make",
    "binutils",
    "flex",
    "bison",
    "bc",
    "libelf-dev",
    "libssl-dev",
    "pahole",
    "xz-utils",
    "cpio",
    "rsync",
    "kmod",
];

const SMALL_CONFIG: &str = include_str!("../../../config/small.config");
const RICH_CONFIG: &str = include_str!("../../../config/rich.config");
const PC_CONFIG: &str = include_str!("../../../config/pc.config");

/// A kernel could not be built.
#[derive(Debug, thiserror::Error)]
pub enum BuildError {
    /// The cache, the packages, or a step of the build failed.
    #[error(transparent)]
    Make(MakeError),
    /// The source package is installed and its archive is missing.
    #[error("{SOURCE_PACKAGE} is installed and has no {}", .0.display())]
    NoSource(PathBuf),
    /// The kernel's configuration tool dropped or changed options.
    #[error("the {kernel} kernel's configuration differs from the requested one:\n  {}", unmet.join("\n  "))]
    Config {
        /// The kernel's name.
        kernel: &'static str,
        /// The unmet options, as `CONFIG_X: expected y, found n`.
        unmet: Vec<String>,
    },
}

impl<E> From<E> for BuildError
where
    MakeError: From<E>,
{
    fn from(error: E) -> Self {
        Self::Make(error.into())
    }
}

/// A word of the kernel command line, with its reason.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Word {
    /// The word.
    pub text: &'static str,
    /// The word's effect for a traced guest.
    pub reason: &'static str,
}

/// The command line that suits both kernels on any host. The machine adds the words that its host
/// and devices need.
pub const CMDLINE: [Word; 4] = [
    Word {
        text: "console=ttyS0",
        reason: "kernel messages and the shell are on the serial port",
    },
    Word {
        text: "quiet",
        reason: "every character of the boot messages is an exit to the host",
    },
    Word {
        text: "panic=-1",
        reason: "a panic resets at once, so the run ends instead of hanging",
    },
    Word {
        text: "reboot=k",
        reason: "a reset goes through port 0x64 and is seen by the host; no other way is tried first",
    },
];

/// Returns [`CMDLINE`] as text.
pub fn cmdline() -> String {
    CMDLINE.map(|word| word.text).join(" ")
}

/// A kernel in the cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Kernel {
    directory: PathBuf,
}

impl Kernel {
    /// Returns the path of the kernel: an ELF executable without symbols, with BTF in `.BTF`.
    pub fn vmlinux(&self) -> PathBuf {
        self.directory.join("vmlinux")
    }

    /// Returns the path of the linker's addresses and names: `ADDRESS TYPE NAME` a line.
    pub fn system_map(&self) -> PathBuf {
        self.directory.join("System.map")
    }

    /// Returns the path of the complete configuration.
    pub fn config(&self) -> PathBuf {
        self.directory.join("config")
    }

    /// Returns the directory of the loadable modules, `NAME.ko`; empty for the small kernel.
    pub fn modules(&self) -> PathBuf {
        self.directory.join("modules")
    }

    /// Returns the path of the compressed kernel that a boot loader accepts. It exists only if the
    /// recipe delivers it.
    pub fn bzimage(&self) -> PathBuf {
        self.directory.join("bzImage")
    }

    /// Returns the directory of all of these.
    pub fn directory(&self) -> &Path {
        &self.directory
    }
}

/// Returns the small kernel: the first build takes 3 to 4 minutes on two cores.
///
/// # Errors
/// If packages are missing and cannot be installed, or a step of the build fails.
pub fn small(cache: &Cache, progress: &dyn Progress) -> Result<Kernel, BuildError> {
    build(&SMALL, cache, progress)
}

/// Returns the rich kernel.
///
/// # Errors
/// As for [`small`].
pub fn rich(cache: &Cache, progress: &dyn Progress) -> Result<Kernel, BuildError> {
    build(&RICH, cache, progress)
}

/// Returns the PC kernel.
///
/// # Errors
/// As for [`small`].
pub fn pc(cache: &Cache, progress: &dyn Progress) -> Result<Kernel, BuildError> {
    build(&PC, cache, progress)
}

/// The recipe of a kernel.
#[derive(Debug)]
pub struct Recipe {
    /// The start of the names of the cache entry, its lock and its log.
    pub name: &'static str,
    /// The configuration fragments; a later one overrides.
    pub fragments: &'static [&'static str],
    /// The targets of make.
    pub targets: &'static [&'static str],
    /// The number of lines that make prints, for the progress bar.
    pub lines: u64,
    /// The files of the cache entry.
    pub delivery: Delivery,
}

/// The files that a build leaves in the cache, beside `System.map` and `config`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Delivery {
    /// `vmlinux` without symbols, and the modules.
    Vmlinux,
    /// The files of [`Vmlinux`](Self::Vmlinux); BTF is made after the build and stays out of guest
    /// memory.
    VmlinuxWithDetachedBtf,
    /// `bzImage`, for a boot loader.
    BzImage,
}

const SMALL: Recipe = Recipe {
    name: "small",
    fragments: &[SMALL_CONFIG],
    targets: &["vmlinux"],
    lines: 1155,
    delivery: Delivery::VmlinuxWithDetachedBtf,
};

const RICH: Recipe = Recipe {
    name: "rich",
    fragments: &[SMALL_CONFIG, RICH_CONFIG],
    targets: &["vmlinux", "modules"],
    lines: 1332,
    delivery: Delivery::Vmlinux,
};

const PC: Recipe = Recipe {
    name: "pc",
    fragments: &[SMALL_CONFIG, PC_CONFIG],
    targets: &["vmlinux"],
    lines: 1400,
    delivery: Delivery::VmlinuxWithDetachedBtf,
};

impl Recipe {
    /// Returns the start of the cache entry's name; the source's version follows.
    fn prefix(&self) -> String {
        let mut hash = Sha256::new();
        for fragment in self.fragments {
            hash.update(fragment);
            hash.update([0]);
        }
        format!("kernel-{}-{BUILDER}-{}-", self.name, short(hash))
    }
}

/// Returns a package version as part of a file name: `6.1.192-2` stays, an epoch's colon and the
/// like do not.
fn file_name_of(version: &str) -> String {
    let keep = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '+' | '~');
    version
        .chars()
        .map(|c| if keep(c) { c } else { '_' })
        .collect()
}

/// Returns the entry in the cache, without making it. If the source is not installed, an entry of
/// any version matches.
fn cached(recipe: &Recipe, cache: &Cache, version: Option<&str>) -> Option<Kernel> {
    let prefix = recipe.prefix();
    let directory = match version {
        Some(version) => cache.entry(&(prefix + &file_name_of(version))),
        None => cache.newest(&prefix),
    };
    directory.map(|directory| Kernel { directory })
}

/// Builds the kernel of `recipe`, or finds it in the cache.
///
/// # Errors
/// If packages are missing and cannot be installed, or a step of the build fails.
pub fn build(
    recipe: &Recipe,
    cache: &Cache,
    progress: &dyn Progress,
) -> Result<Kernel, BuildError> {
    // On a machine without dpkg, a cache made elsewhere still works.
    let version = packages::version(SOURCE_PACKAGE).unwrap_or_default();
    if let Some(kernel) = cached(recipe, cache, version.as_deref()) {
        return Ok(kernel);
    }
    let topic = format!("{}-kernel", recipe.name);
    let lock = cache.lock(&topic, progress)?;
    let log = cache.root().join(format!("{topic}.log"));
    // A log is of one build.
    let _ = std::fs::remove_file(&log);
    packages::require(&PACKAGES, &log, progress)?;
    let version = packages::version(SOURCE_PACKAGE)?;
    // The previous holder of the lock may have built it.
    if let Some(kernel) = cached(recipe, cache, version.as_deref()) {
        return Ok(kernel);
    }
    let scratch = cache.scratch(&topic, &lock)?;
    let out = build::run(recipe, scratch.path(), &log, progress)?;
    let name = recipe.prefix() + &file_name_of(version.as_deref().unwrap_or("unknown"));
    let directory = cache.publish(&out, &name)?;
    Ok(Kernel { directory })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::config::Options;
    use super::*;
    use std::fs;

    struct Forbidden;
    impl Progress for Forbidden {
        fn phase(&self, message: &str) {
            panic!("work was done: {message}");
        }
        fn fraction(&self, _done: f64) {}
    }

    #[test]
    fn a_kernel_in_the_cache_is_found_without_any_work() {
        let directory = tempfile::tempdir().unwrap();
        let cache = Cache::at(directory.path()).unwrap();
        let version = packages::version(SOURCE_PACKAGE).unwrap_or_default();
        let version = version.unwrap_or("6.1.1-1".to_owned());
        let entry = directory
            .path()
            .join(SMALL.prefix() + &file_name_of(&version));
        fs::create_dir(&entry).unwrap();
        let kernel = small(&cache, &Forbidden).unwrap();
        assert_eq!(kernel.vmlinux(), entry.join("vmlinux"));
        let files: Vec<_> = fs::read_dir(directory.path()).unwrap().collect();
        assert_eq!(files.len(), 1, "{files:?}");
    }

    #[test]
    fn a_cache_made_elsewhere_serves_without_the_source() {
        let directory = tempfile::tempdir().unwrap();
        let cache = Cache::at(directory.path()).unwrap();
        assert_eq!(cached(&RICH, &cache, None), None);
        let entry = directory.path().join(RICH.prefix() + "6.1.77-1");
        fs::create_dir(&entry).unwrap();
        assert_eq!(cached(&RICH, &cache, None).unwrap().directory(), entry);
        assert_eq!(cached(&RICH, &cache, Some("6.1.78-1")), None);
        assert_eq!(cached(&SMALL, &cache, None), None);
    }

    #[test]
    fn versions_become_file_names() {
        for (version, name) in [
            ("6.1.192-2", "6.1.192-2"),
            ("1:2/3", "1_2_3"),
            ("a~b+c", "a~b+c"),
        ] {
            assert_eq!(file_name_of(version), name);
        }
    }

    #[test]
    fn the_fragments_have_what_introspection_needs() {
        let small = Options::parse(SMALL_CONFIG);
        let rich = Options::parse(&[SMALL_CONFIG, RICH_CONFIG].concat());
        for (symbol, in_small, in_rich) in [
            ("CONFIG_KALLSYMS_ALL", "y", "y"),
            ("CONFIG_UNWINDER_ORC", "n", "y"),
            ("CONFIG_UNWINDER_FRAME_POINTER", "y", "n"),
            ("CONFIG_SMP", "y", "y"),
            ("CONFIG_VIRTIO_CONSOLE", "y", "y"),
            ("CONFIG_RANDOMIZE_BASE", "n", "n"),
            ("CONFIG_JUMP_LABEL", "n", "y"),
            ("CONFIG_FUNCTION_TRACER", "n", "y"),
            ("CONFIG_KPROBES", "n", "y"),
            ("CONFIG_DEBUG_INFO_BTF", "n", "y"),
            ("CONFIG_BLK_DEV_RAM", "n", "m"),
        ] {
            assert_eq!(small.get(symbol), in_small, "{symbol} in the small kernel");
            assert_eq!(rich.get(symbol), in_rich, "{symbol} in the rich kernel");
        }
    }

    #[test]
    fn every_word_of_the_command_line_has_a_reason() {
        assert!(cmdline().starts_with("console=ttyS0 "));
        for word in CMDLINE {
            assert!(
                !word.text.contains(' ') && word.reason.len() > 20,
                "{word:?}"
            );
        }
    }
}

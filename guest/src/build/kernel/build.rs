//! The steps of a kernel build: unpack, configure, make, describe types, strip.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::config::{Options, unmet};
use super::{BuildError, Delivery, Recipe, SOURCE_PACKAGE};
use crate::build::command;
use crate::cache::failed;
use crate::progress::Progress;

/// The path of the archive in Debian's package.
const ARCHIVE: &str = "/usr/src/linux-source-6.1.tar.xz";

/// Folders of the source whose code is in none of our kernels.
const UNUSED: [&str; 6] = [
    "drivers/gpu",
    "drivers/infiniband",
    "drivers/media",
    "drivers/net/ethernet",
    "drivers/net/wireless",
    "sound",
];

/// Builds in the empty directory `place`, and returns the directory in it that becomes the cache
/// entry.
pub fn run(
    recipe: &Recipe,
    place: &Path,
    log: &Path,
    progress: &dyn Progress,
) -> Result<PathBuf, BuildError> {
    let build = Build {
        recipe,
        log,
        source: place.join(SOURCE_PACKAGE),
        out: place.join("out"),
    };
    let name = recipe.name;
    progress.phase(&format!("unpacking the source of the {name} kernel"));
    build.unpack(place)?;
    progress.phase(&format!("configuring the {name} kernel"));
    build.configure()?;
    progress.phase(&format!("building the {name} kernel"));
    let expected = recipe.lines.max(1) as f64;
    build.make(recipe.targets, |lines| {
        progress.fraction((lines as f64 / expected).min(0.99));
    })?;
    progress.phase(&format!("finishing the {name} kernel"));
    build.deliver()?;
    Ok(build.out)
}

struct Build<'a> {
    recipe: &'a Recipe,
    log: &'a Path,
    source: PathBuf,
    out: PathBuf,
}

impl Build<'_> {
    fn unpack(&self, place: &Path) -> Result<(), BuildError> {
        let archive = Path::new(ARCHIVE);
        if !archive.is_file() {
            return Err(BuildError::NoSource(archive.to_owned()));
        }
        let mut tar = polite("tar");
        tar.arg("-xf").arg(archive).arg("-C").arg(place);
        // Half of the source, and no part of any of our kernels. Their Kconfig files are needed.
        for folder in UNUSED {
            tar.arg(format!("--exclude={SOURCE_PACKAGE}/{folder}/*.[ch]"));
        }
        command::run("unpacking the source", &mut tar, self.log, |_| {})?;
        Ok(())
    }

    fn configure(&self) -> Result<(), BuildError> {
        self.make(&["tinyconfig"], |_| {})?;
        let path = self.source.join(".config");
        let read = |path: &Path| fs::read_to_string(path).map_err(failed("read", path));
        let mut text = read(&path)?;
        for fragment in self.recipe.fragments {
            text.push_str(fragment);
            text.push('\n');
        }
        fs::write(&path, &text).map_err(failed("write", &path))?;
        self.make(&["olddefconfig"], |_| {})?;
        let wanted = Options::parse(&self.recipe.fragments.join("\n"));
        let unmet = unmet(&wanted, &Options::parse(&read(&path)?));
        if unmet.is_empty() {
            return Ok(());
        }
        Err(BuildError::Config {
            kernel: self.recipe.name,
            unmet,
        })
    }

    /// Runs make in the source tree. Nothing of this machine gets into the image: neither names nor
    /// the time.
    fn make(&self, targets: &[&str], line: impl Fn(u64)) -> Result<(), BuildError> {
        let jobs = std::thread::available_parallelism().map_or(1, usize::from);
        let mut make = polite("make");
        make.arg("-C").arg(&self.source).arg(format!("-j{jobs}"));
        make.arg("ARCH=x86_64").args(targets);
        make.env("KBUILD_BUILD_TIMESTAMP", "2000-01-01")
            .env("KBUILD_BUILD_USER", "exotrace")
            .env("KBUILD_BUILD_HOST", "exotrace")
            .env("LC_ALL", "C")
            // Set by an outer make, such as one that runs cargo.
            .env_remove("MAKEFLAGS")
            .env_remove("MAKELEVEL");
        let what = format!("make {}", targets.join(" "));
        command::run(&what, &mut make, self.log, line)?;
        Ok(())
    }

    /// Fills the directory that becomes the cache entry.
    fn deliver(&self) -> Result<(), BuildError> {
        let modules = self.out.join("modules");
        fs::create_dir_all(&modules).map_err(failed("make the directory", &modules))?;
        for (from, to) in [("System.map", "System.map"), (".config", "config")] {
            self.keep(from, to)?;
        }
        if self.recipe.delivery == Delivery::BzImage {
            return self.keep("arch/x86/boot/bzImage", "bzImage");
        }
        let built = self.source.join("vmlinux");
        let vmlinux = self.out.join("vmlinux");
        let mut objcopy = Command::new("objcopy");
        objcopy.arg("--strip-all");
        if self.recipe.delivery == Delivery::VmlinuxWithDetachedBtf {
            let btf = self.source.join("vmlinux.btf");
            let mut pahole = polite("pahole");
            let detached = format!("--btf_encode_detached={}", btf.display());
            pahole.arg("-J").arg(detached).arg(&built);
            command::run("pahole", &mut pahole, self.log, |_| {})?;
            // Not loaded: the kernel would spend seconds on checking it.
            objcopy
                .arg(format!("--add-section=.BTF={}", btf.display()))
                .arg("--set-section-flags=.BTF=contents,readonly");
        }
        objcopy.arg(&built).arg(&vmlinux);
        command::run("objcopy", &mut objcopy, self.log, |_| {})?;
        for module in self.modules()? {
            let mut strip = Command::new("strip");
            strip.arg("--strip-debug").arg(&module);
            strip
                .arg("-o")
                .arg(modules.join(module.file_name().unwrap_or_default()));
            command::run("strip", &mut strip, self.log, |_| {})?;
        }
        Ok(())
    }

    /// Copies a file of the source tree to the cache entry.
    fn keep(&self, from: &str, to: &str) -> Result<(), BuildError> {
        let from = self.source.join(from);
        fs::copy(&from, self.out.join(to)).map_err(failed("copy", &from))?;
        Ok(())
    }

    /// Returns the built modules, by `modules.order`, which names one a line as `DIRECTORY/NAME.ko`
    /// or, up to 6.1, `NAME.o`.
    fn modules(&self) -> Result<Vec<PathBuf>, BuildError> {
        let order = self.source.join("modules.order");
        if !order.is_file() {
            return Ok(Vec::new());
        }
        let text = fs::read_to_string(&order).map_err(failed("read", &order))?;
        Ok(text
            .lines()
            .map(|line| self.source.join(line).with_extension("ko"))
            .collect())
    }
}

/// Returns a command at low priority: a build must not disturb machines that run beside it.
fn polite(program: &str) -> Command {
    let mut command = Command::new("nice");
    command.args(["-n", "10", program]);
    command
}

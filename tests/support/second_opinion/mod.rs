//! Runs other projects' programs on the same kernels, or on files written here, and compares their
//! results.
//!
//! | program | from | reports |
//! |---|---|---|
//! | `kallsyms-finder` of vmlinux-to-elf | PyPI, a pinned version | every symbol of a kernel image |
//! | pahole | the package pahole, which building a kernel needs as well | the offset of every member of every struct |
//! | objtool | Debian's linux-kbuild of the kernel's own version | every record of ORC |
//! | DuckDB | PyPI, a pinned version | the rows of a trace in Parquet |
//! | the definitions of OpenTelemetry's messages, and gRPC | PyPI, pinned versions | logs, spans and metrics |
//! | Prometheus | the package prometheus | the metrics of a script |
//! | the definitions of Perfetto's messages | PyPI, a pinned version | whether Perfetto's UI can read a timeline |
//!
//! The programs are fetched once and kept in the cache. A program that cannot be had or fails ends
//! the test: without its result there is no comparison.

pub mod duckdb;
pub mod otlp;
mod pahole;
mod perfetto;
pub mod prometheus;

use std::fmt::Display;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use guest::Terminal;
use guest::build::debian;
use introspect::kernel::image::KernelImage;
use vmm::boot::KernelFile;

use crate::host::cache;

pub use pahole::{Member, Structures};
pub use perfetto::Timeline;

/// The versions of Debian's kernel that are compared. Between them the tables of kallsyms moved,
/// ORC changed its records, and modules, page cache and per-CPU data changed their structures.
pub const DEBIAN_VERSIONS: [&str; 2] = ["6.1", "6.12"];
const FINDER: Package = Package {
    requirements: &["vmlinux-to-elf==1.4.0"],
    entry: "second-opinion-vmlinux-to-elf-1.4.0",
};
const TOPIC: &str = "second-opinion";
const CLOUD: &str = "-cloud-amd64";

/// A kernel that other programs read, too.
pub struct OtherKernel {
    /// The name in messages: `uname -r`, or `small`.
    pub name: String,
    /// The image that is read here.
    pub image: KernelImage,
    /// The uncompressed image, as a file for other programs.
    elf: tempfile::NamedTempFile,
}

/// Returns a program's result, or ends the test.
fn heard<T>(what: &str, answer: Result<T, impl Display>) -> T {
    answer.unwrap_or_else(|error| panic!("{what}: {error}"))
}

/// Returns a program's output.
fn output(what: &str, command: &mut Command) -> String {
    let output = heard(what, command.output());
    assert!(
        output.status.success(),
        "{what}: {}\n{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    heard(what, String::from_utf8(output.stdout))
}

impl OtherKernel {
    /// Returns Debian's cloud kernel of a version.
    ///
    /// # Panics
    /// If it cannot be fetched or read.
    pub fn debian(version: &str) -> Self {
        let kernel = debian::cloud_kernel(&cache(), Some(version), &Terminal::new());
        let kernel = heard("Debian's kernel", kernel);
        Self::open(kernel.release, &kernel.image)
    }

    /// Returns the small kernel of the tests.
    ///
    /// # Panics
    /// If it cannot be built or read.
    pub fn small() -> Self {
        let built = guest::build::kernel::small(&cache(), &Terminal::new());
        let built = heard("the small kernel", built);
        Self::open("small".to_owned(), &built.vmlinux())
    }

    /// Returns all kernels that are compared.
    ///
    /// # Panics
    /// If one cannot be had.
    pub fn all() -> Vec<Self> {
        let debian = DEBIAN_VERSIONS.iter().map(|version| Self::debian(version));
        debian.chain([Self::small()]).collect()
    }

    fn open(name: String, path: &Path) -> Self {
        let file = heard(&name, KernelFile::open(path));
        let elf = heard(&name, tempfile::NamedTempFile::new());
        heard(&name, fs::write(elf.path(), file.elf()));
        let image = heard(&name, KernelImage::parse(file.shared_elf()));
        Self { name, image, elf }
    }

    /// Returns the kernel's types as pahole prints them.
    ///
    /// # Panics
    /// If pahole fails.
    pub fn structures(&self) -> Structures {
        let what = format!("pahole on {}", self.name);
        let types = heard(&what, self.image.btf_bytes().ok_or("no BTF"));
        let file = heard(&what, tempfile::NamedTempFile::new());
        heard(&what, fs::write(file.path(), types));
        let mut pahole = Command::new("pahole");
        pahole
            .args(["--expand_types", "-F", "btf"])
            .arg(file.path());
        Structures::parse(&output(&what, &mut pahole))
    }

    /// Returns the kernel's symbols as `kallsyms-finder` prints them: value, letter of nm(1) and
    /// name of each, in its order.
    ///
    /// # Panics
    /// If it fails.
    pub fn symbols(&self) -> Vec<(u64, char, String)> {
        let what = format!("kallsyms-finder on {}", self.name);
        let finder = FINDER.installed();
        let mut command = Command::new(finder.join("bin/python3"));
        command.arg(finder.join("bin/kallsyms-finder"));
        let text = output(&what, command.arg(self.elf.path()));
        let symbol = |line: &str| {
            let mut words = line.split(' ');
            let (value, kind, name) = (words.next()?, words.next()?, words.next()?);
            let value = u64::from_str_radix(value, 16).ok()?;
            Some((value, kind.chars().next()?, name.to_owned()))
        };
        let symbols = text
            .lines()
            .map(|line| symbol(line).unwrap_or_else(|| panic!("{what}: {line:?} is no symbol")));
        symbols.collect()
    }

    /// Returns the ORC table as the objtool of a Debian kernel's own version prints it: the address
    /// and the text of each record.
    ///
    /// # Panics
    /// If it fails.
    pub fn orc(&self) -> Vec<(u64, String)> {
        let what = format!("objtool on {}", self.name);
        // objtool requires a symbol table, even an empty one.
        let tables = heard(&what, tempfile::NamedTempFile::new());
        let mut objcopy = Command::new("objcopy");
        objcopy.args(["-j", ".orc_unwind", "-j", ".orc_unwind_ip"]);
        objcopy
            .args(["--add-symbol", "none=0"])
            .arg(self.elf.path());
        output(&what, objcopy.arg(tables.path()));
        let mut objtool = Command::new(self.objtool());
        let text = output(&what, objtool.arg("--dump=orc").arg(tables.path()));
        let record = |line: &str| {
            let (address, text) = line.split_once(':')?;
            let address = u64::from_str_radix(address, 16).ok()?;
            Some((address, text.trim().to_owned()))
        };
        let records = text
            .lines()
            .map(|line| record(line).unwrap_or_else(|| panic!("{what}: {line:?} is no record")));
        records.collect()
    }

    fn objtool(&self) -> PathBuf {
        let version = self.name.strip_suffix(CLOUD).unwrap_or(&self.name);
        // Debian's own kernels share one package (6.1.0-56: 6.1). Each backported kernel has one of
        // its own (6.12.9+deb12).
        let version = match version.contains('+') {
            true => version.to_owned(),
            false => version.split('.').take(2).collect::<Vec<_>>().join("."),
        };
        let package = format!("linux-kbuild-{version}");
        let files = heard(
            &package,
            debian::fetch(&package, &cache(), &Terminal::new()),
        );
        let directory = files.join("usr/lib").join(&package).join("tools/objtool");
        // In a build for several architectures, `objtool` only starts the one that an environment
        // variable names.
        let names = ["objtool.real-x86", "objtool"].map(|name| directory.join(name));
        let found = names.into_iter().find(|path| path.is_file());
        found.unwrap_or_else(|| panic!("no objtool in {}", directory.display()))
    }
}

/// A package of PyPI, or several.
struct Package {
    /// The names and versions, as pip accepts them.
    requirements: &'static [&'static str],
    /// The name of the cache's entry.
    entry: &'static str,
}

impl Package {
    /// Returns the virtual environment with the package.
    fn installed(&self) -> PathBuf {
        let cache = cache();
        if let Some(entry) = cache.entry(self.entry) {
            return entry;
        }
        let lock = heard("the cache", cache.lock(TOPIC, &Terminal::new()));
        if let Some(entry) = cache.entry(self.entry) {
            return entry;
        }
        let scratch = heard("the cache", cache.scratch(TOPIC, &lock));
        let environment = scratch.path().join("out");
        let mut make = Command::new("python3");
        output(
            "python3 -m venv",
            make.args(["-m", "venv"]).arg(&environment),
        );
        let mut pip = Command::new(environment.join("bin/python3"));
        pip.args(["-m", "pip", "install", "--quiet"])
            .args(self.requirements);
        output("pip install", &mut pip);
        heard("the cache", cache.publish(&environment, self.entry))
    }
}

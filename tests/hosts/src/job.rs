//! A job: the files for the host, the script that runs there, and the results.

use std::fs::{self, File};
use std::io::IsTerminal;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use guest::build::{MakeError, PackageError, dynamic, initramfs, kernel, packages, programs};
use guest::{Cache, CacheError, Progress, Terminal, failed, micro};
use rustix::fs::{FlockOperation, flock};
use tempfile::{NamedTempFile, TempDir};

use crate::Arguments;
use crate::cargo::{self, CargoError};
use crate::disk::{self, DiskError};
use crate::emulator::EmulatorError;
use crate::kind::{self, Files, Kind, Shape};
use crate::run::{self, RunError, UP};
use crate::tree::{Tree, TreeError};

/// Packages with the programs that make the disks.
const PACKAGES: [&str; 9] = [
    "busybox-static",
    "binutils",
    "e2fsprogs",
    "libc-bin",
    "libstdc++6",
    "openssh-client",
    "passt",
    "tar",
    "util-linux",
];
/// Libraries that tests put into their guests.
const GUEST_LIBRARIES: [&str; 3] = [
    "usr/lib/x86_64-linux-gnu/libgcc_s.so.1",
    "usr/lib/x86_64-linux-gnu/libm.so.6",
    "usr/lib/x86_64-linux-gnu/libstdc++.so.6",
];
/// The start of the names of the runs' folders, in the cache.
const RUN_FOLDER: &str = "host-run-";
/// The environment of every job.
const ENVIRONMENT: &str = "export HOME=/root XDG_RUNTIME_DIR=/run/user/0 EXOTRACE_CACHE=/cache LC_ALL=C.UTF-8\n\
    export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin\n\
    mkdir -p /run/user/0 /job/files\nchmod 700 /run/user/0\ncd /job/files\n";

/// A job could not be done.
#[derive(Debug, thiserror::Error)]
pub enum JobError {
    /// The cache cannot be used.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// A required package is missing.
    #[error(transparent)]
    Package(#[from] PackageError),
    /// The emulator could not be built.
    #[error(transparent)]
    Emulator(#[from] EmulatorError),
    /// A kernel could not be built: the host's or a guest's.
    #[error(transparent)]
    Kernel(#[from] kernel::BuildError),
    /// The programs of the guests could not be compiled.
    #[error(transparent)]
    Make(#[from] MakeError),
    /// A guest's initramfs could not be made.
    #[error(transparent)]
    Initramfs(#[from] initramfs::InitramfsError),
    /// The root disk's contents could not be collected.
    #[error(transparent)]
    Tree(#[from] TreeError),
    /// A disk could not be made or read.
    #[error(transparent)]
    Disk(#[from] DiskError),
    /// The project's programs could not be built.
    #[error(transparent)]
    Cargo(#[from] CargoError),
    /// The run failed.
    #[error(transparent)]
    Run(#[from] RunError),
    /// A shell was requested without a terminal.
    #[error(
        "a shell needs a terminal, and standard input is none; give a command: cargo host {0} -- COMMAND"
    )]
    NoTerminal(&'static str),
    /// A file for the host is missing, or two have one name.
    #[error("--put {}: {reason}", path.display())]
    Put {
        /// The given path.
        path: PathBuf,
        /// The reason.
        reason: String,
    },
    /// The host ended in order and left no status.
    #[error("the host left no results: was it powered off by the command? {} has its kernel's messages if any came back", .0.display())]
    NoStatus(PathBuf),
}

/// A job before it is run.
pub struct Job {
    /// The root disk.
    pub tree: Tree,
    /// The script that the host runs, without its environment.
    pub script: String,
    interactive: bool,
    emulator: PathBuf,
    kernel: PathBuf,
    cache: Cache,
    progress: Terminal,
}

impl Job {
    /// Returns a job with `script` and everything that every host has.
    ///
    /// # Errors
    /// If something cannot be obtained.
    pub fn new(script: String, arguments: &Arguments) -> Result<Self, JobError> {
        let cache = Cache::open()?;
        let progress = Terminal::new();
        let log = cache.root().join("host.log");
        packages::require(&PACKAGES, &log, &progress)?;
        let emulator = arguments.kind.recipe().build(&cache, &progress)?;
        let kernel = kernel::build(&kind::KERNEL, &cache, &progress)?.bzimage();
        let mut tree = Tree::base(&log)?;
        progress.phase("building exotrace");
        let words: &[&str] = match arguments.dev {
            true => &[
                "build",
                "--workspace",
                "--bin",
                "exotrace",
                "--example",
                cargo::TEST_DATA,
            ],
            false => &["build", "-p", "exotrace", "--release"],
        };
        for built in cargo::build(words, &["bin"])? {
            tree.built(&format!("bin/{}", built.name), &built.path, &log)?;
        }
        add_guests(&mut tree, &cache, &progress)?;
        Ok(Self {
            tree,
            script,
            interactive: false,
            emulator,
            kernel,
            cache,
            progress,
        })
    }

    /// Returns the job of the command line: a command, or a shell.
    ///
    /// # Errors
    /// If something cannot be obtained, or a shell has no terminal.
    pub fn command(arguments: &Arguments) -> Result<Self, JobError> {
        if arguments.command.is_empty() {
            if !std::io::stdin().is_terminal() {
                return Err(JobError::NoTerminal(arguments.kind.name()));
            }
            let shell = "exec setsid -c bash -c 'exec bash </dev/ttyS0 >/dev/ttyS0 2>&1'\n";
            let mut job = Self::new(shell.to_owned(), arguments)?;
            job.interactive = true;
            return Ok(job);
        }
        let words: Vec<_> = arguments.command.iter().map(|word| quoted(word)).collect();
        Self::new(format!("exec {} </dev/null\n", words.join(" ")), arguments)
    }

    /// Returns the cache that everything is kept in.
    pub fn cache(&self) -> &Cache {
        &self.cache
    }

    /// Runs the job and returns the status of its script.
    ///
    /// # Errors
    /// If the host cannot be made or does not end in order.
    pub fn run(&self, arguments: &Arguments) -> Result<i32, JobError> {
        let Self {
            cache, progress, ..
        } = self;
        let kind = arguments.kind;
        let folder = RunFolder::new(cache)?;
        let at = |name: &str| folder.path().join(name);
        let files = Files {
            folder: folder.path().to_owned(),
            emulator: self.emulator.clone(),
            root: at("root.img"),
            boot: match kind {
                Kind::Svm => None,
                Kind::Vmx => Some(at("boot.img")),
            },
            job: at("job.img"),
            results: at("results.img"),
            console: at("console"),
            kernel: self.kernel.clone(),
        };
        self.make_disks(arguments, &files)?;
        let shape = arguments.shape(self.interactive);
        progress.clear();
        start(kind, &files, &shape, arguments)?;
        let log = at("log");
        if !disk::unpack_results(&files.results, &arguments.out, &log)? {
            return Err(JobError::NoStatus(arguments.out.clone()));
        }
        let status = fs::read_to_string(arguments.out.join(".status"));
        let status = status.ok().and_then(|text| text.trim().parse().ok());
        status.ok_or_else(|| JobError::NoStatus(arguments.out.clone()))
    }

    /// Makes the disks of one run in its folder.
    fn make_disks(&self, arguments: &Arguments, files: &Files) -> Result<(), JobError> {
        let log = files.folder.join("log");
        disk::root(&self.tree, &self.cache, &files.root, &self.progress)?;
        if let Some(boot) = &files.boot {
            let words = arguments.kind.kernel_words();
            let kept = disk::boot(&files.kernel, &words, &self.cache, &self.progress)?;
            fs::hard_link(&kept, boot).map_err(failed("link", boot))?;
        }
        let job = files.folder.join("job");
        let put = job.join("files");
        fs::create_dir_all(&put).map_err(failed("make the directory", &put))?;
        for path in &arguments.put {
            let wrong = |reason: String| JobError::Put {
                path: path.clone(),
                reason,
            };
            let whole = fs::canonicalize(path).map_err(|error| wrong(error.to_string()))?;
            let name = whole
                .file_name()
                .ok_or_else(|| wrong("it has no name".to_owned()))?;
            symlink(&whole, put.join(name)).map_err(|error| wrong(error.to_string()))?;
        }
        let script = format!("{ENVIRONMENT}echo '{UP}'\n{}", self.script);
        let run = job.join("run");
        fs::write(&run, script).map_err(failed("write", &run))?;
        disk::job(&job, &files.job, &log)?;
        disk::results(&files.results)?;
        Ok(())
    }
}

/// Writes the files that only one kind of host needs, and runs it.
fn start(kind: Kind, files: &Files, shape: &Shape, arguments: &Arguments) -> Result<(), JobError> {
    if kind == Kind::Vmx {
        let path = files.folder.join("bochsrc");
        let text = kind::bochs_configuration(files, shape);
        fs::write(&path, text).map_err(failed("write", &path))?;
    }
    Ok(run::run(kind, files, shape, arguments.limit())?)
}

/// Adds the guests as files, and as entries of the cache for programs that look there.
fn add_guests(tree: &mut Tree, cache: &Cache, progress: &dyn Progress) -> Result<(), JobError> {
    let small = kernel::small(cache, progress)?;
    let archive = initramfs::full(cache, &[], progress)?;
    let programs = programs::build(cache, progress)?;
    let dynamic = dynamic::build(cache, progress)?;
    let made = cache.root().join("host-guests");
    fs::create_dir_all(&made).map_err(failed("make the directory", &made))?;
    for (name, content) in [("initramfs", &archive), ("micro.elf", &micro::elf())] {
        let path = made.join(name);
        // A new time would make a new disk.
        if fs::read(&path).ok().as_ref() != Some(content) {
            // Another host that starts reads the old one or the new one, never half of it.
            let beside = NamedTempFile::new_in(&made).map_err(failed("make a file in", &made))?;
            fs::write(beside.path(), content).map_err(failed("write", beside.path()))?;
            let put = beside.persist(&path).map_err(|error| error.error);
            put.map_err(failed("replace", &path))?;
        }
    }
    tree.copy("guest/small/vmlinux", &small.vmlinux());
    tree.copy("guest/small/initramfs", &made.join("initramfs"));
    tree.copy("guest/micro/micro.elf", &made.join("micro.elf"));
    for library in GUEST_LIBRARIES {
        tree.copy(library, &Path::new("/").join(library));
    }
    tree.copy(
        "cache/debian-busybox-static/bin/busybox",
        Path::new("/bin/busybox"),
    );
    let kernel = small.vmlinux();
    let entries = [kernel.parent(), Some(programs.directory()), Some(&*dynamic)];
    for entry in entries.into_iter().flatten() {
        add_path(tree, entry);
    }
    Ok(())
}

/// Adds the newest entry of the cache with that prefix, if there is one.
pub fn add_entry(tree: &mut Tree, cache: &Cache, prefix: &str) {
    if let Some(path) = cache.newest(prefix) {
        add_path(tree, &path);
    }
}

/// Adds an entry of the cache.
fn add_path(tree: &mut Tree, entry: &Path) {
    let name = entry.file_name().unwrap_or_default().to_string_lossy();
    tree.copy(&format!("cache/{name}"), entry);
}

/// Returns a word quoted so that the shell takes it literally.
pub fn quoted(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

/// The folder of one run, in the cache so that images can be linked; removed at the end.
struct RunFolder {
    folder: TempDir,
    /// The lock of the run: a folder without a lock is a leftover.
    _lock: File,
}

impl RunFolder {
    fn new(cache: &Cache) -> Result<Self, CacheError> {
        let root = cache.root();
        remove_left_over(root)?;
        let folder = tempfile::Builder::new().prefix(RUN_FOLDER).tempdir_in(root);
        let folder = folder.map_err(failed("make a directory in", root))?;
        let path = folder.path().join("lock");
        let lock = File::create(&path).map_err(failed("make", &path))?;
        let locked = flock(&lock, FlockOperation::NonBlockingLockExclusive);
        locked.map_err(|errno| failed("lock", &path)(errno.into()))?;
        Ok(Self {
            folder,
            _lock: lock,
        })
    }

    fn path(&self) -> &Path {
        self.folder.path()
    }
}

/// Removes folders of runs that were killed.
fn remove_left_over(root: &Path) -> Result<(), CacheError> {
    for entry in fs::read_dir(root).map_err(failed("list", root))?.flatten() {
        if !entry.file_name().to_string_lossy().starts_with(RUN_FOLDER) {
            continue;
        }
        let is_left = File::open(entry.path().join("lock"))
            .is_ok_and(|lock| flock(&lock, FlockOperation::NonBlockingLockExclusive).is_ok());
        if is_left {
            // Another process may do the same at this moment.
            let _ = fs::remove_dir_all(entry.path());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn words_reach_the_command_as_they_are() {
        for word in ["plain", "two words", "it's", "$HOME `x` \"y\" \\"] {
            let output = std::process::Command::new("sh")
                .args(["-c", &format!("printf %s {}", quoted(word))])
                .output()
                .unwrap();
            assert_eq!(String::from_utf8(output.stdout).unwrap(), word);
        }
    }

    #[test]
    fn folders_of_killed_runs_are_removed_and_those_of_others_stay() {
        let directory = tempfile::tempdir().unwrap();
        let cache = Cache::at(directory.path()).unwrap();
        let running = RunFolder::new(&cache).unwrap();
        let left = directory.path().join(format!("{RUN_FOLDER}left"));
        fs::create_dir(&left).unwrap();
        File::create(left.join("lock")).unwrap();
        let _next = RunFolder::new(&cache).unwrap();
        assert!(!left.exists());
        assert!(running.path().exists());
    }
}

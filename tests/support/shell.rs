//! A Linux guest at its shell's prompt: booted once, kept in the cache, restored in milliseconds by
//! every test.
//!
//! The cache's entry is named by all that determines the guest: kernel, initramfs, command line,
//! typed lines, the snapshot's format and the host. Test processes that need it at the same time
//! boot it once.

use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use exotrace::{Vm, VmBuilder};
use guest::Terminal;
use guest::build::dynamic;
use guest::build::initramfs::{self, ExtraFile};
use vmm::machine::{DiskConfig, VirtioConfig};
use vmm::snapshot::FORMAT_VERSION;

use crate::host::{Host, cache};
use crate::kept::kept;
use crate::kernel::Kernel;
use crate::linux::{BootOptions, Linux, command_line, memory};
use crate::serial::SerialLog;

/// The time limit of a boot on a busy host that interprets kernel code. The rich kernel takes 150 s
/// on an idle one, and two vCPUs 10 minutes beside two endless loops and a compiler.
pub const BOOT_LIMIT: Duration = Duration::from_secs(3600);
/// The time limit of a command that does next to nothing, or little with each call and each switch
/// traced. Starting busybox takes 30 ms on an idle interpreting host, a traced command 20 s: the
/// rest is for hosts whose CPUs others use too.
pub const COMMAND_LIMIT: Duration = Duration::from_secs(600);
/// The line that `init` prints before it starts the shell.
pub const READY: &str = "exotrace: ready";
/// The shell's prompt, as root.
const PROMPT: &str = "# ";
/// A command that makes the shell read whole lines, and keeps the kernel's messages out of
/// commands' output.
const QUIET: &str = "stty -echo; dmesg -n 1";
/// The name of the cache's entries and lock.
const TOPIC: &str = "tests-shell";

/// A guest at its shell.
pub struct Shell {
    /// The machine and its output.
    pub linux: Linux,
    /// The number of commands typed so far: each has its own mark in the output.
    commands: AtomicUsize,
}

/// A command's output and status.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    /// The text between the typed line and the next prompt; lines end with `\n`.
    pub output: String,
    /// The status that the shell reports.
    pub status: i32,
}

/// Returns an initramfs with busybox and this project's programs, those with the C library
/// included.
///
/// # Panics
/// If it cannot be made.
pub fn full_initramfs() -> Vec<u8> {
    full_initramfs_with(Vec::new())
}

/// Returns [`full_initramfs`] with more files.
///
/// # Panics
/// If it cannot be made.
pub fn full_initramfs_with(mut extra: Vec<ExtraFile>) -> Vec<u8> {
    let cache = cache();
    let dynamic = dynamic::files(&cache, &Terminal::new());
    extra.extend(dynamic.unwrap_or_else(|e| panic!("programs with the C library: {e}")));
    let made = initramfs::full(&cache, &extra, &Terminal::new());
    made.unwrap_or_else(|e| panic!("initramfs: {e}"))
}

/// Returns the folder of the snapshot; the guest is booted if there is none yet.
///
/// # Panics
/// If it cannot be made.
pub fn snapshot_folder(host: &Host) -> &'static Path {
    // The guest's parts do not change while a process tests it.
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| Parts::small(full_initramfs()).kept(host, TOPIC))
}

/// The parts of a guest that is booted once and kept.
pub(crate) struct Parts {
    pub(crate) kernel: &'static Kernel,
    pub(crate) initramfs: Vec<u8>,
    pub(crate) shape: Shape,
    /// The lines typed before the guest is saved; each must succeed.
    pub(crate) lines: &'static [&'static str],
}

/// The machine of such a guest.
#[derive(Debug)]
pub(crate) struct Shape {
    pub(crate) cpus: u8,
    /// The words of the kernel's command line besides the usual ones.
    pub(crate) words: &'static str,
    pub(crate) virtio: VirtioConfig,
}

impl Default for Shape {
    fn default() -> Self {
        Self {
            cpus: 1,
            words: "",
            virtio: VirtioConfig::default(),
        }
    }
}

impl Parts {
    /// Returns the parts of a guest with the small kernel on one vCPU.
    pub(crate) fn small(initramfs: Vec<u8>) -> Self {
        Self {
            kernel: Kernel::small(),
            initramfs,
            shape: Shape::default(),
            lines: &[],
        }
    }

    /// Returns the folder of the guest's snapshot, under `topic` in the cache; it is booted if
    /// there is none yet.
    pub(crate) fn kept(&self, host: &Host, topic: &str) -> PathBuf {
        kept(topic, &self.name(host), |folder| {
            self.boot(host).save(folder);
        })
    }

    /// Returns the name in 16 digits.
    fn name(&self, host: &Host) -> String {
        let mut hash = DefaultHasher::new();
        (FORMAT_VERSION, memory(), command_line(), QUIET).hash(&mut hash);
        (&self.initramfs, self.lines).hash(&mut hash);
        format!("{:?}", self.shape).hash(&mut hash);
        let kernel = &self.kernel.reference;
        (kernel.size, kernel.hash, &kernel.path, &host.profile.host).hash(&mut hash);
        format!("{:016x}", hash.finish())
    }

    /// Boots the guest to its prompt.
    fn boot(&self, host: &Host) -> Shell {
        let started = Instant::now();
        eprintln!("booting a guest of the tests once");
        let linux = Linux::boot(
            host,
            &BootOptions {
                kernel: self.kernel,
                initramfs: Some(&self.initramfs),
                command_line: format!("{} {}", command_line(), self.shape.words).trim_end(),
                cpus: self.shape.cpus,
                protocol: None,
                virtio: self.shape.virtio.clone(),
            },
        );
        let shell = Shell::at_prompt(linux);
        eprintln!("booted in {:?}", started.elapsed());
        shell.type_lines(self.lines);
        shell
    }
}

impl Shell {
    /// Restores a running copy of the guest.
    ///
    /// # Panics
    /// If it cannot be restored.
    pub fn new(host: &Host) -> Self {
        Self::restore(host, Kernel::small(), snapshot_folder(host))
    }

    /// Restores a running guest that runs `kernel` and was saved by [`Self::save`], with its disks
    /// where they were.
    ///
    /// # Panics
    /// If it cannot be restored.
    pub fn restore(host: &Host, kernel: &'static Kernel, folder: &Path) -> Self {
        Self::of(host, kernel, Vm::builder().restore(folder).disks_as_saved())
    }

    /// Restores as [`Self::restore`] does, with these disks.
    ///
    /// # Panics
    /// As [`Self::restore`].
    pub fn restore_with(
        host: &Host,
        kernel: &'static Kernel,
        folder: &Path,
        disks: &[DiskConfig],
    ) -> Self {
        let mut builder = Vm::builder().restore(folder);
        for disk in disks {
            builder = builder.disk_config(disk.clone());
        }
        Self::of(host, kernel, builder)
    }

    fn of(host: &Host, kernel: &'static Kernel, builder: VmBuilder) -> Self {
        let serial = SerialLog::default();
        let builder = builder.profile(host.profile.clone());
        let vm = builder.console(serial.clone()).start();
        let vm = vm.unwrap_or_else(|e| panic!("{e}"));
        Self {
            linux: Linux { kernel, vm, serial },
            commands: AtomicUsize::new(0),
        }
    }

    /// Waits for the shell of a booting guest, and turns off its echo. The shell then reads a whole
    /// line at once instead of drawing it by characters, each of which costs an interpreting host
    /// 12 ms.
    ///
    /// # Panics
    /// If the prompt does not come.
    pub fn at_prompt(linux: Linux) -> Self {
        let shell = Self {
            linux,
            commands: AtomicUsize::new(0),
        };
        let prompt = |printed: &str, after: &str| {
            let rest = printed.rsplit_once(after)?.1;
            // The shell queries the terminal for its cursor right after the prompt: that may be
            // printed already.
            rest.contains(PROMPT).then_some(())
        };
        shell.linux.wait("shell prompt", 0, BOOT_LIMIT, |printed| {
            prompt(printed, READY)
        });
        shell.type_line(QUIET);
        shell
            .linux
            .wait("second prompt", 0, COMMAND_LIMIT, |printed| {
                prompt(printed, QUIET)
            });
        shell
    }

    /// Saves the guest to a new folder.
    ///
    /// # Panics
    /// If it cannot be saved.
    pub fn save(&self, folder: &Path) {
        let saved = self.linux.vm.snapshot(folder);
        saved.unwrap_or_else(|e| panic!("{e}"));
    }

    /// Types a line, return key included.
    ///
    /// # Panics
    /// If the guest does not accept it.
    pub fn type_line(&self, line: &str) {
        let typed = self.linux.vm.type_line_within(line, COMMAND_LIMIT);
        typed.unwrap_or_else(|e| panic!("{line}: {e}\n{}", self.linux.situation()));
    }

    /// Runs commands that must succeed and may take longer than [`run`](Self::run) allows.
    ///
    /// # Panics
    /// If one fails or does not end in time.
    pub fn type_lines(&self, lines: &[&str]) {
        for line in lines {
            let answer = self.start(line).answer(4 * COMMAND_LIMIT);
            assert_eq!(answer.status, 0, "{line}: {answer:?}");
        }
    }

    /// Starts a command; [`Started::answer`] waits for it.
    ///
    /// # Panics
    /// If the guest does not accept the line.
    pub fn start(&self, command: &str) -> Started<'_> {
        let number = self.commands.fetch_add(1, Ordering::Relaxed);
        let from = self.linux.serial.len();
        let marks = Marks(number);
        self.type_line(&marks.line(command));
        Started {
            shell: self,
            marks,
            from,
            command: command.to_owned(),
        }
    }

    /// Runs a command that does next to nothing and waits for its end.
    ///
    /// # Panics
    /// If it does not end in time.
    pub fn run(&self, command: &str) -> Answer {
        self.start(command).answer(COMMAND_LIMIT)
    }

    /// Returns the output of a command that must succeed, without the newline at its end.
    ///
    /// # Panics
    /// If it fails or does not end in time.
    pub fn output(&self, command: &str) -> String {
        let answer = self.run(command);
        assert_eq!(answer.status, 0, "{command}: {answer:?}");
        answer.output.trim_end().to_owned()
    }
}

/// A command that was typed.
pub struct Started<'a> {
    shell: &'a Shell,
    marks: Marks,
    from: usize,
    command: String,
}

impl Started<'_> {
    /// Waits for the command's end.
    ///
    /// # Panics
    /// If it does not end within `limit`.
    pub fn answer(self, limit: Duration) -> Answer {
        let what = format!("answer to {:?}", self.command);
        let linux = &self.shell.linux;
        linux.wait(&what, self.from, limit, |printed| {
            self.marks.answer(printed)
        })
    }
}

/// The marks printed around the output of a command that is typed into a shell. The number is the
/// command's own.
pub struct Marks(pub usize);

impl Marks {
    /// Returns the line to be typed. If it is echoed, it has no digit behind the last equals sign
    /// and a semicolon behind the first.
    pub fn line(&self, command: &str) -> String {
        let number = self.0;
        format!("echo begin{number}=1; {command}; echo end{number}=$?")
    }

    /// Returns the command's answer from the shell's output, once it is there.
    pub fn answer(&self, printed: &str) -> Option<Answer> {
        let (begin, end) = (format!("begin{}=1\n", self.0), format!("end{}=", self.0));
        let text = printed.replace('\r', "");
        let (_, output) = text.split_once(&begin)?;
        // The mark may follow output without a newline.
        let (output, status) = output.rsplit_once(&end)?;
        let (status, _) = status.split_once('\n')?;
        Some(Answer {
            output: output.to_owned(),
            status: status.parse().ok()?,
        })
    }
}

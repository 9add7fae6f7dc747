//! Guests of QEMU: `ps`, `maps` and `stack` by its monitor, and of its dumps, say what the guest's
//! `/proc` says, and the guest always goes on. By QEMU's emulated CPU (Debian's package
//! qemu-system-x86), with Debian's own kernel. So does what the guest's own crash kernel dumps.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use guest::Terminal;
use guest::build::debian::{self, DebianKernel};
use guest::build::initramfs::ExtraFile;
use rustix::process::Signal;
use support::command::{Running, World, words};
use support::compiled::Program;
use support::shell::{COMMAND_LIMIT, full_initramfs, full_initramfs_with};

/// The time that the guest may take to boot, without that in which it waits for a CPU.
const BOOT_LIMIT: Duration = Duration::from_secs(240);
/// The number of times that it is booted. Of some thirty guests of an emulated QEMU with two CPUs,
/// one hangs.
const BOOTS: usize = 3;

/// The end of the shell's prompt.
const PROMPT: &str = "/ # ";

/// Returns Debian's kernel.
fn kernel() -> DebianKernel {
    let kernel = debian::cloud_kernel(&support::host::cache(), None, &Terminal::new());
    kernel.unwrap_or_else(|e| panic!("Debian's kernel: {e}"))
}

/// A time limit for a guest, which does not count the time in which the guest waits for a CPU.
struct Patience {
    pid: u32,
    began: Instant,
    waited: Duration,
    limit: Duration,
}

impl Patience {
    /// The wait for one [`Patience`], which no test reaches.
    const MOST: Duration = Duration::from_secs(3600);

    fn with(machine: &Running, limit: Duration) -> Self {
        let pid = machine.pid();
        Self {
            pid,
            began: Instant::now(),
            waited: waited_for_cpu(pid),
            limit,
        }
    }

    fn is_over(&self) -> bool {
        let waited = waited_for_cpu(self.pid).saturating_sub(self.waited);
        self.began.elapsed().saturating_sub(waited) > self.limit
    }
}

/// Returns the time that a thread of a process has waited for a CPU, that of the one that has
/// waited longest (the second number of `/proc/PID/task/TID/schedstat`).
fn waited_for_cpu(pid: u32) -> Duration {
    let threads = fs::read_dir(format!("/proc/{pid}/task"));
    let threads = threads.into_iter().flatten().filter_map(Result::ok);
    let waited = threads.filter_map(|thread| {
        let numbers = fs::read_to_string(thread.path().join("schedstat")).ok()?;
        numbers.split_whitespace().nth(1)?.parse().ok()
    });
    Duration::from_nanos(waited.max().unwrap_or(0))
}

/// Returns the machine once its shell prompts; `None` if that takes too long.
fn booted(mut machine: Running) -> Option<Running> {
    let patience = Patience::with(&machine, BOOT_LIMIT);
    machine.wait_until("shell", Patience::MOST, |stdout, _| {
        stdout.contains(PROMPT) || patience.is_over()
    });
    let has_shell = machine.printed().0.contains(PROMPT);
    has_shell.then_some(machine)
}

/// A guest of QEMU with a shell at its serial port, and its monitor.
struct Qemu {
    machine: Running,
    monitor: PathBuf,
    /// The number of commands that were typed.
    typed: usize,
}

impl Qemu {
    /// Starts a guest with this initramfs, and more words for QEMU and for the guest's kernel.
    fn start(world: &World, initramfs: &[u8], options: &str, append: &str) -> Self {
        let (path, monitor) = (world.path("initramfs"), world.path("monitor"));
        fs::write(&path, initramfs).unwrap_or_else(|e| panic!("initramfs: {e}"));
        let append = format!("console=ttyS0 quiet panic=-1 {append}");
        let mut qemu = Command::new("qemu-system-x86_64");
        qemu.args(words("-smp 2 -display none -no-reboot -monitor none"))
            .args(words(options))
            .args(words("-serial stdio -kernel"))
            .arg(kernel().image)
            .arg("-initrd")
            .arg(path)
            .args(["-append", &append])
            .arg("-qmp")
            .arg(format!("unix:{},server=on,wait=off", monitor.display()))
            .stdin(Stdio::piped());
        let machine = (0..BOOTS).find_map(|_| booted(world.spawn(&mut qemu)));
        Self {
            machine: machine.unwrap_or_else(|| panic!("no shell in {BOOT_LIMIT:?}")),
            monitor,
            typed: 0,
        }
    }

    /// Types a command in the guest and returns what it prints.
    fn types(&mut self, command: &str) -> String {
        let found = self.types_within(command, COMMAND_LIMIT);
        found.unwrap_or_else(|| panic!("{command}: no answer\n{:?}", self.machine.printed()))
    }

    /// Types a command in the guest and returns what it prints; `None` if it is not done in time.
    fn types_within(&mut self, command: &str, limit: Duration) -> Option<String> {
        self.typed += 1;
        let (from, to) = (self.typed * 2, self.typed * 2 + 1);
        // As numbers that are not in the echo of the line.
        let line = format!("echo from=$(({from}+0)); {command}; echo to=$(({to}+0))");
        self.machine.type_line(&line);
        let between = |text: &str| {
            let (_, behind) = text.split_once(&format!("from={from}\r\n"))?;
            let (between, _) = behind.split_once(&format!("to={to}\r\n"))?;
            Some(between.replace('\r', ""))
        };
        let (mut found, patience) = (None, Patience::with(&self.machine, limit));
        self.machine
            .wait_until(command, Patience::MOST, |stdout, _| {
                found = between(stdout);
                found.is_some() || patience.is_over()
            });
        found
    }

    /// Starts a process that sleeps, and returns its pid once it does.
    fn sleeper(&mut self) -> String {
        let asleep = "until grep -q nanosleep /proc/$!/wchan; do :; done";
        let pid = self.types(&format!("sleep 100000 & {asleep}; echo $!"));
        pid.trim().to_owned()
    }

    /// Returns the mappings of a process as the guest tells them.
    fn maps(&mut self, pid: &str) -> String {
        self.types(&format!("cat /proc/{pid}/maps"))
    }

    /// Starts a look at the guest.
    fn look(&self, world: &World, line: &str) -> Running {
        let mut line = words(line);
        line.extend(["--qemu".into(), self.monitor.clone().into()]);
        world.start(line)
    }

    /// Has QEMU dump the guest.
    fn dump(&self, format: &str, path: &Path) {
        let stream = UnixStream::connect(&self.monitor).unwrap_or_else(|e| panic!("{e}"));
        let mut lines = BufReader::new(&stream).lines();
        let protocol = format!("file:{}", path.display());
        for request in [
            serde_json::json!({ "execute": "qmp_capabilities" }),
            serde_json::json!({
                "execute": "dump-guest-memory",
                "arguments": { "paging": false, "protocol": protocol, "format": format },
            }),
        ] {
            writeln!(&stream, "{request}").unwrap_or_else(|e| panic!("{e}"));
            let answer = lines
                .by_ref()
                .map(|line| line.unwrap_or_else(|e| panic!("{e}")))
                .find(|line| line.contains("\"return\"") || line.contains("\"error\""));
            let answer = answer.unwrap_or_default();
            assert!(answer.contains("\"return\""), "{request}: {answer}");
        }
    }

    fn ask(&self, world: &World, line: &str) -> String {
        let ended = self.look(world, line).finish(COMMAND_LIMIT);
        assert_eq!(ended.status, 0, "{line}: {ended:?}");
        assert!(
            ended.stderr.contains("the guest was paused for"),
            "{ended:?}"
        );
        ended.stdout
    }
}

#[test]
fn a_guest_of_qemu_is_looked_into_and_goes_on_even_if_the_look_is_killed() {
    let world = World::new();
    let mut qemu = Qemu::start(&world, &full_initramfs(), "-m 256", "");
    let pid = qemu.sleeper();

    let ps = qemu.ask(&world, "ps");
    let sleeper = ps
        .lines()
        .find(|line| line.split_whitespace().next() == Some(&pid));
    assert!(
        sleeper.is_some_and(|line| line.ends_with(" sleep 100000")),
        "{pid}: {ps}"
    );
    let proc_maps = qemu.maps(&pid);
    assert_eq!(qemu.ask(&world, &format!("maps -p {pid}")), proc_maps);
    let stack = qemu.ask(&world, &format!("stack -p {pid}"));
    for function in ["__schedule+", "do_nanosleep+", "do_syscall_64+", "/bin/"] {
        assert!(stack.contains(function), "{function}: {stack}");
    }
    let known = qemu.types("grep -w vfs_read /proc/kallsyms");
    let sym = qemu.ask(&world, "sym vfs_read");
    let address = known.split_whitespace().next().unwrap_or_default();
    assert!(address.len() == 16 && sym.contains(address), "{known}{sym}");

    for format in ["elf", "kdump-zlib"] {
        let path = world.path(format);
        qemu.dump(format, &path);
        let dumped = |line: &str| {
            let mut line = words(line);
            line.extend(["--core".into(), path.clone().into()]);
            let ended = world.run(line, COMMAND_LIMIT);
            assert_eq!((ended.status, ended.stderr.as_str()), (0, ""), "{format}");
            ended.stdout
        };
        assert_eq!(dumped(&format!("maps -p {pid}")), proc_maps, "{format}");
        assert_eq!(dumped(&format!("stack -p {pid}")), stack, "{format}");
        assert!(dumped("ps").contains(" sleep 100000\n"), "{format}");
    }

    // Killed at any moment, among them while the guest is paused.
    for delay in (0..100).step_by(5) {
        let look = qemu.look(&world, "ps");
        std::thread::sleep(Duration::from_millis(delay));
        look.signal(Signal::KILL);
        look.finish(COMMAND_LIMIT);
        assert_eq!(qemu.types("echo runs"), "runs\n", "after {delay} ms");
    }
    assert!(qemu.ask(&world, "ps").contains("sleep 100000"));
}

/// Returns the modules with which Debian's kernel finds a disk of virtio, in the order in which
/// they are loaded.
fn disk_modules() -> Vec<ExtraFile> {
    let folder = kernel().modules.join("kernel/drivers");
    let names = [
        "virtio/virtio_ring",
        "virtio/virtio",
        "virtio/virtio_pci_modern_dev",
        "virtio/virtio_pci_legacy_dev",
        "virtio/virtio_pci",
        "block/virtio_blk",
    ];
    let file = |(number, name)| ExtraFile {
        path: format!("modules/{number}.ko"),
        mode: 0o644,
        content: read(&folder.join(format!("{name}.ko"))),
    };
    names.into_iter().enumerate().map(file).collect()
}

fn read(path: &Path) -> Vec<u8> {
    fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// Sets the length of a file, which is made if need be.
fn resize(path: &Path, length: u64) {
    let file = fs::OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(false)
        .open(path);
    let resized = file.and_then(|file| file.set_len(length));
    resized.unwrap_or_else(|e| panic!("{}: {e}", path.display()));
}

/// What a guest said before it crashed, and the length of what its crash kernel dumped.
struct Crashed {
    pid: String,
    maps: String,
    shell: String,
    length: u64,
}

impl Crashed {
    /// Has a guest crash, and its crash kernel dump it to the guest's disk. Returns `None` if the
    /// crash kernel hangs, as any guest may: see [`BOOTS`].
    fn of(mut qemu: Qemu) -> Option<Self> {
        let pid = qemu.sleeper();
        let maps = qemu.maps(&pid);
        let shell = qemu.types("echo $$").trim().to_owned();
        let load = "/crashload /kernel /initrd 'console=ttyS0 quiet nr_cpus=1 reset_devices'";
        assert_eq!(qemu.types(load), "");
        let prompts = |stdout: &str| stdout.matches(PROMPT).count();
        let before = prompts(&qemu.machine.printed().0);
        // This shell prompts no more.
        qemu.machine
            .type_line("exec sh -c 'echo c > /proc/sysrq-trigger'");
        let (mut boots, patience) = (false, Patience::with(&qemu.machine, BOOT_LIMIT));
        qemu.machine
            .wait_until("shell of the crash kernel", Patience::MOST, |stdout, _| {
                boots = prompts(stdout) > before;
                boots || patience.is_over()
            });
        let dump = "for m in /modules/*; do insmod $m; done; dd if=/proc/vmcore of=/dev/vda bs=1M 2>/dev/null; sync; stat -c %s /proc/vmcore";
        let size = boots.then(|| qemu.types_within(dump, BOOT_LIMIT))??;
        let length = size.trim().parse();
        Some(Self {
            pid,
            maps,
            shell,
            length: length.unwrap_or_else(|e| panic!("{size}: {e}")),
        })
    }
}

#[test]
fn what_a_guests_own_crash_kernel_dumps_says_what_the_guest_said() {
    let world = World::new();
    let (load, disk) = (world.path("crashload"), world.path("disk"));
    Program::CrashLoad.make(&load);
    let files = [
        ("crashload", read(&load)),
        ("kernel", read(&kernel().image)),
        ("initrd", full_initramfs_with(disk_modules())),
    ];
    let files = files.map(|(name, content)| ExtraFile {
        path: name.to_owned(),
        mode: 0o755,
        content,
    });
    // More than the guest's memory.
    resize(&disk, 512 << 20);
    let drive = format!("file={},format=raw,if=virtio", disk.display());
    let options = format!("-m 512 -drive {drive}");
    let initramfs = full_initramfs_with(files.into());
    let crash = || {
        Crashed::of(Qemu::start(
            &world,
            &initramfs,
            &options,
            "crashkernel=192M",
        ))
    };
    let crashed = (0..BOOTS).find_map(|_| crash());
    let Crashed {
        pid,
        maps,
        shell,
        length,
    } = crashed.unwrap_or_else(|| panic!("no crash kernel that answers in {BOOT_LIMIT:?}"));
    resize(&disk, length);

    let ask = |line: &str| {
        let mut line = words(line);
        line.extend(["--core".into(), disk.clone().into()]);
        let ended = world.run(line, COMMAND_LIMIT);
        assert_eq!((ended.status, ended.stderr.as_str()), (0, ""));
        ended.stdout
    };
    assert!(ask("ps").contains(" sleep 100000\n"));
    assert_eq!(ask(&format!("maps -p {pid}")), maps);
    for (pid, functions) in [
        (&pid, ["__schedule+", "do_nanosleep+", "do_syscall_64+"]),
        // The one that crashed: the function that saves its registers has no unwind information.
        (&shell, ["panic+", "sysrq_handle_crash+", "do_syscall_64+"]),
    ] {
        let stack = ask(&format!("stack -p {pid}"));
        for function in functions {
            assert!(stack.contains(function), "{function}: {stack}");
        }
    }
}

#[test]
fn a_monitor_that_is_none_is_told() {
    let world = World::new();
    let (silent, file) = (world.path("silent"), world.path("file"));
    let _silent = UnixListener::bind(&silent).unwrap_or_else(|e| panic!("{e}"));
    fs::write(&file, "").unwrap_or_else(|e| panic!("{e}"));
    for (path, message) in [
        (world.path("none"), "No such file or directory"),
        (file, "Connection refused"),
        (silent, "the monitor does not answer within 10 s"),
    ] {
        let mut line = words("ps --qemu");
        line.push(path.into());
        let ended = world.run(line, COMMAND_LIMIT);
        assert_eq!(ended.status, 1, "{ended:?}");
        assert!(ended.stderr.contains(message), "{ended:?}");
        assert_eq!(ended.stderr.lines().count(), 1, "{ended:?}");
    }
}

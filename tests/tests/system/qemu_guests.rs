//! Guests of QEMU: `ps`, `maps` and `stack` by its monitor, and of its dumps, say what the guest's
//! `/proc` says, and the guest always goes on. By QEMU's emulated CPU (Debian's package
//! qemu-system-x86), with Debian's own kernel.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use guest::Terminal;
use guest::build::debian;
use rustix::process::Signal;
use support::command::{Running, World, words};
use support::shell::{COMMAND_LIMIT, full_initramfs};

/// The time that the guest may take to boot.
const BOOT_LIMIT: Duration = Duration::from_secs(240);

/// A guest of QEMU with a shell at its serial port, and its monitor.
struct Qemu {
    machine: Running,
    monitor: PathBuf,
    /// The number of commands that were typed.
    typed: usize,
}

impl Qemu {
    fn start(world: &World) -> Self {
        let kernel = debian::cloud_kernel(&support::host::cache(), None, &Terminal::new());
        let kernel = kernel.unwrap_or_else(|e| panic!("Debian's kernel: {e}"));
        let (initramfs, monitor) = (world.path("initramfs"), world.path("monitor"));
        fs::write(&initramfs, full_initramfs()).unwrap_or_else(|e| panic!("initramfs: {e}"));
        let mut qemu = Command::new("qemu-system-x86_64");
        qemu.args(words(
            "-m 256 -smp 2 -display none -no-reboot -monitor none",
        ))
        .args(words("-serial stdio -kernel"))
        .arg(kernel.image)
        .arg("-initrd")
        .arg(initramfs)
        .args(["-append", "console=ttyS0 quiet panic=-1"])
        .arg("-qmp")
        .arg(format!("unix:{},server=on,wait=off", monitor.display()))
        .stdin(Stdio::piped());
        let mut machine = world.spawn(&mut qemu);
        machine.wait_until("shell", BOOT_LIMIT, |stdout, _| stdout.contains("/ # "));
        Self {
            machine,
            monitor,
            typed: 0,
        }
    }

    /// Types a command in the guest and returns what it prints.
    fn types(&mut self, command: &str) -> String {
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
        let mut found = None;
        self.machine
            .wait_until(command, COMMAND_LIMIT, |stdout, _| {
                found = between(stdout);
                found.is_some()
            });
        found.unwrap_or_default()
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
    let mut qemu = Qemu::start(&world);
    let pid =
        qemu.types("sleep 100000 & until grep -q nanosleep /proc/$!/wchan; do :; done; echo $!");
    let pid = pid.trim().to_owned();

    let ps = qemu.ask(&world, "ps");
    let sleeper = ps
        .lines()
        .find(|line| line.split_whitespace().next() == Some(&pid));
    assert!(
        sleeper.is_some_and(|line| line.ends_with(" sleep 100000")),
        "{pid}: {ps}"
    );
    let proc_maps = qemu.types(&format!("cat /proc/{pid}/maps"));
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

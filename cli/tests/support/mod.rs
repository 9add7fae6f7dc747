//! Runs the command in a world of its own: its run directory is empty, and all tests share the host
//! record.
#![allow(clippy::unwrap_used, dead_code)]

#[path = "../../../tests/support/data.rs"]
mod data;

use std::fs;
use std::io::BufRead;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// The time limit of everything here.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// Returns the command's executable: the one that `EXOTRACE_BIN` names, else cargo's.
fn executable() -> PathBuf {
    let named = std::env::var_os("EXOTRACE_BIN").map(PathBuf::from);
    named.unwrap_or_else(|| env!("CARGO_BIN_EXE_exotrace").into())
}

/// Returns a folder that stays from one test to the next.
fn shared_cache() -> PathBuf {
    if data::is_elsewhere() {
        std::env::temp_dir().join("exotrace-cli-tests")
    } else {
        env!("CARGO_TARGET_TMPDIR").into()
    }
}

/// A folder with the micro guest in it, and a run directory.
pub struct World {
    folder: tempfile::TempDir,
}

impl World {
    pub fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("run")).unwrap();
        fs::write(folder.path().join("micro"), guest::micro::elf()).unwrap();
        Self { folder }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub fn write(&self, name: &str, contents: &[u8]) {
        fs::write(self.path(name), contents).unwrap();
    }

    /// Returns the command with arguments as a line of words, in this folder.
    pub fn command(&self, line: &str) -> Command {
        let words: Vec<&str> = line.split_whitespace().collect();
        self.command_of(&words)
    }

    /// Returns the command with arguments. A system call that a machine's process should not make
    /// ends it.
    pub fn command_of(&self, words: &[&str]) -> Command {
        let mut command = self.unconfined(words);
        let walls = self.confinement();
        if walls.seccomp && walls.landlock {
            command.env("EXOTRACE_CONFINE", "strict");
        }
        command
    }

    fn unconfined(&self, words: &[&str]) -> Command {
        let mut command = Command::new(executable());
        command
            .args(words)
            .current_dir(self.folder.path())
            .env("XDG_RUNTIME_DIR", self.path("run"))
            .env("XDG_CACHE_HOME", shared_cache())
            .env_remove("EXOTRACE_CACHE")
            .env_remove("EXOTRACE_LOG")
            .env_remove("EXOTRACE_CONFINE")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }

    /// Returns the confinement that this host's kernel supports.
    pub fn confinement(&self) -> Walls {
        static WALLS: OnceLock<Walls> = OnceLock::new();
        *WALLS.get_or_init(|| {
            let mut doctor = self.unconfined(&["doctor", "--json"]);
            let told = Ended::from(doctor.output().unwrap());
            let record: serde_json::Value =
                serde_json::from_str(&told.stdout).unwrap_or_else(|e| panic!("{e}: {told:?}"));
            let has = |wall: &str| record["confinement"][wall].as_bool().unwrap();
            Walls {
                seccomp: has("seccomp"),
                landlock: has("landlock"),
            }
        })
    }

    /// Runs the command to its end.
    pub fn run(&self, line: &str) -> Ended {
        Ended::from(self.command(line).output().unwrap())
    }

    /// Returns the number of hits of each trap that is now in the guest.
    pub fn traps(&self) -> Vec<u64> {
        let stat = self.run("stat --json");
        let told: serde_json::Value =
            serde_json::from_str(&stat.stdout).unwrap_or_else(|e| panic!("{e}: {stat:?}"));
        let sites = told["sites"].as_array().unwrap();
        sites
            .iter()
            .map(|site| site["hits"].as_u64().unwrap())
            .collect()
    }

    /// Waits until a trap has been hit: one that is only armed may not have been reached yet.
    pub fn wait_for_hits(&self) {
        self.wait_for_traps(|hits| hits.iter().any(|hits| *hits > 0));
    }

    /// Waits until the guest has no traps.
    pub fn wait_for_no_traps(&self) {
        self.wait_for_traps(<[u64]>::is_empty);
    }

    /// Waits until `wanted` accepts the hits of the traps in the guest.
    pub fn wait_for_traps(&self, wanted: impl Fn(&[u64]) -> bool) {
        self.wait_until("the traps", || wanted(&self.traps()));
    }

    /// Waits until `is_so` returns true; `what` names the awaited condition.
    pub fn wait_until(&self, what: &str, mut is_so: impl FnMut() -> bool) {
        let start = Instant::now();
        while !is_so() {
            assert!(start.elapsed() < PATIENCE, "no {what} after {PATIENCE:?}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Runs a program of the micro guest.
    pub fn micro(&self, program: &str, options: &str) -> Ended {
        Ended::from(self.micro_command(program, options).output().unwrap())
    }

    pub fn micro_command(&self, program: &str, options: &str) -> Command {
        let mut words = vec![
            "run",
            "--kernel",
            "micro",
            "--memory",
            "4M",
            "--cmdline",
            program,
        ];
        words.extend(options.split_whitespace());
        self.command_of(&words)
    }

    /// Starts a machine that runs until it is stopped, and waits until it answers clients.
    pub fn start(&self, program: &str, options: &str) -> Running {
        self.started(self.micro_command(program, options))
    }

    /// Starts a machine by `command`, and waits until it answers clients.
    pub fn started(&self, command: Command) -> Running {
        let running = Running::of(command);
        let start = Instant::now();
        while self.run("vms").stdout.lines().count() < 2 {
            assert!(start.elapsed() < PATIENCE, "no machine after {PATIENCE:?}");
            std::thread::sleep(Duration::from_millis(20));
        }
        running
    }

    /// Starts a machine as `user`, UID:GID, and waits until it answers clients. That user owns
    /// everything in this world.
    pub fn start_as(&self, user: &str, program: &str, options: &str) -> Running {
        let uid = user.split(':').next().and_then(|uid| uid.parse().ok());
        for path in ["", "run", "micro"] {
            std::os::unix::fs::chown(self.path(path), uid, None).unwrap();
        }
        let options = format!("--user {user} {options}");
        let running = Running::of(self.micro_command(program, &options));
        let control = self.path("run/exotrace/vm1/control");
        self.wait_until("control socket", || control.exists());
        running
    }

    /// Returns the names in the run directory.
    pub fn registered(&self) -> Vec<String> {
        match fs::read_dir(self.path("run/exotrace")) {
            Ok(entries) => entries
                .map(|e| e.unwrap().file_name().into_string().unwrap())
                .collect(),
            Err(_) => Vec::new(),
        }
    }
}

/// The means by which a host's kernel confines a process.
#[derive(Debug, Clone, Copy)]
pub struct Walls {
    pub seccomp: bool,
    pub landlock: bool,
}

/// A command that has ended.
#[derive(Debug)]
pub struct Ended {
    pub status: i32,
    pub stdout: String,
    pub stderr: String,
}

impl From<Output> for Ended {
    fn from(output: Output) -> Self {
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        Self {
            status: output.status.code().unwrap_or(-1),
            stdout: text(&output.stdout),
            stderr: text(&output.stderr),
        }
    }
}

/// A running command; killed when dropped.
pub struct Running {
    child: Option<Child>,
}

impl Running {
    /// Starts a command.
    pub fn of(mut command: Command) -> Self {
        Self {
            child: Some(command.spawn().unwrap()),
        }
    }

    /// Returns `file` of the process in /proc.
    pub fn proc(&self, file: &str) -> String {
        let pid = self.child.as_ref().unwrap().id();
        fs::read_to_string(format!("/proc/{pid}/{file}")).unwrap()
    }

    /// Returns `file` in /proc of each of its threads that has not ended.
    pub fn threads(&self, file: &str) -> Vec<String> {
        let pid = self.child.as_ref().unwrap().id();
        let threads = fs::read_dir(format!("/proc/{pid}/task")).unwrap();
        let read = |thread: fs::DirEntry| fs::read_to_string(thread.path().join(file)).ok();
        threads.flatten().filter_map(read).collect()
    }

    pub fn signal(&self, signal: rustix::process::Signal) {
        let child = self.child.as_ref().unwrap();
        let pid = rustix::process::Pid::from_child(child);
        rustix::process::kill_process(pid, signal).unwrap();
    }

    /// Shrinks the pipe of the command's output to this many bytes.
    pub fn shrink_output(&self, bytes: usize) {
        let output = self.child.as_ref().unwrap().stdout.as_ref().unwrap();
        rustix::pipe::fcntl_setpipe_size(output, bytes).unwrap();
    }

    /// Reads `count` lines of the command's output, while it runs on.
    pub fn read_lines(&mut self, count: usize) -> Vec<String> {
        let output = self.child.as_mut().unwrap().stdout.as_mut().unwrap();
        let lines = std::io::BufReader::new(output).lines();
        lines.take(count).map(Result::unwrap).collect()
    }

    /// Waits for the end of a command that writes more than a pipe holds.
    pub fn finish_reading(mut self) -> Ended {
        let child = self.child.take().unwrap();
        Ended::from(child.wait_with_output().unwrap())
    }

    /// Waits for the command's end.
    pub fn finish(mut self) -> Ended {
        let mut child = self.child.take().unwrap();
        let start = Instant::now();
        while child.try_wait().unwrap().is_none() {
            if start.elapsed() > PATIENCE {
                child.kill().unwrap();
                panic!("the command has not ended after {PATIENCE:?}");
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ended::from(child.wait_with_output().unwrap())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Returns whether machines can be run. Without KVM tests fail, unless EXOTRACE_NO_KVM=1 says that
/// this is known.
pub fn has_kvm() -> bool {
    let opened = fs::OpenOptions::new()
        .read(true)
        .write(true)
        .open(Path::new("/dev/kvm"));
    match opened {
        Ok(_) => true,
        Err(error) if std::env::var_os("EXOTRACE_NO_KVM").is_some_and(|v| v == "1") => {
            eprintln!("not tested: /dev/kvm: {error} (EXOTRACE_NO_KVM=1)");
            false
        }
        Err(error) => panic!("/dev/kvm: {error}; set EXOTRACE_NO_KVM=1 to test without machines"),
    }
}

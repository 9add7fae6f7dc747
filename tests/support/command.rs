//! Runs the `exotrace` command as its users do, with a run directory of its own.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::shell::COMMAND_LIMIT;

/// The interval at which a running command is polled for its end.
const LOOK_INTERVAL: Duration = Duration::from_millis(10);

/// Returns the command's executable: the one that `EXOTRACE_BIN` names. Without it, cargo's, beside
/// the folder of the tests' own.
///
/// # Panics
/// If the executable has not been built.
pub fn executable() -> PathBuf {
    if let Some(path) = std::env::var_os("EXOTRACE_BIN") {
        return path.into();
    }
    let own = std::env::current_exe().unwrap_or_else(|e| panic!("this executable: {e}"));
    let folder = own
        .ancestors()
        .find(|folder| folder.ends_with("deps"))
        .and_then(Path::parent);
    let path = folder.unwrap_or(Path::new(".")).join("exotrace");
    assert!(
        path.is_file(),
        "{} has not been built; `cargo test --workspace` does that, or `cargo build -p exotrace` (benchmarks: --release)",
        path.display()
    );
    path
}

/// Splits a command line into words; no word contains a blank.
pub fn words(line: &str) -> Vec<OsString> {
    line.split_whitespace().map(OsString::from).collect()
}

/// A folder for a test's files, with a run directory.
pub struct World {
    folder: tempfile::TempDir,
}

/// A command that has ended.
#[derive(Debug)]
pub struct Ended {
    /// The exit status; -1 if a signal ended the command.
    pub status: i32,
    /// The command's standard output.
    pub stdout: String,
    /// The command's standard error.
    pub stderr: String,
}

/// A running command; killed when dropped.
pub struct Running {
    child: Child,
    stdout: PathBuf,
    stderr: PathBuf,
}

impl Default for World {
    fn default() -> Self {
        Self::new()
    }
}

impl World {
    /// Makes a new folder, which is removed when dropped.
    ///
    /// # Panics
    /// If the folder cannot be made.
    pub fn new() -> Self {
        let folder = tempfile::tempdir().unwrap_or_else(|e| panic!("a folder for the test: {e}"));
        fs::create_dir(folder.path().join("run")).unwrap_or_else(|e| panic!("run directory: {e}"));
        Self { folder }
    }

    /// Returns the path of a file or folder in it.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Starts the command, with its output kept in files.
    ///
    /// # Panics
    /// If it cannot be started.
    pub fn start<I: AsRef<OsStr>>(&self, words: impl IntoIterator<Item = I>) -> Running {
        let mut command = self.command();
        command.args(words);
        self.spawn(&mut command)
    }

    /// Starts any command, in the same way.
    ///
    /// # Panics
    /// If it cannot be started.
    pub fn spawn(&self, command: &mut Command) -> Running {
        let kept = tempfile::Builder::new()
            .prefix("output")
            .tempdir_in(self.folder.path());
        // Removed with the whole folder.
        let kept = kept
            .unwrap_or_else(|e| panic!("a folder for output: {e}"))
            .keep();
        let (stdout, stderr) = (kept.join("stdout"), kept.join("stderr"));
        let file =
            |path: &Path| File::create(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        command.stdout(file(&stdout)).stderr(file(&stderr));
        let child = command
            .spawn()
            .unwrap_or_else(|e| panic!("{command:?}: {e}"));
        Running {
            child,
            stdout,
            stderr,
        }
    }

    /// Runs the command to its end.
    ///
    /// # Panics
    /// If it cannot be started or does not end within `limit`.
    pub fn run<I: AsRef<OsStr>>(
        &self,
        words: impl IntoIterator<Item = I>,
        limit: Duration,
    ) -> Ended {
        self.start(words).finish(limit)
    }

    /// Stops a machine, which shuts down in order.
    ///
    /// # Panics
    /// If it does not.
    pub fn stop(&self, name: &str, machine: Running) {
        let stopped = self.run(["stop", "--vm", name], COMMAND_LIMIT);
        assert_eq!(stopped.status, 0, "{stopped:?}");
        let ended = machine.finish(COMMAND_LIMIT);
        assert_eq!(ended.status, 0, "{ended:?}");
    }

    /// Returns the bare command, with a pipe as its standard input. A system call that a machine's
    /// process should not make ends it.
    pub fn command(&self) -> Command {
        static HAS_WALLS: OnceLock<bool> = OnceLock::new();
        let has_walls = HAS_WALLS.get_or_init(|| {
            let told = Command::new(executable())
                .args(["doctor", "--json"])
                .output();
            let told = told.unwrap_or_else(|e| panic!("exotrace doctor: {e}"));
            let told = String::from_utf8_lossy(&told.stdout);
            ["\"seccomp\": true", "\"landlock\": true"]
                .iter()
                .all(|wall| told.contains(wall))
        });
        let mut command = Command::new(executable());
        command
            .env("EXOTRACE_CONFINE", if *has_walls { "strict" } else { "on" })
            .current_dir(self.folder.path())
            .env("XDG_RUNTIME_DIR", self.path("run"))
            .env_remove("EXOTRACE_LOG")
            .stdin(Stdio::piped());
        command
    }
}

impl Running {
    /// Writes a line to the command's standard input.
    ///
    /// # Panics
    /// If it takes none.
    pub fn type_line(&mut self, line: &str) {
        use std::io::Write;
        let Some(input) = &mut self.child.stdin else {
            panic!("no standard input for {line:?}")
        };
        writeln!(input, "{line}").unwrap_or_else(|e| panic!("{line:?} cannot be typed: {e}"));
    }

    /// Returns the process ID.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Returns the numbers of open files and of threads, once both have been stable for a second.
    /// After ten seconds it returns them as they are. What a client leaves behind is released some
    /// time after the client is gone.
    pub fn settled(&self) -> (usize, usize) {
        let pid = self.pid();
        let count = |what: &str| {
            let entries = fs::read_dir(format!("/proc/{pid}/{what}"));
            entries.map_or(0, Iterator::count)
        };
        let mut seen = (count("fd"), count("task"));
        let mut equal = 0;
        for _ in 0..100 {
            std::thread::sleep(Duration::from_millis(100));
            let now = (count("fd"), count("task"));
            equal = if now == seen { equal + 1 } else { 0 };
            if equal == 10 {
                break;
            }
            seen = now;
        }
        seen
    }

    /// Sends a signal to the command.
    ///
    /// # Panics
    /// If it has ended.
    pub fn signal(&self, signal: Signal) {
        let sent = kill_process(Pid::from_child(&self.child), signal);
        sent.unwrap_or_else(|e| panic!("{signal:?}: {e}"));
    }

    /// Returns standard output and error so far.
    pub fn printed(&self) -> (String, String) {
        (text(&self.stdout), text(&self.stderr))
    }

    /// Waits until `done` returns true for standard output and standard error.
    ///
    /// # Panics
    /// If the command ends, or `limit` passes, before; `what` names the awaited condition.
    pub fn wait_until(
        &mut self,
        what: &str,
        limit: Duration,
        mut done: impl FnMut(&str, &str) -> bool,
    ) {
        let deadline = Instant::now() + limit;
        loop {
            let ended = self.status();
            let (stdout, stderr) = self.printed();
            if done(&stdout, &stderr) {
                return;
            }
            assert!(
                ended.is_none(),
                "ended ({ended:?}) before {what}\n{stdout}\n{stderr}"
            );
            assert!(
                Instant::now() < deadline,
                "no {what} in {limit:?}\n{stdout}\n{stderr}"
            );
            std::thread::sleep(LOOK_INTERVAL);
        }
    }

    /// Waits for the command's end.
    ///
    /// # Panics
    /// If it does not end within `limit`.
    pub fn finish(mut self, limit: Duration) -> Ended {
        let deadline = Instant::now() + limit;
        loop {
            let status = self.status();
            let (stdout, stderr) = self.printed();
            if let Some(status) = status {
                return Ended {
                    status: status.code().unwrap_or(-1),
                    stdout,
                    stderr,
                };
            }
            assert!(
                Instant::now() < deadline,
                "still running after {limit:?}\n{stdout}\n{stderr}"
            );
            std::thread::sleep(LOOK_INTERVAL);
        }
    }

    fn status(&mut self) -> Option<ExitStatus> {
        self.child
            .try_wait()
            .unwrap_or_else(|e| panic!("waiting for exotrace: {e}"))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // Fails if the command has ended, which is as good.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn text(path: &Path) -> String {
    let bytes = fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    String::from_utf8_lossy(&bytes).into_owned()
}

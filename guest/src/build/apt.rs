//! Runs apt-get beside other processes that use apt: it waits for a lock that another process
//! holds.
//!
//! `DPkg::Lock::Timeout` would wait only for dpkg's lock; those of the package lists and of the
//! archive end apt-get at once. So apt-get is run again.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use crate::build::command::{self, CommandError};
use crate::progress::Progress;

/// The start of apt's line about a lock that another process holds.
const HELD: &str = "E: Could not get lock ";
/// The time limit of the wait for a lock. An upgrade of a whole system takes minutes.
const PATIENCE: Duration = Duration::from_secs(15 * 60);
/// The interval between attempts.
const INTERVAL: Duration = Duration::from_secs(2);

/// Runs `command`, an apt-get, to its end, with its output appended to `log`; `what` names its work
/// in messages. Reports to `progress` while another process holds a lock that it needs.
///
/// # Errors
/// If it cannot be run or fails. If the lock is not released within 15 minutes, the last failure.
pub fn run(
    what: &str,
    command: &mut Command,
    log: &Path,
    progress: &dyn Progress,
) -> Result<(), CommandError> {
    let patience = Patience {
        limit: PATIENCE,
        interval: INTERVAL,
    };
    run_patiently(what, command, log, progress, &patience)
}

struct Patience {
    limit: Duration,
    interval: Duration,
}

fn run_patiently(
    what: &str,
    command: &mut Command,
    log: &Path,
    progress: &dyn Progress,
    patience: &Patience,
) -> Result<(), CommandError> {
    // Its messages are parsed here.
    command.env("LC_ALL", "C");
    let deadline = Instant::now() + patience.limit;
    let mut waited = false;
    loop {
        let error = match command::run(what, command, log, |_| {}) {
            Err(error) => error,
            done => return done,
        };
        let Some(lock) = held(&error).filter(|_| Instant::now() < deadline) else {
            return Err(error);
        };
        if !waited {
            progress.phase(&format!("{what} waits for another apt: {lock}"));
            waited = true;
        }
        std::thread::sleep(patience.interval);
    }
}

/// Returns the lock that another process holds, and that process, in apt's words; `None` for
/// another failure.
fn held(error: &CommandError) -> Option<&str> {
    let CommandError::Failed { tail, .. } = error else {
        return None;
    };
    tail.lines().find_map(|line| line.strip_prefix(HELD))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::sync::Mutex;

    use super::*;

    /// The output of apt 2.6 with its lists locked.
    const LOCKED: &str = "Reading package lists...\nE: Could not get lock /l/lock. It is held by process 7 (apt)\n\
        E: Unable to lock directory /l/";
    const QUICK: Patience = Patience {
        limit: Duration::from_secs(60),
        interval: Duration::from_millis(1),
    };

    #[derive(Default)]
    struct Phases(Mutex<Vec<String>>);

    impl Progress for Phases {
        fn phase(&self, message: &str) {
            self.0.lock().unwrap().push(message.to_owned());
        }
        fn fraction(&self, _done: f64) {}
    }

    /// Runs an apt that fails with `message` for its first `times` runs, and returns the number of
    /// runs.
    fn outcome(
        message: &str,
        times: u32,
        patience: &Patience,
    ) -> (Result<(), String>, u32, Phases) {
        let folder = tempfile::tempdir().unwrap();
        let script = format!(
            "echo run >> runs; [ $(wc -l < runs) -gt {times} ] || {{ echo '{message}' >&2; exit 100; }}"
        );
        let mut apt = Command::new("sh");
        apt.args(["-c", &script]).current_dir(folder.path());
        let phases = Phases::default();
        let log = folder.path().join("log");
        let done = run_patiently("apt-get update", &mut apt, &log, &phases, patience);
        let runs = std::fs::read_to_string(folder.path().join("runs")).unwrap();
        let runs = u32::try_from(runs.lines().count()).unwrap();
        (done.map_err(|error| error.to_string()), runs, phases)
    }

    #[test]
    fn a_lock_that_another_apt_holds_is_waited_for() {
        let (done, runs, phases) = outcome(LOCKED, 3, &QUICK);
        assert_eq!((done, runs), (Ok(()), 4));
        assert_eq!(
            *phases.0.lock().unwrap(),
            ["apt-get update waits for another apt: /l/lock. It is held by process 7 (apt)"]
        );
    }

    #[test]
    fn any_other_failure_is_told_at_once() {
        let (done, runs, phases) = outcome("E: Unable to locate package x", 3, &QUICK);
        assert!(done.unwrap_err().contains("Unable to locate package x"));
        assert_eq!((runs, phases.0.lock().unwrap().len()), (1, 0));
    }

    #[test]
    fn a_lock_that_is_never_let_go_is_told_in_the_end() {
        let patience = Patience {
            limit: Duration::ZERO,
            ..QUICK
        };
        let (done, runs, phases) = outcome(LOCKED, u32::MAX, &patience);
        assert!(done.unwrap_err().contains("held by process 7"));
        assert_eq!((runs, phases.0.lock().unwrap().len()), (1, 0));
    }
}

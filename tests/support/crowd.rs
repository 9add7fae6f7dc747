//! A guest with many processes, and the guest's own `/proc` as a second opinion on everything that
//! is read from outside.
//!
//! Only one thread of the crowd runs, and it mostly naps. So what `/proc` printed a moment ago is
//! still true when the machine is paused. The processes: sleepers, pipes, a program with threads
//! and the C library, a child with another directory, a zombie, a deleted program, open files, a
//! stopped one.

use std::collections::BTreeMap;
use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};
use std::ops::Range;
use std::path::PathBuf;

use introspect::{Gpa, PhysicalMemory, PhysicalReadError};

use crate::host::Host;
use crate::kept::kept;
use crate::kernel::Kernel;
use crate::shell::{self, COMMAND_LIMIT, Shell};

/// The commands that start the crowd, line by line: a line of a terminal has at most 4095 bytes.
pub(crate) const START: [&str; 10] = [
    "for i in 1 2 3 4 5 6 7 8; do sleep 1${i}00 & done",
    "sleep 2000 | cat | cat > /dev/null & true",
    "workers 4 20 > /tmp/workers & while ! grep -q workers /tmp/workers; do sleep 0.1; done",
    "workers 1 3 > /tmp/workers2 & while ! grep -q workers /tmp/workers2; do sleep 0.1; done",
    "mkdir /tmp/dir; sh -c 'cd /tmp/dir; exec sleep 3000' & true",
    "sh -c 'sleep 0 & exec sleep 4000' & true",
    "cp /bin/busybox /tmp/busybox; /tmp/busybox sleep 5000 & sleep 0.2; rm /tmp/busybox",
    "sh -c 'exec 5< /proc/version 6> /tmp/open 7<> /dev/null; echo some > /tmp/open2; exec sleep 6000 8< /tmp/open2' & true",
    "sleep 7000 & kill -STOP $!; KEY=value sleep 8000 & true",
    // All sleepers sleep, one has ended, and one is stopped.
    "until s=$(cat /proc/[0-9]*/stat 2> /dev/null); n=$(echo \"$s\" | grep -c '(sleep) S\\|(busybox) S'); \
     [ $n -ge 14 ] && echo \"$s\" | grep -q ') Z ' && echo \"$s\" | grep -q ') T '; do sleep 0.1; done",
];
/// The name of the cache's entries and lock.
const TOPIC: &str = "tests-crowd";

/// The guest's `/proc` files of its processes and threads.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ProcTexts(BTreeMap<String, String>);

impl ProcTexts {
    /// Returns the files' paths below `/proc` and their contents, such as `17/stat` or
    /// `17/task/18/stack`. A link's content is its target.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0
            .iter()
            .map(|(path, text)| (path.as_str(), text.as_str()))
    }

    /// Returns the process IDs.
    pub fn processes(&self) -> Vec<i32> {
        let maps = self.0.keys().filter_map(|path| path.strip_suffix("/maps"));
        maps.filter_map(|pid| pid.parse().ok()).collect()
    }

    /// Returns the thread IDs of a process.
    pub fn threads(&self, pid: i32) -> Vec<i32> {
        let prefix = format!("{pid}/task/");
        let stat = self.0.keys().filter_map(|path| path.strip_suffix("/stat"));
        stat.filter_map(|path| path.strip_prefix(&prefix)?.parse().ok())
            .collect()
    }

    /// Returns the content of one file.
    pub fn get(&self, path: &str) -> Option<&str> {
        self.0.get(path).map(String::as_str)
    }
}

/// Restores a guest with the crowd.
///
/// # Panics
/// If the guest cannot be made or restored.
pub fn guest(host: &Host) -> Shell {
    Shell::restore(host, Kernel::small(), &snapshot_folder(host))
}

/// Returns the folder of such a guest's snapshot. The crowd is started once and kept in the cache.
///
/// # Panics
/// If the shell does not start it.
pub fn snapshot_folder(host: &Host) -> PathBuf {
    let shell = shell::snapshot_folder(host);
    let mut hash = DefaultHasher::new();
    (shell, START).hash(&mut hash);
    let name = format!("{:016x}", hash.finish());
    kept(TOPIC, &name, |folder| {
        eprintln!("starting a crowd of processes once");
        let shell = Shell::new(host);
        shell.type_lines(&START);
        shell.save(folder);
    })
}

/// The amount of the guest's `/proc` that is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Asked {
    /// `stat` and `stack` of threads.
    Threads,
    /// Also memory, arguments and open files of processes.
    Everything,
}

/// Reads the guest's `/proc` for all its processes and threads. A process of its own reads each
/// group of files.
///
/// # Panics
/// If the shell does not answer.
pub fn proc_texts(shell: &Shell, asked: Asked) -> ProcTexts {
    let mut texts = BTreeMap::new();
    for (files, least) in [
        ("[0-9]*/task/*/stat [0-9]*/task/*/stack", Asked::Threads),
        (
            "[0-9]*/maps [0-9]*/cmdline [0-9]*/environ",
            Asked::Everything,
        ),
        ("modules", Asked::Everything),
    ] {
        if asked == Asked::Threads && least != asked {
            continue;
        }
        let output = in_proc(shell, &format!("head -v -n 100000 {files}"));
        for part in format!("\n{output}").split("\n==> ").skip(1) {
            let Some((path, text)) = part.split_once(" <==\n") else {
                panic!("{files}: {part:?} has no name")
            };
            texts.insert(path.to_owned(), text.to_owned());
        }
    }
    if asked == Asked::Threads {
        return ProcTexts(texts);
    }
    let links = "[0-9]*/exe [0-9]*/cwd [0-9]*/root [0-9]*/fd/*";
    for line in in_proc(shell, &format!("ls -l {links}")).lines() {
        // The fields: mode, links, owner, group, size, three words of time, path, and the link's
        // target.
        if let Some((entry, target)) = line.split_once(" -> ")
            && let Some(path) = entry.rsplit(' ').next()
        {
            texts.insert(path.to_owned(), target.to_owned());
        }
    }
    ProcTexts(texts)
}

/// Returns each thread's context switches, to it and away from it, by its path below `/proc`. A
/// thread whose counts are unchanged has slept in between.
///
/// # Panics
/// If the shell does not answer.
pub fn switches(shell: &Shell) -> BTreeMap<String, String> {
    let mut counts = BTreeMap::<String, String>::new();
    for line in in_proc(shell, "grep -s ctxt [0-9]*/task/*/status").lines() {
        if let Some((path, count)) = line.split_once("/status:") {
            *counts.entry(path.to_owned()).or_default() += count;
        }
    }
    counts
}

/// Returns the output of a command that runs in /proc. Processes that end meanwhile are no failure.
fn in_proc(shell: &Shell, command: &str) -> String {
    let command = format!("(cd /proc; {command} 2> /dev/null)");
    shell.start(&command).answer(8 * COMMAND_LIMIT).output
}

/// Copies a paused machine's memory.
///
/// # Panics
/// If it cannot be read.
pub fn copy_of(memory: &impl PhysicalMemory) -> Copy {
    let ranges = memory.ram().into_iter().map(|range| {
        let length = usize::try_from(range.end - range.start).unwrap_or_else(|e| panic!("{e}"));
        let mut bytes = vec![0; length];
        let read = memory.read_physical(Gpa(range.start), &mut bytes);
        read.unwrap_or_else(|e| panic!("{e}"));
        (range, bytes)
    });
    Copy(ranges.collect())
}

/// A copy of guest memory.
pub struct Copy(Vec<(Range<u64>, Vec<u8>)>);

impl PhysicalMemory for Copy {
    fn read_physical(&self, address: Gpa, buf: &mut [u8]) -> Result<(), PhysicalReadError> {
        let length = buf.len();
        let found = self.0.iter().find_map(|(range, bytes)| {
            let start = usize::try_from(address.0.checked_sub(range.start)?).ok()?;
            bytes.get(start..start.checked_add(length)?)
        });
        buf.copy_from_slice(found.ok_or(PhysicalReadError { address, length })?);
        Ok(())
    }

    fn ram(&self) -> Vec<Range<u64>> {
        self.0.iter().map(|(range, _)| range.clone()).collect()
    }
}

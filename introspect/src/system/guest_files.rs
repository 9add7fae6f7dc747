//! The guest's files by their paths, as its first process sees them: those that the page cache or a
//! disk has, and some of `/proc`, whose texts are made here as the kernel makes them.

use super::processes::INIT;
use super::{Maps, PausedSystem, ProcessFile, Unavailable, known};
use crate::Gva;
use crate::kernel::task_list::{TaskInfo, TaskListError};

/// The maximum number of bytes of the kernel's banner and command line.
const MAX_LINE: usize = 4096;
/// An error in finding a file.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum GuestFileError {
    /// The path does not start at the root directory.
    #[error("the path must be absolute")]
    Relative,
    /// The file is not known.
    #[error("not in the guest's memory, which has only files that were used lately")]
    NotFound,
    /// The file of `/proc` is not one of those that are made here.
    #[error(
        "of /proc only loadavg, uptime, version, cmdline, and of a process auxv, cmdline, comm, environ and maps are read"
    )]
    NotOfProc,
    /// There is no such process.
    #[error("there is no process {pid}")]
    NoProcess {
        /// The number in the path.
        pid: i32,
    },
    /// Not all processes could be read.
    #[error("{0}")]
    Tasks(#[from] TaskListError),
    /// The kernel's structures are not known.
    #[error("{0}")]
    Unavailable(#[from] Unavailable),
}

/// A file of the guest.
#[derive(Debug)]
pub enum GuestFile<'s> {
    /// The whole text of a file of `/proc`.
    Text(Vec<u8>),
    /// A file of the page cache.
    Cached(ProcessFile<'s>),
}

impl<'s> PausedSystem<'s> {
    /// Finds a file by its absolute path, below the root directory of the first process. Texts of
    /// `/proc` have about `most` bytes at the most.
    ///
    /// # Errors
    /// If there is no such file in memory, or the kernel's structures do not tell.
    pub fn guest_file(&self, path: &[u8], most: usize) -> Result<GuestFile<'s>, GuestFileError> {
        if path.first() != Some(&b'/') {
            return Err(GuestFileError::Relative);
        }
        if let Some(name) = path.strip_prefix(b"/proc/") {
            return self.text_of_proc(name, most).map(GuestFile::Text);
        }
        let init = self.process_numbered(INIT)?;
        let file = self.file_at(&init, path)?;
        file.map(GuestFile::Cached).ok_or(GuestFileError::NotFound)
    }

    fn process_numbered(&self, pid: i32) -> Result<TaskInfo, GuestFileError> {
        let task = self.process(pid)??;
        task.ok_or(GuestFileError::NoProcess { pid })
    }

    fn text_of_proc(&self, name: &[u8], most: usize) -> Result<Vec<u8>, GuestFileError> {
        if let Some(text) = self.system_text(name)? {
            return Ok(text);
        }
        let end = name.iter().position(|byte| *byte == b'/');
        let (number, name) = name.split_at(end.unwrap_or(name.len()));
        let pid = std::str::from_utf8(number)
            .ok()
            .and_then(|n| n.parse().ok());
        let task = self.process_numbered(pid.ok_or(GuestFileError::NotOfProc)?)?;
        let text = self.process_text(&task, name.get(1..).unwrap_or_default(), most)?;
        text.ok_or(GuestFileError::NotOfProc)
    }

    /// Returns the text of a file of `/proc` about the whole system; `None` for another one.
    fn system_text(&self, name: &[u8]) -> Result<Option<Vec<u8>>, Unavailable> {
        let symbols = &self.system.symbols;
        let lost = |what, reason: &dyn std::fmt::Display| Unavailable {
            what,
            reason: reason.to_string(),
        };
        let symbol = |what, name| {
            let nameless = || lost(what, &format!("the kernel names no {name}"));
            symbols.address_of(name).map(Gva).ok_or_else(nameless)
        };
        let text = |what, at| self.view.c_string(at, MAX_LINE).map_err(|e| lost(what, &e));
        Ok(Some(match name {
            b"loadavg" => {
                let load = known(&self.system.load)?.read(self.view);
                let load = load.map_err(|error| lost("the load", &error))?;
                format!("{load}\n").into_bytes()
            }
            b"uptime" => {
                let uptime = known(&self.system.uptime)?.read(self.view);
                let uptime = uptime.map_err(|error| lost("the uptime", &error))?;
                format!("{uptime}\n").into_bytes()
            }
            b"version" => {
                let what = "the kernel's version";
                text(what, symbol(what, "linux_banner")?)?
            }
            b"cmdline" => {
                let what = "the kernel's command line";
                let at = self.view.u64(symbol(what, "saved_command_line")?);
                let mut line = text(what, Gva(at.map_err(|error| lost(what, &error))?))?;
                line.push(b'\n');
                line
            }
            _ => return Ok(None),
        }))
    }

    /// Returns the text of a file of `/proc/PID`, with about `most` bytes at the most. Returns
    /// `None` for a file that is not made here. A kernel thread's are empty, as in the kernel, but
    /// for its `comm`.
    ///
    /// # Errors
    /// If the kernel's layout for it is unknown.
    pub fn process_text(
        &self,
        task: &TaskInfo,
        name: &[u8],
        most: usize,
    ) -> Result<Option<Vec<u8>>, Unavailable> {
        Ok(Some(match name {
            b"auxv" => self.auxiliary_vector(task)?.unwrap_or_default(),
            b"cmdline" => {
                let program = self.program(task, most)?.and_then(Result::ok);
                program.map_or_else(Vec::new, |program| program.arguments.bytes)
            }
            b"comm" => [&self.name(task)[..], b"\n"].concat(),
            b"environ" => self.environment(task, most)?,
            b"maps" => lines(self.maps(task)?, most),
            _ => return Ok(None),
        }))
    }

    /// Returns the environment that a process's program was started with.
    fn environment(&self, task: &TaskInfo, most: usize) -> Result<Vec<u8>, Unavailable> {
        let layout = known(&self.system.processes)?;
        let found = task
            .user_mm()
            .and_then(|mm| layout.environment(self.view, mm, most).ok());
        Ok(found.map_or_else(Vec::new, |found| found.bytes))
    }
}

/// Returns the lines of mappings, up to the first one behind `most` bytes.
fn lines(maps: Option<Maps>, most: usize) -> Vec<u8> {
    let mut text = Vec::new();
    for area in maps.iter().flat_map(|maps| &maps.areas) {
        if text.len() >= most {
            break;
        }
        text.extend(area.line());
    }
    text
}

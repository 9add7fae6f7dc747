//! The program or library that a pattern names, and the mapped files that it stands for.
//!
//! It is named by its path or the last part of it. A path may lead over symbolic links. It is
//! resolved as the guest's first process sees it. `/proc/PID/root/PATH` is a path as process PID
//! sees it, in a container for instance. `/proc/PID/exe` is its program, and so is `a.out` where
//! the process is given otherwise. A word such as `libc` is the library of that name.

use introspect::system::{PausedSystem, TextFile, TextFiles, Unavailable};

use crate::name::{ProbePattern, matches_part};

/// The name that stands for a process's own program.
const PROGRAM: &str = "a.out";

/// A file that a pattern names.
pub(super) struct UserFile<'n> {
    name: &'n str,
    /// The process that has it by this name. `None` for all.
    process: Option<i32>,
    /// Its path without symbolic links, if it is known.
    path: Option<Vec<u8>>,
}

impl<'n> UserFile<'n> {
    /// Finds the file of this name, for the processes that it is for: the given one, or all.
    ///
    /// # Errors
    /// If the kernel's processes or files cannot be read.
    pub(super) fn named(
        look: &PausedSystem<'_>,
        name: &'n str,
        process: Option<i32>,
    ) -> Result<Self, Unavailable> {
        let (process, name) = match in_proc(name) {
            Some((pid, name)) => (Some(pid), name),
            None => (process, name),
        };
        let path = match process {
            Some(pid) if name == PROGRAM => program(look, pid)?,
            _ => stored(look, name, process)?.map(|file| file.path),
        };
        Ok(Self {
            name,
            process,
            path,
        })
    }

    /// Returns the files of this name that processes have mapped for execution.
    ///
    /// # Errors
    /// If the kernel's processes or the page cache cannot be read.
    pub(super) fn mapped<'s>(&self, look: &PausedSystem<'s>) -> Result<TextFiles<'s>, Unavailable> {
        look.text_files(self.process, &|path| self.is_at(path))
    }

    /// Returns the file at the path that the name is, whether it is mapped or not. `None` if the
    /// name is no path, or the guest's memory has no such file or not its first page.
    ///
    /// # Errors
    /// If the kernel's processes or the page cache cannot be read.
    pub(super) fn at_path<'s>(
        &self,
        look: &PausedSystem<'s>,
    ) -> Result<Option<TextFile<'s>>, Unavailable> {
        let file = stored(look, self.name, self.process)?;
        // The inode of overlayfs has no pages: they are those of the file below.
        Ok(file.filter(|file| !file.bytes_at(0, 1).is_empty()))
    }

    fn is_at(&self, path: &[u8]) -> bool {
        if self.path.as_ref().is_some_and(|known| known == path) {
            return true;
        }
        names_file(self.name, &String::from_utf8_lossy(path))
    }
}

/// Reads a name in the folder that a process has in `/proc`. Returns the process and the file's
/// name for it.
pub(super) fn in_proc(name: &str) -> Option<(i32, &str)> {
    let (pid, rest) = name.strip_prefix("/proc/")?.split_once('/')?;
    let pid = pid.parse().ok().filter(|pid| *pid > 0)?;
    let of_root = || {
        rest.strip_prefix("root")
            .filter(|path| path.starts_with('/'))
    };
    match rest {
        "exe" => Some((pid, PROGRAM)),
        _ => Some((pid, of_root()?)),
    }
}

fn stored<'s>(
    look: &PausedSystem<'s>,
    name: &str,
    process: Option<i32>,
) -> Result<Option<TextFile<'s>>, Unavailable> {
    match name.starts_with('/') && ProbePattern::is_exact(name) {
        true => look.text_file_at(process, name.as_bytes()),
        false => Ok(None),
    }
}

/// Returns the path of a process's own program.
fn program(look: &PausedSystem<'_>, pid: i32) -> Result<Option<Vec<u8>>, Unavailable> {
    let Ok(Some(task)) = look.process(pid)? else {
        return Ok(None);
    };
    let program = look.program(&task, 0)?.and_then(Result::ok);
    Ok(program.and_then(|program| program.path))
}

/// Returns the last part of a path.
pub(super) fn last_part(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

/// Checks whether a pattern names the file at `path`.
pub(super) fn names_file(pattern: &str, path: &str) -> bool {
    let last = last_part(path);
    let is_library = || {
        let version = last.strip_prefix(pattern);
        pattern.starts_with("lib")
            && version.is_some_and(|rest| rest.starts_with(".so") || rest.starts_with('-'))
            && last.contains(".so")
    };
    // Distributions have merged these folders into /usr, and links lead there.
    let is_merged = || {
        let merged = ["/bin/", "/sbin/", "/lib/", "/lib64/"];
        let rest = path.strip_prefix("/usr");
        rest.is_some_and(|rest| {
            merged.iter().any(|folder| pattern.starts_with(folder)) && matches_part(pattern, rest)
        })
    };
    matches_part(pattern, path) || matches_part(pattern, last) || is_library() || is_merged()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_named_by_path_last_part_or_library() {
        for (pattern, path, named) in [
            ("/usr/bin/sh", "/usr/bin/sh", true),
            ("sh", "/usr/bin/sh", true),
            ("libc", "/lib/x86_64-linux-gnu/libc.so.6", true),
            ("libc", "/lib/libc-2.31.so", true),
            ("libc", "/lib/libcrypt.so.1", false),
            ("libc", "/bin/libc-tool", false),
            ("libstdc++", "/usr/lib/libstdc++.so.6.0.30", true),
            ("ld", "/lib/ld.so", false),
        ] {
            assert_eq!(names_file(pattern, path), named, "{pattern} {path}");
        }
    }

    #[test]
    fn files_of_a_process_are_named_as_its_folder_in_proc_has_them() {
        for (name, expected) in [
            ("/proc/12/exe", Some((12, "a.out"))),
            ("/proc/12/root/usr/bin/app", Some((12, "/usr/bin/app"))),
            ("/proc/12/root", None),
            ("/proc/12/rooted/app", None),
            ("/proc/12/maps", None),
            ("/proc/0/exe", None),
            ("/proc/self/exe", None),
            ("/usr/bin/app", None),
        ] {
            assert_eq!(in_proc(name), expected, "{name}");
        }
    }
}

//! Files by their paths as a process sees them, read from the page cache and the guest's disks, and
//! what a debugger asks of a process besides.

use std::fmt;

use super::user_objects::CachedBytes;
use super::{PausedSystem, StoredFile, Unavailable, known};
use crate::kernel::fpu::FXSAVE;
use crate::kernel::page_cache::CachedFile;
use crate::kernel::path::LinkTarget;
use crate::kernel::task_list::TaskInfo;
use crate::user::file_bytes::FileBytes;
use crate::x86_64::PAGE;
use crate::{CpuRegisters, Gpa, Gva};

/// The maximum number of names in a path.
const MAX_NAMES: usize = 256;
/// The maximum number of links in a path (`MAXSYMLINKS`, include/linux/namei.h).
const MAX_LINKS: usize = 40;

/// A file in the page cache.
pub struct ProcessFile<'s> {
    /// The file.
    pub file: CachedFile,
    look: PausedSystem<'s>,
    stored: StoredFile<'s>,
}

impl fmt::Debug for ProcessFile<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ProcessFile")
            .field("file", &self.file)
            .finish_non_exhaustive()
    }
}

impl<'s> ProcessFile<'s> {
    /// Returns a file as it is in the page cache of a paused system.
    #[must_use]
    pub fn new(look: PausedSystem<'s>, file: CachedFile) -> Self {
        Self {
            stored: look.stored_file(&file),
            file,
            look,
        }
    }

    /// Reads the file's bytes from `offset` on. `read` reads physical memory, within one page.
    /// Returns the number of bytes up to the file's end, or up to the first page that is neither in
    /// memory nor on a disk.
    pub fn read(
        &self,
        offset: u64,
        buf: &mut [u8],
        read: &dyn Fn(Gpa, &mut [u8]) -> bool,
    ) -> usize {
        let left = self.file.size.saturating_sub(offset);
        let wanted = usize::try_from(left).unwrap_or(usize::MAX).min(buf.len());
        let mut done = 0;
        while done < wanted {
            let at = offset.saturating_add(done as u64);
            let in_page = usize::try_from(PAGE - at % PAGE).unwrap_or(1);
            let end = wanted.min(done.saturating_add(in_page));
            let Some(part) = buf.get_mut(done..end) else {
                break;
            };
            let there = self.look.cached_byte(&self.file, at);
            let is_read = match there {
                Some(gpa) => read(gpa, part),
                None => self.stored.read_at(at, part).is_ok(),
            };
            if !is_read {
                break;
            }
            done = end;
        }
        done
    }
}

/// The place of a thread's registers of floating point and vectors.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Floating {
    /// In the CPU with this number.
    Cpu(usize),
    /// In memory, as FXSAVE stores them.
    Memory(Box<[u8; FXSAVE]>),
}

/// Returns the names in a path.
fn names_of(path: &[u8]) -> Vec<Vec<u8>> {
    let names = path.split(|byte| *byte == b'/');
    let names = names.filter(|name| !matches!(*name, b"" | b"."));
    names.map(<[u8]>::to_vec).collect()
}

/// Returns the names that a path leads to whose part of `depth` names is a link to `target`.
fn led_to(names: &[Vec<u8>], depth: usize, target: &[u8]) -> Vec<Vec<u8>> {
    let mut led = match target.first() {
        Some(b'/') => Vec::new(),
        _ => names.iter().take(depth - 1).cloned().collect(),
    };
    for name in names_of(target) {
        match name.as_slice() {
            b".." => drop(led.pop()),
            _ => led.push(name),
        }
    }
    led.extend(names.iter().skip(depth).cloned());
    led
}

impl<'s> PausedSystem<'s> {
    /// Returns the place of a thread's registers of floating point and vectors. `None` if it is
    /// unknown.
    #[must_use]
    pub fn floating(&self, task: &TaskInfo) -> Option<Floating> {
        let layout = self.system.floating.as_ref();
        let is_in_memory = || layout?.is_in_memory(self.view, task.address).ok();
        match self.cpu_number_of(task) {
            Some(cpu) if self.cpus.get(cpu)?.in_user_mode() => Some(Floating::Cpu(cpu)),
            Some(cpu) if !is_in_memory()? => Some(Floating::Cpu(cpu)),
            _ => {
                let saved = layout?.saved(self.view, task.address).ok()?;
                Some(Floating::Memory(Box::new(saved)))
            }
        }
    }

    /// Finds a file by its absolute path below the root directory of a process. Symbolic links are
    /// followed. Only files that were used lately are found.
    ///
    /// Returns `None` if there is no such file in the kernel's memory.
    ///
    /// # Errors
    /// If the kernel's layout for files is unknown.
    pub fn file_at(
        &self,
        task: &TaskInfo,
        path: &[u8],
    ) -> Result<Option<ProcessFile<'s>>, Unavailable> {
        let found = self.file_behind(task, path)?;
        Ok(found.map(|(file, _)| ProcessFile::new(*self, file)))
    }

    /// Finds a file as [`file_at`](Self::file_at) does. Also returns its path without links.
    pub(super) fn file_behind(
        &self,
        task: &TaskInfo,
        path: &[u8],
    ) -> Result<Option<(CachedFile, Vec<u8>)>, Unavailable> {
        let processes = known(&self.system.processes)?;
        let cache = known(&self.system.page_cache)?;
        let Ok(Some(root)) = processes.root(self.view, task.address) else {
            return Ok(None);
        };
        let mut names = names_of(path);
        for _ in 0..MAX_LINKS {
            if names.len() > MAX_NAMES {
                return Ok(None);
            }
            let mut found = None;
            let mut led = None;
            for depth in 1..=names.len() {
                let part: Vec<&[u8]> = names.iter().take(depth).map(Vec::as_slice).collect();
                let Ok(Some(inode)) = processes.paths().find(self.view, root, &part) else {
                    return Ok(None);
                };
                found = cache.of_inode(self.view, inode).ok();
                if let Some(target) = self.link_target(inode) {
                    led = Some((depth, target));
                    break;
                }
            }
            let Some((depth, target)) = led else {
                let path = names.iter().flat_map(|name| [b"/", name.as_slice()]);
                return Ok(found.map(|file| (file, path.flatten().copied().collect())));
            };
            names = led_to(&names, depth, &target);
        }
        Ok(None)
    }

    /// Returns where a symbolic link leads; `None` if the file is no link, or that is not in
    /// memory.
    fn link_target(&self, inode: Gva) -> Option<Vec<u8>> {
        match self.system.links?.target(self.view, inode).ok()?? {
            LinkTarget::Text(text) => Some(text),
            LinkTarget::InPages => {
                let cache = self.system.page_cache.as_ref().ok()?;
                let file = cache.of_inode(self.view, inode).ok()?;
                let size = usize::try_from(file.size).ok()?;
                let mut text = vec![0; size.min(usize::try_from(PAGE).ok()?)];
                let bytes = CachedBytes::new(*self, cache, file);
                bytes.read_at(0, &mut text).ok()?;
                Some(text)
            }
        }
    }

    /// Returns the auxiliary vector of a process, or `None` for one without memory.
    ///
    /// # Errors
    /// If the kernel's layout for it is unknown.
    pub fn auxiliary_vector(&self, task: &TaskInfo) -> Result<Option<Vec<u8>>, Unavailable> {
        let layout = known(&self.system.processes)?;
        let Some(mm) = task.user_mm() else {
            return Ok(None);
        };
        let vector = layout.auxiliary_vector(self.view, mm);
        Ok(vector.ok().flatten())
    }

    /// Returns the base of FS of a thread, or `None` if it is unknown.
    #[must_use]
    pub fn fs_base(&self, task: &TaskInfo) -> Option<u64> {
        if let Some(cpu) = self.cpu_of(task) {
            return Some(cpu.fs_base);
        }
        let layout = self.system.processes.as_ref().ok()?;
        layout.fs_base(self.view, task.address).ok().flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_in_a_path_leads_elsewhere() {
        for (path, depth, target, led) in [
            ("/lib/x/libc.so", 1, "usr/lib", "usr/lib/x/libc.so"),
            (
                "/usr/lib/libz.so.1",
                3,
                "libz.so.1.2",
                "usr/lib/libz.so.1.2",
            ),
            (
                "/usr/bin/awk",
                3,
                "/etc/alternatives/awk",
                "etc/alternatives/awk",
            ),
            ("/a/b/c", 2, "../d/./e", "d/e/c"),
            ("/a", 1, "../../b", "b"),
        ] {
            let found = led_to(&names_of(path.as_bytes()), depth, target.as_bytes());
            assert_eq!(found.join(&b'/'), led.as_bytes(), "{path}");
        }
    }
}

//! The programs and libraries that processes have mapped for execution, each file once. Each has
//! its functions, and the physical addresses of its text.

use std::collections::HashMap;
use std::fmt;

use super::object_symbols::{Budget, ObjectSymbols};
use super::processes::INIT;
use super::user_objects::CachedBytes;
use super::{PausedSystem, Unavailable, known};
use crate::kernel::page_cache::{CachedFile, CachedPage};
use crate::kernel::vma::VmaFlags;
use crate::user::file_bytes::FileBytes;
use crate::user::object_file::{ObjectFile, Segment};
use crate::user::static_probes::StaticSites;
use crate::user::symbols::FunctionSymbols;
use crate::x86_64::PAGE;
use crate::{Gpa, Gva};

/// The maximum number of files listed.
const MAX_FILES: usize = 4096;
/// The maximum number of processes listed for a file.
const MAX_PROCESSES: usize = 1 << 16;

/// A file that is mapped for execution, or was asked for by its path.
pub struct TextFile<'s> {
    /// The file's path.
    pub path: Vec<u8>,
    /// The file in the page cache.
    pub file: CachedFile,
    /// The numbers of the processes that map it.
    pub processes: Vec<i32>,
    look: PausedSystem<'s>,
    bytes: CachedBytes<'s>,
    symbols: ObjectSymbols,
}

impl fmt::Debug for TextFile<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TextFile")
            .field("path", &String::from_utf8_lossy(&self.path))
            .field("file", &self.file)
            .finish_non_exhaustive()
    }
}

/// The files found.
#[derive(Debug, Default)]
pub struct TextFiles<'s> {
    /// The files, in the order of their first mapping.
    pub files: Vec<TextFile<'s>>,
    /// One sentence for each part that could not be read.
    pub incomplete: Vec<String>,
}

impl TextFile<'_> {
    /// Returns its functions, at the addresses it was linked for. The first call reads them.
    pub fn functions(&self) -> &FunctionSymbols {
        self.symbols.get(&self.bytes)
    }

    /// Returns one sentence for each part of its functions that could not be read. There is none
    /// before they are requested.
    pub fn lost_functions(&self) -> impl Iterator<Item = String> {
        self.symbols.lost()
    }

    /// Returns the segments that the file declares, or none if it is not a program.
    #[must_use]
    pub fn segments(&self) -> Vec<Segment> {
        let object = ObjectFile::parse(&self.bytes);
        object.map_or_else(|_| Vec::new(), |object| object.segments().to_vec())
    }

    /// Returns the sites of its static probes, or none if it is not a program.
    #[must_use]
    pub fn static_sites(&self) -> StaticSites {
        let object = ObjectFile::parse(&self.bytes);
        object.map_or_else(
            |_| StaticSites::default(),
            |object| StaticSites::read(&object),
        )
    }

    /// Returns the file's bytes from `offset` on, as many of `most` as are in memory without a gap.
    #[must_use]
    pub fn bytes_at(&self, offset: u64, most: usize) -> Vec<u8> {
        let left = self.file.size.saturating_sub(offset);
        let mut bytes = vec![0; most.min(usize::try_from(left).unwrap_or(most))];
        while !bytes.is_empty() && self.bytes.read_at(offset, &mut bytes).is_err() {
            let in_page = usize::try_from(PAGE - offset % PAGE).unwrap_or(0);
            // The next page may be missing, and then this one.
            match bytes.len() > in_page {
                true => bytes.truncate(in_page),
                false => bytes.clear(),
            }
        }
        bytes
    }

    /// Returns the GPA of the byte at `offset` now, or `None` if its page is not in memory.
    #[must_use]
    pub fn physical(&self, offset: u64) -> Option<Gpa> {
        self.look.cached_byte(&self.file, offset)
    }
}

impl<'s> PausedSystem<'s> {
    /// Returns the files that processes have mapped for execution, or that the `process` has, if
    /// their path is `wanted`.
    ///
    /// # Errors
    /// If the kernel's layout for processes, mappings or the page cache is unknown.
    pub fn text_files(
        &self,
        process: Option<i32>,
        wanted: &dyn Fn(&[u8]) -> bool,
    ) -> Result<TextFiles<'s>, Unavailable> {
        let layout = known(&self.system.page_cache)?;
        let mut found = TextFiles::default();
        let mut known: HashMap<Gva, usize> = HashMap::new();
        let budget = Budget::default();
        let tasks = self.processes()?;
        found
            .incomplete
            .extend(tasks.error.map(|error| error.to_string()));
        for task in &tasks.items {
            if process.is_some_and(|pid| pid != task.pid) {
                continue;
            }
            let Some(maps) = self.maps(task)? else {
                continue;
            };
            found
                .incomplete
                .extend(maps.error.map(|error| error.to_string()));
            for area in maps.areas {
                let Some(file) = area.area.file else { continue };
                if !area.area.flags.has(VmaFlags::EXEC) || !wanted(&area.name) {
                    continue;
                }
                let file = match layout.open_file(self.view, file) {
                    Ok(file) => file,
                    Err(error) => {
                        found.incomplete.push(error.to_string());
                        continue;
                    }
                };
                if let Some(known) = known
                    .get(&file.mapping)
                    .and_then(|at| found.files.get_mut(*at))
                {
                    if known.processes.last() != Some(&task.pid)
                        && known.processes.len() < MAX_PROCESSES
                    {
                        known.processes.push(task.pid);
                    }
                    continue;
                }
                if found.files.len() == MAX_FILES {
                    continue;
                }
                known.insert(file.mapping, found.files.len());
                found.files.push(TextFile {
                    path: area.name,
                    file,
                    processes: vec![task.pid],
                    look: *self,
                    bytes: CachedBytes::new(*self, layout, file),
                    symbols: ObjectSymbols::new(&budget),
                });
            }
        }
        Ok(found)
    }

    /// Returns the file at an absolute path, whether it is mapped or not. The path is that of the
    /// `process`, or of the first one. Symbolic links are followed. Returns `None` if there is no
    /// such file in the kernel's memory, or no such process.
    ///
    /// # Errors
    /// If the kernel's layout for processes, files or the page cache is unknown.
    pub fn text_file_at(
        &self,
        process: Option<i32>,
        path: &[u8],
    ) -> Result<Option<TextFile<'s>>, Unavailable> {
        let layout = known(&self.system.page_cache)?;
        let Ok(Some(task)) = self.process(process.unwrap_or(INIT))? else {
            return Ok(None);
        };
        let found = self.file_behind(&task, path)?;
        Ok(found.map(|(file, path)| TextFile {
            path,
            file,
            processes: Vec::new(),
            look: *self,
            bytes: CachedBytes::new(*self, layout, file),
            symbols: ObjectSymbols::new(&Budget::default()),
        }))
    }

    /// Returns the GPA of the byte at `offset` of a file now, or `None` if its page is not in
    /// memory.
    #[must_use]
    pub fn cached_byte(&self, file: &CachedFile, offset: u64) -> Option<Gpa> {
        let layout = self.system.page_cache.as_ref().ok()?;
        match layout.page(self.view, file, offset / PAGE) {
            Ok(CachedPage::Present { gpa, .. }) => Some(Gpa(gpa.0 + offset % PAGE)),
            _ => None,
        }
    }
}

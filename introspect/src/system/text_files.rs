//! The programs and libraries that processes have mapped for execution, each file once: its functions, and where the bytes of its text
//! stand in memory.

use std::collections::HashMap;

use super::object_symbols::{Budget, ObjectSymbols};
use super::user_objects::CachedBytes;
use super::{PausedSystem, Unavailable};
use crate::kernel::page_cache::{CachedFile, CachedPage};
use crate::kernel::vma::VmaFlags;
use crate::user::file_bytes::FileBytes;
use crate::user::object_file::{ObjectFile, Segment};
use crate::user::static_probes::StaticSites;
use crate::user::symbols::FunctionSymbols;
use crate::x86_64::PAGE;
use crate::{Gpa, Gva};

/// Most files that are told of.
const MAX_FILES: usize = 4096;
/// Most processes of a file that are told of.
const MAX_PROCESSES: usize = 1 << 16;

/// A file that is mapped for execution.
pub struct TextFile<'s> {
    /// Its path.
    pub path: Vec<u8>,
    /// Its place in the page cache.
    pub file: CachedFile,
    /// Processes that map it.
    pub processes: Vec<i32>,
    look: PausedSystem<'s>,
    bytes: CachedBytes<'s>,
    symbols: ObjectSymbols,
}

/// The files found.
#[derive(Default)]
pub struct TextFiles<'s> {
    /// In the order of their first mapping.
    pub files: Vec<TextFile<'s>>,
    /// What could not be read, a sentence each.
    pub incomplete: Vec<String>,
}

impl TextFile<'_> {
    /// Its functions, at the addresses it was linked for; read at the first call.
    pub fn functions(&self) -> &FunctionSymbols {
        self.symbols.get(&self.bytes)
    }

    /// What of its functions could not be read, a sentence each; nothing before they were asked for.
    pub fn lost_functions(&self) -> impl Iterator<Item = String> {
        self.symbols.lost()
    }

    /// The segments that the file tells how to load; none if it is no program.
    #[must_use]
    pub fn segments(&self) -> Vec<Segment> {
        let object = ObjectFile::parse(&self.bytes);
        object.map_or_else(|_| Vec::new(), |object| object.segments().to_vec())
    }

    /// The sites of its static probes; none if it is no program.
    #[must_use]
    pub fn static_sites(&self) -> StaticSites {
        let object = ObjectFile::parse(&self.bytes);
        object.map_or_else(
            |_| StaticSites::default(),
            |object| StaticSites::read(&object),
        )
    }

    /// The file's bytes from `offset` on, as many of `most` as are in memory one after the other.
    #[must_use]
    pub fn bytes_at(&self, offset: u64, most: usize) -> Vec<u8> {
        let left = self.file.size.saturating_sub(offset);
        let mut bytes = vec![0; most.min(usize::try_from(left).unwrap_or(most))];
        while !bytes.is_empty() && self.bytes.read_at(offset, &mut bytes).is_err() {
            let in_page = usize::try_from(PAGE - offset % PAGE).unwrap_or(0);
            // The next page may be missing, then this one.
            match bytes.len() > in_page {
                true => bytes.truncate(in_page),
                false => bytes.clear(),
            }
        }
        bytes
    }

    /// Where the byte at `offset` stands in physical memory now; `None` if its page is not in memory.
    #[must_use]
    pub fn physical(&self, offset: u64) -> Option<Gpa> {
        self.look.cached_byte(&self.file, offset)
    }
}

impl<'s> PausedSystem<'s> {
    /// The files that processes have mapped for execution, or that the `process` has: those whose path is `wanted`.
    ///
    /// # Errors
    /// If the kernel does not tell of processes, mappings or the page cache.
    pub fn text_files(
        &self,
        process: Option<i32>,
        wanted: &dyn Fn(&[u8]) -> bool,
    ) -> Result<TextFiles<'s>, Unavailable> {
        let layout = self
            .system
            .page_cache
            .as_ref()
            .map_err(Unavailable::clone)?;
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
                    bytes: CachedBytes::new(layout, self.view, file),
                    symbols: ObjectSymbols::new(&budget),
                });
            }
        }
        Ok(found)
    }

    /// Where the byte at `offset` of a file stands in physical memory now; `None` if its page is not in memory.
    #[must_use]
    pub fn cached_byte(&self, file: &CachedFile, offset: u64) -> Option<Gpa> {
        let layout = self.system.page_cache.as_ref().ok()?;
        match layout.page(self.view, file, offset / PAGE) {
            Ok(CachedPage::Present { gpa, .. }) => Some(Gpa(gpa.0 + offset % PAGE)),
            _ => None,
        }
    }
}

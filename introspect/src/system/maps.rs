//! The mappings of a process, each VMA with its name.

use std::collections::HashMap;

use super::{PausedSystem, Unavailable, known};
use crate::Gva;
use crate::kernel::files::FileIdentity;
use crate::kernel::list::Partial;
use crate::kernel::task_list::TaskInfo;
use crate::kernel::vma::{Vma, VmaError, VmaName};

/// The maximum number of bytes of all names. A guest may have a million VMAs, and paths of 4096
/// bytes.
const MAX_NAME_BYTES: usize = 32 << 20;

/// The width in characters of what stands before the name of a mapping, without the last blank
/// (`show_map_vma`, fs/proc/task_mmu.c).
const NAME_COLUMN: usize = 72;

/// A VMA with its name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NamedArea {
    /// The VMA: its range, rights and file.
    pub area: Vma,
    /// The identity of its file, or zeros without one.
    pub file: FileIdentity,
    /// The path, a name in brackets, or nothing.
    pub name: Vec<u8>,
}

impl NamedArea {
    /// Returns its line of `/proc/PID/maps` (`proc_pid_maps(5)`), with the newline.
    #[must_use]
    pub fn line(&self) -> Vec<u8> {
        let permissions = self.area.flags.permissions();
        let offset = self.area.file.map_or(0, |_| self.area.file_offset);
        let place = format!(
            "{:08x}-{:08x} {} {offset:08x} {:02x}:{:02x} {} ",
            self.area.start,
            self.area.end,
            String::from_utf8_lossy(&permissions),
            self.file.major,
            self.file.minor,
            self.file.inode,
        );
        if self.name.is_empty() {
            return [place.as_bytes(), b"\n"].concat();
        }
        let padded = format!("{place:NAME_COLUMN$} ");
        [padded.as_bytes(), &self.name, b"\n"].concat()
    }
}

/// The VMAs of a process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Maps {
    /// The VMAs, ascending by address.
    pub areas: Vec<NamedArea>,
    /// The reason why some VMAs or names may be missing.
    pub error: Option<VmaError>,
}

impl PausedSystem<'_> {
    /// Returns the VMAs of a process, which are none for one without memory.
    ///
    /// # Errors
    /// If the kernel's layout for them is unknown.
    pub fn vmas(&self, task: &TaskInfo) -> Result<Partial<Vma, VmaError>, Unavailable> {
        let layout = known(&self.system.areas)?;
        let none = || Partial {
            items: Vec::new(),
            error: None,
        };
        let mm = task.user_mm();
        Ok(mm.map_or_else(none, |mm| layout.vmas(self.view, mm)))
    }

    /// Returns the mappings of a process, in the order and with the names of `/proc/PID/maps`.
    /// Returns `None` for a process without memory.
    ///
    /// # Errors
    /// If the kernel's layout for them is unknown.
    pub fn maps(&self, task: &TaskInfo) -> Result<Option<Maps>, Unavailable> {
        let layout = known(&self.system.areas)?;
        let Some(mm) = task.user_mm() else {
            return Ok(None);
        };
        let view = self.view;
        let walk = layout.vmas(view, mm);
        let (mut vmas, mut error) = (walk.items, walk.error);
        let mut areas = Vec::with_capacity(vmas.len());
        let bounds = match layout.bounds(view, mm) {
            Ok(bounds) => bounds,
            Err(error) => {
                return Ok(Some(Maps {
                    areas,
                    error: Some(error),
                }));
            }
        };
        match layout.gate(view, &bounds) {
            Ok(gate) => vmas.extend(gate),
            Err(broken) => error = error.or(Some(broken)),
        }
        // Several VMAs usually map the same file.
        let mut files: HashMap<Gva, (FileIdentity, Vec<u8>)> = HashMap::new();
        let mut bytes = 0;
        for area in vmas {
            if bytes > MAX_NAME_BYTES {
                let named = areas.len();
                error = error.or(Some(VmaError::LongNames { mm, named, bytes }));
                break;
            }
            let mut file = FileIdentity::default();
            if let Some(address) = area.file {
                match files.get(&address) {
                    Some((identity, _)) => file = *identity,
                    None => match layout.identity(view, address) {
                        Ok(identity) => {
                            file = identity;
                            files.insert(address, (identity, self.path_of(address)));
                        }
                        Err(broken) => error = error.or(Some(broken)),
                    },
                }
            }
            let name = match layout.name(view, &bounds, &area) {
                Ok(VmaName::Unnamed) => Vec::new(),
                Ok(VmaName::Text(text)) => text,
                Ok(VmaName::File(address)) => match files.get(&address) {
                    Some((_, path)) => path.clone(),
                    None => self.path_of(address),
                },
                Err(broken) => {
                    error = error.or(Some(broken));
                    Vec::new()
                }
            };
            bytes += name.len();
            areas.push(NamedArea { area, file, name });
        }
        Ok(Some(Maps { areas, error }))
    }
}

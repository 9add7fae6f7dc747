//! The programs and libraries of a process: the mapping of each, its bytes from the page cache, its
//! functions.
//!
//! Bytes that are not in memory are read from the guest's disks, and from the host if there is a
//! folder with copies of the guest's files.

use std::collections::HashMap;
use std::fmt;
use std::ops::Range;

use object::elf::PT_GNU_EH_FRAME;

use super::generated_code::GeneratedCode;
use super::object_symbols::{Budget, ObjectSymbols};
use super::{NamedArea, PausedSystem, StoredFile, Unavailable};
use crate::Gva;
use crate::kernel::page_cache::{CachedFile, CachedPage, PageCacheLayout};
use crate::kernel::task_list::TaskInfo;
use crate::kernel::vma::VmaFlags;
use crate::stack::user::{MappedObject, MissingBytes, ObjectBytes, UserUnwinder};
use crate::user::build_id::BuildId;
use crate::user::demangle::demangle;
use crate::user::file_bytes::{FileBytes, FileMapping, LayeredBytes, Missing, PagedBytes};
use crate::user::load_base::LoadBase;
use crate::user::object_file::{ObjectFile, Segment};
use crate::user::symbols::{Function, FunctionSymbols};
use crate::user::symfs::{BuildCheck, HostFile, Symfs, SymfsError};
use crate::user::vdso::Vdso;

/// The maximum number of objects of a process that are read.
const MAX_OBJECTS: usize = 4096;
/// The name of the vdso's VMA.
const VDSO: &[u8] = b"[vdso]";
const EH_FRAME: &str = ".eh_frame";

/// A mapped object.
pub struct UserObject<'s> {
    /// The path, or `[vdso]`.
    pub path: Vec<u8>,
    /// The range at which its code is mapped.
    pub text: Range<u64>,
    /// The distance from its link-time addresses to those of the process.
    pub base: LoadBase,
    segments: Vec<Segment>,
    eh_frame: Option<Range<u64>>,
    bytes: Box<dyn FileBytes + 's>,
    symbols: ObjectSymbols,
}

impl fmt::Debug for UserObject<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UserObject")
            .field("path", &String::from_utf8_lossy(&self.path))
            .field("text", &self.text)
            .field("base", &self.base)
            .finish_non_exhaustive()
    }
}

/// The objects of a process.
#[derive(Default)]
pub struct UserObjects<'s> {
    /// The objects, ascending by address.
    pub objects: Vec<UserObject<'s>>,
    /// Other executable ranges.
    pub other_code: Vec<Range<u64>>,
    /// One sentence for each part that could not be read.
    pub incomplete: Vec<String>,
    generated: Option<GeneratedCode<'s>>,
}

/// The name of a place in generated code.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GeneratedPlace {
    /// The address.
    pub address: u64,
    /// The name that the program gave the code.
    pub name: String,
    /// The distance from the start of the code, in bytes.
    pub offset: u64,
    /// The path of the file with the names.
    pub file: String,
}

impl fmt::Debug for UserObjects<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UserObjects")
            .field("objects", &self.objects)
            .field("other_code", &self.other_code)
            .field("incomplete", &self.incomplete)
            .finish_non_exhaustive()
    }
}

impl<'s> UserObjects<'s> {
    /// Returns the name of code that the process generates, by its file `/tmp/perf-PID.map`. The
    /// first request reads the file.
    #[must_use]
    pub fn generated_at(&self, address: u64) -> Option<GeneratedPlace> {
        let holds = |range: &Range<u64>| range.contains(&address);
        if !self.other_code.iter().any(holds) {
            return None;
        }
        let (map, file) = self.generated.as_ref()?.get();
        let (name, offset) = map.resolve(address)?;
        Some(GeneratedPlace {
            address,
            name: name.into_owned(),
            offset,
            file: file.to_owned(),
        })
    }

    /// Finds the code of this name that the process generates. The first request reads the file,
    /// if there is any generated code.
    #[must_use]
    pub fn generated_named(&self, name: &str) -> Vec<GeneratedPlace> {
        let generated = self
            .generated
            .as_ref()
            .filter(|_| !self.other_code.is_empty());
        let Some((map, file)) = generated.map(GeneratedCode::get) else {
            return Vec::new();
        };
        let place = |address| GeneratedPlace {
            address,
            name: name.to_owned(),
            offset: 0,
            file: file.to_owned(),
        };
        map.all_of(name).map(place).collect()
    }

    /// Returns one sentence for each reason why names of generated code may be missing. There is
    /// none before they are requested.
    pub fn lost_generated(&self) -> impl Iterator<Item = String> {
        self.generated.iter().flat_map(GeneratedCode::lost)
    }

    /// Returns the object whose code holds `address`.
    #[must_use]
    pub fn at(&self, address: u64) -> Option<&UserObject<'s>> {
        let after = self
            .objects
            .partition_point(|object| object.text.start <= address);
        let object = self.objects.get(after.checked_sub(1)?)?;
        object.text.contains(&address).then_some(object)
    }

    /// Makes a walker of the process's stacks.
    #[must_use]
    pub fn unwinder(&self) -> UserUnwinder<'_> {
        let objects = self.objects.iter().map(UserObject::unwind_object).collect();
        UserUnwinder::new(objects, self.other_code.clone())
    }
}

impl UserObject<'_> {
    /// Returns its functions, which the first call reads.
    pub fn symbols(&self) -> &FunctionSymbols {
        self.symbols.get(&*self.bytes)
    }

    /// Returns one sentence for each part of its functions that could not be read. There is none
    /// before they are requested.
    pub fn lost_symbols(&self) -> impl Iterator<Item = String> {
        let path = String::from_utf8_lossy(&self.path);
        self.symbols
            .lost()
            .map(move |reason| format!("{path}: {reason}"))
    }

    /// Returns the function at an address of the process, demangled, and the distance from its
    /// start.
    #[must_use]
    pub fn resolve(&self, address: u64) -> Option<(String, u64)> {
        let symbols = self.symbols();
        let (function, offset) = symbols.resolve(self.base.address_in_file(Gva(address)))?;
        Some((demangle(function.name).into_owned(), offset))
    }

    /// Finds the functions of this name, mangled or not, with their addresses in the process.
    pub fn functions_named<'a>(
        &'a self,
        name: &'a str,
    ) -> impl Iterator<Item = (u64, Function<'a>)> {
        let of_name =
            move |function: &Function<'_>| function.name == name || demangle(function.name) == name;
        let functions = self.symbols().iter().filter(of_name);
        functions.map(|function| (self.base.va_of(function.address).0, function))
    }

    fn unwind_object(&self) -> MappedObject<'_> {
        let header = self.segments.iter().find(|s| s.kind == PT_GNU_EH_FRAME);
        MappedObject {
            text: self.text.clone(),
            bias: self.base.bias(),
            eh_frame_hdr: header.map(|segment| segment.address),
            eh_frame: self.eh_frame.clone(),
            bytes: Box::new(ByAddress(self)),
        }
    }
}

/// An object's bytes by link-time address.
struct ByAddress<'o>(&'o UserObject<'o>);

impl ObjectBytes for ByAddress<'_> {
    fn read(&self, address: u64, buf: &mut [u8]) -> Result<(), MissingBytes> {
        let length = buf.len() as u64;
        let segments = self.0.segments.iter();
        let mut places = segments.filter_map(|segment| segment.file_offset_of(address));
        let place = places.find(|(_, left)| length <= *left);
        let read = place.map(|(offset, _)| self.0.bytes.read_at(offset, buf));
        match read {
            Some(Ok(())) => Ok(()),
            _ => Err(MissingBytes { address }),
        }
    }
}

/// A file's bytes from the page cache. Those that it lacks are from the guest's disk, or from a
/// copy on the host.
pub(super) struct CachedBytes<'s> {
    look: PausedSystem<'s>,
    layout: &'s PageCacheLayout,
    file: CachedFile,
    stored: StoredFile<'s>,
    copy: Option<HostFile>,
}

impl<'s> CachedBytes<'s> {
    /// Makes a source without a copy on the host.
    pub(super) fn new(
        look: PausedSystem<'s>,
        layout: &'s PageCacheLayout,
        file: CachedFile,
    ) -> Self {
        Self {
            look,
            layout,
            file,
            stored: look.stored_file(&file),
            copy: None,
        }
    }
}

impl FileBytes for CachedBytes<'_> {
    fn size(&self) -> u64 {
        self.file.size
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<(), Missing> {
        let view = self.look.view;
        let page = |index| match self.layout.page(view, &self.file, index) {
            Ok(CachedPage::Present { gpa, .. }) => Some(gpa),
            _ => None,
        };
        let cached = PagedBytes::new(view.physical(), self.file.size, page);
        let mut sources: Vec<&dyn FileBytes> = vec![&cached, &self.stored];
        sources.extend(self.copy.as_ref().map(|copy| copy as &dyn FileBytes));
        LayeredBytes::new(sources).read_at(offset, buf)
    }
}

impl<'s> PausedSystem<'s> {
    /// Returns the objects that a process has mapped for execution.
    ///
    /// # Errors
    /// If the kernel's layout for mappings or the page cache is unknown.
    pub fn objects(
        &self,
        task: &TaskInfo,
        symfs: Option<&Symfs>,
    ) -> Result<UserObjects<'s>, Unavailable> {
        let mut found = UserObjects::default();
        let Some(maps) = self.maps(task)? else {
            return Ok(found);
        };
        found
            .incomplete
            .extend(maps.error.map(|error| error.to_string()));
        let (mut looked_at, mut left_out) = (0, 0);
        let budget = Budget::default();
        found.generated = Some(GeneratedCode::new(*self, task, &budget));
        let mut of_files: HashMap<Gva, ObjectSymbols> = HashMap::new();
        for area in &maps.areas {
            if !area.area.flags.has(VmaFlags::EXEC) {
                continue;
            }
            let range = area.area.start..area.area.end;
            if looked_at == MAX_OBJECTS {
                left_out += 1;
                found.other_code.push(range);
                continue;
            }
            let symbols = match area.area.file {
                Some(file) => of_files
                    .entry(file)
                    .or_insert_with(|| ObjectSymbols::new(&budget))
                    .clone(),
                None => ObjectSymbols::new(&budget),
            };
            match self.object(task, area, symfs, symbols, &mut found.incomplete) {
                Ok(Some(object)) => {
                    found.objects.push(object);
                    looked_at += 1;
                }
                Ok(None) => found.other_code.push(range),
                Err(reason) => {
                    let name = String::from_utf8_lossy(&area.name);
                    found.incomplete.push(format!("{name}: {reason}"));
                    found.other_code.push(range);
                    looked_at += 1;
                }
            }
        }
        if left_out > 0 {
            found.incomplete.push(format!(
                "only the first {MAX_OBJECTS} mapped objects are read, {left_out} are omitted"
            ));
        }
        Ok(found)
    }

    /// Returns the object mapped at an executable VMA, or `None` if it is neither a file nor the
    /// vdso. Adds the reason why a copy on the host is not used to `refused`.
    fn object(
        &self,
        task: &TaskInfo,
        area: &NamedArea,
        symfs: Option<&Symfs>,
        symbols: ObjectSymbols,
        refused: &mut Vec<String>,
    ) -> Result<Option<UserObject<'s>>, String> {
        let text = |error: &dyn std::fmt::Display| error.to_string();
        let mapping = FileMapping {
            start: Gva(area.area.start),
            end: Gva(area.area.end),
            file_offset: area.area.file_offset,
            executable: true,
        };
        let (bytes, known_base): (Box<dyn FileBytes + 's>, _) = match area.area.file {
            Some(file) => (self.file_bytes(file, &area.name, symfs, refused)?, None),
            None if area.name == VDSO => {
                let vdso = match (&self.system.vdso, task.mm, self.process_view(task)) {
                    (Ok(layout), Some(mm), _) => layout.find(self.view, mm),
                    // Read from the process's mapping, because the kernel's layout is unknown.
                    (_, _, Some(view)) => Vdso::mapped(view, mapping.start, mapping.end).map(Some),
                    _ => Ok(None),
                };
                let vdso = vdso.map_err(|error| text(&error))?;
                let Some(vdso) = vdso else { return Ok(None) };
                let base = vdso.load_base();
                (Box::new(vdso), Some(base))
            }
            None => return Ok(None),
        };
        let object = ObjectFile::parse(&*bytes).map_err(|error| text(&error))?;
        let base = match known_base {
            Some(base) => base,
            None => LoadBase::find(object.segments(), &mapping, mapping.start)
                .map_err(|error| text(&error))?,
        };
        let eh_frame = object.section(EH_FRAME).and_then(|section| {
            let end = section.address.checked_add(section.size)?;
            Some(section.address..end)
        });
        Ok(Some(UserObject {
            path: area.name.clone(),
            text: area.area.start..area.area.end,
            base,
            segments: object.segments().to_vec(),
            eh_frame,
            bytes,
            symbols,
        }))
    }

    /// Returns the bytes of a mapped file. A copy on the host must be of the same build. If that
    /// cannot be checked, it must have the same size.
    fn file_bytes(
        &self,
        file: Gva,
        path: &[u8],
        symfs: Option<&Symfs>,
        refused: &mut Vec<String>,
    ) -> Result<Box<dyn FileBytes + 's>, String> {
        let text = |error: &dyn std::fmt::Display| error.to_string();
        let layout = self.system.page_cache.as_ref().map_err(|lost| text(lost))?;
        let cached = layout
            .open_file(self.view, file)
            .map_err(|error| text(&error))?;
        let mut bytes = CachedBytes::new(*self, layout, cached);
        if let Some(symfs) = symfs {
            let wanted: Option<BuildId> = ObjectFile::parse(&bytes)
                .ok()
                .and_then(|object| object.build_id().ok().flatten());
            match symfs.open(path, wanted.as_ref()) {
                Ok(copy) if copy.file.size() == cached.size => bytes.copy = Some(copy.file),
                // Another file of the same build, such as the unstripped one: its bytes are at
                // other offsets.
                Ok(copy) if copy.check == BuildCheck::Same => return Ok(Box::new(copy.file)),
                Ok(copy) => refused.push(format!(
                    "{} has {} bytes, the guest's file has {}: another version, not used",
                    copy.path.display(),
                    copy.file.size(),
                    cached.size
                )),
                // The folder need not have every file.
                Err(SymfsError::NotFound { .. }) => {}
                Err(error) => refused.push(error.to_string()),
            }
        }
        Ok(Box::new(bytes))
    }
}

//! What memory areas are called, and their lines in `/proc/PID/maps` (fs/proc/task_mmu.c).

use super::{Vma, VmaError, VmaLayout};
use crate::kernel::btf::Btf;
use crate::kernel::files::{FileIdentity, IdentityLayout};
use crate::kernel::layout::{LayoutError, offset};
use crate::kernel::structure::Structure;
use crate::kernel::symbols::Symbols;
use crate::{Gva, MemoryView};

/// Longest name of a special mapping that is read.
const MAX_SPECIAL_NAME: usize = 64;
/// A process may give names of 80 bytes with their NUL (`ANON_VMA_NAME_MAX_LEN`).
const MAX_GIVEN_NAME: usize = 80;
/// `__NEW_UTS_LEN`.
const MAX_RELEASE: usize = 64;
/// Bit of `mm_context_t.flags`: the process may use the vsyscall page.
const HAS_VSYSCALL: u16 = 1 << 1;
/// `vsyscall_mode`, the third of its values: nobody may.
const NO_VSYSCALL: u32 = 2;
/// Column before which the name does not start.
const NAME_COLUMN: usize = 72;
/// First release in which an area that only touches the heap is not called heap.
const HEAP_MUST_OVERLAP: (u32, u32, u32) = (6, 6, 11);

/// Where a kernel keeps what names areas.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct NameLayout {
    start_brk: u64,
    brk: u64,
    start_stack: u64,
    /// `mm_context_t.flags`: 2 bytes, or 8 in newer kernels; the lower ones are read.
    context_flags: Option<u64>,
    name_of_operations: u64,
    name_of_special: u64,
    given_text: u64,
    /// Functions that answer `vm_operations_struct.name`.
    special_mapping_name: Option<u64>,
    gate_vma_name: Option<u64>,
    /// The area of the vsyscall page, which is in no process's tree, and the variable that says whether it is there.
    gate: Option<Gva>,
    vsyscall_mode: Option<Gva>,
    /// The kernel's release: `6.1.0-13-amd64`.
    release: Option<Gva>,
    identity: IdentityLayout,
}

/// What of an `mm_struct` names areas.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MmBounds {
    /// Address of the `mm_struct`.
    pub mm: Gva,
    /// First byte of the heap.
    pub start_brk: u64,
    /// One past its last byte.
    pub brk: u64,
    /// Where the first stack pointer was.
    pub start_stack: u64,
    /// Whether the process may use the vsyscall page.
    vsyscall: bool,
    /// Whether an area that ends where the heap starts is the heap.
    heap_may_touch: bool,
}

/// What an area is called.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum VmaName {
    /// Nothing.
    Unnamed,
    /// The path of this `struct file`.
    File(Gva),
    /// A text with its brackets: `[heap]`, `[stack]`, `[vdso]`, `[anon:NAME]`.
    Text(Vec<u8>),
}

impl NameLayout {
    pub(super) fn new(btf: &Btf, symbols: &Symbols) -> Result<Self, LayoutError> {
        let variable = |name: &str| symbols.address_of(name).map(Gva);
        let release = offset(btf, "uts_namespace.name.release", 65).ok();
        Ok(Self {
            start_brk: offset(btf, "mm_struct.start_brk", 8)?,
            brk: offset(btf, "mm_struct.brk", 8)?,
            start_stack: offset(btf, "mm_struct.start_stack", 8)?,
            context_flags: btf
                .member("mm_struct.context.flags")
                .ok()
                .map(|member| member.byte_offset),
            name_of_operations: offset(btf, "vm_operations_struct.name", 8)?,
            name_of_special: offset(btf, "vm_special_mapping.name", 8)?,
            // Without the structure nothing points to one.
            given_text: btf
                .member("anon_vma_name.name")
                .map_or(0, |member| member.byte_offset),
            special_mapping_name: symbols.address_of("special_mapping_name"),
            gate_vma_name: symbols.address_of("gate_vma_name"),
            gate: variable("gate_vma"),
            vsyscall_mode: variable("vsyscall_mode"),
            release: variable("init_uts_ns")
                .zip(release)
                .map(|(namespace, release)| Gva(namespace.0.wrapping_add(release))),
            identity: IdentityLayout::new(btf)?,
        })
    }

    /// Whether an area that only touches the heap is called heap. Where the release is not known, as in newer kernels.
    fn heap_may_touch(&self, view: MemoryView<'_>) -> bool {
        let text = self
            .release
            .and_then(|release| view.c_string(release, MAX_RELEASE).ok());
        text.as_deref()
            .and_then(version)
            .is_some_and(|version| version < HEAP_MUST_OVERLAP)
    }
}

impl VmaLayout {
    /// What names the areas of the `mm_struct` at `mm`.
    ///
    /// # Errors
    /// If it cannot be read.
    pub fn bounds(&self, view: MemoryView<'_>, mm: Gva) -> Result<MmBounds, VmaError> {
        let names = &self.names;
        let structure = Structure::at(view, "mm_struct", mm)?;
        let flags = names.context_flags.map(|offset| structure.u16(offset));
        Ok(MmBounds {
            mm,
            start_brk: structure.u64(names.start_brk)?,
            brk: structure.u64(names.brk)?,
            start_stack: structure.u64(names.start_stack)?,
            vsyscall: flags.transpose()?.unwrap_or(0) & HAS_VSYSCALL != 0,
            heap_may_touch: names.heap_may_touch(view),
        })
    }

    /// The area of the vsyscall page, if the process may use it: `/proc/PID/maps` shows it behind all others. Known
    /// only in a kernel that names its variables (`CONFIG_KALLSYMS_ALL`).
    ///
    /// # Errors
    /// If it cannot be read.
    pub fn gate(&self, view: MemoryView<'_>, bounds: &MmBounds) -> Result<Option<Vma>, VmaError> {
        let (Some(gate), true) = (self.names.gate, bounds.vsyscall) else {
            return Ok(None);
        };
        if let Some(mode) = self.names.vsyscall_mode {
            let found = Structure::at(view, "variable vsyscall_mode", mode)?.u32(0)?;
            if found == NO_VSYSCALL {
                return Ok(None);
            }
        }
        self.read(view, gate).map(|(vma, _)| Some(vma))
    }

    /// What an area of the process with these `bounds` is called.
    ///
    /// # Errors
    /// If a structure that names it cannot be read.
    pub fn name(
        &self,
        view: MemoryView<'_>,
        bounds: &MmBounds,
        vma: &Vma,
    ) -> Result<VmaName, VmaError> {
        let text = |text: &str| Ok(VmaName::Text(text.into()));
        match (vma.file, vma.given_name) {
            (Some(_), Some(given)) => return self.given(view, "[anon_shmem:", given),
            (Some(file), None) => return Ok(VmaName::File(file)),
            (None, _) => {}
        }
        if let Some(name) = self.special(view, vma)? {
            return Ok(VmaName::Text(name));
        }
        let heap = match bounds.heap_may_touch {
            true => vma.start <= bounds.brk && vma.end >= bounds.start_brk,
            false => vma.start < bounds.brk && vma.end > bounds.start_brk,
        };
        if heap {
            return text("[heap]");
        }
        if vma.start <= bounds.start_stack && vma.end >= bounds.start_stack {
            return text("[stack]");
        }
        match vma.given_name {
            Some(given) => self.given(view, "[anon:", given),
            None => Ok(VmaName::Unnamed),
        }
    }

    /// The name that a process gave an area.
    fn given(&self, view: MemoryView<'_>, kind: &str, given: Gva) -> Result<VmaName, VmaError> {
        let name = Structure::at(view, "anon_vma_name", given)?
            .text(self.names.given_text, MAX_GIVEN_NAME)?;
        Ok(VmaName::Text([kind.as_bytes(), &name, b"]"].concat()))
    }

    /// The name that the area's own operations tell: `[vdso]`, `[vvar]`, `[vsyscall]`.
    fn special(&self, view: MemoryView<'_>, vma: &Vma) -> Result<Option<Vec<u8>>, VmaError> {
        let Some(operations) = vma.operations else {
            return Ok(None);
        };
        let function = Structure::at(view, "vm_operations_struct", operations)?
            .pointer(self.names.name_of_operations)?;
        let Some(Gva(function)) = function else {
            return Ok(None);
        };
        if self.names.gate_vma_name == Some(function) {
            return Ok(Some(b"[vsyscall]".to_vec()));
        }
        let (true, Some(mapping)) = (
            self.names.special_mapping_name == Some(function),
            vma.private_data,
        ) else {
            return Ok(None);
        };
        let name = Structure::at(view, "vm_special_mapping", mapping)?.string(
            self.names.name_of_special,
            "name of a special mapping",
            MAX_SPECIAL_NAME,
        )?;
        Ok(name)
    }

    /// Which file the `struct file` at `file` is. For a file of overlayfs this may be the one beneath.
    ///
    /// # Errors
    /// If it cannot be read.
    pub fn identity(&self, view: MemoryView<'_>, file: Gva) -> Result<FileIdentity, VmaError> {
        let file = Structure::at(view, "file", file)?;
        Ok(self.names.identity.read(&file)?.1)
    }

    /// The area's line in `/proc/PID/maps`, without its end. `path` gives the path of a `struct file`.
    ///
    /// # Errors
    /// If a structure that names it cannot be read.
    pub fn maps_line(
        &self,
        view: MemoryView<'_>,
        bounds: &MmBounds,
        vma: &Vma,
        path: impl FnOnce(Gva) -> Vec<u8>,
    ) -> Result<Vec<u8>, VmaError> {
        let (identity, offset) = match vma.file {
            Some(file) => (self.identity(view, file)?, vma.file_offset),
            None => (FileIdentity::default(), 0),
        };
        let permissions = String::from_utf8_lossy(&vma.flags.permissions()).into_owned();
        let FileIdentity {
            major,
            minor,
            inode,
        } = identity;
        let mut line = format!(
            "{:08x}-{:08x} {permissions} {offset:08x} {major:02x}:{minor:02x} {inode} ",
            vma.start, vma.end
        )
        .into_bytes();
        let name = match self.name(view, bounds, vma)? {
            VmaName::Unnamed => return Ok(line),
            VmaName::File(file) => escaped(&path(file)),
            VmaName::Text(text) => text,
        };
        line.resize(line.len().max(NAME_COLUMN), b' ');
        line.push(b' ');
        line.extend(name);
        Ok(line)
    }
}

/// A path as the kernel prints it where a line's end would end the record.
fn escaped(path: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(path.len());
    for byte in path {
        match byte {
            b'\n' => out.extend(b"\\012"),
            other => out.push(*other),
        }
    }
    out
}

/// The first three numbers of a release; what is missing is 0.
fn version(release: &[u8]) -> Option<(u32, u32, u32)> {
    let numbers = release
        .split(|byte| !byte.is_ascii_digit())
        .map(|digits| std::str::from_utf8(digits).ok()?.parse().ok());
    let mut numbers = numbers.map_while(|number| number);
    let major = numbers.next()?;
    Some((
        major,
        numbers.next().unwrap_or(0),
        numbers.next().unwrap_or(0),
    ))
}

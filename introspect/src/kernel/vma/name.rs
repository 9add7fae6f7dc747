//! The names of VMAs, and their lines in `/proc/PID/maps` (fs/proc/task_mmu.c).

use super::{Vma, VmaError, VmaLayout};
use crate::kernel::btf::Btf;
use crate::kernel::files::{FileIdentity, IdentityLayout};
use crate::kernel::layout::{LayoutError, offset};
use crate::kernel::structure::Structure;
use crate::kernel::symbols::Symbols;
use crate::{Gva, MemoryView};

/// The maximum length in bytes of a special mapping's name.
const MAX_SPECIAL_NAME: usize = 64;
/// The maximum size of a name that a process sets: 80 bytes with the NUL (`ANON_VMA_NAME_MAX_LEN`).
const MAX_GIVEN_NAME: usize = 80;
/// The maximum length in bytes of a release (`__NEW_UTS_LEN`).
const MAX_RELEASE: usize = 64;
/// The bit of `mm_context_t.flags` that allows the process to use the vsyscall page.
const HAS_VSYSCALL: u16 = 1 << 1;
/// The third value of `vsyscall_mode`: no process may use the page.
const NO_VSYSCALL: u32 = 2;
/// The first column in which a name may start.
const NAME_COLUMN: usize = 72;
/// The first release in which a VMA that only touches the heap is not called heap.
const HEAP_MUST_OVERLAP: (u32, u32, u32) = (6, 6, 11);

/// The location of a kernel's names of VMAs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct NameLayout {
    start_brk: u64,
    brk: u64,
    start_stack: u64,
    /// Offset of `mm_context_t.flags`: 2 bytes, or 8 in newer kernels, of which the lower ones are
    /// read.
    context_flags: Option<u64>,
    name_of_operations: u64,
    name_of_special: u64,
    given_text: u64,
    /// The functions that implement `vm_operations_struct.name`.
    special_mapping_name: Option<u64>,
    gate_vma_name: Option<u64>,
    /// The VMA of the vsyscall page, which is in no process's tree, and the variable that says
    /// whether it exists.
    gate: Option<Gva>,
    vsyscall_mode: Option<Gva>,
    /// The address of the kernel's release: `6.1.0-13-amd64`.
    release: Option<Gva>,
    identity: IdentityLayout,
}

/// The parts of an `mm_struct` that determine names of VMAs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MmBounds {
    /// The address of the `mm_struct`.
    pub mm: Gva,
    /// The address of the heap's first byte.
    pub start_brk: u64,
    /// The address after the heap's last byte.
    pub brk: u64,
    /// The address of the first stack pointer.
    pub start_stack: u64,
    /// Whether the process may use the vsyscall page.
    vsyscall: bool,
    /// Whether a VMA that ends where the heap starts is called heap.
    heap_may_touch: bool,
}

/// The name of a VMA.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum VmaName {
    /// No name.
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
            // Without the structure, nothing points to it.
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

    /// Checks whether a VMA that only touches the heap is called heap. An unknown release counts as
    /// a newer kernel.
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
    /// Reads the parts of the `mm_struct` at `mm` that determine names.
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

    /// Returns the VMA of the vsyscall page, if the process may use it; `/proc/PID/maps` shows it
    /// after all others. Known only in a kernel that names its variables (`CONFIG_KALLSYMS_ALL`).
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

    /// Returns the name of a VMA of the process with these `bounds`.
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

    /// Reads the name that a process set.
    fn given(&self, view: MemoryView<'_>, kind: &str, given: Gva) -> Result<VmaName, VmaError> {
        let name = Structure::at(view, "anon_vma_name", given)?
            .text(self.names.given_text, MAX_GIVEN_NAME)?;
        Ok(VmaName::Text([kind.as_bytes(), &name, b"]"].concat()))
    }

    /// Reads the name from the VMA's own operations: `[vdso]`, `[vvar]`, `[vsyscall]`.
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

    /// Returns the identity of the `struct file` at `file`. For a file of overlayfs before Linux
    /// 6.8, it is that of the file beneath, as in `/proc/PID/maps`.
    ///
    /// # Errors
    /// If it cannot be read.
    pub fn identity(&self, view: MemoryView<'_>, file: Gva) -> Result<FileIdentity, VmaError> {
        let file = Structure::at(view, "file", file)?;
        Ok(self.names.identity.read(&file)?.1)
    }

    /// Returns the VMA's line in `/proc/PID/maps`, without the line break. `path` returns the path
    /// of a `struct file`.
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

/// Escapes line breaks in a path, as the kernel does because they would end the record.
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

/// Returns the first three numbers of a release; missing ones are 0.
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

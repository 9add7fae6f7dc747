//! The kernel that a machine runs: its file, its symbols, and its address in the running guest.
//!
//! A Linux kernel is looked for in the paused guest ([`GuestKernel::locate`]) until it can be
//! changed from outside. Then its entry points are final, and it no longer patches its own
//! functions (alternatives, ftrace), which it does before it starts its scheduler. A guest other
//! than Linux is at its link address.

use std::fmt;
use std::path::{Path, PathBuf};

use crate::image_tables::ImageTables;
use introspect::Gva;
use introspect::kernel::btf::Btf;
use introspect::kernel::image::KernelImage;
use introspect::kernel::loaded_modules::LoadedModules;
use introspect::kernel::panic::PanicFinder;
use introspect::kernel::running::RunningKernel;
use introspect::kernel::symbols::Symbols;
use introspect::x86_64::paging::AddressSpace;
use introspect::x86_64::virtual_memory::read_u32;
use probes::kernel_view::{KernelView, KernelViewError, kernel_space, running_symbols};
use probes::provider::UnknownFunction;
use probes::provider::kprobe::unknown_functions;
use vmm::Machine;
use vmm::boot::{AcpiConfig, KernelFile, KernelFileError};
use vmm::machine::{Paused, Transport};
use vmm::snapshot::{KernelHash, KernelReference};

/// A symbol that every x86-64 Linux has and nothing else does.
const LINUX: &str = "entry_SYSCALL_64";
/// A function of kernels that find virtio devices by words on their command line
/// (drivers/virtio/virtio_mmio.c).
const COMMAND_LINE_DEVICES: &str = "vm_cmdline_set";
/// A symbol of kernels with PCI (drivers/pci/pci-driver.c).
const PCI: &str = "pci_bus_type";
/// A symbol of kernels with ACPI (arch/x86/kernel/acpi/boot.c).
const ACPI: &str = "acpi_disabled";
/// `SYSTEM_SCHEDULING` of `enum system_states` (include/linux/kernel.h): boot-time patching is
/// done.
const SYSTEM_SCHEDULING: u32 = 1;

/// A kernel's symbols and types, read from its file. The file's contents, some 20 MB, are not kept.
pub struct GuestKernel {
    /// The reference to the file, for snapshots.
    pub reference: KernelReference,
    known: ImageTables,
}

impl fmt::Debug for GuestKernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GuestKernel")
            .field("reference", &self.reference)
            .finish_non_exhaustive()
    }
}

/// A kernel file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum GuestKernelError {
    /// The file cannot be read or unpacked.
    #[error(transparent)]
    File(#[from] KernelFileError),
    /// The file's contents are invalid.
    #[error("kernel {path}: {source}", path = path.display())]
    Image {
        /// The file.
        path: PathBuf,
        /// The fault.
        source: introspect::kernel::image::ImageError,
    },
    /// The snapshot runs another kernel.
    #[error(
        "kernel {path}: not the one that the snapshot runs ({size} bytes unpacked, BLAKE3 {hash}); give --kernel the file it was booted from",
        path = path.display()
    )]
    Other {
        /// The file.
        path: PathBuf,
        /// The size of the snapshot's kernel in bytes.
        size: u64,
        /// Its hash.
        hash: KernelHash,
    },
}

/// Functions cannot be traced.
#[derive(Debug, thiserror::Error)]
pub enum FunctionsError {
    /// The kernel has no names at all.
    #[error("functions cannot be found by name: {0}")]
    NoSymbols(String),
    /// The kernel has no such function.
    #[error("no function {function} in the kernel {path}", path = path.display())]
    Unknown {
        /// The requested name, and similar ones.
        function: UnknownFunction,
        /// The kernel.
        path: PathBuf,
    },
}

impl GuestKernel {
    /// Reads the kernel at `path`.
    ///
    /// # Errors
    /// If it is not a kernel for this machine.
    pub fn open(path: &Path) -> Result<(Self, KernelFile), GuestKernelError> {
        Self::read(KernelFile::open(path)?, path)
    }

    /// Reads a kernel from the contents of a file; `path` is only for messages.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn from_bytes(bytes: Vec<u8>, path: &Path) -> Result<(Self, KernelFile), GuestKernelError> {
        Self::read(KernelFile::from_bytes(bytes, path)?, path)
    }

    fn read(file: KernelFile, path: &Path) -> Result<(Self, KernelFile), GuestKernelError> {
        let image =
            KernelImage::parse(file.shared_elf()).map_err(|source| GuestKernelError::Image {
                path: path.to_path_buf(),
                source,
            })?;
        let reference = KernelReference::new(path, file.elf());
        let known = ImageTables::of(&image, &reference);
        Ok((Self { reference, known }, file))
    }

    /// Reads the kernel that a snapshot runs, from `path` or from its original path. Without `path`
    /// the tables that an earlier run has kept are enough, and no file is read.
    ///
    /// # Errors
    /// As [`Self::open`], and if it is another kernel.
    pub fn of_snapshot(
        saved: &KernelReference,
        path: Option<&Path>,
    ) -> Result<Self, GuestKernelError> {
        if let (None, Some(known)) = (path, ImageTables::kept(saved)) {
            let reference = saved.clone();
            return Ok(Self { reference, known });
        }
        let (kernel, _) = Self::open(path.unwrap_or(&saved.path))?;
        if saved.is_same_kernel(&kernel.reference) {
            return Ok(kernel);
        }
        let path = kernel.reference.path;
        Err(GuestKernelError::Other {
            path,
            size: saved.size,
            hash: saved.hash,
        })
    }

    /// Returns the finder of a panic in the guest's memory; `None` if the kernel is not Linux.
    pub fn panic_finder(&self) -> Option<PanicFinder> {
        self.known.panic_finder.clone()
    }

    /// Checks whether this is a Linux kernel; `true` if nothing is known.
    pub fn is_linux(&self) -> bool {
        let symbols = self.known.symbols.as_ref();
        symbols.map_or(true, |s| s.address_of(LINUX).is_some())
    }

    fn has(&self, symbol: &str) -> bool {
        let symbols = self.known.symbols.as_ref();
        symbols.is_ok_and(|symbols| symbols.address_of(symbol).is_some())
    }

    /// Returns the way in which this kernel finds virtio devices.
    pub fn transport(&self) -> Transport {
        match !self.has(COMMAND_LINE_DEVICES) && self.has(PCI) {
            true => Transport::Pci,
            false => Transport::Mmio,
        }
    }

    /// Returns the ACPI tables for a machine with `cpus` vCPUs and this transport: those of a PC,
    /// if it is one and this kernel reads them.
    pub fn acpi(&self, transport: Transport, cpus: u8) -> Option<AcpiConfig> {
        let wanted = transport == Transport::Pci && self.has(ACPI);
        wanted.then(|| AcpiConfig::new(cpus))
    }

    /// Returns the symbols at their link addresses.
    ///
    /// # Errors
    /// If there are none.
    pub fn symbols(&self) -> Result<&Symbols, FunctionsError> {
        let symbols = self.known.symbols.as_ref();
        symbols.map_err(|why| FunctionsError::NoSymbols(why.clone()))
    }

    /// Checks that each of `names` is a function of the kernel before boot, without modules.
    ///
    /// # Errors
    /// For the first that is not, with the nearest names.
    pub fn check_functions(&self, names: &[String]) -> Result<(), FunctionsError> {
        let unknown = unknown_functions(self.symbols()?, &LoadedModules::default(), names);
        match unknown.into_iter().next() {
            None => Ok(()),
            Some(function) => Err(FunctionsError::Unknown {
                function,
                path: self.reference.path.clone(),
            }),
        }
    }

    /// Returns the running kernel in the paused guest, with what a tracer needs of it; `None` as
    /// long as it has not booted far enough.
    ///
    /// # Errors
    /// If it will never be found.
    pub fn locate(
        &self,
        machine: &Machine,
        paused: &Paused,
    ) -> Result<Option<KernelView>, KernelViewError> {
        let found = self.place(machine, paused)?;
        Ok(found.map(|kernel| match self.is_linux() {
            true => KernelView::new(kernel, machine, paused),
            false => KernelView::of(kernel),
        }))
    }

    /// Returns the running kernel in the paused guest. Returns `None` as long as it has not booted
    /// far enough.
    ///
    /// # Errors
    /// If it will never be found.
    pub fn place(
        &self,
        machine: &Machine,
        paused: &Paused,
    ) -> Result<Option<RunningKernel>, KernelViewError> {
        let registers = machine
            .registers(paused, 0)
            .ok_or(KernelViewError::NoVcpu)?;
        let Ok(symbols) = &self.known.symbols else {
            return Ok(None);
        };
        let space = registers.address_space();
        if !self.is_linux() {
            let types = Err("the kernel is not Linux".to_owned());
            return Ok(Some(RunningKernel::new(symbols.clone(), types, space)));
        }
        let Ok(symbols) = running_symbols(symbols, machine, paused) else {
            return Ok(None);
        };
        if !has_settled(machine, space, &symbols) {
            return Ok(None);
        }
        let space = kernel_space(&symbols, machine, paused)?;
        let types = self.known.types.clone();
        Ok(Some(RunningKernel::new(symbols, types, space)))
    }

    /// Returns the kernel's types, or the reason for their absence.
    pub fn types(&self) -> Result<&Btf, &str> {
        self.known.types.as_ref().map_err(String::as_str)
    }
}

/// Checks whether the kernel has done its boot-time patching. Returns `true` if that cannot be
/// determined.
fn has_settled(machine: &Machine, space: AddressSpace, running: &Symbols) -> bool {
    let Some(address) = running.address_of("system_state") else {
        return true;
    };
    // It is not mapped while a user program runs with page table isolation; by then it has long
    // been scheduling.
    read_u32(machine.ram(), space, Gva(address)).map_or(true, |state| state >= SYSTEM_SCHEDULING)
}

/// Returns `address` as `name+0x12`, or as a number without a symbol.
pub fn symbolize(symbols: Option<&Symbols>, address: u64) -> String {
    match symbols.and_then(|s| s.resolve(address)) {
        Some((symbol, 0)) => format!("{address:#x} {}", symbol.name),
        Some((symbol, offset)) => format!("{address:#x} {}+{offset:#x}", symbol.name),
        None => format!("{address:#x}"),
    }
}

//! Making a VM: from a kernel, or from a snapshot.
//!
//! The caller decides on the guest; the host is measured, or its record read, when the VM starts. A
//! VM made here is not confined, and is not in the run directory: commands do not see it.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use introspect::regular_file;
use vmm::Machine;
use vmm::machine::{self, DiskConfig, MachineConfig, MachineError, SerialOutput, VirtioConfig};
use vmm::snapshot::{self, Checks, PageMap, RestoreError, RestoredDisks, SavedMemory};

use crate::confinement::{Confinement, Kind};
use crate::guest_kernel::{GuestKernel, GuestKernelError};
use crate::host::{Host, HostError};
use crate::registry::{NameError, VmName};
use crate::tail::Tail;
use crate::vm::Vm;

/// The largest initramfs that is read, in bytes: more than a guest has memory for.
const LONGEST_INITRAMFS: u64 = 3 << 30;
/// The default guest memory in bytes.
const DEFAULT_MEMORY: u64 = 256 << 20;
/// The default command line: a serial console, and no more messages than errors.
const DEFAULT_COMMAND_LINE: &str = "console=ttyS0 quiet";

/// A VM that has not started.
#[derive(Debug, Clone)]
pub struct VmBuilder {
    name: String,
    source: Option<Source>,
    initramfs: Option<PathBuf>,
    command_line: String,
    memory: u64,
    cpus: u8,
    disks: Vec<DiskConfig>,
}

#[derive(Debug, Clone)]
enum Source {
    Kernel(PathBuf),
    Snapshot(PathBuf),
}

/// A VM could not be started.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// Neither a kernel nor a snapshot was given.
    #[error("nothing to start: name a kernel or a snapshot")]
    NoSource,
    /// The name.
    #[error(transparent)]
    Name(#[from] NameError),
    /// The host's KVM.
    #[error(transparent)]
    Host(#[from] HostError),
    /// The kernel's file.
    #[error(transparent)]
    Kernel(#[from] GuestKernelError),
    /// The initramfs.
    #[error("initramfs {path}: {source}", path = path.display())]
    Initramfs {
        /// Its file.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// The machine.
    #[error(transparent)]
    Machine(#[from] MachineError),
    /// The snapshot.
    #[error(transparent)]
    Snapshot(#[from] RestoreError),
}

impl Vm {
    /// Returns a builder of a VM.
    #[must_use]
    pub fn builder() -> VmBuilder {
        VmBuilder::default()
    }
}

impl Default for VmBuilder {
    fn default() -> Self {
        Self {
            name: "vm".to_owned(),
            source: None,
            initramfs: None,
            command_line: DEFAULT_COMMAND_LINE.to_owned(),
            memory: DEFAULT_MEMORY,
            cpus: 1,
            disks: Vec::new(),
        }
    }
}

impl VmBuilder {
    /// Sets the name, which messages carry.
    #[must_use]
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = name.into();
        self
    }

    /// Boots the kernel in `path`: an ELF `vmlinux` or a bzImage for x86-64.
    #[must_use]
    pub fn kernel(mut self, path: impl Into<PathBuf>) -> Self {
        self.source = Some(Source::Kernel(path.into()));
        self
    }

    /// Restores the snapshot in the folder `path` instead of booting. Memory, vCPUs and command
    /// line are the snapshot's.
    #[must_use]
    pub fn restore(mut self, path: impl Into<PathBuf>) -> Self {
        self.source = Some(Source::Snapshot(path.into()));
        self
    }

    /// Sets the initramfs of a kernel that is booted.
    #[must_use]
    pub fn initramfs(mut self, path: impl Into<PathBuf>) -> Self {
        self.initramfs = Some(path.into());
        self
    }

    /// Sets the kernel's command line; `console=ttyS0 quiet` by default. Words that this host needs
    /// are added.
    #[must_use]
    pub fn command_line(mut self, words: impl Into<String>) -> Self {
        self.command_line = words.into();
        self
    }

    /// Sets the guest's memory in bytes; 256 MiB by default.
    #[must_use]
    pub fn memory(mut self, bytes: u64) -> Self {
        self.memory = bytes;
        self
    }

    /// Sets the number of vCPUs, 1 to 64; 1 by default.
    #[must_use]
    pub fn cpus(mut self, count: u8) -> Self {
        self.cpus = count;
        self
    }

    /// Adds a disk on the image in `path`, raw or qcow2. For a snapshot: the file of its next disk.
    #[must_use]
    pub fn disk(self, path: impl Into<PathBuf>, read_only: bool) -> Self {
        self.disk_config(DiskConfig::new(path, read_only))
    }

    /// Adds a disk with all choices, an overlay for instance.
    #[must_use]
    pub fn disk_config(mut self, disk: DiskConfig) -> Self {
        self.disks.push(disk);
        self
    }

    /// Makes the machine and lets the guest run. The guest is stopped when the last reference to
    /// the VM is dropped.
    ///
    /// # Errors
    /// If KVM is not usable, a file is not what it should be, or the machine cannot be made.
    pub fn start(self) -> Result<Arc<Vm>, StartError> {
        let name: VmName = self.name.parse()?;
        let started = Instant::now();
        let console = Tail::of_console();
        let serial = SerialOutput::write_through(console.tee(io::sink()));
        let mut vm = match &self.source {
            None => return Err(StartError::NoSource),
            Some(Source::Kernel(path)) => {
                let (kernel, file) = GuestKernel::open(path)?;
                let initramfs = self.initramfs.as_deref().map(read_initramfs).transpose()?;
                let host = Host::open()?;
                let (add_words, transport) = (kernel.is_linux(), kernel.transport());
                let booted = machine::boot(
                    &host.kvm,
                    &host.profile,
                    MachineConfig {
                        memory: self.memory,
                        cpus: self.cpus,
                        kernel: &file,
                        initramfs: initramfs.as_deref(),
                        command_line: &self.command_line,
                        add_words,
                        protocol: None,
                        pit: true,
                        acpi: kernel.acpi(transport, self.cpus),
                        virtio: VirtioConfig {
                            disks: self.disks.clone(),
                            rng: add_words,
                            transport,
                            ..VirtioConfig::default()
                        },
                        serial,
                    },
                )?;
                let mut vm = Vm::new(host, name, booted.machine, Some(kernel), console);
                vm.command_line = booted.command_line;
                vm
            }
            Some(Source::Snapshot(folder)) => {
                let host = Host::open()?;
                // Others than those in the folder are opened only by the caller's names.
                let disks = RestoredDisks::Named(self.disks.clone());
                let (kvm, profile) = (&host.kvm, &host.profile);
                let restored = snapshot::restore(kvm, profile, folder, &disks, serial)?;
                // Without the file, kernel and types are found in guest memory.
                let kernel = restored.kernel.as_ref();
                let kernel = kernel.and_then(|saved| GuestKernel::of_snapshot(saved, None).ok());
                let confinement = Confinement::none();
                let checks = check_in_use(
                    restored.memory,
                    &restored.machine,
                    PageMap::open(),
                    &confinement,
                );
                let mut vm = Vm::new(host, name, restored.machine, kernel, console);
                (vm.command_line, vm.checks) = (restored.command_line, checks);
                vm.reference = restored.kernel;
                vm
            }
        };
        vm.started = started;
        vm.machine.start();
        Ok(Arc::new(vm))
    }
}

/// Reads an initramfs.
///
/// # Errors
/// If it is no regular file, too large, or cannot be read.
pub fn read_initramfs(path: &Path) -> Result<Vec<u8>, StartError> {
    regular_file::read(path, LONGEST_INITRAMFS).map_err(|source| StartError::Initramfs {
        path: path.to_path_buf(),
        source,
    })
}

/// Checks a restored machine's memory as it comes into use, on a thread in `confinement`. If that
/// is impossible, the machine runs all the same.
pub fn check_in_use(
    memory: SavedMemory,
    machine: &Machine,
    pages: io::Result<PageMap>,
    confinement: &Confinement,
) -> Option<Checks> {
    let confinement = confinement.clone();
    let begin = move || confinement.enter(Kind::Verify).map_err(io::Error::other);
    let checks = pages.and_then(|pages| memory.watch(machine.ram(), pages, begin));
    let warned = |error: &io::Error| log::warn!("the snapshot's memory is not checked: {error}");
    checks.inspect_err(warned).ok()
}

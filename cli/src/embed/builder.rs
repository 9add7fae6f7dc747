//! Making a VM: from a kernel, an image of a disk, or a snapshot.
//!
//! The caller decides on the guest; the host is measured, or its record read, when the VM starts. A
//! VM made here is not confined, and is not in the run directory: commands do not see it.

use std::fmt;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use introspect::regular_file;
use vmm::Machine;
use vmm::boot::{EntryProtocol, KernelFile};
use vmm::host::HostProfile;
use vmm::machine::{
    self, DiskConfig, MachineConfig, MachineError, Overlay, SerialOutput, VirtioConfig,
};
use vmm::snapshot::{
    self, Checks, PageMap, RestoreError, RestoredDisks, RestoredLinks, SavedMemory,
};

use crate::confinement::{Confinement, Kind};
use crate::guest_image::{self, GuestImageError};
use crate::guest_kernel::{GuestKernel, GuestKernelError};
use crate::history::{KeepError, Keeper, Ring};
use crate::host::{self, Host, HostError};
use crate::net::Net;
use crate::network::{Network, NetworkError};
use crate::passt::Passt;
use crate::protocol::cost::Budget;
use crate::registry::{NameError, VmName};
use crate::tail::Tail;
use crate::vm::Vm;

/// The largest initramfs that is read, in bytes: more than a guest has memory for.
const LONGEST_INITRAMFS: u64 = 3 << 30;
/// The increment of nice(2) that leads to the lowest priority.
const LOWEST_PRIORITY: i32 = 19;
/// The default guest memory in bytes.
const DEFAULT_MEMORY: u64 = 256 << 20;
/// The default memory of a guest that boots an image, in bytes.
const DEFAULT_IMAGE_MEMORY: u64 = 1 << 30;
/// The default command line: a serial console, and no more messages than errors.
const DEFAULT_COMMAND_LINE: &str = "console=ttyS0 quiet";

/// A VM that has not started.
#[derive(Debug)]
pub struct VmBuilder {
    name: String,
    source: Option<Source>,
    initramfs: Option<Initramfs>,
    command_line: Option<String>,
    memory: Option<u64>,
    cpus: u8,
    entry: Option<EntryProtocol>,
    profile: Option<HostProfile>,
    disks: Vec<DiskConfig>,
    overlay: bool,
    disks_as_saved: bool,
    network: Option<Net>,
    /// The devices that disks and network are added to.
    virtio: Option<VirtioConfig>,
    console: Option<Console>,
    /// The folder for moments that scripts keep.
    snapshots: Option<PathBuf>,
    history: Option<Ring>,
    budget: Option<Budget>,
}

#[derive(Debug, Clone)]
enum Source {
    Kernel(PathBuf),
    /// The image of the first disk.
    Image,
    Snapshot(PathBuf),
}

/// An initramfs.
enum Initramfs {
    File(PathBuf),
    Contents(Vec<u8>),
}

impl fmt::Debug for Initramfs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(path) => f.debug_tuple("File").field(path).finish(),
            Self::Contents(bytes) => f.debug_tuple("Contents").field(&bytes.len()).finish(),
        }
    }
}

/// The destination of the guest's serial output.
struct Console(Box<dyn Write + Send>);

impl fmt::Debug for Console {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Console").finish_non_exhaustive()
    }
}

/// The files of a boot, read.
struct BootFiles {
    kernel: GuestKernel,
    file: KernelFile,
    initramfs: Option<Vec<u8>>,
    command_line: String,
}

/// A VM could not be started.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// Neither a kernel, an image nor a snapshot was given.
    #[error("nothing to start: name a kernel, an image or a snapshot")]
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
    /// The image.
    #[error(transparent)]
    Image(#[from] GuestImageError),
    /// The network.
    #[error(transparent)]
    Network(#[from] NetworkError),
    /// The watch for the end of the network's program.
    #[error("network: {0}")]
    Watch(io::Error),
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
    /// The history.
    #[error("history: {0}")]
    History(#[from] KeepError),
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
            command_line: None,
            memory: None,
            cpus: 1,
            entry: None,
            profile: None,
            disks: Vec::new(),
            overlay: false,
            disks_as_saved: false,
            network: None,
            virtio: None,
            console: None,
            snapshots: None,
            history: None,
            budget: None,
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

    /// Boots the image of a disk in `path`, raw or qcow2, with the kernel, initramfs and command
    /// line that its boot loader would take. The guest has 1 GiB of memory by default. The image is
    /// its first disk, so other disks are added afterwards.
    #[must_use]
    pub fn image(mut self, path: impl Into<PathBuf>) -> Self {
        self.source = Some(Source::Image);
        self.disk(path, false)
    }

    /// Has the guest's writes to all disks go to files without a name, which end with the machine.
    /// The images stay as they are.
    #[must_use]
    pub fn overlay(mut self) -> Self {
        self.overlay = true;
        self
    }

    /// Connects the guest's network card, as `run --net` does. A restored guest has its card from
    /// its snapshot.
    #[must_use]
    pub fn network(mut self, network: Net) -> Self {
        self.network = Some(network);
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
        self.initramfs = Some(Initramfs::File(path.into()));
        self
    }

    /// Sets the contents of the initramfs of a kernel that is booted, instead of a file.
    #[must_use]
    pub fn initramfs_contents(mut self, contents: impl Into<Vec<u8>>) -> Self {
        self.initramfs = Some(Initramfs::Contents(contents.into()));
        self
    }

    /// Sets the kernel's command line. The default is an image's own, else `console=ttyS0 quiet`.
    /// Words that this host needs are added.
    #[must_use]
    pub fn command_line(mut self, words: impl Into<String>) -> Self {
        self.command_line = Some(words.into());
        self
    }

    /// Sets the guest's memory in bytes; 256 MiB by default, and 1 GiB for an image.
    #[must_use]
    pub fn memory(mut self, bytes: u64) -> Self {
        self.memory = Some(bytes);
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

    /// Opens the disks of a snapshot where they were when it was saved, also outside its folder.
    /// The snapshot's writer chose their files. Those of [`Self::disk`] are not used.
    #[must_use]
    pub fn disks_as_saved(mut self) -> Self {
        self.disks_as_saved = true;
        self
    }

    /// Sets the virtio devices of a boot and their bus; the builder's disks and network are added.
    /// The default is a source of random numbers, on the bus that the kernel finds devices on.
    #[must_use]
    pub fn virtio(mut self, devices: VirtioConfig) -> Self {
        self.virtio = Some(devices);
        self
    }

    /// Sets the protocol by which a kernel is entered. By default the kernel's file decides.
    #[must_use]
    pub fn entry(mut self, protocol: EntryProtocol) -> Self {
        self.entry = Some(protocol);
        self
    }

    /// Takes this record of the host instead of the kept one.
    #[must_use]
    pub fn profile(mut self, profile: HostProfile) -> Self {
        self.profile = Some(profile);
        self
    }

    /// Writes the guest's serial output to `writer`, too. A vCPU waits until it is written. Errors
    /// are ignored.
    #[must_use]
    pub fn console(mut self, writer: impl Write + Send + 'static) -> Self {
        self.console = Some(Console(Box::new(writer)));
        self
    }

    /// Lets scripts keep moments of the machine in the folder `path`: `snapshot("NAME")`.
    #[must_use]
    pub fn snapshots(mut self, path: impl Into<PathBuf>) -> Self {
        self.snapshots = Some(path.into());
        self
    }

    /// Keeps checkpoints of the last `window` in memory, one after each `every`, of at most `most`
    /// bytes together. [`Vm::rewind`] writes one of them.
    #[must_use]
    pub fn history(mut self, window: Duration, every: Duration, most: u64) -> Self {
        self.history = Some(Ring {
            window,
            every,
            most,
        });
        self
    }

    /// Sets the share of each vCPU's time that all traces of the VM together may cost, as
    /// `run --budget` does. Expectations are always watched.
    #[must_use]
    pub fn budget(mut self, budget: Budget) -> Self {
        self.budget = Some(budget);
        self
    }

    /// Makes the machine and lets the guest run. The guest is stopped when the last reference to
    /// the VM is dropped.
    ///
    /// # Errors
    /// If KVM is not usable, a file is not what it should be, or the machine cannot be made.
    pub fn start(mut self) -> Result<Arc<Vm>, StartError> {
        let name: VmName = self.name.parse()?;
        let started = Instant::now();
        let console = Tail::of_console();
        let writer = self.console.take();
        let writer = writer.map_or_else(|| Box::new(io::sink()) as _, |console| console.0);
        let serial = SerialOutput::write_through(console.tee(writer));
        let (mut vm, passt) = match self.source.clone() {
            None => return Err(StartError::NoSource),
            Some(Source::Snapshot(folder)) => self.restored(&folder, name, serial, console)?,
            Some(Source::Kernel(_) | Source::Image) => self.booted(name, serial, console)?,
        };
        vm.network = passt
            .map(Passt::watch)
            .transpose()
            .map_err(StartError::Watch)?;
        (vm.started, vm.budget) = (started, self.budget);
        vm.keeper = Keeper::new(self.snapshots, self.history);
        // A history begins with the first instruction.
        let held = vm.machine.pause();
        vm.machine.start();
        let vm = Arc::new(vm);
        if vm.keeper.ring().is_some() {
            vm.begin_history()?;
        }
        drop(held);
        Ok(vm)
    }

    /// Makes a machine that boots.
    fn booted(
        &mut self,
        name: VmName,
        serial: SerialOutput,
        console: Tail,
    ) -> Result<(Vm, Option<Passt>), StartError> {
        let BootFiles {
            kernel,
            file,
            initramfs,
            command_line,
        } = self.boot_files()?;
        let network = Network::open(self.network.as_ref(), None)?;
        let host = self.host()?;
        let add_words = kernel.is_linux();
        let usual_devices = || VirtioConfig {
            rng: add_words,
            transport: kernel.transport(),
            ..VirtioConfig::default()
        };
        let mut virtio = self.virtio.clone().unwrap_or_else(usual_devices);
        virtio.disks.splice(..0, self.with_overlays());
        virtio.net = network.card.or(virtio.net);
        let usual = match self.source {
            Some(Source::Image) => DEFAULT_IMAGE_MEMORY,
            _ => DEFAULT_MEMORY,
        };
        let booted = machine::boot(
            &host.kvm,
            &host.profile,
            MachineConfig {
                memory: self.memory.unwrap_or(usual),
                cpus: self.cpus,
                kernel: &file,
                initramfs: initramfs.as_deref(),
                command_line: &command_line,
                add_words,
                protocol: self.entry,
                pit: true,
                acpi: kernel.acpi(virtio.transport, self.cpus),
                virtio,
                serial,
            },
        )?;
        let mut vm = Vm::new(host, name, booted.machine, Some(kernel), console);
        vm.command_line = booted.command_line;
        Ok((vm, network.passt))
    }

    /// Reads the kernel, from its file or the image, and what belongs to it.
    fn boot_files(&mut self) -> Result<BootFiles, StartError> {
        let given = match self.initramfs.take() {
            None => None,
            Some(Initramfs::File(path)) => Some(read_initramfs(&path)?),
            Some(Initramfs::Contents(contents)) => Some(contents),
        };
        let (kernel, file, initramfs, usual) = match (&self.source, self.disks.first()) {
            (Some(Source::Kernel(path)), _) => {
                let (kernel, file) = GuestKernel::open(path)?;
                (kernel, file, None, DEFAULT_COMMAND_LINE.to_owned())
            }
            (Some(Source::Image), Some(image)) => {
                let files = guest_image::boot_files(image)?;
                let path = files.chosen.entry.kernel.path;
                let (kernel, file) = guest_image::kernel(image, files.kernel, &path)?;
                (kernel, file, files.initramfs, files.command_line)
            }
            _ => return Err(StartError::NoSource),
        };
        Ok(BootFiles {
            kernel,
            file,
            initramfs: given.or(initramfs),
            command_line: self.command_line.clone().unwrap_or(usual),
        })
    }

    /// Makes a machine from the snapshot in `folder`.
    fn restored(
        &self,
        folder: &Path,
        name: VmName,
        serial: SerialOutput,
        console: Tail,
    ) -> Result<(Vm, Option<Passt>), StartError> {
        let network = Network::open(self.network.as_ref(), Some(folder))?;
        let host = self.host()?;
        let disks = match self.disks_as_saved {
            true => RestoredDisks::AsSaved,
            // Others than those in the folder are opened only by the caller's names.
            false => RestoredDisks::Named(self.with_overlays()),
        };
        let links = RestoredLinks {
            net: network.restored,
            ..RestoredLinks::default()
        };
        let (kvm, profile) = (&host.kvm, &host.profile);
        let restored = snapshot::restore_connected(kvm, profile, folder, &disks, &links, serial)?;
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
        Ok((vm, network.passt))
    }

    /// Opens KVM with the record of the host.
    fn host(&self) -> Result<Host, HostError> {
        match &self.profile {
            None => Host::open(),
            Some(profile) => Ok(Host {
                kvm: host::device()?,
                profile: profile.clone(),
            }),
        }
    }

    /// Returns the disks, with the overlays that were asked for.
    fn with_overlays(&self) -> Vec<DiskConfig> {
        with_overlays(self.overlay, self.disks.iter())
    }
}

/// Returns `disks`; if `all`, those without an overlay get a nameless one.
pub fn with_overlays<'a>(
    all: bool,
    disks: impl Iterator<Item = &'a DiskConfig>,
) -> Vec<DiskConfig> {
    let with_overlay = |disk: &DiskConfig| match (all, &disk.overlay) {
        (true, None) => DiskConfig {
            overlay: Some(Overlay::Temporary),
            ..disk.clone()
        },
        _ => disk.clone(),
    };
    disks.map(with_overlay).collect()
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
    let begin = move || {
        // The guest does not wait for the checks: on a busy host they take what it leaves.
        rustix::process::nice(LOWEST_PRIORITY)?;
        confinement.enter(Kind::Verify).map_err(io::Error::other)
    };
    let checks = pages.and_then(|pages| memory.watch(machine.ram(), pages, begin));
    let warned = |error: &io::Error| log::warn!("the snapshot's memory is not checked: {error}");
    checks.inspect_err(warned).ok()
}

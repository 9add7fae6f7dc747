//! Making the machine of a run: its inputs are read first, then it is booted or restored, and held.

use std::io;
use std::time::Instant;

use probes::name::ProbePattern;
use vmm::boot::KernelFile;
use vmm::machine::{DiskConfig, MachineConfig, SerialOutput, VirtioConfig};
use vmm::snapshot::{KernelReference, PageMap, RestoredDisks, RestoredLinks};

use crate::args::{self, Switch};
use crate::commands::remote::report_damage;
use crate::confinement::Confinement;
use crate::embed::{check_in_use, read_initramfs, with_overlays};
use crate::guest_image;
use crate::guest_kernel::{GuestKernel, GuestKernelError};
use crate::host::Host;
use crate::memory_size::HumanSize;
use crate::network::Network;
use crate::registry::Entry;
use crate::report::{Failure, printable, say};
use crate::server::guest_ports;
use crate::tail::Tail;
use crate::vm::Vm;
use crate::vsock::Sockets;

/// The word by which Linux prints to the serial port.
const SERIAL_CONSOLE: &str = "console=ttyS0";

/// The inputs, read before anything is made.
pub struct Inputs {
    kernel: Option<(GuestKernel, KernelFile)>,
    initramfs: Option<Vec<u8>>,
    command_line: String,
    /// The guest's network.
    pub network: Network,
    /// The guest's sockets to programs of the host.
    pub sockets: Sockets,
}

impl Inputs {
    /// Reads the files in `args`, checks the traced functions, and connects the network
    /// and the sockets.
    ///
    /// # Errors
    /// If a file is invalid, or has no such function, or the network cannot be connected.
    pub fn read(args: &args::Run) -> Result<Self, Failure> {
        let mut initramfs = args.initramfs.as_deref().map(read_initramfs).transpose()?;
        let mut command_line = args.cmdline.clone();
        let kernel = match (&args.kernel, args.booted_image()) {
            (_, Some(image)) => {
                let files = guest_image::boot_files(image)?;
                for line in files.chosen.to_string().lines() {
                    say(format_args!(
                        "{}: {}",
                        image.path.display(),
                        printable(line)
                    ));
                }
                let path = files.chosen.entry.kernel.path;
                initramfs = initramfs.or(files.initramfs);
                if command_line.is_empty() {
                    command_line = files.command_line;
                }
                Some(guest_image::kernel(image, files.kernel, &path)?)
            }
            (Some(path), None) if args.restore.is_none() => Some(GuestKernel::open(path)?),
            _ => None,
        };
        let command_line = format!("{command_line} {}", args.append);
        if args.booted_image().is_some() && !command_line.contains(SERIAL_CONSOLE) {
            say(format_args!(
                "the guest's messages do not come here: {SERIAL_CONSOLE} is not on its command line; \
                 `--append {SERIAL_CONSOLE}` adds it"
            ));
        }
        if let Some((kernel, _)) = &kernel
            && !args.trace.is_empty()
        {
            // Functions named alone: other probes are known only once the guest runs.
            let functions = args
                .trace
                .iter()
                .filter(|name| ProbePattern::is_exact(name));
            let functions = functions.filter(|name| !name.contains(':')).cloned();
            kernel.check_functions(&functions.collect::<Vec<_>>())?;
        }
        if let Some(folder) = args.symfs.as_deref().filter(|folder| !folder.is_dir()) {
            return Err(Failure::new(format_args!(
                "--symfs {}: no such folder",
                folder.display()
            )));
        }
        let network = Network::open(args.net.as_ref(), args.restore.as_deref())?;
        Ok(Self {
            kernel,
            initramfs,
            command_line: command_line.trim().to_owned(),
            network,
            sockets: Sockets::open(args.vsock.as_ref(), args.restore.as_deref())?,
        })
    }
}

/// Makes the machine, held before its first instruction, with its threads in `confinement`. Its
/// serial output is kept in the second of `console`. `pages` shows which of a restored machine's
/// memory is in use.
///
/// # Errors
/// If the inputs do not fit, or the snapshot cannot be restored.
pub fn make(
    args: &args::Run,
    inputs: Inputs,
    host: Host,
    entry: &Entry,
    (serial, console): (SerialOutput, Tail),
    pages: io::Result<PageMap>,
    confinement: &Confinement,
) -> Result<Vm, Failure> {
    let started = Instant::now();
    let name = entry.name().clone();
    if let Some(folder) = &args.restore {
        let disks = match args.disks_as_saved {
            true => RestoredDisks::AsSaved,
            false => RestoredDisks::Named(disks(args)),
        };
        let (kvm, profile) = (&host.kvm, &host.profile);
        let links = RestoredLinks {
            net: inputs.network.restored,
            vsock: inputs.sockets.config,
            replay: args.replay,
        };
        let restored =
            vmm::snapshot::restore_connected(kvm, profile, folder, &disks, &links, serial)?;
        for disk in &restored.disks {
            say(format_args!("{name}: disk {disk}"));
        }
        if args.verify {
            report_damage(folder, &restored.memory)?;
        }
        let checks = match args.verify {
            true => None,
            false => check_in_use(restored.memory, &restored.machine, pages, confinement),
        };
        let saved = restored.kernel;
        let kernel = snapshot_kernel(args, saved.as_ref())?;
        say(format_args!("{name}: restored from {}", folder.display()));
        if let (Some(recorded), false) = (restored.recorded, args.replay) {
            let seconds = recorded.as_secs_f64();
            say(format_args!(
                "{name}: the snapshot has a recording of {seconds:.1} s of input; --replay gives it to the guest"
            ));
        }
        let mut vm = Vm::new(host, name, restored.machine, kernel, console);
        (vm.command_line, vm.reference) = (restored.command_line, saved);
        (vm.started, vm.checks) = (started, checks);
        return Ok(vm);
    }
    let Some((kernel, kernel_file)) = inputs.kernel else {
        return Err(Failure::Usage(
            "nothing to run: give --image, --kernel or --restore".into(),
        ));
    };
    let add_words = !args.no_words && kernel.is_linux();
    let virtio = VirtioConfig {
        net: inputs.network.card,
        vsock: inputs.sockets.config,
        ..virtio(args, &kernel, add_words)
    };
    let booted = vmm::machine::boot(
        &host.kvm,
        &host.profile,
        MachineConfig {
            memory: args.memory(),
            cpus: args.cpus,
            kernel: &kernel_file,
            initramfs: inputs.initramfs.as_deref(),
            command_line: &inputs.command_line,
            add_words,
            protocol: args.entry.map(Into::into),
            pit: !args.no_pit,
            acpi: kernel.acpi(virtio.transport, args.cpus),
            virtio,
            serial,
        },
    )?;
    say(format_args!(
        "{name}: {}, {} vCPU{}, {}",
        HumanSize(args.memory()),
        args.cpus,
        if args.cpus == 1 { "" } else { "s" },
        kernel.reference.path.display()
    ));
    if !booted.added_words.is_empty() {
        say(format_args!(
            "added to the command line for this machine and host: {}",
            booted.added_words.join(" ")
        ));
    }
    let mut vm = Vm::new(host, name, booted.machine, Some(kernel), console);
    (vm.command_line, vm.started) = (booted.command_line, started);
    Ok(vm)
}

/// Returns the requested disks.
fn disks(args: &args::Run) -> Vec<DiskConfig> {
    with_overlays(args.overlay, args.image.iter().chain(&args.disks))
}

/// Returns the requested virtio devices but those that are connected before, and the default ones
/// of a guest that is informed of them (`announced`).
fn virtio(args: &args::Run, kernel: &GuestKernel, announced: bool) -> VirtioConfig {
    VirtioConfig {
        console: guest_ports::config(args.guest_ports),
        disks: disks(args),
        rng: args.rng.map_or(announced, |rng| rng == Switch::On),
        net: None,
        vsock: None,
        transport: args.bus.map_or_else(|| kernel.transport(), Into::into),
    }
}

/// Returns the kernel of a snapshot from its file, or from the image that is named.
fn saved_kernel(
    args: &args::Run,
    saved: &KernelReference,
) -> Result<GuestKernel, GuestKernelError> {
    let found = GuestKernel::of_snapshot(saved, args.kernel.as_deref());
    let image = args.image.as_ref().filter(|_| args.kernel.is_none());
    let (Err(_), Some(image)) = (&found, image) else {
        return found;
    };
    match guest_image::boot_kernel(image) {
        Ok((kernel, _)) if saved.is_same_kernel(&kernel.reference) => Ok(kernel),
        _ => found,
    }
}

/// Returns the kernel of a snapshot. Without its file the machine runs all the same, and is known
/// as far as its memory allows.
fn snapshot_kernel(
    args: &args::Run,
    saved: Option<&KernelReference>,
) -> Result<Option<GuestKernel>, Failure> {
    let Some(saved) = saved else {
        return match args.needs_kernel() {
            false => Ok(None),
            true => Err(Failure::new(
                "the snapshot does not say which kernel it runs: it cannot be traced",
            )),
        };
    };
    match saved_kernel(args, saved) {
        Ok(kernel) => {
            // The functions, modules' included, are known once the guest's memory is there.
            if args.needs_kernel() {
                kernel.symbols()?;
            }
            Ok(Some(kernel))
        }
        Err(error) if !args.needs_kernel() && args.kernel.is_none() => {
            say(format_args!(
                "{error}; its structures are read from the guest's memory instead"
            ));
            Ok(None)
        }
        Err(error) => Err(error.into()),
    }
}

//! Creating a machine that boots a kernel.

use std::fmt;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use devices::acpi::{self, AcpiPorts, PowerButton};
use devices::pci::{ECAM_LENGTH, Ecam, PCI_PORTS_BASE, PCI_PORTS_LENGTH, PciBus, PciPorts};
use devices::{
    Bus, BusError, CMOS_BASE, CMOS_LENGTH, COM1_BASE, COM1_IRQ, Cmos, CmosMemory, ConsoleOutput,
    I8042, I8042_BASE, I8042_LENGTH, NullDevice, RESET_PORT_BASE, RESET_PORT_LENGTH, ResetPort,
    Serial, UART_LENGTH,
};
use kvm_ioctls::{Cap, Kvm, MsrFilterDefaultAction, MsrFilterRange, MsrFilterRangeFlags, VmFd};

use super::control::Control;
use super::shared::{IrqPin, Parts, Shared, Signals};
use super::virtio::{self, Transport, VirtioConfig, VirtioError};
use super::{AcpiDevice, Devices, Machine, RunEnd};
use crate::assist;
use crate::boot::entry;
use crate::boot::{self, AcpiConfig, AcpiError, BootConfig, BootError, EntryProtocol, KernelFile};
use crate::host::HostProfile;
use crate::host::cpuid::{self, Shape};
use crate::memory::{GuestRam, HOLE_START, RamError};
use crate::tape::{Stream, Tape};
use crate::vcpu::{Vcpu, kick};
use crate::vm::{self, KvmError, NameCall};
use crate::x86_64::{emulate, msr};

/// The maximum number of vCPUs of a machine.
pub const MAX_CPUS: u8 = 64;

/// The parts that a machine is made of.
pub struct MachineConfig<'a> {
    /// The size of guest RAM in bytes.
    pub memory: u64,
    /// The number of vCPUs, 1 to [`MAX_CPUS`].
    pub cpus: u8,
    /// The kernel.
    pub kernel: &'a KernelFile,
    /// The contents of the initramfs.
    pub initramfs: Option<&'a [u8]>,
    /// The user's command line. The words that the machine and the host need are added.
    pub command_line: &'a str,
    /// Whether the words that a host needs are added. `false` is for guests other than Linux.
    pub add_words: bool,
    /// The entry protocol. The default is the 64-bit entry.
    pub protocol: Option<EntryProtocol>,
    /// Whether there is an interval timer (PIT).
    pub pit: bool,
    /// The ACPI tables, with the registers and the power button that they describe. The default is
    /// none.
    pub acpi: Option<AcpiConfig>,
    /// The virtio devices.
    pub virtio: VirtioConfig,
    /// The destination of serial output.
    pub serial: ConsoleOutput,
}

impl fmt::Debug for MachineConfig<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MachineConfig")
            .field("memory", &self.memory)
            .field("cpus", &self.cpus)
            .field("command_line", &self.command_line)
            .finish_non_exhaustive()
    }
}

/// A machine ready to start, and the words added to its command line.
#[derive(Debug)]
pub struct BootedMachine {
    /// The machine, paused before its first instruction.
    pub machine: Machine,
    /// The kernel's command line.
    pub command_line: String,
    /// The words that were added to the user's command line.
    pub added_words: Vec<String>,
}

/// The reason that a machine cannot be created.
#[derive(Debug, thiserror::Error)]
pub enum MachineError {
    /// The memory cannot be created.
    #[error(transparent)]
    Ram(#[from] RamError),
    /// The kernel cannot be loaded.
    #[error(transparent)]
    Boot(#[from] BootError),
    /// KVM refuses a call.
    #[error(transparent)]
    Kvm(#[from] KvmError),
    /// The number of vCPUs is out of range.
    #[error("{asked} vCPUs: a machine has 1 to {MAX_CPUS}")]
    Cpus {
        /// The requested number of vCPUs.
        asked: u8,
    },
    /// The host cannot have as many vCPUs.
    #[error("{asked} vCPUs: this host's KVM has at most {most} for a machine")]
    HostCpus {
        /// The requested number of vCPUs.
        asked: u8,
        /// The largest number.
        most: usize,
    },
    /// The number of a hardware breakpoint is out of range.
    #[error("hardware breakpoint {asked}: 1 to 3 are there (0 is the machine's own)")]
    BreakpointNumber {
        /// The requested number.
        asked: usize,
    },
    /// A host thread fails.
    #[error("a thread of the machine cannot be started, interrupted or waited for: {0}")]
    Thread(std::io::Error),
    /// The device layout has a conflict.
    #[error(transparent)]
    Bus(#[from] BusError),
    /// The virtio devices cannot be created.
    #[error(transparent)]
    Virtio(#[from] VirtioError),
    /// The boot structures do not fit.
    #[error("boot structures: {0}")]
    Write(#[from] crate::memory::PhysicalWriteError),
    /// A vCPU refused a request.
    #[error("{0}")]
    Vcpu(String),
}

impl From<RunEnd> for MachineError {
    fn from(end: RunEnd) -> Self {
        Self::Vcpu(end.to_string())
    }
}

/// Creates a machine that boots `config.kernel`, paused before its first instruction.
///
/// # Errors
/// If something does not fit or KVM refuses. Nothing is left behind then.
pub fn boot(
    kvm: &Kvm,
    profile: &HostProfile,
    config: MachineConfig<'_>,
) -> Result<BootedMachine, MachineError> {
    check_cpus(kvm, config.cpus)?;
    let virtio = config.virtio.list();
    let places = virtio::places(virtio.len())?;
    if let (Some(acpi), Transport::Mmio) = (&config.acpi, config.virtio.transport) {
        let found = acpi.power_button_gsi;
        if places.iter().any(|place| u32::from(place.irq) == found) {
            return Err(BootError::from(AcpiError::PowerButtonGsi { found }).into());
        }
    }
    let (command_line, added_words) = if config.add_words {
        let announced: Vec<String> = match config.virtio.transport {
            Transport::Mmio => places.iter().map(|place| place.word()).collect(),
            Transport::Pci => Vec::new(),
        };
        let needs = assist::command_line::Needs {
            acpi: config.acpi.is_some(),
            interpreted: assist::needed(profile).command_line,
        };
        assist::command_line::complete(config.command_line, needs, &announced)
    } else {
        (config.command_line.trim().to_owned(), Vec::new())
    };
    // KVM's slowest work comes first and goes on while the kernel is loaded. The memory slots come
    // after it, because they hurry KVM's grace periods along.
    let (vm, watch) = new_vm(kvm, profile, true)?;
    let ram = GuestRam::new(config.memory)?;
    let entry_point = boot::load(
        &ram,
        &BootConfig {
            kernel: config.kernel,
            initramfs: config.initramfs,
            command_line: &command_line,
            cpus: config.cpus,
            acpi: config.acpi,
            interrupts: places.iter().map(|place| place.irq + 1).max().unwrap_or(0),
            protocol: config.protocol,
            rng_seed: rng_seed(),
        },
    )?;
    let parts = MachineParts {
        vm,
        ram: &ram,
        cpus: config.cpus,
        pit: config.pit,
        acpi: config.acpi,
        virtio: &virtio,
        transport: config.virtio.transport,
        serial: config.serial,
        tape: Tape::default(),
    };
    let (shared, devices) = assemble(profile, parts)?;
    if config.acpi.is_some() {
        vm::mask_8259s(shared.vm()?)?;
    }
    let vcpus = create_vcpus(kvm, &shared, config.cpus)?;
    let boot_cpu = vcpus
        .first()
        .ok_or(MachineError::Cpus { asked: config.cpus })?;
    boot_cpu.set_entry(|sregs| entry::prepare(&ram, entry_point, sregs))?;
    let machine = launch(shared, devices, vcpus, watch)?;
    Ok(BootedMachine {
        machine,
        command_line,
        added_words,
    })
}

/// Checks that a machine, and this host, can have so many vCPUs.
pub(crate) fn check_cpus(kvm: &Kvm, cpus: u8) -> Result<(), MachineError> {
    let most = kvm.get_max_vcpus();
    if !(1..=MAX_CPUS).contains(&cpus) {
        Err(MachineError::Cpus { asked: cpus })
    } else if usize::from(cpus) > most {
        Err(MachineError::HostCpus { asked: cpus, most })
    } else {
        Ok(())
    }
}

/// The common parts of a booted and a restored machine.
pub(crate) struct MachineParts<'a> {
    pub(crate) vm: Arc<VmFd>,
    pub(crate) ram: &'a GuestRam,
    pub(crate) cpus: u8,
    pub(crate) pit: bool,
    pub(crate) acpi: Option<AcpiConfig>,
    pub(crate) virtio: &'a [virtio::DeviceConfig],
    pub(crate) transport: Transport,
    pub(crate) serial: ConsoleOutput,
    /// The tape of its inputs.
    pub(crate) tape: Tape,
}

/// Creates an empty machine. `watch_lstar`: the guest has yet to set up SYSCALL, which a host that
/// repairs SYSCALL must see.
pub(crate) fn new_vm(
    kvm: &Kvm,
    profile: &HostProfile,
    watch_lstar: bool,
) -> Result<(Arc<VmFd>, SyscallWatch), MachineError> {
    let vm = Arc::new(vm::create(kvm)?);
    let watch = match watch_lstar && assist::needed(profile).syscall_repair {
        true => SyscallWatch::start(vm.clone())?,
        false => SyscallWatch(None),
    };
    Ok((vm, watch))
}

/// Creates the serial port, whose bytes go over `tape`.
fn taped_serial(line: Arc<IrqPin>, output: ConsoleOutput, tape: &Tape) -> Serial {
    let outputs = tape.clone();
    let output = output.observed_by(move |bytes| outputs.output(Stream::Serial, &[bytes]));
    let inputs = tape.clone();
    let mut serial = Serial::new(line, output);
    serial.on_input(move |bytes| inputs.input(Stream::Serial, bytes));
    serial
}

/// Creates the machine without its vCPUs: KVM's part and ours.
pub(crate) fn assemble(
    profile: &HostProfile,
    parts: MachineParts<'_>,
) -> Result<(Arc<Shared>, Devices), MachineError> {
    let MachineParts {
        vm,
        ram,
        cpus,
        pit,
        acpi,
        virtio,
        transport,
        serial,
        tape,
    } = parts;
    vm::furnish(&vm, ram, pit)?;
    let signals = Arc::new(Signals::default());
    let control = Arc::new(Control::new(usize::from(cpus)));
    let backlog = serial.backlog();
    if let Some(backlog) = &backlog {
        let control = control.clone();
        backlog.on_room(move || control.wake());
    }
    // Without ACPI a guest finds the same by searching.
    let addresses = acpi.unwrap_or_else(|| AcpiConfig::new(cpus));
    let mut mmio = Bus::new();
    let host = virtio::Host {
        vm: &vm,
        profile,
        control: &control,
        ram,
        tape: &tape,
        cpus,
        pci_window: addresses.mmio32,
    };
    let virtio = virtio::Devices::new(virtio, transport, &host, &mut mmio)?;
    let reset_port = Arc::new(Mutex::new(ResetPort::new(signals.clone())));
    let pci_ports = match transport {
        Transport::Mmio => None,
        Transport::Pci => {
            let bus = Arc::new(PciBus::new(virtio.functions()));
            let ecam = Arc::new(Mutex::new(Ecam::new(bus.clone())));
            mmio.insert("pci", addresses.ecam.base, ECAM_LENGTH, ecam)?;
            Some(Arc::new(Mutex::new(PciPorts::new(bus, reset_port.clone()))))
        }
    };
    let line = Arc::new(IrqPin {
        vm: vm.clone(),
        irq: COM1_IRQ,
    });
    let devices = Devices {
        virtio,
        pci_ports,
        serial: Arc::new(Mutex::new(taped_serial(line, serial, &tape))),
        reset_port,
        cmos: Arc::new(Mutex::new(Cmos::new(
            cmos_memory(ram.size()),
            std::time::SystemTime::now,
        ))),
        acpi: acpi.map(|config| acpi_device(config, &vm, &signals)),
    };
    let mut pio = Bus::new();
    pio.insert("serial", COM1_BASE, UART_LENGTH, devices.serial.clone())?;
    let i8042 = Arc::new(Mutex::new(I8042::new(signals.clone())));
    pio.insert("i8042", I8042_BASE, I8042_LENGTH, i8042)?;
    pio.insert("cmos", CMOS_BASE, CMOS_LENGTH, devices.cmos.clone())?;
    // Linux writes to this port to wait for slow devices.
    pio.insert("delay", 0x80, 1, Arc::new(Mutex::new(NullDevice)))?;
    let reset_port = devices.reset_port.clone();
    match &devices.pci_ports {
        None => pio.insert("reset", RESET_PORT_BASE, RESET_PORT_LENGTH, reset_port)?,
        // The reset port is among them.
        Some(ports) => pio.insert("pci", PCI_PORTS_BASE, PCI_PORTS_LENGTH, ports.clone())?,
    }
    if let Some(device) = &devices.acpi {
        let base = u64::from(device.config.registers);
        pio.insert("acpi", base, acpi::LENGTH, device.ports.clone())?;
    }
    let shared = Shared::new(Parts {
        ram: ram.clone(),
        profile: profile.clone(),
        vm: Some(vm),
        pio,
        mmio,
        control,
        signals,
        backlog,
        tape,
    });
    Ok((Arc::new(shared), devices))
}

fn acpi_device(config: AcpiConfig, vm: &Arc<VmFd>, signals: &Arc<Signals>) -> AcpiDevice {
    let button = PowerButton::new(Arc::new(IrqPin {
        vm: vm.clone(),
        irq: config.power_button_gsi,
    }));
    AcpiDevice {
        config,
        ports: Arc::new(Mutex::new(AcpiPorts::new(button, signals.clone()))),
    }
}

/// Creates vCPUs with their CPUID, in KVM's initial state.
pub(crate) fn create_vcpus(
    kvm: &Kvm,
    shared: &Arc<Shared>,
    cpus: u8,
) -> Result<Vec<Vcpu>, MachineError> {
    let supported = kvm
        .get_supported_cpuid(kvm_bindings::KVM_MAX_CPUID_ENTRIES)
        .call("KVM_GET_SUPPORTED_CPUID")?;
    let mut vcpus = Vec::new();
    for vcpu in 0..cpus {
        let fd = shared
            .vm()?
            .create_vcpu(u64::from(vcpu))
            .call("KVM_CREATE_VCPU")?;
        let shape = Shape {
            vcpu,
            cpus,
            tsc_deadline: shared.profile.tsc_deadline,
        };
        fd.set_cpuid2(&cpuid::shape(&supported, &shared.profile, shape))
            .call("KVM_SET_CPUID2")?;
        vcpus.push(Vcpu::new(usize::from(vcpu), fd, shared.clone())?);
    }
    Ok(vcpus)
}

/// Starts the vCPU threads, parked.
pub(crate) fn launch(
    shared: Arc<Shared>,
    devices: Devices,
    vcpus: Vec<Vcpu>,
    watch: SyscallWatch,
) -> Result<Machine, MachineError> {
    watch.wait()?;
    kick::install_handler().map_err(MachineError::Thread)?;
    emulate::prepare_host_code();
    let hold = shared.control.hold();
    let worker = devices.virtio.start(&shared.control)?;
    let mut threads = Vec::new();
    for vcpu in vcpus {
        let index = vcpu.index();
        let thread = std::thread::Builder::new()
            .name(format!("vcpu{index}"))
            .spawn(move || vcpu.main());
        match thread {
            Ok(thread) => threads.push(thread),
            Err(error) => {
                for missing in index..shared.control.vcpus() {
                    shared.control.gone(missing);
                }
                // The drop ends the threads that did start.
                drop(Machine::assemble(shared, devices, threads, worker, hold));
                return Err(MachineError::Thread(error));
            }
        }
    }
    Ok(Machine::assemble(shared, devices, threads, worker, hold))
}

/// A pending request to KVM to report writes to the SYSCALL MSRs.
///
/// KVM waits for a grace period of its host for some ten milliseconds. The request therefore runs
/// on a thread of its own, and is awaited before the first vCPU runs.
///
/// A drop waits too, so that a failed machine leaves no thread behind.
pub(crate) struct SyscallWatch(Option<JoinHandle<Result<(), KvmError>>>);

impl SyscallWatch {
    fn start(vm: Arc<VmFd>) -> Result<Self, MachineError> {
        let thread = std::thread::Builder::new().name("msr-filter".into());
        let thread = thread
            .spawn(move || watch_syscall_msrs(&vm))
            .map_err(MachineError::Thread)?;
        Ok(Self(Some(thread)))
    }

    fn wait(mut self) -> Result<(), MachineError> {
        let Some(thread) = self.0.take() else {
            return Ok(());
        };
        let panicked = |_| MachineError::Thread(std::io::Error::other("it panicked"));
        Ok(thread.join().map_err(panicked)??)
    }
}

impl Drop for SyscallWatch {
    fn drop(&mut self) {
        if let Some(thread) = self.0.take() {
            // The failure of the machine was reported already.
            let _ = thread.join();
        }
    }
}

/// Asks KVM to report writes to STAR, LSTAR and SYSCALL's flag mask.
fn watch_syscall_msrs(vm: &VmFd) -> Result<(), KvmError> {
    let capability = kvm_bindings::kvm_enable_cap {
        cap: Cap::X86UserSpaceMsr as u32,
        args: [u64::from(kvm_bindings::KVM_MSR_EXIT_REASON_FILTER), 0, 0, 0],
        ..Default::default()
    };
    vm.enable_cap(&capability)
        .call("KVM_ENABLE_CAP (user space MSRs)")?;
    // A zero bit reports writes. The third of the four is CSTAR, which only 32-bit programs use.
    let reported = [0b0100u8];
    let range = MsrFilterRange {
        flags: MsrFilterRangeFlags::WRITE,
        base: msr::STAR,
        msr_count: msr::SYSCALL_MASK - msr::STAR + 1,
        bitmap: &reported,
    };
    vm.set_msr_filter(MsrFilterDefaultAction::ALLOW, &[range])
        .call("KVM_X86_SET_MSR_FILTER")
}

fn cmos_memory(size: u64) -> CmosMemory {
    CmosMemory {
        below_4g_end: size.min(HOLE_START),
        above_4g: size.saturating_sub(HOLE_START),
    }
}

/// Returns 32 bytes from the host's random numbers.
fn rng_seed() -> [u8; 32] {
    let mut seed = [0u8; 32];
    // SAFETY: the buffer has the given length. A short or failed read leaves zeros, which the guest
    // mixes in without harm.
    unsafe { libc::getrandom(seed.as_mut_ptr().cast(), seed.len(), 0) };
    seed
}

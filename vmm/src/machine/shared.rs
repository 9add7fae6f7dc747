//! The state shared by a machine's owner and its vCPU threads.
//!
//! Everything here is either immutable once vCPUs run, atomic, or behind the lock that its field
//! names.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use arc_swap::ArcSwapOption;
use devices::{Backlog, Bus, InterruptLine, MachineSignals, ResetCause};
use iced_x86::Mnemonic;
use kvm_ioctls::VmFd;

use super::control::Control;
use super::watchpoints::Watchpoints;
use super::{PanicReport, PanicWitness, RunEnd};
use crate::host::HostProfile;
use crate::memory::GuestRam;
use crate::tape::Tape;
use crate::trap::TrapTable;
use crate::vcpu::TrapSink;
use crate::vm::KvmError;

/// The state shared by all threads of a machine.
pub(crate) struct Shared {
    pub(crate) ram: GuestRam,
    pub(crate) profile: HostProfile,
    /// KVM's machine. `None` if no guest is run: in a rehearsal.
    vm: Option<Arc<VmFd>>,
    /// The size in bytes of a vCPU's shared page mapping.
    pub(crate) run_size: usize,
    pub(crate) pio: Bus,
    pub(crate) mmio: Bus,
    pub(crate) traps: TrapTable,
    pub(crate) control: Arc<Control>,
    pub(crate) sink: Arc<ArcSwapOption<Box<dyn TrapSink>>>,
    /// The requested samples of each vCPU.
    pub(crate) samples: Vec<AtomicU64>,
    /// The number of holders of user traps.
    ///
    /// The lock is held while user sites, or the watch on the guest's #BP entry, are added or
    /// removed.
    pub(crate) user_sites: Mutex<usize>,
    pub(crate) watchpoints: Watchpoints,
    /// Held while the machine is saved.
    pub(crate) saving: Mutex<()>,
    /// Whether the log of dirty pages has an owner.
    pub(crate) log_owned: AtomicBool,
    pub(crate) counters: Counters,
    /// The instructions that were completed for the guest.
    pub(crate) completed: Instructions,
    /// The instructions that could not be completed. The guest got #UD.
    pub(crate) refused: Instructions,
    pub(crate) signals: Arc<Signals>,
    /// The backlog of the serial port's output, if that has a queue.
    pub(crate) backlog: Option<Backlog>,
    /// The tape of the guest's inputs.
    pub(crate) tape: Tape,
    /// The guest's first panic. It has its own lock, held for an instant.
    panic: Mutex<Option<PanicReport>>,
    /// A detector of panics that no trap sees.
    pub(super) witness: OnceLock<Box<dyn PanicWitness>>,
    /// The reported reason for the end of the run, once somebody has asked.
    pub(super) told: OnceLock<RunEnd>,
}

/// The parts of a [`Shared`].
pub(crate) struct Parts {
    pub(crate) ram: GuestRam,
    pub(crate) profile: HostProfile,
    pub(crate) vm: Option<Arc<VmFd>>,
    pub(crate) pio: Bus,
    pub(crate) mmio: Bus,
    pub(crate) control: Arc<Control>,
    pub(crate) signals: Arc<Signals>,
    pub(crate) backlog: Option<Backlog>,
    pub(crate) tape: Tape,
}

impl Shared {
    pub(crate) fn new(parts: Parts) -> Self {
        let traps = TrapTable::new(
            parts.ram.clone(),
            parts.profile.step_kernel,
            parts.profile.step_user,
        );
        Self {
            run_size: parts.vm.as_ref().map_or(0, |vm| vm.run_size()),
            ram: parts.ram,
            profile: parts.profile,
            vm: parts.vm,
            pio: parts.pio,
            mmio: parts.mmio,
            traps,
            sink: Arc::default(),
            samples: (0..parts.control.vcpus())
                .map(|_| AtomicU64::new(0))
                .collect(),
            control: parts.control,
            user_sites: Mutex::default(),
            watchpoints: Watchpoints::default(),
            saving: Mutex::default(),
            log_owned: AtomicBool::new(false),
            counters: Counters::default(),
            completed: Instructions::default(),
            refused: Instructions::default(),
            signals: parts.signals,
            backlog: parts.backlog,
            tape: parts.tape,
            panic: Mutex::new(None),
            witness: OnceLock::new(),
            told: OnceLock::new(),
        }
    }

    /// Returns KVM's machine.
    ///
    /// # Errors
    /// In a rehearsal, which has none.
    pub(crate) fn vm(&self) -> Result<&VmFd, KvmError> {
        self.vm.as_deref().ok_or(KvmError {
            call: "a call to a machine that runs no guest",
            source: kvm_ioctls::Error::new(libc::ENODEV),
        })
    }

    pub(crate) fn take_request(&self) -> Option<Request> {
        self.signals.take()
    }

    /// Returns the reason for the end by a request: a panic, if the guest has panicked before.
    pub(crate) fn requested_end(&self, request: Request) -> RunEnd {
        match (self.panic(), request) {
            (Some(report), _) => RunEnd::Panic(report),
            (None, Request::Reset(cause)) => RunEnd::Reset {
                cause: cause.map(|c| c.to_string()),
            },
            (None, Request::PowerOff) => RunEnd::PoweredOff,
        }
    }

    pub(crate) fn note_panic(&self, report: PanicReport) {
        let mut panic = self.panic.lock().unwrap_or_else(PoisonError::into_inner);
        panic.get_or_insert(report);
    }

    pub(crate) fn panic(&self) -> Option<PanicReport> {
        self.panic
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }
}

/// Exits and events, counted since the machine started.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) port: AtomicU64,
    pub(crate) mmio: AtomicU64,
    pub(crate) traps: AtomicU64,
    pub(crate) guest_int3: AtomicU64,
    pub(crate) syscalls_repaired: AtomicU64,
    /// Changes of registers and memory by debuggers.
    pub(crate) changes: AtomicU64,
}

/// The counts of instructions, by mnemonic.
#[derive(Debug, Default)]
pub(crate) struct Instructions(Mutex<HashMap<Mnemonic, u64>>);

impl Instructions {
    /// Counts one instruction. Returns its new count.
    pub(crate) fn count(&self, mnemonic: Mnemonic) -> u64 {
        let mut counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let count = counts.entry(mnemonic).or_default();
        *count += 1;
        *count
    }

    pub(crate) fn list(&self) -> Vec<(String, u64)> {
        let counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut list: Vec<_> = counts
            .iter()
            .map(|(m, n)| (format!("{m:?}").to_lowercase(), *n))
            .collect();
        list.sort_by_key(|(_, n)| std::cmp::Reverse(*n));
        list
    }
}

/// A guest's request that ends the run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Request {
    /// A reset, and its cause if it is known.
    Reset(Option<ResetCause>),
    PowerOff,
}

/// The requests of devices. Each has its position as its code, from 1.
const DEVICE_REQUESTS: [Request; 4] = [
    Request::Reset(Some(ResetCause::KeyboardController)),
    Request::Reset(Some(ResetCause::ResetPort)),
    Request::Reset(Some(ResetCause::AcpiRegister)),
    Request::PowerOff,
];

/// Requests of devices to the machine. The vCPU that made the access picks them up after it.
#[derive(Debug, Default)]
pub(crate) struct Signals {
    /// The code of the last request; 0: none.
    request: AtomicUsize,
}

impl Signals {
    fn take(&self) -> Option<Request> {
        if self.request.load(Ordering::Relaxed) == 0 {
            return None;
        }
        let code = self.request.swap(0, Ordering::Relaxed);
        DEVICE_REQUESTS.get(code.checked_sub(1)?).copied()
    }

    fn put(&self, request: Request) {
        let place = DEVICE_REQUESTS.iter().position(|known| *known == request);
        let code = place.map_or(0, |place| place + 1);
        self.request.store(code, Ordering::Relaxed);
    }
}

impl MachineSignals for Signals {
    fn request_reset(&self, cause: ResetCause) {
        self.put(Request::Reset(Some(cause)));
    }

    fn request_power_off(&self) {
        self.put(Request::PowerOff);
    }
}

/// An edge-triggered interrupt input of KVM's controllers.
pub(crate) struct IrqPin {
    pub(crate) vm: Arc<VmFd>,
    pub(crate) irq: u32,
}

impl InterruptLine for IrqPin {
    fn pulse(&self) -> std::io::Result<()> {
        let set = |level| {
            self.vm
                .set_irq_line(self.irq, level)
                .map_err(|e| std::io::Error::from_raw_os_error(e.errno()))
        };
        set(true)?;
        set(false)
    }
}

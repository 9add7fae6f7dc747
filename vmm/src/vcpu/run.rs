//! The loop around KVM_RUN.
//!
//! Port and memory accesses go to the buses, everything about traps to `hit`, and exits of
//! interpreting hosts to `assisted`.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use kvm_bindings::{KVM_SYSTEM_EVENT_RESET, KVM_SYSTEM_EVENT_SHUTDOWN};
use kvm_ioctls::VcpuExit;

use super::hit::Usual;
use super::kick::Kick;
use super::step::is_step;
use super::system::System;
use super::{Vcpu, VcpuRegisters, in_user_mode};
use crate::clock::host_tsc;
use crate::exit;
use crate::machine::RunEnd;
use crate::machine::control::{Control, ParkOutcome};
use crate::machine::shared::Request;
use crate::vm::KvmError;
use crate::x86_64::debug_exception::VECTOR_BP;
use crate::x86_64::emulate::StateError;

/// The continuation after an exit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Flow {
    /// Enter the guest again.
    Run,
    /// KVM_RUN, or a wait, was interrupted: this vCPU is to be parked.
    Interrupted,
    /// The stepped instruction is done.
    Stepped,
    /// A trap was handled, or was hit elsewhere during a step and left for the next entry. Enter
    /// the guest again.
    Trapped,
}

impl Flow {
    fn trapped(self) -> Self {
        if self == Self::Run {
            Self::Trapped
        } else {
            self
        }
    }
}

/// A guard that reports the exit of a vCPU's thread to the machine, also after a panic.
///
/// Nobody may wait for the thread or kick it afterwards. Dropped before the vCPU.
struct Leaving {
    control: Arc<Control>,
    vcpu: usize,
}

impl Drop for Leaving {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let message = format!("the thread of vCPU {} panicked", self.vcpu);
            self.control.end(RunEnd::Host { message });
        }
        self.control.gone(self.vcpu);
    }
}

/// The exits that `run` passes on, without their borrow of the shared page.
enum Kind {
    Port,
    Done,
    Debug(kvm_bindings::kvm_debug_exit_arch),
    InternalError,
    WriteMsr { index: u32, value: u64 },
    TripleFault,
    Reset,
    PowerOff,
    Unexpected(String),
}

impl From<KvmError> for RunEnd {
    fn from(error: KvmError) -> Self {
        RunEnd::Host {
            message: error.to_string(),
        }
    }
}

impl From<StateError> for RunEnd {
    fn from(error: StateError) -> Self {
        RunEnd::Host {
            message: error.to_string(),
        }
    }
}

impl Vcpu {
    /// Runs the guest on this vCPU until the machine makes its threads leave.
    pub(crate) fn main(mut self) {
        let control = self.machine.control.clone();
        let kick = Kick::of_this_thread(&mut self.fd);
        control.register(self.index, kick);
        let _leaving = Leaving {
            control: control.clone(),
            vcpu: self.index,
        };
        loop {
            let entered = self.enter();
            if self.watched != 0
                && let Err(error) = self.report_watched()
            {
                control.end(error.into());
            }
            match entered {
                Ok(Flow::Run | Flow::Stepped | Flow::Trapped) => continue,
                Ok(Flow::Interrupted) => {}
                Err(reason) => control.end(reason),
            }
            if control.park(&mut self) == ParkOutcome::Leave {
                break;
            }
            // After the kick was cleared: requests from now on kick again.
            let taken = self.apply_watchpoints();
            if let Err(error) = taken.and_then(|()| self.take_samples()) {
                control.end(error.into());
            }
        }
    }

    /// Delivers the requested samples to the sink, if any.
    fn take_samples(&mut self) -> Result<(), KvmError> {
        let wanted = self.machine.samples.get(self.index);
        let mask = wanted.map_or(0, |wanted| wanted.swap(0, Ordering::SeqCst));
        if mask == 0 {
            return Ok(());
        }
        self.exited = host_tsc();
        let VcpuRegisters { regs, sregs } = self.snapshot_registers()?;
        if let Some(sink) = self.machine.sink.load().as_deref() {
            sink.sample(
                self.index,
                mask,
                &self.stopped(&regs, &System::known_as(&sregs), in_user_mode(&sregs)),
            );
        }
        Ok(())
    }

    /// Calls KVM_RUN once and handles the exit.
    pub(super) fn enter(&mut self) -> Result<Flow, RunEnd> {
        // The lookup of a user site needs the system registers, to translate its address.
        let user = self.machine.traps.has_user_sites();
        self.registers.expect_system(&mut self.fd, user);
        let stepping = self.debug.stepping().is_some();
        let kind = match self.fd.run() {
            // The most frequent exit of a traced guest.
            Ok(VcpuExit::Debug(arch)) if !stepping => {
                self.exited = host_tsc();
                if arch.exception != VECTOR_BP {
                    return self.on_debug(&arch).map(Flow::trapped);
                }
                return match self.usual_int3(true) {
                    Usual::Passed => Ok(Flow::Trapped),
                    usual => self.on_reported_int3(usual, arch.pc).map(Flow::trapped),
                };
            }
            Ok(exit) => match exit {
                VcpuExit::IoIn(..) | VcpuExit::IoOut(..) => Kind::Port,
                VcpuExit::MmioRead(address, data) => {
                    self.machine.mmio.read(address, data);
                    self.machine.counters.mmio.fetch_add(1, Ordering::Relaxed);
                    Kind::Done
                }
                VcpuExit::MmioWrite(address, data) => {
                    self.machine.mmio.write(address, data);
                    self.machine.counters.mmio.fetch_add(1, Ordering::Relaxed);
                    Kind::Done
                }
                VcpuExit::Debug(arch) => {
                    self.exited = host_tsc();
                    Kind::Debug(arch)
                }
                VcpuExit::InternalError => {
                    self.exited = host_tsc();
                    Kind::InternalError
                }
                VcpuExit::X86Wrmsr(write) => Kind::WriteMsr {
                    index: write.index,
                    value: write.data,
                },
                VcpuExit::Shutdown => Kind::TripleFault,
                VcpuExit::SystemEvent(KVM_SYSTEM_EVENT_RESET, _) => Kind::Reset,
                VcpuExit::SystemEvent(KVM_SYSTEM_EVENT_SHUTDOWN, _) => Kind::PowerOff,
                VcpuExit::Hlt | VcpuExit::Intr | VcpuExit::IrqWindowOpen => Kind::Done,
                other => Kind::Unexpected(format!("{other:x?}")),
            },
            Err(error) => {
                return match error.errno() {
                    libc::EINTR | libc::EAGAIN => Ok(Flow::Interrupted),
                    _ => Err(self.run_failed(error)),
                };
            }
        };
        if self.syscalls_unwatched {
            self.watch_syscalls()?;
        }
        match kind {
            Kind::Done => Ok(Flow::Run),
            Kind::Port => self.port(),
            Kind::Debug(arch) if self.is_beside_step(arch.pc) && !is_step(&arch) => {
                Ok(Flow::Trapped)
            }
            Kind::Debug(arch) => self.on_debug(&arch).map(Flow::trapped),
            Kind::InternalError => match exit::internal_error(self.fd.get_kvm_run()) {
                Ok(failure) => {
                    if self.debug.stepping().is_some()
                        && self.is_beside_step(self.registers.general(&self.fd)?.rip)
                    {
                        return Ok(Flow::Trapped);
                    }
                    self.on_emulation_failure(&failure).map(Flow::trapped)
                }
                Err(suberror) => {
                    let rip = self.fd.get_regs().map(|r| r.rip).unwrap_or_default();
                    Err(RunEnd::Host {
                        message: format!("KVM internal error {suberror} at rip {rip:#x}"),
                    })
                }
            },
            Kind::WriteMsr { index, value } => self.on_write_msr(index, value),
            Kind::TripleFault => {
                let kept = self.machine.profile.triple_fault_keeps_registers;
                let registers = kept.then(|| self.snapshot_registers()).transpose()?;
                Err(RunEnd::TripleFault {
                    vcpu: self.index,
                    registers: registers.map(Box::new),
                })
            }
            Kind::Reset => Err(self.machine.requested_end(Request::Reset(None))),
            Kind::PowerOff => Err(RunEnd::PoweredOff),
            Kind::Unexpected(what) => {
                let rip = self.fd.get_regs().map(|r| r.rip).unwrap_or_default();
                Err(RunEnd::Host {
                    message: format!("unexpected KVM exit at rip {rip:#x}: {what}"),
                })
            }
        }
    }

    /// Checks whether an instruction is being stepped and `address` is another one's.
    ///
    /// The guest is then in a handler for an exception of the step. Its traps there wait until the
    /// step is over, so that steps do not nest.
    fn is_beside_step(&self, address: u64) -> bool {
        self.debug
            .stepping()
            .is_some_and(|stepped| stepped != address)
    }

    fn run_failed(&self, error: kvm_ioctls::Error) -> RunEnd {
        let rip = self.fd.get_regs().map(|r| r.rip).unwrap_or_default();
        RunEnd::Host {
            message: format!("KVM_RUN failed at rip {rip:#x}: {error}"),
        }
    }

    fn port(&mut self) -> Result<Flow, RunEnd> {
        self.machine.counters.port.fetch_add(1, Ordering::Relaxed);
        let run_size = self.machine.run_size;
        let Some(access) = exit::port_access(&mut self.fd, run_size) else {
            return Err(RunEnd::Host {
                message: "KVM described a port access outside its page".into(),
            });
        };
        // `rep outsb` arrives as many accesses to one port.
        for piece in access.data.chunks_mut(access.size) {
            if access.out {
                self.machine.pio.write(u64::from(access.port), piece);
            } else {
                self.machine.pio.read(u64::from(access.port), piece);
            }
        }
        match self.machine.take_request() {
            Some(request) => Err(self.machine.requested_end(request)),
            None => Ok(self.wait_for_console()),
        }
    }

    /// Waits while the console's output has no room, or until this vCPU is to be parked. By this
    /// backpressure a guest prints as fast as its output is read.
    fn wait_for_console(&self) -> Flow {
        let machine = &self.machine;
        match &machine.backlog {
            Some(backlog) if backlog.is_full() => {
                match machine
                    .control
                    .wait_until(self.index, || !backlog.is_full())
                {
                    true => Flow::Run,
                    false => Flow::Interrupted,
                }
            }
            _ => Flow::Run,
        }
    }
}

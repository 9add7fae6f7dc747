//! The interrupt of a virtio device, raised from the device thread.
//!
//! Linux's driver would accept a level. But it reads the reason from the device, clears it there,
//! and checks all its queues. An edge for each reason is therefore enough. If one comes while the
//! handler runs, the local APIC keeps it and makes the handler run again. That saves the guest the
//! exit that would lower the level.

use std::io;
use std::sync::Arc;

use devices::{InterruptLine, Message, MessageInterrupts};
use kvm_bindings::kvm_msi;
use kvm_ioctls::VmFd;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::VirtioError;
use crate::host::HostProfile;
use crate::machine::control::Control;
use crate::machine::shared::IrqPin;
use crate::vm::NameCall;

/// Returns the interrupt input `irq`, by the fastest way that works according to `profile`.
pub(super) fn line(
    vm: &Arc<VmFd>,
    profile: &HostProfile,
    control: &Arc<Control>,
    irq: u32,
) -> Result<Arc<dyn InterruptLine>, VirtioError> {
    let raise: Box<dyn InterruptLine> = if profile.irqfd {
        let event = EventFd::new(EFD_NONBLOCK)?;
        vm.register_irqfd(&event, irq).call("KVM_IRQFD")?;
        Box::new(Event(event))
    } else {
        let vm = vm.clone();
        Box::new(IrqPin { vm, irq })
    };
    Ok(match profile.kernel_mode.is_interpreted() {
        true => Arc::new(Urgent {
            raise,
            control: control.clone(),
        }),
        false => Arc::from(raise),
    })
}

/// Returns the way of message-signalled interrupts to the vCPUs.
pub(super) fn messages(
    vm: &Arc<VmFd>,
    profile: &HostProfile,
    control: &Arc<Control>,
) -> Arc<dyn MessageInterrupts> {
    let is_interpreted = profile.kernel_mode.is_interpreted();
    Arc::new(Messages {
        vm: vm.clone(),
        urgent: is_interpreted.then(|| control.clone()),
    })
}

/// Messages to KVM's local APICs. The call takes no longer than an event, and needs no routes.
struct Messages {
    vm: Arc<VmFd>,
    /// The vCPUs that must leave the guest, as for [`Urgent`].
    urgent: Option<Arc<Control>>,
}

impl MessageInterrupts for Messages {
    fn send(&self, message: Message) -> io::Result<()> {
        let sent = self.vm.signal_msi(kvm_msi {
            address_lo: message.address as u32,
            address_hi: (message.address >> 32) as u32,
            data: message.data,
            ..Default::default()
        });
        sent.map_err(|error| io::Error::from_raw_os_error(error.errno()))?;
        if let Some(control) = &self.urgent {
            control.interrupt_all();
        }
        Ok(())
    }
}

/// An event that KVM turns into a pulse.
struct Event(EventFd);

impl InterruptLine for Event {
    fn pulse(&self) -> io::Result<()> {
        self.0.write(1)
    }
}

/// An interrupt that also makes the vCPUs leave the guest.
///
/// On a host that interprets kernel mode a vCPU checks for interrupts only some hundred
/// microseconds apart. Leaving the guest takes a quarter of that.
struct Urgent {
    raise: Box<dyn InterruptLine>,
    control: Arc<Control>,
}

impl InterruptLine for Urgent {
    fn pulse(&self) -> io::Result<()> {
        self.raise.pulse()?;
        self.control.interrupt_all();
        Ok(())
    }
}

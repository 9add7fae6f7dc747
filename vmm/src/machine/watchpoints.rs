//! Watchpoints: accesses to an address that stop a vCPU, by the debug registers of the CPU.
//!
//! They are the same on all vCPUs, because a task may run on any. A vCPU takes a change over before
//! its next entry into the guest. It is reported after the instruction that has made the access.
//! Accesses of instructions that are emulated for the guest count as well.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use arc_swap::ArcSwap;

use super::Handle;
use crate::host::HostProfile;
use crate::x86_64::watchpoint::{NUMBER, WatchError, Watchpoint};

/// The watchpoints by their registers.
pub(crate) type Registers = [Option<Watchpoint>; NUMBER];

/// The watchpoints of a machine.
#[derive(Default)]
pub(crate) struct Watchpoints {
    set: ArcSwap<Registers>,
    /// Counts changes, for vCPUs that take them over.
    changes: AtomicU64,
    /// Whether there is one.
    any: AtomicBool,
    /// The registers that are breakpoints. Held while registers are given out.
    breakpoints: Mutex<[bool; NUMBER]>,
}

impl Watchpoints {
    /// Checks whether there is one.
    #[inline(always)]
    pub(crate) fn any(&self) -> bool {
        self.any.load(Ordering::Relaxed)
    }

    /// Returns the number of changes until now.
    pub(crate) fn changes(&self) -> u64 {
        self.changes.load(Ordering::Acquire)
    }

    /// Returns the watchpoints.
    pub(crate) fn registers(&self) -> Registers {
        **self.set.load()
    }

    /// Returns the mask of the watchpoints that an access meets.
    pub(crate) fn met(&self, address: u64, length: usize, writes: bool) -> u8 {
        let set = self.set.load();
        let mut met = 0;
        for (register, watchpoint) in set.iter().enumerate() {
            let is_met = watchpoint.is_some_and(|set| set.is_met(address, length, writes));
            met |= u8::from(is_met) << register;
        }
        met
    }

    /// Gives a register to breakpoints, or takes it back.
    pub(crate) fn keep_for_breakpoint(&self, register: usize, kept: bool) {
        let mut breakpoints = self
            .breakpoints
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(place) = breakpoints.get_mut(register) {
            *place = kept;
        }
    }

    /// Sets a watchpoint in a free register of `available`. Returns the register.
    fn add(&self, watchpoint: Watchpoint, available: &[usize]) -> Result<u8, WatchError> {
        let breakpoints = self
            .breakpoints
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let mut set = self.registers();
        let is_free = |set: &Registers, register: usize| {
            set.get(register).is_some_and(Option::is_none)
                && breakpoints.get(register) == Some(&false)
        };
        let register = available
            .iter()
            .find(|register| is_free(&set, **register))
            .ok_or(WatchError::NoneFree {
                available: available.len(),
            })?;
        if let Some(place) = set.get_mut(*register) {
            *place = Some(watchpoint);
        }
        self.publish(set);
        Ok(*register as u8)
    }

    /// Removes the watchpoint in a register.
    fn remove(&self, register: u8) {
        let _changing = self
            .breakpoints
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let mut set = self.registers();
        if let Some(place) = set.get_mut(usize::from(register)) {
            *place = None;
        }
        self.publish(set);
    }

    fn publish(&self, set: Registers) {
        let any = set.iter().any(Option::is_some);
        self.any.store(any, Ordering::Relaxed);
        self.set.store(Arc::new(set));
        self.changes.fetch_add(1, Ordering::Release);
    }
}

/// Returns the registers that watchpoints may use on a host: not that of the machine's own
/// breakpoint.
fn available(profile: &HostProfile) -> &'static [usize] {
    match profile.user_syscall {
        true => &[3, 2, 1, 0],
        false => &[3, 2, 1],
    }
}

impl Handle {
    /// Sets a watchpoint on all vCPUs. Returns its number, which hits carry
    /// ([`TrapKind::Watchpoint`](crate::trap::TrapKind::Watchpoint)).
    ///
    /// A running vCPU takes it over as soon as it has left the guest, a paused one before it goes
    /// on. The guest's own watchpoints have no effect meanwhile.
    ///
    /// # Errors
    /// If this host's KVM reports no accesses, or no register is free.
    pub fn watch(&self, watchpoint: Watchpoint) -> Result<u8, WatchError> {
        let profile = &self.shared.profile;
        if !profile.watch_kernel && !profile.watch_user {
            let who = "the guest";
            return Err(WatchError::Silent { who });
        }
        let watchpoints = &self.shared.watchpoints;
        let register = watchpoints.add(watchpoint, available(profile))?;
        self.shared.control.interrupt_all();
        Ok(register)
    }

    /// Removes the watchpoint with a number that [`Self::watch`] has returned.
    pub fn unwatch(&self, number: u8) {
        self.shared.watchpoints.remove(number);
        self.shared.control.interrupt_all();
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use introspect::Gva;

    use super::*;
    use crate::x86_64::watchpoint::Access;

    #[test]
    fn registers_are_given_out_once() {
        let watchpoints = Watchpoints::default();
        let watch = Watchpoint::new(Gva(0x1000), 8, Access::Write).unwrap();
        watchpoints.keep_for_breakpoint(2, true);
        assert_eq!(watchpoints.add(watch, &[3, 2, 1]), Ok(3));
        assert_eq!(watchpoints.add(watch, &[3, 2, 1]), Ok(1));
        let available = 3;
        assert_eq!(
            watchpoints.add(watch, &[3, 2, 1]),
            Err(WatchError::NoneFree { available })
        );
        assert_eq!(watchpoints.met(0x1000, 1, true), 0b1010);
        watchpoints.remove(3);
        assert_eq!(watchpoints.met(0x1000, 1, true), 0b10);
        assert_eq!(watchpoints.add(watch, &[3, 2, 1]), Ok(3));
    }
}

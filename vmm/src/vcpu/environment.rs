//! The environment of an emulated instruction: guest memory at the vCPU's privilege, segment bases
//! and FPU state.
//!
//! Memory is accessed through the guest's page tables. System registers are copied once, when first
//! needed.

use std::ops::Range;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering};

use introspect::x86_64::paging::{self, AddressSpace, Translation};
use introspect::{Gpa, Gva, PhysicalMemory};
use kvm_bindings::{
    KVM_MP_STATE_HALTED, KVM_VCPUEVENT_VALID_SHADOW, KVM_X86_SHADOW_INT_STI, kvm_mp_state,
    kvm_sregs, kvm_xsave,
};
use kvm_ioctls::VcpuFd;

use super::system::Registers;
use crate::machine::watchpoints::Watchpoints;
use crate::memory::{GuestRam, PAGE_SIZE};
use crate::x86_64::emulate::{
    ControlRegister, Environment, FxState, MemoryFault, Segment, StateError,
};
use crate::x86_64::segments;

const WRITE_PROTECT: u64 = 1 << 16; // CR0.WP
const SMAP: u64 = 1 << 21; // CR4.SMAP
const LA57: u64 = 1 << 12; // CR4.LA57
const ROOT_MASK: u64 = 0x000f_ffff_ffff_f000;
/// The largest access of the emulator, in bytes.
const LONGEST_ACCESS: usize = 512;
/// The index of XSTATE_BV in the XSAVE area (bytes 512..520): the components in use.
const XSTATE_BV: usize = 512 / 4;
const X87_AND_SSE: u32 = 3;

/// The GPA of bytes, and their part of a range. They do not cross a page.
type Part = (Gpa, Range<usize>);

/// One vCPU's memory and state during one instruction.
pub(super) struct VcpuEnvironment<'a> {
    pub(super) fd: &'a mut VcpuFd,
    pub(super) registers: &'a Registers,
    pub(super) ram: &'a GuestRam,
    /// The known privilege, or `None` to take it from CS.
    pub(super) privilege: Option<u8>,
    /// The exact system registers, once fetched.
    pub(super) sregs: Option<kvm_sregs>,
    pub(super) watchpoints: &'a Watchpoints,
    /// The mask of the watchpoints that the instruction has met.
    pub(super) watched: u8,
}

/// Returns the address space that `sregs` select.
pub(crate) fn address_space(sregs: &kvm_sregs) -> AddressSpace {
    AddressSpace {
        root: Gpa(sregs.cr3 & ROOT_MASK),
        levels: if sregs.cr4 & LA57 != 0 { 5 } else { 4 },
    }
}

/// Checks whether the code segment is a program's.
pub(crate) fn in_user_mode(sregs: &kvm_sregs) -> bool {
    u64::from(sregs.cs.selector) & segments::RPL_MASK == 3
}

impl VcpuEnvironment<'_> {
    fn sregs(&mut self) -> Result<&kvm_sregs, StateError> {
        match &mut self.sregs {
            Some(sregs) => Ok(sregs),
            missing => {
                let read = self.registers.system(self.fd);
                let sregs = read.map_err(|e| state("read the system registers", e.source))?;
                Ok(missing.insert(sregs))
            }
        }
    }

    fn translate(&mut self, address: u64, write: bool) -> Result<Gpa, MemoryFault> {
        let fault = MemoryFault { address, write };
        let (ram, privilege) = (self.ram, self.privilege);
        let sregs = self.sregs().map_err(|_| fault)?;
        let translation =
            paging::translate(ram, address_space(sregs), Gva(address)).map_err(|_| fault)?;
        let user = match privilege {
            Some(level) => level == 3,
            None => in_user_mode(sregs),
        };
        if !allowed(&translation, sregs, user, write) {
            return Err(fault);
        }
        Ok(translation.gpa)
    }

    /// Notes the watchpoints that an access meets.
    fn note(&mut self, address: u64, length: usize, write: bool) {
        if self.watchpoints.any() {
            self.watched |= self.watchpoints.met(address, length, write);
        }
    }

    /// Ends the interrupt shadow of STI, if there is one.
    pub(super) fn end_interrupt_shadow(&mut self) -> Result<(), StateError> {
        self.set_interrupt_shadow(0)
    }

    /// Sets the interrupt shadow. That of STI holds interrupts off until the next instruction is
    /// done. With 0 they may come.
    fn set_interrupt_shadow(&mut self, shadow: u8) -> Result<(), StateError> {
        let mut events = self
            .fd
            .get_vcpu_events()
            .map_err(|e| state("read the events", e))?;
        if events.interrupt.shadow == shadow {
            return Ok(());
        }
        events.interrupt.shadow = shadow;
        events.flags |= KVM_VCPUEVENT_VALID_SHADOW;
        self.fd
            .set_vcpu_events(&events)
            .map_err(|e| state("write the events", e))
    }

    /// Returns the parts of a range, one for each page that it touches: two at most.
    fn pages(
        &mut self,
        address: u64,
        length: usize,
        write: bool,
    ) -> Result<[Option<Part>; 2], MemoryFault> {
        if length > LONGEST_ACCESS {
            return Err(MemoryFault { address, write });
        }
        let split = length.min((PAGE_SIZE - address % PAGE_SIZE) as usize);
        let mut parts = [None, None];
        for (part, range) in parts.iter_mut().zip([0..split, split..length]) {
            if !range.is_empty() {
                let at = address.wrapping_add(range.start as u64);
                *part = Some((self.translate(at, write)?, range));
            }
        }
        Ok(parts)
    }
}

/// Checks page rights as the CPU applies them to data (SDM volume 3, 4.6.1).
pub(super) fn allowed(
    translation: &Translation,
    sregs: &kvm_sregs,
    user: bool,
    write: bool,
) -> bool {
    if user {
        return translation.user && (!write || translation.writable);
    }
    let protected = write && !translation.writable && sregs.cr0 & WRITE_PROTECT != 0;
    // The guest's AC flag may allow it. Refusing only sends the instruction to the slower way.
    let smap = translation.user && sregs.cr4 & SMAP != 0;
    !protected && !smap
}

impl Environment for VcpuEnvironment<'_> {
    fn read(&mut self, address: u64, buf: &mut [u8]) -> Result<(), MemoryFault> {
        let fault = MemoryFault {
            address,
            write: false,
        };
        let parts = self.pages(address, buf.len(), false)?;
        for (gpa, part) in parts.into_iter().flatten() {
            let piece = buf.get_mut(part).ok_or(fault)?;
            self.ram.read_physical(gpa, piece).map_err(|_| fault)?;
        }
        self.note(address, buf.len(), false);
        Ok(())
    }

    fn write(&mut self, address: u64, data: &[u8]) -> Result<(), MemoryFault> {
        let fault = MemoryFault {
            address,
            write: true,
        };
        let parts = self.pages(address, data.len(), true)?;
        if parts
            .iter()
            .flatten()
            .any(|(gpa, part)| self.ram.host_address(*gpa, part.len() as u64).is_none())
        {
            return Err(fault);
        }
        for (gpa, part) in parts.into_iter().flatten() {
            let piece = data.get(part).ok_or(fault)?;
            self.ram.write_physical(gpa, piece).map_err(|_| fault)?;
        }
        self.note(address, data.len(), true);
        Ok(())
    }

    fn compare_exchange(
        &mut self,
        address: u64,
        old: &[u8],
        new: &[u8],
    ) -> Result<bool, MemoryFault> {
        let length = old.len();
        if length != new.len() || !address.is_multiple_of(length.max(1) as u64) {
            // A split lock. The host has no instruction for it, and an interpreting KVM does no
            // more either.
            return self.exchange_in_two_steps(address, old, new);
        }
        let fault = MemoryFault {
            address,
            write: true,
        };
        let gpa = self.translate(address, true)?;
        let pointer = self.ram.host_address(gpa, length as u64).ok_or(fault)?;
        let exchanged = exchange(pointer, old, new).ok_or(fault)?;
        self.ram.wrote(pointer, length);
        // The CPU writes the old value back if they differ.
        self.note(address, length, true);
        Ok(exchanged)
    }

    fn segment_base(&mut self, segment: Segment) -> Result<u64, StateError> {
        let sregs = self.sregs()?;
        Ok(match segment {
            Segment::Fs => sregs.fs.base,
            Segment::Gs => sregs.gs.base,
        })
    }

    fn set_segment_base(&mut self, segment: Segment, base: u64) -> Result<(), StateError> {
        let mut sregs = *self.sregs()?;
        match segment {
            Segment::Fs => sregs.fs.base = base,
            Segment::Gs => sregs.gs.base = base,
        }
        self.registers
            .set_system(self.fd, &sregs)
            .map_err(|e| state("write a segment base", e.source))?;
        self.sregs = Some(sregs);
        Ok(())
    }

    fn fx_state(&mut self) -> Result<FxState, StateError> {
        let xsave = self
            .fd
            .get_xsave()
            .map_err(|e| state("read the FPU state", e))?;
        let mut fx = FxState::default();
        for (place, word) in fx.0.chunks_exact_mut(4).zip(&xsave.region) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        Ok(fx)
    }

    fn set_fx_state(&mut self, fx: &FxState) -> Result<(), StateError> {
        let mut xsave: kvm_xsave = self
            .fd
            .get_xsave()
            .map_err(|e| state("read the FPU state", e))?;
        for (word, bytes) in xsave.region.iter_mut().zip(fx.0.chunks_exact(4)) {
            *word = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        }
        xsave.region[XSTATE_BV] |= X87_AND_SSE;
        // SAFETY: the vCPU has no dynamically enabled XSTATE features, because none is ever
        // requested with arch_prctl. KVM therefore reads only the structure's 4096 bytes.
        unsafe { self.fd.set_xsave(&xsave) }.map_err(|e| state("write the FPU state", e))
    }

    fn cpl(&mut self) -> Result<u8, StateError> {
        match self.privilege {
            Some(level) => Ok(level),
            None => Ok((self.sregs()?.cs.selector & 3) as u8),
        }
    }

    fn control_register(&mut self, register: ControlRegister) -> Result<u64, StateError> {
        match register {
            ControlRegister::Cr0 => Ok(self.sregs()?.cr0),
            ControlRegister::Cr4 => Ok(self.sregs()?.cr4),
            ControlRegister::Xcr0 => {
                let xcrs = self.fd.get_xcrs().map_err(|e| state("read XCR0", e))?;
                Ok(xcrs.xcrs[0].value)
            }
        }
    }

    fn inhibit_interrupts(&mut self) -> Result<(), StateError> {
        self.set_interrupt_shadow(KVM_X86_SHADOW_INT_STI as u8)
    }

    fn halt(&mut self) -> Result<(), StateError> {
        self.set_interrupt_shadow(0)?;
        let halted = kvm_mp_state {
            mp_state: KVM_MP_STATE_HALTED,
        };
        self.fd
            .set_mp_state(halted)
            .map_err(|e| state("halt the vCPU", e))
    }
}

fn state(action: &'static str, error: kvm_ioctls::Error) -> StateError {
    StateError {
        action,
        source: std::io::Error::from_raw_os_error(error.errno()),
    }
}

/// Compares and exchanges 1, 2, 4, 8 or 16 bytes atomically at an aligned host address in guest
/// RAM.
fn exchange(pointer: *mut u8, old: &[u8], new: &[u8]) -> Option<bool> {
    macro_rules! exchange_as {
        ($atomic:ty, $int:ty) => {{
            let old = <$int>::from_le_bytes(old.try_into().ok()?);
            let new = <$int>::from_le_bytes(new.try_into().ok()?);
            // SAFETY: the caller checked that the bytes lie in guest RAM, which is mapped as long
            // as the machine lives, and that the address is aligned. RAM regions start
            // page-aligned in the host.
            let place = unsafe { <$atomic>::from_ptr(pointer.cast()) };
            Some(
                place
                    .compare_exchange(old, new, Ordering::SeqCst, Ordering::SeqCst)
                    .is_ok(),
            )
        }};
    }
    match old.len() {
        1 => exchange_as!(AtomicU8, u8),
        2 => exchange_as!(AtomicU16, u16),
        4 => exchange_as!(AtomicU32, u32),
        8 => exchange_as!(AtomicU64, u64),
        16 if std::arch::is_x86_feature_detected!("cmpxchg16b") => {
            let expected = u128::from_le_bytes(old.try_into().ok()?);
            let new = u128::from_le_bytes(new.try_into().ok()?);
            // SAFETY: the CPU has the instruction (checked by the guard). The 16 bytes are aligned
            // and in guest RAM (see above).
            Some(unsafe { exchange_16(pointer.cast(), expected, new) })
        }
        _ => None,
    }
}

/// Executes CMPXCHG16B. Returns whether `place` held `expected` and was replaced.
///
/// # Safety
/// The CPU has the instruction. `place` is aligned to 16 bytes and valid for reads and writes.
unsafe fn exchange_16(place: *mut u128, expected: u128, new: u128) -> bool {
    let done: u8;
    // SAFETY: the caller's promise covers the access. RBX, which the compiler reserves, is
    // restored. (The library's intrinsic needs the whole program to be built for CPUs with this
    // instruction.)
    unsafe {
        core::arch::asm!(
            "xchg {low}, rbx",
            "lock cmpxchg16b [{place}]",
            "sete {done}",
            "mov rbx, {low}",
            low = inout(reg) new as u64 => _,
            place = in(reg) place,
            done = out(reg_byte) done,
            in("rcx") (new >> 64) as u64,
            inout("rax") expected as u64 => _,
            inout("rdx") (expected >> 64) as u64 => _,
            options(nostack),
        );
    }
    done != 0
}

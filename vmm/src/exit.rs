//! Decoding of the shared page after KVM_RUN, for details that `kvm-ioctls` does not expose.

use kvm_bindings::{KVM_EXIT_IO_OUT, KVM_INTERNAL_ERROR_EMULATION, kvm_run};
use kvm_ioctls::VcpuFd;

use crate::x86_64::LONGEST_INSTRUCTION;

/// KVM_INTERNAL_ERROR_EMULATION_FLAG_INSTRUCTION_BYTES
const HAS_BYTES: u64 = 1;

/// An instruction that KVM could not execute.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct EmulationFailure {
    bytes: [u8; LONGEST_INSTRUCTION],
    length: usize,
}

impl EmulationFailure {
    /// Returns the instruction's bytes and maybe some after it. Empty if KVM reported none.
    pub(crate) fn bytes(&self) -> &[u8] {
        self.bytes.get(..self.length).unwrap_or_default()
    }
}

/// Decodes a KVM_EXIT_INTERNAL_ERROR: an emulation failure, or else its suberror.
pub(crate) fn internal_error(run: &kvm_run) -> Result<EmulationFailure, u32> {
    // SAFETY: all members of the union are plain integers, so any bytes are valid. The exit reason
    // is KVM_EXIT_INTERNAL_ERROR, so the kernel filled this member.
    let failure = unsafe { run.__bindgen_anon_1.emulation_failure };
    if failure.suberror != KVM_INTERNAL_ERROR_EMULATION {
        return Err(failure.suberror);
    }
    let mut found = EmulationFailure {
        bytes: [0; LONGEST_INSTRUCTION],
        length: 0,
    };
    if failure.ndata > 0 && failure.flags & HAS_BYTES != 0 {
        // SAFETY: as above. The flag says that these bytes were filled.
        let code = unsafe { failure.__bindgen_anon_1.__bindgen_anon_1 };
        found.bytes = code.insn_bytes;
        found.length = usize::from(code.insn_size).min(LONGEST_INSTRUCTION);
    }
    Ok(found)
}

/// A port access: `count` accesses of `size` bytes each to one port.
pub(crate) struct PortAccess<'a> {
    pub(crate) port: u16,
    pub(crate) out: bool,
    pub(crate) size: usize,
    pub(crate) data: &'a mut [u8],
}

/// Returns the port access of a KVM_EXIT_IO.
pub(crate) fn port_access(fd: &mut VcpuFd, run_size: usize) -> Option<PortAccess<'_>> {
    let run = fd.get_kvm_run();
    // SAFETY: the members are plain integers. The exit reason is KVM_EXIT_IO, so this one is
    // filled.
    let io = unsafe { run.__bindgen_anon_1.io };
    let size = usize::from(io.size);
    let length = size.checked_mul(io.count as usize)?;
    let offset = usize::try_from(io.data_offset).ok()?;
    if size == 0 || offset.checked_add(length)? > run_size {
        return None;
    }
    // SAFETY: offset + length lies within the vCPU's mapping of `run_size` bytes (checked above).
    // The mapping starts at `run` and lives as long as `fd`, which the slice borrows mutably.
    let data = unsafe {
        std::slice::from_raw_parts_mut(std::ptr::from_mut(run).cast::<u8>().add(offset), length)
    };
    Some(PortAccess {
        port: io.port,
        out: u32::from(io.direction) == KVM_EXIT_IO_OUT,
        size,
        data,
    })
}

#[cfg(test)]
mod tests {
    use kvm_bindings::KVM_INTERNAL_ERROR_DELIVERY_EV;

    use super::*;
    use crate::vcpu::recorded::FAILED_INT3;

    #[test]
    fn a_recorded_emulation_failure_gives_its_bytes() {
        let (ndata, flags, insn_size, insn_bytes) = FAILED_INT3;
        let mut run = kvm_run::default();
        // SAFETY: writing one member of a union of integers.
        unsafe {
            let failure = &mut run.__bindgen_anon_1.emulation_failure;
            failure.suberror = KVM_INTERNAL_ERROR_EMULATION;
            failure.ndata = ndata;
            failure.flags = flags;
            let code = &mut failure.__bindgen_anon_1.__bindgen_anon_1;
            code.insn_size = insn_size;
            code.insn_bytes = insn_bytes;
        }
        let failure = internal_error(&run).map(|f| f.bytes().to_vec());
        assert_eq!(failure, Ok(insn_bytes.to_vec()));
    }

    #[test]
    fn another_internal_error_is_told_apart() {
        let mut run = kvm_run::default();
        run.__bindgen_anon_1.emulation_failure.suberror = KVM_INTERNAL_ERROR_DELIVERY_EV;
        assert_eq!(internal_error(&run), Err(KVM_INTERNAL_ERROR_DELIVERY_EV));
    }
}

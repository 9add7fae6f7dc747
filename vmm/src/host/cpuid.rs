//! The CPUID of a vCPU: the host's, with this vCPU's identity and without features that the host
//! cannot support.

use kvm_bindings::{CpuId, kvm_cpuid_entry2};

use crate::host::HostProfile;

const LEAF_FEATURES: u32 = 1;
const LEAF_CACHE: u32 = 4;
const LEAF_EXTENDED_FEATURES: u32 = 7;
const LEAF_TOPOLOGY: u32 = 0xb;
const LEAF_XSAVE: u32 = 0xd;
const LEAF_TOPOLOGY_V2: u32 = 0x1f;
const LEAF_KVM_FEATURES: u32 = 0x4000_0001;
const LEAF_AMD_FEATURES: u32 = 0x8000_0001;
const LEAF_POWER: u32 = 0x8000_0007;

const FEATURES_ECX_TSC_DEADLINE: u32 = 1 << 24;
const FEATURES_ECX_HYPERVISOR: u32 = 1 << 31;
const FEATURES_EDX_HYPER_THREADING: u32 = 1 << 28;
const POWER_EDX_INVARIANT_TSC: u32 = 1 << 8;

/// ASYNC_PF, ASYNC_PF_VMEXIT, ASYNC_PF_INT (include/uapi/asm/kvm_para.h), hidden on every host.
///
/// With these KVM notifies the guest that the host has to fetch a page. The guest sees an exception
/// at the page-fault entry and an interrupt, and switches tasks. A restored guest would be traced
/// doing what it never does by itself.
const ASYNC_PAGE_FAULTS: u32 = 1 << 4 | 1 << 10 | 1 << 14;

/// The bits hidden on a host that interprets kernel mode.
///
/// Most stand for instructions that the interpreter lacks. ERMS and FSRM are slow, because it
/// interprets `rep movsb` a byte at a time.
mod interpreted {
    /// SSE3, PCLMUL, SSSE3, FMA, CX16, SSE4.1, SSE4.2, MOVBE, POPCNT, AES, XSAVE, OSXSAVE, AVX,
    /// F16C.
    pub const FEATURES_ECX: u32 = 1
        | 1 << 1
        | 1 << 9
        | 1 << 12
        | 1 << 13
        | 1 << 19
        | 1 << 20
        | 1 << 22
        | 1 << 23
        | 1 << 25
        | 1 << 26
        | 1 << 27
        | 1 << 28
        | 1 << 29;
    /// FSGSBASE, BMI1, AVX2, SMEP, BMI2, ERMS, INVPCID, RDSEED, ADX, SMAP, CLFLUSHOPT, CLWB,
    /// SHA_NI.
    pub const EXTENDED_EBX: u32 = 1
        | 1 << 3
        | 1 << 5
        | 1 << 7
        | 1 << 8
        | 1 << 9
        | 1 << 10
        | 1 << 18
        | 1 << 19
        | 1 << 20
        | 1 << 23
        | 1 << 24
        | 1 << 29;
    /// UMIP, PKU, VAES, VPCLMULQDQ, RDPID.
    pub const EXTENDED_ECX: u32 = 1 << 2 | 1 << 3 | 1 << 9 | 1 << 10 | 1 << 22;
    /// FSRM.
    pub const EXTENDED_EDX: u32 = 1 << 4;
    /// Features that a guest uses by hypercall (include/uapi/asm/kvm_para.h): PV_UNHALT,
    /// PV_SEND_IPI, PV_SCHED_YIELD, HC_MAP_GPA_RANGE.
    ///
    /// A hypercall from interpreted kernel mode never returns. Linux would send its first IPI so.
    pub const KVM_EAX: u32 = 1 << 7 | 1 << 11 | 1 << 13 | 1 << 16;
    /// ABM (lzcnt, popcnt), SSE4a, XOP, FMA4, TBM.
    pub const AMD_ECX: u32 = 1 << 5 | 1 << 6 | 1 << 11 | 1 << 16 | 1 << 21;
}

/// Returns the host CPU's name, vendor and signature (family, model, stepping), as far as CPUID
/// reports them.
pub(crate) fn host_name() -> String {
    use core::arch::x86_64::__cpuid;
    let text = |registers: &[u32]| {
        let bytes: Vec<u8> = registers.iter().flat_map(|r| r.to_le_bytes()).collect();
        String::from_utf8_lossy(&bytes)
            .trim_matches([' ', '\0'])
            .to_owned()
    };
    let vendor = __cpuid(0);
    let vendor = text(&[vendor.ebx, vendor.edx, vendor.ecx]);
    let signature = __cpuid(1).eax;
    let mut name = Vec::new();
    if __cpuid(0x8000_0000).eax >= 0x8000_0004 {
        for leaf in 0x8000_0002..=0x8000_0004 {
            let part = __cpuid(leaf);
            name.extend([part.eax, part.ebx, part.ecx, part.edx]);
        }
    }
    format!("{} ({vendor} {signature:08x})", text(&name))
}

/// The properties of the machine that the table is for.
#[derive(Debug, Clone, Copy)]
pub struct Shape {
    /// The index and APIC id of the vCPU.
    pub vcpu: u8,
    /// The number of vCPUs.
    pub cpus: u8,
    /// Whether KVM's local APIC has the TSC deadline timer.
    pub tsc_deadline: bool,
}

/// Returns the table for one vCPU, from `supported` (KVM_GET_SUPPORTED_CPUID).
///
/// A host that runs kernel mode natively shows all that KVM supports except asynchronous page
/// faults. An interpreting one also hides features that its interpreter lacks, so that fewer
/// instructions need completing.
pub fn shape(supported: &CpuId, profile: &HostProfile, shape: Shape) -> CpuId {
    let mut table = supported.clone();
    for entry in table.as_mut_slice() {
        identify(entry, shape);
        if entry.function == LEAF_KVM_FEATURES {
            entry.eax &= !ASYNC_PAGE_FAULTS;
        }
        if profile.kernel_mode.is_interpreted() {
            hide(entry);
        }
        if !profile.tsc_settable && entry.function == LEAF_POWER {
            // A restored guest's TSC jumps on such a host. Without this bit Linux uses kvmclock,
            // which continues where it stopped.
            entry.edx &= !POWER_EDX_INVARIANT_TSC;
        }
    }
    table
}

fn identify(entry: &mut kvm_cpuid_entry2, shape: Shape) {
    match entry.function {
        LEAF_FEATURES => {
            entry.ebx =
                entry.ebx & 0x0000_ffff | u32::from(shape.cpus) << 16 | u32::from(shape.vcpu) << 24;
            entry.ecx |= FEATURES_ECX_HYPERVISOR;
            if shape.tsc_deadline {
                entry.ecx |= FEATURES_ECX_TSC_DEADLINE;
            }
            if shape.cpus > 1 {
                entry.edx |= FEATURES_EDX_HYPER_THREADING;
            } else {
                entry.edx &= !FEATURES_EDX_HYPER_THREADING;
            }
        }
        LEAF_CACHE => entry.eax &= 0x0000_3fff, // one core in the package as far as caches go
        LEAF_TOPOLOGY | LEAF_TOPOLOGY_V2 => {
            entry.edx = u32::from(shape.vcpu);
            // One thread a core, all cores in one package.
            let bits = u32::from(shape.cpus).next_power_of_two().trailing_zeros();
            (entry.eax, entry.ebx, entry.ecx) = match entry.index {
                0 => (0, 1, 1 << 8),
                1 => (bits, u32::from(shape.cpus), 2 << 8 | 1),
                other => (0, 0, other),
            };
        }
        _ => {}
    }
}

fn hide(entry: &mut kvm_cpuid_entry2) {
    match (entry.function, entry.index) {
        (LEAF_FEATURES, _) => entry.ecx &= !interpreted::FEATURES_ECX,
        (LEAF_EXTENDED_FEATURES, 0) => {
            entry.ebx &= !interpreted::EXTENDED_EBX;
            entry.ecx &= !interpreted::EXTENDED_ECX;
            entry.edx &= !interpreted::EXTENDED_EDX;
        }
        (LEAF_XSAVE, _) => (entry.eax, entry.ebx, entry.ecx, entry.edx) = (0, 0, 0, 0),
        (LEAF_KVM_FEATURES, _) => entry.eax &= !interpreted::KVM_EAX,
        (LEAF_AMD_FEATURES, _) => entry.ecx &= !interpreted::AMD_ECX,
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::host::KernelMode;

    fn table() -> CpuId {
        let entry = |function, index| kvm_cpuid_entry2 {
            function,
            index,
            eax: !0,
            ebx: !0,
            ecx: !0,
            edx: !0,
            ..Default::default()
        };
        let leaves = [
            (1, 0),
            (7, 0),
            (0xb, 0),
            (0xb, 1),
            (0xd, 0),
            (LEAF_POWER, 0),
            (LEAF_KVM_FEATURES, 0),
        ];
        CpuId::from_entries(&leaves.map(|(function, index)| entry(function, index))).unwrap()
    }

    fn shaped(kernel_mode: KernelMode) -> Vec<kvm_cpuid_entry2> {
        let profile = HostProfile {
            kernel_mode,
            ..HostProfile::hardware_example()
        };
        shape(
            &table(),
            &profile,
            Shape {
                vcpu: 2,
                cpus: 3,
                tsc_deadline: true,
            },
        )
        .as_slice()
        .to_vec()
    }

    #[test]
    fn a_native_host_shows_everything_it_has_but_its_own_paging() {
        let rows = shaped(KernelMode::Native);
        assert_eq!(rows[0].ecx, !0);
        assert_eq!((rows[1].ebx, rows[1].ecx, rows[1].edx), (!0, !0, !0));
        assert_eq!(rows[5].edx, !0);
        assert_eq!(rows[6].eax, !(1 << 4 | 1 << 10 | 1 << 14));
    }

    #[test]
    fn an_interpreting_host_hides_popcnt_cx16_smap_and_xsave() {
        let rows = shaped(KernelMode::Interpreted);
        assert_eq!(rows[0].ecx & (1 << 23 | 1 << 13 | 1 << 26), 0);
        assert_eq!(rows[1].ebx & (1 << 20 | 1 << 9), 0);
        assert_eq!(rows[4].eax, 0);
    }

    #[test]
    fn an_interpreting_host_offers_no_hypercalls_and_keeps_the_clock() {
        let kvm = shaped(KernelMode::Interpreted)[6].eax;
        assert_eq!(kvm & (1 << 7 | 1 << 11 | 1 << 13 | 1 << 16), 0);
        assert_eq!(kvm & (1 | 1 << 3 | 1 << 24), 1 | 1 << 3 | 1 << 24);
    }

    #[test]
    fn a_host_that_cannot_set_the_tsc_does_not_call_it_invariant() {
        let profile = HostProfile {
            tsc_settable: false,
            ..HostProfile::hardware_example()
        };
        let rows = shape(
            &table(),
            &profile,
            Shape {
                vcpu: 0,
                cpus: 1,
                tsc_deadline: true,
            },
        );
        assert_eq!(rows.as_slice()[5].edx, !(1 << 8));
    }

    #[test]
    fn every_vcpu_has_its_own_apic_id() {
        let rows = shaped(KernelMode::Native);
        assert_eq!(rows[0].ebx >> 24, 2);
        assert_eq!(rows[0].ebx >> 16 & 0xff, 3);
        assert_eq!((rows[2].edx, rows[3].edx), (2, 2));
        assert_eq!((rows[3].eax, rows[3].ebx), (2, 3));
    }
}

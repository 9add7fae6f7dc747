//! The host record: the measured behaviour of this host's KVM, on which all of `vmm` bases its
//! decisions.
//!
//! It is measured with a tiny guest. Capability bits are not trusted if the behaviour can be tried:
//! a KVM may advertise software breakpoints and never report one. The record is cached per host
//! kernel and CPU (see [`HostProfile::load_or_probe`]).

pub(crate) mod cpuid;
mod open;
mod probe;

use std::fs;
use std::path::Path;

pub use kvm_ioctls::Kvm;
use serde::{Deserialize, Serialize};

pub use open::{OpenError, open};
pub use probe::ProbeError;

use crate::x86_64::watchpoint::{WatchError, Watchpoint};

/// The format of the cache. Raised when a field is added or its meaning changes, so that old caches
/// are discarded.
const FORMAT: u32 = 7;

/// The way guest kernel mode runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum KernelMode {
    /// On the CPU (VMX, SVM).
    Native,
    /// By KVM's instruction emulator, which lacks some instructions.
    Interpreted,
}

impl KernelMode {
    /// Checks whether host assists are needed.
    pub fn is_interpreted(self) -> bool {
        self == Self::Interpreted
    }
}

/// The host's view of an int3 in the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Int3 {
    /// KVM_EXIT_DEBUG with exception 3.
    DebugExit,
    /// KVM_EXIT_INTERNAL_ERROR, an emulation failure at the int3.
    EmulationFailure,
    /// None: #BP goes to the guest's own handler.
    GuestHandler,
}

/// The effect of a hardware breakpoint on an instruction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Breakpoint {
    /// Reported, and RFLAGS.RF gets past it.
    Works,
    /// Reported, but RFLAGS.RF is ignored. RIP must be moved past the instruction.
    IgnoresResumeFlag,
    /// Never reported.
    Silent,
}

/// The host record. Times are in nanoseconds, each the median of many.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostProfile {
    pub(crate) format: u32,
    /// The host kernel and CPU of the measurement: `uname -r`, `uname -v` and the CPU's model.
    pub host: String,
    /// `vmx` or `svm`, if the CPU shows it to this system.
    pub cpu_flag: Option<String>,
    /// The way guest kernel mode runs.
    pub kernel_mode: KernelMode,
    /// Whether registers are exchanged in the shared page (KVM_CAP_SYNC_REGS), without system
    /// calls.
    pub sync_regs: bool,
    /// The report of an int3 in guest kernel mode.
    pub int3_kernel: Int3,
    /// The report of an int3 in guest user mode.
    pub int3_user: Int3,
    /// The effect of a hardware breakpoint on an instruction in guest kernel mode.
    pub breakpoint_kernel: Breakpoint,
    /// The effect of a hardware breakpoint on an instruction in guest user mode.
    pub breakpoint_user: Breakpoint,
    /// Whether the guest kernel's accesses to watched memory are reported.
    pub watch_kernel: bool,
    /// Whether the accesses of guest user mode to watched memory are reported.
    pub watch_user: bool,
    /// Whether single-step of guest kernel mode works.
    pub step_kernel: bool,
    /// Whether single-step of guest user mode works.
    pub step_user: bool,
    /// Whether SYSCALL from guest user mode arrives in kernel mode.
    pub user_syscall: bool,
    /// Whether a triple fault leaves the registers unchanged. KVM on AMD resets the vCPU first.
    pub triple_fault_keeps_registers: bool,
    /// Whether the guest's TSC can be set, so that a restored guest's clock continues where it
    /// stopped.
    pub tsc_settable: bool,
    /// Whether KVM's local APIC has a TSC deadline timer.
    pub tsc_deadline: bool,
    /// Whether KVM turns a guest's write to device memory into an event (KVM_IOEVENTFD), without an
    /// exit.
    pub ioeventfd: bool,
    /// Whether KVM turns an event into an interrupt (KVM_IRQFD).
    pub irqfd: bool,
    /// Whether KVM logs the pages that a guest writes (KVM_MEM_LOG_DIRTY_PAGES), also once they are
    /// mapped. A guest can then be saved while it runs.
    pub write_log: bool,
    /// The maximum number of vCPUs that KVM recommends for one machine.
    pub recommended_vcpus: usize,
    /// The round trip of one port write from guest kernel mode, in nanoseconds.
    pub exit_kernel_ns: u64,
    /// The round trip of one write to unbacked memory from guest user mode, in nanoseconds.
    pub exit_user_ns: u64,
    /// The round trip of one int3 in guest kernel mode at which nothing is done, in nanoseconds.
    pub trap_kernel_ns: u64,
    /// The same in guest user mode. Where the guest handles a program's int3 itself, that of the
    /// kernel's: the trap is then taken at the guest's own entry.
    pub trap_user_ns: u64,
}

impl HostProfile {
    /// Measures this host with the micro guest's ELF image. Takes some milliseconds.
    ///
    /// # Errors
    /// If no machine can be created or the micro guest does not run at all.
    pub fn probe(kvm: &Kvm, micro_guest: &[u8]) -> Result<Self, ProbeError> {
        probe::measure(kvm, micro_guest)
    }

    /// Returns the record for this host from `cache` (a file), or measures and writes it.
    ///
    /// A cache that cannot be read or written costs only the measurement.
    ///
    /// # Errors
    /// As [`Self::probe`].
    pub fn load_or_probe(
        kvm: &Kvm,
        micro_guest: impl FnOnce() -> Vec<u8>,
        cache: &Path,
    ) -> Result<Self, ProbeError> {
        let host = host_identity();
        let cached = fs::read(cache)
            .ok()
            .and_then(|text| serde_json::from_slice::<Self>(&text).ok());
        if let Some(profile) = cached
            && profile.format == FORMAT
            && profile.host == host
        {
            return Ok(profile);
        }
        let profile = Self::probe(kvm, &micro_guest())?;
        if let Err(error) = profile.store(cache) {
            log::warn!("host profile not cached in {}: {error}", cache.display());
        }
        Ok(profile)
    }

    /// Checks whether this host reports accesses in the half of the address space of a watchpoint.
    ///
    /// # Errors
    /// If it does not.
    pub fn check_watchpoint(&self, watchpoint: &Watchpoint) -> Result<(), WatchError> {
        let (is_reported, who) = match watchpoint.address().0 >> 63 {
            0 => (self.watch_user, "programs"),
            _ => (self.watch_kernel, "the kernel"),
        };
        match is_reported {
            true => Ok(()),
            false => Err(WatchError::Silent { who }),
        }
    }

    fn store(&self, cache: &Path) -> std::io::Result<()> {
        if let Some(folder) = cache.parent() {
            fs::create_dir_all(folder)?;
        }
        // Written to another file and renamed, so that a reader never sees half of it.
        let new = cache.with_extension(format!("{}.new", std::process::id()));
        fs::write(&new, serde_json::to_vec_pretty(self)?)?;
        fs::rename(&new, cache)
    }

    /// Returns a record of kvm_intel for unit tests of decisions, with the shape of the default
    /// path.
    ///
    /// Recorded with Linux 6.1.192 on Bochs 3.0, an emulated CPU. Its times are not a real one's.
    /// Those of traps were not recorded: they are that of an exit.
    pub fn hardware_example() -> Self {
        Self {
            format: FORMAT,
            host: "6.1.192 Intel(R) Core(TM) i7-4770 CPU @ 3.40GHz (GenuineIntel 000306c3)".into(),
            cpu_flag: Some("vmx".into()),
            kernel_mode: KernelMode::Native,
            sync_regs: true,
            int3_kernel: Int3::DebugExit,
            int3_user: Int3::DebugExit,
            breakpoint_kernel: Breakpoint::Works,
            breakpoint_user: Breakpoint::Works,
            watch_kernel: true,
            watch_user: true,
            step_kernel: true,
            step_user: true,
            user_syscall: true,
            triple_fault_keeps_registers: true,
            tsc_settable: true,
            tsc_deadline: true,
            ioeventfd: true,
            irqfd: true,
            write_log: true,
            recommended_vcpus: 1,
            exit_kernel_ns: 7_055,
            exit_user_ns: 12_255,
            trap_kernel_ns: 7_055,
            trap_user_ns: 7_055,
        }
    }

    /// Returns a record of kvm_amd for the same use. Recorded with Linux 6.1.192 on QEMU 7.2's TCG.
    pub fn svm_example() -> Self {
        Self {
            host: "6.1.0-56-cloud-amd64 QEMU TCG CPU version 2.5+ (AuthenticAMD 00060fb1)".into(),
            cpu_flag: Some("svm".into()),
            triple_fault_keeps_registers: false,
            exit_kernel_ns: 37_816,
            exit_user_ns: 47_291,
            trap_kernel_ns: 40_610,
            trap_user_ns: 42_373,
            ..Self::hardware_example()
        }
    }

    /// Returns a record of an interpreting KVM for the same use. Recorded with Linux 6.18.44.
    pub fn interpreted_example() -> Self {
        Self {
            host: "6.18.44 AMD EPYC (AuthenticAMD 00b00f21)".into(),
            cpu_flag: None,
            kernel_mode: KernelMode::Interpreted,
            int3_kernel: Int3::EmulationFailure,
            int3_user: Int3::GuestHandler,
            breakpoint_kernel: Breakpoint::IgnoresResumeFlag,
            breakpoint_user: Breakpoint::Silent,
            watch_kernel: false,
            watch_user: false,
            step_user: false,
            user_syscall: false,
            tsc_settable: false,
            recommended_vcpus: 2,
            exit_kernel_ns: 9_794,
            exit_user_ns: 28_993,
            trap_kernel_ns: 8_423,
            trap_user_ns: 8_423,
            ..Self::hardware_example()
        }
    }
}

/// Returns `uname -r -v` and the CPU's name. A record is valid as long as these do not change. It
/// is cheap, because every start calls it.
fn host_identity() -> String {
    let read = |path: &str| {
        fs::read_to_string(path)
            .unwrap_or_default()
            .trim()
            .to_owned()
    };
    let (release, version) = (
        read("/proc/sys/kernel/osrelease"),
        read("/proc/sys/kernel/version"),
    );
    format!("{release} {version} {}", crate::host::cpuid::host_name())
}

/// Returns `vmx` or `svm` if the CPU shows the flag.
fn cpu_flag() -> Option<String> {
    let text = fs::read_to_string("/proc/cpuinfo").ok()?;
    let flags = text.lines().find(|l| l.starts_with("flags"))?;
    flags
        .split_whitespace()
        .find(|f| matches!(*f, "vmx" | "svm"))
        .map(str::to_owned)
}

/// Returns KVM for a unit test. `None` only if `EXOTRACE_NO_KVM=1` says that there is none.
#[cfg(test)]
pub(crate) fn test_kvm() -> Option<Kvm> {
    match open(Path::new("/dev/kvm")) {
        Ok(kvm) => Some(kvm),
        Err(error) if std::env::var_os("EXOTRACE_NO_KVM").is_some_and(|v| v == "1") => {
            eprintln!("EXOTRACE_NO_KVM=1: NOT RUN: {error}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_cached_record_reads_back_and_another_format_does_not_count() {
        let folder = tempfile::tempdir().unwrap();
        let cache = folder.path().join("deep/host.json");
        let profile = HostProfile::interpreted_example();
        profile.store(&cache).unwrap();
        let back: HostProfile = serde_json::from_slice(&fs::read(&cache).unwrap()).unwrap();
        assert_eq!(back, profile);
        serde_json::from_str::<HostProfile>("{\"format\":1}").unwrap_err();
    }
}

//! Shared by the whole-system tests and benchmarks: the host's record, machines, captured consoles.
#![forbid(unsafe_code)]

use std::path::PathBuf;

use vmm::host::Kvm;
use vmm::host::{HostProfile, ProbeError};

/// The host's record, from the same cache that the command uses.
///
/// # Errors
/// If the host cannot be measured.
pub fn host_profile(kvm: &Kvm) -> Result<HostProfile, ProbeError> {
    HostProfile::load_or_probe(kvm, &guest::micro::elf(), &cache().join("host.json"))
}

/// `$XDG_CACHE_HOME/exotrace`, or its default.
fn cache() -> PathBuf {
    let base = std::env::var_os("XDG_CACHE_HOME")
        .map(PathBuf::from)
        .or_else(|| {
            let home = std::env::var_os("HOME")?;
            Some(PathBuf::from(home).join(".cache"))
        });
    base.unwrap_or_else(std::env::temp_dir).join("exotrace")
}

//! The host under test.

use std::path::Path;
use std::sync::OnceLock;

use guest::Cache;
use vmm::host::{HostProfile, Kvm, ProbeError};

/// KVM and its host record.
pub struct Host {
    /// The KVM device.
    pub kvm: Kvm,
    /// The host record.
    pub profile: HostProfile,
}

/// Returns the host, opened once. `None` only if `EXOTRACE_NO_KVM=1` says that there is no KVM.
///
/// # Panics
/// If KVM is not usable, or cannot be measured.
pub fn host() -> Option<&'static Host> {
    static HOST: OnceLock<Option<Host>> = OnceLock::new();
    let host = HOST.get_or_init(|| match vmm::host::open(Path::new("/dev/kvm")) {
        Ok(kvm) => {
            let profile = profile(&kvm).unwrap_or_else(|e| panic!("host profile: {e}"));
            Some(Host { kvm, profile })
        }
        Err(error) if std::env::var_os("EXOTRACE_NO_KVM").is_some_and(|v| v == "1") => {
            eprintln!("EXOTRACE_NO_KVM=1: NOT RUN, this host has no usable KVM: {error}");
            None
        }
        Err(error) => panic!(
            "{error}\n(to test without KVM: EXOTRACE_NO_KVM=1, which leaves these tests out)"
        ),
    });
    host.as_ref()
}

/// Returns the host record, from the same cache that the command uses.
fn profile(kvm: &Kvm) -> Result<HostProfile, ProbeError> {
    match Cache::open() {
        Ok(cache) => {
            HostProfile::load_or_probe(kvm, guest::micro::elf, &cache.root().join("host.json"))
        }
        Err(_) => HostProfile::probe(kvm, &guest::micro::elf()),
    }
}

/// Returns the cache that everything is kept in.
///
/// # Panics
/// If there is none.
pub fn cache() -> Cache {
    Cache::open().unwrap_or_else(|e| panic!("{e}"))
}

//! The host under test.

use std::sync::OnceLock;

pub use exotrace::Host;
use exotrace::HostError;
use guest::Cache;

/// Returns the host, opened once. `None` only if `EXOTRACE_NO_KVM=1` says that there is no KVM.
///
/// # Panics
/// If KVM is not usable, or cannot be measured.
pub fn host() -> Option<&'static Host> {
    static HOST: OnceLock<Option<Host>> = OnceLock::new();
    let host = HOST.get_or_init(|| match Host::open() {
        Ok(host) => Some(host),
        Err(HostError::Probe(error)) => panic!("host profile: {error}"),
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

/// Returns the cache that everything is kept in.
///
/// # Panics
/// If there is none.
pub fn cache() -> Cache {
    Cache::open().unwrap_or_else(|e| panic!("{e}"))
}

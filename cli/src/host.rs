//! This host's KVM and its host record, for all commands that run machines.

use std::fmt;
use std::path::{Path, PathBuf};

use guest::Cache;
use vmm::host::{HostProfile, Kvm, OpenError, ProbeError};

/// The device.
pub const KVM: &str = "/dev/kvm";

/// An open KVM and its host record.
pub struct Host {
    /// The device.
    pub kvm: Kvm,
    /// The host record.
    pub profile: HostProfile,
}

impl fmt::Debug for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Host")
            .field("profile", &self.profile)
            .finish_non_exhaustive()
    }
}

/// The host's KVM cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum HostError {
    /// The device.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// Its measurement.
    #[error(transparent)]
    Probe(#[from] ProbeError),
}

/// Where the record is kept, if there is a cache.
fn record_file() -> Option<PathBuf> {
    match Cache::open() {
        Ok(cache) => Some(cache.root().join("host.json")),
        Err(error) => {
            log::info!("the host is measured anew each time: {error}");
            None
        }
    }
}

/// Opens the device.
///
/// # Errors
/// If it is not usable.
pub fn device() -> Result<Kvm, HostError> {
    Ok(vmm::host::open(Path::new(KVM))?)
}

impl Host {
    /// Opens KVM and takes its record from the cache, or measures it.
    ///
    /// # Errors
    /// If KVM is not usable.
    pub fn open() -> Result<Self, HostError> {
        Self::of(device()?)
    }

    /// Returns what [`Self::open`] does, for an open device.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn of(kvm: Kvm) -> Result<Self, HostError> {
        let profile = match record_file() {
            Some(file) => HostProfile::load_or_probe(&kvm, guest::micro::elf, &file)?,
            None => HostProfile::probe(&kvm, &guest::micro::elf())?,
        };
        Ok(Self { kvm, profile })
    }

    /// Opens KVM and measures its record anew.
    ///
    /// # Errors
    /// If KVM is not usable.
    pub fn open_fresh() -> Result<Self, HostError> {
        if let Some(file) = record_file()
            && let Err(error) = std::fs::remove_file(&file)
            && error.kind() != std::io::ErrorKind::NotFound
        {
            log::warn!("{}: {error}", file.display());
        }
        Self::open()
    }
}

//! Opening `/dev/kvm`, with advice if that fails.

use std::path::{Path, PathBuf};

use kvm_ioctls::{Cap, Kvm};

/// The version of the KVM API since Linux 2.6.22.
const API_VERSION: i32 = 12;

/// The capabilities without which no machine runs. Each has been in Linux for ten years.
const REQUIRED: [(Cap, &str); 6] = [
    (Cap::Irqchip, "KVM_CAP_IRQCHIP"),
    (Cap::UserMemory, "KVM_CAP_USER_MEMORY"),
    (Cap::SetTssAddr, "KVM_CAP_SET_TSS_ADDR"),
    (Cap::ExtCpuid, "KVM_CAP_EXT_CPUID"),
    (Cap::MpState, "KVM_CAP_MP_STATE"),
    (Cap::ImmediateExit, "KVM_CAP_IMMEDIATE_EXIT"),
];

/// The reason that `/dev/kvm` is not usable.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// There is no such device.
    #[error(
        "{path}: not there; load KVM (modprobe kvm_intel or kvm_amd), turn virtualisation on in the firmware, or give the container --device {path}"
    )]
    Missing {
        /// The path of the device.
        path: PathBuf,
    },
    /// The user may not open it.
    #[error(
        "{path}: no permission; add yourself to its group (sudo usermod -aG kvm $USER, then log in again), or run as root"
    )]
    Permission {
        /// The path of the device.
        path: PathBuf,
    },
    /// The device cannot be opened for another reason.
    #[error("{path}: cannot be opened ({source})")]
    Open {
        /// The path of the device.
        path: PathBuf,
        /// The kernel's error.
        source: std::io::Error,
    },
    /// The file is not a KVM device.
    #[error(
        "{path}: KVM API version {found}, version {API_VERSION} is needed; is this a KVM device?"
    )]
    Version {
        /// The path of the device.
        path: PathBuf,
        /// The reported API version. -1 if it is no KVM device at all.
        found: i32,
    },
    /// The device lacks a capability that every machine needs.
    #[error("{path}: lacks {missing}; a Linux of 4.13 or newer is needed")]
    Capability {
        /// The path of the device.
        path: PathBuf,
        /// The name of the capability.
        missing: &'static str,
    },
}

/// Opens the KVM device at `path` (normally `/dev/kvm`) and checks that it is one.
///
/// # Errors
/// Each says what to do about it.
pub fn open(path: &Path) -> Result<Kvm, OpenError> {
    let own = || path.to_path_buf();
    let name = std::ffi::CString::new(path.as_os_str().as_encoded_bytes())
        .map_err(|_| OpenError::Missing { path: own() })?;
    let kvm = Kvm::new_with_path(&name).map_err(|e| match e.errno() {
        libc::ENOENT | libc::ENXIO | libc::ENODEV => OpenError::Missing { path: own() },
        libc::EACCES | libc::EPERM => OpenError::Permission { path: own() },
        other => OpenError::Open {
            path: own(),
            source: std::io::Error::from_raw_os_error(other),
        },
    })?;
    let found = kvm.get_api_version();
    if found != API_VERSION {
        return Err(OpenError::Version { path: own(), found });
    }
    for (capability, missing) in REQUIRED {
        if !kvm.check_extension(capability) {
            return Err(OpenError::Capability {
                path: own(),
                missing,
            });
        }
    }
    Ok(kvm)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn what_is_not_kvm_is_told_with_its_remedy() {
        let missing = open(Path::new("/nonexistent/kvm")).unwrap_err().to_string();
        assert!(missing.contains("modprobe"), "{missing}");
        let other = open(Path::new("/dev/null")).unwrap_err();
        assert!(
            matches!(other, OpenError::Version { found: -1, .. }),
            "{other}"
        );
    }
}

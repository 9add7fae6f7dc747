//! The rule for the host files that a restored machine gets as its disks.
//!
//! A snapshot names files by path, and says whether the guest may write to them. The author of the
//! snapshot chose those paths, and the guest reads the files. A file is therefore opened only if it
//! lies in the snapshot's folder, or if the restorer has named it.

use std::path::Path;

use crate::machine::virtio::{DiskConfig, SavedDevice};

/// The restorer's choice of disks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RestoredDisks {
    /// These files, in the order of the saved disks. If there are none, all must lie in the
    /// snapshot's folder.
    Named(Vec<DiskConfig>),
    /// The files that the snapshot names, wherever they are.
    AsSaved,
}

/// The reason that a snapshot's disks are not used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DiskRefusal {
    /// A disk lies outside the snapshot's folder.
    #[error(
        "it names a disk outside its folder, {disk}; a snapshot must be trusted like a program: name its disks again \
         ({options}), or use those that it names (--disks-as-saved)"
    )]
    Outside {
        /// The disk's file, and the guest's access to it.
        disk: String,
        /// The options that name all disks.
        options: String,
    },
    /// Too many disks are named, or too few.
    #[error("{named} of its {saved} disks are named; name each in the saved order: {options}")]
    Count {
        /// The number of named disks.
        named: usize,
        /// The number of saved disks.
        saved: usize,
        /// The options that name all disks.
        options: String,
    },
    /// The guest has the disk as a writable one.
    #[error("disk {path}: named read-only, but saved as writable; name it without `ro`")]
    ReadOnly {
        /// The named file.
        path: String,
    },
}

/// Puts the permitted files of the disks into `devices` and returns them.
///
/// # Errors
/// If a file may not be opened, or the number of named disks differs. Nothing is changed then.
pub(super) fn permit(
    devices: &mut [SavedDevice],
    folder: &Path,
    asked: &RestoredDisks,
) -> Result<Vec<DiskConfig>, DiskRefusal> {
    let saved: Vec<DiskConfig> = devices
        .iter()
        .filter_map(|device| device.disk())
        .cloned()
        .collect();
    let permitted = match asked {
        RestoredDisks::AsSaved => saved,
        RestoredDisks::Named(named) if named.is_empty() => {
            if let Some(outside) = saved.iter().find(|disk| !is_inside(&disk.path, folder)) {
                return Err(DiskRefusal::Outside {
                    disk: outside.to_string(),
                    options: options(&saved),
                });
            }
            saved
        }
        RestoredDisks::Named(named) => renamed(&saved, named)?,
    };
    let disks = devices.iter_mut().filter_map(SavedDevice::disk_mut);
    for (disk, permitted) in disks.zip(&permitted) {
        disk.clone_from(permitted);
    }
    Ok(permitted)
}

fn renamed(saved: &[DiskConfig], named: &[DiskConfig]) -> Result<Vec<DiskConfig>, DiskRefusal> {
    if named.len() != saved.len() {
        return Err(DiskRefusal::Count {
            named: named.len(),
            saved: saved.len(),
            options: options(saved),
        });
    }
    let pairs = saved.iter().zip(named);
    pairs
        .map(|(saved, named)| match named.read_only && !saved.read_only {
            true => Err(DiskRefusal::ReadOnly {
                path: named.path.display().to_string(),
            }),
            false => Ok(DiskConfig {
                path: named
                    .path
                    .canonicalize()
                    .unwrap_or_else(|_| named.path.clone()),
                read_only: saved.read_only,
            }),
        })
        .collect()
}

/// Checks whether a file lies in `folder`, with all links followed.
fn is_inside(path: &Path, folder: &Path) -> bool {
    match (path.canonicalize(), folder.canonicalize()) {
        (Ok(path), Ok(folder)) => path.starts_with(folder),
        _ => false,
    }
}

fn options(disks: &[DiskConfig]) -> String {
    let option = |disk: &DiskConfig| {
        let read_only = if disk.read_only { ",ro" } else { "" };
        format!("--disk {}{read_only}", disk.path.display())
    };
    disks.iter().map(option).collect::<Vec<_>>().join(" ")
}

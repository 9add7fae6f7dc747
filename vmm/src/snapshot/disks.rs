//! The rule for the host files that a restored machine gets as its disks.
//!
//! A snapshot names files by path, and says whether the guest may write to them. The author of the
//! snapshot chose those paths, and the guest reads the files. A file is therefore opened only if it
//! lies in the snapshot's folder, or if the restorer has named it.
//!
//! The overlay of a disk is in the folder. Each restored machine gets a copy of its own.

use std::path::Path;

use devices::virtio::blk::Overlay;

use super::overlay_file;
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

/// Puts the permitted files of the disks into `devices` and returns them. Each overlay gets its
/// file in `folder`.
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
        // A kept overlay continues with the machine that was saved.
        .map(|disk| DiskConfig {
            overlay: disk.has_overlay().then_some(Overlay::Temporary),
            ..disk
        })
        .collect();
    let permitted = match asked {
        RestoredDisks::AsSaved => saved,
        RestoredDisks::Named(named) if named.is_empty() => {
            let is_outside = |disk: &&DiskConfig| {
                let mut files = [Some(&disk.path), disk.backing.as_ref()]
                    .into_iter()
                    .flatten();
                files.any(|file| !is_inside(file, folder))
            };
            if let Some(outside) = saved.iter().find(is_outside) {
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
    let mut overlays = 0..;
    for (disk, permitted) in disks.zip(&permitted) {
        let has_overlay = disk.has_overlay();
        disk.clone_from(permitted);
        if has_overlay {
            disk.saved_overlay = overlays
                .next()
                .map(|index| folder.join(overlay_file(index)));
        }
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
                read_only: saved.read_only,
                format: named.format.or(saved.format),
                // A saved overlay is of no use without one.
                overlay: named.overlay.clone().or_else(|| saved.overlay.clone()),
                ..named.whole()
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
        let mut option = format!("--disk {}", disk.path.display());
        if let Some(backing) = &disk.backing {
            option += &format!(",backing={}", backing.display());
        }
        if disk.read_only {
            option += ",ro";
        } else if disk.overlay.is_some() {
            option += ",overlay";
        }
        option
    };
    disks.iter().map(option).collect::<Vec<_>>().join(" ")
}

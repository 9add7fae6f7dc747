//! Images of virtual disks: what is on them, and what they boot.
//!
//! [`Image::open`] reads the partition table and the file systems of an image, and finds the
//! entries that its boot loader would show. [`Image::load`] reads the kernel and the initramfs of
//! one, as a firmware and a boot loader would. Nothing is written, and nothing of the image is
//! executed.
//!
//! An image is hostile. Every size, count and depth that it states has a limit. A budget bounds the
//! bytes that are read to find something. Nothing that it contains makes this crate panic.
//!
//! * [`ReadAt`]: the bytes of an image, whatever its format.
//! * [`Partition`], [`Volume`]: the parts of the disk, and the file systems in them.
//! * [`Entry`], [`BootFiles`]: what can be booted, and its bytes.
//! * [`StoredVolumes`]: files of a running system, by their inodes.
#![forbid(unsafe_code)]
#![cfg_attr(
    not(test),
    deny(
        clippy::indexing_slicing,
        clippy::expect_used,
        clippy::panic,
        clippy::unreachable
    )
)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod boot;
mod bytes;
mod disk;
mod entries;
mod file;
mod fs;
mod grub;
mod place;
mod stored;
mod table;
#[cfg(test)]
mod test_images;
mod version;
mod volume;

pub use boot::{BootError, BootFiles, Chosen, Image, Limits, OpenError};
pub use disk::ReadAt;
pub use entries::{Entry, Origin};
pub use file::File;
pub use fs::{FsError, StoredInode};
pub use place::Place;
pub use stored::StoredVolumes;
pub use table::{Partition, TableKind};
pub use volume::{Kind, Volume};

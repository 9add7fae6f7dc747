//! Disk images: the root, the boot disk of the VT-x host, the job and its results.
//!
//! All are made without mounting anything and without privileges.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::process::Command;

use guest::build::{CommandError, command};
use guest::{Cache, CacheError, Progress, failed, short};
use sha2::{Digest, Sha256};

use crate::tree::{Tree, TreeError};

/// The size of a cylinder of 16 heads with 63 sectors: Bochs accepts disks of whole cylinders.
const CYLINDER: u64 = 16 * 63 * 512;
/// The room for results in bytes. The file is sparse.
const RESULTS: u64 = 512 << 20;
/// The number of cylinders of the boot disk, 32 MiB.
const BOOT_CYLINDERS: u64 = 65;
/// The first sector of the boot disk's partition.
const BOOT_START: u64 = 63;
/// The number of trees whose images are kept.
const KEPT: usize = 4;

/// A disk image could not be made or read.
#[derive(Debug, thiserror::Error)]
pub enum DiskError {
    /// The contents of the root cannot be collected.
    #[error(transparent)]
    Tree(#[from] TreeError),
    /// A file operation failed.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// A program that makes the image failed: mke2fs, mformat, syslinux, tar.
    #[error(transparent)]
    Command(#[from] CommandError),
}

/// Links the root disk with `tree` to the file `to`; the image is made if the cache has none of
/// this tree.
///
/// # Errors
/// If it cannot be made.
pub fn root(
    tree: &Tree,
    cache: &Cache,
    to: &Path,
    progress: &dyn Progress,
) -> Result<(), DiskError> {
    const TOPIC: &str = "host-root";
    // Held until the image has its second name, because others remove old images.
    let lock = cache.lock(TOPIC, progress)?;
    let name = format!("{TOPIC}-{}", tree.key()?);
    let entry = match cache.entry(&name) {
        Some(entry) => entry,
        None => {
            progress.phase("making the host's root disk");
            remove_old(cache, TOPIC)?;
            let log = cache.root().join("host-root.log");
            let _ = fs::remove_file(&log);
            let scratch = cache.scratch(TOPIC, &lock)?;
            let place = scratch.path().join("tree");
            tree.write(&place, &log)?;
            let out = scratch.path().join("out");
            fs::create_dir(&out).map_err(failed("make the directory", &out))?;
            ext4(&place, &out.join("root.img"), &log)?;
            cache.publish(&out, &name)?
        }
    };
    fs::hard_link(entry.join("root.img"), to).map_err(failed("link", to))?;
    Ok(())
}

/// Removes all but the newest images.
fn remove_old(cache: &Cache, topic: &str) -> Result<(), CacheError> {
    let images = cache.entries(&format!("{topic}-"))?;
    let most = images.len().saturating_sub(KEPT - 1);
    for path in images.into_iter().take(most) {
        fs::remove_dir_all(&path).map_err(failed("remove", &path))?;
    }
    Ok(())
}

/// Makes a file system with the files of a folder.
fn ext4(folder: &Path, image: &Path, log: &Path) -> Result<(), DiskError> {
    let used = command::output("du", Command::new("du").arg("-sk").arg(folder), log)?;
    let kib: u64 = used
        .split_whitespace()
        .next()
        .and_then(|n| n.parse().ok())
        .unwrap_or(1 << 20);
    // Room for inodes and tables beside the files.
    let size = (kib * 1024 * 11 / 10 + (32 << 20)).next_multiple_of(CYLINDER);
    sized(image, size)?;
    let mut mke2fs = Command::new("mke2fs");
    mke2fs
        .args([
            "-q",
            "-F",
            "-t",
            "ext4",
            "-O",
            "^has_journal",
            "-b",
            "4096",
            "-m",
            "0",
            "-d",
        ])
        .arg(folder)
        .arg(image);
    command::run("mke2fs", &mut mke2fs, log, |_| {})?;
    Ok(())
}

/// Makes a sparse file, empty but for its size.
fn sized(path: &Path, size: u64) -> Result<File, CacheError> {
    let mut options = OpenOptions::new();
    let file = options
        .create(true)
        .truncate(true)
        .read(true)
        .write(true)
        .open(path);
    let file = file.map_err(failed("make", path))?;
    file.set_len(size).map_err(failed("size", path))?;
    Ok(file)
}

/// Returns a disk that boots `kernel` with the command line `words` by a BIOS: one FAT16 partition
/// with syslinux.
///
/// # Errors
/// If a program that makes it fails.
pub fn boot(
    kernel: &Path,
    words: &str,
    cache: &Cache,
    progress: &dyn Progress,
) -> Result<PathBuf, DiskError> {
    const TOPIC: &str = "host-boot";
    let mut hash = Sha256::new();
    hash.update(kernel.as_os_str().as_encoded_bytes());
    hash.update([0]);
    hash.update(words);
    let name = format!("{TOPIC}-{}", short(hash));
    let lock = cache.lock(TOPIC, progress)?;
    if let Some(entry) = cache.entry(&name) {
        return Ok(entry.join("boot.img"));
    }
    progress.phase("making the host's boot disk");
    let log = cache.root().join("host-boot.log");
    let scratch = cache.scratch(TOPIC, &lock)?;
    let out = scratch.path().join("out");
    fs::create_dir(&out).map_err(failed("make the directory", &out))?;
    let partition = scratch.path().join("partition.img");
    let sectors = BOOT_CYLINDERS * 16 * 63;
    sized(&partition, (sectors - BOOT_START) * 512)?;
    let configuration = scratch.path().join("syslinux.cfg");
    let text =
        format!("DEFAULT l\nPROMPT 0\nTIMEOUT 0\nLABEL l\n KERNEL bzImage\n APPEND {words}\n");
    fs::write(&configuration, text).map_err(failed("write", &configuration))?;
    let mut mformat = Command::new("mformat");
    mformat
        .arg("-i")
        .arg(&partition)
        .args(["-h", "16", "-s", "63"]);
    mformat.args([
        "-T",
        &(sectors - BOOT_START).to_string(),
        "-H",
        &BOOT_START.to_string(),
        "::",
    ]);
    command::run("mformat", &mut mformat, &log, |_| {})?;
    let mut syslinux = Command::new("syslinux");
    command::run(
        "syslinux",
        syslinux.arg("--install").arg(&partition),
        &log,
        |_| {},
    )?;
    for (file, to) in [(kernel, "::bzImage"), (&configuration, "::syslinux.cfg")] {
        let mut mcopy = Command::new("mcopy");
        mcopy.arg("-i").arg(&partition).arg(file).arg(to);
        command::run("mcopy", &mut mcopy, &log, |_| {})?;
    }
    let image = out.join("boot.img");
    write_boot(&image, &partition, sectors).map_err(failed("write", &image))?;
    Ok(cache.publish(&out, &name)?.join("boot.img"))
}

/// Writes syslinux's boot record, the table of one partition, and the partition.
fn write_boot(image: &Path, partition: &Path, sectors: u64) -> io::Result<()> {
    const RECORD: &str = "/usr/lib/syslinux/mbr/mbr.bin";
    /// The offset of the partition table.
    const TABLE: usize = 446;
    let mut sector = fs::read(RECORD)?;
    sector.resize(TABLE, 0);
    // Active, FAT16; cylinders are not used, sectors are.
    sector.extend([0x80, 1, 1, 0, 6, 15, 0xff, 0xff]);
    for number in [BOOT_START, sectors - BOOT_START] {
        sector.extend(u32::try_from(number).unwrap_or_default().to_le_bytes());
    }
    sector.resize(510, 0);
    sector.extend([0x55, 0xaa]);
    let mut file = File::create(image)?;
    file.write_all(&sector)?;
    file.seek(SeekFrom::Start(BOOT_START * 512))?;
    io::copy(&mut File::open(partition)?, &mut file)?;
    file.set_len(sectors * 512)
}

/// Packs the folder `from` as the job disk `to`.
///
/// # Errors
/// If tar fails.
pub fn job(from: &Path, to: &Path, log: &Path) -> Result<(), DiskError> {
    let mut tar = Command::new("tar");
    tar.arg("-C").arg(from).arg("-chf").arg(to).arg(".");
    command::run("tar", &mut tar, log, |_| {})?;
    let size = fs::metadata(to).map_err(failed("read", to))?.len();
    let file = OpenOptions::new()
        .write(true)
        .open(to)
        .map_err(failed("open", to))?;
    file.set_len(size.next_multiple_of(CYLINDER))
        .map_err(failed("size", to))?;
    Ok(())
}

/// Makes the disk for the results.
///
/// # Errors
/// If it cannot be made.
pub fn results(path: &Path) -> Result<(), DiskError> {
    sized(path, RESULTS.next_multiple_of(CYLINDER))?;
    Ok(())
}

/// Unpacks the results into `to`, which is made. Returns whether there are any.
///
/// # Errors
/// If tar fails though there are some.
pub fn unpack_results(path: &Path, to: &Path, log: &Path) -> Result<bool, DiskError> {
    let mut first = [0];
    let mut file = File::open(path).map_err(failed("open", path))?;
    io::Read::read(&mut file, &mut first).map_err(failed("read", path))?;
    if first == [0] {
        return Ok(false);
    }
    fs::create_dir_all(to).map_err(failed("make the directory", to))?;
    let mut tar = Command::new("tar");
    tar.arg("-C")
        .arg(to)
        .args(["--no-same-owner", "-xf"])
        .arg(path);
    command::run("tar", &mut tar, log, |_| {})?;
    Ok(true)
}

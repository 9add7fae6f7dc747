//! `exotrace guest`: puts a guest's kernel and initramfs into a folder, for `run` and for tests.

use std::fs;
use std::io::Write;
use std::path::Path;

use ::guest::{Cache, Terminal, debian, initramfs, kernel, micro};

use crate::args::{Guest, GuestKind};
use crate::report::{Failure, ToOutput};

/// Makes or finds the guest and prints the names of its files.
///
/// # Errors
/// If it cannot be made, or the folder cannot be written.
pub fn guest_files(args: &Guest) -> Result<(), Failure> {
    let progress = Terminal::new();
    let cache = Cache::open()?;
    let folder = &args.folder;
    create(folder)?;
    let kernel = match args.kind {
        GuestKind::Micro => {
            return show(write(&folder.join("micro.elf"), &micro::elf())?);
        }
        GuestKind::Small => kernel::small(&cache, &progress)?.vmlinux(),
        GuestKind::Rich => kernel::rich(&cache, &progress)?.vmlinux(),
        GuestKind::Cloud => debian::cloud_kernel(&cache, None, &progress)?.image,
    };
    let name = kernel.file_name().unwrap_or_default();
    let copy = folder.join(name);
    fs::copy(&kernel, &copy).map_err(|e| Failure::new(format_args!("{}: {e}", copy.display())))?;
    let archive = initramfs::full(&cache, &[], &progress)?;
    show(&copy)?;
    show(write(&folder.join("initramfs"), &archive)?)
}

fn create(folder: &Path) -> Result<(), Failure> {
    fs::create_dir_all(folder).map_err(|e| Failure::new(format_args!("{}: {e}", folder.display())))
}

fn write<'a>(file: &'a Path, content: &[u8]) -> Result<&'a Path, Failure> {
    fs::write(file, content).map_err(|e| Failure::new(format_args!("{}: {e}", file.display())))?;
    Ok(file)
}

fn show(file: &Path) -> Result<(), Failure> {
    writeln!(std::io::stdout(), "{}", file.display()).to_output()
}

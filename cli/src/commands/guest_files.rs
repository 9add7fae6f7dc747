//! `exotrace guest`: puts a guest's kernel and initramfs into a folder, for `run` and for tests.

use std::fs;
use std::io::Write;
use std::path::Path;

use ::guest::build::debian::{self, Flavour};
use ::guest::build::{initramfs, kernel};
use ::guest::{Cache, Terminal, micro};

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
    if args.suite.is_some() && args.kind != GuestKind::Cloud {
        return Err(Failure::new(
            "--suite is about Debian's kernels: exotrace guest cloud FOLDER --suite NAME",
        ));
    }
    let mut name = None;
    let kernel = match args.kind {
        GuestKind::Micro => {
            create(folder)?;
            return show(write(&folder.join("micro.elf"), &micro::elf())?);
        }
        GuestKind::Small => kernel::small(&cache, &progress)?.vmlinux(),
        GuestKind::Rich => kernel::rich(&cache, &progress)?.vmlinux(),
        GuestKind::Pc => kernel::pc(&cache, &progress)?.vmlinux(),
        GuestKind::Cloud => {
            let found = match &args.suite {
                Some(suite) => debian::suite_kernel(&cache, suite, Flavour::Cloud, &progress)?,
                None => debian::cloud_kernel(&cache, None, &progress)?,
            };
            // some packages call it vmlinuz alone
            name = Some(format!("vmlinuz-{}", found.release).into());
            found.image
        }
    };
    create(folder)?;
    let name = name.or_else(|| Some(kernel.file_name()?.to_owned()));
    let copy = folder.join(name.unwrap_or_default());
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

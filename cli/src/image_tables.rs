//! A kernel's symbols, types and panic finder from its image, and the cache that keeps them decoded
//! between runs.
//!
//! The cache is a folder with a file for each kernel, named by the image's hash. A file appears
//! whole and is never changed. Without a usable cache everything is decoded anew, which only costs
//! time.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use guest::Cache;
use introspect::kernel::btf::Btf;
use introspect::kernel::cached::DecodedKernel;
use introspect::kernel::image::KernelImage;
use introspect::kernel::panic::PanicFinder;
use introspect::kernel::shared_bytes::SharedBytes;
use introspect::kernel::symbols::Symbols;
use vmm::snapshot::KernelReference;

/// The name of the folder in the cache.
const FOLDER: &str = "kernel-tables";
/// The number of kernels kept, by last use. Each takes some megabytes.
const MOST_KERNELS: usize = 8;
/// The smallest cached image: smaller ones are decoded faster than a file is found.
const LEAST_IMAGE: u64 = 1 << 20;

/// The decoded tables of a kernel's image.
pub struct ImageTables {
    /// The symbols at their link addresses, or the reason for their absence.
    pub symbols: Result<Symbols, String>,
    /// The types, or the reason for their absence.
    pub types: Result<Btf, String>,
    /// The finder of its panic; `None` if the kernel is not Linux.
    pub panic_finder: Option<PanicFinder>,
}

impl ImageTables {
    /// Returns the tables of `image`, from the cache if they are there.
    pub fn of(image: &KernelImage, reference: &KernelReference) -> Self {
        if reference.size < LEAST_IMAGE {
            return Self::decode(image);
        }
        match Cache::open() {
            Ok(cache) => Self::through(&cache.root().join(FOLDER), image, reference),
            Err(error) => {
                log::info!("kernels are decoded anew each time: {error}");
                Self::decode(image)
            }
        }
    }

    /// Returns the tables of a kernel whose image is not at hand; `None` if the cache does not have
    /// them.
    pub fn kept(reference: &KernelReference) -> Option<Self> {
        let folder = Cache::open().ok()?.root().join(FOLDER);
        Self::kept_in(&folder, reference)
    }

    fn kept_in(folder: &Path, reference: &KernelReference) -> Option<Self> {
        let key = reference.hash.to_string();
        let kept = read(&folder.join(&key), key.as_bytes()).ok()?;
        Some(Self {
            symbols: Ok(kept.symbols),
            // Why a kernel has no types is known from its image alone.
            types: Ok(kept.btf?),
            panic_finder: kept.panic_finder,
        })
    }

    fn decode(image: &KernelImage) -> Self {
        let symbols = image.symbols().map_err(|error| error.to_string());
        let named = symbols.as_ref().ok();
        let panic_cpu = named.and_then(|symbols| symbols.address_of(PanicFinder::symbol()));
        Self {
            panic_finder: PanicFinder::of_image(image, panic_cpu),
            symbols,
            types: image.btf().map_err(|error| error.to_string()),
        }
    }

    fn through(folder: &Path, image: &KernelImage, reference: &KernelReference) -> Self {
        let key = reference.hash.to_string();
        let file = folder.join(&key);
        match read(&file, key.as_bytes()) {
            Ok(kept) => {
                return Self {
                    symbols: Ok(kept.symbols),
                    // The reason for missing types is not cached: the image yields it at once.
                    types: kept.btf.map_or_else(
                        || image.btf().map_err(|error| error.to_string()),
                        Ok::<_, String>,
                    ),
                    panic_finder: kept.panic_finder,
                };
            }
            Err(why) => log::info!("{}: {why}; the kernel is decoded", file.display()),
        }
        let decoded = Self::decode(image);
        if let Ok(symbols) = &decoded.symbols {
            let kernel = DecodedKernel {
                symbols: symbols.clone(),
                btf: decoded.types.clone().ok(),
                banner: None,
                panic_finder: decoded.panic_finder.clone(),
            };
            if let Err(error) = write(&file, &kernel.to_bytes(key.as_bytes())) {
                log::warn!("{}: {error}", file.display());
            }
        }
        decoded
    }
}

fn read(file: &Path, key: &[u8]) -> Result<DecodedKernel, String> {
    let bytes = fs::read(file).map_err(|error| error.to_string())?;
    // Marked as used for `forget_old`. A failure only means an earlier removal.
    let _ = fs::File::open(file).and_then(|open| open.set_modified(SystemTime::now()));
    DecodedKernel::from_bytes(key, SharedBytes::new(bytes)).map_err(|error| error.to_string())
}

/// Writes beside the file and renames, so that a reader never sees half of it.
fn write(file: &Path, bytes: &[u8]) -> io::Result<()> {
    if let Some(folder) = file.parent() {
        fs::create_dir_all(folder)?;
        forget_old(folder, MOST_KERNELS - 1)?;
    }
    let new = file.with_extension(format!("{}.new", std::process::id()));
    fs::write(&new, bytes)?;
    fs::rename(&new, file)
}

/// Removes all files but the `keep` that were used last. Another process may be doing the same.
fn forget_old(folder: &Path, keep: usize) -> io::Result<()> {
    let entries = fs::read_dir(folder)?.flatten();
    let mut files: Vec<(SystemTime, PathBuf)> = entries
        .filter_map(|entry| Some((entry.metadata().ok()?.modified().ok()?, entry.path())))
        .collect();
    files.sort_unstable();
    let many = files.len().saturating_sub(keep);
    for (_, old) in files.iter().take(many) {
        match fs::remove_file(old) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::time::Duration;

    use vmm::snapshot::KernelHash;

    use super::*;

    /// Types of none: the header of linux/btf.h, and one empty string.
    const EMPTY_BTF: [u8; 25] = [
        0x9f, 0xeb, 1, 0, 24, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0,
    ];

    fn micro() -> (KernelImage, KernelReference) {
        let elf = guest::micro::elf();
        let reference = KernelReference::new(Path::new("micro"), &elf);
        (KernelImage::parse(elf).unwrap(), reference)
    }

    fn names(tables: &ImageTables) -> Vec<(String, u64)> {
        let symbols = tables.symbols.as_ref().unwrap();
        symbols
            .iter()
            .map(|s| (s.name.to_owned(), s.address))
            .collect()
    }

    #[test]
    fn what_is_kept_is_what_was_decoded_and_damage_is_decoded_again() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path().join("new");
        let (image, reference) = micro();
        let first = ImageTables::through(&folder, &image, &reference);
        let file = fs::read_dir(&folder).unwrap().next().unwrap();
        let file = file.unwrap().path();
        let kept = fs::read(&file).unwrap();
        let second = ImageTables::through(&folder, &image, &reference);
        assert!(names(&first).len() > 3);
        assert_eq!(names(&first), names(&second));
        assert_eq!(first.types.as_ref().err(), second.types.as_ref().err());
        for damaged in [&kept[..kept.len() / 2], b"", &[0; 4000]] {
            fs::write(&file, damaged).unwrap();
            let again = ImageTables::through(&folder, &image, &reference);
            assert_eq!(names(&again), names(&first));
            assert_eq!(
                fs::read(&file).unwrap(),
                kept,
                "written anew after {damaged:?}"
            );
        }
        // The file of another kernel under this one's name.
        let other = KernelReference {
            hash: KernelHash([7; 32]),
            ..reference.clone()
        };
        ImageTables::through(&folder, &image, &other);
        let entries = fs::read_dir(&folder).unwrap().flatten();
        let theirs = entries.map(|e| e.path()).find(|path| *path != file);
        fs::copy(theirs.unwrap(), &file).unwrap();
        let again = ImageTables::through(&folder, &image, &reference);
        assert_eq!(names(&again), names(&first));
        assert_eq!(fs::read(&file).unwrap(), kept);
    }

    #[test]
    fn a_kernel_whose_types_are_kept_needs_no_image() {
        let folder = tempfile::tempdir().unwrap();
        let (image, reference) = micro();
        assert!(ImageTables::kept_in(folder.path(), &reference).is_none());
        ImageTables::through(folder.path(), &image, &reference);
        // The micro guest has no types: its image says why.
        assert!(ImageTables::kept_in(folder.path(), &reference).is_none());
        let kernel = DecodedKernel {
            symbols: image.symbols().unwrap(),
            btf: Some(Btf::parse(&EMPTY_BTF).unwrap()),
            banner: None,
            panic_finder: None,
        };
        let key = reference.hash.to_string();
        let bytes = kernel.to_bytes(key.as_bytes());
        write(&folder.path().join(&key), &bytes).unwrap();
        let kept = ImageTables::kept_in(folder.path(), &reference).unwrap();
        assert_eq!(names(&kept), names(&ImageTables::decode(&image)));
    }

    #[test]
    fn a_cache_that_cannot_be_written_costs_only_time() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        fs::write(&file, "in the way").unwrap();
        let (image, reference) = micro();
        let tables = ImageTables::through(&file, &image, &reference);
        assert!(names(&tables).len() > 3);
        assert_eq!(fs::read(&file).unwrap(), b"in the way");
    }

    #[test]
    fn kernels_used_long_ago_are_forgotten() {
        let folder = tempfile::tempdir().unwrap();
        let (image, reference) = micro();
        let of = |number| {
            let reference = KernelReference {
                hash: KernelHash([number; 32]),
                ..reference.clone()
            };
            ImageTables::through(folder.path(), &image, &reference)
        };
        let file = |number| folder.path().join(KernelHash([number; 32]).to_string());
        let long_ago = SystemTime::now() - Duration::from_secs(86400);
        for number in 0..8 {
            of(number);
            let open = fs::File::open(file(number)).unwrap();
            open.set_modified(long_ago + Duration::from_secs(number.into()))
                .unwrap();
        }
        of(0);
        of(8);
        let kept: Vec<bool> = (0..9).map(|number| file(number).exists()).collect();
        assert_eq!(
            kept,
            [true, false, true, true, true, true, true, true, true]
        );
    }
}

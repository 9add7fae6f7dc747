//! The small kernel: its file, its image, and where both are.

use std::path::PathBuf;
use std::sync::OnceLock;

use guest::Terminal;
use introspect::kernel::image::KernelImage;
use vmm::boot::KernelFile;
use vmm::snapshot::KernelReference;

use crate::host::cache;

/// A kernel, read.
pub struct Kernel {
    /// Where it is.
    pub path: PathBuf,
    /// To boot it.
    pub file: KernelFile,
    /// To find things in it.
    pub image: KernelImage,
    /// To name it in a snapshot.
    pub reference: KernelReference,
}

impl Kernel {
    /// The small kernel; built first if it is not in the cache, which takes minutes.
    ///
    /// # Panics
    /// If it cannot be built or read.
    pub fn small() -> &'static Self {
        static SMALL: OnceLock<Kernel> = OnceLock::new();
        SMALL.get_or_init(|| {
            let built = guest::kernel::small(&cache(), &Terminal::new());
            Self::open(
                built
                    .unwrap_or_else(|e| panic!("the small kernel: {e}"))
                    .vmlinux(),
            )
        })
    }

    /// The kernel in a file.
    ///
    /// # Panics
    /// If it is none.
    pub fn open(path: PathBuf) -> Self {
        let file = KernelFile::open(&path).unwrap_or_else(|e| panic!("{e}"));
        let image = KernelImage::parse(file.shared_elf());
        let image = image.unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let reference = KernelReference::new(&path, file.elf());
        Self {
            path,
            file,
            image,
            reference,
        }
    }
}

//! The kernels of the tests: their files, their images, and where both are.
//!
//! Where `EXOTRACE_TEST_KERNEL` names a kernel's file, that is the kernel of all tests, with its modules in the folder `modules`
//! beside it: so kernels of distributions are checked by the tests of our own.

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
        if let Some(given) = Self::given() {
            return given;
        }
        SMALL.get_or_init(|| {
            let built = guest::kernel::small(&cache(), &Terminal::new());
            Self::open(
                built
                    .unwrap_or_else(|e| panic!("the small kernel: {e}"))
                    .vmlinux(),
            )
        })
    }

    /// The rich kernel, with loadable modules, ORC and tracing; built as [`small`](Self::small) is. Where it is kept, its
    /// modules lie in `modules`.
    ///
    /// # Panics
    /// If it cannot be built or read.
    pub fn rich() -> &'static Self {
        static RICH: OnceLock<Kernel> = OnceLock::new();
        if let Some(given) = Self::given() {
            return given;
        }
        RICH.get_or_init(|| {
            let built = guest::kernel::rich(&cache(), &Terminal::new());
            Self::open(
                built
                    .unwrap_or_else(|e| panic!("the rich kernel: {e}"))
                    .vmlinux(),
            )
        })
    }

    /// The kernel that the environment names, if it does.
    ///
    /// # Panics
    /// If it cannot be read.
    pub fn given() -> Option<&'static Self> {
        static GIVEN: OnceLock<Option<Kernel>> = OnceLock::new();
        let given = GIVEN.get_or_init(|| {
            let path = std::env::var_os("EXOTRACE_TEST_KERNEL")?;
            Some(Self::open(path.into()))
        });
        given.as_ref()
    }

    /// A module that was built with the kernel, such as `brd.ko`.
    ///
    /// # Panics
    /// If there is none of that name.
    pub fn module(&self, file: &str) -> Vec<u8> {
        let path = self.path.with_file_name("modules").join(file);
        std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
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

//! The kernels of the tests: their files, their images and their paths.
//!
//! If `EXOTRACE_TEST_KERNEL` names a kernel's file, all tests use that kernel, with its modules in
//! the folder `modules` beside it. So the tests also check kernels of distributions.

use std::path::PathBuf;
use std::sync::OnceLock;

use guest::Terminal;
use introspect::kernel::image::KernelImage;
use vmm::boot::KernelFile;
use vmm::snapshot::KernelReference;

use crate::host::cache;

/// A kernel that was read from its file.
pub struct Kernel {
    /// The path of the kernel.
    pub path: PathBuf,
    /// The image, to find symbols in it.
    pub image: KernelImage,
    /// The reference, to name the kernel in a snapshot.
    pub reference: KernelReference,
}

impl Kernel {
    /// Returns the small kernel. It is built first if it is not in the cache, which takes minutes.
    ///
    /// # Panics
    /// If it cannot be built or read.
    pub fn small() -> &'static Self {
        static SMALL: OnceLock<Kernel> = OnceLock::new();
        if let Some(given) = Self::given() {
            return given;
        }
        SMALL.get_or_init(|| {
            let built = guest::build::kernel::small(&cache(), &Terminal::new());
            Self::open(
                built
                    .unwrap_or_else(|e| panic!("the small kernel: {e}"))
                    .vmlinux(),
            )
        })
    }

    /// Returns the rich kernel, with loadable modules, ORC and tracing; built as
    /// [`small`](Self::small) is. Its modules lie in `modules` beside it.
    ///
    /// # Panics
    /// If it cannot be built or read.
    pub fn rich() -> &'static Self {
        static RICH: OnceLock<Kernel> = OnceLock::new();
        if let Some(given) = Self::given() {
            return given;
        }
        RICH.get_or_init(|| {
            let built = guest::build::kernel::rich(&cache(), &Terminal::new());
            Self::open(
                built
                    .unwrap_or_else(|e| panic!("the rich kernel: {e}"))
                    .vmlinux(),
            )
        })
    }

    /// Returns the small kernel on a PCI bus; built as [`small`](Self::small) is.
    ///
    /// # Panics
    /// If it cannot be built or read.
    pub fn pc() -> &'static Self {
        static PC: OnceLock<Kernel> = OnceLock::new();
        if let Some(given) = Self::given() {
            return given;
        }
        PC.get_or_init(|| {
            let built = guest::build::kernel::pc(&cache(), &Terminal::new());
            Self::open(
                built
                    .unwrap_or_else(|e| panic!("the PC kernel: {e}"))
                    .vmlinux(),
            )
        })
    }

    /// Returns the kernel that the environment names, if it does.
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

    /// Returns a module that was built with the kernel, such as `brd.ko`.
    ///
    /// # Panics
    /// If there is none of that name.
    pub fn module(&self, file: &str) -> Vec<u8> {
        let path = self.path.with_file_name("modules").join(file);
        std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
    }

    /// Reads the kernel in a file.
    ///
    /// # Panics
    /// If the file is no kernel.
    pub fn open(path: PathBuf) -> Self {
        let file = KernelFile::open(&path).unwrap_or_else(|e| panic!("{e}"));
        let image = KernelImage::parse(file.shared_elf());
        let image = image.unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let reference = KernelReference::new(&path, file.elf());
        Self {
            path,
            image,
            reference,
        }
    }
}

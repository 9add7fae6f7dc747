//! The common start of the examples that read a guest's core file: the file, and the kernel found
//! in its memory. The types are those of the kernel's image, because not every kernel has them in
//! memory.

use std::error::Error;

use introspect::PausedMemory;
use introspect::core_file::CoreFile;
use introspect::kernel::btf::Btf;
use introspect::kernel::image::KernelImage;
use introspect::kernel::running::RunningKernel;

pub struct SavedGuest {
    pub core: CoreFile,
    pub kernel: RunningKernel,
    pub types: Btf,
}

impl SavedGuest {
    /// Opens the guest of the program's arguments, `CORE VMLINUX`.
    pub fn of_arguments() -> Result<Self, Box<dyn Error>> {
        let mut arguments = std::env::args();
        let program = arguments.next().unwrap_or_default();
        let (Some(core), Some(vmlinux)) = (arguments.next(), arguments.next()) else {
            return Err(format!("usage: {program} CORE VMLINUX").into());
        };
        let core = CoreFile::parse(std::fs::read(core)?)?;
        let cpu = core.cpus().first().ok_or("the core file has no CPU")?;
        let paused = PausedMemory::new(&core);
        let kernel = RunningKernel::find(paused.view(cpu.address_space()), cpu, 0)?;
        let types = KernelImage::parse(std::fs::read(vmlinux)?)?.btf()?;
        Ok(Self {
            core,
            kernel,
            types,
        })
    }
}

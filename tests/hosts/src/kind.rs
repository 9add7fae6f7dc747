//! The two kinds of host: how each is built, and its command line.

use std::path::{Path, PathBuf};
use std::process::Command;

use clap::ValueEnum;
use guest::build::kernel::{Delivery, Recipe as KernelRecipe};

use crate::emulator::Recipe;

/// The kernel of both hosts. Its KVM has AMD-V and VT-x.
pub const KERNEL: KernelRecipe = KernelRecipe {
    name: "host",
    fragments: &[include_str!("../l1/l1.config")],
    targets: &["bzImage"],
    lines: 2050,
    delivery: Delivery::BzImage,
};

/// The words of the hosts' kernel command line. A panic resets by a triple fault, which ends the
/// emulator. The timer is not checked: that fails if the emulator gets no CPU time for a while.
const WORDS: &str = "console=ttyS0,115200 rootfstype=ext4 ro init=/init mitigations=off quiet loglevel=3 panic=-1 reboot=t no_timer_check";

/// A kind of host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Kind {
    /// AMD-V with nested paging, by QEMU's translator
    Svm,
    /// VT-x with EPT, by Bochs; its clock counts instructions
    Vmx,
}

/// The files of one run.
pub struct Files {
    /// The folder of this run alone.
    pub folder: PathBuf,
    /// The emulator.
    pub emulator: PathBuf,
    /// The host's kernel.
    pub kernel: PathBuf,
    /// The root disk, which is read only.
    pub root: PathBuf,
    /// The boot disk; only for VT-x.
    pub boot: Option<PathBuf>,
    /// The job, a tar.
    pub job: PathBuf,
    /// The disk for the results.
    pub results: PathBuf,
    /// The host's console; a file only for VT-x without a terminal.
    pub console: PathBuf,
}

/// The emulated machine as the user specified it.
#[derive(Debug, Clone)]
pub struct Shape {
    /// The number of the host's virtual CPUs.
    pub cpus: u8,
    /// The memory in MiB.
    pub memory: u32,
    /// The emulator's CPU model.
    pub cpu: Option<String>,
    /// Whether the host's console is this terminal.
    pub interactive: bool,
}

impl Kind {
    /// Returns the name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Svm => "svm",
            Self::Vmx => "vmx",
        }
    }

    /// Returns the recipe of the emulator.
    pub fn recipe(self) -> &'static Recipe {
        match self {
            Self::Svm => &QEMU,
            Self::Vmx => &BOCHS,
        }
    }

    /// Returns the kernel command line of the host.
    pub fn kernel_words(self) -> String {
        match self {
            // On a busy machine Linux measures its TSC's rate wrong when it starts, and right
            // later. KVM keeps the first rate. It then believes that guests want a rate that this
            // CPU cannot provide, and fails to set their TSCs.
            Self::Svm => format!(
                "{WORDS} root=/dev/vda tsc=reliable kvm.tsc_tolerance_ppm=20000 random.trust_cpu=on exo.job=/dev/vdb exo.results=/dev/vdc"
            ),
            Self::Vmx => {
                format!("{WORDS} root=/dev/sdb exo.job=/dev/sdc exo.results=/dev/sdd exo.end=port")
            }
        }
    }

    /// Returns the command that starts the host. It dies with this process.
    pub fn command(self, files: &Files, shape: &Shape) -> Command {
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL", "nice", "-n", "5"]);
        command.arg(&files.emulator).current_dir(&files.folder);
        match self {
            Self::Svm => qemu_arguments(&mut command, files, shape),
            Self::Vmx => {
                command.env("BXSHARE", "/usr/share/bochs");
                command.args(["-q", "-f", "bochsrc"]);
            }
        }
        command
    }
}

const QEMU: Recipe = Recipe {
    name: "qemu",
    suite: "bookworm",
    packages: &[
        "patch",
        "xz-utils",
        "gcc",
        "make",
        "ninja-build",
        "meson",
        "pkg-config",
        "python3",
        "flex",
        "bison",
        "libglib2.0-dev",
        "libpixman-1-dev",
        "libfdt-dev",
        "seabios",
        "qemu-system-data",
    ],
    patches: &[
        (
            "qemu-svm-debug.patch",
            include_str!("../patches/qemu-svm-debug.patch"),
        ),
        (
            "qemu-svm-flags.patch",
            include_str!("../patches/qemu-svm-flags.patch"),
        ),
        (
            "qemu-svm-smp.patch",
            include_str!("../patches/qemu-svm-smp.patch"),
        ),
        (
            "qemu-svm-nrips.patch",
            include_str!("../patches/qemu-svm-nrips.patch"),
        ),
        (
            "qemu-code-race.patch",
            include_str!("../patches/qemu-code-race.patch"),
        ),
        (
            "qemu-insns.patch",
            include_str!("../patches/qemu-insns.patch"),
        ),
    ],
    files: &[(
        "configs/devices/x86_64-softmmu/lean.mak",
        "CONFIG_Q35=y\nCONFIG_VIRTIO_PCI=y\nCONFIG_VIRTIO_BLK=y\n",
    )],
    steps: &[
        &[
            "./configure",
            "--target-list=x86_64-softmmu",
            "--without-default-features",
            "--without-default-devices",
            "--with-devices-x86_64=lean",
            "--enable-tcg",
            "--disable-kvm",
            "--disable-debug-info",
            "--disable-werror",
            "--disable-docs",
            "--disable-tools",
            "--disable-guest-agent",
            "--disable-install-blobs",
            "--disable-plugins",
            "--enable-fdt=system",
            "--disable-capstone",
            "--disable-slirp",
            "--disable-user",
            "--audio-drv-list=",
            "--meson=/usr/bin/meson",
        ],
        &["ninja", "-j{jobs}", "-C", "build", "qemu-system-x86_64"],
    ],
    environment: &[],
    lines: 1650,
    program: "build/qemu-system-x86_64",
    minutes: 5,
};

const BOCHS: Recipe = Recipe {
    name: "bochs",
    // Bookworm's 2.7 has slower VMX.
    suite: "trixie",
    packages: &[
        "patch",
        "xz-utils",
        "gcc",
        "g++",
        "make",
        "bochsbios",
        "vgabios",
        "syslinux",
        "syslinux-common",
        "mtools",
    ],
    patches: &[(
        "bochs-vmx-if.patch",
        include_str!("../patches/bochs-vmx-if.patch"),
    )],
    files: &[],
    steps: &[
        &[
            "./configure",
            "--with-nogui",
            "--enable-cpu-level=6",
            "--enable-x86-64",
            "--enable-smp",
            "--enable-vmx=2",
            "--enable-svm",
            "--enable-avx",
            "--enable-evex",
            "--enable-pci",
            "--enable-all-optimizations",
            "--enable-long-phy-address",
            "--disable-docbook",
        ],
        &["make", "-j{jobs}"],
    ],
    environment: &[
        ("CFLAGS", "-O3 -march=native -pipe -fno-strict-aliasing"),
        ("CXXFLAGS", "-O3 -march=native -pipe -fno-strict-aliasing"),
    ],
    lines: 700,
    program: "bochs",
    minutes: 5,
};

fn qemu_arguments(command: &mut Command, files: &Files, shape: &Shape) {
    command.args(["-L", "/usr/share/seabios", "-L", "/usr/share/qemu"]);
    command.args(["-accel", "tcg,thread=multi,tb-size=512", "-machine", "q35"]);
    command.args(["-cpu", shape.cpu.as_deref().unwrap_or("max")]);
    command.args([
        "-smp",
        &shape.cpus.to_string(),
        "-m",
        &shape.memory.to_string(),
    ]);
    command.args(["-nodefaults", "-display", "none", "-no-reboot"]);
    command.arg("-kernel").arg(&files.kernel);
    command.args(["-append", &Kind::Svm.kernel_words()]);
    // In a terminal Ctrl-C is for the job.
    command.args([
        "-chardev",
        "stdio,id=console,signal=off",
        "-serial",
        "chardev:console",
    ]);
    let _ = shape.interactive;
    for (id, file, read_only) in [
        ("root", &files.root, "on"),
        ("job", &files.job, "on"),
        ("results", &files.results, "off"),
    ] {
        let file = file.display();
        command.arg("-drive");
        command.arg(format!(
            "file={file},if=none,id={id},format=raw,readonly={read_only}"
        ));
        command.args(["-device", &format!("virtio-blk-pci,drive={id}")]);
    }
    command.args([
        "-monitor",
        &format!(
            "unix:{},server,nowait",
            files.folder.join("monitor").display()
        ),
    ]);
}

/// Returns Bochs's configuration for a run.
pub fn bochs_configuration(files: &Files, shape: &Shape) -> String {
    let serial = match shape.interactive {
        true => "mode=term, dev=/dev/tty".to_owned(),
        false => format!("mode=file, dev={}", name(&files.console)),
    };
    let boot = files.boot.as_deref().map(name).unwrap_or_default();
    format!(
        "config_interface: textconfig\n\
         display_library: nogui\n\
         cpu: model={model}, count={cpus}, ips=400000000, reset_on_triple_fault=0, ignore_bad_msrs=1\n\
         memory: guest={memory}, host={memory}\n\
         romimage: file=/usr/share/bochs/BIOS-bochs-latest\n\
         vgaromimage: file=/usr/share/vgabios/vgabios.bin\n\
         vga: extension=vbe, update_freq=1\n\
         pci: enabled=1, chipset=i440fx\n\
         clock: sync=none, time0=1700000000\n\
         ata0: enabled=1, ioaddr1=0x1f0, ioaddr2=0x3f0, irq=14\n\
         ata1: enabled=1, ioaddr1=0x170, ioaddr2=0x370, irq=15\n\
         ata0-master: type=disk, path={boot}, mode=flat, cylinders=65, heads=16, spt=63\n\
         ata0-slave: type=disk, path={root}, mode=flat\n\
         ata1-master: type=disk, path={job}, mode=flat\n\
         ata1-slave: type=disk, path={results}, mode=flat\n\
         boot: disk\n\
         com1: enabled=1, {serial}\n\
         log: bochs.log\n\
         panic: action=fatal\nerror: action=ignore\ninfo: action=ignore\ndebug: action=ignore\n",
        model = shape.cpu.as_deref().unwrap_or("corei7_haswell_4770"),
        cpus = shape.cpus,
        memory = shape.memory,
        root = name(&files.root),
        job = name(&files.job),
        results = name(&files.results),
    )
}

/// Returns the file's name: Bochs runs in the run's folder, and its paths must not contain blanks.
fn name(path: &Path) -> &str {
    path.file_name()
        .and_then(|name| name.to_str())
        .unwrap_or_default()
}

//! The demo's guest: its files, its first boot, and the snapshot that later runs start from.
//!
//! On interpreting hosts it is a small kernel built for this; on hardware KVM it is Debian's
//! unchanged cloud kernel. Both boot into the same tiny initramfs with a shell on the serial port.
//! A snapshot is kept in the cache under a name made of everything it depends on; one that cannot
//! be restored is booted anew.

use std::fmt;
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ::guest::build::{debian, initramfs, kernel};
use ::guest::{Cache, Progress, Terminal};
use vmm::boot::KernelFile;
use vmm::machine::VirtioConfig;
use vmm::snapshot::{FORMAT_VERSION, KernelReference};

use super::serial::Serial;
use crate::embed::StartError;
use crate::host::Host;
use crate::registry::VmName;
use crate::report::{Failure, say};
use crate::signals::StopSignals;
use crate::vm::Vm;

/// The prefix of the cache's entries.
const PREFIX: &str = "demo-snapshot-";
/// The time limit of a boot, interpreted or not. An interpreting host whose CPUs others use too may
/// need minutes.
const BOOT_PATIENCE: Duration = Duration::from_secs(900);
/// The approximate time of a boot, for the progress bar.
const INTERPRETED_BOOT: Duration = Duration::from_secs(20);
const NATIVE_BOOT: Duration = Duration::from_secs(3);
/// The interval of checks of the guest's output.
const LOOK_INTERVAL: Duration = Duration::from_millis(50);

/// The files of the guest.
pub struct Files {
    kernel: KernelReference,
    initramfs: Vec<u8>,
    memory: u64,
    cache: Cache,
}

/// The guest at its shell's prompt.
pub struct Ready {
    /// The running machine.
    pub vm: Arc<Vm>,
    /// The machine's origin.
    pub origin: Origin,
}

/// The origin of a machine.
pub enum Origin {
    /// It was booted in this time, and kept.
    Booted(Duration),
    /// It was restored in this time.
    Restored(Duration),
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Booted(time) => write!(
                f,
                "guest booted in {:.1} s; the next demo starts from here",
                time.as_secs_f64()
            ),
            Self::Restored(time) => write!(
                f,
                "guest restored in {:.1} ms, as an earlier demo booted it",
                time.as_secs_f64() * 1e3
            ),
        }
    }
}

/// Finds the guest's files in the cache, or makes them.
///
/// # Errors
/// If they cannot be made.
pub fn files(host: &Host, progress: &Terminal) -> Result<Files, Failure> {
    let cache = Cache::open()?;
    let interpreted = host.profile.kernel_mode.is_interpreted();
    let (path, memory) = match interpreted {
        true => {
            if cache.newest("kernel-small-").is_none() {
                say(
                    "first time: building a small Linux kernel for the demo, about 4 minutes on two cores",
                );
            }
            (kernel::small(&cache, progress)?.vmlinux(), 64 << 20)
        }
        false => (
            debian::cloud_kernel(&cache, None, progress)?.image,
            512 << 20,
        ),
    };
    let initramfs = initramfs::tiny(&cache, &[], progress)?;
    let kernel = KernelReference::new(&path, KernelFile::open(&path)?.elf());
    Ok(Files {
        kernel,
        initramfs,
        memory,
        cache,
    })
}

impl Files {
    /// Returns the snapshot's name in the cache.
    fn snapshot(&self, host: &Host) -> String {
        let mut hash = DefaultHasher::new();
        (
            FORMAT_VERSION,
            self.memory,
            &host.profile.host,
            kernel::cmdline(),
        )
            .hash(&mut hash);
        (self.kernel.size, self.kernel.hash, &self.initramfs).hash(&mut hash);
        // Symbols are looked for at the path in the snapshot.
        self.kernel.path.hash(&mut hash);
        format!("{PREFIX}{:016x}", hash.finish())
    }
}

/// Returns a machine at its shell's prompt: restored if there is a snapshot, else booted and kept.
///
/// # Errors
/// If it cannot be made, or does not reach its shell.
pub fn start(
    files: Files,
    host: Host,
    name: VmName,
    rebuild: bool,
    signals: &StopSignals,
    progress: &Terminal,
) -> Result<Ready, Failure> {
    let snapshot = files.snapshot(&host);
    let folder = files.cache.root().join(&snapshot);
    if rebuild {
        remove(&folder);
    }
    // Of several first demos one boots the guest and the others wait for it.
    let (held, _lock) = match files.cache.hold(&snapshot)? {
        Some(held) => (Some(held), None),
        None => {
            let lock = files.cache.lock("demo-snapshot", progress)?;
            (files.cache.hold(&snapshot)?, Some(lock))
        }
    };
    let serial = Serial::default();
    let builder = || {
        let builder = Vm::builder().name(name.to_string());
        let builder = builder.profile(host.profile.clone());
        builder.console(serial.clone())
    };
    let started = Instant::now();
    let restored = held.map(|held| builder().restore(held.path()).start());
    let restored = match restored.transpose() {
        Err(StartError::Snapshot(error)) => {
            say(format_args!("{error}; booting the guest anew"));
            remove(&folder);
            None
        }
        restored => restored?,
    };
    let is_new = restored.is_none();
    let vm = match restored {
        Some(vm) => vm,
        None => {
            let builder = builder().kernel(files.kernel.path);
            let builder = builder.initramfs_contents(files.initramfs);
            let builder = builder.command_line(kernel::cmdline());
            // It has no devices that the demo would use.
            let builder = builder.virtio(VirtioConfig::default());
            builder.memory(files.memory).start()?
        }
    };
    vm.stop_on(signals);
    let origin = match is_new {
        false => Origin::Restored(started.elapsed()),
        true => {
            wait_for_shell(&vm, &serial, progress)?;
            let time = started.elapsed();
            keep(&vm, &files.cache, &folder)?;
            Origin::Booted(time)
        }
    };
    Ok(Ready { vm, origin })
}

fn wait_for_shell(vm: &Vm, serial: &Serial, progress: &Terminal) -> Result<(), Failure> {
    let expected = match vm.host.profile.kernel_mode.is_interpreted() {
        true => INTERPRETED_BOOT,
        false => NATIVE_BOOT,
    };
    progress.phase(&format!(
        "booting the guest once, about {} s",
        expected.as_secs()
    ));
    let start = Instant::now();
    while !serial.shell_waits() {
        progress.fraction(start.elapsed().as_secs_f64() / expected.as_secs_f64());
        if let Some(end) = vm.machine.wait(Some(LOOK_INTERVAL)) {
            return Err(match end {
                vmm::RunEnd::Stopped => {
                    Failure::new("stopped while the guest booted; nothing was kept")
                }
                end => Failure::new(format_args!(
                    "the guest did not boot: {end}; it last printed: {}",
                    serial.last_line()
                )),
            });
        }
        if start.elapsed() > BOOT_PATIENCE {
            return Err(Failure::new(format_args!(
                "the guest has not booted in {} s; it last printed: {}",
                BOOT_PATIENCE.as_secs(),
                serial.last_line()
            )));
        }
    }
    Ok(())
}

/// Saves the guest for the next run, in place of older ones that no demo restores now.
fn keep(vm: &Vm, cache: &Cache, folder: &Path) -> Result<(), Failure> {
    if let Err(error) = cache.remove_unused(PREFIX) {
        log::warn!("{error}");
    }
    vm.snapshot(folder)?;
    Ok(())
}

/// Removes a snapshot; machines that were restored from it keep their memory.
fn remove(folder: &Path) {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            log::warn!("{}: {error}", folder.display());
        }
        _ => {}
    }
}

//! A guest with virtio devices, as its user finds them: disks, random numbers, a console. They
//! survive the driver's unbinding and binding, and a save of the guest.
//!
//! The guest's lines start few programs: each costs a third of a second where its kernel is
//! interpreted. What the shell can do itself, it does.

use std::collections::{BTreeSet, VecDeque};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use support::linux::BootOptions;
use support::shell::{COMMAND_LIMIT, full_initramfs};
use support::{Host, Kernel, Linux, SerialLog, Shell, host};
use vmm::machine::{
    ConsoleConfig, ConsolePorts, DiskConfig, EndOfFile, PortBackend, PortConfig, Transport,
    VirtioConfig,
};
use vmm::snapshot::{self, RestoreError, RestoredDisks, RestoredMachine};

/// The size of each disk in bytes.
const DISK: usize = 256 << 10;
/// The place that is written in the middle of a page.
const ODD: usize = 200_001;

/// Two images: one with a pattern in which no two sectors are the same, and an empty one.
struct Images {
    folder: tempfile::TempDir,
    /// The way in which the guest finds its devices.
    transport: Transport,
}

impl Images {
    fn new(transport: Transport) -> Self {
        let images = Self {
            transport,
            folder: tempfile::tempdir().unwrap_or_else(|e| panic!("{e}")),
        };
        let pattern: Vec<u8> = (0..DISK as u32 / 4)
            .flat_map(|word| word.wrapping_mul(0x9e37_79b9).to_le_bytes())
            .collect();
        for (path, bytes) in [(images.full(), pattern), (images.empty(), vec![0; DISK])] {
            fs::write(&path, bytes).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        }
        images
    }

    fn full(&self) -> PathBuf {
        self.folder.path().join("full.img")
    }

    fn empty(&self) -> PathBuf {
        self.folder.path().join("empty.img")
    }

    /// Returns the kernel for a guest with these devices.
    fn kernel(&self) -> &'static Kernel {
        match self.transport {
            Transport::Mmio => Kernel::small(),
            Transport::Pci => Kernel::pc(),
        }
    }

    fn config(&self) -> VirtioConfig {
        VirtioConfig {
            console: Some(ConsoleConfig {
                ports: vec![
                    PortConfig::named("tracectl", EndOfFile::WhenIdle),
                    PortConfig::named("events", EndOfFile::Never),
                ],
                ..ConsoleConfig::default()
            }),
            disks: vec![
                DiskConfig::new(self.full(), true),
                DiskConfig::new(self.empty(), false),
            ],
            rng: true,
            net: None,
            vsock: None,
            transport: self.transport,
        }
    }
}

fn read(path: &Path) -> Vec<u8> {
    fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

fn boot(host: &Host, images: &Images) -> Shell {
    let started = Instant::now();
    let linux = Linux::boot(
        host,
        &BootOptions {
            kernel: images.kernel(),
            initramfs: Some(&full_initramfs()),
            command_line: &guest::build::kernel::cmdline(),
            cpus: 1,
            protocol: None,
            virtio: images.config(),
        },
    );
    let shell = Shell::at_prompt(linux);
    println!("booted in {:?}", started.elapsed());
    shell
}

/// Returns the output of a command that may take a while, and must succeed.
fn tell(shell: &Shell, command: &str) -> String {
    let started = Instant::now();
    let answer = shell.start(command).answer(4 * COMMAND_LIMIT);
    assert_eq!(answer.status, 0, "{command}: {answer:?}");
    println!("{:>8.2?} {command}", started.elapsed());
    answer.output.trim_end().to_owned()
}

#[test]
fn a_guest_uses_its_devices() {
    uses_its_devices(&Images::new(Transport::Mmio));
}

#[test]
fn a_guest_uses_its_devices_on_a_pci_bus() {
    uses_its_devices(&Images::new(Transport::Pci));
}

fn uses_its_devices(images: &Images) {
    let host = host!();
    let shell = boot(host, images);
    disks_are_what_was_asked_for(&shell, images);
    disks_are_read_and_written(&shell, images);
    sectors_are_given_up(&shell, images);
    random_numbers_come(&shell);
    ports_carry_bytes(&shell);
    drivers_go_and_come(&shell, images);
    devices_survive_a_snapshot(host, shell, images);
}

fn disks_are_what_was_asked_for(shell: &Shell, images: &Images) {
    let told = tell(
        shell,
        "cd /sys/block; for d in vda vdb; do cat $d/size $d/ro $d/queue/logical_block_size $d/queue/discard_max_bytes $d/queue/write_cache $d/serial; echo; done; cd /",
    );
    let expected = [
        ["512", "1", "512", "0", "write back", "exotrace-1"],
        ["512", "0", "512", "2147483648", "write back", "exotrace-2"],
    ];
    assert_eq!(told, expected.as_flattened().join("\n"));
    let interrupts = tell(shell, "cat /proc/interrupts");
    // With messages each queue has its own, and each device's configuration.
    let expected = match images.transport {
        Transport::Mmio => ("virtio", 4),
        Transport::Pci => ("-config", 4),
    };
    let (text, count) = expected;
    assert_eq!(interrupts.matches(text).count(), count, "{interrupts}");
}

fn disks_are_read_and_written(shell: &Shell, images: &Images) {
    // To the disk, and not only to the guest's page cache.
    tell(
        shell,
        "dd if=/dev/vda of=/dev/vdb bs=64k conv=fsync 2> /dev/null",
    );
    assert!(
        read(&images.full()) == read(&images.empty()),
        "the copy differs"
    );
    // And back, past the page cache.
    tell(shell, "echo 3 > /proc/sys/vm/drop_caches");
    assert_eq!(tell(shell, "cmp /dev/vda /dev/vdb && echo same"), "same");
    // A part of a page at an odd offset.
    tell(
        shell,
        &format!(
            "printf EXOTRACE | dd of=/dev/vdb bs=1 seek={ODD} conv=notrunc,fsync 2> /dev/null"
        ),
    );
    let written = read(&images.empty());
    assert_eq!(&written[ODD..ODD + 8], b"EXOTRACE");
    assert_eq!(written.len(), DISK);
    // The read-only disk stays as it is.
    let before = read(&images.full());
    let answer = shell.run("dd if=/dev/zero of=/dev/vda bs=512 count=1 conv=fsync");
    assert_ne!(answer.status, 0, "{answer:?}");
    assert!(
        before == read(&images.full()),
        "a read-only disk was written"
    );
}

fn sectors_are_given_up(shell: &Shell, images: &Images) {
    let used = |path: &Path| fs::metadata(path).map(|file| file.blocks()).unwrap_or(0);
    let before = used(&images.empty());
    tell(shell, "busybox blkdiscard -o 65536 -l 131072 /dev/vdb");
    let content = read(&images.empty());
    let given_up = &content[64 << 10..192 << 10];
    assert!(
        given_up.iter().all(|byte| *byte == 0),
        "there is something left"
    );
    let after = used(&images.empty());
    assert!(after + 250 < before, "{after} blocks of {before} are left");
}

fn random_numbers_come(shell: &Shell) {
    assert_eq!(
        tell(shell, "cat /sys/class/misc/hw_random/rng_current"),
        "virtio_rng.0"
    );
    let read = "dd if=/dev/hwrng bs=512 count=1 iflag=fullblock 2> /dev/null | hexdump -v -e '1/1 \"%02x\"'";
    let (first, second) = (tell(shell, read), tell(shell, read));
    assert_eq!((first.len(), second.len()), (1024, 1024));
    assert_ne!(first, second);
    // Nor is one part of them like another.
    assert_ne!(first[..512], first[512..]);
}

/// A backend that keeps its input and returns the output that it is set to.
#[derive(Clone, Default)]
struct Kept(Arc<Mutex<KeptState>>);

#[derive(Default)]
struct KeptState {
    taken: Vec<u8>,
    to_give: VecDeque<u8>,
}

impl Kept {
    fn lock(&self) -> MutexGuard<'_, KeptState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn taken(&self) -> String {
        String::from_utf8_lossy(&self.lock().taken).into_owned()
    }

    fn wait_for(&self, text: &str) {
        let deadline = Instant::now() + COMMAND_LIMIT;
        while !self.taken().contains(text) {
            assert!(
                Instant::now() < deadline,
                "no {text:?} in {:?}",
                self.taken()
            );
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl PortBackend for Kept {
    fn write(&mut self, bytes: &[u8]) -> usize {
        self.lock().taken.extend(bytes);
        bytes.len()
    }

    fn read(&mut self, buffer: &mut [u8]) -> usize {
        let mut state = self.lock();
        let length = buffer.len().min(state.to_give.len());
        for (place, byte) in buffer.iter_mut().zip(state.to_give.drain(..length)) {
            *place = byte;
        }
        length
    }
}

fn attach(ports: &ConsolePorts, name: &str) -> Kept {
    let end = Kept::default();
    let id = ports.find(name).unwrap_or_else(|| panic!("no port {name}"));
    assert!(ports.attach(id, Box::new(end.clone())));
    end
}

fn ports_carry_bytes(shell: &Shell) {
    let ports = shell.linux.machine().console_ports();
    let ports = ports.unwrap_or_else(|| panic!("no console"));
    // A driver learns of its ports by messages, which may come after it is bound. Only a port with
    // a name has the file.
    let told = tell(
        shell,
        "until set -- /sys/class/virtio-ports/*/name; [ $# = 2 ]; do :; done; \
         for f; do read name < $f; echo $name; f=${f%/name}; eval $name=/dev/${f##*/}; done",
    );
    let names: BTreeSet<&str> = told.lines().collect();
    assert_eq!(names, BTreeSet::from(["events", "tracectl"]));
    // The console's output reaches its backend.
    let screen = Kept::default();
    assert!(ports.attach(0, Box::new(screen.clone())));
    tell(shell, "echo on the console > /dev/hvc0");
    screen.wait_for("on the console");
    // Commands go one way, answers the other, and their reader sees an end.
    let end = attach(ports, "tracectl");
    let counts = || {
        let stats = ports.find("tracectl").and_then(|id| ports.stats(id));
        let stats = stats.unwrap_or_else(|| panic!("no counts"));
        assert_eq!(stats.dropped, 0);
        (stats.from_guest, stats.to_guest)
    };
    let before = counts();
    tell(shell, "echo start > $tracectl");
    end.wait_for("start\n");
    end.lock().to_give.extend(b"size 10\nstopped\n");
    ports.wake();
    assert_eq!(tell(shell, "cat $tracectl"), "size 10\nstopped");
    assert_eq!(counts(), (before.0 + 6, before.1 + 16));
}

/// Makes the driver reset the device and set it up anew.
fn drivers_go_and_come(shell: &Shell, images: &Images) {
    let expected = read(&images.full());
    // Twice: a device that was set up anew is reset as well.
    for _ in 0..2 {
        tell(
            shell,
            "cd /sys/bus/virtio/drivers/virtio_blk && for d in virtio*; do echo $d > unbind && echo $d > bind; done; cd /",
        );
        assert_eq!(tell(shell, "echo /dev/vd*"), "/dev/vda /dev/vdb");
    }
    tell(
        shell,
        "dd if=/dev/vda of=/dev/vdb bs=64k conv=fsync 2> /dev/null",
    );
    assert!(read(&images.empty()) == expected);
    tell(
        shell,
        "cd /sys/bus/virtio/drivers/virtio_rng && for d in virtio*; do echo $d > unbind && echo $d > bind; done; cd /",
    );
    random_numbers_come(shell);
    // The console's own driver: its ports are there again, and are connected as they were.
    tell(
        shell,
        "cd /sys/bus/virtio/drivers/virtio_console && for d in virtio*; do echo $d > unbind && echo $d > bind; done; cd /",
    );
    ports_carry_bytes(shell);
}

fn devices_survive_a_snapshot(host: &Host, shell: Shell, images: &Images) {
    let saved = images.folder.path().join("saved");
    // Requests are in progress when the guest is saved: for a second or more on any host.
    const LONG: Duration = Duration::from_secs(1);
    let one = "dd if=/dev/vda of=/dev/vdb bs=4k conv=fsync";
    let started = Instant::now();
    tell(&shell, &format!("{one} 2> /dev/null"));
    let copies = (LONG.as_millis() / started.elapsed().as_millis().max(1)).clamp(2, 300);
    let copy = &format!(
        "for i in $(seq {copies}); do {one} || echo failed; done 2> /dev/null; echo copied=$((1+1))"
    );
    fs::write(images.empty(), vec![0; DISK]).unwrap_or_else(|e| panic!("{e}"));
    let from = shell.linux.serial.len();
    shell.type_line(copy);
    shell.linux.wait("first sectors", from, COMMAND_LIMIT, |_| {
        (read(&images.empty())[..4096] != [0; 4096]).then_some(())
    });
    shell.save(&saved);
    drop(shell);

    let restored = |disks: &RestoredDisks| {
        let output = SerialLog::default().output();
        snapshot::restore(&host.kvm, &host.profile, &saved, disks, output)
    };
    let refused_with = |what: &str, disks: &RestoredDisks| match restored(disks) {
        Ok(_) => panic!("restored with {what}"),
        Err(error) => error.to_string(),
    };
    let refused = |what: &str| refused_with(what, &RestoredDisks::AsSaved);
    let (image, away) = (images.empty(), images.folder.path().join("away"));
    fs::rename(&image, &away).unwrap_or_else(|e| panic!("{e}"));
    let message = refused("no disk");
    assert!(message.contains("empty.img: No such file"), "{message}");
    fs::write(&image, [0; 512]).unwrap_or_else(|e| panic!("{e}"));
    let message = refused("a shorter disk");
    assert!(
        message.contains(&format!("512 bytes, it had {DISK} when")),
        "{message}"
    );
    fs::rename(&away, &image).unwrap_or_else(|e| panic!("{e}"));
    only_named_disks_are_opened(images, &restored, &refused_with);

    // Also where events do not work, and every call is an exit.
    let mut without_events = Host {
        kvm: vmm::host::open(Path::new("/dev/kvm")).unwrap_or_else(|e| panic!("{e}")),
        profile: host.profile.clone(),
    };
    without_events.profile.ioeventfd = false;
    without_events.profile.irqfd = false;
    let last = read(&images.empty());
    for host in [host, &without_events] {
        fs::write(images.empty(), &last).unwrap_or_else(|e| panic!("{e}"));
        let shell = Shell::restore(host, images.kernel(), &saved);
        goes_on_after_a_restore(&shell, images);
    }
}

/// Checks that only named disks are opened: the files that a snapshot names are chosen by its
/// writer.
fn only_named_disks_are_opened(
    images: &Images,
    restored: &dyn Fn(&RestoredDisks) -> Result<RestoredMachine, RestoreError>,
    refused: &dyn Fn(&str, &RestoredDisks) -> String,
) {
    let (full, empty) = (
        DiskConfig::new(images.full(), true),
        DiskConfig::new(images.empty(), false),
    );
    let options = format!(
        "--disk {},ro --disk {}",
        full.path.display(),
        empty.path.display()
    );
    let message = refused("disks elsewhere", &RestoredDisks::Named(Vec::new()));
    assert!(
        message.contains("outside its folder") && message.contains(&options),
        "{message}"
    );
    let message = refused("one disk", &RestoredDisks::Named(vec![full.clone()]));
    assert!(
        message.contains("1 of its 2 disks are named") && message.contains(&options),
        "{message}"
    );
    let read_only = DiskConfig::new(images.empty(), true);
    let message = refused("ro", &RestoredDisks::Named(vec![full.clone(), read_only]));
    assert!(message.contains("name it without `ro`"), "{message}");
    // A file may have moved; a read-only one stays so.
    let moved = images.folder.path().join("moved");
    fs::rename(images.full(), &moved).unwrap_or_else(|e| panic!("{e}"));
    let named = RestoredDisks::Named(vec![DiskConfig::new(&moved, false), empty.clone()]);
    let machine = restored(&named).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(machine.disks, [DiskConfig::new(&moved, true), empty]);
    drop(machine);
    fs::rename(moved, images.full()).unwrap_or_else(|e| panic!("{e}"));
}

fn goes_on_after_a_restore(shell: &Shell, images: &Images) {
    shell.linux.wait_for("copied=2", 4 * COMMAND_LIMIT);
    assert!(!shell.linux.serial.since(0).contains("failed\r"));
    assert!(
        read(&images.full()) == read(&images.empty()),
        "the copy differs"
    );
    random_numbers_come(shell);
    ports_carry_bytes(shell);
    disks_are_what_was_asked_for(shell, images);
    let stats = shell.linux.machine().stats().virtio;
    for device in &stats {
        assert_eq!(device.lost_interrupts, 0, "{stats:?}");
        let rejected: u64 = device
            .queues
            .iter()
            .map(|queue| queue.rejected + queue.broken)
            .sum();
        assert_eq!(rejected, 0, "{stats:?}");
    }
}

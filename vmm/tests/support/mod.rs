//! Shared support of the tests of whole machines.
//!
//! It has the host's KVM and its record, micro guests with captured output, and waits with a limit.
//! A wait that runs out reports the guest's situation.
//!
//! A host without `/dev/kvm` fails these tests, unless `EXOTRACE_NO_KVM=1` says that none is to be
//! expected.
#![allow(dead_code, reason = "each test binary uses a part of it")]
#![allow(clippy::unwrap_used)]

pub mod bare;
pub mod sink;

use std::io::{self, Write};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use iced_x86::{Decoder, DecoderOptions, Instruction};
use introspect::x86_64::paging::AddressSpace;
use introspect::{Gpa, Gva, PhysicalMemory};
use kvm_ioctls::Kvm;
use object::{Object, ObjectSymbol};
use sink::Recorder;
use vmm::boot::KernelFile;
use vmm::host::HostProfile;
use vmm::machine::Paused;
use vmm::trap::SiteId;
use vmm::{Machine, MachineConfig, RunEnd};

/// The time limit for work of milliseconds on an idle host.
pub const LIMIT: Duration = Duration::from_secs(120);
/// The size of a micro guest's RAM in bytes.
pub const MEMORY: u64 = 4 << 20;
/// The address of RAM that the micro guest maps and does not use.
pub const SPARE: u64 = 0x20_0000;

/// The host under test.
pub struct Host {
    pub kvm: Kvm,
    pub profile: HostProfile,
}

/// Returns KVM and the measured record, made once. `None` only if the environment says that there
/// is no KVM.
pub fn host() -> Option<&'static Host> {
    static HOST: OnceLock<Option<Host>> = OnceLock::new();
    let host = HOST.get_or_init(|| {
        let device = Path::new("/dev/kvm");
        match vmm::host::open(device) {
            Ok(kvm) => {
                let profile = HostProfile::probe(&kvm, &guest::micro::elf());
                Some(Host {
                    kvm,
                    profile: profile.unwrap_or_else(|e| panic!("host profile: {e}")),
                })
            }
            Err(error) if std::env::var_os("EXOTRACE_NO_KVM").is_some_and(|v| v == "1") => {
                eprintln!("EXOTRACE_NO_KVM=1: NOT RUN, this host has no usable KVM: {error}");
                None
            }
            Err(error) => panic!(
                "{error}\n(to build without KVM: EXOTRACE_NO_KVM=1, which leaves these tests out)"
            ),
        }
    });
    host.as_ref()
}

/// Evaluates to the host, or ends the test if none is to be expected.
#[macro_export]
macro_rules! host {
    () => {
        match $crate::support::host() {
            Some(host) => host,
            None => return,
        }
    };
}

/// Captured serial output.
#[derive(Clone, Default)]
pub struct Captured {
    bytes: Arc<Mutex<Vec<u8>>>,
    /// Whether the next newline waits, with the vCPU that wrote it.
    hold: Arc<AtomicBool>,
}

impl Captured {
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.bytes.lock().unwrap()).into_owned()
    }

    pub fn output(&self) -> devices::ConsoleOutput {
        devices::ConsoleOutput::write_through(self.clone())
    }
}

impl Write for Captured {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        self.bytes.lock().unwrap().extend_from_slice(data);
        while data.contains(&b'\n') && self.hold.load(Ordering::SeqCst) {
            std::thread::sleep(Duration::from_micros(200));
        }
        Ok(data.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A machine and its output.
pub struct Guest {
    pub machine: Machine,
    pub serial: Captured,
    pub kernel: KernelFile,
}

/// Returns the micro guest as a kernel.
pub fn micro_kernel() -> KernelFile {
    KernelFile::from_bytes(guest::micro::elf(), Path::new("(micro guest)")).unwrap()
}

/// Returns the default machine of a test: one vCPU, output discarded.
pub fn config<'a>(kernel: &'a KernelFile, command_line: &'a str) -> MachineConfig<'a> {
    MachineConfig {
        memory: MEMORY,
        cpus: 1,
        kernel,
        initramfs: None,
        command_line,
        add_words: false,
        protocol: None,
        pit: false,
        acpi: None,
        virtio: Default::default(),
        serial: devices::ConsoleOutput::null(),
    }
}

/// Creates a paused micro guest on one vCPU.
pub fn micro(host: &Host, command_line: &str) -> Guest {
    micro_on(host, command_line, 1)
}

/// Creates a paused micro guest.
pub fn micro_on(host: &Host, command_line: &str, cpus: u8) -> Guest {
    Guest::boot(host, micro_kernel(), command_line, cpus)
}

/// Creates and starts a micro guest.
pub fn running(host: &Host, command_line: &str) -> Guest {
    let mut guest = micro(host, command_line);
    guest.machine.start();
    guest
}

/// Returns a guest that is paused where it has just printed its first line.
///
/// Its gates and SYSCALL are set up, and its program has not begun.
pub fn paused_before_program(host: &Host, command_line: &str, cpus: u8) -> (Guest, Paused) {
    for _ in 0..20 {
        let mut guest = micro_on(host, command_line, cpus);
        let hold = guest.serial.hold.clone();
        hold.store(true, Ordering::SeqCst);
        guest.machine.start();
        guest.wait_for("\n");
        let paused = std::thread::scope(|scope| {
            scope.spawn(|| {
                // By then the pause below has been requested, nearly always.
                std::thread::sleep(Duration::from_millis(10));
                hold.store(false, Ordering::SeqCst);
            });
            guest.machine.pause()
        });
        let rip = guest.machine.registers(&paused, 0).unwrap().regs.rip;
        if guest.is_in("micro_print", rip) {
            return (guest, paused);
        }
    }
    panic!("{command_line}: the guest was never caught before its program");
}

impl Guest {
    pub fn boot(host: &Host, kernel: KernelFile, command_line: &str, cpus: u8) -> Self {
        let serial = Captured::default();
        let asked = MachineConfig {
            cpus,
            serial: serial.output(),
            ..config(&kernel, command_line)
        };
        let booted = vmm::machine::boot(&host.kvm, &host.profile, asked);
        let booted = booted.unwrap_or_else(|e| panic!("{command_line}: {e}"));
        Self {
            machine: booted.machine,
            serial,
            kernel,
        }
    }

    /// Wraps a machine that came from a snapshot.
    pub fn restored(machine: Machine, serial: Captured) -> Self {
        Self {
            machine,
            serial,
            kernel: micro_kernel(),
        }
    }

    /// Returns the address of a symbol of the kernel.
    pub fn symbol(&self, name: &str) -> Gva {
        self.find(name).0
    }

    /// Checks whether an address lies in a function of the kernel.
    pub fn is_in(&self, function: &str, address: u64) -> bool {
        let (start, size) = self.find(function);
        (start.0..start.0 + size).contains(&address)
    }

    fn find(&self, name: &str) -> (Gva, u64) {
        let file = object::File::parse(self.kernel.elf()).unwrap();
        let symbol = file.symbols().find(|s| s.name() == Ok(name));
        let symbol = symbol.unwrap_or_else(|| panic!("the guest has no symbol {name}"));
        (Gva(symbol.address()), symbol.size())
    }

    /// Returns the instructions of a function as they are without sites.
    pub fn instructions(&self, function: &str) -> Vec<Instruction> {
        let (address, size) = self.find(function);
        let mut code = vec![0; size as usize];
        // Identity-mapped, as everything in this guest.
        self.machine
            .traps()
            .read_unpatched(Gpa(address.0), &mut code)
            .unwrap();
        let mut decoder = Decoder::with_ip(64, &code, address.0, DecoderOptions::NONE);
        let instructions: Vec<_> = decoder.iter().collect();
        assert!(
            !instructions.iter().any(Instruction::is_invalid),
            "{function} does not decode"
        );
        instructions
    }

    /// Arms a site at a kernel address.
    pub fn arm_kernel(&self, at: Gva) -> SiteId {
        let traps = self.machine.traps();
        traps.arm_kernel(at, self.space()).unwrap()
    }

    /// Arms a site at a program's address.
    pub fn arm_user(&self, at: Gva) -> SiteId {
        self.machine.arm_user(at, self.space()).unwrap()
    }

    /// Sets a new sink that records the machine's traps.
    pub fn record(&self) -> Recorder {
        let recorder = Recorder::default();
        self.machine.set_sink(recorder.boxed());
        recorder
    }

    /// Writes bytes to the guest's memory.
    pub fn write(&self, address: u64, bytes: &[u8]) {
        let ram = self.machine.ram();
        ram.write_physical(Gpa(address), bytes).unwrap();
    }

    /// Writes `mov eax, target; jmp rax` to the guest's memory.
    pub fn write_jump(&self, address: u64, target: u64) {
        let target = u32::try_from(target).unwrap().to_le_bytes();
        self.write(address, &[&[0xb8][..], &target, &[0xff, 0xe0]].concat());
    }

    /// Returns the page tables in use by vCPU 0.
    pub fn space(&self) -> AddressSpace {
        let paused = self.machine.pause();
        self.machine.registers(&paused, 0).unwrap().address_space()
    }

    /// Returns the guest's text as it is in memory, with all its int3s.
    pub fn text(&self) -> Vec<u8> {
        let start = self.symbol("micro_start");
        let mut text = vec![0; 0x4000];
        self.machine
            .ram()
            .read_physical(Gpa(start.0), &mut text)
            .unwrap();
        text
    }

    /// Waits until the guest has printed `wanted`.
    pub fn wait_for(&self, wanted: &str) {
        let deadline = Instant::now() + LIMIT;
        while !self.serial.text().contains(wanted) {
            if let Some(end) = self.machine.wait(Some(Duration::ZERO))
                && !self.serial.text().contains(wanted)
            {
                panic!(
                    "ended ({end}) without printing {wanted:?}; {}",
                    self.situation()
                );
            }
            assert!(
                Instant::now() < deadline,
                "never printed {wanted:?}; {}",
                self.situation()
            );
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Waits until `condition` holds. `what` names it.
    pub fn wait_until(&self, what: &str, condition: impl Fn() -> bool) {
        let deadline = Instant::now() + LIMIT;
        while !condition() {
            assert!(
                Instant::now() < deadline,
                "never {what}; {}",
                self.situation()
            );
            std::thread::sleep(Duration::from_micros(300));
        }
    }

    /// Waits for the end of the run.
    pub fn end(&self) -> RunEnd {
        let end = self.machine.wait(Some(LIMIT));
        end.unwrap_or_else(|| panic!("still running after {LIMIT:?}; {}", self.situation()))
    }

    /// Waits for the orderly end of a program and returns the count it printed.
    pub fn count(&self) -> u64 {
        let end = self.end();
        assert!(
            matches!(end, RunEnd::Reset { .. }),
            "ended as: {end}; {}",
            self.situation()
        );
        let text = self.serial.text();
        assert!(text.ends_with("micro: done\n"), "{}", self.situation());
        let count = text
            .lines()
            .find_map(|l| l.strip_prefix("micro: count "))
            .unwrap();
        count.parse().unwrap()
    }

    /// Returns a 64-bit variable of the guest.
    pub fn variable(&self, name: &str) -> u64 {
        let mut bytes = [0; 8];
        self.machine
            .ram()
            .read_physical(Gpa(self.symbol(name).0), &mut bytes)
            .unwrap();
        u64::from_le_bytes(bytes)
    }

    /// Returns a 64-bit variable of the guest, or zero if the kernel does not have it.
    pub fn variable_or_zero(&self, name: &str) -> u64 {
        let file = object::File::parse(self.kernel.elf()).unwrap();
        if file.symbols().any(|s| s.name() == Ok(name)) {
            self.variable(name)
        } else {
            0
        }
    }

    /// Returns output, counters and registers, for messages. It may itself hang no longer than a
    /// pause does.
    pub fn situation(&self) -> String {
        format!(
            "output {:?}, {:?}, sites {:?}",
            self.serial.text(),
            self.machine.stats(),
            self.machine.traps().hits()
        )
    }
}

//! Machines with the micro guest, paused before its program begins but after its gates are set:
//! user sites can be armed then, on every host.

use std::io::{self, Write};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use introspect::Gva;
use object::{Object, ObjectSymbol};
use vmm::boot::KernelFile;
use vmm::host::HostProfile;
use vmm::machine::{MachineConfig, Paused, SerialOutput, boot};
use vmm::{Machine, RunEnd};

use crate::Host;

/// The RAM of such a machine, in bytes.
const MEMORY: u64 = 4 << 20;
/// The time limit for a guest's first line, and for its end.
const PATIENCE: Duration = Duration::from_secs(300);
/// The number of times that a guest which was paused too late is started anew.
const ATTEMPTS: usize = 20;

/// The micro guest's file.
pub struct MicroGuest {
    host: &'static Host,
    kernel: KernelFile,
}

/// An output that drops everything. Its first line blocks until the gate opens, and so does the
/// vCPU that prints it.
#[derive(Clone, Default)]
struct Gate(Arc<GateState>);

#[derive(Default)]
struct GateState {
    reached: AtomicBool,
    open: AtomicBool,
}

impl Write for Gate {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        if data.contains(&b'\n') {
            self.0.reached.store(true, Ordering::SeqCst);
            while !self.0.open.load(Ordering::SeqCst) {
                std::thread::sleep(Duration::from_micros(200));
            }
        }
        Ok(data.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl MicroGuest {
    /// Makes the micro guest.
    ///
    /// # Panics
    /// If the boot code does not take the micro guest.
    #[must_use]
    pub fn new(host: &'static Host) -> Self {
        let kernel = KernelFile::from_bytes(guest::micro::elf(), Path::new("(micro guest)"));
        Self {
            host,
            kernel: kernel.unwrap_or_else(|e| panic!("{e}")),
        }
    }

    /// Returns the record of its host.
    #[must_use]
    pub fn profile(&self) -> &HostProfile {
        &self.host.profile
    }

    /// Returns the ELF file.
    #[must_use]
    pub fn elf(&self) -> &[u8] {
        self.kernel.elf()
    }

    /// Returns the file as the machine accepts it.
    #[must_use]
    pub fn kernel(&self) -> &KernelFile {
        &self.kernel
    }

    /// Returns the address of a function or variable.
    ///
    /// # Panics
    /// If there is none of this name.
    #[must_use]
    pub fn address(&self, name: &str) -> Gva {
        self.extent(name).0
    }

    /// Returns the address of a function or variable, and its size in bytes.
    ///
    /// # Panics
    /// If there is none of this name.
    #[must_use]
    pub fn extent(&self, name: &str) -> (Gva, u64) {
        let file = object::File::parse(self.elf()).unwrap_or_else(|e| panic!("micro guest: {e}"));
        let symbol = file.symbol_by_name(name);
        let symbol = symbol.unwrap_or_else(|| panic!("the micro guest has no {name}"));
        (Gva(symbol.address()), symbol.size())
    }

    /// Returns a machine with one vCPU that is paused before the first instruction of its program.
    ///
    /// # Panics
    /// If the guest does not come so far.
    #[must_use]
    pub fn before_program(&self, command_line: &str) -> (Machine, Paused) {
        let (start, size) = self.extent("micro_print");
        for _ in 0..ATTEMPTS {
            let (machine, paused) = self.at_first_line(command_line);
            let rip = machine.registers(&paused, 0).map(|r| r.regs.rip);
            if rip.is_some_and(|rip| (start.0..start.0 + size).contains(&rip)) {
                return (machine, paused);
            }
        }
        panic!("{command_line}: the guest was never stopped before its program");
    }

    fn at_first_line(&self, command_line: &str) -> (Machine, Paused) {
        let gate = Gate::default();
        let config = MachineConfig {
            memory: MEMORY,
            cpus: 1,
            kernel: &self.kernel,
            initramfs: None,
            command_line,
            add_words: false,
            protocol: None,
            pit: false,
            acpi: None,
            virtio: Default::default(),
            serial: SerialOutput::write_through(gate.clone()),
        };
        let booted = boot(&self.host.kvm, &self.host.profile, config);
        let mut machine = booted
            .unwrap_or_else(|e| panic!("{command_line}: {e}"))
            .machine;
        machine.start();
        let deadline = Instant::now() + PATIENCE;
        while !gate.0.reached.load(Ordering::SeqCst) {
            assert!(Instant::now() < deadline, "{command_line}: no first line");
            std::thread::sleep(Duration::from_micros(200));
        }
        let paused = std::thread::scope(|scope| {
            scope.spawn(|| {
                // By then the pause below has nearly always been requested.
                std::thread::sleep(Duration::from_millis(5));
                gate.0.open.store(true, Ordering::SeqCst);
            });
            machine.pause()
        });
        (machine, paused)
    }

    /// Lets the machine run to its end.
    ///
    /// # Panics
    /// If it does not end as its program should.
    pub fn finish(&self, machine: &Machine, paused: Paused) {
        drop(paused);
        match machine.wait(Some(PATIENCE)) {
            Some(RunEnd::Reset { .. }) => {}
            Some(end) => panic!("micro guest: {end}"),
            None => panic!("micro guest: no end within {PATIENCE:?}"),
        }
    }
}

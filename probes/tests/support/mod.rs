//! Shared by the tests on a real KVM: the micro guest, whose functions run a known number of times,
//! and an engine on it.
//!
//! Without `/dev/kvm` these tests fail, unless `EXOTRACE_NO_KVM=1` is set.
#![allow(dead_code, reason = "each test binary uses a part of it")]
#![allow(clippy::unwrap_used)]

use std::io::Write;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use devices::ConsoleOutput;
use introspect::kernel::image::KernelImage;
use probes::engine::{Capture, Engine, EngineLimits, Filter, ProbeStats, RingSize, Session};
use probes::event::Event;
use probes::kernel_view::KernelView;
use probes::name::ProbePattern;
use probes::probe::Probe;
use probes::provider;
use probes::text_hash::{TextHash, hash_text};
use vmm::boot::KernelFile;
use vmm::host::{self, HostProfile, Kvm};
use vmm::machine::{Machine, MachineConfig, Paused, RunEnd, boot};

/// The time limit for a guest that takes seconds on an idle host.
pub const LIMIT: Duration = Duration::from_secs(300);

/// The text that the guest has printed.
#[derive(Clone, Default)]
pub struct Output {
    text: Arc<Mutex<Vec<u8>>>,
    /// Whether the next newline is held back, with the vCPU that wrote it.
    hold: Arc<AtomicBool>,
}

impl Output {
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.text.lock().unwrap()).into_owned()
    }
}

impl Write for Output {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.text.lock().unwrap().extend_from_slice(bytes);
        while bytes.contains(&b'\n') && self.hold.load(Ordering::SeqCst) {
            std::thread::sleep(Duration::from_micros(200));
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

fn kvm() -> Option<Kvm> {
    if std::env::var_os("EXOTRACE_NO_KVM").is_some_and(|value| value == "1") {
        eprintln!("not run: EXOTRACE_NO_KVM=1");
        return None;
    }
    match host::open(Path::new("/dev/kvm")) {
        Ok(kvm) => Some(kvm),
        Err(error) => panic!("{error} (or set EXOTRACE_NO_KVM=1 to leave out what needs KVM)"),
    }
}

/// A micro guest before its first instruction, with an engine.
pub struct Micro {
    pub engine: Engine,
    pub view: Arc<KernelView>,
    pub output: Output,
    pub image: KernelImage,
    pub machine: Machine,
}

/// Returns the nanoseconds of an exit from kernel mode on this host; `None` without KVM.
pub fn exit_ns() -> Option<u64> {
    let profile = HostProfile::probe(&kvm()?, &guest::micro::elf()).unwrap();
    Some(profile.exit_kernel_ns)
}

/// Returns the nanoseconds of a trap in kernel mode on this host; `None` without KVM.
pub fn trap_ns() -> Option<u64> {
    let profile = HostProfile::probe(&kvm()?, &guest::micro::elf()).unwrap();
    Some(profile.trap_kernel_ns)
}

/// Creates a guest; `None` if KVM is not to be used here.
pub fn micro(command_line: &str, cpus: u8) -> Option<Micro> {
    let kvm = kvm()?;
    let profile = HostProfile::probe(&kvm, &guest::micro::elf()).unwrap();
    Some(booted(&kvm, &profile, command_line, cpus))
}

fn booted(kvm: &Kvm, profile: &HostProfile, command_line: &str, cpus: u8) -> Micro {
    let elf = guest::micro::elf();
    let kernel = KernelFile::from_bytes(elf.clone(), Path::new("micro")).unwrap();
    let output = Output::default();
    let config = MachineConfig {
        memory: 4 << 20,
        cpus,
        kernel: &kernel,
        initramfs: None,
        command_line,
        add_words: false,
        protocol: None,
        pit: false,
        acpi: None,
        virtio: Default::default(),
        serial: ConsoleOutput::write_through(output.clone()),
    };
    let machine = boot(kvm, profile, config).unwrap().machine;
    let image = KernelImage::parse(elf).unwrap();
    let paused = machine.pause();
    let space = machine.registers(&paused, 0).unwrap().address_space();
    drop(paused);
    let view = Arc::new(KernelView::without_types(image.symbols().unwrap(), space));
    let engine = Engine::new(machine.handle(), view.clone(), &EngineLimits::default());
    Micro {
        engine,
        view,
        output,
        image,
        machine,
    }
}

/// Returns a guest that is paused after it has printed its first line: its gates are set up, and
/// its program has not begun.
pub fn before_program(command_line: &str, cpus: u8) -> Option<(Micro, Paused)> {
    let kvm = kvm()?;
    let profile = HostProfile::probe(&kvm, &guest::micro::elf()).unwrap();
    for _ in 0..20 {
        let mut micro = booted(&kvm, &profile, command_line, cpus);
        let hold = micro.output.hold.clone();
        hold.store(true, Ordering::SeqCst);
        micro.machine.start();
        micro.until("the first line", |micro| micro.output.text().contains('\n'));
        let paused = std::thread::scope(|scope| {
            scope.spawn(|| {
                // By then the pause below is nearly always requested.
                std::thread::sleep(Duration::from_millis(10));
                hold.store(false, Ordering::SeqCst);
            });
            micro.machine.pause()
        });
        let rip = micro.machine.registers(&paused, 0).unwrap().regs.rip;
        let printing = micro.view.kernel.symbols.resolve(rip);
        if printing.is_some_and(|(symbol, _)| symbol.name == "micro_print") {
            return Some((micro, paused));
        }
    }
    panic!("{command_line}: the guest was never caught before its program");
}

impl Micro {
    pub fn address(&self, name: &str) -> u64 {
        self.view.kernel.symbols.address_of(name).unwrap()
    }

    pub fn text_hash(&self) -> TextHash {
        let text = self
            .image
            .segments()
            .iter()
            .find(|segment| segment.executable)
            .unwrap();
        let range = text.virtual_address..text.virtual_address + text.memory_size;
        let _paused = self.machine.pause();
        hash_text(self.machine.ram(), self.view.kernel.space, range).unwrap()
    }

    /// Returns the only probe that a pattern matches.
    pub fn probe(&self, pattern: &str) -> Probe {
        probe(&self.view, pattern)
    }

    /// A session with probes, numbered in their order; no call comes between the first and the
    /// last.
    pub fn session(&self, slots: usize, patterns: &[&str]) -> Session {
        let _paused = self.machine.pause();
        let mut session = self.engine.session(ring(slots)).unwrap();
        for pattern in patterns {
            enable(&mut session, &self.probe(pattern)).unwrap();
        }
        session
    }

    /// Waits until `condition` holds; `what` names it.
    pub fn until(&self, what: &str, mut condition: impl FnMut(&Self) -> bool) {
        let deadline = Instant::now() + LIMIT;
        while !condition(self) {
            assert!(
                Instant::now() < deadline,
                "no {what}: {}",
                self.output.text()
            );
            std::thread::sleep(Duration::from_micros(300));
        }
    }

    /// Runs the guest to its end; `meanwhile` is called repeatedly.
    pub fn run(&mut self, mut meanwhile: impl FnMut()) {
        self.machine.start();
        self.finish(&mut meanwhile);
    }

    /// Waits for the end of a guest that already runs, in the same way.
    pub fn finish(&self, meanwhile: &mut dyn FnMut()) {
        let deadline = Instant::now() + LIMIT;
        let end = loop {
            let end = self.machine.wait(Some(Duration::from_millis(2)));
            meanwhile();
            if end.is_some() || Instant::now() > deadline {
                break end;
            }
        };
        assert!(
            matches!(end, Some(RunEnd::Reset { .. })),
            "{end:?}: {}",
            self.output.text()
        );
    }

    /// Panics unless the guest itself has counted `count`.
    pub fn assert_count(&self, count: u64) {
        let text = self.output.text();
        assert!(text.contains(&format!("micro: count {count}\n")), "{text}");
    }

    /// Panics unless all traps are removed and the guest's text is `before`.
    pub fn assert_untouched(&self, before: &TextHash) {
        assert_eq!(self.machine.traps().hits(), []);
        assert_eq!(self.text_hash(), *before, "every byte is restored");
    }
}

pub fn ring(slots: usize) -> RingSize {
    RingSize {
        slots,
        ..RingSize::default()
    }
}

/// Returns the only probe that a pattern matches.
pub fn probe(view: &KernelView, pattern: &str) -> Probe {
    let found = provider::kernel_probes(view, &ProbePattern::parse(pattern).unwrap());
    let [probe] = found.probes.as_slice() else {
        panic!("{pattern}: {found:?}")
    };
    probe.clone()
}

pub fn enable(session: &mut Session, probe: &Probe) -> Result<u32, probes::engine::EnableError> {
    session.enable(probe, Filter::default(), Capture::default())
}

/// Drains all records of a session's rings.
pub fn drained(session: &mut Session) -> Vec<Event> {
    let mut events = Vec::new();
    session.drain(|event| events.push(event));
    events
}

/// Returns the hits of a probe, all of which were recorded or dropped.
pub fn hits(session: &Session, number: u32) -> u64 {
    let stats = session.probe_stats(number).unwrap();
    assert_balanced(&stats);
    stats.hits
}

pub fn assert_balanced(stats: &ProbeStats) {
    assert_eq!(
        stats.hits,
        stats.filtered + stats.recorded + stats.dropped,
        "{stats:?}"
    );
}

/// Pseudo-random numbers: xorshift by Marsaglia.
pub struct Random(pub u64);

impl Random {
    pub fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % limit as u64) as usize
    }
}

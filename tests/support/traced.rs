//! A guest with the rich kernel, watched by the probe engine: its probes by pattern, its tracefs,
//! its kernel's complaints.

use std::sync::Arc;
use std::time::{Duration, Instant};

use iced_x86::{Decoder, DecoderOptions, Instruction};
use introspect::Gva;
use introspect::system::PausedSystem;
use introspect::x86_64::paging;
use probes::engine::{Engine, Filter, RingSize, Session};
use probes::event::Event;
use probes::kernel_view::KernelView;
use probes::probe::Probe;
use probes::provider;
use probes::text_hash::TextHash;

use crate::host::Host;
use crate::rich;
use crate::shell::{COMMAND_LIMIT, Shell};
use crate::tracing;

/// The folder by which the guest's tracers are controlled.
const TRACEFS: &str = "/sys/kernel/tracing";
/// A size of reads and writes that nothing else in the guest uses.
pub const COPY_SIZE: u64 = 999;
/// The interval at which a session is polled for awaited events.
const LOOK_INTERVAL: Duration = Duration::from_millis(20);
/// The messages of a kernel that has found an error in itself.
const COMPLAINTS: &str = "-e BUG -e Oops -e WARNING -e 'cut here' -e 'ftrace bug' -e 'invalid opcode' -e 'int3:' -e 'Failed to'";

/// The guest and the engine of its machine.
pub struct Traced {
    /// The guest, whose shell is in the folder of its tracers.
    pub shell: Shell,
    /// The view of its kernel when this was made.
    pub view: Arc<KernelView>,
    /// The engine.
    pub engine: Engine,
}

impl Traced {
    /// Restores a copy of the rich guest, after `lines` were typed.
    ///
    /// # Panics
    /// If it cannot be made.
    pub fn new(host: &Host, lines: &[&str]) -> Self {
        let shell = rich::guest(host);
        shell.type_lines(&[&format!("mount -t tracefs t {TRACEFS} && cd {TRACEFS}")]);
        shell.type_lines(lines);
        let view = shell.linux.view();
        let engine = shell.linux.engine(&view);
        Self {
            shell,
            view,
            engine,
        }
    }

    /// Returns the probes that a pattern matches now.
    ///
    /// # Panics
    /// If it matches none.
    pub fn find(&self, pattern: &str) -> Vec<Probe> {
        let guest = self.shell.linux.vm.traceable(&self.view);
        provider::find(&guest, &tracing::pattern(pattern)).unwrap_or_else(|e| panic!("{e}"))
    }

    /// Makes a session with the probes of `patterns`, in their order.
    ///
    /// # Panics
    /// If one cannot be enabled.
    pub fn session(&self, patterns: &[&str]) -> Session {
        let mut session = self.empty_session();
        for pattern in patterns {
            for probe in self.find(pattern) {
                tracing::enable(&mut session, &probe, &Filter::default());
            }
        }
        session
    }

    /// Makes a session without probes.
    ///
    /// # Panics
    /// If there is no memory for it.
    pub fn empty_session(&self) -> Session {
        let session = self.engine.session(RingSize::default());
        session.unwrap_or_else(|e| panic!("{e}"))
    }

    /// Reads the guest while it is paused.
    pub fn look<T>(&self, ask: impl FnOnce(PausedSystem<'_>) -> T) -> T {
        self.shell.linux.look(ask)
    }

    /// Runs a command that must succeed, in the folder of the guest's tracers, and returns its
    /// output.
    ///
    /// # Panics
    /// If it fails.
    pub fn tell(&self, command: &str) -> String {
        let started = Instant::now();
        let answer = self.shell.start(command).answer(4 * COMMAND_LIMIT);
        println!("  {:?} {command}", started.elapsed());
        assert_eq!(
            answer.status,
            0,
            "{command}: {answer:?}\n{}",
            self.complaints()
        );
        answer.output.trim_end().to_owned()
    }

    /// Returns the number that a command prints.
    ///
    /// # Panics
    /// If it prints none.
    pub fn number(&self, command: &str) -> u64 {
        let text = self.tell(&format!("{command} || true"));
        text.trim()
            .parse()
            .unwrap_or_else(|e| panic!("{command}: {text:?}: {e}"))
    }

    /// Makes the guest read and write [`COPY_SIZE`] bytes `count` times.
    ///
    /// # Panics
    /// If the guest does not.
    pub fn copy(&self, count: usize) {
        self.tell(&format!(
            "dd if=/dev/zero of=/dev/null bs={COPY_SIZE} count={count} 2> /dev/null"
        ));
    }

    /// Waits until the session has recorded at least `least` events, and returns them all.
    ///
    /// # Panics
    /// If it has not in [`COMMAND_LIMIT`].
    pub fn wait_for(&self, session: &mut Session, least: usize) -> Vec<Event> {
        let deadline = Instant::now() + COMMAND_LIMIT;
        let mut found = Vec::new();
        while found.len() < least {
            assert!(
                Instant::now() < deadline,
                "{}",
                self.shell.linux.situation()
            );
            std::thread::sleep(LOOK_INTERVAL);
            found.extend(events(session));
        }
        found
    }

    /// Returns the number of events in the guest's own trace buffer.
    ///
    /// # Panics
    /// If it has lost one.
    pub fn in_buffer(&self) -> usize {
        let stats = self.tell("cat per_cpu/cpu0/stats");
        let field = |name: &str| -> usize {
            let line = stats.lines().find_map(|line| line.strip_prefix(name));
            let value = line.and_then(|value| value.trim().parse().ok());
            value.unwrap_or_else(|| panic!("{name} in {stats:?}"))
        };
        assert_eq!(field("overrun:"), 0, "{stats}");
        field("entries:")
    }

    /// Returns the address of a kernel symbol.
    ///
    /// # Panics
    /// If there is none.
    pub fn address(&self, name: &str) -> Gva {
        let address = self.view.kernel.symbols.address_of(name);
        Gva(address.unwrap_or_else(|| panic!("no {name}")))
    }

    /// Returns kernel text as it is without our probes.
    ///
    /// # Panics
    /// If it is not mapped.
    pub fn code(&self, start: Gva, bytes: usize) -> Vec<u8> {
        let mut code = vec![0; bytes];
        let machine = self.shell.linux.machine();
        let physical = paging::translate(machine.ram(), self.view.kernel.space, start);
        let physical = physical.unwrap_or_else(|e| panic!("{e}")).gpa;
        let read = machine.traps().read_unpatched(physical, &mut code);
        read.unwrap_or_else(|e| panic!("{e}"));
        code
    }

    /// Returns the instructions of kernel text.
    ///
    /// # Panics
    /// As [`Self::code`].
    pub fn instructions(&self, start: Gva, bytes: usize) -> Vec<Instruction> {
        let code = self.code(start, bytes);
        let decoder = Decoder::with_ip(64, &code, start.0, DecoderOptions::NONE);
        decoder.into_iter().collect()
    }

    /// Returns the hash of the kernel's text.
    pub fn hash(&self) -> TextHash {
        self.shell.linux.text_hash(&self.view)
    }

    /// Returns the kernel's complaints since it booted.
    pub fn complaints(&self) -> String {
        // The machine has no ACPI tables, which Linux 7.2 reports as a failure.
        let command = format!(
            "dmesg | grep -v 'ACPI: Failed to initialize tables' | grep -A 30 {COMPLAINTS} | head -n 60; true"
        );
        self.shell.start(&command).answer(4 * COMMAND_LIMIT).output
    }

    /// Checks that the guest works and has no complaints.
    ///
    /// # Panics
    /// If it has.
    pub fn assert_well(&self) {
        let complaints = self.complaints();
        assert_eq!(
            complaints,
            "",
            "{}",
            self.shell.output("dmesg | tail -n 40")
        );
        assert_eq!(self.shell.output("echo $((40+2))"), "42");
    }
}

/// Returns the events that a session has recorded since the last call.
///
/// # Panics
/// If an event was dropped.
pub fn events(session: &mut Session) -> Vec<Event> {
    let mut events = Vec::new();
    session.drain(|event| events.push(event));
    assert_eq!(session.stats().probes.dropped, 0, "{:?}", session.stats());
    events
}

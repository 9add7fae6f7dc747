//! A Linux guest watched by ptrace(3): the device over its engine, the counters of its kernel, and
//! readers of records.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use introspect::kernel::btf::Btf;
use introspect::kernel::layout::offset;
use introspect::kernel::task_list::TaskListLayout;
use introspect::{CpuRegisters, Gva, PausedMemory};
use probes::clock::Clock;
use probes::engine::Engine;
use probes::kernel_view::KernelView;
use trace_devices::port::{ControlPort, EventPort, EventReader};
use trace_devices::ptrace::Device;
use trace_devices::ptrace::record::{EventType, RECORD_BYTES, Record, TRAP_FAULT};
use vmm::machine::Paused;

use crate::host::Host;
use crate::shell::{COMMAND_LIMIT, Shell};

/// The silence after which no more records are expected. The device polls every 5 ms, or later on a
/// busy host.
pub const QUIET: Duration = Duration::from_millis(500);
/// The callers of `handle_mm_fault` for page faults that are exceptions. Which of them it is
/// depends on the compiler's inlining.
pub const FAULT_HANDLERS: [&str; 3] = ["exc_page_fault", "do_user_addr_fault", "handle_page_fault"];
/// Functions in which the kernels' idle loops execute HLT.
const WAITS: [&str; 4] = [
    "default_idle",
    "amd_e400_idle",
    "native_safe_halt",
    "pv_native_safe_halt",
];
/// The most bytes of one read.
const READ: usize = 1 << 20;

/// A guest and its device.
pub struct Traced {
    /// The guest.
    pub shell: Shell,
    /// The view of its kernel.
    pub view: Arc<KernelView>,
    /// The engine of its machine.
    pub engine: Engine,
    /// The clock of the records' times.
    pub clock: Clock,
    /// The device, with no task selected yet.
    pub device: Device,
}

impl Traced {
    /// Makes the device of this guest.
    ///
    /// # Panics
    /// If its kernel cannot be understood.
    pub fn new(shell: Shell) -> Self {
        let view = shell.linux.view();
        let engine = shell.linux.engine(&view);
        let device = shell.linux.vm.ptrace_device();
        let device = device.unwrap_or_else(|e| panic!("{e}"));
        Self {
            clock: device.clock(),
            device,
            shell,
            view,
            engine,
        }
    }

    /// Makes the device of a guest with the small kernel.
    ///
    /// # Panics
    /// As [`Self::new`].
    pub fn small(host: &Host) -> Self {
        Self::new(Shell::new(host))
    }

    /// Writes a command to the control port.
    ///
    /// # Panics
    /// If it is refused.
    pub fn command(&self, text: &str) {
        let done = self.device.command(text);
        done.unwrap_or_else(|e| panic!("{text}: {e}"));
    }

    /// Opens the event port.
    ///
    /// # Panics
    /// If it does not open.
    pub fn open(&self) -> Box<dyn EventReader> {
        self.device.open().unwrap_or_else(|e| panic!("{e}"))
    }

    /// Returns the error of an open that fails.
    ///
    /// # Panics
    /// If it opens.
    pub fn refusal(&self) -> String {
        self.device
            .open()
            .err()
            .map_or_else(|| panic!("it opens"), |e| e.to_string())
    }

    /// Returns the number in a line of the configuration.
    ///
    /// # Panics
    /// If there is none.
    pub fn told(&self, name: &str) -> u64 {
        let text = self.device.configuration();
        let mut lines = text.lines().filter_map(|line| line.split_once(' '));
        let number = lines
            .find(|line| line.0 == name)
            .and_then(|line| line.1.parse().ok());
        number.unwrap_or_else(|| panic!("no {name} in {text:?}"))
    }

    fn btf(&self) -> &Btf {
        self.view.kernel.btf().unwrap_or_else(|| panic!("no types"))
    }

    fn offset(&self, path: &str, size: u64) -> u64 {
        offset(self.btf(), path, size).unwrap_or_else(|e| panic!("{e}"))
    }

    fn symbol(&self, name: &str) -> u64 {
        let address = self.view.kernel.symbols.address_of(name);
        address.unwrap_or_else(|| panic!("no {name}"))
    }

    /// Reads the kernel's counters where it keeps them, while the machine is paused. They are
    /// `ctxt` and `processes` of /proc/stat, `pgfault` of /proc/vmstat, and the voluntary switches
    /// of thread `pid` (/proc/PID/status).
    ///
    /// # Panics
    /// If the kernel keeps them otherwise.
    pub fn counters(&self, pid: u32) -> Counters {
        let machine = self.shell.linux.machine();
        let paused = machine.pause();
        let memory = PausedMemory::new(machine.ram());
        let view = memory.view(self.view.kernel.space);
        let read = |at: u64| view.u64(Gva(at)).unwrap_or_else(|e| panic!("{at:#x}: {e}"));
        let of_cpus = |variable: &str, offset: u64| -> u64 {
            let cpus = 0..machine.vcpus();
            let bases = cpus.filter_map(|cpu| machine.handle().cpu_state(&paused, cpu));
            let at = self.symbol(variable).wrapping_add(offset);
            bases
                .map(|cpu| read(cpu.kernel_gs_base().0.wrapping_add(at)))
                .sum()
        };
        let fault = self.btf().enumerator("vm_event_item.PGFAULT");
        let fault = fault.unwrap_or_else(|e| panic!("{e}")).unsigned_abs();
        let tasks = TaskListLayout::new(self.btf(), &self.view.kernel.symbols);
        let tasks = tasks.unwrap_or_else(|e| panic!("{e}"));
        let task = tasks.thread(view, pid.cast_signed()).ok().flatten();
        let task = task.unwrap_or_else(|| panic!("no thread {pid}")).address.0;
        let given = ["task_struct.nvcsw", "task_struct.nivcsw"];
        Counters {
            switches: of_cpus("runqueues", self.offset("rq.nr_switches", 8)),
            forks: read(self.symbol("total_forks")),
            faults: of_cpus("vm_event_states", 8 * fault),
            given_away: given
                .iter()
                .map(|path| read(task + self.offset(path, 8)))
                .sum(),
        }
    }

    /// Pauses the machine when the shell is idle, some time after its answer, and each CPU waits in
    /// its idle loop. A switch, a wake-up or a fault has then been counted and recorded, or
    /// neither. An idle kernel still handles ticks of its timer, which one pause of seven meets
    /// here.
    ///
    /// # Panics
    /// If a CPU does not become idle.
    #[must_use]
    pub fn pause(&self) -> Paused {
        std::thread::sleep(QUIET);
        let machine = self.shell.linux.machine();
        let function = |paused: &Paused, cpu| {
            let cpu_state = machine.cpu_state(paused, cpu)?;
            let at = cpu_state.instruction_pointer().0;
            self.view.kernel.symbols.resolve(at).map(|it| it.0.name)
        };
        let deadline = Instant::now() + COMMAND_LIMIT;
        loop {
            let paused = machine.pause();
            let cpus = 0..machine.vcpus();
            let places: Vec<_> = cpus.map(|cpu| function(&paused, cpu)).collect();
            let waits = |place: &Option<&str>| place.is_some_and(|name| WAITS.contains(&name));
            if places.iter().all(waits) {
                return paused;
            }
            assert!(Instant::now() < deadline, "no rest: {places:?}");
            drop(paused);
            std::thread::sleep(Duration::from_millis(3));
        }
    }
}

/// The counters of a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Counters {
    /// The number of task switches, on all CPUs.
    pub switches: u64,
    /// The number of tasks that were made.
    pub forks: u64,
    /// The number of page faults.
    pub faults: u64,
    /// The number of voluntary switches of one thread.
    pub given_away: u64,
}

impl Counters {
    /// Returns the increase since `before`.
    #[must_use]
    pub fn since(&self, before: &Self) -> Self {
        Self {
            switches: self.switches - before.switches,
            forks: self.forks - before.forks,
            faults: self.faults - before.faults,
            given_away: self.given_away - before.given_away,
        }
    }
}

/// Parses records as they are read.
///
/// # Panics
/// If the last record is incomplete.
pub fn parsed(bytes: &[u8]) -> impl Iterator<Item = Record> {
    let (whole, rest) = bytes.as_chunks::<RECORD_BYTES>();
    assert!(rest.is_empty(), "half a record");
    whole.iter().map(Record::parse)
}

/// Reads all records that wait, or come soon: the device's thread may have to wait for its turn.
///
/// # Panics
/// If a record is incomplete.
pub fn taken(reader: &mut dyn EventReader) -> Vec<Record> {
    let mut records = Vec::new();
    while reader.wait(4 * QUIET) {
        records.extend(parsed(&reader.read(READ)));
    }
    records
}

/// Returns whether a record is of this type.
#[must_use]
pub fn is(record: &Record, event: EventType) -> bool {
    record.event == event.number()
}

/// Returns the number of records that match `wanted`.
pub fn count(records: &[Record], wanted: impl Fn(&Record) -> bool) -> u64 {
    records.iter().filter(|record| wanted(record)).count() as u64
}

/// Returns whether a record is a page fault.
#[must_use]
pub fn is_fault(record: &Record) -> bool {
    is(record, EventType::Trap) && record.argument & TRAP_FAULT != 0
}

/// Returns those of `faults` that were not handled. `handled` has threads and ascending times. A
/// fault was handled if one of them is of its thread and lies between it and that thread's next
/// fault, or `end`. Another thread may run and fault in between.
#[must_use]
pub fn unhandled<'r>(
    faults: &[&'r Record],
    handled: &[(Option<u32>, i64)],
    end: i64,
) -> Vec<&'r Record> {
    let mut next = BTreeMap::new();
    let mut alone = Vec::new();
    for fault in faults.iter().rev() {
        let until = next.insert(fault.pid, fault.time).unwrap_or(end);
        let first = handled.partition_point(|(_, at)| *at < fault.time);
        let later = handled.get(first..).unwrap_or_default().iter();
        let mut meanwhile = later.take_while(|(_, at)| *at < until);
        if !meanwhile.any(|(thread, _)| *thread == Some(fault.pid)) {
            alone.push(*fault);
        }
    }
    alone.reverse();
    alone
}

/// Returns whether a record is the start of a task's run, by deadlines or otherwise.
#[must_use]
pub fn is_run(record: &Record) -> bool {
    is(record, EventType::Run) || is(record, EventType::Edf)
}

/// Returns the numbers of the tasks that were made. A child's name, which is its parent's, and its
/// being ready have one time.
#[must_use]
pub fn made(records: &[Record]) -> Vec<u32> {
    let pairs = records.windows(2).filter_map(|pair| match pair {
        [name, ready] if is(name, EventType::Name) && is(ready, EventType::Ready) => {
            let is_one = (name.pid, name.time) == (ready.pid, ready.time);
            is_one.then_some(name.pid)
        }
        _ => None,
    });
    pairs.collect()
}

/// Returns the process ID of the guest's shell.
///
/// # Panics
/// If the shell does not print it.
#[must_use]
pub fn shell_pid(shell: &Shell) -> u32 {
    let pid = shell.output("echo $$");
    pid.parse().unwrap_or_else(|e| panic!("{pid:?}: {e}"))
}

/// Checks that records are in the order of their times on each machine, except those of a future
/// time.
///
/// # Panics
/// If one is out of order.
pub fn assert_in_order(records: &[Record]) {
    let mut latest = BTreeMap::new();
    for record in records.iter().filter(|it| !is(it, EventType::Deadline)) {
        let latest = latest.entry(record.machine).or_insert(record.time);
        assert!(record.time >= *latest, "{record:?} after {latest}");
        *latest = record.time;
    }
}

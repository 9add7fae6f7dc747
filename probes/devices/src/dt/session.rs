//! One open of the device: its requests, and the events that its client reads.
//!
//! The caller passes requests one at a time and returns the answers to its client. Dropping a
//! session removes its probes. Checks are in OpenBSD's order, which determines the error if several
//! apply.

mod events;
mod filter;

use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use probes::clock::Clock;
use probes::engine::{self, Capture, Engine, Filter, RingSize};
use probes::probe::{Probe, Target};
use probes::provider::tracepoint::keep_what_leads_to_the_call;

use super::abi::{self, Abi, Counts, ProbeRequest, TimerRate};
use super::codes::Request;
use super::device::{Guest, OpenOptions};
use super::probes::{Listed, Source, Table};
use super::queue::Queues;
use super::tasks::Threads;
use super::{Errno, Mode, Refused};
use events::{Maker, capture, largest_capture};
use filter::{check_filter, filter};

/// The shortest and longest period of a timer in nanoseconds; the longest is 2^32 - 1 seconds.
const SHORTEST_PERIOD: u64 = 200_000;
const LONGEST_PERIOD: u64 = u32::MAX as u64 * 1_000_000_000;
/// The most events in one answer.
const MOST_EVENTS: u64 = 4096;
/// The number of slots of the engine's rings, from which events go to the session's queues.
const ENGINE_SLOTS: usize = 4096;
/// The number of probes enabled in an engine's session after which the next start creates a new
/// one.
const MOST_NUMBERS: usize = 1 << 16;

/// The answer to a request.
#[derive(Debug, Default)]
pub struct Reply {
    /// An error that does not suppress the bytes: `ENOSPC`, with the records that fit.
    pub partial: Option<Errno>,
    /// The argument as returned, followed by the records that it points to.
    pub bytes: Vec<u8>,
    /// A file for the client.
    pub descriptor: Option<OwnedFd>,
    /// A sentence with details.
    pub remark: Option<String>,
}

/// A probe of the session.
#[derive(Debug)]
struct Enabled {
    probe: u32,
    /// The client's flags that the provider supports.
    flags: u64,
    filter: abi::Filter,
    period: Duration,
    /// The engine's numbers of the probe's parts, while recording.
    numbers: Vec<u32>,
    /// Whether the probe is silent, but kept because OpenBSD keeps it: in strict mode.
    disabled: bool,
}

/// One open of the device.
pub struct Session {
    engine: Engine,
    guest: Arc<dyn Guest>,
    table: Arc<Table>,
    abi: Abi,
    mode: Mode,
    privileged: bool,
    enabled: Vec<Enabled>,
    recording: bool,
    tracer: Option<engine::Session>,
    /// Probe and system call of each of the engine's numbers.
    owners: Vec<(u32, u32)>,
    queues: Queues,
    clock: Clock,
    threads: Threads,
    read: u64,
    /// The counts of the engine's earlier sessions.
    past: Counts,
    /// Counts this session among the device's.
    _open: Arc<()>,
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Session")
            .field("abi", &self.abi)
            .field("mode", &self.mode)
            .field("recording", &self.recording)
            .finish_non_exhaustive()
    }
}

impl Session {
    pub(super) fn new(
        engine: Engine,
        guest: Arc<dyn Guest>,
        table: Arc<Table>,
        options: OpenOptions,
        open: Arc<()>,
    ) -> Self {
        let OpenOptions {
            abi,
            mode,
            privileged,
        } = options;
        Self {
            queues: Queues::new(engine.machine().vcpus(), mode.ring_events()),
            clock: Clock::now(engine.tsc_hz()),
            threads: Threads::new(&engine),
            engine,
            guest,
            table,
            abi,
            mode,
            privileged,
            enabled: Vec::new(),
            recording: false,
            tracer: None,
            owners: Vec::new(),
            read: 0,
            past: Counts::default(),
            _open: open,
        }
    }

    /// Returns the layout of the session's structures.
    #[must_use]
    pub fn abi(&self) -> Abi {
        self.abi
    }

    /// Returns the table of probes.
    #[must_use]
    pub fn table(&self) -> &Table {
        &self.table
    }

    /// Handles an ioctl with its code and argument.
    ///
    /// # Errors
    /// Those of OpenBSD. `EINVAL` also if the argument's size differs from the code's.
    pub fn ioctl(&mut self, code: u32, argument: &[u8]) -> Result<Reply, Refused> {
        let Some(request) = Request::of(code, self.abi) else {
            let why = format!("unknown request {code:#010x} of dt in this layout");
            return Err(Refused::new(Errno::Enotty, why));
        };
        if request.is_privileged() && !self.privileged {
            let why =
                format!("{request:?}: only for root and the user who has started the machine");
            return Err(Refused::new(Errno::Eperm, why));
        }
        let size = match request.takes_argument() {
            true => request.size(self.abi),
            false => 0,
        };
        if argument.len() != size {
            let found = argument.len();
            let why = format!("{request:?}: an argument of {found} bytes, it has {size}");
            return Err(Refused::new(Errno::Einval, why));
        }
        let short = || Refused::new(Errno::Einval, format!("{request:?}: the argument is cut"));
        let done = Reply::default();
        match request {
            Request::ListProbes => {
                let size = abi::list_size(argument).ok_or_else(short)?;
                Ok(self.list(argument, size))
            }
            Request::Arguments => {
                let (probe, size) = abi::arguments_request(argument).ok_or_else(short)?;
                self.arguments(argument, probe, size)
            }
            Request::Stats => {
                let counts = self.counts();
                Ok(Reply {
                    bytes: self.abi.stat(&counts),
                    ..done
                })
            }
            Request::Record => {
                if argument.iter().any(|byte| *byte != 0) {
                    self.start()?;
                } else {
                    self.stop();
                }
                Ok(done)
            }
            Request::Enable => {
                let wanted = self.abi.probe_request(argument).ok_or_else(short)?;
                self.enable(&wanted).map(|()| done)
            }
            Request::Disable => {
                let wanted = self.abi.probe_request(argument).ok_or_else(short)?;
                self.disable(&wanted).map(|()| done)
            }
            Request::Resolve => {
                let (pid, address) = abi::resolve_request(argument).ok_or_else(short)?;
                let found = self.guest.resolve(pid, address)?;
                let mut bytes = argument.to_vec();
                abi::set_resolved(&mut bytes, found.start, found.offset, found.length);
                Ok(Reply {
                    bytes,
                    descriptor: Some(found.file),
                    remark: found.incomplete,
                    ..done
                })
            }
        }
    }

    fn list(&self, argument: &[u8], size: u64) -> Reply {
        let (mut bytes, needed) = (argument.to_vec(), self.table.list_bytes());
        let partial = (size != 0 && size < needed).then_some(Errno::Enospc);
        if partial.is_none() {
            abi::set_list_size(&mut bytes, needed);
        }
        bytes.extend(self.table.list(self.mode, size));
        Reply {
            partial,
            bytes,
            ..Reply::default()
        }
    }

    fn arguments(&self, argument: &[u8], probe: u32, size: u64) -> Result<Reply, Refused> {
        let listed = known(&self.table, probe, Errno::Einval)?;
        let record = abi::ARGUMENT_INFO_SIZE as u64;
        let types = listed.types();
        let (told, fitting) = match size {
            // All arguments count, including those without known types.
            0 if types.is_empty() => (0, 0),
            0 => (usize::from(listed.argument_count(self.mode)), 0),
            _ => (
                types.len(),
                usize::try_from(size / record).unwrap_or(usize::MAX),
            ),
        };
        let partial = (size != 0 && fitting < types.len()).then_some(Errno::Enospc);
        let mut bytes = argument.to_vec();
        if partial.is_none() {
            abi::set_arguments_size(&mut bytes, told as u64 * record);
        }
        for (number, name) in (0..).zip(types.iter().take(fitting)) {
            bytes.extend_from_slice(&abi::argument_info(probe, number, name));
        }
        Ok(Reply {
            partial,
            bytes,
            ..Reply::default()
        })
    }

    /// Returns the counts of this session; exact while the guest is paused.
    pub fn counts(&mut self) -> Counts {
        self.gather();
        let mut counts = Counts {
            read: self.read,
            dropped: self.queues.dropped() + self.past.dropped,
            skipped: self.past.skipped,
            // A hit is handled outside the guest, so it cannot hit a probe itself.
            recursive: 0,
        };
        if let Some(tracer) = &self.tracer {
            counts.dropped += tracer.stats().probes.dropped;
            counts.skipped += tracer.skipped_ticks();
        }
        counts
    }

    fn enable(&mut self, wanted: &ProbeRequest) -> Result<(), Refused> {
        check_filter(&wanted.filter)?;
        let listed = known(&self.table, wanted.probe, Errno::Enoent)?;
        let has_it = |enabled: &Enabled| enabled.probe == wanted.probe;
        if self.enabled.iter().any(has_it) {
            let why = format!("{}: this session has it already", listed.full_name());
            return Err(Refused::new(Errno::Eexist, why));
        }
        let period = match &listed.source {
            Source::Timer { .. } => self.period(wanted.pace)?,
            _ => Duration::ZERO,
        };
        // A trial shows at once if the probe can be armed. Recording begins at the next start.
        let size = RingSize { slots: 1, words: 4 };
        let mut trial = self.engine.session(size).map_err(no_rings)?;
        if let Some(probe) = probes(&self.engine, listed, period).first() {
            trial
                .enable(probe, Filter::default(), Capture::default())
                .map_err(|error| cannot_arm(&error))?;
        }
        self.enabled.push(Enabled {
            probe: wanted.probe,
            flags: wanted.flags & listed.flags(),
            filter: wanted.filter,
            period,
            numbers: Vec::new(),
            disabled: false,
        });
        Ok(())
    }

    fn disable(&mut self, wanted: &ProbeRequest) -> Result<(), Refused> {
        check_filter(&wanted.filter)?;
        known(&self.table, wanted.probe, Errno::Enoent)?;
        let of_probe = |enabled: &&mut Enabled| enabled.probe == wanted.probe;
        if let Some(enabled) = self.enabled.iter_mut().find(of_probe) {
            enabled.disabled = true;
            for number in enabled.numbers.drain(..) {
                if let Some(tracer) = &mut self.tracer {
                    tracer.disable(number);
                }
            }
        }
        if self.mode == Mode::Normal {
            self.enabled.retain(|enabled| !enabled.disabled);
        }
        Ok(())
    }

    fn start(&mut self) -> Result<(), Refused> {
        if self.recording {
            return Err(Refused::new(Errno::Ebusy, "recording already"));
        }
        if self.enabled.is_empty() {
            return Err(Refused::new(Errno::Enoent, "no probe is enabled"));
        }
        if self.owners.len() > MOST_NUMBERS {
            self.retire_tracer();
        }
        let mut tracer = match self.tracer.take() {
            Some(tracer) => tracer,
            None => {
                let size = RingSize::for_capture(ENGINE_SLOTS, &largest_capture());
                let mut tracer = self.engine.session(size).map_err(no_rings)?;
                tracer.set_label("dt(4)");
                tracer
            }
        };
        // The guest is paused, so that all probes begin at the same moment.
        let paused = self.engine.machine().pause();
        let started = self.start_all(&mut tracer);
        drop(paused);
        self.tracer = Some(tracer);
        if let Err(refused) = started {
            self.stop();
            return Err(refused);
        }
        self.recording = true;
        Ok(())
    }

    /// Enables all probes. On an error the caller disables those already enabled.
    fn start_all(&mut self, tracer: &mut engine::Session) -> Result<(), Refused> {
        for enabled in self.enabled.iter_mut().filter(|e| !e.disabled) {
            let listed = known(&self.table, enabled.probe, Errno::Enoent)?;
            let capture = capture(listed, enabled.flags, self.abi);
            let filter = filter(&enabled.filter, self.mode);
            for probe in probes(&self.engine, listed, enabled.period) {
                let call = match &probe.target {
                    Target::SystemCall { number, .. } => *number,
                    _ => 0,
                };
                let number = tracer
                    .enable(&probe, filter.clone(), capture.clone())
                    .map_err(|error| cannot_arm(&error))?;
                self.owners.push((enabled.probe, call));
                enabled.numbers.push(number);
            }
        }
        Ok(())
    }

    fn stop(&mut self) {
        self.recording = false;
        for enabled in &mut self.enabled {
            enabled.numbers.clear();
        }
        if let Some(tracer) = &mut self.tracer {
            tracer.disable_all();
        }
    }

    /// Gathers the records of the engine's session, and ends it.
    fn retire_tracer(&mut self) {
        self.gather();
        if let Some(tracer) = self.tracer.take() {
            self.past.dropped += tracer.stats().probes.dropped;
            self.past.skipped += tracer.skipped_ticks();
        }
        self.owners.clear();
    }

    /// Reads events: at least one, and at most as many as begin within `bytes` bytes. While there
    /// is none, `wait` is called repeatedly, with the waiter for events if any are enabled. It
    /// waits for a while, or ends the read with an error. The last event is cut off at `bytes`.
    ///
    /// # Errors
    /// `EMSGSIZE` for 0 bytes; the errors of `wait`.
    pub fn read(
        &mut self,
        bytes: u64,
        wait: &mut dyn FnMut(Option<&engine::Waiter>) -> Result<(), Refused>,
    ) -> Result<Vec<u8>, Refused> {
        if bytes == 0 {
            return Err(Refused::new(Errno::Emsgsize, "a read of no bytes"));
        }
        let most = bytes.div_ceil(self.abi.event_size() as u64);
        let most = usize::try_from(most.min(MOST_EVENTS)).unwrap_or(1);
        let waiter = self.tracer.as_ref().map(engine::Session::waiter);
        loop {
            self.gather();
            if self.queues.waiting() > 0 {
                break;
            }
            wait(waiter.as_ref())?;
        }
        let events = match self.mode {
            Mode::Strict => self.queues.take_by_cpu(most),
            Mode::Normal => self.queues.take_by_time(most),
        };
        self.read += events.len() as u64;
        let mut taken = events.concat();
        taken.truncate(usize::try_from(bytes).unwrap_or(usize::MAX));
        Ok(taken)
    }

    /// Moves the engine's records into the queues.
    fn gather(&mut self) {
        let Some(tracer) = &mut self.tracer else {
            return;
        };
        let (table, owners, queues) = (&self.table, &self.owners, &mut self.queues);
        let maker = Maker {
            engine: &self.engine,
            threads: self.threads,
            clock: self.clock,
            offset: self.mode.thread_offset(),
        };
        let abi = self.abi;
        tracer.drain(|event| {
            let owner = usize::try_from(event.probe).ok();
            let Some((probe, call)) = owner.and_then(|number| owners.get(number)) else {
                return;
            };
            let Some(listed) = table.get(*probe) else {
                return;
            };
            let (vcpu, tsc) = (usize::from(event.vcpu), event.tsc);
            if let Some(fields) = maker.fields(*probe, listed, *call, event) {
                queues.put(vcpu, tsc, || abi.event(&fields));
            }
        });
    }

    fn period(&self, pace: TimerRate) -> Result<Duration, Refused> {
        match pace {
            TimerRate::Period(period) if (SHORTEST_PERIOD..=LONGEST_PERIOD).contains(&period) => {
                Ok(Duration::from_nanos(period))
            }
            TimerRate::Period(period) => Err(Refused::new(
                Errno::Einval,
                format!("a period of {period} ns; give {SHORTEST_PERIOD} to {LONGEST_PERIOD}"),
            )),
            TimerRate::Rate(rate) if (1..=self.mode.fastest_rate()).contains(&rate) => {
                Ok(Duration::from_secs(1) / rate)
            }
            TimerRate::Rate(rate) => Err(Refused::new(
                Errno::Eopnotsupp,
                format!(
                    "a rate of {rate} Hz; give 1 to {}",
                    self.mode.fastest_rate()
                ),
            )),
        }
    }
}

/// Returns the probe with a number. Requests differ in the error if there is none.
fn known(table: &Table, probe: u32, errno: Errno) -> Result<&Listed, Refused> {
    table.get(probe).ok_or_else(|| {
        let most = table.len();
        Refused::new(errno, format!("no probe {probe}: they are 1 to {most}"))
    })
}

/// Returns the engine's probes for a listed probe.
fn probes(engine: &Engine, listed: &Listed, period: Duration) -> Vec<Probe> {
    let mut probes = listed.probes(period);
    for probe in &mut probes {
        if let Target::Tracepoint(text) = &mut probe.target {
            keep_what_leads_to_the_call(text, engine.machine(), engine.view());
        }
    }
    probes
}

fn no_rings(error: probes::engine::SessionError) -> Refused {
    Refused::new(Errno::Enomem, error.to_string())
}

fn cannot_arm(error: &engine::EnableError) -> Refused {
    let errno = match error {
        engine::EnableError::Timers { .. } => Errno::Enomem,
        _ => Errno::Einval,
    };
    Refused::new(errno, error.to_string())
}

#[cfg(test)]
mod tests;

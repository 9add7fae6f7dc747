//! One open of the device: its requests, and the events it reads.
//!
//! The caller hands over requests one at a time and gives the answers to its client. A session that is dropped takes its probes with
//! it. Requests keep OpenBSD's order of checks, which decides the error where several would fit.

mod events;
mod filter;

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use super::abi::{self, Abi, Counts, ProbeRequest, TimerRate};
use super::codes::Request;
use super::device::{Guest, OpenOptions};
use super::probes::{Listed, Source, Table};
use super::queue::Queues;
use super::tasks::Threads;
use super::{Errno, Mode, Refused};
use crate::clock::Clock;
use crate::engine::{self, Capture, Engine, Filter, RingSize};
use crate::probe::{Probe, Target};
use crate::provider::tracepoint::keep_what_leads_to_the_call;
use events::{Maker, capture, largest_capture};
use filter::{check_filter, filter};

/// Shortest period of a timer, and the longest: 2^32 - 1 seconds.
const SHORTEST_PERIOD: u64 = 200_000;
const LONGEST_PERIOD: u64 = u32::MAX as u64 * 1_000_000_000;
/// Most events of one answer.
const MOST_EVENTS: u64 = 4096;
/// Slots of the engine's rings, from which events go on to the session's queues.
const ENGINE_SLOTS: usize = 4096;
/// Numbers that an engine's session has given to probes, after which the next start makes a new one.
const MOST_NUMBERS: usize = 1 << 16;

/// An answer.
#[derive(Debug, Default)]
pub struct Reply {
    /// An error that comes with bytes all the same: `ENOSPC`, with the records that fit.
    pub partial: Option<Errno>,
    /// The argument as it comes back, and behind it the records that it points to.
    pub bytes: Vec<u8>,
    /// A file for the client.
    pub descriptor: Option<OwnedFd>,
    /// A sentence for who wants to know more.
    pub remark: Option<String>,
}

/// A probe that the session has.
#[derive(Debug)]
struct Enabled {
    probe: u32,
    /// Those of the client's that the provider honours.
    flags: u64,
    filter: abi::Filter,
    period: Duration,
    /// The engine's numbers of its probes, while it records.
    numbers: Vec<u32>,
    /// Is silent, and kept because OpenBSD does: in strict mode.
    disabled: bool,
}

/// An open of the device.
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
    /// By the engine's number: of which probe an event is, and of which system call.
    owners: Vec<(u32, u32)>,
    queues: Queues,
    clock: Clock,
    threads: Threads,
    read: u64,
    /// Counts of earlier sessions of the engine.
    past: Counts,
    /// Counts this session among the device's.
    _open: Arc<()>,
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

    /// The layout of its structures.
    #[must_use]
    pub fn abi(&self) -> Abi {
        self.abi
    }

    /// The probes that it numbers.
    #[must_use]
    pub fn table(&self) -> &Table {
        &self.table
    }

    /// Answers an ioctl: its code, and the argument that goes in.
    ///
    /// # Errors
    /// As OpenBSD; an argument of another size than the code says is `EINVAL`.
    pub fn ioctl(&mut self, code: u32, argument: &[u8]) -> Result<Reply, Refused> {
        let Some(request) = Request::of(code, self.abi) else {
            let why = format!("{code:#010x} is no request of dt in this layout");
            return Err(Refused::new(Errno::Enotty, why));
        };
        if request.is_privileged() && !self.privileged {
            let why = format!("{request:?}: only for root, and for who has started the machine");
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
            // Of all arguments, also of those whose types are not told.
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

    /// The counts of this session; exact while the guest stands still.
    pub fn counts(&mut self) -> Counts {
        self.gather();
        let mut counts = Counts {
            read: self.read,
            dropped: self.queues.dropped() + self.past.dropped,
            skipped: self.past.skipped,
            // A hit from outside cannot hit anything itself.
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
        // Whether it can be armed shows now; it records from the next start on.
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
                self.engine.session(size).map_err(no_rings)?
            }
        };
        // The guest stands still, so that all begin at one moment.
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

    /// What is enabled when this fails is for the caller to undo.
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

    /// Takes what an engine's session has recorded, and ends it.
    fn retire_tracer(&mut self) {
        self.gather();
        if let Some(tracer) = self.tracer.take() {
            self.past.dropped += tracer.stats().probes.dropped;
            self.past.skipped += tracer.skipped_ticks();
        }
        self.owners.clear();
    }

    /// Reads events: at least one, at most as many as `bytes` bytes begin. While there is none, `wait` is called again and again; it
    /// lets some time pass, or ends the wait with an error. The last event is cut where the bytes end.
    ///
    /// # Errors
    /// `EMSGSIZE` for no bytes; what `wait` says.
    pub fn read(
        &mut self,
        bytes: u64,
        wait: &mut dyn FnMut() -> Result<(), Refused>,
    ) -> Result<Vec<u8>, Refused> {
        if bytes == 0 {
            return Err(Refused::new(Errno::Emsgsize, "a read of no bytes"));
        }
        let most = bytes.div_ceil(self.abi.event_size() as u64);
        let most = usize::try_from(most.min(MOST_EVENTS)).unwrap_or(1);
        loop {
            self.gather();
            if self.queues.waiting() > 0 {
                break;
            }
            wait()?;
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

    /// Takes what the engine has recorded into the queues.
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

/// The probe of a number; requests differ in the error where there is none.
fn known(table: &Table, probe: u32, errno: Errno) -> Result<&Listed, Refused> {
    table.get(probe).ok_or_else(|| {
        let most = table.len();
        Refused::new(errno, format!("no probe {probe}: they are 1 to {most}"))
    })
}

/// What the engine is to enable for a probe.
fn probes(engine: &Engine, listed: &Listed, period: Duration) -> Vec<Probe> {
    let mut probes = listed.probes(period);
    for probe in &mut probes {
        if let Target::Tracepoint(text) = &mut probe.target {
            keep_what_leads_to_the_call(text, engine.machine(), engine.view());
        }
    }
    probes
}

fn no_rings(error: crate::engine::SessionError) -> Refused {
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

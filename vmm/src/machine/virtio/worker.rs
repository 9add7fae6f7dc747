//! The thread that serves all virtio devices of a machine.
//!
//! It waits for events and for the devices' deadlines. An event is a notified queue, a backend's
//! request, a backend's descriptor that is readable or writable, or the end of the machine.
//!
//! Each call of a device is bounded, and a device with more to do waits until the others have had
//! their turn. The machine can be paused between calls. During a call, a pause waits for its end.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use devices::virtio::{DeviceHandle, Progress, QueueNotifier};
use event_manager::{EventManager, EventOps, EventSet, Events, MutEventSubscriber, SubscriberOps};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::machine::RunEnd;
use crate::machine::control::Control;

/// The longest single wait for a deadline.
const LONGEST_WAIT: Duration = Duration::from_secs(3600);
/// The interval at which those who wait for a job check whether the thread still exists.
const LOOK_INTERVAL: Duration = Duration::from_millis(100);

/// An event by which a backend wakes the device thread.
pub(super) struct BackendEvent(EventFd);

impl BackendEvent {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self(EventFd::new(EFD_NONBLOCK)?))
    }

    pub(super) fn raise(&self) {
        raise(&self.0);
    }
}

/// The events that wake the device thread for one device.
pub(super) struct DeviceEvents {
    queues: Vec<EventFd>,
    far_end: Arc<BackendEvent>,
    /// The descriptor of a backend that has one: readable when the backend has something, writable
    /// when it has room.
    backend: Option<Arc<OwnedFd>>,
}

impl DeviceEvents {
    pub(super) fn new(
        queues: usize,
        far_end: Arc<BackendEvent>,
        backend: Option<Arc<OwnedFd>>,
    ) -> io::Result<Self> {
        let event = |_| EventFd::new(EFD_NONBLOCK);
        Ok(Self {
            queues: (0..queues).map(event).collect::<Result<_, _>>()?,
            far_end,
            backend,
        })
    }

    /// Returns one event for each queue, in their order.
    pub(super) fn queues(&self) -> &[EventFd] {
        &self.queues
    }
}

impl QueueNotifier for DeviceEvents {
    fn notify(&self, queue: u16) {
        if let Some(event) = self.queues.get(usize::from(queue)) {
            raise(event);
        }
    }
}

fn raise(event: &EventFd) {
    // Fails only if the counter is full. The thread is notified already then.
    let _ = event.write(1);
}

pub(super) struct Served {
    pub(super) handle: DeviceHandle,
    pub(super) events: Arc<DeviceEvents>,
}

/// The thread. Dropping this ends it, and the machine with it: a pause that holds it is over.
pub(crate) struct Worker {
    control: Arc<Control>,
    stop: EventFd,
    thread: Option<JoinHandle<()>>,
}

impl Worker {
    pub(super) fn start(devices: Vec<Served>, control: Arc<Control>) -> io::Result<Self> {
        let other = |error: event_manager::Error| io::Error::other(error.to_string());
        let stop = EventFd::new(EFD_NONBLOCK)?;
        let mut manager = EventManager::<Server>::new().map_err(other)?;
        let server = Server::new(devices, stop.try_clone()?, control.clone());
        let server = manager.add_subscriber(server);
        if let Some(failed) = manager.subscriber_mut(server).map_err(other)?.failed.take() {
            return Err(other(failed));
        }
        let guard = control.clone();
        let thread = std::thread::Builder::new()
            .name("virtio".into())
            .spawn(move || {
                let _ending = Ending(guard.clone());
                if let Err(error) = serve(&mut manager, server) {
                    let message = format!("the thread of the virtio devices: {error}");
                    guard.end(RunEnd::Host { message });
                }
            })?;
        Ok(Self {
            control,
            stop,
            thread: Some(thread),
        })
    }

    /// Calls `work` on the thread and returns its result. Returns `None` if the thread is gone.
    pub(crate) fn on_thread<R: Send + 'static>(
        &self,
        work: impl FnOnce() -> R + Send + 'static,
    ) -> Option<R> {
        let (tell, told) = channel();
        let job = move || {
            // The receiver waits below.
            let _ = tell.send(work());
        };
        self.control.give_device(Box::new(job));
        raise(&self.stop);
        while self.thread.as_ref().is_some_and(|t| !t.is_finished()) {
            if let Ok(result) = told.recv_timeout(LOOK_INTERVAL) {
                return Some(result);
            }
        }
        told.try_recv().ok()
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.control.leave();
        raise(&self.stop);
        if !self.control.device_stands() {
            log::warn!("a disk has not answered; the guest's last writes to it may be lost");
            return;
        }
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            log::error!("the thread of the virtio devices panicked");
        }
    }
}

/// A guard that ends the run if the thread panics: a guest must not go on with unresponsive
/// devices.
struct Ending(Arc<Control>);

impl Drop for Ending {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let message = "the thread of the virtio devices panicked".into();
            self.0.end(RunEnd::Host { message });
        }
    }
}

fn serve(
    manager: &mut EventManager<Server>,
    server: event_manager::SubscriberId,
) -> Result<(), event_manager::Error> {
    let mut wait = 0;
    loop {
        manager.run_with_timeout(wait)?;
        let subscriber = manager.subscriber_mut(server)?;
        if subscriber.stopped || !subscriber.work() {
            return Ok(());
        }
        wait = subscriber.wait();
        for wanted in subscriber.changed_wants() {
            manager.event_ops(server)?.modify(wanted)?;
        }
    }
}

/// The source of an event.
#[derive(Debug, Clone, Copy)]
enum Source {
    Stop,
    Queue { device: usize, queue: u16 },
    FarEnd { device: usize },
    Backend { device: usize },
}

/// A device and its pending work.
struct Turn {
    device: Served,
    queues: Vec<bool>,
    far_end: bool,
    deadline: Option<Instant>,
    /// Whether an event is wanted when the backend has room.
    wants_room: bool,
    /// Whether that is what the event manager knows.
    known_wants_room: bool,
}

struct Server {
    turns: Vec<Turn>,
    /// The sources, indexed by the number in an event.
    sources: Vec<Source>,
    /// Raised for a job, and at the end.
    stop: EventFd,
    stopped: bool,
    control: Arc<Control>,
    /// The error of waiting for events.
    failed: Option<event_manager::Error>,
}

impl Server {
    fn new(devices: Vec<Served>, stop: EventFd, control: Arc<Control>) -> Self {
        let turn = |device: Served| Turn {
            queues: vec![false; device.events.queues.len()],
            far_end: false,
            deadline: None,
            wants_room: false,
            known_wants_room: false,
            device,
        };
        Self {
            turns: devices.into_iter().map(turn).collect(),
            sources: Vec::new(),
            stop,
            stopped: false,
            control,
            failed: None,
        }
    }

    fn event(&self, source: Source) -> Option<&EventFd> {
        match source {
            Source::Stop => Some(&self.stop),
            Source::Queue { device, queue } => {
                let events = &self.turns.get(device)?.device.events;
                events.queues.get(usize::from(queue))
            }
            Source::FarEnd { device } => Some(&self.turns.get(device)?.device.events.far_end.0),
            Source::Backend { .. } => None,
        }
    }

    /// Gives each device one turn. Returns `false` if the machine ends.
    fn work(&mut self) -> bool {
        for turn in &mut self.turns {
            if !turn.take(&self.control) {
                return false;
            }
        }
        true
    }

    /// Returns the events of backends that are wanted differently now.
    fn changed_wants(&mut self) -> Vec<Events> {
        let mut changed = Vec::new();
        for (data, source) in (0..).zip(&self.sources) {
            if let Source::Backend { device } = *source
                && let Some(turn) = self.turns.get_mut(device)
                && turn.wants_room != turn.known_wants_room
            {
                turn.known_wants_room = turn.wants_room;
                changed.extend(turn.backend_events(data));
            }
        }
        changed
    }

    /// Returns the milliseconds until there is work without an event. -1 means never.
    fn wait(&self) -> i32 {
        if self.turns.iter().any(Turn::is_due) {
            return 0;
        }
        let Some(next) = self.turns.iter().filter_map(|turn| turn.deadline).min() else {
            return -1;
        };
        let left = next.saturating_duration_since(Instant::now());
        // Rounded up, so that the wait does not end before the deadline.
        let milliseconds = left.min(LONGEST_WAIT).as_micros().div_ceil(1000);
        i32::try_from(milliseconds).unwrap_or(i32::MAX)
    }
}

impl Turn {
    fn is_due(&self) -> bool {
        self.far_end || self.queues.contains(&true)
    }

    /// Returns the wanted events of the backend's descriptor, if there is one.
    ///
    /// Each is reported once, when it begins to hold. A device reads until there is no more. While
    /// its guest has no room, frames that wait in the descriptor do not keep this thread awake.
    fn backend_events(&self, data: u32) -> Option<Events> {
        let descriptor = self.device.events.backend.as_ref()?;
        let mut wanted = EventSet::IN | EventSet::EDGE_TRIGGERED;
        if self.known_wants_room {
            wanted |= EventSet::OUT;
        }
        Some(Events::with_data_raw(descriptor.as_raw_fd(), data, wanted))
    }

    fn take(&mut self, control: &Control) -> bool {
        let handle = &self.device.handle;
        for (queue, due) in (0..).zip(&mut self.queues) {
            if *due {
                let Some(_work) = control.begin_device_work() else {
                    return false;
                };
                *due = handle.process(queue, Instant::now()) == Progress::More;
                self.deadline = handle.deadline();
            }
        }
        let now = Instant::now();
        if self.far_end || self.deadline.is_some_and(|deadline| deadline <= now) {
            let Some(_work) = control.begin_device_work() else {
                return false;
            };
            self.far_end = handle.poll(now) == Progress::More;
            self.deadline = handle.deadline();
        }
        self.wants_room = self.device.events.backend.is_some() && handle.wants_room();
        true
    }
}

impl MutEventSubscriber for Server {
    fn process(&mut self, events: Events, _ops: &mut EventOps<'_>) {
        let source = usize::try_from(events.data()).ok();
        let Some(&source) = source.and_then(|index| self.sources.get(index)) else {
            return;
        };
        // The count does not matter.
        let _ = self.event(source).map(EventFd::read);
        match source {
            Source::Stop => {
                self.control.do_device_jobs();
                self.stopped = self.control.is_leaving();
            }
            Source::Queue { device, queue } => {
                let turn = self.turns.get_mut(device);
                if let Some(due) = turn.and_then(|turn| turn.queues.get_mut(usize::from(queue))) {
                    *due = true;
                }
            }
            Source::FarEnd { device } | Source::Backend { device } => {
                if let Some(turn) = self.turns.get_mut(device) {
                    turn.far_end = true;
                }
            }
        }
    }

    fn init(&mut self, ops: &mut EventOps<'_>) {
        let mut sources = vec![Source::Stop];
        for (device, turn) in self.turns.iter().enumerate() {
            sources.push(Source::FarEnd { device });
            sources.push(Source::Backend { device });
            let queues = (0..).zip(&turn.queues);
            sources.extend(queues.map(|(queue, _)| Source::Queue { device, queue }));
        }
        for (data, source) in (0..).zip(&sources) {
            let wanted = match *source {
                Source::Backend { device } => {
                    let turn = self.turns.get(device);
                    turn.and_then(|turn| turn.backend_events(data))
                }
                source => self
                    .event(source)
                    .map(|event| Events::with_data_raw(event.as_raw_fd(), data, EventSet::IN)),
            };
            let Some(wanted) = wanted else {
                continue;
            };
            if let Err(error) = ops.add(wanted) {
                self.failed = Some(error);
                return;
            }
        }
        self.sources = sources;
    }
}

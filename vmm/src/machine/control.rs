//! Starting, pausing and ending all vCPUs of a machine.
//!
//! Every vCPU thread is *running* (in or around KVM_RUN), *parked* (outside KVM_RUN, with complete
//! state) or *gone*. [`Control::pause`] kicks the running ones out of KVM_RUN and waits until all
//! have parked. Pauses nest, from any thread but a vCPU's own. A vCPU thread that needs the others
//! parked uses [`Control::stop_others`].
//!
//! The thread of the virtio devices is held with the vCPUs. It touches guest memory only between
//! [`Control::begin_device_work`] and the drop of its result. A pause waits for that drop and lets
//! no new work begin. [`Control::stop_others`] does not hold it, because it does not execute the
//! guest's code.
//!
//! Locking: one mutex guards all state here. It is never held while KVM_RUN or a [`Job`] runs.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::RunEnd;
use crate::vcpu::Vcpu;
use crate::vcpu::kick::Kick;

/// The time that an unresponsive disk is waited for after the end of the run.
const DISK_PATIENCE: Duration = Duration::from_secs(2);

/// Work for a parked vCPU, done on its own thread.
pub(crate) type Job = Box<dyn FnOnce(&mut Vcpu) + Send>;

/// Work for the device thread, between two calls of devices.
pub(crate) type DeviceJob = Box<dyn FnOnce() + Send>;

/// A call at the end of the run. It must not wait.
pub(crate) type AtEnd = Box<dyn FnOnce() + Send>;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Standing {
    Running,
    Parked,
    Gone,
}

struct Slot {
    standing: Standing,
    kick: Option<Kick>,
    /// The jobs in the order of their requests. Several threads may pause the machine at once.
    jobs: VecDeque<Job>,
}

struct State {
    slots: Vec<Slot>,
    /// The number of pauses that are not yet released.
    pauses: usize,
    /// The vCPU that has stopped the others, if any.
    exclusive: Option<usize>,
    /// Whether the device thread may be touching guest memory.
    device_works: bool,
    /// The device jobs in the order of their requests.
    device_jobs: VecDeque<DeviceJob>,
    /// The reason for the end of the run. The first one counts.
    end: Option<RunEnd>,
    /// The calls to make at that end, by their numbers.
    at_end: BTreeMap<u64, AtEnd>,
    /// Whether the threads are to leave.
    leave: bool,
}

/// The control of a machine, shared by its owner and its vCPU threads.
pub(crate) struct Control {
    state: Mutex<State>,
    changed: Condvar,
}

/// The continuation of a vCPU thread after it was parked.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum ParkOutcome {
    Run,
    Leave,
}

impl Control {
    pub(crate) fn new(vcpus: usize) -> Self {
        let slot = || Slot {
            standing: Standing::Running,
            kick: None,
            jobs: VecDeque::new(),
        };
        Self {
            state: Mutex::new(State {
                slots: (0..vcpus).map(|_| slot()).collect(),
                pauses: 0,
                exclusive: None,
                device_works: false,
                device_jobs: VecDeque::new(),
                end: None,
                at_end: BTreeMap::new(),
                leave: false,
            }),
            changed: Condvar::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A panicking vCPU thread must not take the control from the others.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, guard: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.changed
            .wait(guard)
            .unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn vcpus(&self) -> usize {
        self.lock().slots.len()
    }

    /// Registers a vCPU thread, which calls this before its first KVM_RUN.
    pub(crate) fn register(&self, vcpu: usize, kick: Kick) {
        let mut state = self.lock();
        state.slots[vcpu].kick = Some(kick);
        // Requests from before the registration could not kick.
        if state.must_park(vcpu) || state.leave {
            state.slots[vcpu].kick_now();
        }
    }

    /// Unregisters a vCPU thread, which calls this when it leaves for good.
    pub(crate) fn gone(&self, vcpu: usize) {
        let mut state = self.lock();
        state.slots[vcpu].standing = Standing::Gone;
        // The kick points into the vCPU's mapping, which ends with the thread.
        state.slots[vcpu].kick = None;
        state.slots[vcpu].jobs.clear();
        self.changed.notify_all();
    }

    /// Parks a vCPU thread whose KVM_RUN was interrupted for as long as that is requested. It does
    /// its jobs meanwhile.
    pub(crate) fn park(&self, vcpu: &mut Vcpu) -> ParkOutcome {
        let index = vcpu.index();
        let mut state = self.lock();
        loop {
            if let Some(job) = state.slots[index].jobs.pop_front() {
                drop(state);
                job(vcpu);
                state = self.lock();
                self.changed.notify_all();
                continue;
            }
            if state.leave {
                return ParkOutcome::Leave;
            }
            if !state.must_park(index) {
                state.slots[index].standing = Standing::Running;
                // Under the lock: a later kick sets it again.
                vcpu.clear_kick();
                return ParkOutcome::Run;
            }
            if state.slots[index].standing != Standing::Parked {
                state.slots[index].standing = Standing::Parked;
                self.changed.notify_all();
            }
            state = self.wait(state);
        }
    }

    /// Stops all other vCPUs on behalf of `vcpu`'s own thread. [`Self::resume_others`] must follow.
    ///
    /// While the caller waits for its turn, it counts as parked.
    pub(crate) fn stop_others(&self, vcpu: &mut Vcpu) -> ParkOutcome {
        let index = vcpu.index();
        loop {
            let mut state = self.lock();
            if !state.must_park(index) && !state.leave {
                state.exclusive = Some(index);
                state.kick_running(Some(index));
                self.changed.notify_all();
                while state.others_run(index) {
                    state = self.wait(state);
                }
                return ParkOutcome::Run;
            }
            drop(state);
            if self.park(vcpu) == ParkOutcome::Leave {
                return ParkOutcome::Leave;
            }
        }
    }

    /// Ends [`Self::stop_others`].
    pub(crate) fn resume_others(&self) {
        self.lock().exclusive = None;
        self.changed.notify_all();
    }

    /// Makes a vCPU thread wait until it is `ready` or is to be parked.
    ///
    /// Returns whether it is ready. [`Self::wake`] makes it check again.
    pub(crate) fn wait_until(&self, vcpu: usize, ready: impl Fn() -> bool) -> bool {
        let mut state = self.lock();
        loop {
            if state.must_park(vcpu) || state.leave {
                return false;
            }
            if ready() {
                return true;
            }
            state = self.wait(state);
        }
    }

    /// Makes vCPU threads check again whether they are [ready](Self::wait_until).
    pub(crate) fn wake(&self) {
        // Under the lock no thread is between its check and its wait.
        drop(self.lock());
        self.changed.notify_all();
    }

    /// Begins a pause before the vCPU threads start. They park before their first instruction.
    pub(crate) fn hold(self: &Arc<Self>) -> Paused {
        self.lock().pauses += 1;
        Paused {
            control: self.clone(),
        }
    }

    /// Begins a pause from a vCPU's own thread. All vCPUs park as soon as they can, this one after
    /// its current work.
    pub(crate) fn hold_all(self: &Arc<Self>) -> Paused {
        let mut state = self.lock();
        state.pauses += 1;
        state.kick_running(None);
        drop(state);
        self.changed.notify_all();
        Paused {
            control: self.clone(),
        }
    }

    /// Pauses all vCPUs and the device thread, and returns when each is parked.
    ///
    /// The device thread must not call it. After the end of a run, an unresponsive disk is waited
    /// for only for [`DISK_PATIENCE`].
    pub(crate) fn pause(self: &Arc<Self>) -> Paused {
        let mut state = self.lock();
        state.pauses += 1;
        state.kick_running(None);
        self.changed.notify_all();
        while state.slots.iter().any(|s| s.standing == Standing::Running) {
            state = self.wait(state);
        }
        self.wait_for_device(state);
        Paused {
            control: self.clone(),
        }
    }

    /// Waits until the device thread is between two calls. Returns whether it is.
    ///
    /// An unresponsive disk is waited for as long as the guest needs it, and [`DISK_PATIENCE`]
    /// after the end of the run.
    pub(crate) fn device_stands(&self) -> bool {
        self.wait_for_device(self.lock())
    }

    fn wait_for_device(&self, mut state: MutexGuard<'_, State>) -> bool {
        let mut until = None;
        while state.device_works {
            if state.end.is_none() && !state.leave {
                state = self.wait(state);
                continue;
            }
            let until = *until.get_or_insert_with(|| Instant::now() + DISK_PATIENCE);
            let Some(left) = until.checked_duration_since(Instant::now()) else {
                return false;
            };
            let waited = self.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }

    /// Waits until the machine may run, and keeps it from being paused until the result is dropped.
    ///
    /// Returns `None` if the threads are to leave. The end of a run does not hold devices: the
    /// guest's last requests are still carried out.
    pub(crate) fn begin_device_work(&self) -> Option<DeviceWork<'_>> {
        let mut state = self.lock();
        while state.pauses > 0 && !state.leave {
            if let Some(job) = state.device_jobs.pop_front() {
                drop(state);
                job();
                state = self.lock();
                continue;
            }
            state = self.wait(state);
        }
        if state.leave {
            return None;
        }
        state.device_works = true;
        Some(DeviceWork { control: self })
    }

    /// Queues work for the device thread, which does it also while the machine is paused.
    ///
    /// It is done at once if the thread waits for the end of the pause, else at its call of
    /// [`Self::do_device_jobs`].
    pub(crate) fn give_device(&self, job: DeviceJob) {
        self.lock().device_jobs.push_back(job);
        self.changed.notify_all();
    }

    /// Does the queued work of the device thread, which calls this between two calls of devices.
    pub(crate) fn do_device_jobs(&self) {
        loop {
            let Some(job) = self.lock().device_jobs.pop_front() else {
                return;
            };
            job();
        }
    }

    pub(crate) fn is_leaving(&self) -> bool {
        self.lock().leave
    }

    /// Makes a running vCPU leave KVM_RUN once, without parking it.
    pub(crate) fn interrupt(&self, vcpu: usize) {
        let mut state = self.lock();
        if let Some(slot) = state.slots.get_mut(vcpu)
            && slot.standing == Standing::Running
        {
            slot.kick_now();
        }
    }

    /// Makes every running vCPU leave KVM_RUN once, without parking it.
    pub(crate) fn interrupt_all(&self) {
        self.lock().kick_running(None);
    }

    /// Ends the run. All vCPUs park. The first reason counts.
    pub(crate) fn end(&self, reason: RunEnd) {
        let mut state = self.lock();
        state.end.get_or_insert(reason);
        state.kick_running(None);
        self.changed.notify_all();
        let at_end = std::mem::take(&mut state.at_end);
        drop(state);
        at_end.into_values().for_each(|call| call());
    }

    /// Calls `at_end` when the run ends, or at once if it has ended. Returns the number by which
    /// [`unwatch_end`](Self::unwatch_end) prevents that.
    pub(crate) fn watch_end(&self, at_end: AtEnd) -> u64 {
        let mut state = self.lock();
        if state.end.is_some() {
            drop(state);
            at_end();
            return 0;
        }
        let number = state
            .at_end
            .last_key_value()
            .map_or(1, |(last, _)| last + 1);
        state.at_end.insert(number, at_end);
        number
    }

    /// Drops the call of this number, if it was not made.
    pub(crate) fn unwatch_end(&self, number: u64) {
        let call = self.lock().at_end.remove(&number);
        // Dropped without the lock: it may own anything.
        drop(call);
    }

    /// Returns the reason for the end of the run, if it has ended.
    pub(crate) fn ended(&self) -> Option<RunEnd> {
        self.lock().end.clone()
    }

    /// Waits until the run ends, at most until `deadline`.
    pub(crate) fn wait_end(&self, deadline: Option<Instant>) -> Option<RunEnd> {
        let mut state = self.lock();
        while state.end.is_none() {
            state = match deadline {
                None => self.wait(state),
                Some(at) => {
                    let left = at.checked_duration_since(Instant::now())?;
                    let waited = self.changed.wait_timeout(state, left);
                    waited.unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
        state.end.clone()
    }

    pub(crate) fn leave(&self) {
        let mut state = self.lock();
        state.leave = true;
        state.kick_running(None);
        self.changed.notify_all();
    }
}

impl State {
    fn must_park(&self, vcpu: usize) -> bool {
        self.pauses > 0 || self.end.is_some() || self.exclusive.is_some_and(|e| e != vcpu)
    }

    fn others_run(&self, vcpu: usize) -> bool {
        self.slots
            .iter()
            .enumerate()
            .any(|(i, s)| i != vcpu && s.standing == Standing::Running)
    }

    fn kick_running(&mut self, except: Option<usize>) {
        for (index, slot) in self.slots.iter_mut().enumerate() {
            if Some(index) != except && slot.standing == Standing::Running {
                slot.kick_now();
            }
        }
    }
}

impl Slot {
    fn kick_now(&mut self) {
        // A thread that has not registered yet checks for pauses when it does.
        if let Some(kick) = &self.kick {
            kick.kick();
        }
    }
}

/// A guard during which the device thread may touch guest memory.
pub(crate) struct DeviceWork<'a> {
    control: &'a Control,
}

impl Drop for DeviceWork<'_> {
    fn drop(&mut self) {
        self.control.lock().device_works = false;
        self.control.changed.notify_all();
    }
}

/// A pause of all vCPUs and the device thread, which lasts until this is dropped.
pub struct Paused {
    control: Arc<Control>,
}

impl fmt::Debug for Paused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Paused").finish_non_exhaustive()
    }
}

impl Paused {
    /// Calls `work` on a parked vCPU's own thread and returns its result. Returns `None` if that
    /// vCPU is gone.
    pub(crate) fn on_vcpu<R: Send + 'static>(
        &self,
        vcpu: usize,
        work: impl FnOnce(&mut Vcpu) -> R + Send + 'static,
    ) -> Option<R> {
        let result = Arc::new(Mutex::new(None));
        let place = result.clone();
        let mut state = self.control.lock();
        if state.slots.get(vcpu)?.standing == Standing::Gone {
            return None;
        }
        state.slots[vcpu].jobs.push_back(Box::new(move |v| {
            let value = work(v);
            *place.lock().unwrap_or_else(PoisonError::into_inner) = Some(value);
        }));
        self.control.changed.notify_all();
        loop {
            state = self.control.wait(state);
            if let Some(value) = result.lock().unwrap_or_else(PoisonError::into_inner).take() {
                return Some(value);
            }
            if state.slots[vcpu].standing == Standing::Gone {
                return None;
            }
        }
    }
}

impl Drop for Paused {
    fn drop(&mut self) {
        self.control.lock().pauses -= 1;
        self.control.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::sync::mpsc::channel;

    use super::*;

    /// Long enough for a thread that does not wait to have gone on.
    const MOMENT: Duration = Duration::from_millis(50);
    const LIMIT: Duration = Duration::from_secs(30);

    #[test]
    fn a_pause_waits_for_the_device_thread_and_holds_it() {
        let control = Arc::new(Control::new(0));
        let work = control.begin_device_work().unwrap();
        let (told, paused) = channel();
        let (release, released) = channel::<()>();
        std::thread::scope(|scope| {
            let pauser = control.clone();
            scope.spawn(move || {
                let pause = pauser.pause();
                told.send(()).unwrap();
                released.recv().unwrap();
                drop(pause);
            });
            assert!(paused.recv_timeout(MOMENT).is_err(), "paused during work");
            drop(work);
            paused.recv_timeout(LIMIT).unwrap();

            let (told, begun) = channel();
            let device = control.clone();
            scope.spawn(move || {
                let work = device.begin_device_work();
                told.send(work.is_some()).unwrap();
            });
            assert!(begun.recv_timeout(MOMENT).is_err(), "work during a pause");
            release.send(()).unwrap();
            assert!(begun.recv_timeout(LIMIT).unwrap());
        });
    }

    /// Tests with a disk that never answers, such as one on a file system whose server has gone.
    #[test]
    fn a_disk_that_does_not_answer_holds_up_no_end() {
        let control = Arc::new(Control::new(0));
        let work = control.begin_device_work();
        std::thread::scope(|scope| {
            let pauser = control.clone();
            let (told, paused) = channel();
            scope.spawn(move || {
                let _pause = pauser.pause();
                told.send(()).unwrap();
            });
            assert!(paused.recv_timeout(MOMENT).is_err(), "paused during work");
            control.end(RunEnd::Stopped);
            paused.recv_timeout(LIMIT).unwrap();
        });
        assert!(!control.device_stands());
        drop(work);
        assert!(control.device_stands());
    }

    #[test]
    fn the_end_of_a_run_lets_devices_finish_and_the_end_of_the_machine_does_not() {
        let control = Arc::new(Control::new(0));
        control.end(RunEnd::Stopped);
        assert!(control.begin_device_work().is_some());
        let hold = control.hold();
        control.leave();
        assert!(control.begin_device_work().is_none());
        drop(hold);
        assert!(control.begin_device_work().is_none());
    }
}

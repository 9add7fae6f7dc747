//! The current state of processes and CPUs, and their tracks.

use std::io::{self, Write};
use std::num::NonZeroUsize;

use lru::LruCache;

use super::super::tasks::shown;
use super::super::{IDLE, MAX_TASKS, NO_NAME};
use super::said;
use crate::perfetto::{At, Event, NamedTrack, Note, ThreadTrack, Track, make_room};
use crate::ptrace::record::{STATE_NAMES, sleep_parts};

/// The greatest number of CPUs known at a time.
const MAX_CPUS: NonZeroUsize = NonZeroUsize::new(4096).unwrap();

/// The upper half of a track's identity, which says its kind; the lower half is the number.
const CPUS: u64 = 1;
const CPU: u64 = 1 << 32;
const INTERRUPTS: u64 = 2 << 32;
const PROCESS: u64 = 3 << 32;
const THREAD: u64 = 4 << 32;

/// The current state of the timeline.
#[derive(Debug)]
pub(super) struct Scene {
    tasks: LruCache<u32, Task>,
    cpus: LruCache<u32, Cpu>,
    /// The number of arrows begun.
    flows: u64,
    /// The time before which nothing is written to a track that was forgotten and is known again.
    floor: u64,
}

#[derive(Debug)]
struct Task {
    track: Track,
    name: Option<String>,
    state: State,
    /// The arrow of its wake-up, which ends when it runs.
    flow: Option<u64>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Unknown,
    /// Running on a CPU.
    Running(u32),
    /// Was running on a CPU where another process runs now; its own record is still to come.
    Displaced(u32),
    Ready,
    Asleep,
    /// Has begun to exit, on a CPU where nothing else has run since.
    Exiting(u32),
    Dead,
}

#[derive(Debug)]
struct Cpu {
    track: Track,
    interrupts: Option<Track>,
    /// The process that runs on the CPU.
    running: Option<u32>,
}

impl Default for Scene {
    fn default() -> Self {
        Self {
            tasks: LruCache::sparse(MAX_TASKS),
            cpus: LruCache::sparse(MAX_CPUS),
            flows: 0,
            floor: 0,
        }
    }
}

impl Scene {
    /// Writes the track that is the parent of all CPUs.
    pub(super) fn start(&self, out: &mut dyn Write) -> io::Result<()> {
        let cpus = NamedTrack {
            uuid: CPUS,
            name: "CPUs",
            below: None,
        };
        cpus.describe(out)
    }

    /// Records that the process runs.
    pub(super) fn run(&mut self, pid: u32, cpu: u32, at: &mut At<'_>) -> io::Result<()> {
        self.leave_cpu(pid, at)?;
        self.idle(cpu, at)?;
        let name = self.label(pid);
        let on_cpu = self.cpu(cpu, at.out)?;
        let notes = [("pid", Note::Number(pid.into()))];
        on_cpu.track.begin(at, &said(&name, "sched", &notes))?;
        on_cpu.running = Some(pid);

        let flow_end = self.task(pid, at.out)?.flow.take();
        let notes = [("cpu", Note::Number(cpu.into()))];
        let slice = Event {
            flow_end,
            ..said("Running", "sched", &notes)
        };
        self.enter(pid, State::Running(cpu), &slice, at)
    }

    /// Records that the CPU's process runs there no longer.
    pub(super) fn idle(&mut self, cpu: u32, at: &mut At<'_>) -> io::Result<()> {
        let on_cpu = self.cpu(cpu, at.out)?;
        on_cpu.track.close(at)?;
        let before = on_cpu.running.take();
        if let Some(task) = before.and_then(|pid| self.tasks.peek_mut(&pid)) {
            task.track.close(at)?;
            task.state = match task.state {
                State::Exiting(_) => State::Dead,
                _ => State::Displaced(cpu),
            };
        }
        Ok(())
    }

    /// Records that the process can run: it was preempted or woken.
    pub(super) fn ready(&mut self, pid: u32, cpu: u32, at: &mut At<'_>) -> io::Result<()> {
        let state = self.task(pid, at.out)?.state;
        let here = [State::Running, State::Displaced, State::Exiting].map(|state| state(cpu));
        if here.contains(&state) {
            self.leave_cpu(pid, at)?;
            self.task(pid, at.out)?.flow = None;
            let slice = said("Preempted", "sched", &[]);
            return self.enter(pid, State::Ready, &slice, at);
        }
        // Waking a process that is ready already has no effect.
        let flow = (state != State::Ready).then(|| {
            self.flows += 1;
            self.flows
        });
        let name = format!("wakes {}", self.label(pid));
        let notes = [("pid", Note::Number(pid.into()))];
        let wakes = Event {
            flow,
            ..said(&name, "wakeup", &notes)
        };
        let waker = self.cpu(cpu, at.out)?.running;
        match waker.and_then(|waker| self.tasks.peek_mut(&waker)) {
            Some(waker) => waker.track.instant(at, &wakes)?,
            None => self.cpu(cpu, at.out)?.track.instant(at, &wakes)?,
        }
        if flow.is_none() {
            return Ok(());
        }
        self.task(pid, at.out)?.flow = flow;
        // A process about to wait on another CPU can be woken before it does.
        if matches!(state, State::Running(_)) {
            return Ok(());
        }
        let notes = [("woken on cpu", Note::Number(cpu.into()))];
        let slice = said("Ready", "sched", &notes);
        self.enter(pid, State::Ready, &slice, at)
    }

    /// Records that the process waits.
    pub(super) fn sleep(&mut self, pid: u32, argument: u64, at: &mut At<'_>) -> io::Result<()> {
        self.leave_cpu(pid, at)?;
        let (state, pc) = sleep_parts(argument);
        let name = match STATE_NAMES.get(usize::from(state)) {
            Some(state) => format!("Sleep ({state})"),
            None => format!("Sleep ({state})"),
        };
        let notes = [("pc", Note::Address(pc))];
        self.enter(pid, State::Asleep, &said(&name, "sched", &notes), at)
    }

    /// Records that the process exits, which ends its slices. Until something else runs on its CPU,
    /// it counts as the waker there: of its parent, and of readers of what it wrote.
    pub(super) fn die(&mut self, pid: u32, at: &mut At<'_>) -> io::Result<()> {
        let task = self.task(pid, at.out)?;
        task.track.instant(at, &said("Dead", "sched", &[]))?;
        task.track.close(at)?;
        task.flow = None;
        let State::Running(cpu) = task.state else {
            task.state = State::Dead;
            return Ok(());
        };
        task.state = State::Exiting(cpu);
        self.cpu(cpu, at.out)?.track.close(at)
    }

    /// Writes an instant to the process's track.
    pub(super) fn instant(
        &mut self,
        pid: u32,
        said: &Event<'_>,
        at: &mut At<'_>,
    ) -> io::Result<()> {
        self.task(pid, at.out)?.track.instant(at, said)
    }

    /// Writes an instant to the track of an idle CPU.
    pub(super) fn idle_instant(
        &mut self,
        cpu: u32,
        said: &Event<'_>,
        at: &mut At<'_>,
    ) -> io::Result<()> {
        self.cpu(cpu, at.out)?.track.instant(at, said)
    }

    /// Records a process's new name.
    pub(super) fn name(
        &mut self,
        pid: u32,
        name: Option<String>,
        out: &mut dyn Write,
    ) -> io::Result<()> {
        let task = self.known(pid, || name.clone(), out)?;
        if task.name != name {
            task.name = name;
            describe_task(pid, task.name.as_deref(), out)?;
        }
        Ok(())
    }

    /// Begins an interrupt, while a process runs.
    pub(super) fn interrupt(
        &mut self,
        cpu: u32,
        pid: u32,
        vector: u64,
        at: &mut At<'_>,
    ) -> io::Result<()> {
        let label = self.label(pid);
        let name = format!("interrupt {vector:#x}");
        let notes = [
            ("vector", Note::Number(vector)),
            ("interrupted", Note::Text(&label)),
        ];
        let track = self.interrupts(cpu, at.out)?;
        track.begin(at, &said(&name, "interrupt", &notes))
    }

    /// Ends the innermost interrupt of a CPU.
    pub(super) fn interrupt_end(&mut self, cpu: u32, at: &mut At<'_>) -> io::Result<()> {
        let track = self.interrupts(cpu, at.out)?;
        if track.is_open() {
            return track.end(at, &[]);
        }
        // The interrupt began before the first record.
        track.instant(at, &said("interrupt ends", "interrupt", &[]))
    }

    /// Ends all slices.
    pub(super) fn close(&mut self, at: &mut At<'_>) -> io::Result<()> {
        for (_, task) in &mut self.tasks {
            task.track.close(at)?;
            task.state = State::Unknown;
        }
        for (_, cpu) in &mut self.cpus {
            cpu.running = None;
            for track in [Some(&mut cpu.track), cpu.interrupts.as_mut()] {
                track.map_or(Ok(()), |track| track.close(at))?;
            }
        }
        Ok(())
    }

    /// Ends the process's slices and begins this one.
    fn enter(
        &mut self,
        pid: u32,
        state: State,
        slice: &Event<'_>,
        at: &mut At<'_>,
    ) -> io::Result<()> {
        let task = self.task(pid, at.out)?;
        task.state = state;
        task.track.close(at)?;
        task.track.begin(at, slice)
    }

    /// Clears the CPU on which the process runs, if any.
    fn leave_cpu(&mut self, pid: u32, at: &mut At<'_>) -> io::Result<()> {
        let state = self.tasks.peek(&pid).map(|task| task.state);
        let Some(State::Running(cpu) | State::Exiting(cpu)) = state else {
            return Ok(());
        };
        match self.cpus.peek_mut(&cpu) {
            Some(cpu) if cpu.running == Some(pid) => {
                cpu.running = None;
                cpu.track.close(at)
            }
            _ => Ok(()),
        }
    }

    /// Returns the label of a process beside others.
    fn label(&self, pid: u32) -> String {
        let name = self.tasks.peek(&pid).and_then(|task| task.name.as_deref());
        label(pid, name)
    }

    fn task(&mut self, pid: u32, out: &mut dyn Write) -> io::Result<&mut Task> {
        self.known(pid, || None, out)
    }

    /// Returns the process, adding it with this name if it is not known.
    fn known(
        &mut self,
        pid: u32,
        name: impl FnOnce() -> Option<String>,
        out: &mut dyn Write,
    ) -> io::Result<&mut Task> {
        if let Some(mut task) = make_room(&mut self.tasks, pid) {
            self.floor = self.floor.max(task.track.finish(out)?);
        }
        self.tasks.try_get_or_insert_mut(pid, || {
            let name = name();
            describe_task(pid, name.as_deref(), out)?;
            Ok(Task {
                track: Track::new(THREAD | u64::from(pid), self.floor),
                name,
                state: State::Unknown,
                flow: None,
            })
        })
    }

    fn cpu(&mut self, number: u32, out: &mut dyn Write) -> io::Result<&mut Cpu> {
        if let Some(cpu) = make_room(&mut self.cpus, number) {
            for mut track in [Some(cpu.track), cpu.interrupts].into_iter().flatten() {
                self.floor = self.floor.max(track.finish(out)?);
            }
        }
        self.cpus.try_get_or_insert_mut(number, || {
            let uuid = CPU | u64::from(number);
            let described = NamedTrack {
                uuid,
                name: &format!("CPU {number}"),
                below: Some((CPUS, number.saturating_mul(2))),
            };
            described.describe(out)?;
            Ok(Cpu {
                track: Track::new(uuid, self.floor),
                interrupts: None,
                running: None,
            })
        })
    }

    fn interrupts(&mut self, number: u32, out: &mut dyn Write) -> io::Result<&mut Track> {
        let uuid = INTERRUPTS | u64::from(number);
        if self.cpu(number, out)?.interrupts.is_none() {
            let described = NamedTrack {
                uuid,
                name: &format!("CPU {number} interrupts"),
                below: Some((CPUS, number.saturating_mul(2).saturating_add(1))),
            };
            described.describe(out)?;
        }
        let floor = self.floor;
        let tracks = self.cpu(number, out)?;
        Ok((tracks.interrupts).get_or_insert_with(|| Track::new(uuid, floor)))
    }
}

fn label(pid: u32, name: Option<&str>) -> String {
    if pid == IDLE {
        return "idle".to_owned();
    }
    format!("{} {pid}", name.unwrap_or(NO_NAME))
}

/// Writes the descriptor of a process's track.
fn describe_task(pid: u32, name: Option<&str>, out: &mut dyn Write) -> io::Result<()> {
    let id = u64::from(pid);
    let track = ThreadTrack {
        uuid: THREAD | id,
        process: PROCESS | id,
        id,
        name: shown(name),
        otherwise: &label(pid, name),
    };
    track.describe(out)
}

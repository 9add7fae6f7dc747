//! A timeline for <https://ui.perfetto.dev>: the states of each process, and the processes on each
//! CPU.
//!
//! | Track | Slices | Instants |
//! |---|---|---|
//! | of a process, by name and number | `Running`, `Ready`, `Preempted`, `Sleep (STATE)` | system calls, page faults, other traps, user events, deadlines, its death; the wake-ups that it did |
//! | `CPU N` | what runs there | wake-ups while nothing that is traced runs there |
//! | `CPU N interrupts` | interrupts, by vector | |
//!
//! An idle CPU shows no slice, and events there without a process are on its track.
//!
//! An arrow leads from each wake-up to the next time that the woken process runs. The waker is the
//! process that runs on the record's CPU, even after it has begun to exit. A process that becomes
//! ready on the CPU where it runs was preempted. A slice without a recorded end is closed when
//! another process runs on the CPU, and at the end of the file.

mod scene;

use std::io::{self, Write};

use super::IDLE;
use super::order::Order;
use super::trap::{Trap, system_call};
use crate::perfetto::{self, At, Event, Note};
use crate::ptrace::record::{EventType, Record};
use crate::render::Render;
use scene::Scene;

/// A renderer that writes packets as records arrive. Its times are CLOCK_REALTIME, and by default
/// it knows no other clock.
#[derive(Debug, Default)]
pub struct Perfetto {
    started: bool,
    boottime_offset: Option<i64>,
    order: Order,
    scene: Scene,
}

impl Perfetto {
    /// Writes also by how many nanoseconds CLOCK_REALTIME is ahead of CLOCK_BOOTTIME. A trace of
    /// the host, whose times are CLOCK_BOOTTIME, can then be opened together with this one.
    #[must_use]
    pub fn with_boottime_offset(mut self, realtime_less_boottime: i64) -> Self {
        self.boottime_offset = Some(realtime_less_boottime);
        self
    }

    fn start(&mut self, time: u64, out: &mut dyn Write) -> io::Result<()> {
        self.started = true;
        let boottime = self.boottime_offset.and_then(|offset| {
            let boottime = i128::from(time) - i128::from(offset);
            u64::try_from(boottime).ok()
        });
        perfetto::start(out, time, boottime)?;
        self.scene.start(out)
    }

    fn show(&mut self, record: &Record, at: &mut At<'_>) -> io::Result<()> {
        let (pid, cpu, argument) = (record.pid, record.machine, record.argument);
        let scene = &mut self.scene;
        match EventType::of(record.event) {
            // The tasks of idle CPUs share one number but run on many CPUs.
            Some(EventType::Run | EventType::Edf) if pid == IDLE => scene.idle(cpu, at),
            Some(EventType::Ready | EventType::Sleep | EventType::Dead | EventType::Name)
                if pid == IDLE =>
            {
                Ok(())
            }
            Some(EventType::Run | EventType::Edf) => scene.run(pid, cpu, at),
            Some(EventType::Ready) => scene.ready(pid, cpu, at),
            Some(EventType::Sleep) => scene.sleep(pid, argument, at),
            Some(EventType::Dead) => scene.die(pid, at),
            Some(EventType::Name) => scene.name(pid, super::tasks::name(record), at.out),
            Some(EventType::Ints) => scene.interrupt(cpu, pid, argument, at),
            Some(EventType::Inte) => scene.interrupt_end(cpu, at),
            event => instant(record, event, |said| match pid {
                IDLE => scene.idle_instant(cpu, said, at),
                _ => scene.instant(pid, said, at),
            }),
        }
    }
}

impl Render<Record> for Perfetto {
    fn record(&mut self, record: &Record, out: &mut dyn Write) -> io::Result<()> {
        if !self.started {
            self.start(u64::try_from(record.time).unwrap_or(0), out)?;
        }
        for ready in self.order.push(*record) {
            // A deadline that could be held back no longer lies ahead, and nothing may be shown
            // before the last item on its track.
            let latest = self.order.latest().unwrap_or(ready.time);
            let time = u64::try_from(ready.time.min(latest)).unwrap_or(0);
            self.show(&ready, &mut At { out, time })?;
        }
        Ok(())
    }

    fn finish(&mut self, out: &mut dyn Write) -> io::Result<()> {
        if !self.started {
            self.start(0, out)?;
        }
        let latest = self.order.latest().unwrap_or(0);
        let time = u64::try_from(latest).unwrap_or(0);
        self.scene.close(&mut At { out, time })?;
        for record in self.order.rest() {
            let time = u64::try_from(record.time).unwrap_or(0);
            self.show(&record, &mut At { out, time })?;
        }
        Ok(())
    }
}

fn said<'a>(name: &'a str, category: &'a str, notes: &'a [(&'a str, Note<'a>)]) -> Event<'a> {
    Event {
        name,
        category,
        notes,
        ..Event::default()
    }
}

/// Shows an event without duration.
fn instant(
    record: &Record,
    event: Option<EventType>,
    show: impl FnOnce(&Event<'_>) -> io::Result<()>,
) -> io::Result<()> {
    let argument = record.argument;
    match (event, Trap::of(argument)) {
        (None, _) => {
            let number = Note::Number(record.event.into());
            let notes = [("type", number), ("argument", Note::Address(argument))];
            show(&said("Unknown event", "unknown", &notes))
        }
        (Some(EventType::Trap), Trap::Fault { address, write }) => {
            let address = Note::Address(address);
            let notes = [("address", address), ("write", Note::Flag(write))];
            show(&said("Page fault", "fault", &notes))
        }
        (Some(EventType::Trap), Trap::SystemCall { number }) => {
            let notes = [("number", Note::Number(number))];
            show(&said(&system_call(number), "syscall", &notes))
        }
        (Some(EventType::Trap), Trap::Other { vector }) => {
            show(&said("Trap", "trap", &[("vector", Note::Number(vector))]))
        }
        (Some(EventType::User), _) => {
            let notes = [("value", Note::Address(argument))];
            show(&said("User event", "user", &notes))
        }
        (Some(event), _) => {
            let told = u64::try_from(record.time).unwrap_or(0);
            let notes = [("time", Note::Number(told))];
            show(&said(event.name(), "deadline", &notes))
        }
    }
}

//! A timeline for <https://ui.perfetto.dev>: what each process did, and what each CPU ran.
//!
//! | Track | Slices | Instants |
//! |---|---|---|
//! | of a process, by name and number | `Running`, `Ready`, `Preempted`, `Sleep (STATE)` | system calls, page faults, other traps, user events, deadlines, its death; the wake-ups that it did |
//! | `CPU N` | what runs there | wake-ups while nothing that is traced runs there |
//! | `CPU N interrupts` | interrupts, by vector | |
//!
//! An arrow leads from each wake-up to the next time that the woken process runs. Who wakes is the process that runs on the CPU of the
//! record; who becomes ready on the CPU where it runs has been preempted. Slices are closed where their end is not told: when another process runs on
//! the CPU, and at the end of the file.

mod scene;

use std::io::{self, Write};

use super::order::Order;
use super::trap::{Trap, system_call};
use crate::perfetto::{self, Event, Note};
use crate::ptrace::record::{EventType, Record};
use crate::render::Render;
use scene::Scene;

/// Writes packets as records come.
#[derive(Debug)]
pub struct Perfetto {
    started: bool,
    boottime_offset: Option<i64>,
    order: Order,
    scene: Scene,
}

impl Default for Perfetto {
    fn default() -> Self {
        Self::new()
    }
}

impl Perfetto {
    /// Times are CLOCK_REALTIME, and nothing else is known of clocks.
    #[must_use]
    pub fn new() -> Self {
        Self {
            started: false,
            boottime_offset: None,
            order: Order::default(),
            scene: Scene::new(),
        }
    }

    /// Says besides by how many nanoseconds CLOCK_REALTIME is ahead of CLOCK_BOOTTIME, so that a trace of the host, whose times are
    /// CLOCK_BOOTTIME, can be opened together with this one.
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

    fn show(&mut self, record: &Record, time: u64, out: &mut dyn Write) -> io::Result<()> {
        let (pid, cpu, argument) = (record.pid, record.machine, record.argument);
        let scene = &mut self.scene;
        let Some(event) = EventType::of(record.event) else {
            let notes = [
                ("type", Note::Number(record.event.into())),
                ("argument", Note::Address(argument)),
            ];
            return scene.instant(pid, time, &said("Unknown event", "unknown", &notes), out);
        };
        match event {
            EventType::Run => scene.run(pid, cpu, time, out),
            EventType::Ready => scene.ready(pid, cpu, time, out),
            EventType::Sleep => scene.sleep(pid, argument, time, out),
            EventType::Dead => scene.die(pid, time, out),
            EventType::Ints => scene.interrupt(cpu, pid, argument, time, out),
            EventType::Inte => scene.interrupt_end(cpu, time, out),
            EventType::Name => scene.name(pid, super::tasks::name(record), out),
            EventType::Trap => trap(scene, pid, argument, time, out),
            EventType::User => {
                let notes = [("value", Note::Address(argument))];
                scene.instant(pid, time, &said("User event", "user", &notes), out)
            }
            EventType::Admit
            | EventType::Release
            | EventType::Edf
            | EventType::Yield
            | EventType::Slice
            | EventType::Deadline
            | EventType::Expel => {
                let told = u64::try_from(record.time).unwrap_or(0);
                let notes = [("time", Note::Number(told))];
                scene.instant(pid, time, &said(event.name(), "deadline", &notes), out)
            }
        }
    }
}

impl Render<Record> for Perfetto {
    fn record(&mut self, record: &Record, out: &mut dyn Write) -> io::Result<()> {
        if !self.started {
            self.start(u64::try_from(record.time).unwrap_or(0), out)?;
        }
        for ready in self.order.push(*record) {
            // A deadline that could not be held back any longer lies ahead, and nothing may be shown before what is on its track.
            let latest = self.order.latest().unwrap_or(ready.time);
            let time = u64::try_from(ready.time.min(latest)).unwrap_or(0);
            self.show(&ready, time, out)?;
        }
        Ok(())
    }

    fn finish(&mut self, out: &mut dyn Write) -> io::Result<()> {
        if !self.started {
            self.start(0, out)?;
        }
        let latest = self.order.latest().unwrap_or(0);
        self.scene.close(u64::try_from(latest).unwrap_or(0), out)?;
        for record in self.order.rest() {
            let time = u64::try_from(record.time).unwrap_or(0);
            self.show(&record, time, out)?;
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

fn trap(
    scene: &mut Scene,
    pid: u32,
    argument: u64,
    time: u64,
    out: &mut dyn Write,
) -> io::Result<()> {
    match Trap::of(argument) {
        Trap::Fault { address, write } => {
            let notes = [
                ("address", Note::Address(address)),
                ("write", Note::Flag(write)),
            ];
            scene.instant(pid, time, &said("Page fault", "fault", &notes), out)
        }
        Trap::SystemCall { number } => {
            let notes = [("number", Note::Number(number))];
            let name = system_call(number);
            scene.instant(pid, time, &said(&name, "syscall", &notes), out)
        }
        Trap::Other { vector } => {
            let notes = [("vector", Note::Number(vector))];
            scene.instant(pid, time, &said("Trap", "trap", &notes), out)
        }
    }
}

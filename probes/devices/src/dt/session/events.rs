//! The capture of a hit, and the event made of it.

use std::cell::Cell;
use std::time::Duration;

use probes::clock::Clock;
use probes::engine::{Capture, Engine};
use probes::event::{Event, EventKind, MAX_ARGUMENTS};
use probes::probe::Moment;

use crate::dt::abi::{
    self, Abi, EventFields, FLAG_EXECNAME, FLAG_FUNCARGS, FLAG_KSTACK, FLAG_USTACK, Values,
};
use crate::dt::probes::{Listed, Source};
use crate::dt::tasks::Threads;

/// Converts the engine's events to those of a session.
pub(super) struct Maker<'s> {
    pub(super) engine: &'s Engine,
    pub(super) threads: Threads,
    pub(super) clock: Clock,
    /// The number added to thread numbers.
    pub(super) offset: u32,
}

impl Maker<'_> {
    /// Returns the fields of a captured hit; `None` if the hit does not count.
    pub(super) fn fields(
        &self,
        probe: u32,
        listed: &Listed,
        call: u32,
        event: Event,
    ) -> Option<EventFields> {
        let first = || event.arguments.first().copied().unwrap_or_default();
        let values = match (&listed.source, event.kind) {
            (Source::Alias(alias), _) => {
                // Arguments look one task up for each of its numbers.
                let last = Cell::new(None);
                let thread = |task| match last.get() {
                    Some((known, thread)) if known == task => thread,
                    _ => {
                        let thread = self.threads.read(self.engine, task);
                        last.set(Some((task, thread)));
                        thread
                    }
                };
                arguments_of(alias.arguments(&event, call, self.offset, thread)?)
            }
            (Source::SystemCall { .. }, EventKind::Return) => returned(first()),
            (_, EventKind::Return) => Values::Return {
                values: [first().cast_signed(), 0],
                error: 0,
            },
            _ => arguments_of(event.arguments.iter().map(|word| word.cast_signed())),
        };
        Some(EventFields {
            probe,
            cpu: u32::from(event.vcpu),
            // Without a process, the numbers are the idle task's.
            pid: event.pid.unwrap_or_default(),
            tid: event.tid.unwrap_or_default().saturating_add(self.offset),
            time: Duration::from_nanos(self.clock.unix_ns(event.tsc)),
            comm: event.comm().to_vec(),
            kernel_stack: event.kernel_stack,
            user_stack: event.user_stack,
            values,
        })
    }
}

fn arguments_of(arguments: impl IntoIterator<Item = i64>) -> Values {
    let mut all = [0; abi::MAX_EVENT_ARGUMENTS];
    for (place, argument) in all.iter_mut().zip(arguments) {
        *place = argument;
    }
    Values::Arguments(all)
}

/// Returns the values of a Linux system call's result: -4095 to -1 are errors.
pub(super) fn returned(value: u64) -> Values {
    match i32::try_from(value.cast_signed()) {
        Ok(negative @ -4095..=-1) => Values::Return {
            values: [-1, 0],
            error: -negative,
        },
        _ => Values::Return {
            values: [value.cast_signed(), 0],
            error: 0,
        },
    }
}

/// Returns the capture for a client with a layout. Values that the layout has no place for are not
/// captured.
pub(super) fn capture(listed: &Listed, flags: u64, abi: Abi) -> Capture {
    let with = |flag: u64, count: usize| if flags & flag != 0 { count } else { 0 };
    let arguments = match &listed.source {
        Source::Timer { .. } => 0,
        Source::Alias(_) | Source::Tracepoint(_) => MAX_ARGUMENTS,
        Source::SystemCall {
            moment: Moment::Return,
            ..
        }
        | Source::Function {
            moment: Moment::Return,
            ..
        } => 1,
        Source::SystemCall { .. } => with(FLAG_FUNCARGS, usize::from(listed.arguments)),
        Source::Function { .. } => with(FLAG_FUNCARGS, MAX_ARGUMENTS),
    };
    let (kernel_stack, user_stack) = match abi {
        // Both flags select the only stack that the layout has, the kernel's.
        Abi::Old => (FLAG_KSTACK | FLAG_USTACK, 0),
        Abi::Current => (FLAG_KSTACK, FLAG_USTACK),
    };
    Capture {
        arguments,
        comm: flags & FLAG_EXECNAME != 0,
        kernel_stack: with(kernel_stack, abi::MAX_FRAMES),
        user_stack: with(user_stack, abi::MAX_FRAMES),
        strings: Vec::new(),
    }
}

/// Returns a capture that contains every probe's.
pub(super) fn largest_capture() -> Capture {
    Capture {
        arguments: MAX_ARGUMENTS,
        comm: true,
        kernel_stack: abi::MAX_FRAMES,
        user_stack: abi::MAX_FRAMES,
        strings: Vec::new(),
    }
}

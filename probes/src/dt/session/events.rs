//! What is kept of a hit, and the event that is made of it.

use std::time::Duration;

use super::Instance;
use crate::clock::Clock;
use crate::dt::abi::{
    self, Abi, EventFields, FLAG_EXECNAME, FLAG_FUNCARGS, FLAG_KSTACK, FLAG_USTACK, Values,
};
use crate::dt::probes::{Listed, Source};
use crate::dt::tasks::Threads;
use crate::engine::{Capture, Engine};
use crate::event::{Event, EventKind, MAX_ARGUMENTS};
use crate::probe::Moment;

/// Makes events of a session.
pub(super) struct Maker<'s> {
    pub(super) engine: &'s Engine,
    pub(super) threads: Threads,
    pub(super) clock: Clock,
    /// Added to numbers of threads.
    pub(super) offset: u32,
}

impl Maker<'_> {
    /// The event of a hit; `None` for one that is not meant.
    pub(super) fn fields(
        &self,
        instance: &Instance,
        listed: &Listed,
        call: u32,
        event: &Event,
        abi: Abi,
    ) -> Option<EventFields> {
        let values = match (&listed.source, event.kind) {
            (Source::Alias(alias), _) => {
                let thread = |task| self.threads.read(self.engine, task);
                let arguments = alias.arguments(event, call, self.offset, thread)?;
                arguments_of(arguments)
            }
            (Source::SystemCall { .. }, EventKind::Return) => {
                returned(event.arguments.first().copied().unwrap_or_default())
            }
            (_, EventKind::Return) => Values::Return {
                values: [
                    event
                        .arguments
                        .first()
                        .copied()
                        .unwrap_or_default()
                        .cast_signed(),
                    0,
                ],
                error: 0,
            },
            _ => arguments_of(event.arguments.iter().map(|word| word.cast_signed())),
        };
        // In the older layout one field is for both, and holds the kernel's.
        let kernel = match abi {
            Abi::Old => FLAG_KSTACK | FLAG_USTACK,
            Abi::Current => FLAG_KSTACK,
        };
        let stack = |wanted: bool, stack: &[u64]| match wanted {
            true => stack.to_vec(),
            false => Vec::new(),
        };
        Some(EventFields {
            probe: instance.probe,
            cpu: u32::from(event.vcpu),
            // Of nobody: the idle task's.
            pid: event.pid.unwrap_or_default(),
            tid: event.tid.unwrap_or_default().saturating_add(self.offset),
            time: Duration::from_nanos(self.clock.unix_ns(event.tsc)),
            kernel_stack: stack(instance.flags & kernel != 0, &event.kernel_stack),
            user_stack: stack(instance.flags & FLAG_USTACK != 0, &event.user_stack),
            comm: match instance.flags & FLAG_EXECNAME {
                0 => Vec::new(),
                _ => event.comm().to_vec(),
            },
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

/// What a system call of Linux has returned: -4095 to -1 are errors.
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

/// What is kept of a probe's hits.
pub(super) fn capture(listed: &Listed, flags: u64) -> Capture {
    let with = |flag: u64, count: usize| if flags & flag != 0 { count } else { 0 };
    let arguments = match &listed.source {
        Source::Timer { .. } => 0,
        Source::Alias(_) | Source::Tracepoint(_) => MAX_ARGUMENTS,
        Source::SystemCall { moment, .. } | Source::Function { moment, .. } => match moment {
            Moment::Return => 1,
            _ => match &listed.source {
                Source::SystemCall { .. } => with(FLAG_FUNCARGS, usize::from(listed.arguments)),
                _ => with(FLAG_FUNCARGS, MAX_ARGUMENTS),
            },
        },
    };
    Capture {
        arguments,
        comm: flags & FLAG_EXECNAME != 0,
        kernel_stack: with(FLAG_KSTACK | FLAG_USTACK, abi::MAX_FRAMES),
        user_stack: with(FLAG_USTACK, abi::MAX_FRAMES),
        strings: Vec::new(),
    }
}

/// All that any probe's capture holds.
pub(super) fn largest_capture() -> Capture {
    Capture {
        arguments: MAX_ARGUMENTS,
        comm: true,
        kernel_stack: abi::MAX_FRAMES,
        user_stack: abi::MAX_FRAMES,
        strings: Vec::new(),
    }
}

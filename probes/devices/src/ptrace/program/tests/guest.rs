//! A made-up guest: the offsets of its kernel, three tasks, and the records that hits put.
#![allow(clippy::unwrap_used)]

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::Arc;

use super::super::super::layout::{Bit, Deadline, Layout, Memory, Port, Running};
use super::super::super::record::EventType;
use super::super::super::sleeps::Sleeps;
use super::super::{Context, EventHook, Moment};

/// The offsets of a made-up kernel.
pub(in crate::ptrace) const LAYOUT: Layout = Layout {
    pid: 0x10,
    start: 0x18,
    comm: 0x20,
    running: Ok(RUNNING),
    deadline: Ok(DEADLINE),
    port: Some(Port {
        private_data: 0x50,
        name: 0x58,
    }),
};
pub(super) const RUNNING: Running = Running {
    state: 0x30,
    on_rq: 0x34,
    policy: 0x38,
    delayed: Some(0x3c),
};
pub(super) const DEADLINE: Deadline = Deadline {
    entity: 0x100,
    timer: 0x20,
    runtime: 0x0,
    relative: 0x8,
    throttled: Bit {
        byte: 0x10,
        mask: 1,
    },
    yielded: Bit {
        byte: 0x10,
        mask: 2,
    },
    server: Some(Bit {
        byte: 0x10,
        mask: 4,
    }),
};

/// The `task_struct`s of threads 40 to 42.
pub(super) const A: u64 = 0xffff_8880_0000_1000;
pub(super) const B: u64 = 0xffff_8880_0000_2000;
pub(super) const C: u64 = 0xffff_8880_0000_3000;

/// A guest with three tasks, of which A runs, and its records.
pub(super) struct Guest {
    pub(super) context: Context,
    memory: BTreeMap<u64, u8>,
    pub(super) task: u64,
    pub(super) arguments: Vec<u64>,
    pub(super) fault_address: u64,
    pub(super) put: RefCell<Vec<[u64; 3]>>,
}

impl Guest {
    pub(super) fn new() -> Self {
        let mut guest = Self {
            context: Context {
                layout: LAYOUT,
                sleeps: Sleeps::default(),
                selection: Arc::default(),
            },
            memory: BTreeMap::new(),
            task: A,
            arguments: Vec::new(),
            fault_address: 0,
            put: RefCell::default(),
        };
        for (task, pid, name) in [(A, 40, "sh"), (B, 41, "dd"), (C, 42, "a long name")] {
            guest.write(task, &[0; 0x200]);
            guest.is_now(task, pid, 1000 + u64::from(pid));
            guest.write(task + LAYOUT.comm, name.as_bytes());
            guest.write(task + RUNNING.on_rq, &1u32.to_le_bytes());
        }
        guest
    }

    /// Makes a guest with these tasks selected.
    pub(super) fn tracing(tasks: &[u64]) -> Self {
        let guest = Self::new();
        for task in tasks {
            let identity = guest.context.layout.identity(&guest, *task).unwrap();
            assert!(guest.context.selection.insert(*task, identity));
        }
        guest
    }

    pub(super) fn write(&mut self, at: u64, bytes: &[u8]) {
        self.memory.extend((at..).zip(bytes.iter().copied()));
    }

    /// Replaces the task at an address by another.
    pub(super) fn is_now(&mut self, task: u64, pid: u32, start: u64) {
        self.write(task + LAYOUT.pid, &pid.to_le_bytes());
        self.write(task + LAYOUT.start, &start.to_le_bytes());
    }

    pub(super) fn is_selected(&self, task: u64) -> bool {
        self.context.traced(self, task).is_some()
    }

    /// Returns the records of a hit: number, event, argument, nanoseconds ahead.
    pub(super) fn see(
        &mut self,
        what: EventHook,
        arguments: &[u64],
    ) -> Vec<(u32, EventType, u64, u64)> {
        self.arguments = arguments.to_vec();
        let any = self.context.see(what, self, true);
        let put = self.put.take();
        assert_eq!(any, !put.is_empty(), "{what:?}");
        let event = |first: u64| EventType::of((first >> 32) as u32).unwrap();
        put.iter()
            .map(|[first, argument, ahead]| (*first as u32, event(*first), *argument, *ahead))
            .collect()
    }

    /// Returns number and event of a hit's records.
    pub(super) fn short(&mut self, what: EventHook, arguments: &[u64]) -> Vec<(u32, EventType)> {
        let seen = self.see(what, arguments);
        seen.iter().map(|(pid, event, ..)| (*pid, *event)).collect()
    }
}

impl Memory for Guest {
    fn read(&self, address: u64, buffer: &mut [u8]) -> bool {
        buffer.iter_mut().zip(address..).all(|(place, at)| {
            let byte = self.memory.get(&at);
            byte.map(|byte| *place = *byte).is_some()
        })
    }

    fn read_string(&self, address: u64, buffer: &mut [u8]) -> usize {
        let bytes = (address..).map_while(|at| self.memory.get(&at));
        let text = bytes.take_while(|byte| **byte != 0);
        let placed = buffer.iter_mut().zip(text);
        placed.map(|(place, byte)| *place = *byte).count()
    }
}

impl Moment for Guest {
    fn task(&self) -> u64 {
        self.task
    }

    fn argument(&self, number: usize) -> u64 {
        self.arguments.get(number).copied().unwrap_or_default()
    }

    fn fault_address(&self) -> u64 {
        self.fault_address
    }

    fn stack(&self, frames: &mut [u64]) -> usize {
        frames[..2].copy_from_slice(&[0x1, 0xffff_ffff_8123_4567]);
        2
    }

    fn put(&self, words: [u64; 3]) {
        self.put.borrow_mut().push(words);
    }
}

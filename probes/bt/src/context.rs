//! The environment of a running rule: its hit, or the script's begin and end.

use std::cell::RefCell;

pub use probes::clock::Clock;
use probes::engine::ProbeHit;
use probes::event::{COMM_LENGTH, StringState};
use vmm::machine::Paused;

use crate::registers::Register;
use crate::value::Value;

/// The environment of a running rule. What only a hit has is 0, empty or absent elsewhere.
pub(crate) trait Context {
    /// Returns the index of the vCPU, and of its shard of the maps.
    fn cpu(&self) -> usize;
    fn process(&self) -> u32;
    fn thread(&self) -> u32;
    fn comm(&self) -> [u8; COMM_LENGTH];
    /// Returns the time in nanoseconds since 1970.
    fn unix_ns(&self) -> u64;
    fn task(&self) -> u64;
    fn pc(&self) -> u64 {
        0
    }
    fn argument(&self, _number: usize) -> u64 {
        0
    }
    /// Checks whether there is a record of the tracepoint's event. If not, its bytes read as 0.
    fn has_record(&self) -> bool {
        false
    }
    fn returned(&self) -> Option<u64> {
        None
    }
    fn register(&self, _register: &Register) -> u64 {
        0
    }
    fn read(&self, address: u64, buffer: &mut [u8]) -> bool;
    /// Reads a string up to its NUL or the buffer's end. Returns `false`, with the number of bytes
    /// before it, if memory is not there. Bytes of the buffer behind the string mean nothing.
    fn read_string(&self, address: u64, buffer: &mut [u8]) -> (usize, bool);
    fn kernel_stack(&self, _frames: &mut [u64]) -> usize {
        0
    }
    fn user_stack(&self, _frames: &mut [u64]) -> usize {
        0
    }
    /// Emits values. Returns `false` if there is no room.
    fn emit(&self, emission: usize, values: &[Value]) -> bool;
    /// Pauses the machine at a hit, before the probe's instruction.
    fn hold_here(&self) -> Option<Paused> {
        None
    }
    /// Wakes the script's owner.
    fn wake(&self) {}
}

/// The environment at a hit.
pub(crate) struct AtHit<'h> {
    pub(crate) hit: &'h ProbeHit<'h>,
    pub(crate) clock: &'h Clock,
}

impl Context for AtHit<'_> {
    fn cpu(&self) -> usize {
        self.hit.vcpu()
    }

    fn process(&self) -> u32 {
        self.hit.process().unwrap_or_default()
    }

    fn thread(&self) -> u32 {
        self.hit.thread().unwrap_or_default()
    }

    fn comm(&self) -> [u8; COMM_LENGTH] {
        self.hit.comm().unwrap_or_default()
    }

    fn unix_ns(&self) -> u64 {
        self.clock.unix_ns(self.hit.tsc())
    }

    fn task(&self) -> u64 {
        self.hit.task()
    }

    fn pc(&self) -> u64 {
        self.hit.pc()
    }

    fn argument(&self, number: usize) -> u64 {
        self.hit
            .arguments()
            .get(number)
            .copied()
            .unwrap_or_default()
    }

    fn has_record(&self) -> bool {
        self.hit.has_record()
    }

    fn returned(&self) -> Option<u64> {
        self.hit.returned()
    }

    fn register(&self, register: &Register) -> u64 {
        (register.value)(self.hit.registers())
    }

    fn read(&self, address: u64, buffer: &mut [u8]) -> bool {
        self.hit.read(address, buffer)
    }

    fn read_string(&self, address: u64, buffer: &mut [u8]) -> (usize, bool) {
        let (length, state) = self.hit.read_string(address, buffer);
        (length, state != StringState::Absent)
    }

    fn kernel_stack(&self, frames: &mut [u64]) -> usize {
        self.hit.kernel_stack(frames)
    }

    fn user_stack(&self, frames: &mut [u64]) -> usize {
        self.hit.user_stack(frames)
    }

    fn emit(&self, emission: usize, values: &[Value]) -> bool {
        self.hit
            .emit(|slot| crate::record::write(slot, emission, values))
    }

    fn hold_here(&self) -> Option<Paused> {
        self.hit.hold_here()
    }

    fn wake(&self) {
        self.hit.wake();
    }
}

/// The environment of BEGIN and END, which run on the host, as the tracer's own process.
pub(crate) struct Here {
    unix_ns: u64,
    emitted: RefCell<Vec<(usize, Vec<Value>)>>,
}

impl Here {
    pub(crate) fn at(unix_ns: u64) -> Self {
        Self {
            unix_ns,
            emitted: RefCell::default(),
        }
    }

    /// Returns the numbers and values of emissions, in order.
    pub(crate) fn into_emitted(self) -> Vec<(usize, Vec<Value>)> {
        self.emitted.into_inner()
    }
}

impl Context for Here {
    fn cpu(&self) -> usize {
        0
    }

    fn process(&self) -> u32 {
        std::process::id()
    }

    fn thread(&self) -> u32 {
        std::process::id()
    }

    fn comm(&self) -> [u8; COMM_LENGTH] {
        *b"exotrace\0\0\0\0\0\0\0\0"
    }

    fn unix_ns(&self) -> u64 {
        self.unix_ns
    }

    fn task(&self) -> u64 {
        0
    }

    fn read(&self, _: u64, _: &mut [u8]) -> bool {
        false
    }

    fn read_string(&self, _: u64, _: &mut [u8]) -> (usize, bool) {
        (0, false)
    }

    fn emit(&self, emission: usize, values: &[Value]) -> bool {
        let mut emitted = self.emitted.borrow_mut();
        emitted.push((emission, values.to_vec()));
        true
    }
}

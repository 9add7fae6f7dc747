//! Stands for `exporting` in a build without the feature `export`: a trace has its output alone.

use std::collections::BTreeMap;

use crate::args;
use crate::client::streams::shape::Shape;
use crate::protocol::event::{ClockPair, EventLine};
use crate::protocol::script::{self, MapLine};
use crate::protocol::trace::{self, Traced};
use crate::registry::Running;
use crate::report::Failure;

/// The names of the keys of a script's maps.
pub type Labels = BTreeMap<String, Vec<String>>;

/// No system.
#[derive(Debug)]
pub struct Exports;

#[expect(clippy::unused_self, reason = "the same calls as with the feature")]
impl Exports {
    pub fn start(_: &args::Exports, _: &Running, _: Labels) -> Result<Self, Failure> {
        Ok(Self)
    }

    pub fn interval_ms(&self) -> u32 {
        0
    }

    pub fn begin(&mut self, _: ClockPair, _: u64) {}

    pub fn hit(&mut self, _: usize, _: EventLine, _: &[Traced]) {}

    pub fn flush(&mut self) {}

    pub fn finish(self) {}

    pub fn trace_counts(&mut self, _: &trace::Counts, _: &[Traced], _: &[u64]) {}

    pub fn script_counts(&mut self, _: &script::Counts) {}

    pub fn map(&mut self, _: MapLine) {}
}

/// No collector.
pub struct Copies;

#[expect(clippy::unused_self, reason = "the same calls as with the feature")]
impl Copies {
    pub fn start(
        _: &args::Read,
        _: &Running,
        _: impl FnOnce() -> Result<Box<Shape>, String>,
    ) -> Result<Option<Self>, Failure> {
        Ok(None)
    }

    pub fn record(&mut self, _: &[u8]) -> Result<(), Failure> {
        Ok(())
    }

    pub fn flush(&mut self) {}

    pub fn finish(self) {}
}

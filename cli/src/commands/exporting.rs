//! Where a trace or a script goes besides its output. Nothing of it makes the trace wait.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::args;
use crate::export::metrics::Metrics;
use crate::export::prometheus::Server;
use crate::protocol::script::{self, MapLine};
use crate::protocol::trace::{self, Traced};
use crate::registry::Running;
use crate::report::{Failure, say};

/// The interval at which a machine sends counts and maps, in milliseconds.
const INTERVAL_MS: u32 = 1000;

/// The names of the keys of a script's maps.
pub type Labels = BTreeMap<String, Vec<String>>;

/// The systems that a command was told of.
#[derive(Debug)]
pub struct Exports {
    metrics: Metrics,
    server: Option<Server>,
}

impl Exports {
    /// Starts what is asked for, of a machine.
    ///
    /// # Errors
    /// If an address cannot be listened at.
    pub fn start(args: &args::Exports, machine: &Running, labels: Labels) -> Result<Self, Failure> {
        let address = args.metrics.as_deref();
        let server = address.map(|address| Server::start(address, machine.name.as_str()));
        let server = server.transpose()?;
        if let Some(server) = &server {
            say(format_args!(
                "metrics at http://{}/metrics",
                server.address()
            ));
        }
        Ok(Self {
            metrics: Metrics::new(labels),
            server,
        })
    }

    /// Returns the interval of counts to request from the machine, in milliseconds; 0 for none.
    pub fn interval_ms(&self) -> u32 {
        match self.server {
            Some(_) => INTERVAL_MS,
            None => 0,
        }
    }

    /// Passes on the counts of a trace.
    pub fn trace_counts(&mut self, counts: &trace::Counts, traced: &[Traced], hits: &[u64]) {
        if self.interval_ms() > 0 {
            let names = traced.iter().map(|probe| probe.name.clone());
            self.metrics
                .take_trace(counts, names.zip(hits.iter().copied()).collect());
            self.show();
        }
    }

    /// Passes on the counts of a script.
    pub fn script_counts(&mut self, counts: &script::Counts) {
        if self.interval_ms() > 0 {
            self.metrics.take_script(counts);
            self.show();
        }
    }

    /// Passes on a map of a script.
    pub fn map(&mut self, map: MapLine) {
        if self.interval_ms() > 0 {
            self.metrics.take_map(map);
            self.show();
        }
    }

    fn show(&self) {
        if let Some(server) = &self.server {
            server.show(Arc::new(self.metrics.clone()));
        }
    }
}

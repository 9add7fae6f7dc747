//! Where a trace or a script goes besides its output. Nothing of it makes the trace wait.

use std::collections::BTreeMap;
use std::sync::Arc;

use probes::clock::Clock;

use crate::args;
use crate::client::streams::shape::Shape;
use crate::export::metrics::Metrics;
use crate::export::otlp::{Form, Otlp, Record};
use crate::export::prometheus::Server;
use crate::protocol::event::{ClockPair, EventLine};
use crate::protocol::script::{self, MapLine};
use crate::protocol::trace::{self, Traced};
use crate::registry::Running;
use crate::report::{Failure, say};

/// The interval at which a machine sends counts and maps, in milliseconds.
const INTERVAL_MS: u32 = 1000;

/// The names of the keys of a script's maps.
pub type Labels = BTreeMap<String, Vec<String>>;

/// The systems that the options of a command name.
#[derive(Debug)]
pub struct Exports {
    metrics: Metrics,
    server: Option<Server>,
    collector: Option<Collector>,
    clock: Clock,
    /// The probes of hits, by number.
    probes: Vec<Arc<Traced>>,
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
            collector: Collector::start(&args.collector, machine)?,
            clock: Clock {
                tsc: 0,
                unix_ns: 0,
                hz: 1,
            },
            probes: Vec::new(),
        })
    }

    /// Returns the interval of counts to request from the machine, in milliseconds; 0 for none.
    pub fn interval_ms(&self) -> u32 {
        match (&self.server, &self.collector) {
            (None, None) => 0,
            _ => INTERVAL_MS,
        }
    }

    /// Sets the clock of the hits to come.
    pub fn begin(&mut self, pair: ClockPair, hz: u64) {
        self.clock = Clock {
            tsc: pair.tsc,
            unix_ns: pair.unix_ns,
            hz: hz.max(1),
        };
    }

    /// Passes on a hit of the probe of this number.
    pub fn hit(&mut self, number: usize, line: EventLine, traced: &[Traced]) {
        let Some(Collector(otlp)) = &mut self.collector else {
            return;
        };
        let new = traced.iter().skip(self.probes.len());
        self.probes.extend(new.map(|probe| Arc::new(probe.clone())));
        otlp.record(Record::Hit {
            line: Box::new(line),
            probe: self.probes.get(number).cloned(),
            clock: self.clock,
        });
    }

    /// Hands over the hits that came together.
    pub fn flush(&mut self) {
        if let Some(collector) = &mut self.collector {
            collector.flush();
        }
    }

    /// Sends the rest, and reports what was lost.
    pub fn finish(self) {
        if let Some(collector) = self.collector {
            collector.finish();
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
            // Counts follow all maps.
            self.metrics.take_map(map);
        }
    }

    fn show(&self) {
        let shown = Arc::new(self.metrics.clone());
        if let Some(Collector(otlp)) = &self.collector {
            otlp.show(shown.clone());
        }
        if let Some(server) = &self.server {
            server.show(shown);
        }
    }
}

/// The records of a device on their way to a collector.
pub struct Copies {
    shape: Box<Shape>,
    collector: Collector,
}

impl Copies {
    /// Starts to export the records of a machine's device, if a collector is named. `json` makes
    /// their JSON.
    ///
    /// # Errors
    /// If there is no such form, or no thread.
    pub fn start(
        args: &args::Read,
        machine: &Running,
        json: impl FnOnce() -> Result<Box<Shape>, String>,
    ) -> Result<Option<Self>, Failure> {
        let Some(collector) = Collector::start(&args.collector, machine)? else {
            return Ok(None);
        };
        let shape = json().map_err(Failure::new)?;
        Ok(Some(Self { shape, collector }))
    }

    /// Passes on a record.
    ///
    /// # Errors
    /// If it is none of the device.
    pub fn record(&mut self, record: &[u8]) -> Result<(), Failure> {
        let mut json = Vec::new();
        self.shape.record(record, &mut json)?;
        let json = String::from_utf8_lossy(&json).into_owned();
        self.collector.0.record(Record::Device(json));
        Ok(())
    }

    /// Hands over the records that came together.
    pub fn flush(&mut self) {
        self.collector.flush();
    }

    /// Sends the rest, and reports what was lost.
    pub fn finish(self) {
        self.collector.finish();
    }
}

/// A collector of OpenTelemetry that gets records.
#[derive(Debug)]
pub struct Collector(Otlp);

impl Collector {
    /// Starts to export what is seen of a machine, if a collector is named.
    ///
    /// # Errors
    /// If its thread cannot be made.
    pub fn start(args: &args::Collector, machine: &Running) -> Result<Option<Self>, Failure> {
        let Some(endpoint) = args.otlp.clone() else {
            return Ok(None);
        };
        let form = match args.otlp_spans {
            true => Form::Spans,
            false => Form::Logs,
        };
        let otlp = Otlp::start(endpoint, machine.name.as_str(), form)?;
        Ok(Some(Self(otlp)))
    }

    /// Hands over the records that came together.
    pub fn flush(&mut self) {
        self.0.flush();
    }

    /// Sends the rest, and reports what was lost.
    pub fn finish(self) {
        say(format_args!("--otlp: {}", self.0.finish()));
    }
}

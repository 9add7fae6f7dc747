//! Options of the commands for systems that keep data.

use clap::Args;

#[cfg(feature = "export")]
use crate::export::otlp::Endpoint;

/// The systems that get a trace besides its output.
#[derive(Debug, Clone, Default, Args)]
pub struct Exports {
    /// Serve counts, costs and a script's maps to Prometheus at this address, such as
    /// 127.0.0.1:9464, while the trace runs
    #[cfg(feature = "export")]
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub metrics: Option<String>,
    #[command(flatten)]
    #[cfg(feature = "export")]
    pub collector: Collector,
}

/// A collector of OpenTelemetry.
#[cfg(feature = "export")]
#[derive(Debug, Clone, Default, Args)]
pub struct Collector {
    /// Send hits as logs, and counts and a script's maps as metrics, to this collector of
    /// OpenTelemetry: http://HOST:4318 (protobuf) or grpc://HOST:4317
    #[arg(long, value_name = "URL")]
    pub otlp: Option<Endpoint>,
    /// Send an entry with its return as a span
    #[arg(long, requires = "otlp")]
    pub otlp_spans: bool,
}

impl Exports {
    /// Returns the options that were given.
    pub fn given(&self) -> Vec<&'static str> {
        let given: &[(&'static str, bool)] = &[
            #[cfg(feature = "export")]
            ("--metrics", self.metrics.is_some()),
            #[cfg(feature = "export")]
            ("--otlp", self.collector.otlp.is_some()),
        ];
        let given = given.iter().filter(|(_, given)| *given);
        given.map(|(name, _)| *name).collect()
    }
}

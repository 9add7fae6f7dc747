//! Options of the commands for systems that keep data.

use clap::Args;

/// The systems that get a trace besides its output.
#[derive(Debug, Clone, Default, Args)]
pub struct Exports {
    /// Serve counts, costs and a script's maps to Prometheus at this address, such as
    /// 127.0.0.1:9464, while the trace runs
    #[cfg(feature = "export")]
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub metrics: Option<String>,
}

impl Exports {
    /// Returns the options that were given.
    pub fn given(&self) -> Vec<&'static str> {
        let given: &[(&'static str, bool)] = &[
            #[cfg(feature = "export")]
            ("--metrics", self.metrics.is_some()),
        ];
        let given = given.iter().filter(|(_, given)| *given);
        given.map(|(name, _)| *name).collect()
    }
}

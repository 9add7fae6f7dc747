//! Hits, records and maps for the systems that keep data. Everything here belongs to a client: the
//! machine's own process opens no sockets for it.

pub mod labels;
pub mod metrics;
pub mod otlp;
pub mod parquet;
pub mod prometheus;

//! Events of the device dt(4) for people and programs: a line each.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::sync::Arc;

use serde_json::{Map, Value, json};
use trace_devices::dt::abi::{EventFields, Values};
#[cfg(feature = "export")]
use trace_devices::render::CutOff;
use trace_devices::render::Render;

use crate::client::dt::ABI;
use crate::client::streams::StreamFormat;
use crate::client::streams::shape::{AsIs, Shape};
#[cfg(feature = "export")]
use crate::export::parquet;
use crate::report::printable;

/// The names of probes by number.
pub type Names = Arc<BTreeMap<u32, String>>;

/// Returns the shape of events in a format.
///
/// # Errors
/// If there is none.
pub fn shape(format: StreamFormat, names: &Names) -> Result<Box<Shape>, String> {
    let names = names.clone();
    match format {
        StreamFormat::Raw => Ok(Box::new(AsIs)),
        StreamFormat::Text => Ok(Box::new(Lines { names, json: false })),
        StreamFormat::Json => Ok(Box::new(Lines { names, json: true })),
        #[cfg(feature = "export")]
        StreamFormat::Parquet => {
            let table = parquet::Device::table(names).map_err(|error| error.to_string())?;
            Ok(Box::new(Table(table)))
        }
        _ => Err("invalid format for dt: expected text, json, raw or parquet".into()),
    }
}

/// A table of events.
#[cfg(feature = "export")]
struct Table(parquet::Rendered<parquet::Device>);

#[cfg(feature = "export")]
impl Render<[u8]> for Table {
    fn record(&mut self, record: &[u8], out: &mut dyn Write) -> io::Result<()> {
        self.0.record(&parse(record)?, out)
    }

    fn finish(&mut self, out: &mut dyn Write) -> io::Result<()> {
        self.0.finish(out)
    }

    fn cut_off(&self, intact: u64) -> Option<CutOff> {
        self.0.cut_off(intact)
    }
}

fn parse(record: &[u8]) -> io::Result<EventFields> {
    let event = ABI.read_event(record);
    event.ok_or_else(|| io::Error::other("too few bytes for an event"))
}

struct Lines {
    names: Names,
    json: bool,
}

impl Render<[u8]> for Lines {
    fn record(&mut self, record: &[u8], out: &mut dyn Write) -> io::Result<()> {
        let EventFields {
            probe,
            cpu,
            pid,
            tid,
            time,
            ref comm,
            values,
            ..
        } = parse(record)?;
        let comm = String::from_utf8_lossy(comm);
        let probe = self.names.get(&probe).map_or("", String::as_str);
        let arguments = match values {
            Values::Arguments(arguments) => arguments.map(i64::cast_unsigned),
            Values::Return { .. } => Default::default(),
        };
        if !self.json {
            // It is unknown here whether a trailing 0 is an argument.
            let used = arguments.iter().rposition(|a| *a != 0).map_or(0, |n| n + 1);
            let shown = arguments.iter().take(used).map(|a| format!(" {a:#x}"));
            let shown: String = shown.collect();
            let comm = printable(&comm);
            let (seconds, ns) = (time.as_secs(), time.subsec_nanos());
            return writeln!(
                out,
                "{seconds}.{ns:09} {cpu:3} {pid:6} {tid:6} {comm:15} {probe}{shown}"
            );
        }
        let mut line = Map::new();
        for (key, value) in [
            ("probe", json!(probe)),
            ("cpu", json!(cpu)),
            ("pid", json!(pid)),
            ("tid", json!(tid)),
            ("comm", json!(comm)),
            ("clock", json!("realtime")),
            (
                "time_ns",
                json!(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)),
            ),
            ("args", json!(arguments)),
        ] {
            line.insert(key.to_owned(), value);
        }
        writeln!(out, "{}", Value::Object(line))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::time::Duration;

    use super::*;

    #[test]
    fn events_are_lines() {
        let event = ABI.event(&EventFields {
            probe: 7,
            cpu: 1,
            pid: 42,
            tid: 43,
            time: Duration::new(5, 6),
            kernel_stack: vec![1],
            user_stack: vec![2],
            comm: b"s\x1bh".to_vec(),
            values: Values::Arguments([16, -1, 0, 0, 0, 0, 0, 0, 0, 0]),
        });
        let names = Arc::new(BTreeMap::from([(7, "kprobe:vfs_read:entry".to_owned())]));
        for (format, expected) in [
            (
                StreamFormat::Text,
                "5.000000006   1     42     43 s?h             kprobe:vfs_read:entry 0x10 0xffffffffffffffff\n",
            ),
            (
                StreamFormat::Json,
                "{\"args\":[16,18446744073709551615,0,0,0,0,0,0,0,0],\"clock\":\"realtime\",\"comm\":\"s\\u001bh\",\"cpu\":1,\
                 \"pid\":42,\"probe\":\"kprobe:vfs_read:entry\",\"tid\":43,\"time_ns\":5000000006}\n",
            ),
        ] {
            let mut shown = Vec::new();
            let mut shape = shape(format, &names).unwrap();
            shape.record(&event, &mut shown).unwrap();
            shape.finish(&mut shown).unwrap();
            assert_eq!(String::from_utf8(shown).unwrap(), expected);
        }
        assert!(shape(StreamFormat::Svg, &names).is_err());
    }
}

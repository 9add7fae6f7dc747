//! Hits and records of devices as logs and spans, grouped by the guest's processes.
//!
//! A span is an entry with its return: the innermost open call of that function in the thread.
//! Calls within it are its children. Open calls are bounded; those without an end are counted.

use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};
use std::num::NonZeroUsize;

use lru::LruCache;
use opentelemetry_proto::tonic::collector::logs::v1::ExportLogsServiceRequest;
use opentelemetry_proto::tonic::collector::metrics::v1::ExportMetricsServiceRequest;
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::common::v1::{
    AnyValue, ArrayValue, InstrumentationScope, KeyValue,
};
use opentelemetry_proto::tonic::logs::v1::{LogRecord, ResourceLogs, ScopeLogs, SeverityNumber};
use opentelemetry_proto::tonic::resource::v1::Resource;
use opentelemetry_proto::tonic::trace::v1::span::SpanKind;
use opentelemetry_proto::tonic::trace::v1::{ResourceSpans, ScopeSpans, Span};
use probes::clock::{Clock, unix_ns_now};

use super::client::Request;
use super::{Form, Record, metrics};
use crate::export::metrics::Metrics;
use crate::protocol::event::{self, EventLine};
use crate::protocol::trace::Traced;

/// The greatest number of threads with open calls. Those of threads seen longest ago are forgotten.
const MOST_THREADS: NonZeroUsize = NonZeroUsize::new(4096).unwrap();
/// The greatest number of processes whose names are known.
const MOST_NAMES: NonZeroUsize = NonZeroUsize::new(4096).unwrap();
/// The longest name of a process, in bytes: the guest's kernel keeps 15.
const LONGEST_NAME: usize = 64;
/// The bytes of all open calls, at most.
const OPEN_BYTES: usize = 64 << 20;
/// The greatest depth of open calls of a thread.
const MOST_DEPTH: usize = 256;

/// A record in the terms of logs and spans.
#[derive(Debug, Default)]
struct Seen {
    unix_ns: u64,
    /// `entry`, `return`, or what else a device calls it.
    event: String,
    function: String,
    /// The name of the record: that of the probe.
    name: String,
    pid: Option<u32>,
    tid: Option<u32>,
    attributes: Vec<KeyValue>,
}

/// A call that has not returned.
#[derive(Debug)]
struct Call {
    function: String,
    span: Span,
    bytes: usize,
}

/// A converter of records, and those that it has converted.
#[derive(Debug)]
pub struct Converter {
    machine: String,
    form: Form,
    /// The names of processes, from their main threads.
    names: LruCache<u32, String>,
    open: LruCache<u32, Vec<Call>>,
    open_bytes: usize,
    unpaired: u64,
    ids: Ids,
    logs: BTreeMap<Option<u32>, Vec<LogRecord>>,
    spans: BTreeMap<Option<u32>, Vec<Span>>,
    len: usize,
    bytes: usize,
    began: u64,
}

impl Converter {
    /// Makes a converter of records of `machine`.
    pub fn new(machine: &str, form: Form) -> Self {
        Self {
            machine: machine.to_owned(),
            form,
            names: LruCache::new(MOST_NAMES),
            open: LruCache::new(MOST_THREADS),
            open_bytes: 0,
            unpaired: 0,
            ids: Ids::default(),
            logs: BTreeMap::new(),
            spans: BTreeMap::new(),
            len: 0,
            bytes: 0,
            began: unix_ns_now(),
        }
    }

    /// Returns the number of logs and spans that wait for [`requests`](Self::requests).
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns the bytes of the records since the last requests.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns the number of entries and returns that have no other half, at the end.
    pub fn unpaired(&self) -> u64 {
        let open = self.open.iter().map(|(_, calls)| calls.len() as u64);
        self.unpaired + open.sum::<u64>()
    }

    /// Takes a record of so many bytes.
    pub fn take(&mut self, record: Record, bytes: usize) {
        self.bytes += bytes;
        let seen = match record {
            Record::Hit { line, probe, clock } => {
                if let (Some(pid), Some(comm)) = (line.pid, &line.comm)
                    && comm.len() <= LONGEST_NAME
                    && (line.tid == Some(pid) || !self.names.contains(&pid))
                {
                    self.names.put(pid, comm.clone());
                }
                of_hit(*line, probe.as_deref(), &clock)
            }
            Record::Device(json) => match of_device(&json) {
                Some(seen) => seen,
                None => return,
            },
        };
        match (self.form, seen.event.as_str(), seen.tid) {
            (Form::Spans, "entry", Some(tid)) => self.enter(tid, seen, bytes),
            (Form::Spans, "return", Some(tid)) => self.leave(tid, seen),
            _ => self.log(seen),
        }
    }

    fn log(&mut self, seen: Seen) {
        self.len += 1;
        let record = LogRecord {
            time_unix_nano: seen.unix_ns,
            observed_time_unix_nano: unix_ns_now(),
            severity_number: SeverityNumber::Info.into(),
            body: Some(text(seen.name.clone())),
            event_name: seen.name,
            attributes: seen.attributes,
            ..LogRecord::default()
        };
        self.logs.entry(seen.pid).or_default().push(record);
    }

    fn enter(&mut self, tid: u32, seen: Seen, bytes: usize) {
        if self.open_bytes.saturating_add(bytes) > OPEN_BYTES {
            self.unpaired += 1;
            return;
        }
        if !self.open.contains(&tid)
            && self.open.len() >= MOST_THREADS.get()
            && let Some((_, forgotten)) = self.open.pop_lru()
        {
            self.unpaired += forgotten.len() as u64;
            let bytes: usize = forgotten.iter().map(|call| call.bytes).sum();
            self.open_bytes = self.open_bytes.saturating_sub(bytes);
        }
        let calls = self.open.get_or_insert_mut(tid, Vec::new);
        if calls.len() >= MOST_DEPTH {
            self.unpaired += 1;
            return;
        }
        let (trace_id, parent_span_id) = match calls.last() {
            Some(Call { span, .. }) => (span.trace_id.clone(), span.span_id.clone()),
            None => ([self.ids.next(), self.ids.next()].concat(), Vec::new()),
        };
        let span = Span {
            trace_id,
            span_id: self.ids.next().to_vec(),
            parent_span_id,
            name: seen.function.clone(),
            kind: SpanKind::Internal.into(),
            start_time_unix_nano: seen.unix_ns,
            attributes: seen.attributes,
            ..Span::default()
        };
        let function = seen.function;
        calls.push(Call {
            function,
            span,
            bytes,
        });
        self.open_bytes += bytes;
    }

    fn leave(&mut self, tid: u32, seen: Seen) {
        let calls = self.open.get_mut(&tid);
        let place = calls.as_ref().and_then(|calls| {
            let mut calls = calls.iter();
            calls.rposition(|call| call.function == seen.function)
        });
        let (Some(calls), Some(place)) = (calls, place) else {
            self.unpaired += 1;
            return;
        };
        // Calls within it have ended without a return that was seen.
        self.unpaired += (calls.len() - place - 1) as u64;
        let ended = calls.iter().skip(place).map(|call| call.bytes);
        self.open_bytes = self.open_bytes.saturating_sub(ended.sum());
        calls.truncate(place + 1);
        let Some(Call { mut span, .. }) = calls.pop() else {
            return;
        };
        if calls.is_empty() {
            self.open.pop(&tid);
        }
        span.end_time_unix_nano = seen.unix_ns;
        let is_new = |of: &KeyValue| !span.attributes.iter().any(|known| known.key == of.key);
        let more: Vec<KeyValue> = seen.attributes.into_iter().filter(is_new).collect();
        span.attributes.extend(more);
        self.len += 1;
        self.spans.entry(seen.pid).or_default().push(span);
    }

    /// Returns requests with all that was taken, and the bytes of the records that they are made
    /// of.
    pub fn requests(&mut self) -> (Vec<Request>, usize) {
        let (logs, spans) = (
            std::mem::take(&mut self.logs),
            std::mem::take(&mut self.spans),
        );
        self.len = 0;
        let mut requests = Vec::new();
        if !logs.is_empty() {
            let count = logs.values().map(Vec::len).sum::<usize>() as u64;
            let resource_logs = logs.into_iter().map(|(pid, log_records)| ResourceLogs {
                resource: Some(self.resource(pid)),
                scope_logs: vec![ScopeLogs {
                    scope: Some(scope()),
                    log_records,
                    ..ScopeLogs::default()
                }],
                ..ResourceLogs::default()
            });
            let resource_logs = resource_logs.collect();
            requests.push(Request::Logs(
                ExportLogsServiceRequest { resource_logs },
                count,
            ));
        }
        if !spans.is_empty() {
            let count = spans.values().map(Vec::len).sum::<usize>() as u64;
            let resource_spans = spans.into_iter().map(|(pid, spans)| ResourceSpans {
                resource: Some(self.resource(pid)),
                scope_spans: vec![ScopeSpans {
                    scope: Some(scope()),
                    spans,
                    ..ScopeSpans::default()
                }],
                ..ResourceSpans::default()
            });
            let resource_spans = resource_spans.collect();
            requests.push(Request::Spans(
                ExportTraceServiceRequest { resource_spans },
                count,
            ));
        }
        (requests, std::mem::take(&mut self.bytes))
    }

    /// Returns the request of metrics.
    pub fn metrics(&self, metrics: &Metrics) -> Request {
        let scoped = metrics::scoped(metrics, scope(), self.began);
        let resource_metrics = opentelemetry_proto::tonic::metrics::v1::ResourceMetrics {
            resource: Some(self.resource(None)),
            scope_metrics: vec![scoped],
            ..Default::default()
        };
        Request::Metrics(ExportMetricsServiceRequest {
            resource_metrics: vec![resource_metrics],
        })
    }

    /// Returns the machine, with a process of its guest.
    fn resource(&self, pid: Option<u32>) -> Resource {
        let mut attributes = vec![
            attribute("service.name", text("exotrace")),
            attribute("service.instance.id", text(self.machine.clone())),
            attribute("host.name", text(self.machine.clone())),
        ];
        if let Some(pid) = pid {
            attributes.push(attribute("process.pid", int(pid.into())));
            if let Some(name) = self.names.peek(&pid) {
                attributes.push(attribute("process.executable.name", text(name.clone())));
            }
        }
        Resource {
            attributes,
            ..Resource::default()
        }
    }
}

/// Identifiers that no other process makes.
#[derive(Debug, Default)]
struct Ids {
    seed: RandomState,
    last: u64,
}

impl Ids {
    fn next(&mut self) -> [u8; 8] {
        self.last += 1;
        // All zeros mean none.
        self.seed.hash_one(self.last).max(1).to_be_bytes()
    }
}

fn scope() -> InstrumentationScope {
    InstrumentationScope {
        name: "exotrace".to_owned(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        ..InstrumentationScope::default()
    }
}

/// Returns an attribute.
pub fn attribute(key: &str, value: AnyValue) -> KeyValue {
    KeyValue {
        key: key.to_owned(),
        value: Some(value),
        ..KeyValue::default()
    }
}

/// Returns a text as a value.
pub fn text(text: impl Into<String>) -> AnyValue {
    AnyValue {
        value: Some(Value::StringValue(text.into())),
    }
}

fn int(number: i64) -> AnyValue {
    AnyValue {
        value: Some(Value::IntValue(number)),
    }
}

fn texts(values: Vec<String>) -> AnyValue {
    let values = values.into_iter().map(text).collect();
    AnyValue {
        value: Some(Value::ArrayValue(ArrayValue { values })),
    }
}

/// Returns a hexadecimal text as the number that it is.
fn number(hexadecimal: String) -> AnyValue {
    match event::number(&hexadecimal) {
        Some(value) => int(value.cast_signed()),
        None => text(hexadecimal),
    }
}

fn of_hit(line: EventLine, probe: Option<&Traced>, clock: &Clock) -> Seen {
    let mut attributes = vec![
        attribute("exotrace.event", text(line.event.clone())),
        attribute("code.function.name", text(line.function.clone())),
        attribute("exotrace.pc", number(line.pc)),
        attribute("exotrace.cpu", int(line.cpu.into())),
    ];
    if let Some(tid) = line.tid {
        attributes.push(attribute("thread.id", int(tid.into())));
    }
    if let Some(comm) = line.comm {
        attributes.push(attribute("thread.name", text(comm)));
    }
    let names = probe.map_or(&[][..], |probe| probe.arguments.as_slice());
    let name = |place: usize| match names.get(place) {
        Some(name) if !name.is_empty() => format!("exotrace.argument.{name}"),
        _ => format!("exotrace.argument.{place}"),
    };
    for (place, argument) in line.args.into_iter().flatten().enumerate() {
        attributes.push(attribute(&name(place), number(argument)));
    }
    for (place, string) in line.strings {
        if let (Ok(place), Some(string)) = (place.parse(), string) {
            let key = format!("{}.text", name(place));
            attributes.push(attribute(&key, text(string)));
        }
    }
    if let Some(returned) = line.returned {
        attributes.push(attribute("exotrace.return", number(returned)));
    }
    for (key, stack) in [
        ("exotrace.kernel_stack", line.kstack),
        ("exotrace.user_stack", line.ustack),
    ] {
        if !stack.is_empty() {
            attributes.push(attribute(key, texts(stack)));
        }
    }
    Seen {
        unix_ns: clock.unix_ns(line.tsc),
        event: line.event,
        function: line.function,
        name: line.probe,
        pid: line.pid,
        tid: line.tid,
        attributes,
    }
}

/// Returns what the JSON of a device's record says. Its fields become attributes.
fn of_device(json: &str) -> Option<Seen> {
    use serde_json::Value as Json;
    let Ok(Json::Object(fields)) = serde_json::from_str(json) else {
        return None;
    };
    let field = |name: &str| fields.get(name);
    let word = |name: &str| field(name).and_then(Json::as_str).unwrap_or_default();
    let id = |name: &str| field(name)?.as_u64().and_then(|id| u32::try_from(id).ok());
    let time = field("time").or_else(|| field("time_ns"));
    let name = match (word("probe"), word("event")) {
        ("", event) => event,
        (probe, _) => probe,
    };
    let mut seen = Seen {
        unix_ns: time.and_then(Json::as_u64).unwrap_or_else(unix_ns_now),
        event: word("event").to_owned(),
        function: word("function").to_owned(),
        name: name.to_owned(),
        pid: id("pid"),
        tid: id("tid").or_else(|| id("pid")),
        attributes: Vec::new(),
    };
    for (key, value) in &fields {
        let key = match key.as_str() {
            "time" | "time_ns" | "clock" => continue,
            "function" => "code.function.name".to_owned(),
            "comm" => "thread.name".to_owned(),
            key => format!("exotrace.{key}"),
        };
        let value = match value {
            Json::Null => continue,
            Json::Number(value) => match value.as_i64() {
                Some(value) => int(value),
                None => text(value.to_string()),
            },
            Json::String(value) => text(value.clone()),
            Json::Array(values) => {
                let shown = |value: &Json| {
                    value
                        .as_str()
                        .map_or_else(|| value.to_string(), str::to_owned)
                };
                texts(values.iter().map(shown).collect())
            }
            other => text(other.to_string()),
        };
        seen.attributes.push(attribute(&key, value));
    }
    Some(seen)
}

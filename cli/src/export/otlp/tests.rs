//! Conversion, and the ways in which a collector may fail. Other definitions read the messages in
//! the tests of the command.
#![allow(clippy::unwrap_used, clippy::indexing_slicing)]

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};

use opentelemetry_proto::tonic::collector::logs::v1::{
    ExportLogsPartialSuccess, ExportLogsServiceResponse,
};
use opentelemetry_proto::tonic::logs::v1::LogRecord;
use opentelemetry_proto::tonic::trace::v1::Span;
use prost::Message;

use super::*;

const CLOCK: Clock = Clock {
    tsc: 0,
    unix_ns: 1000,
    hz: 1_000_000_000,
};

fn hit(event: &str, function: &str, tid: u32, tsc: u64) -> Record {
    let line = serde_json::json!({
        "event": event, "probe": format!("kprobe:vmlinux:{function}:{event}"), "function": function,
        "pc": "0x10", "tsc": tsc, "cpu": 1, "pid": 5, "tid": tid, "comm": format!("t{tid}"),
        "args": ["0xffffffffffffffff"], "strings": {"0": "text"}, "kstack": ["a", "b"],
    });
    let probe = Traced {
        name: String::new(),
        function: function.to_owned(),
        arguments: vec!["file".into()],
        signed: vec![false],
    };
    Record::Hit {
        line: Box::new(serde_json::from_value(line).unwrap()),
        probe: Some(Arc::new(probe)),
        clock: CLOCK,
    }
}

/// Returns the logs and spans of records, with the number of those that are unpaired.
fn converted(form: Form, records: Vec<Record>) -> (Vec<LogRecord>, Vec<Span>, u64) {
    let mut converter = Converter::new("vm", form);
    for record in records {
        converter.take(record, 1);
    }
    let (mut logs, mut spans) = (Vec::new(), Vec::new());
    for request in converter.requests().0 {
        match request {
            Request::Logs(request, _) => {
                let scopes = request.resource_logs.into_iter().flat_map(|r| r.scope_logs);
                logs.extend(scopes.flat_map(|scope| scope.log_records));
            }
            Request::Spans(request, _) => {
                let scopes = request
                    .resource_spans
                    .into_iter()
                    .flat_map(|r| r.scope_spans);
                spans.extend(scopes.flat_map(|scope| scope.spans));
            }
            Request::Metrics(_) => {}
        }
    }
    (logs, spans, converter.unpaired())
}

#[test]
fn a_hit_is_a_log_of_its_process() {
    let (logs, spans, unpaired) = converted(Form::Logs, vec![hit("entry", "f", 6, 7)]);
    assert_eq!((logs.len(), spans.len(), unpaired), (1, 0, 0));
    assert_eq!(logs[0].time_unix_nano, 1007);
    assert_eq!(logs[0].event_name, "kprobe:vmlinux:f:entry");
    let shown = format!("{:?}", logs[0].attributes);
    for part in [
        "\"exotrace.argument.file\", value: Some(AnyValue { value: Some(IntValue(-1",
        "\"exotrace.argument.file.text\"",
        "\"thread.name\"",
        "\"exotrace.kernel_stack\"",
    ] {
        assert!(shown.contains(part), "{part} is not in {shown}");
    }
}

#[test]
fn entries_and_returns_are_spans_with_their_callers_as_parents() {
    let records = [
        ("return", "before", 1, 1),
        ("entry", "a", 1, 2),
        ("entry", "b", 1, 3),
        ("entry", "a", 2, 4),
        ("entry", "lost", 1, 5),
        ("return", "b", 1, 6),
        ("return", "a", 1, 7),
        ("point", "p", 1, 8),
    ];
    let records = records.map(|(event, function, tid, tsc)| hit(event, function, tid, tsc));
    let (logs, spans, unpaired) = converted(Form::Spans, records.to_vec());
    assert_eq!(logs.len(), 1);
    // Those are `before`, `lost`, and `a` of thread 2.
    assert_eq!(unpaired, 3);
    let [inner, outer] = spans.as_slice() else {
        panic!("{spans:?}")
    };
    let times = |span: &Span| (span.start_time_unix_nano, span.end_time_unix_nano);
    assert_eq!((inner.name.as_str(), times(inner)), ("b", (1003, 1006)));
    assert_eq!((outer.name.as_str(), times(outer)), ("a", (1002, 1007)));
    assert_eq!(inner.parent_span_id, outer.span_id);
    assert_eq!(inner.trace_id, outer.trace_id);
    assert_eq!((outer.trace_id.len(), outer.span_id.len()), (16, 8));
    assert!(outer.parent_span_id.is_empty());
}

#[test]
fn open_calls_are_bounded() {
    let entries = |count: u32, tid: fn(u32) -> u32| {
        let records = (0..count).map(|number| hit("entry", "f", tid(number), number.into()));
        converted(Form::Spans, records.collect()).2
    };
    assert_eq!(entries(1000, |_| 1), 1000);
    assert_eq!(entries(5000, |number| number), 5000);
}

#[test]
fn records_of_devices_are_logs_or_spans() {
    let of = |event: &str, time: u64| {
        let json = format!(
            "{{\"event\":\"{event}\",\"pid\":7,\"function\":\"g\",\"time\":{time},\"args\":[\"0x1\"],\"nothing\":null}}"
        );
        Record::Device(json)
    };
    let records = vec![of("entry", 5), of("return", 9), Record::Device("no".into())];
    let (logs, _, _) = converted(Form::Logs, records.clone());
    assert_eq!(logs.len(), 2);
    assert_eq!(logs[0].time_unix_nano, 5);
    let (_, spans, unpaired) = converted(Form::Spans, records);
    assert_eq!((spans.len(), unpaired), (1, 0));
    assert_eq!(spans[0].end_time_unix_nano, 9);
}

#[test]
fn an_endpoint_is_a_url_without_tls() {
    for (text, expected) in [
        ("http://collector", Ok("http://collector:4318")),
        ("http://[::1]:99/otlp/", Ok("http://[::1]:99/otlp")),
        ("grpc://127.0.0.1", Ok("grpc://127.0.0.1:4317")),
        ("https://x:1", Err("TLS is not supported")),
        ("grpc://x/path", Err("invalid URL")),
        ("localhost:4318", Err("invalid URL")),
        ("http://a@b", Err("invalid URL")),
        ("", Err("invalid URL")),
    ] {
        let parsed = text.parse::<Endpoint>();
        match (parsed, expected) {
            (Ok(found), Ok(expected)) => assert_eq!(found.to_string(), expected),
            (Err(found), Err(expected)) => {
                assert!(found.to_string().contains(expected), "{text}: {found}");
            }
            (found, _) => panic!("{text}: {found:?}"),
        }
    }
}

/// Reads one request with its body.
fn read_request(stream: &mut TcpStream) -> Option<Vec<u8>> {
    let mut bytes = Vec::new();
    let mut part = [0; 4096];
    loop {
        let text = String::from_utf8_lossy(&bytes).into_owned();
        if let Some((head, _)) = text.split_once("\r\n\r\n") {
            let length = head.to_lowercase();
            let length = length.split("content-length: ").nth(1)?;
            let length: usize = length.lines().next()?.trim().parse().ok()?;
            if bytes.len() >= head.len() + 4 + length {
                return Some(bytes);
            }
        }
        match stream.read(&mut part).ok()? {
            0 => return None,
            count => bytes.extend_from_slice(part.get(..count)?),
        }
    }
}

/// Serves answers in turn, each on any connection, and returns the number of requests.
fn collector(answers: Vec<(u16, Vec<u8>)>) -> (Endpoint, JoinHandle<usize>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let serving = std::thread::spawn(move || {
        let mut answers = answers.into_iter().peekable();
        let mut requests = 0;
        while answers.peek().is_some() {
            let (mut stream, _) = listener.accept().unwrap();
            while answers.peek().is_some() && read_request(&mut stream).is_some() {
                requests += 1;
                let (status, body) = answers.next().unwrap();
                let head = format!(
                    "HTTP/1.1 {status} x\r\ncontent-length: {}\r\n\r\n",
                    body.len()
                );
                stream.write_all(head.as_bytes()).unwrap();
                stream.write_all(&body).unwrap();
            }
        }
        requests
    });
    (url.parse().unwrap(), serving)
}

#[test]
fn what_a_collector_takes_refuses_and_puts_off_is_counted() {
    let partial = ExportLogsServiceResponse {
        partial_success: Some(ExportLogsPartialSuccess {
            rejected_log_records: 2,
            error_message: "no".into(),
        }),
    };
    let sent = |taken, dropped, refused| Sent {
        taken,
        dropped,
        refused,
        ..Sent::default()
    };
    for (answers, expected) in [
        (vec![(200, Vec::new())], sent(3, 0, 0)),
        (vec![(200, partial.encode_to_vec())], sent(1, 0, 2)),
        (vec![(400, Vec::new())], sent(0, 0, 3)),
        (
            vec![(503, Vec::new()), (429, Vec::new()), (200, Vec::new())],
            sent(3, 0, 0),
        ),
        (vec![(200, b"\xff\xff".to_vec())], sent(3, 0, 0)),
    ] {
        let count = answers.len();
        let (endpoint, serving) = collector(answers);
        let mut otlp = Otlp::start(endpoint, "vm", Form::Logs).unwrap();
        for tsc in 0..3 {
            otlp.record(hit("entry", "f", 1, tsc));
        }
        assert_eq!(otlp.finish(), expected);
        assert_eq!(serving.join().unwrap(), count);
    }
}

/// A collector that answers nothing holds up nobody, and what finds no room is counted.
#[test]
fn records_beyond_the_room_are_dropped_and_the_caller_does_not_wait() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let mut otlp = Otlp::start(url.parse().unwrap(), "vm", Form::Logs).unwrap();
    let record = hit("entry", "f", 1, 1);
    let fitting = (ROOM / record.bytes()) as u64;
    for _ in 0..fitting + 10_000 {
        otlp.record(record.clone());
    }
    otlp.flush();
    assert!(otlp.shared.lock().waiting <= ROOM);
    assert_eq!(otlp.shared.lock().dropped, 10_000);
    let sent = otlp.finish();
    assert_eq!((sent.taken, sent.dropped), (0, fitting + 10_000));
}

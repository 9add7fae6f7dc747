//! The reader of events in Python, `cli/examples/read_events.py`, on recorded events: from a file,
//! from a pipe, and from a socket like those in a machine's run directory.

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::thread;

use support::command::World;
use support::data;
use support::story;
use trace_devices::ptrace::record::Record;
use trace_devices::ptrace::render::Json;
use trace_devices::render::Render;
use trace_devices::trace_line::{LineKind, TraceLine};

const READER: &str = "cli/examples/read_events.py";

fn or_end<T>(what: &str, result: std::io::Result<T>) -> T {
    result.unwrap_or_else(|error| panic!("{what}: {error}"))
}

/// Returns the reader's output for one source; events come from `stdin` if that is given.
fn reader(kind: &str, source: &Path, stdin: Option<File>) -> Output {
    let mut command = Command::new("python3");
    command.arg(data::source(READER)).arg(kind).arg(source);
    command.stdin(stdin.map_or_else(Stdio::null, Stdio::from));
    or_end("python3", command.output())
}

/// Returns its output for these bytes from each kind of source.
fn read(kind: &str, bytes: &[u8]) -> [(&'static str, Output); 3] {
    let world = World::new();
    let (file, socket) = (world.path("events"), world.path("socket"));
    or_end("events", fs::write(&file, bytes));
    let from_file = reader(kind, &file, None);

    let mut cat = Command::new("cat");
    let mut cat = or_end("cat", cat.arg(&file).stdout(Stdio::piped()).spawn());
    let mut command = Command::new("python3");
    command.arg(data::source(READER)).arg(kind);
    if let Some(pipe) = cat.stdout.take() {
        command.stdin(pipe);
    }
    let from_pipe = or_end("python3", command.output());
    or_end("cat", cat.wait());

    let listener = or_end("socket", UnixListener::bind(&socket));
    let sent = bytes.to_vec();
    let server = thread::spawn(move || {
        let (mut connection, _) = listener.accept()?;
        // Sockets cut a stream anywhere.
        sent.chunks(11)
            .try_for_each(|piece| connection.write_all(piece))
    });
    let from_socket = reader(kind, &socket, None);
    or_end(
        "server",
        server.join().unwrap_or_else(|_| panic!("the server")),
    );
    [
        ("file", from_file),
        ("pipe", from_pipe),
        ("socket", from_socket),
    ]
}

/// Returns the lines that it prints, the same from every source.
fn lines(kind: &str, bytes: &[u8]) -> Vec<String> {
    let outputs = read(kind, bytes);
    let mut printed = outputs.map(|(source, output)| {
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{kind} from a {source}: {errors}");
        assert_eq!(errors, "", "{kind} from a {source}");
        String::from_utf8_lossy(&output.stdout).into_owned()
    });
    assert_eq!(printed[0], printed[1], "{kind}: file and pipe");
    assert_eq!(printed[0], printed[2], "{kind}: file and socket");
    printed[0].split_off(0).lines().map(str::to_owned).collect()
}

fn records() -> Vec<u8> {
    let records = story::records();
    records.iter().flat_map(Record::to_bytes).collect()
}

#[test]
fn records_are_read() {
    let read = lines("ptrace", &records());
    assert_eq!(read.len(), story::records().len());
    let expected = [
        "1790000000000000000 100 name cpu=0 arg=0x6873",
        "1790000000000001000 100 run cpu=0 arg=0x0",
        "1790000000000005000 100 trap cpu=0 arg=0x2000000000000039",
    ];
    assert_eq!(read[..3], expected);
    let unknown = "1790000000000096000 99 unknown cpu=0 arg=0x1";
    assert!(read.iter().any(|line| line == unknown), "{read:#?}");
}

#[test]
fn lines_are_read() {
    let line = |kind, pid, arguments| TraceLine {
        kind,
        pc: 0xffff_ffff_8016_c2c6,
        ticks: 0x96_d201_1acb,
        pid,
        arguments,
    };
    let bytes = [
        line(LineKind::Entry, 0x57, [1, 2, 3, 0]),
        line(LineKind::Exit, 0x57, [u64::MAX, 0, 0, 0]),
    ];
    let bytes: Vec<u8> = bytes.iter().flat_map(TraceLine::to_bytes).collect();
    let expected = [
        "647768382155 87 entry pc=0xffffffff8016c2c6 args=['0x1', '0x2', '0x3', '0x0']",
        "647768382155 87 return pc=0xffffffff8016c2c6 args=['0xffffffffffffffff']",
    ];
    assert_eq!(lines("trace", &bytes), expected);
}

/// Checks the same events as objects: process, time, CPU, and argument are the same, with decoded
/// values added.
#[test]
fn objects_are_read() {
    let (mut json, mut format) = (Vec::new(), Json::default());
    for record in story::records() {
        or_end("JSON", format.record(&record, &mut json));
    }
    let (objects, records) = (lines("json", &json), lines("ptrace", &records()));
    assert_eq!(objects.len(), records.len());
    for (object, record) in objects.iter().zip(&records) {
        for part in record.split(' ') {
            let there = object.split(' ').any(|found| found == part);
            assert!(there, "{part} is missing in {object}");
        }
    }
    assert!(objects[2].ends_with(" trap=syscall syscall=fork number=57"));
}

#[test]
fn a_cut_event_is_told() {
    let all = records();
    for (source, output) in read("ptrace", &all[..28 + 5]) {
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success(), "{source}");
        assert_eq!(errors.trim(), "the last event has 5 bytes instead of 28");
        let printed = String::from_utf8_lossy(&output.stdout);
        assert_eq!(printed.lines().count(), 1, "{source}");
    }
}

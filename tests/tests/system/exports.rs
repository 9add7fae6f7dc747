//! Hits in the systems that keep data, read back by those systems' own programs. The network is
//! needed only the first time.

use std::collections::BTreeSet;
use std::fs;

use rustix::process::Signal;
use serde_json::Value;
use support::command::{Running, World, words};
use support::second_opinion::duckdb::query;
use support::second_opinion::otlp::{Receiver, attributes, records};
use support::second_opinion::prometheus::{Prometheus, free_port};
use support::shell::{COMMAND_LIMIT, snapshot_folder};
use support::{Host, host};

/// A machine's stream: two probes, and events with all that an event can have.
const STREAM: &str = r#"
{"line":"begin","probes":[{"name":"kprobe:vmlinux:vfs_read:entry","function":"vfs_read","arguments":["file","buf"],"signed":[false,false]},{"name":"kprobe:vmlinux:vfs_read:return","function":"vfs_read","arguments":[],"signed":[]}],"clock":{"tsc":1000,"unix_ns":1700000000000000001},"hz":1000000000,"skipped":[],"open":[]}
{"line":"event","probe":0,"event":{"event":"entry","probe":"kprobe:vmlinux:vfs_read:entry","function":"vfs_read","pc":"0xffffffff81000000","tsc":1000,"cpu":1,"pid":7,"tid":8,"comm":"it's","args":["0xffff888000000000","0x10"],"strings":{"1":"/etc/passwd"},"kstack":["ksys_read+0x5","do_syscall_64"]}}
{"line":"event","probe":1,"event":{"event":"return","probe":"kprobe:vmlinux:vfs_read:return","function":"vfs_read","pc":"0xffffffff81000000","tsc":2500,"cpu":1,"pid":7,"tid":8,"comm":"it's","return":"0xfffffffffffffff7"}}
{"line":"event","probe":0,"event":{"event":"entry","probe":"kprobe:vmlinux:vfs_read:entry","function":"vfs_read","pc":"0xffffffff81000000","tsc":1000000,"cpu":0,"pid":null,"tid":null}}
"#;

#[test]
fn duckdb_reads_the_rows_of_a_trace() {
    let table = exotrace::measured::table(STREAM.trim());
    let table = table.unwrap_or_else(|e| panic!("the table: {e}"));
    let world = World::new();
    let file = world.path("trace.parquet");
    fs::write(&file, table).unwrap_or_else(|e| panic!("{}: {e}", file.display()));
    for (asked, expected) in [
        ("select count(*) from ?", &["3"][..]),
        (
            "select event, provider, module, function, name, cpu, pid, tid, comm from ?",
            &[
                "entry|kprobe|vmlinux|vfs_read|entry|1|7|8|it's",
                "return|kprobe|vmlinux|vfs_read|return|1|7|8|it's",
                "entry|kprobe|vmlinux|vfs_read|entry|0|||",
            ],
        ),
        (
            "select distinct typeof(time), typeof(arg0), typeof(pc), typeof(kstack) from ?",
            &["TIMESTAMPTZ_NS|BIGINT|UBIGINT|VARCHAR[]"],
        ),
        (
            "select epoch_ns(time), tsc, pc from ? where returned < 0",
            &["1700000000000001501|2500|18446744071578845184"],
        ),
        (
            "select to_hex(arg0), arg1, text1, returned from ?",
            &["FFFF888000000000|16|/etc/passwd|", "|||-9", "|||"],
        ),
        (
            "select kstack[1], len(kstack), ustack from ? where kstack is not null",
            &["ksys_read+0x5|2|"],
        ),
        (
            "select function, max(epoch_ns(time)) - min(epoch_ns(time)) from ? group by all",
            &["vfs_read|999000"],
        ),
        (
            "select decode(value)::json->'kprobe:vmlinux:vfs_read:entry'->>1 from parquet_kv_metadata(?) \
             where decode(key) = 'exotrace.arguments'",
            &["buf"],
        ),
    ] {
        assert_eq!(query(&file, asked), expected, "{asked}");
    }
}

/// Traces a guest's calls into a file until Ctrl-C, and counts the file's rows.
#[test]
fn a_trace_of_a_guest_is_a_table_when_it_is_interrupted() {
    let host = host!();
    let world = World::new();
    let (mut machine, name) = restored(&world, host);
    let mut trace = world.start(words(
        "trace -o calls.parquet kprobe:__x64_sys_getppid: --comm syscount",
    ));
    trace.wait_until("probes", COMMAND_LIMIT, |_, stderr| {
        stderr.contains("end with Ctrl-C")
    });
    let read = world.start(words("read ptrace --all -o processes.parquet"));
    machine.type_line("syscount 500; echo done=$((2*21))");
    machine.wait_until("calls", COMMAND_LIMIT, |stdout, _| {
        stdout.contains("done=42")
    });
    trace.signal(Signal::INT);
    let ended = trace.finish(COMMAND_LIMIT);
    assert_eq!(ended.status, 0, "{ended:?}");
    let file = world.path("calls.parquet");
    let rows = query(
        &file,
        "select event, function, comm, count(*), count(returned) from ? group by all order by 1",
    );
    assert_eq!(
        rows,
        [
            "entry|__x64_sys_getppid|syscount|500|0",
            "return|__x64_sys_getppid|syscount|500|500"
        ],
        "{ended:?}"
    );
    read.signal(Signal::INT);
    let ended = read.finish(COMMAND_LIMIT);
    assert_eq!(ended.status, 0, "{ended:?}");
    let told = query(&world.path("processes.parquet"), "select count(*) from ?");
    assert!(
        ended.stderr.contains(&format!("{} records", told[0])),
        "{told:?} {ended:?}"
    );
    world.stop(name, machine);
}

/// Counts a guest's calls with a script, and asks Prometheus for them.
#[test]
fn prometheus_has_the_maps_of_a_script_and_the_hits_of_a_trace() {
    let host = host!();
    let world = World::new();
    let (mut machine, name) = restored(&world, host);
    let script = "kprobe:__x64_sys_getppid { @calls[comm] = count(); @sizes = hist(arg0 % 1 + 5); @last = 7; }";
    let mut line = words("trace --metrics 127.0.0.1:0 -e");
    line.push(script.into());
    let mut script = world.start(line);
    let mut trace = world.start(words(
        "trace --metrics 127.0.0.1:0 -o /dev/null kprobe:__x64_sys_getppid:entry",
    ));
    let targets = [
        target(&mut script, "attached 1 probe"),
        target(&mut trace, "1 probe;"),
    ];
    let targets = targets.each_ref().map(String::as_str);
    let taken = world.run(
        words(&format!(
            "trace --metrics {} kprobe:vfs_read:entry",
            targets[0]
        )),
        COMMAND_LIMIT,
    );
    assert_eq!(taken.status, 1, "{taken:?}");
    assert_eq!(taken.stderr.lines().count(), 1, "{taken:?}");
    assert!(taken.stderr.contains("Address already in use"), "{taken:?}");
    machine.type_line("syscount 500; echo done=$((2*21))");
    machine.wait_until("calls", COMMAND_LIMIT, |stdout, _| {
        stdout.contains("done=42")
    });
    let prometheus = Prometheus::start(&world, &targets);
    for (query, value) in [
        ("exotrace_map_calls_total{comm=\"syscount\"}", 500.0),
        ("exotrace_map_sizes_count", 500.0),
        ("exotrace_map_sizes_bucket{le=\"7.0\"}", 500.0),
        ("exotrace_map_sizes_bucket{le=\"+Inf\"}", 500.0),
        ("exotrace_map_last", 7.0),
        (
            "max(exotrace_probe_hits_total{probe=\"kprobe:vmlinux:__x64_sys_getppid:entry\"})",
            500.0,
        ),
        ("sum(exotrace_events_total)", 1000.0),
        ("sum(exotrace_lost_events_total)", 0.0),
        ("count(exotrace_cost_seconds_total > 0)", 2.0),
        ("sum(exotrace_series_left_out)", 0.0),
    ] {
        let series = prometheus.wait_for(
            query,
            |series| matches!(series, [(_, found)] if *found == value),
        );
        let labels = &series[0].0;
        if labels.get("job").is_some() {
            assert_eq!(labels["machine"], name, "{labels}");
        }
    }
    script.signal(Signal::INT);
    trace.signal(Signal::INT);
    for ended in [script.finish(COMMAND_LIMIT), trace.finish(COMMAND_LIMIT)] {
        assert_eq!(ended.status, 0, "{ended:?}");
    }
    world.stop(name, machine);
}

/// Sends a guest's calls to a receiver: as logs by HTTP after two refusals, as spans by gRPC, and a
/// script's map as metrics.
#[test]
fn a_collector_gets_logs_spans_and_metrics() {
    let host = host!();
    let world = World::new();
    let (mut machine, name) = restored(&world, host);
    let mut refusing = Receiver::start(&world, Some((503, 2)));
    let mut receiver = Receiver::start(&world, None);
    let (http, grpc) = (receiver.http(), receiver.grpc());
    let nobody = format!("http://127.0.0.1:{}", free_port());
    let trace = |url: &str, more: &str| {
        let line = format!("trace -o /dev/null --comm syscount --otlp {url} {more}");
        let mut trace = world.start(words(&line));
        trace.wait_until("probes", COMMAND_LIMIT, |_, stderr| {
            stderr.contains("end with Ctrl-C")
        });
        trace
    };
    let logs = trace(&refusing.http(), "kprobe:__x64_sys_getppid:entry");
    let spans = trace(&grpc, "--otlp-spans kprobe:__x64_sys_getppid:");
    let away = trace(&nobody, "kprobe:__x64_sys_getppid:entry");
    let script = "kprobe:__x64_sys_getppid /comm == \"syscount\"/ { @calls[comm] = count(); @sizes = hist(5); }";
    let mut line = words(&format!("trace --otlp {grpc} -e"));
    line.push(script.into());
    let mut script = world.start(line);
    script.wait_until("probes", COMMAND_LIMIT, |_, stderr| {
        stderr.contains("attached 1 probe")
    });
    let read = world.start(words(&format!(
        "read ptrace --all -o /dev/null --otlp {http}"
    )));
    machine.type_line("syscount 500; echo done=$((2*21))");
    machine.wait_until("calls", COMMAND_LIMIT, |stdout, _| {
        stdout.contains("done=42")
    });
    let mut told = Vec::new();
    for command in [logs, spans, away, script, read] {
        command.signal(Signal::INT);
        let ended = command.finish(COMMAND_LIMIT);
        assert_eq!(ended.status, 0, "{ended:?}");
        told.push(ended.stderr);
    }
    assert!(
        told[0].contains("503") && told[0].contains("--otlp: 500 records and "),
        "{told:?}"
    );
    assert!(told[1].contains("--otlp: 500 records and "), "{told:?}");
    let dropped = "--otlp: 0 records taken, 500 dropped: the collector was away or too slow, \
                   the last metrics not taken\n";
    assert!(told[2].contains(dropped), "{told:?}");
    assert_eq!(told[2].matches("tried again").count(), 1, "{told:?}");
    let is_device =
        |log: &Value| log["attributes"]["thread.name"] == "syscount" && log["eventName"] == "run";
    let requests = receiver.wait_for("all records", |requests| {
        records(requests, "spans").len() == 500
            && records(requests, "logs").iter().any(is_device)
            && !records(requests, "metrics").is_empty()
    });
    let refused = refusing.wait_for("all logs", |requests| {
        records(requests, "logs").len() == 500
    });
    let logs = records(&refused, "logs");
    let is_call = |log: &&Value| log["eventName"] == "kprobe:vmlinux:__x64_sys_getppid:entry";
    let log = logs
        .iter()
        .find(is_call)
        .unwrap_or_else(|| panic!("{logs:?}"));
    let resource = &log["resource"];
    assert_eq!(resource["host.name"], name, "{log}");
    assert_eq!(resource["process.executable.name"], "syscount", "{log}");
    let tid = &log["attributes"]["thread.id"];
    assert!(tid.is_string() && *tid == resource["process.pid"], "{log}");
    let spans = records(&requests, "spans");
    let mut ids = BTreeSet::new();
    for span in &spans {
        let time = |key: &str| span[key].as_str().and_then(|time| time.parse::<u64>().ok());
        let (start, end) = (time("startTimeUnixNano"), time("endTimeUnixNano"));
        assert!(start.is_some() && start < end, "{span}");
        assert_eq!(span["name"], "__x64_sys_getppid", "{span}");
        assert!(span["attributes"]["exotrace.return"].is_string(), "{span}");
        ids.insert(span["spanId"].to_string());
    }
    assert_eq!(ids.len(), 500);
    let metrics = records(&requests, "metrics");
    let last = |name: &str| {
        let found = metrics.iter().rfind(|metric| metric["name"] == name);
        found.unwrap_or_else(|| panic!("{name} is not in {metrics:?}"))
    };
    let calls = &last("exotrace_map_calls")["sum"]["dataPoints"][0];
    assert_eq!(calls["asDouble"], 500.0, "{calls}");
    assert_eq!(attributes(&calls["attributes"])["comm"], "syscount");
    let sizes = &last("exotrace_map_sizes")["histogram"]["dataPoints"][0];
    assert_eq!(sizes["count"], "500", "{sizes}");
    assert_eq!(sizes["explicitBounds"][0], 7.0, "{sizes}");
    assert_eq!(sizes["bucketCounts"][0], "500", "{sizes}");
    world.stop(name, machine);
}

/// Waits until a command has armed its probes, and returns the address of its metrics.
fn target(command: &mut Running, armed: &str) -> String {
    command.wait_until("probes", COMMAND_LIMIT, |_, stderr| stderr.contains(armed));
    let (_, stderr) = command.printed();
    let address = stderr.split("metrics at http://").nth(1);
    let address = address.and_then(|rest| rest.split("/metrics").next());
    address.unwrap_or_else(|| panic!("{stderr}")).to_owned()
}

/// Starts a machine with a shell in `world`, and returns it with its name.
fn restored(world: &World, host: &Host) -> (Running, &'static str) {
    let mut line = words("run --name exports --restore");
    line.push(snapshot_folder(host).into());
    let mut machine = world.start(line);
    let folder = world.path("run/exotrace/exports");
    machine.wait_until("machine", COMMAND_LIMIT, |_, _| {
        folder.join("ports").exists()
    });
    (machine, "exports")
}

#[test]
fn a_script_writes_no_table() {
    let world = World::new();
    let ended = world.run(
        words("trace --format parquet -o /dev/null -e BEGIN{exit()}"),
        COMMAND_LIMIT,
    );
    assert_eq!(ended.status, 2, "{ended:?}");
    assert!(ended.stderr.contains("not for a script"), "{ended:?}");
}

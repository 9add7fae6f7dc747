//! Hits in the systems that keep data, read back by those systems' own programs. The network is
//! needed only the first time.

use std::fs;

use rustix::process::Signal;
use support::command::{World, words};
use support::host;
use support::second_opinion::duckdb::query;
use support::shell::{COMMAND_LIMIT, snapshot_folder};

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
    let mut line = words("run --name exports --restore");
    line.push(snapshot_folder(host).into());
    let mut machine = world.start(line);
    let folder = world.path("run/exotrace/exports");
    machine.wait_until("machine", COMMAND_LIMIT, |_, _| {
        folder.join("ports").exists()
    });
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
    let stopped = world.run(words("stop --vm exports"), COMMAND_LIMIT);
    assert_eq!(stopped.status, 0, "{stopped:?}");
    machine.finish(COMMAND_LIMIT);
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

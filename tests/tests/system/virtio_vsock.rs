//! A guest with sockets to programs of the host, as its user finds it: connections in both
//! directions, refusals, and the same after a snapshot.

use std::ffi::OsString;
use std::fs;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::time::Instant;

use support::command::{Running, World};
use support::shell::COMMAND_LIMIT;
use support::{host, pc};

/// The port on which the guest sends back what it gets.
const ECHO: u32 = 7;
/// A port that a program of the host serves.
const SERVED: u32 = 9000;
/// A port that nobody serves, in the guest or on the host.
const NOBODY: u32 = 9999;
/// Bytes enough for many packets and for all buffers.
const LENGTH: usize = 300_000;

/// Returns bytes in which no two places are alike.
fn content() -> Vec<u8> {
    let words = (0..LENGTH as u32 / 4).map(|word| word.wrapping_mul(0x9e37_79b9));
    words.flat_map(u32::to_le_bytes).collect()
}

/// Connects to a port of the guest. Returns `None` if the guest refuses.
fn connect(socket: &Path, port: u32) -> io::Result<Option<UnixStream>> {
    let mut stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(COMMAND_LIMIT))?;
    stream.write_all(format!("CONNECT {port}\n").as_bytes())?;
    let mut line = Vec::new();
    // The line alone: bytes behind it are the connection's.
    while line.last() != Some(&b'\n') {
        let mut byte = [0];
        if stream.read(&mut byte)? == 0 {
            return Ok(None);
        }
        line.extend(byte);
    }
    let line = String::from_utf8_lossy(&line).into_owned();
    let port = line.strip_prefix("OK ").map(str::trim_end);
    assert!(
        port.is_some_and(|port| port.parse::<u32>().is_ok()),
        "{line:?}"
    );
    Ok(Some(stream))
}

/// Sends bytes to an end that sends them back.
fn comes_back(stream: &UnixStream) -> io::Result<()> {
    stream.set_read_timeout(Some(COMMAND_LIMIT))?;
    let sent = content();
    let mut back = Vec::new();
    let started = Instant::now();
    std::thread::scope(|scope| {
        let sending = scope.spawn(|| {
            (&*stream).write_all(&sent)?;
            stream.shutdown(Shutdown::Write)
        });
        (&*stream).read_to_end(&mut back)?;
        sending
            .join()
            .unwrap_or_else(|_| Err(io::ErrorKind::Other.into()))
    })?;
    assert!(back == sent, "{} bytes came back", back.len());
    println!("{LENGTH} bytes there and back, {:?}", started.elapsed());
    Ok(())
}

/// Checks that programs of the host reach the guest, and the guest a program of the host.
fn both_directions(machine: &mut Running, socket: &Path) {
    let before = echoed(machine);
    let stream = connect(socket, ECHO).unwrap_or_else(|e| panic!("{e}"));
    let stream = stream.unwrap_or_else(|| panic!("refused: {:?}", machine.printed()));
    comes_back(&stream).unwrap_or_else(|e| panic!("{e}: {:?}", machine.printed()));
    drop(stream);
    let mut name = socket.as_os_str().to_owned();
    name.push(format!("_{SERVED}"));
    let service = UnixListener::bind(&name).unwrap_or_else(|e| panic!("{e}"));
    machine.type_line(&format!("vsock connect {SERVED}"));
    let (stream, _) = service.accept().unwrap_or_else(|e| panic!("{e}"));
    comes_back(&stream).unwrap_or_else(|e| panic!("{e}: {:?}", machine.printed()));
    drop(stream);
    machine.wait_until("both ends", COMMAND_LIMIT, |printed, _| {
        printed.matches(&format!("vsock: {LENGTH} bytes")).count() == before + 2
    });
}

fn echoed(machine: &Running) -> usize {
    let (printed, _) = machine.printed();
    printed.matches(&format!("vsock: {LENGTH} bytes")).count()
}

/// Returns a count of an error's line in the guest's output.
fn errors(printed: &str, number: u32) -> usize {
    printed.matches(&format!("vsock: error {number}")).count()
}

#[test]
fn a_guest_and_programs_of_the_host_reach_each_other_and_again_after_a_snapshot() {
    let host = host!();
    let world = World::new();
    let connected = |folder: &Path, name: &str, cid: u32, socket: &Path| {
        let words = ["run", "--net", "off", "--name", name, "--restore"];
        let mut words: Vec<_> = words.map(OsString::from).into();
        let vsock = format!("{cid},{}", socket.display());
        words.extend([folder.into(), "--vsock".into(), vsock.into()]);
        words
    };
    let (booted, saved) = (pc::snapshot_folder(host), world.path("saved"));
    let socket = world.path("vsock");
    // A file in the way is reported before the guest runs, and stays.
    fs::write(&socket, "a file").unwrap_or_else(|e| panic!("{e}"));
    let refused = world.run(connected(booted, "vs", pc::CID, &socket), COMMAND_LIMIT);
    assert_eq!(refused.status, 1, "{refused:?}");
    assert!(refused.stderr.contains("no socket"), "{refused:?}");
    assert_eq!(fs::read(&socket).unwrap_or_default(), b"a file");
    fs::remove_file(&socket).unwrap_or_else(|e| panic!("{e}"));

    let mut machine = world.start(connected(booted, "vs", pc::CID, &socket));
    // Nobody listens on the host, or in the guest.
    machine.type_line(&format!("vsock connect {NOBODY}"));
    machine.wait_until("refusal", COMMAND_LIMIT, |printed, _| {
        errors(printed, 104) == 1
    });
    let refused = connect(&socket, NOBODY).unwrap_or_else(|e| panic!("{e}"));
    assert!(refused.is_none());
    machine.type_line(&format!("vsock listen {ECHO} &"));
    machine.wait_until("server", COMMAND_LIMIT, |printed, _| {
        printed.contains(&format!("vsock: listens on {ECHO}"))
    });
    both_directions(&mut machine, &socket);

    // A connection that is open as the machine is saved is lost for both sides.
    let stream = connect(&socket, ECHO).unwrap_or_else(|e| panic!("{e}"));
    let mut open = stream.unwrap_or_else(|| panic!("refused: {:?}", machine.printed()));
    open.write_all(b"line\n").unwrap_or_else(|e| panic!("{e}"));
    let mut line = String::new();
    let read = BufReader::new(&open).read_line(&mut line);
    assert_eq!((read.ok(), line.as_str()), (Some(5), "line\n"));
    let save = world.run(["snapshot", "--vm", "vs", "saved"], COMMAND_LIMIT);
    assert_eq!(save.status, 0, "{save:?}");
    world.stop("vs", machine);
    assert_eq!(open.read(&mut [0]).ok(), Some(0));
    assert!(!socket.exists(), "the socket stays at the end");

    // As another guest, at another socket.
    let socket = world.path("again");
    let mut machine = world.start(connected(&saved, "again", pc::CID + 1, &socket));
    machine.wait_until("lost connection", COMMAND_LIMIT, |printed, _| {
        errors(printed, 104) == 1
    });
    both_directions(&mut machine, &socket);
    world.stop("again", machine);

    // Without a name of its socket it leads nowhere.
    let line = "run --restore saved --net off --name again";
    let mut machine = world.start(line.split(' '));
    machine.wait_until("note", COMMAND_LIMIT, |printed, said| {
        said.contains("saved with --vsock 5,SOCKET") && errors(printed, 104) == 1
    });
    machine.type_line(&format!("vsock connect {SERVED}"));
    machine.wait_until("refusal", COMMAND_LIMIT, |printed, _| {
        errors(printed, 104) == 2
    });
    world.stop("again", machine);
}

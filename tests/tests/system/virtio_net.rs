//! A guest with a network card, as its user finds it: an address from the host's network, ports of
//! the host that lead to it, and the same after a snapshot.

use std::fs;
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use support::command::{Running, World};
use support::shell::COMMAND_LIMIT;
use support::{host, pc};

/// The port at which the guest sends back what it gets.
const ECHO: u16 = 7;
/// The commands that take an address, and serve.
const SERVE: &str = "ip link set lo up && ip link set eth0 up && udhcpc -i eth0 -n -q -s /lease > /tmp/lease && cat /tmp/lease; \
    (while :; do nc -l -p 7 -e cat; done) & echo serves-$?";
/// Bytes enough for many frames, in which no two places are alike.
const LENGTH: usize = 300_000;

/// Returns a free port of this host.
fn free_port() -> u16 {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0));
    let address = listener.and_then(|listener| listener.local_addr());
    address
        .unwrap_or_else(|e| panic!("a free port: {e}"))
        .port()
}

/// Sends bytes to the guest through `port`, and returns what comes back.
fn echo(port: u16, sent: &[u8]) -> io::Result<Vec<u8>> {
    let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port))?;
    stream.set_read_timeout(Some(COMMAND_LIMIT))?;
    let mut writer = stream.try_clone()?;
    let mut back = Vec::new();
    std::thread::scope(|scope| {
        let sending = scope.spawn(move || {
            writer.write_all(sent)?;
            writer.shutdown(Shutdown::Write)
        });
        stream.read_to_end(&mut back)?;
        sending
            .join()
            .unwrap_or_else(|_| Err(io::ErrorKind::Other.into()))
    })?;
    Ok(back)
}

/// Checks that the guest sends back what it gets. passt takes connections that the guest refuses
/// then: while its server starts anew, say.
fn guest_echoes(port: u16, machine: &Running) {
    let sent: Vec<u8> = (0..LENGTH as u32 / 4)
        .flat_map(|word| word.wrapping_mul(0x9e37_79b9).to_le_bytes())
        .collect();
    let started = Instant::now();
    loop {
        let back = echo(port, &sent);
        if back.as_ref().is_ok_and(|back| *back == sent) {
            println!("{LENGTH} bytes there and back, {:?}", started.elapsed());
            return;
        }
        let (stdout, stderr) = machine.printed();
        assert!(
            started.elapsed() < COMMAND_LIMIT,
            "{} bytes came back: {:?}\n{stdout}\n{stderr}",
            back.as_ref().map_or(0, Vec::len),
            back.err()
        );
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// Returns the process of passt that a machine has started.
fn passt(machine: &Running) -> Option<Pid> {
    let pid = machine.pid();
    let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).ok()?;
    let mut children = children.split_whitespace();
    let passt = children.find(|child| {
        fs::read_to_string(format!("/proc/{child}/comm"))
            .is_ok_and(|name| name.starts_with("passt"))
    });
    Pid::from_raw(passt?.parse().ok()?)
}

fn words(text: &str, files: &[(&str, &Path)]) -> Vec<String> {
    let word = |word: &str| {
        let file = files.iter().find(|(name, _)| *name == word);
        file.map_or_else(|| word.to_owned(), |(_, path)| path.display().to_string())
    };
    text.split_whitespace().map(word).collect()
}

#[test]
fn a_guest_is_on_the_hosts_network_and_stays_there_over_a_snapshot() {
    let host = host!();
    let world = World::new();
    let connected = |folder: &Path, name: &str, port: u16| {
        let line = format!("run --restore FOLDER --name {name} --net user,host={port}:{ECHO}");
        words(&line, &[("FOLDER", folder)])
    };
    let (booted, saved) = (pc::snapshot_folder(host), world.path("saved"));
    // A port in use is reported before the guest runs.
    let taken = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap_or_else(|e| panic!("{e}"));
    let port = taken.local_addr().unwrap_or_else(|e| panic!("{e}")).port();
    let refused = world.run(connected(booted, "net", port), COMMAND_LIMIT);
    assert_eq!(refused.status, 1, "{refused:?}");
    assert!(
        refused.stderr.contains(&port.to_string()) && refused.stderr.contains("in use"),
        "{refused:?}"
    );
    assert_eq!(refused.stdout, "");
    drop(taken);

    let port = free_port();
    let mut machine = world.start(connected(booted, "net", port));
    let address = pc::MAC.map(|byte| format!("{byte:02x}")).join(":");
    machine.type_line(
        "cat /sys/class/net/eth0/address /sys/class/net/eth0/mtu; ls /sys/class/net/eth0/queues",
    );
    machine.wait_until("address", COMMAND_LIMIT, |printed, _| {
        // A pair of queues for each of its CPUs.
        printed.contains(&format!("{}\r\n{}", address, pc::MTU))
            && ["rx-0", "rx-1", "tx-0", "tx-1"]
                .iter()
                .all(|queue| printed.contains(queue))
    });
    machine.type_line(SERVE);
    machine.wait_until("server", COMMAND_LIMIT, |printed, _| {
        printed.contains("lease-of-") && printed.contains("serves-0")
    });
    guest_echoes(port, &machine);

    let save = world.run(["snapshot", "--vm", "net", "saved"], COMMAND_LIMIT);
    assert_eq!(save.status, 0, "{save:?}");
    world.stop("net", machine);
    let port = free_port();
    let mut machine = world.start(connected(&saved, "again", port));
    guest_echoes(port, &machine);
    machine.type_line("cat /sys/class/net/eth0/carrier_changes /sys/class/net/eth0/carrier");
    machine.wait_until("link", COMMAND_LIMIT, |printed, _| {
        printed.contains("\r\n1\r\n")
    });

    // Without passt the guest continues, with its link down.
    let passt = passt(&machine).unwrap_or_else(|| panic!("no passt: {:?}", machine.printed()));
    kill_process(passt, Signal::KILL).unwrap_or_else(|e| panic!("{e}"));
    machine.wait_until("its end", COMMAND_LIMIT, |_, said| {
        said.contains("passt has ended") && said.contains("link is down")
    });
    machine.type_line(
        "until [ $(cat /sys/class/net/eth0/carrier) = 0 ]; do sleep 1; done; echo unplug''ged",
    );
    machine.wait_until("link down", COMMAND_LIMIT, |printed, _| {
        printed.contains("unplugged")
    });
    world.stop("again", machine);

    // What the snapshot says of ports is not done at its word.
    let mut machine = world.start(words("run --restore saved --name third", &[]));
    machine.wait_until("its ports", COMMAND_LIMIT, |_, said| {
        said.contains("no port of the host leads to the guest")
    });
    machine.type_line(
        "until [ $(cat /sys/class/net/eth0/carrier) = 1 ]; do sleep 1; done; echo plug''ged",
    );
    machine.wait_until("link up", COMMAND_LIMIT, |printed, _| {
        printed.contains("plugged")
    });
    world.stop("third", machine);
}

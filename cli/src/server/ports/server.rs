//! The sockets of the ports in a machine's run directory.

use std::io;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use clap::ValueEnum;

use crate::listener::{Leave, ListenError, Listener, Rules, check_peer};
use crate::protocol::ports::{ControlName, EventName};
use crate::server::ports::{Ports, framed, raw};

/// The socket that speaks in [messages](crate::protocol::ports).
pub const FRAMED: &str = "ports";

/// The largest number of connections to the message socket.
const MOST_FRAMED: usize = 64;
/// The largest number of connections to each plain socket.
const MOST_RAW: usize = 32;
/// The time that event readers have at the machine's end to read the remaining events.
const GRACE: Duration = Duration::from_secs(1);

/// The servers of all port sockets. When dropped, they end with all connections.
pub struct Server(#[expect(dead_code, reason = "serve until they are dropped")] Vec<Listener>);

impl Server {
    /// Listens in `folder` for clients of `ports`.
    ///
    /// # Errors
    /// If a socket cannot be made.
    pub fn start(folder: &Path, ports: &Arc<Ports>) -> Result<Self, ListenError> {
        let mut listeners = Vec::new();
        for name in EventName::value_variants().iter().copied() {
            let ports = ports.clone();
            let serve = move |stream: &_, leave: &_| raw::events(stream, leave, ports.events(name));
            listeners.push(listen(folder, name.as_str(), MOST_RAW, serve)?);
        }
        for name in ControlName::value_variants().iter().copied() {
            let ports = ports.clone();
            let serve =
                move |stream: &_, leave: &_| raw::control(stream, leave, ports.control(name));
            listeners.push(listen(folder, name.as_str(), MOST_RAW, serve)?);
        }
        let ports = ports.clone();
        let serve = move |stream: &_, leave: &_| framed::serve(stream, leave, &ports);
        listeners.push(listen(folder, FRAMED, MOST_FRAMED, serve)?);
        Ok(Self(listeners))
    }
}

/// Listens on the socket `name` in `folder`, for clients of this machine's user.
fn listen(
    folder: &Path,
    name: &'static str,
    most: usize,
    serve: impl Fn(&UnixStream, &Leave) -> io::Result<()> + Send + Sync + 'static,
) -> Result<Listener, ListenError> {
    let rules = Rules {
        name,
        most,
        grace: Some(GRACE),
    };
    Listener::start(&folder.join(name), rules, move |stream, leave| {
        check_peer(stream).map_err(io::Error::other)?;
        serve(stream, leave)
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::io::{Read, Write};
    use std::net::Shutdown;
    use std::time::Instant;

    use super::*;
    use crate::client::ports::{CallError, Client};
    use crate::protocol::ports::{Target, Waited};
    use crate::server::ports::toy::{LINES, REFUSED, World, lines, record, until};

    const LIMIT: Duration = Duration::from_secs(10);

    impl World {
        fn connect(&self, socket: &str) -> UnixStream {
            let stream = UnixStream::connect(self.folder.path().join(socket)).unwrap();
            stream.set_read_timeout(Some(LIMIT)).unwrap();
            stream
        }

        fn open(&self, target: Target) -> Result<Client, CallError> {
            Client::open(&self.folder.path().join(FRAMED), target)
        }

        /// Connects a plain reader and waits until the log knows of it.
        fn reader(&self) -> UnixStream {
            let before = self.toy.trace.readers();
            let stream = self.connect("trace");
            until("a reader", || self.toy.trace.readers() > before);
            stream
        }

        fn events(&self, name: EventName) -> Client {
            self.open(Target::Events(name)).unwrap()
        }
    }

    fn take(mut stream: &UnixStream, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        stream.read_exact(&mut bytes).unwrap();
        bytes
    }

    fn rest(mut stream: &UnixStream) -> Vec<u8> {
        let mut bytes = Vec::new();
        stream.read_to_end(&mut bytes).unwrap();
        bytes
    }

    #[test]
    fn every_connection_is_a_reader_of_its_own() {
        let world = World::new();
        world.toy.push_lines(0..3);
        let first = world.reader();
        let expected = lines(0..3);
        assert_eq!(take(&first, expected.len()), expected);
        let second = world.reader();
        world.toy.push_lines(3..5);
        let expected = lines(3..5);
        for reader in [&first, &second] {
            assert_eq!(take(reader, expected.len()), expected);
        }
        // Also for a client that sends nothing, as socat when its input is at its end.
        first.shutdown(Shutdown::Write).unwrap();
        world.toy.push_lines(5..6);
        assert_eq!(take(&first, 121), lines(5..6));
        drop((first, second));
        until("that readers close", || world.toy.trace.readers() == 0);
    }

    #[test]
    fn who_does_not_read_loses_and_holds_up_nobody() {
        let world = World::new();
        let slow = world.reader();
        let quick = world.reader();
        // More than a socket holds, so that the slow reader's thread waits.
        let mut sent = 0;
        while sent < 8000 {
            let batch = sent..sent + LINES as u64 / 2;
            sent = batch.end;
            let expected = lines(batch.clone());
            world.toy.push_lines(batch);
            assert_eq!(take(&quick, expected.len()), expected);
        }
        assert_eq!(world.toy.trace.counts().lost, 0);
        drop(quick);
        drop(slow);
        until("that readers close", || world.toy.trace.readers() == 0);
    }

    #[test]
    fn a_second_reader_of_ptrace_is_hung_up_on() {
        let world = World::new();
        world.toy.push_records(0..1);
        let first = world.connect("ptrace");
        assert_eq!(take(&first, 28), record(0));
        assert_eq!(rest(&world.connect("ptrace")), b"");
        let refused = world.open(Target::Events(EventName::Ptrace));
        let refused = refused.err().unwrap().to_string();
        assert_eq!(refused, "device or object already in use");
        drop(first);
        until("that the reader closes", || world.toy.ptrace.readers() == 0);
        world.toy.push_records(1..2);
        assert_eq!(take(&world.connect("ptrace"), 28), record(1));
    }

    #[test]
    fn a_line_is_a_command_and_is_answered_by_a_line() {
        let world = World::new();
        let long = [b'a'; 5000];
        for (sent, expected) in [
            (&b"start\n"[..], &b"\n"[..]),
            (b"start\nbad\nstop", b"\ntoy: bad is refused\n\n"),
            (b"a\xff\n", b"invalid command: expected UTF-8: invalid utf-8 sequence of 1 bytes from index 1\n"),
            (&long, b"a command has at most 4096 bytes\n"),
            (b"", b"#commands 3\nstart\nstart\nstop\n"),
        ] {
            let mut stream = world.connect("tracectl");
            stream.write_all(sent).unwrap();
            // The peer has already disconnected if everything was answered.
            let _ = stream.shutdown(Shutdown::Write);
            let answer = String::from_utf8(rest(&stream)).unwrap();
            assert_eq!(answer.as_bytes(), expected, "{answer}");
        }
        let mut talk = world.connect("ptracectl");
        for _ in 0..2 {
            talk.write_all(b"size 1024\n").unwrap();
            assert_eq!(take(&talk, 1), b"\n");
        }
        assert_eq!(world.toy.ptracectl.commands(), ["size 1024"; 2]);
    }

    #[test]
    fn reads_by_messages_give_what_is_there_and_waits_tell() {
        let world = World::new();
        let mut client = world.events(EventName::Trace);
        assert_eq!(client.record_bytes(), 121);
        assert_eq!(client.read(1000).unwrap(), b"");
        let short = Duration::from_millis(1);
        assert_eq!(client.wait(short).unwrap(), Waited::Nothing);
        world.toy.push_lines(0..3);
        assert_eq!(client.wait(LIMIT).unwrap(), Waited::Something);
        assert_eq!(client.read(250).unwrap(), lines(0..2));
        let mut other = world.events(EventName::Trace);
        assert_eq!(other.read(u32::MAX).unwrap(), lines(2..3));
        world.toy.push_lines(0..LINES as u64);
        other.read(u32::MAX).unwrap();
        assert_eq!(
            (client.dropped().unwrap(), other.dropped().unwrap()),
            (1, 0)
        );
        let refused = client.command(b"start").unwrap_err().to_string();
        assert_eq!(refused, "this port takes no commands");
    }

    #[test]
    fn commands_by_messages_come_back_with_their_error() {
        let world = World::new();
        let mut client = world.open(Target::Control(ControlName::Tracectl)).unwrap();
        client.command(b"start").unwrap();
        for (command, _, expected) in REFUSED {
            match client.command(command.as_bytes()) {
                Err(CallError::Refused { errno, text }) => {
                    assert_eq!(errno.raw_os_error(), expected, "{command}");
                    assert_eq!(text, format!("toy: {command} is refused"));
                }
                other => panic!("{command}: {other:?}"),
            }
        }
        assert_eq!(client.read(1).unwrap(), b"#commands 1\nstart\n");
        let mut stat = world.open(Target::Stat).unwrap();
        let text = String::from_utf8(stat.read(1).unwrap()).unwrap();
        assert!(text.contains("tracectl refused 8\n"), "{text}");
        assert_eq!(stat.clock().unwrap().unwrap().hz, 1_000_000_000);
        assert_eq!(stat.name(3).unwrap().as_deref(), Some("f3"));
        assert_eq!(stat.name(30).unwrap(), None);
    }

    #[test]
    fn readers_get_what_came_until_the_end() {
        let mut world = World::new();
        let plain = world.reader();
        let mut client = world.events(EventName::Trace);
        let mut idle = world.open(Target::Stat).unwrap();
        let server = world.server.take();
        world.toy.push_lines(0..2);
        let waiting = std::thread::spawn(move || {
            let mut seen = Vec::new();
            while client.wait(LIMIT).unwrap() == Waited::Something {
                seen.extend(client.read(u32::MAX).unwrap());
            }
            seen
        });
        let began = Instant::now();
        drop(server);
        assert!(began.elapsed() < LIMIT, "waits for no client");
        assert_eq!(rest(&plain), lines(0..2));
        assert_eq!(waiting.join().unwrap(), lines(0..2));
        idle.read(1).unwrap_err();
        assert_eq!(world.toy.trace.readers(), 0);
    }
}

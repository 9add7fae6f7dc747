//! One client of the device: requests and answers, one after the other.

use std::io::{self, IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use probes::engine::{LONGEST_WAIT, Waiter, WatchedStream};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use trace_devices::dt::wire::{self, Call, HEADER_SIZE, OPEN_SIZE};
use trace_devices::dt::{Errno, Refused, Reply, Session};

use crate::listener::check_peer;
use crate::server::dt::Shared;

/// The time that a client has to complete a request, or to receive an answer.
const PATIENCE: Duration = Duration::from_secs(10);

/// Serves a client until it closes its connection.
///
/// # Errors
/// If the connection fails.
pub(super) fn serve(shared: &Shared, stream: &UnixStream) -> io::Result<()> {
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let mut open = [0; OPEN_SIZE];
    (&*stream).read_exact(&mut open)?;
    let mut client = match opened(shared, stream, &open) {
        Ok(session) => Client {
            shared,
            stream,
            session,
            reason: String::new(),
        },
        Err(refused) => {
            log::info!("dt: an open is refused: {refused}");
            return send(stream, &wire::answer(Some(refused.errno), b""), None);
        }
    };
    send(stream, &wire::answer(None, b""), None)?;
    while wait_for_request(stream)? {
        let mut header = [0; HEADER_SIZE];
        (&*stream).read_exact(&mut header)?;
        let (code, length) = match wire::decode_request(&header) {
            Ok(header) => header,
            Err(refused) => {
                // The start of the next request is unknown.
                return send(stream, &wire::answer(Some(refused.errno), b""), None);
            }
        };
        let mut argument = vec![0; length];
        (&*stream).read_exact(&mut argument)?;
        let answered = client.answer(code, &argument);
        match answered {
            Ok(reply) => {
                let bytes = wire::answer(reply.partial, &reply.bytes);
                send(stream, &bytes, reply.descriptor)?;
                if let Some(remark) = reply.remark {
                    log::info!("dt: {remark}");
                    client.reason = remark;
                }
            }
            Err(refused) => {
                log::debug!("dt: request {code:#x}: {refused}");
                send(stream, &wire::answer(Some(refused.errno), b""), None)?;
                client.reason = refused.why;
            }
        }
    }
    Ok(())
}

fn opened(
    shared: &Shared,
    stream: &UnixStream,
    open: &[u8; OPEN_SIZE],
) -> Result<Session, Refused> {
    check_peer(stream).map_err(|error| Refused::new(Errno::Eperm, error.to_string()))?;
    let options = wire::decode_open(open, true)?;
    if !shared.options.allowed {
        let why = "the device is turned off; start the machine with --dt on";
        return Err(Refused::new(Errno::Eperm, why));
    }
    shared.device()?.open(options)
}

/// Waits for a request and returns `false` when the client has disconnected.
fn wait_for_request(stream: &UnixStream) -> io::Result<bool> {
    loop {
        let mut watched = [PollFd::new(stream, PollFlags::IN)];
        match poll(&mut watched, None) {
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
            Ok(_) => {
                let [watched] = watched;
                let is_there = watched.revents().contains(PollFlags::IN);
                // The end of a stream also polls as readable.
                return Ok(is_there && !has_ended(stream)?);
            }
        }
    }
}

fn has_ended(stream: &UnixStream) -> io::Result<bool> {
    let mut byte = [0];
    let flags = rustix::net::RecvFlags::PEEK;
    let (read, _) = rustix::net::recv(stream, &mut byte, flags)?;
    Ok(read == 0)
}

struct Client<'s> {
    shared: &'s Shared,
    stream: &'s UnixStream,
    session: Session,
    /// The reason why the last request was refused, or a remark on an answer.
    reason: String,
}

impl Client<'_> {
    fn answer(&mut self, code: u32, argument: &[u8]) -> Result<Reply, Refused> {
        let text = |text: &str| Reply {
            bytes: text.as_bytes().to_vec(),
            ..Reply::default()
        };
        match Call::decode(code, argument)? {
            Call::Ioctl(code) => self.session.ioctl(code, argument),
            Call::Reason => Ok(text(&self.reason)),
            Call::Missing => Ok(text(&self.session.table().missing().join("\n"))),
            Call::Name(probe) => match self.session.table().get(probe) {
                Some(listed) => Ok(text(&listed.full_name())),
                None => Err(Refused::new(Errno::Enoent, format!("no probe {probe}"))),
            },
            Call::Read(bytes) => {
                let (stream, shared) = (self.stream, self.shared);
                let mut wait = |waiter: Option<&Waiter>| wait_for_event(waiter, stream, shared);
                Ok(Reply {
                    bytes: self.session.read(bytes, &mut wait)?,
                    ..Reply::default()
                })
            }
        }
    }
}

/// Waits until there may be an event. Ends the read if the client sends another request or
/// disconnects, or the machine ends.
fn wait_for_event(
    waiter: Option<&Waiter>,
    stream: &UnixStream,
    shared: &Shared,
) -> Result<(), Refused> {
    let limit = match waiter {
        Some(waiter) => {
            let _ = waiter.wait(Some(WatchedStream::until_request(stream)));
            Duration::ZERO
        }
        None => LONGEST_WAIT,
    };
    let mut watched = [PollFd::new(stream, PollFlags::IN | PollFlags::RDHUP)];
    let limit = Timespec::try_from(limit).unwrap_or_default();
    let _ = poll(&mut watched, Some(&limit));
    let [watched] = watched;
    let gone = PollFlags::HUP | PollFlags::RDHUP | PollFlags::ERR;
    if watched.revents().intersects(gone) {
        return Err(Refused::new(Errno::Eintr, "the client has gone"));
    }
    if watched.revents().contains(PollFlags::IN) {
        let why = "the client has sent its next request while it waited for events";
        return Err(Refused::new(Errno::Eintr, why));
    }
    if shared.vm.has_ended() {
        return Err(Refused::new(Errno::Enxio, "the machine has ended"));
    }
    Ok(())
}

/// Sends an answer, with a descriptor along with its first bytes.
fn send(mut stream: &UnixStream, bytes: &[u8], descriptor: Option<OwnedFd>) -> io::Result<()> {
    let Some(descriptor) = descriptor else {
        return stream.write_all(bytes);
    };
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let descriptors = [descriptor.as_fd()];
    control.push(SendAncillaryMessage::ScmRights(&descriptors));
    let parts = [IoSlice::new(bytes)];
    let sent = sendmsg(stream, &parts, &mut control, SendFlags::NOSIGNAL)?;
    stream.write_all(bytes.get(sent..).unwrap_or_default())
}

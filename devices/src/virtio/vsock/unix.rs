//! Unix sockets as the host's side: programs connect to one socket, and listen on others beside it,
//! each of which has the port behind its name.

use std::collections::HashMap;
use std::ffi::OsString;
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use rustix::event::Timespec;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendFlags, Shutdown, SocketAddrUnix, SocketFlags,
    SocketType, accept_with, connect, sendmsg, shutdown, socket_with,
};

use super::backend::{Direction, HostEvent, StreamId, VsockBackend};
use crate::virtio::uninterrupted::uninterrupted;

/// The number of the listening socket among events.
const LISTENER: u64 = 0;
/// The maximum number of events of one call.
const EVENTS_AT_ONCE: usize = 64;
const NO_WAIT: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 0,
};
const FLAGS: SocketFlags = SocketFlags::CLOEXEC.union(SocketFlags::NONBLOCK);
/// The events of a stream that are always wanted. Each is reported when it begins to hold.
const WANTED: EventFlags = EventFlags::IN
    .union(EventFlags::RDHUP)
    .union(EventFlags::ET);

/// A stream.
struct Stream {
    socket: OwnedFd,
    /// Set while a write waits for room, which is then reported.
    wants_room: bool,
}

/// The Unix sockets of one machine.
pub struct UnixHost {
    listener: UnixListener,
    /// The path of the listening socket.
    path: PathBuf,
    epoll: OwnedFd,
    streams: HashMap<u64, Stream>,
    /// The number of the next stream.
    next: u64,
}

impl std::fmt::Debug for UnixHost {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("UnixHost")
            .field("path", &self.path)
            .finish_non_exhaustive()
    }
}

/// Returns the path of the socket that a program listens on for the guest's connections to `port`,
/// if programs of the host connect to `path`.
#[must_use]
pub fn service_path(path: &Path, port: u32) -> PathBuf {
    let mut name = OsString::from(path);
    name.push(format!("_{port}"));
    name.into()
}

impl UnixHost {
    /// Makes a backend of `listener`, which listens on `path`. It no longer blocks then.
    ///
    /// # Errors
    /// If the host refuses a descriptor.
    pub fn new(listener: UnixListener, path: &Path) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        let listens = EventFlags::IN | EventFlags::ET;
        epoll::add(&epoll, &listener, EventData::new_u64(LISTENER), listens)?;
        Ok(Self {
            listener,
            path: path.to_path_buf(),
            epoll,
            streams: HashMap::new(),
            next: LISTENER + 1,
        })
    }

    fn add(&mut self, socket: OwnedFd) -> io::Result<StreamId> {
        let number = self.next;
        epoll::add(&self.epoll, &socket, EventData::new_u64(number), WANTED)?;
        self.next += 1;
        let stream = Stream {
            socket,
            wants_room: false,
        };
        self.streams.insert(number, stream);
        Ok(StreamId(number))
    }

    fn socket(&self, stream: StreamId) -> io::Result<BorrowedFd<'_>> {
        let found = self.streams.get(&stream.0);
        let found = found.map(|stream| stream.socket.as_fd());
        found.ok_or_else(|| io::ErrorKind::NotConnected.into())
    }

    /// Asks for the event of room, or no longer. Room that is there already is reported.
    fn want_room(&mut self, stream: StreamId, wanted: bool) {
        let Some(known) = self.streams.get_mut(&stream.0) else {
            return;
        };
        if known.wants_room == wanted {
            return;
        }
        let flags = match wanted {
            true => WANTED | EventFlags::OUT,
            false => WANTED,
        };
        let data = EventData::new_u64(stream.0);
        if let Err(error) = epoll::modify(&self.epoll, &known.socket, data, flags) {
            log::warn!("the guest's sockets: {error}");
        }
        known.wants_room = wanted;
    }
}

impl AsFd for UnixHost {
    /// Returns the descriptor that is readable while there are events.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}

impl VsockBackend for UnixHost {
    fn events(&mut self, events: &mut Vec<HostEvent>) -> bool {
        let mut room = [const { MaybeUninit::uninit() }; EVENTS_AT_ONCE];
        let found = match epoll::wait(&self.epoll, &mut room[..], Some(&NO_WAIT)) {
            Ok((found, _)) => found,
            Err(Errno::INTR) => return true,
            Err(error) => {
                log::warn!("the guest's sockets: {error}");
                return false;
            }
        };
        events.extend(found.iter().map(|event| match event.data.u64() {
            LISTENER => HostEvent::Incoming,
            number => HostEvent::Ready {
                stream: StreamId(number),
                closed: EventFlags::intersects(&{ event.flags }, EventFlags::HUP | EventFlags::ERR),
            },
        }));
        found.len() == EVENTS_AT_ONCE
    }

    fn accept(&mut self) -> io::Result<StreamId> {
        let socket = uninterrupted(|| accept_with(&self.listener, FLAGS))?;
        self.add(socket)
    }

    fn connect(&mut self, port: u32) -> io::Result<StreamId> {
        let address = SocketAddrUnix::new(service_path(&self.path, port))?;
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, FLAGS, None)?;
        // A listener whose queue is full refuses at once.
        uninterrupted(|| connect(&socket, &address))?;
        self.add(socket)
    }

    fn read(&mut self, stream: StreamId, buffer: &mut [u8]) -> io::Result<usize> {
        let socket = self.socket(stream)?;
        uninterrupted(|| rustix::io::read(socket, &mut *buffer))
    }

    fn write(&mut self, stream: StreamId, bytes: &[u8]) -> io::Result<usize> {
        let socket = self.socket(stream)?;
        let written = uninterrupted(|| {
            let mut none = SendAncillaryBuffer::default();
            // A program that has gone is an error, and no signal.
            sendmsg(
                socket,
                &[IoSlice::new(bytes)],
                &mut none,
                SendFlags::NOSIGNAL,
            )
        });
        let blocked = matches!(&written, Err(error) if error.kind() == io::ErrorKind::WouldBlock);
        let short = matches!(&written, Ok(length) if *length < bytes.len());
        self.want_room(stream, blocked || short);
        written
    }

    fn shut_down(&mut self, stream: StreamId, direction: Direction) {
        let how = match direction {
            Direction::FromHost => Shutdown::Read,
            Direction::ToHost => Shutdown::Write,
        };
        if let Ok(socket) = self.socket(stream) {
            // A stream that has ended is as good.
            let _ = shutdown(socket, how);
        }
    }

    fn close(&mut self, stream: StreamId) {
        self.streams.remove(&stream.0);
    }
}

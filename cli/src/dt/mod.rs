//! The device dt(4) of a machine: a socket beside the control socket, each connection an open of the device.
//!
//! What goes over the wire is described in [`probes::dt::wire`]. One thread takes connections, and each has one of its own, which
//! ends with it: closing a connection takes its probes out of the guest, and ends a read that waits. When the server goes, so do all.

mod connection;
mod guest;

use std::io;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use probes::dt::{Device, Errno, Refused};
use rustix::net::Shutdown;

use crate::session::Session;
use guest::SessionGuest;

/// Connections at a time; more are closed at once.
const MOST_CONNECTIONS: usize = 32;

/// The socket cannot be made.
#[derive(Debug, thiserror::Error)]
#[error("dt socket {path}: {source}", path = path.display())]
pub struct ServeError {
    path: PathBuf,
    source: io::Error,
}

/// How the device is served.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// Whether it may be opened.
    pub allowed: bool,
    /// A folder with copies of the guest's files.
    pub symfs: Option<PathBuf>,
}

/// What connections share.
struct Shared {
    session: Arc<Session>,
    options: Options,
    /// Made at the first open at which the guest's kernel is there; locked meanwhile, so that it is made once.
    device: Mutex<Option<Arc<Device>>>,
    leave: AtomicBool,
    connections: Mutex<Vec<Connection>>,
}

/// A connection: its socket, to end it, and its thread.
struct Connection {
    stream: UnixStream,
    thread: JoinHandle<()>,
}

/// The socket of a connection as its thread has it. When it is dropped, also by a panic, the client sees the end: the copy in [`Connection`]
/// alone would keep the socket open.
struct Served(UnixStream);

impl Drop for Served {
    fn drop(&mut self) {
        // One that its client has closed is as good.
        let _ = self.0.shutdown(std::net::Shutdown::Both);
    }
}

/// The server. Ends when dropped, with all connections.
pub struct Server {
    listener: UnixListener,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Listens on `path` for the machine of `session`.
    ///
    /// # Errors
    /// If the socket cannot be made.
    pub fn start(
        path: &Path,
        options: Options,
        session: &Arc<Session>,
    ) -> Result<Self, ServeError> {
        let failed = |source: io::Error| ServeError {
            path: path.to_path_buf(),
            source,
        };
        let listener = UnixListener::bind(path).map_err(failed)?;
        let accepting = listener.try_clone().map_err(failed)?;
        let shared = Arc::new(Shared {
            session: session.clone(),
            options,
            device: Mutex::default(),
            leave: AtomicBool::new(false),
            connections: Mutex::default(),
        });
        let serving = shared.clone();
        let thread = std::thread::Builder::new()
            .name("dt".into())
            .spawn(move || accept(&accepting, &serving))
            .map_err(failed)?;
        Ok(Self {
            listener,
            shared,
            thread: Some(thread),
        })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.shared.leave.store(true, Ordering::SeqCst);
        // Ends the accept(2) that the thread waits in.
        if let Err(error) = rustix::net::shutdown(&self.listener, Shutdown::Both) {
            log::warn!("dt socket: {error}");
            return;
        }
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            log::error!("the thread of the dt socket panicked");
        }
        let connections = std::mem::take(&mut *self.shared.connections());
        for connection in &connections {
            // As above.
            let _ = connection.stream.shutdown(std::net::Shutdown::Both);
        }
        for connection in connections {
            if connection.thread.join().is_err() {
                log::error!("a thread of a dt client panicked");
            }
        }
    }
}

impl Shared {
    fn connections(&self) -> std::sync::MutexGuard<'_, Vec<Connection>> {
        self.connections
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// The device, once the guest's kernel is there.
    fn device(&self) -> Result<Arc<Device>, Refused> {
        let mut known = self.device.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(device) = &*known {
            return Ok(device.clone());
        }
        let refused = |why: String| Refused::new(Errno::Enxio, why);
        let view = self
            .session
            .locate()
            .map_err(|error| refused(error.to_string()))?;
        let view = view.ok_or_else(|| {
            refused(
                "the guest's kernel has not booted far enough to be traced, or its file is not at hand"
                    .into(),
            )
        })?;
        let engine = self.session.engine(&Arc::new(view));
        let guest = SessionGuest::new(&self.session, self.options.symfs.clone());
        let device = Arc::new(Device::new(engine, Arc::new(guest)));
        Ok(known.insert(device).clone())
    }

    fn add(self: &Arc<Self>, stream: UnixStream) -> io::Result<()> {
        let mut connections = self.connections();
        connections.retain(|connection| !connection.thread.is_finished());
        if connections.len() >= MOST_CONNECTIONS {
            log::warn!("dt: {MOST_CONNECTIONS} clients are connected; one more is turned away");
            return Ok(());
        }
        let served = Served(stream.try_clone()?);
        let shared = self.clone();
        let thread = std::thread::Builder::new()
            .name("dt-client".into())
            .spawn(move || {
                if let Err(error) = connection::serve(&shared, &served.0) {
                    log::debug!("dt: a client went away: {error}");
                }
            })?;
        connections.push(Connection { stream, thread });
        Ok(())
    }
}

fn accept(listener: &UnixListener, shared: &Arc<Shared>) {
    while !shared.leave.load(Ordering::SeqCst) {
        let accepted =
            listener
                .accept()
                .and_then(|(stream, _)| match shared.leave.load(Ordering::SeqCst) {
                    true => Ok(()),
                    false => shared.add(stream),
                });
        if let Err(error) = accepted {
            if shared.leave.load(Ordering::SeqCst) {
                return;
            }
            log::warn!("dt: {error}");
            // Out of descriptors, perhaps: not in a tight loop.
            std::thread::sleep(Duration::from_millis(100));
        }
    }
}

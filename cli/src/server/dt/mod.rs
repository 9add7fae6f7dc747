//! The device dt(4) of a machine: a socket beside the control socket, each connection an open of
//! the device.
//!
//! [`trace_devices::dt::wire`] describes the messages. Each connection has a thread. Closing a
//! connection ends the thread, removes its probes from the guest, and ends a waiting read. All
//! connections end with the server.

mod connection;
mod guest;

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use trace_devices::dt::{Device, Errno, Refused};

use crate::listener::{ListenError, Listener, Rules};
use crate::vm::Vm;
use guest::VmGuest;

/// The listener's rules. Clients have nothing to wait for at the end.
const RULES: Rules = Rules {
    name: "dt",
    most: 32,
    grace: Some(Duration::ZERO),
};

/// The options of the device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// Set if the device may be opened.
    pub allowed: bool,
    /// A folder with copies of the guest's files.
    pub symfs: Option<PathBuf>,
}

/// The state shared by the connections.
struct Shared {
    vm: Arc<Vm>,
    options: Options,
    /// Made at the first open at which the guest's kernel is found; locked meanwhile, so that it is
    /// made once.
    device: Mutex<Option<Arc<Device>>>,
}

/// The server of the device. When dropped, it ends with all connections.
pub struct Server(#[expect(dead_code, reason = "serves until it is dropped")] Listener);

impl Server {
    /// Listens on `path` for the machine of `vm`.
    ///
    /// # Errors
    /// If the socket cannot be made.
    pub fn start(path: &Path, options: Options, vm: &Arc<Vm>) -> Result<Self, ListenError> {
        let shared = Shared {
            vm: vm.clone(),
            options,
            device: Mutex::default(),
        };
        let serve = move |stream: &_, _: &_| connection::serve(&shared, stream);
        Listener::start(path, RULES, serve).map(Self)
    }
}

impl Shared {
    /// Returns the device, once the guest's kernel is found.
    fn device(&self) -> Result<Arc<Device>, Refused> {
        let mut known = self.device.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(device) = &*known {
            return Ok(device.clone());
        }
        let refused = |why: String| Refused::new(Errno::Enxio, why);
        let view = self
            .vm
            .locate()
            .map_err(|error| refused(error.to_string()))?;
        let view = view.ok_or_else(|| {
            refused(
                "the guest's kernel has not booted far enough to be traced, or its file is not at hand"
                    .into(),
            )
        })?;
        let engine = self.vm.engine(&Arc::new(view));
        let guest = VmGuest::new(&self.vm, self.options.symfs.clone());
        let device = Arc::new(Device::new(engine, Arc::new(guest)));
        Ok(known.insert(device).clone())
    }
}

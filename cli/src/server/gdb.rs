//! A debugger of one process, or of the kernel, over the control socket: a line of JSON, then the
//! GDB remote protocol.

use std::io;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use gdb::{Attached, DebugError};

use crate::protocol::control::Answer;
use crate::protocol::error::{ErrorKind, RequestError};
use crate::protocol::inspection::ProcessName;
use crate::server::control::send;
use crate::vm::Vm;

impl From<DebugError> for RequestError {
    fn from(error: DebugError) -> Self {
        let kind = match &error {
            DebugError::NoProcess { .. } | DebugError::KernelThread { .. } => ErrorKind::NoProcess,
            DebugError::Session(_) => ErrorKind::NotEnabled,
            DebugError::Guest(_) | DebugError::Unavailable(_) => ErrorKind::Unreadable,
        };
        Self::new(kind, error)
    }
}

/// Attaches to a process, or to the kernel without one, and serves the client until either has
/// gone. The guest runs on then.
///
/// # Errors
/// If the client has disconnected before it got an answer.
pub fn serve(
    vm: &Arc<Vm>,
    process: Option<&ProcessName>,
    write: bool,
    stream: UnixStream,
) -> io::Result<()> {
    let view = match vm.kernel_view() {
        Ok(view) => view,
        Err(error) => return send(&stream, &Answer::Error(error)),
    };
    let engine = vm.engine(&view);
    let guest = vm.traceable(&view);
    let pid = process.map(|process| vm.inspection().pid(process));
    let attached = pid.transpose().and_then(|pid| {
        let attached = Attached::new(&guest, &engine, pid, write)?;
        Ok((pid, attached))
    });
    match attached {
        Err(error) => send(&stream, &Answer::Error(error)),
        Ok((pid, attached)) => {
            let of = pid.map_or_else(|| "the kernel".to_owned(), |pid| format!("process {pid}"));
            let answer = Answer::Debugging {
                pid,
                slide: view.kernel.symbols.slide(),
                unseen: attached.unseen().to_vec(),
            };
            send(&stream, &answer)?;
            match attached.serve(stream) {
                Ok(end) => log::debug!("the debugger of {of} has ended: {end:?}"),
                Err(error) => log::warn!("the debugger of {of}: {error}"),
            }
            Ok(())
        }
    }
}

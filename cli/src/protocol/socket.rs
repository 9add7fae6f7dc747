//! Connections to a machine's sockets.

use std::io;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use crate::registry;

/// The connection to a machine has ended, or could not be made.
#[derive(Debug, thiserror::Error)]
pub enum GoneError {
    /// The machine does not answer.
    #[error("the machine does not answer ({0}); has it just ended?")]
    Silent(#[from] io::Error),
    /// The machine has no such socket.
    #[error(
        "the machine runs, but does not serve this device: it has no socket {}",
        .0.display()
    )]
    NotServed(PathBuf),
}

/// Connects to the socket `path` of a machine.
///
/// # Errors
/// If the machine has ended, or does not serve this socket.
pub fn connect(path: &Path) -> Result<UnixStream, GoneError> {
    UnixStream::connect(path).map_err(|error| {
        let is_missing = error.kind() == io::ErrorKind::NotFound;
        match is_missing && registry::runs_beside(path) {
            true => GoneError::NotServed(path.to_owned()),
            false => GoneError::Silent(error),
        }
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::registry::Registry;

    #[test]
    fn a_socket_that_a_running_machine_does_not_have_is_told_apart_from_its_end() {
        let folder = tempfile::tempdir().unwrap();
        let registry = Registry::at(folder.path().join("exotrace")).unwrap();
        let (entry, _) = registry.claim(None).unwrap();
        let path = entry.dt();
        let missing = connect(&path).unwrap_err().to_string();
        assert!(
            missing.contains("does not serve this device") && missing.contains("/dt"),
            "{missing}"
        );
        drop(entry);
        let gone = connect(&path).unwrap_err().to_string();
        assert!(gone.contains("has it just ended?"), "{gone}");
    }
}

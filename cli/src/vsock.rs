//! `--vsock CID,SOCKET`: sockets between programs of the guest and of the host. The host's socket
//! is made before the machine is confined, and removed at the end.

use std::path::{Path, PathBuf};
use std::str::FromStr;

use vmm::machine::{FIRST_CID, VsockConfig, VsockSocket};
use vmm::snapshot::{RestoreError, saved_vsock};

use crate::named_socket::{self, ListenError, SocketFile};
use crate::report::say;

/// The longest path of a socket in bytes, less `_` and the largest port of a service beside it.
const LONGEST_PATH: usize = 107 - 11;

/// Sockets in their requested form.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Vsock {
    /// The guest's context id.
    pub cid: u32,
    /// The host's socket.
    pub path: PathBuf,
}

/// The argument is not in its form.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum VsockError {
    /// There are not two parts.
    #[error("{0:?}: expected CID,SOCKET, such as 3,/tmp/guest.vsock")]
    Form(String),
    /// The context id is not a guest's.
    #[error("invalid context id {0:?}: expected a number from {FIRST_CID} to 4294967294")]
    Cid(String),
    /// The path has no room in a socket's address.
    #[error(
        "the path has {0} bytes: at most {LONGEST_PATH} fit, since those of services have a port behind it"
    )]
    Long(usize),
}

impl FromStr for Vsock {
    type Err = VsockError;

    fn from_str(text: &str) -> Result<Self, VsockError> {
        let form = || VsockError::Form(text.to_owned());
        let (number, path) = text.split_once(',').ok_or_else(form)?;
        let digits = !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit());
        let cid = number.parse().ok().filter(|_| digits);
        // The largest number stands for any guest.
        let cid = cid.filter(|cid| (FIRST_CID..u32::MAX).contains(cid));
        let cid = cid.ok_or_else(|| VsockError::Cid(number.to_owned()))?;
        if path.is_empty() || path.ends_with('/') {
            return Err(form());
        }
        if path.len() > LONGEST_PATH {
            return Err(VsockError::Long(path.len()));
        }
        let path = path.into();
        Ok(Self { cid, path })
    }
}

/// The guest's sockets cannot be connected.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The host's socket cannot be made.
    #[error("--vsock: {0}")]
    Socket(#[from] ListenError),
    /// The snapshot is unreadable.
    #[error(transparent)]
    Snapshot(#[from] RestoreError),
    /// The snapshot has no such device.
    #[error("--vsock: the machine was saved without it, and a restored one gets no new devices")]
    NoDevice,
}

/// The sockets of a run.
#[derive(Debug, Default)]
pub struct Sockets {
    /// The device of a machine that boots, or the one that a restored machine goes on with.
    pub config: Option<VsockConfig>,
    /// The host's socket, as long as it is in the file system.
    pub file: Option<SocketFile>,
}

impl Sockets {
    /// Makes the host's socket for a machine that boots, or for the one in the folder `restored`.
    ///
    /// # Errors
    /// If the socket cannot be made, or the saved machine has no such device.
    pub fn open(chosen: Option<&Vsock>, restored: Option<&Path>) -> Result<Self, OpenError> {
        let saved = restored.map(saved_vsock).transpose()?;
        match (chosen, saved) {
            (Some(_), Some(None)) => Err(OpenError::NoDevice),
            (Some(chosen), _) => Self::listen(chosen),
            (None, Some(Some(saved))) => {
                let cid = saved.cid;
                say(format_args!(
                    "the guest's sockets to the host lead nowhere: it was saved with --vsock {cid},SOCKET, which is to be named again"
                ));
                Ok(Self::default())
            }
            (None, _) => Ok(Self::default()),
        }
    }

    fn listen(chosen: &Vsock) -> Result<Self, OpenError> {
        let path = &chosen.path;
        let (listener, file) = named_socket::listen(path)?;
        let socket = VsockSocket::new(listener, path).map_err(ListenError::at(path))?;
        Ok(Self {
            config: Some(VsockConfig {
                cid: chosen.cid,
                socket: Some(socket),
            }),
            file: Some(file),
        })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_context_id_and_a_path_are_read() {
        for (text, cid, path) in [
            ("3,s", 3, "s"),
            ("4294967294,/run/a,b c", u32::MAX - 1, "/run/a,b c"),
            ("0052,./s", 52, "./s"),
        ] {
            let path = path.into();
            assert_eq!(text.parse(), Ok(Vsock { cid, path }), "{text}");
        }
        let longest = format!("3,{}", "x".repeat(LONGEST_PATH));
        longest.parse::<Vsock>().unwrap();
    }

    #[test]
    fn what_is_not_understood_is_named() {
        let long = format!("3,{}", "x".repeat(LONGEST_PATH + 1));
        for (text, said) in [
            ("", "expected CID,SOCKET"),
            ("3", "expected CID,SOCKET"),
            ("3,", "expected CID,SOCKET"),
            ("3,folder/", "expected CID,SOCKET"),
            ("socket,3", "context id \"socket\""),
            (",s", "context id \"\""),
            ("0,s", "context id \"0\""),
            ("2,s", "context id \"2\""),
            ("+3,s", "context id \"+3\""),
            ("-3,s", "context id \"-3\""),
            ("0x3,s", "context id \"0x3\""),
            ("4294967295,s", "context id \"4294967295\""),
            ("4294967296,s", "context id \"4294967296\""),
            (long.as_str(), "97 bytes: at most 96"),
        ] {
            let message = text.parse::<Vsock>().unwrap_err().to_string();
            assert!(message.contains(said), "{text}: {message}");
        }
    }

    #[test]
    fn a_snapshot_that_is_not_there_is_named() {
        let chosen = "3,s".parse().ok();
        let opened = Sockets::open(chosen.as_ref(), Some(Path::new("/nonexistent")));
        let message = opened.unwrap_err().to_string();
        assert!(message.contains("/nonexistent/state"), "{message}");
    }
}

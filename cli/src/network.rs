//! The guest's network, opened before the machine is made and confined: the socket, interface or
//! program that its card is connected to.
//!
//! A snapshot says how its machine was connected. What reaches further than the guest's own
//! requests is not done at its word: sockets, interfaces and ports are named again.

use std::io;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use rustix::rand::{GetRandomFlags, getrandom};
use vmm::machine::{ETHERNET_MTU, NetConfig, NetConnection, TapError};
use vmm::snapshot::{RestoreError, RestoredNet, saved_net};

use crate::net::{Connection, Net, User};
use crate::passt::{Passt, PasstError};
use crate::report::{printable, say};

/// The MTU of a guest that is connected by passt, in bytes: frames of 64 KiB less an Ethernet
/// header, in whole words. passt cuts nothing, so larger frames are fewer.
const PASST_MTU: u16 = 65_520;

/// The guest's network cannot be connected.
#[derive(Debug, thiserror::Error)]
pub enum NetworkError {
    /// passt does not serve.
    #[error(transparent)]
    Passt(#[from] PasstError),
    /// The interface is not usable.
    #[error("--net: {0}")]
    Tap(#[from] TapError),
    /// Nobody listens on the socket.
    #[error("--net unix={path}: {source}", path = path.display())]
    Unix {
        /// The socket.
        path: PathBuf,
        /// The host's error.
        source: io::Error,
    },
    /// A descriptor or an address cannot be had.
    #[error("--net: {0}")]
    Host(#[from] io::Error),
    /// The snapshot is unreadable.
    #[error(transparent)]
    Snapshot(#[from] RestoreError),
    /// The snapshot has no card.
    #[error(
        "--net: the machine was saved without a network card, and a restored one gets no new devices"
    )]
    NoCard,
    /// The address is another one.
    #[error("--net: mac= is for a machine that boots; this one was saved with {0}")]
    Mac(String),
}

/// The network of a run.
#[derive(Debug, Default)]
pub struct Network {
    /// The card of a machine that boots.
    pub card: Option<NetConfig>,
    /// The connection of a restored one.
    pub restored: Option<RestoredNet>,
    /// The program, if there is one.
    pub passt: Option<Passt>,
}

impl Network {
    /// Connects the network that was chosen for a machine that boots, or for the one in the folder
    /// `restored`.
    ///
    /// # Errors
    /// If the connection cannot be made, or does not suit the saved machine.
    pub fn open(chosen: Option<&Net>, restored: Option<&Path>) -> Result<Self, NetworkError> {
        match restored {
            Some(folder) => Self::restore(chosen, folder),
            None => Self::boot(chosen),
        }
    }

    fn boot(chosen: Option<&Net>) -> Result<Self, NetworkError> {
        let Some(Net::Card { connection, mac }) = chosen else {
            return Ok(Self::default());
        };
        let mac = mac.map_or_else(random_mac, Ok)?;
        let (connected, passt) = connect(connection, mac)?;
        Ok(Self {
            card: Some(NetConfig {
                mac,
                mtu: match connection {
                    Connection::User(_) => PASST_MTU,
                    Connection::Tap(_) | Connection::Unix(_) => ETHERNET_MTU,
                },
                segmentation: connected.segments(),
                chosen: connection.to_string(),
                moved: false,
                connection: Some(connected),
            }),
            restored: None,
            passt,
        })
    }

    fn restore(chosen: Option<&Net>, folder: &Path) -> Result<Self, NetworkError> {
        let saved = saved_net(folder)?;
        let (saved, connection) = match (saved, chosen) {
            (None, None | Some(Net::Off)) | (Some(_), Some(Net::Off)) => {
                return Ok(Self::default());
            }
            (None, Some(Net::Card { .. })) => return Err(NetworkError::NoCard),
            (Some(saved), None) => return Ok(Self::as_saved(&saved)),
            (Some(saved), Some(Net::Card { connection, mac })) => {
                if mac.is_some_and(|mac| mac != saved.mac) {
                    let address = saved.mac.map(|byte| format!("{byte:02x}"));
                    return Err(NetworkError::Mac(address.join(":")));
                }
                (saved, connection)
            }
        };
        let (connected, passt) = connect(connection, saved.mac)?;
        Ok(Self {
            card: None,
            restored: Some(RestoredNet {
                connection: connected,
                chosen: connection.to_string(),
            }),
            passt,
        })
    }

    /// Connects a restored machine as far as its snapshot alone may decide that.
    fn as_saved(saved: &NetConfig) -> Self {
        let down = |reason: &str| {
            say(format_args!(
                "the guest's link is down: {reason}; it was saved with --net {}",
                printable(&saved.chosen)
            ));
            Self::default()
        };
        let Ok(Net::Card {
            connection: Connection::User(user),
            ..
        }) = saved.chosen.parse()
        else {
            return down("name its network again");
        };
        let plain = Connection::User(User::default());
        match connect(&plain, saved.mac) {
            Ok((connection, passt)) => {
                if user != User::default() {
                    say(format_args!(
                        "no port of the host leads to the guest, and no address: it was saved with --net {}, which is to be named again",
                        printable(&saved.chosen)
                    ));
                }
                let chosen = plain.to_string();
                Self {
                    card: None,
                    restored: Some(RestoredNet { connection, chosen }),
                    passt,
                }
            }
            Err(error) => down(&error.to_string()),
        }
    }
}

/// Makes a connection for a card with the address `mac`.
fn connect(
    connection: &Connection,
    mac: [u8; 6],
) -> Result<(NetConnection, Option<Passt>), NetworkError> {
    Ok(match connection {
        Connection::User(user) => {
            let (socket, passt) = Passt::start(user, mac)?;
            // passt makes each frame anew.
            (NetConnection::stream(socket, true)?, Some(passt))
        }
        Connection::Tap(name) => (NetConnection::tap(name)?, None),
        Connection::Unix(path) => {
            let socket = UnixStream::connect(path).map_err(|source| NetworkError::Unix {
                path: path.clone(),
                source,
            })?;
            (NetConnection::stream(socket, false)?, None)
        }
    })
}

/// Returns a random, locally administered address.
fn random_mac() -> io::Result<[u8; 6]> {
    let mut mac = [0; 6];
    getrandom(&mut mac, GetRandomFlags::empty())?;
    let [first, ..] = &mut mac;
    // Locally administered, and not of a group.
    *first = *first & 0xfc | 2;
    Ok(mac)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_local_and_of_one_card() -> io::Result<()> {
        let (first, second) = (random_mac()?, random_mac()?);
        assert_ne!(first, second);
        assert_eq!((first[0] & 3, second[0] & 3), (2, 2));
        Ok(())
    }

    #[test]
    fn what_is_not_there_is_named() {
        let net = |text: &str| text.parse::<Net>().ok();
        let folder = Path::new("/nonexistent");
        for (chosen, restored, said) in [
            (
                "unix=/nonexistent/socket",
                None,
                "--net unix=/nonexistent/socket: ",
            ),
            ("tap=a-much-too-long-name", None, "a-much-too-long-name"),
            ("user", Some(folder), "/nonexistent/state"),
        ] {
            let opened = Network::open(net(chosen).as_ref(), restored);
            let message = opened.map(|_| ()).map_err(|error| error.to_string());
            assert!(
                matches!(&message, Err(message) if message.contains(said)),
                "{chosen}: {message:?}"
            );
        }
    }
}

//! The argument of `--net`: how the guest's network card is connected, if it has one.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;
use std::str::FromStr;

/// A network in its requested form: `off`, or a connection with options after commas.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Net {
    /// No card, or a restored one whose link is down.
    Off,
    /// A card.
    Card {
        /// Its connection.
        connection: Connection,
        /// Its address, if it was chosen.
        mac: Option<[u8; 6]>,
    },
}

/// The connection of a card.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Connection {
    /// The host's own network, by the program passt.
    User(User),
    /// A TAP interface of the host, by its name.
    Tap(String),
    /// A listening stream socket, on which each frame is behind its length in 4 bytes.
    Unix(PathBuf),
}

/// The options of a connection by passt.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct User {
    /// The ports of the host that lead to the guest.
    pub forwards: Vec<Forward>,
    /// Set if the guest reaches the host's own addresses (127.0.0.1) as its gateway.
    pub loopback: bool,
}

/// A port of the host that leads to one of the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Forward {
    /// Set for UDP instead of TCP.
    pub udp: bool,
    /// The address of the host that it is bound to.
    pub address: IpAddr,
    /// The host's port.
    pub host: u16,
    /// The guest's port.
    pub guest: u16,
}

impl fmt::Display for Connection {
    /// Writes the connection as it is read.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::User(user) => {
                write!(f, "user")?;
                for forward in &user.forwards {
                    let option = if forward.udp { "udp" } else { "host" };
                    write!(f, ",{option}={forward}")?;
                }
                if user.loopback {
                    write!(f, ",loopback")?;
                }
                Ok(())
            }
            Self::Tap(name) => write!(f, "tap={name}"),
            Self::Unix(path) => write!(f, "unix={}", path.display()),
        }
    }
}

impl fmt::Display for Forward {
    /// Writes the forward as passt's options -t and -u take it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            address,
            host,
            guest,
            ..
        } = self;
        write!(f, "{address}/{host}:{guest}")
    }
}

/// The argument is not in a network's form.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NetError {
    /// The connection is unknown.
    #[error(
        "unknown network {0:?}: expected off, user, tap=NAME or unix=SOCKET, with options after commas"
    )]
    Connection(String),
    /// The option is unknown, or for another connection.
    #[error(
        "unknown option {0:?}: expected mac=ADDRESS, and for user host=PORT:PORT, udp=PORT:PORT or loopback"
    )]
    Option(String),
    /// The ports are not in their form.
    #[error(
        "invalid ports {0:?}: expected [ADDRESS/]PORT:PORT, the host's port and the guest's, from 1 to 65535"
    )]
    Ports(String),
    /// The address is not that of a card.
    #[error(
        "invalid address {0:?}: expected six hexadecimal bytes with colons, not of a group, such as 02:00:00:00:00:01"
    )]
    Mac(String),
}

impl FromStr for Net {
    type Err = NetError;

    fn from_str(text: &str) -> Result<Self, NetError> {
        let mut words = text.split(',');
        let first = words.next().unwrap_or_default();
        let mut connection = match first.split_once('=') {
            None if text == "off" => return Ok(Self::Off),
            None if first == "user" => Connection::User(User::default()),
            Some(("tap", name)) if !name.is_empty() => Connection::Tap(name.to_owned()),
            Some(("unix", path)) if !path.is_empty() => Connection::Unix(path.into()),
            _ => return Err(NetError::Connection(first.to_owned())),
        };
        let mut mac = None;
        for word in words {
            match (word.split_once('='), &mut connection) {
                (Some(("mac", address)), _) => mac = Some(parse_mac(address)?),
                (Some(("host", ports)), Connection::User(user)) => {
                    user.forwards.push(forward(ports, false)?);
                }
                (Some(("udp", ports)), Connection::User(user)) => {
                    user.forwards.push(forward(ports, true)?);
                }
                (None, Connection::User(user)) if word == "loopback" => user.loopback = true,
                _ => return Err(NetError::Option(word.to_owned())),
            }
        }
        Ok(Self::Card { connection, mac })
    }
}

fn forward(text: &str, udp: bool) -> Result<Forward, NetError> {
    let wrong = || NetError::Ports(text.to_owned());
    let port = |text: &str| match text.parse() {
        Ok(0) | Err(_) => Err(wrong()),
        Ok(port) => Ok(port),
    };
    let (address, ports) = match text.rsplit_once('/') {
        Some((address, ports)) => (address.parse().map_err(|_| wrong())?, ports),
        // Others on the host's networks do not reach the guest unless that is asked for.
        None => (Ipv4Addr::LOCALHOST.into(), text),
    };
    let (host, guest) = ports.split_once(':').ok_or_else(wrong)?;
    Ok(Forward {
        udp,
        address,
        host: port(host)?,
        guest: port(guest)?,
    })
}

fn parse_mac(text: &str) -> Result<[u8; 6], NetError> {
    let wrong = || NetError::Mac(text.to_owned());
    let byte = |text: &str| match text.len() {
        2 if text.bytes().all(|digit| digit.is_ascii_hexdigit()) => {
            u8::from_str_radix(text, 16).map_err(|_| wrong())
        }
        _ => Err(wrong()),
    };
    let bytes: Vec<u8> = text.split(':').map(byte).collect::<Result<_, _>>()?;
    let mac: [u8; 6] = bytes.try_into().map_err(|_| wrong())?;
    // The lowest bit of the first byte is for groups of cards.
    match mac {
        [first, ..] if first & 1 == 0 && mac != [0; 6] => Ok(mac),
        _ => Err(wrong()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn user(forwards: &[(bool, &str, u16, u16)], loopback: bool) -> Connection {
        let forward = |&(udp, address, host, guest): &(bool, &str, u16, u16)| Forward {
            udp,
            address: address.parse().unwrap_or(IpAddr::V4(Ipv4Addr::UNSPECIFIED)),
            host,
            guest,
        };
        Connection::User(User {
            forwards: forwards.iter().map(forward).collect(),
            loopback,
        })
    }

    #[test]
    fn every_form_is_read() {
        let local = "127.0.0.1";
        for (text, connection, mac) in [
            ("user", user(&[], false), None),
            ("user,loopback", user(&[], true), None),
            (
                "user,host=2222:22,udp=53:5353",
                user(&[(false, local, 2222, 22), (true, local, 53, 5353)], false),
                None,
            ),
            (
                "user,host=192.0.2.1/80:8080,host=::1/81:81",
                user(
                    &[(false, "192.0.2.1", 80, 8080), (false, "::1", 81, 81)],
                    false,
                ),
                None,
            ),
            (
                "user,mac=02:00:00:00:Ab:01",
                user(&[], false),
                Some([2, 0, 0, 0, 0xab, 1]),
            ),
            ("tap=tap0", Connection::Tap("tap0".into()), None),
            (
                "unix=/run/a b/s,mac=52:54:00:12:34:56",
                Connection::Unix("/run/a b/s".into()),
                Some([0x52, 0x54, 0, 0x12, 0x34, 0x56]),
            ),
        ] {
            let written = connection.to_string().parse();
            let (again, none) = (connection.clone(), None);
            assert_eq!(text.parse(), Ok(Net::Card { connection, mac }), "{text}");
            let (connection, mac) = (again, none);
            assert_eq!(written, Ok(Net::Card { connection, mac }), "{text}");
        }
        assert_eq!("off".parse(), Ok(Net::Off));
    }

    #[test]
    fn what_is_not_understood_is_named() {
        for (text, said) in [
            ("", "network \"\""),
            ("on", "network \"on\""),
            ("off,mac=02:00:00:00:00:01", "network \"off\""),
            ("tap", "network \"tap\""),
            ("tap=", "network \"tap=\""),
            ("unix=", "network \"unix=\""),
            ("user=x", "network \"user=x\""),
            ("user,", "option \"\""),
            ("user,port=1:2", "option \"port=1:2\""),
            ("tap=t,host=1:2", "option \"host=1:2\""),
            ("tap=t,loopback", "option \"loopback\""),
            ("user,host=22", "ports \"22\""),
            ("user,host=0:22", "ports \"0:22\""),
            ("user,host=22:65536", "ports \"22:65536\""),
            ("user,udp=a/22:22", "ports \"a/22:22\""),
            ("user,mac=1:2:3:4:5:6", "address \"1:2:3:4:5:6\""),
            ("user,mac=01:00:00:00:00:01", "address \"01:"),
            ("user,mac=02:00:00:00:00", "address \"02:"),
            ("user,mac=00:00:00:00:00:00", "address \"00:"),
            ("user,mac=+2:00:00:00:00:00", "address \"+2:"),
        ] {
            let message = text.parse::<Net>().map_err(|error| error.to_string());
            assert!(
                matches!(&message, Err(message) if message.contains(said)),
                "{text}: {message:?}"
            );
        }
    }

    #[test]
    fn forwards_are_written_as_passt_reads_them() {
        for (text, written) in [
            ("2222:22", "127.0.0.1/2222:22"),
            ("0.0.0.0/80:8080", "0.0.0.0/80:8080"),
            ("::1/80:8080", "::1/80:8080"),
        ] {
            let forward = forward(text, false).map(|forward| forward.to_string());
            assert_eq!(forward, Ok(written.to_owned()));
        }
    }
}

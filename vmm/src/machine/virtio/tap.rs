//! Frames over a TAP interface of the host (Linux, Documentation/networking/tuntap.rst).
//!
//! The kernel's header before a frame is virtio's own, so checksums and the cutting of TCP segments
//! are the host's, if it needs them at all.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::OpenOptionsExt;

use devices::virtio::net::{Abilities, GuestOffloads, HEADER, NetBackend};
use rustix::io::Errno;
use vmm_sys_util::ioctl::{ioctl_with_mut_ref, ioctl_with_ref, ioctl_with_val};

/// The device that makes interfaces.
const DEVICE: &str = "/dev/net/tun";
/// The size of `struct ifreq` in bytes, and the longest name in it, with the zero at its end.
const REQUEST: usize = 40;
const NAME: usize = libc::IFNAMSIZ;

/// A TAP interface cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TapError {
    /// The name is not one of an interface.
    #[error("TAP interface {0:?}: a name has 1 to 15 bytes, and no slash, space or percent sign")]
    Name(String),
    /// The host has no such interfaces, or not for this user.
    #[error("TAP interfaces: {DEVICE}: {0}")]
    Device(io::Error),
    /// The interface is not there, or not for this user.
    #[error(
        "TAP interface {name}: {source}; make it for this user: ip tuntap add {name} mode tap user USER vnet_hdr"
    )]
    Refused {
        /// The name of the interface.
        name: String,
        /// The host's error.
        source: io::Error,
    },
    /// The host refuses a descriptor.
    #[error("TAP interface: {0}")]
    Descriptor(io::Error),
}

/// A backend over a TAP interface.
#[derive(Debug)]
pub(super) struct TapBackend(File);

impl AsFd for TapBackend {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl TapBackend {
    /// Opens the interface with a name, which is made if there is none.
    pub(super) fn open(name: &str) -> Result<Self, TapError> {
        let mut request = request(name).ok_or_else(|| TapError::Name(name.to_owned()))?;
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(libc::O_NONBLOCK)
            .open(DEVICE)
            .map_err(TapError::Device)?;
        let size = libc::c_int::try_from(HEADER).unwrap_or(libc::c_int::MAX);
        // SAFETY: `request` is as long as the `struct ifreq` that the kernel reads and writes, and
        // unlike that it has no pointer in it.
        let made = unsafe { ioctl_with_mut_ref(&file, libc::TUNSETIFF as _, &mut request) };
        let made = match made {
            // SAFETY: the kernel reads one int.
            0.. => unsafe { ioctl_with_ref(&file, libc::TUNSETVNETHDRSZ as _, &size) },
            failed => failed,
        };
        if made < 0 {
            return Err(TapError::Refused {
                name: name.to_owned(),
                source: io::Error::last_os_error(),
            });
        }
        Ok(Self(file))
    }
}

/// Returns the kernel's request for an interface: its name, and after it flags of 16 bits.
fn request(name: &str) -> Option<[u8; REQUEST]> {
    let proper = |byte: u8| byte.is_ascii_graphic() && !b"/%:".contains(&byte);
    if name.is_empty() || name.len() >= NAME || !name.bytes().all(proper) {
        return None;
    }
    let flags = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;
    let flags = u16::try_from(flags).ok()?.to_ne_bytes();
    let mut request = [0; REQUEST];
    let named = name.bytes().chain(std::iter::repeat(0)).take(NAME);
    for (place, byte) in request.iter_mut().zip(named.chain(flags)) {
        *place = byte;
    }
    Some(request)
}

impl NetBackend for TapBackend {
    fn abilities(&self) -> Abilities {
        Abilities {
            offloads: true,
            checked: false,
        }
    }

    fn set_offloads(&mut self, offloads: GuestOffloads) -> io::Result<()> {
        let flags = [
            (offloads.checksum, libc::TUN_F_CSUM),
            (offloads.tcp4, libc::TUN_F_TSO4),
            (offloads.tcp6, libc::TUN_F_TSO6),
        ];
        let wanted = flags.iter().filter(|(wanted, _)| *wanted);
        let flags = wanted.fold(0, |all, (_, flag)| all | flag);
        // SAFETY: the argument is a number.
        match unsafe { ioctl_with_val(&self.0, libc::TUNSETOFFLOAD as _, flags.into()) } {
            0.. => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    fn send(&mut self, packet: &[u8]) -> io::Result<()> {
        match rustix::io::write(&self.0, packet) {
            Err(Errno::AGAIN | Errno::INTR) => Err(io::ErrorKind::WouldBlock.into()),
            // The interface is gone.
            Err(Errno::BADFD) => Err(io::ErrorKind::UnexpectedEof.into()),
            // It is down, or the frame makes no sense to it: the network loses it.
            Ok(_) | Err(_) => Ok(()),
        }
    }

    fn receive(&mut self, packet: &mut [u8]) -> io::Result<usize> {
        match rustix::io::read(&self.0, packet) {
            Ok(length) => Ok(length),
            Err(Errno::BADFD) => Err(io::ErrorKind::UnexpectedEof.into()),
            Err(Errno::INTR) => Err(io::ErrorKind::WouldBlock.into()),
            Err(error) => Err(error.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_checked_before_the_host_sees_it() {
        for name in ["", "a b", "a/b", "tap%d", "a-name-of-16-byt", "a\0b"] {
            let opened = TapBackend::open(name);
            assert!(matches!(opened, Err(TapError::Name(_))), "{name:?}");
        }
        let request = request("tap0").unwrap_or([0; REQUEST]);
        assert_eq!(request[..5], *b"tap0\0");
        assert_eq!(request[NAME..NAME + 2], 0x5002u16.to_le_bytes());
    }
}

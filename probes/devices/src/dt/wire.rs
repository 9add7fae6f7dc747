//! Requests and answers as bytes, on a stream between a client and a session.
//!
//! One connection is one open of the device; closing it closes the session. Numbers are little
//! endian.
//!
//! | Sender | Content |
//! |---|---|
//! | client, once | u32 magic (`'D' 'T' '4' 1`), u32 layout (0 older, 1 current), u32 flags (bit 0: strict) |
//! | device | an answer without bytes |
//! | client | u32 code, u32 length, as many bytes |
//! | device | u32 error, u32 length, as many bytes |
//!
//! An error is 0 or OpenBSD's number. The code is one of [`Call`], or that of an ioctl. The bytes
//! are then the ioctl's argument (none if the argument is output only).
//!
//! Data that an argument points to is not sent. For `DTIOCGPLIST` and `DTIOCGARGS`, the size in the
//! structure is the space for records, which follow the structure in the answer. With `ENOSPC`, the
//! records that fit follow the unchanged structure. The answer to `DTIOCRDVNODE` carries a
//! descriptor (`SCM_RIGHTS`), and the structure has -1.
//!
//! Each request is answered before the next is read. A read of events is answered when there is an
//! event. It ends with `EINTR` if the client sends its next request first, or closes the
//! connection.

use super::abi::{Abi, u32_at, u64_at};
use super::{Errno, Mode, OpenOptions, Refused};

/// The first bytes of a connection, as a number.
pub const MAGIC: u32 = u32::from_le_bytes([b'D', b'T', b'4', 1]);
/// The size of the open message in bytes.
pub const OPEN_SIZE: usize = 12;
/// The size in bytes of the header before a request's argument and before an answer's bytes.
pub const HEADER_SIZE: usize = 8;
/// The largest size of a request's argument in bytes.
pub const MAX_ARGUMENT: usize = 64;

/// The layout field of an open: the older layout.
pub const OPEN_OLD: u32 = 0;
/// The layout field of an open: the current layout.
pub const OPEN_CURRENT: u32 = 1;
/// A flag of an open: OpenBSD's limits apply.
pub const OPEN_STRICT: u32 = 1;

/// The code of a read of events. The argument is a u64, the space in bytes.
pub const READ: u32 = 0;
/// The code of a request for the text of this connection's last refusal, or remark on an answer. No
/// argument.
pub const REASON: u32 = 1;
/// The code of a request for the probes that are not listed, with the reasons, a line each. No
/// argument.
pub const MISSING: u32 = 2;
/// The code of a request for a probe's full name, `provider:function:name`. The argument is its
/// number, a u32.
pub const NAME: u32 = 3;

/// A decoded request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Call {
    /// [`READ`] with the space in bytes.
    Read(u64),
    /// [`REASON`].
    Reason,
    /// [`MISSING`].
    Missing,
    /// [`NAME`] with the number of the probe.
    Name(u32),
    /// An ioctl with this code.
    Ioctl(u32),
}

impl Call {
    /// Decodes a code and its argument.
    ///
    /// # Errors
    /// `EINVAL` if the argument's size is not the call's.
    pub fn decode(code: u32, argument: &[u8]) -> Result<Self, Refused> {
        let wrong = || {
            let why = format!("request {code}: an argument of {} bytes", argument.len());
            Refused::new(Errno::Einval, why)
        };
        match (code, argument.len()) {
            (READ, 8) => u64_at(argument, 0).map(Self::Read).ok_or_else(wrong),
            (NAME, 4) => u32_at(argument, 0).map(Self::Name).ok_or_else(wrong),
            (REASON, 0) => Ok(Self::Reason),
            (MISSING, 0) => Ok(Self::Missing),
            (READ | NAME | REASON | MISSING, _) => Err(wrong()),
            _ => Ok(Self::Ioctl(code)),
        }
    }
}

/// Decodes an open.
///
/// # Errors
/// `EINVAL` if it is invalid.
pub fn decode_open(bytes: &[u8; OPEN_SIZE], privileged: bool) -> Result<OpenOptions, Refused> {
    let word = |at| u32_at(bytes, at).unwrap_or_default();
    let (magic, abi, flags) = (word(0), word(4), word(8));
    let refused = |why: String| Err(Refused::new(Errno::Einval, why));
    if magic != MAGIC {
        return refused(format!(
            "a connection begins with {magic:#010x}; it is {MAGIC:#010x}"
        ));
    }
    let abi = match abi {
        OPEN_OLD => Abi::Old,
        OPEN_CURRENT => Abi::Current,
        other => return refused(format!("layout {other}; 0 and 1 are known")),
    };
    if flags & !OPEN_STRICT != 0 {
        return refused(format!("flags {flags:#x}; {OPEN_STRICT:#x} alone is known"));
    }
    Ok(OpenOptions {
        abi,
        mode: match flags & OPEN_STRICT {
            0 => Mode::Normal,
            _ => Mode::Strict,
        },
        privileged,
    })
}

/// Decodes the code and length of a request.
///
/// # Errors
/// `EINVAL` if the argument is longer than any. The connection must then be closed.
pub fn decode_request(bytes: &[u8; HEADER_SIZE]) -> Result<(u32, usize), Refused> {
    let word = |at| u32_at(bytes, at).unwrap_or_default();
    let (code, length) = (word(0), word(4));
    match usize::try_from(length) {
        Ok(length) if length <= MAX_ARGUMENT => Ok((code, length)),
        _ => {
            let why = format!("an argument of {length} bytes, {MAX_ARGUMENT} are the most");
            Err(Refused::new(Errno::Einval, why))
        }
    }
}

/// Encodes an answer.
#[must_use]
pub fn answer(errno: Option<Errno>, bytes: &[u8]) -> Vec<u8> {
    let length = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
    let mut answer = Vec::with_capacity(HEADER_SIZE + bytes.len());
    answer.extend_from_slice(&errno.map_or(0, Errno::number).to_le_bytes());
    answer.extend_from_slice(&length.to_le_bytes());
    answer.extend_from_slice(bytes);
    answer
}

#[cfg(test)]
mod tests {
    use super::*;

    fn open(words: [u32; 3]) -> [u8; OPEN_SIZE] {
        let mut bytes = [0; OPEN_SIZE];
        let all = words.into_iter().flat_map(u32::to_le_bytes);
        for (place, byte) in bytes.iter_mut().zip(all) {
            *place = byte;
        }
        bytes
    }

    #[test]
    fn an_open_chooses_layout_and_mode_or_is_refused() {
        let options = |abi, mode| OpenOptions {
            abi,
            mode,
            privileged: true,
        };
        for (words, expected) in [
            ([MAGIC, 0, 0], Ok(options(Abi::Old, Mode::Normal))),
            ([MAGIC, 1, 1], Ok(options(Abi::Current, Mode::Strict))),
            ([MAGIC, 2, 0], Err(Errno::Einval)),
            ([MAGIC, 1, 2], Err(Errno::Einval)),
            ([MAGIC + 0x0100_0000, 1, 0], Err(Errno::Einval)),
        ] {
            let found = decode_open(&open(words), true).map_err(|refused| refused.errno);
            assert_eq!(found, expected, "{words:?}");
        }
        assert_eq!(MAGIC.to_le_bytes(), *b"DT4\x01");
    }

    #[test]
    fn calls_have_arguments_of_their_sizes() {
        for (code, argument, expected) in [
            (READ, &[0, 1, 0, 0, 0, 0, 0, 0][..], Some(Call::Read(256))),
            (READ, &[0, 1, 0, 0], None),
            (REASON, &[], Some(Call::Reason)),
            (REASON, &[1], None),
            (MISSING, &[], Some(Call::Missing)),
            (NAME, &[7, 0, 0, 0], Some(Call::Name(7))),
            (NAME, &[7], None),
            (0x4020_4402, &[], Some(Call::Ioctl(0x4020_4402))),
        ] {
            assert_eq!(Call::decode(code, argument).ok(), expected, "{code}");
        }
    }

    #[test]
    fn requests_and_answers_have_a_length() {
        let header = |length: u32| {
            let mut bytes = [3, 0, 0, 0, 0, 0, 0, 0];
            bytes[4..].copy_from_slice(&length.to_le_bytes());
            decode_request(&bytes).map_err(|refused| refused.errno)
        };
        assert_eq!(header(4), Ok((3, 4)));
        assert_eq!(header(64), Ok((3, 64)));
        assert_eq!(header(65), Err(Errno::Einval));
        assert_eq!(header(u32::MAX), Err(Errno::Einval));
        assert_eq!(answer(None, b"ab"), [0, 0, 0, 0, 2, 0, 0, 0, b'a', b'b']);
        assert_eq!(
            answer(Some(Errno::Emsgsize), b""),
            [40, 0, 0, 0, 0, 0, 0, 0]
        );
    }
}

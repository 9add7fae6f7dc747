//! Files of lzop, as a kernel's build with `CONFIG_KERNEL_LZO` makes them.
//!
//! A header is followed by blocks: unpacked size, packed size (32 bits each, big-endian),
//! checksums, data. A block that does not get smaller is stored as it is. A size of zero ends the
//! file. Each size is checked before it is used, and the checksum of the unpacked data is compared.
//!
//! Source: `lib/decompress_unlzo.c` of Linux, and `conf.h` of lzop for the flags.

use std::io::{self, ErrorKind};

use super::codec::invalid;

const MAGIC: &[u8] = b"\x89LZO\0\r\n\x1a\n";
/// The version of lzop from which on headers have a level, and 64 bits of time.
const WITH_LEVEL: u16 = 0x940;
/// The bytes of the library's version, of the version needed, and of the method.
const VERSIONS: usize = 5;
/// The bytes of the file's mode and of the lower half of its time.
const MODE_AND_TIME: usize = 8;
/// Flags: the checksums of each block's unpacked and packed data, and a word more in the header.
const ADLER32_UNPACKED: u32 = 1;
const ADLER32_PACKED: u32 = 2;
const CRC32_UNPACKED: u32 = 0x100;
const CRC32_PACKED: u32 = 0x200;
const EXTRA_FIELD: u32 = 0x40;
const FILTER: u32 = 0x800;
/// The largest unpacked block of lzop, in bytes: its limit for reading, not the one of Linux.
const LARGEST_BLOCK: usize = 64 << 20;

/// Appends the unpacked `packed` to `out`, and stops after the block that exceeds `expected`.
///
/// # Errors
/// If the file is cut off, or its sizes, data or checksums are wrong.
pub(super) fn unpack(packed: &[u8], expected: usize, out: &mut Vec<u8>) -> io::Result<()> {
    let mut rest = Rest(packed);
    let flags = header(&mut rest)?;
    let checksums = |kinds: [u32; 2]| kinds.into_iter().filter(|kind| flags & kind != 0);
    while out.len() <= expected {
        let unpacked = rest.size()?;
        if unpacked == 0 {
            break;
        }
        let packed = rest.size()?;
        if packed > unpacked || unpacked > LARGEST_BLOCK {
            return Err(invalid(format!("a block of {packed} bytes for {unpacked}")));
        }
        let mut adler32 = None;
        for kind in checksums([ADLER32_UNPACKED, CRC32_UNPACKED]) {
            let checksum = rest.u32()?;
            adler32 = adler32.or((kind == ADLER32_UNPACKED).then_some(checksum));
        }
        // A stored block has one set of checksums.
        if packed < unpacked {
            checksums([ADLER32_PACKED, CRC32_PACKED]).try_for_each(|_| rest.u32().map(|_| ()))?;
        }
        let data = rest.take(packed)?;
        let start = out.len();
        if packed == unpacked {
            out.extend_from_slice(data);
        } else {
            out.resize(start + unpacked, 0);
            let block = out.get_mut(start..).unwrap_or_default();
            let length = lzokay::decompress::decompress(data, block).map_err(invalid)?;
            if length != unpacked {
                let reason = format!("a block of {length} bytes instead of {unpacked}");
                return Err(invalid(reason));
            }
        }
        let found = adler2::adler32_slice(out.get(start..).unwrap_or_default());
        match adler32 {
            Some(stored) if stored != found => {
                let reason = format!("checksum {found:#010x}, expected {stored:#010x}");
                return Err(invalid(reason));
            }
            _ => {}
        }
    }
    Ok(())
}

/// Reads over the header, and returns its flags.
fn header(rest: &mut Rest) -> io::Result<u32> {
    if rest.take(MAGIC.len())? != MAGIC {
        return Err(invalid("the header of lzop is damaged"));
    }
    let version = u16::from_be_bytes(rest.array()?);
    rest.take(VERSIONS)?;
    let has_level = version >= WITH_LEVEL;
    rest.take(usize::from(has_level))?;
    let flags = rest.u32()?;
    if flags & FILTER != 0 {
        rest.u32()?;
    }
    rest.take(MODE_AND_TIME)?;
    if has_level {
        rest.u32()?;
    }
    let [name] = rest.array()?;
    rest.take(usize::from(name))?;
    // The header's checksum. What it covers has no other use here.
    rest.u32()?;
    if flags & EXTRA_FIELD != 0 {
        let length = rest.size()?;
        rest.take(length)?;
        rest.u32()?;
    }
    Ok(flags)
}

/// The bytes that have not been read.
struct Rest<'a>(&'a [u8]);

impl<'a> Rest<'a> {
    fn take(&mut self, length: usize) -> io::Result<&'a [u8]> {
        let (taken, rest) = self
            .0
            .split_at_checked(length)
            .ok_or(ErrorKind::UnexpectedEof)?;
        self.0 = rest;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> io::Result<[u8; N]> {
        let (taken, rest) = self.0.split_first_chunk().ok_or(ErrorKind::UnexpectedEof)?;
        self.0 = rest;
        Ok(*taken)
    }

    fn u32(&mut self) -> io::Result<u32> {
        self.array().map(u32::from_be_bytes)
    }

    fn size(&mut self) -> io::Result<usize> {
        usize::try_from(self.u32()?).map_err(invalid)
    }
}

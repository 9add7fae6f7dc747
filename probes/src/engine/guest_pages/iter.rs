//! Reads the destination of a copy in the guest's kernel from its `struct iov_iter`
//! (include/linux/uio.h).

use std::iter::once;
use std::ops::Range;

use introspect::kernel::btf::Btf;
use introspect::x86_64::paging::AddressSpace;
use introspect::x86_64::virtual_memory::read_u64;
use introspect::{Gva, PhysicalMemory};

use super::Unknown;

/// The largest number of segments of a copy that are read.
const MOST_SEGMENTS: u64 = 1024;

/// The layout of a kernel's `struct iov_iter`.
pub(super) struct CopyLayout {
    pub(super) kind: u64,
    /// The bits that hold the kind. Up to Linux 5.13 the lowest bit is the direction.
    pub(super) mask: u64,
    pub(super) offset: u64,
    pub(super) buffer: u64,
    pub(super) segments: u64,
    /// Kinds: one user buffer, several user buffers, several kernel buffers.
    pub(super) one: Option<u64>,
    pub(super) several: u64,
    pub(super) kernel: u64,
}

impl CopyLayout {
    /// Reads the layout from a kernel's types.
    pub(super) fn new(btf: &Btf) -> Result<Self, Unknown> {
        let offset = |path: &str| super::offset(btf, path);
        let either = |paths: &[&str]| {
            let mut last = String::new();
            for path in paths {
                match offset(path) {
                    Ok(found) => return Ok(found),
                    Err(error) => last = error,
                }
            }
            Err(last)
        };
        let kind = |name: &str| {
            let value = btf.enumerator(&format!("iter_type.{name}"));
            value
                .map(i64::cast_unsigned)
                .map_err(|error| error.to_string())
        };
        let (kind_at, mask) = match offset("iov_iter.iter_type") {
            Ok(found) => (found, 0xff),
            Err(error) => (offset("iov_iter.type").map_err(|_| error)?, 0xfe),
        };
        Ok(Self {
            kind: kind_at,
            mask,
            offset: offset("iov_iter.iov_offset")?,
            buffer: either(&["iov_iter.ubuf", "iov_iter.__iov", "iov_iter.iov"])?,
            segments: offset("iov_iter.nr_segs")?,
            one: kind("ITER_UBUF").ok(),
            several: kind("ITER_IOVEC")?,
            kernel: kind("ITER_KVEC")?,
        })
    }

    /// Returns the destination of the first `length` bytes that are copied to the `struct iov_iter`
    /// at `iter`. `space` maps it. Empty for kinds that copy no bytes.
    pub(super) fn destination(
        &self,
        memory: &dyn PhysicalMemory,
        space: AddressSpace,
        iter: u64,
        length: u64,
    ) -> Vec<Range<u64>> {
        let at = |address: u64, offset: u64| {
            read_u64(memory, space, Gva(address.wrapping_add(offset))).ok()
        };
        let word = |offset| at(iter, offset);
        let (Some(kind), Some(mut skip), Some(buffer), Some(segments)) = (
            word(self.kind),
            word(self.offset),
            word(self.buffer),
            word(self.segments),
        ) else {
            return Vec::new();
        };
        // One byte, or an enumeration of 32 bits in older kernels.
        let kind = kind & self.mask;
        if Some(kind) == self.one {
            let start = buffer.wrapping_add(skip);
            return once(start..start.saturating_add(length)).collect();
        }
        if kind != self.several && kind != self.kernel {
            return Vec::new();
        }
        let (mut parts, mut left) = (Vec::new(), length);
        for number in 0..segments.min(MOST_SEGMENTS) {
            // `struct iovec` and `struct kvec`: base and length.
            let segment = buffer.wrapping_add(number * 16);
            let (Some(base), Some(size)) = (at(segment, 0), at(segment, 8)) else {
                break;
            };
            let inside = size.saturating_sub(skip).min(left);
            let start = base.wrapping_add(skip);
            skip = skip.saturating_sub(size);
            if inside > 0 {
                parts.push(start..start.saturating_add(inside));
                left -= inside;
            }
            if left == 0 {
                break;
            }
        }
        parts
    }
}

/// Returns the address of byte `number` of those that were copied to `parts` in sequence.
pub(super) fn nth(parts: &[Range<u64>], number: u64) -> Option<u64> {
    let mut left = number;
    for part in parts {
        let length = part.end - part.start;
        if left < length {
            return Some(part.start + left);
        }
        left -= length;
    }
    None
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use introspect::{Gpa, PhysicalReadError};

    use super::*;

    /// Page tables, one for each level, which map the page at 0 to itself, with words behind them.
    struct Memory(Vec<u64>);

    const STRUCTURE: u64 = 0x4000;

    impl Memory {
        fn new(words: &[u64]) -> Self {
            let mut memory = vec![0; STRUCTURE as usize / 8 + 512];
            for level in 0..3u64 {
                memory[level as usize * 512] = (level + 1) << 12 | 3;
            }
            for (page, entry) in memory[3 * 512..4 * 512].iter_mut().enumerate() {
                *entry = (page as u64) << 12 | 3;
            }
            let start = STRUCTURE as usize / 8;
            memory[start..start + words.len()].copy_from_slice(words);
            Self(memory)
        }
    }

    impl PhysicalMemory for Memory {
        fn read_physical(&self, address: Gpa, buf: &mut [u8]) -> Result<(), PhysicalReadError> {
            let bytes: Vec<u8> = self.0.iter().flat_map(|word| word.to_le_bytes()).collect();
            let start = address.0 as usize;
            let part = bytes.get(start..start + buf.len());
            let length = buf.len();
            buf.copy_from_slice(part.ok_or(PhysicalReadError { address, length })?);
            Ok(())
        }

        fn ram(&self) -> Vec<Range<u64>> {
            once(0..self.0.len() as u64 * 8).collect()
        }
    }

    /// Checks Linux 5.10, which keeps the direction in a bit of `struct iov_iter` that later tells
    /// two kinds apart.
    #[test]
    fn the_direction_of_a_copy_is_none_of_its_kind() {
        let segment = STRUCTURE + 0x100;
        let mut words = vec![0; 0x110 / 8];
        words[..5].copy_from_slice(&[4, 2, 100, segment, 1]);
        words[0x100 / 8..].copy_from_slice(&[0x7000, 0x40]);
        let layout = |mask| CopyLayout {
            kind: 0,
            mask,
            offset: 8,
            buffer: 24,
            segments: 32,
            one: None,
            several: 4,
            kernel: 8,
        };
        let space = AddressSpace {
            root: Gpa(0),
            levels: 4,
        };
        let mut parts = |kind, mask| {
            words[0] = kind;
            layout(mask).destination(&Memory::new(&words), space, STRUCTURE, 10)
        };
        // Kind, mask, and whether the kind means a single user buffer under that mask.
        for (kind, mask, single) in [
            (4, 0xfe, true),
            (5, 0xfe, true),
            (4, 0xff, true),
            (5, 0xff, false),
            (16, 0xfe, false),
        ] {
            let expected = single.then_some(0x7002..0x700c);
            assert!(
                parts(kind, mask).into_iter().eq(expected),
                "{kind} {mask:#x}"
            );
        }
    }

    #[test]
    fn bytes_are_counted_through_the_parts_of_a_copy() {
        let parts = [10..13, 100..101, 50..60];
        for (number, address) in [
            (0, Some(10)),
            (2, Some(12)),
            (3, Some(100)),
            (4, Some(50)),
            (13, Some(59)),
            (14, None),
        ] {
            assert_eq!(nth(&parts, number), address, "{number}");
        }
    }
}

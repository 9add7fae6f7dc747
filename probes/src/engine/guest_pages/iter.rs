//! Where the guest's kernel copies bytes to: `struct iov_iter` (include/linux/uio.h).

use std::iter::once;
use std::ops::Range;

use introspect::kernel::btf::Btf;
use introspect::x86_64::paging::AddressSpace;
use introspect::x86_64::virtual_memory::read_u64;
use introspect::{Gva, PhysicalMemory};

use super::Unknown;

/// Segments of a copy that are looked at.
const MOST_SEGMENTS: u64 = 1024;

/// `struct iov_iter` of one kernel.
pub(super) struct CopyLayout {
    pub(super) kind: u64,
    pub(super) offset: u64,
    pub(super) buffer: u64,
    pub(super) segments: u64,
    /// Kinds: one buffer of the program, several, several of the kernel's.
    pub(super) one: Option<u64>,
    pub(super) several: u64,
    pub(super) kernel: u64,
}

impl CopyLayout {
    /// Of the kernel with these types.
    pub(super) fn new(btf: &Btf) -> Result<Self, Unknown> {
        let offset = |path: &str| {
            let member = btf.member(path).map_err(|error| error.to_string())?;
            Ok::<_, Unknown>(member.byte_offset)
        };
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
        Ok(Self {
            kind: offset("iov_iter.iter_type")?,
            offset: offset("iov_iter.iov_offset")?,
            buffer: either(&["iov_iter.ubuf", "iov_iter.__iov", "iov_iter.iov"])?,
            segments: offset("iov_iter.nr_segs")?,
            one: kind("ITER_UBUF").ok(),
            several: kind("ITER_IOVEC")?,
            kernel: kind("ITER_KVEC")?,
        })
    }

    /// Where the first `length` bytes go that are copied to the `struct iov_iter` at `iter`, which `space` maps; nothing for kinds that copy
    /// no bytes.
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
        // A byte, or an enumeration of 32 bits in older kernels.
        let kind = kind & 0xff;
        if Some(kind) == self.one {
            let start = buffer.wrapping_add(skip);
            return once(start..start.saturating_add(length)).collect();
        }
        if kind != self.several && kind != self.kernel {
            return Vec::new();
        }
        let (mut parts, mut left) = (Vec::new(), length);
        for number in 0..segments.min(MOST_SEGMENTS) {
            // struct iovec and struct kvec: base and length.
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

/// The address of byte `number` of those that were copied to `parts` one after the other.
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
    use super::*;

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

//! Flat 64-bit segments in KVM's form, and the privilege level they imply.

use kvm_bindings::kvm_segment;

/// The CPL bits of a selector.
pub const RPL_MASK: u64 = 3;

/// Returns a flat code segment for 64-bit mode with the privilege level of `selector`.
pub fn code64(selector: u16) -> kvm_segment {
    let dpl = (u64::from(selector) & RPL_MASK) as u8;
    kvm_segment {
        base: 0,
        limit: 0xffff_ffff,
        selector,
        type_: 0xb, // execute, read, accessed
        present: 1,
        dpl,
        db: 0,
        s: 1,
        l: 1,
        g: 1,
        ..Default::default()
    }
}

/// Returns a flat data or stack segment with the privilege level of `selector`.
pub fn data(selector: u16) -> kvm_segment {
    kvm_segment {
        type_: 3, // read, write, accessed
        db: 1,
        l: 0,
        ..code64(selector)
    }
}

/// Returns a flat 32-bit code segment, for the PVH entry.
pub fn code32(selector: u16) -> kvm_segment {
    kvm_segment {
        db: 1,
        l: 0,
        ..code64(selector)
    }
}

/// Returns the 8-byte GDT descriptor that describes `segment`.
pub fn descriptor(segment: &kvm_segment) -> u64 {
    let base = segment.base;
    let limit = u64::from(if segment.g == 1 {
        segment.limit >> 12
    } else {
        segment.limit
    });
    let access = u64::from(segment.type_)
        | u64::from(segment.s) << 4
        | u64::from(segment.dpl) << 5
        | u64::from(segment.present) << 7;
    let flags = u64::from(segment.avl)
        | u64::from(segment.l) << 1
        | u64::from(segment.db) << 2
        | u64::from(segment.g) << 3;
    (limit & 0xffff)
        | (base & 0xff_ffff) << 16
        | access << 40
        | (limit >> 16 & 0xf) << 48
        | flags << 52
        | (base >> 24 & 0xff) << 56
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptors_are_the_ones_linux_uses() {
        // arch/x86/kernel/cpu/common.c: GDT_ENTRY_INIT(0xa09b..), (0xc093..)
        assert_eq!(descriptor(&code64(0x10)), 0x00af_9b00_0000_ffff);
        assert_eq!(descriptor(&data(0x18)), 0x00cf_9300_0000_ffff);
        assert_eq!(descriptor(&code64(0x33)), 0x00af_fb00_0000_ffff);
        assert_eq!(descriptor(&code32(0x10)), 0x00cf_9b00_0000_ffff);
    }
}

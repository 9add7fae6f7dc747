//! The address ranges of the kernel image's code and data.
//!
//! The caller passes symbols that have the running kernel's slide. Modules and code that the kernel
//! generates are elsewhere.
//!
//! Sections: include/asm-generic/vmlinux.lds.h, arch/x86/kernel/vmlinux.lds.S.

use std::ops::Range;

use super::symbols::Symbols;

/// A part of the address space.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Section {
    /// The code of the kernel's image, including code that runs only at boot.
    Text,
    /// The rest of the kernel's image.
    Data,
    /// Outside the image, or unknown to the symbols.
    Elsewhere,
}

/// The kernel's image in memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KernelText {
    text: Vec<Range<u64>>,
    image: Range<u64>,
}

impl KernelText {
    /// Looks up the bounds. Those that the symbols lack are left out.
    #[must_use]
    pub fn new(symbols: &Symbols) -> Self {
        let range = |start, end| Some(symbols.address_of(start)?..symbols.address_of(end)?);
        let text = [range("_stext", "_etext"), range("_sinittext", "_einittext")];
        Self {
            text: text.into_iter().flatten().collect(),
            image: range("_stext", "_end").unwrap_or(0..0),
        }
    }

    /// Returns the part of the image that contains `address`.
    #[must_use]
    pub fn section(&self, address: u64) -> Section {
        if self.text.iter().any(|range| range.contains(&address)) {
            return Section::Text;
        }
        match self.image.contains(&address) {
            true => Section::Data,
            false => Section::Elsewhere,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::test_kernel::symbols;

    const TEXT: u64 = 0xffff_ffff_8100_0000;

    #[test]
    fn an_address_is_in_the_section_that_symbols_bound() {
        let none = symbols(&[]);
        let symbols = symbols(&[
            ("_stext", TEXT),
            ("_etext", TEXT + 0x300),
            ("_sinittext", TEXT + 0x800),
            ("_einittext", TEXT + 0x900),
            ("_end", TEXT + 0x1000),
        ]);
        let text = KernelText::new(&symbols.with_slide(0x20_0000));
        for (offset, expected) in [
            (0x20_0000, Section::Text),
            (0x20_02ff, Section::Text),
            (0x20_0300, Section::Data),
            (0x20_0800, Section::Text),
            (0x20_0900, Section::Data),
            (0x20_1000, Section::Elsewhere),
            (0x1f_ffff, Section::Elsewhere),
        ] {
            assert_eq!(text.section(TEXT + offset), expected, "{offset:#x}");
        }
        let unknown = KernelText::new(&none);
        assert_eq!(unknown.section(TEXT), Section::Elsewhere);
    }
}

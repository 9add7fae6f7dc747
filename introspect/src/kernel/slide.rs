//! The distance of a running kernel from its link address (KASLR), from addresses in a live CPU.
//!
//! The caller reads the addresses; no guest memory is searched. The result is valid once the kernel
//! has set up its final entry points, early in boot. Before that, it is an error and not a guess.

use super::symbols::Symbols;

/// The alignment of a kernel's slide, in bytes (`MIN_KERNEL_ALIGN` and `CONFIG_PHYSICAL_ALIGN` on
/// x86-64, arch/x86/include/asm/boot.h).
const ALIGNMENT: u64 = 2 << 20;
/// Size in bytes of the window in which the kernel stays (`KERNEL_IMAGE_SIZE`,
/// arch/x86/include/asm/page_64_types.h).
const WINDOW: u64 = 1 << 30;

/// The entry points that a CPU of the guest is set up with; 0 where there is none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LiveEntries {
    /// The entry of system calls: the model-specific register LSTAR.
    pub syscall: u64,
    /// The handler of page faults: gate 14 of the interrupt descriptor table.
    pub page_fault: u64,
    /// The handler of divide errors: gate 0 of the interrupt descriptor table.
    pub divide_error: u64,
}

/// An entry point, according to the CPU and to the symbols.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Evidence {
    /// The symbol's name.
    pub symbol: &'static str,
    /// The address in the running kernel.
    pub live: u64,
    /// The link address.
    pub linked: u64,
}

impl Evidence {
    fn slide(&self) -> u64 {
        self.live.wrapping_sub(self.linked)
    }
}

impl std::fmt::Display for Evidence {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self {
            symbol,
            live,
            linked,
        } = self;
        write!(f, "{symbol} is linked at {linked:#x} and runs at {live:#x}")
    }
}

/// An error in finding the slide.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SlideError {
    /// Fewer than two entry points could be compared.
    #[error(
        "only {found} of the kernel's entry points can be compared with its symbols, 2 are needed \
         (system calls enter at {:#x}, page faults at {:#x}, divide errors at {:#x}): the guest has not \
         booted far enough, or the symbols are not its own",
        live.syscall, live.page_fault, live.divide_error
    )]
    TooFew {
        /// The number of entry points that are set up and have a symbol.
        found: usize,
        /// The CPU's entry points.
        live: LiveEntries,
    },
    /// Two entry points were moved by different distances.
    #[error(
        "{first}, but {second}: the guest has not booted far enough, or runs another kernel than this image"
    )]
    Disagree {
        /// The first of them.
        first: Evidence,
        /// The one that disagrees.
        second: Evidence,
    },
    /// All entry points agree on an impossible distance.
    #[error(
        "{first}: {:#x} bytes apart, which is not a multiple of 2 MiB below 1 GiB; \
         the guest runs another kernel than this image",
        first.slide()
    )]
    Implausible {
        /// One of the entry points.
        first: Evidence,
    },
}

/// Returns the distance in bytes from the link to the running address, for [`Symbols::with_slide`].
/// `symbols` are those of the image, at any slide. At least two entry points must agree, and none
/// may disagree.
///
/// # Errors
/// If they do not, or the distance is impossible.
pub fn find(symbols: &Symbols, live: LiveEntries) -> Result<u64, SlideError> {
    let known = [
        ("entry_SYSCALL_64", live.syscall),
        ("asm_exc_page_fault", live.page_fault),
        ("asm_exc_divide_error", live.divide_error),
    ];
    let linked = symbols.with_slide(0);
    let mut evidence = known.into_iter().filter_map(|(symbol, live)| {
        let linked = linked.address_of(symbol).filter(|_| live != 0)?;
        Some(Evidence {
            symbol,
            live,
            linked,
        })
    });
    let first = evidence
        .next()
        .ok_or(SlideError::TooFew { found: 0, live })?;
    let mut found = 1;
    for second in evidence {
        if second.slide() != first.slide() {
            return Err(SlideError::Disagree { first, second });
        }
        found += 1;
    }
    match first.slide() {
        _ if found < 2 => Err(SlideError::TooFew { found, live }),
        slide if is_plausible(slide) => Ok(slide),
        _ => Err(SlideError::Implausible { first }),
    }
}

/// Checks whether a kernel can be moved by this number of bytes.
pub(super) fn is_plausible(slide: u64) -> bool {
    slide.is_multiple_of(ALIGNMENT) && slide < WINDOW
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::kernel::test_kernel::symbols;
    use crate::test_says::assert_says;

    const SYSCALL: u64 = 0xffff_ffff_81c0_0080;
    const PAGE_FAULT: u64 = 0xffff_ffff_81c0_0be0;
    const DIVIDE: u64 = 0xffff_ffff_81c0_0a90;

    fn kernel() -> Symbols {
        symbols(&[
            ("entry_SYSCALL_64", SYSCALL),
            ("asm_exc_page_fault", PAGE_FAULT),
            ("asm_exc_divide_error", DIVIDE),
        ])
    }

    fn moved(slide: u64) -> LiveEntries {
        LiveEntries {
            syscall: SYSCALL.wrapping_add(slide),
            page_fault: PAGE_FAULT.wrapping_add(slide),
            divide_error: DIVIDE.wrapping_add(slide),
        }
    }

    #[test]
    fn agreeing_entries_give_the_slide() {
        for slide in [0, 0x20_0000, 0x1e60_0000, 0x3e00_0000] {
            assert_eq!(find(&kernel(), moved(slide)), Ok(slide));
            assert_eq!(
                find(&kernel().with_slide(0x40_0000), moved(slide)),
                Ok(slide),
                "any slide in symbols"
            );
            let without = LiveEntries {
                syscall: 0,
                ..moved(slide)
            };
            assert_eq!(find(&kernel(), without), Ok(slide), "two are enough");
        }
    }

    #[test]
    fn anything_else_is_refused_by_name() {
        let early = LiveEntries {
            page_fault: PAGE_FAULT + 0x1234,
            ..moved(0x20_0000)
        };
        let unset = LiveEntries {
            syscall: 0,
            page_fault: 0,
            ..moved(0)
        };
        for (symbols, live, expected) in [
            (
                kernel(),
                early,
                "asm_exc_page_fault is linked at 0xffffffff81c00be0 and runs at 0xffffffff81c01e14",
            ),
            (
                kernel(),
                early,
                "entry_SYSCALL_64 is linked at 0xffffffff81c00080 and runs at 0xffffffff81e00080",
            ),
            (kernel(), unset, "only 1 of the kernel's entry points"),
            (
                symbols(&[]),
                moved(0),
                "only 0 of the kernel's entry points",
            ),
            (
                kernel(),
                moved(0x1000),
                "0x1000 bytes apart, which is not a multiple of 2 MiB",
            ),
            (kernel(), moved(0x4000_0000), "0x40000000 bytes apart"),
            (
                kernel(),
                moved(0u64.wrapping_sub(0x20_0000)),
                "0xffffffffffe00000 bytes apart",
            ),
        ] {
            assert_says(find(&symbols, live).unwrap_err(), expected);
        }
    }
}

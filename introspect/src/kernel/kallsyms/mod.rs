//! Decoder of kallsyms, the compressed symbol table in a Linux kernel's read-only data.
//!
//! The caller passes raw bytes that contain the tables: an ELF image, or the kernel's data read
//! from guest memory. They must start at an address that is a multiple of 8, as files and pages do.
//! The tables have no header: [`find`] recognises them by their shape and checks each against the
//! others.
//!
//! Three layouts are supported: Linux 4.20 to 6.3, 6.4 to 6.19, and 7.0 and later. The first two
//! have 32-bit offsets from a base (`CONFIG_KALLSYMS_BASE_RELATIVE`, always on for x86-64), with or
//! without absolute per-CPU symbols. In the third, offsets count from themselves. Modules keep
//! symbol tables of their own, which are not read here.
//!
//! The kinds are the kernel's own, with one correction. Linux 6.19 and later link their data as
//! executable, so their tables call variables text (`T init_task`). Symbols between the text and
//! the initialisation text are reported as data.
//!
//! The format is that of scripts/kallsyms.c and kernel/kallsyms.c.

mod addresses;
mod names;
#[cfg(test)]
pub(crate) mod test_tables;
mod tokens;

use addresses::Addresses;
use names::Names;
use tokens::Tokens;

use super::symbols::{Symbols, SymbolsBuilder, TooManySymbols};

/// The maximum length of an expanded name in bytes; `KSYM_NAME_LEN` is 512 since Linux 6.1.
const MAX_NAME: usize = 1024;
/// The maximum number of symbols; distribution kernels have about 200,000.
const MAX_SYMBOLS: usize = 4 << 20;
/// The maximum number of token tables tried; an image has one.
const MAX_TOKEN_TABLES: usize = 4;
/// The maximum number of candidate positions of the token table's digits.
const MAX_TOKEN_CANDIDATES: usize = 256;

/// An error in decoding kallsyms. Offsets count from the first byte passed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum KallsymsError {
    /// There is no table of 256 name pieces with its index.
    #[error(
        "no token table found in {searched} bytes (built without CONFIG_KALLSYMS, or still compressed?)"
    )]
    NoTokens {
        /// The number of bytes searched.
        searched: usize,
    },
    /// No name stream matches the token table.
    #[error("no symbol names and markers found near the token table at {tokens:#x}")]
    NoNames {
        /// Offset of the token table.
        tokens: usize,
    },
    /// No address table matches the names.
    #[error(
        "found {count} symbol names at {names:#x} but no table of their addresses beside them: the kernel's \
         kallsyms layout is unknown (neither that of Linux 4.20 to 6.3, nor of 6.4 to 6.19, nor of 7.0 and later)"
    )]
    NoAddresses {
        /// The number of symbols.
        count: usize,
        /// Offset of the name stream.
        names: usize,
    },
    /// A name is impossible.
    #[error(
        "symbol {index} expands to {length} bytes, which no kernel's name has: the table is damaged"
    )]
    BadName {
        /// The symbol's index in the table.
        index: usize,
        /// The number of bytes expanded before giving up; 0 for an empty name.
        length: usize,
    },
    /// The symbols are too many.
    #[error(transparent)]
    TooMany(#[from] TooManySymbols),
}

impl KallsymsError {
    /// Returns how far the search came. Of two failures, the one that came further is more
    /// informative.
    pub(super) fn progress(&self) -> u8 {
        match self {
            Self::NoTokens { .. } => 0,
            Self::NoNames { .. } => 1,
            Self::NoAddresses { .. } => 2,
            Self::BadName { .. } | Self::TooMany(_) => 3,
        }
    }
}

/// The order of the tables.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Layout {
    /// Addresses before the names: up to Linux 6.3.
    AddressesFirst,
    /// Addresses after the token index: Linux 6.4 to 6.19.
    AddressesLast,
    /// Addresses after the token index, each counted from its own place: since Linux 7.0.
    AddressesFromEntries,
}

/// The tables, found and checked against each other, not yet expanded.
#[derive(Debug)]
pub struct Kallsyms<'a> {
    bytes: &'a [u8],
    tokens: Tokens<'a>,
    names: Names,
    addresses: Addresses,
    layout: Layout,
}

/// Finds the tables in `bytes`. Takes milliseconds on an image of 50 MB, and is bounded for any
/// content. `address_of` returns the address, or link address, of the byte at an offset;
/// [`standing_at`] makes one.
///
/// # Errors
/// If one of the tables is missing. The error is that of the candidate that came furthest.
pub fn find(
    bytes: &[u8],
    address_of: impl Fn(usize) -> Option<u64>,
) -> Result<Kallsyms<'_>, KallsymsError> {
    let mut failure = KallsymsError::NoTokens {
        searched: bytes.len(),
    };
    for tokens in tokens::candidates(bytes).take(MAX_TOKEN_TABLES) {
        let Some(names) = names::find_before(bytes, tokens.start()) else {
            if matches!(failure, KallsymsError::NoTokens { .. }) {
                failure = KallsymsError::NoNames {
                    tokens: tokens.start(),
                };
            }
            continue;
        };
        let last =
            Addresses::after(bytes, tokens.end(), names.count).map(|a| (a, Layout::AddressesLast));
        let first = || {
            let found = Addresses::before(bytes, names.count_offset, names.count);
            found.map(|a| (a, Layout::AddressesFirst))
        };
        let from_entries = || {
            let found = Addresses::from_entries(bytes, tokens.end(), names.count, &address_of);
            found.map(|a| (a, Layout::AddressesFromEntries))
        };
        match last.or_else(first).or_else(from_entries) {
            Some((addresses, layout)) => {
                return Ok(Kallsyms {
                    bytes,
                    tokens,
                    names,
                    addresses,
                    layout,
                });
            }
            None => {
                failure = KallsymsError::NoAddresses {
                    count: names.count,
                    names: names.start,
                };
            }
        }
    }
    Err(failure)
}

/// Makes the `address_of` of bytes that are contiguous in memory and start at `start`.
pub fn standing_at(start: u64) -> impl Fn(usize) -> Option<u64> {
    move |offset| start.checked_add(u64::try_from(offset).ok()?)
}

impl Kallsyms<'_> {
    /// Returns the number of symbols.
    #[must_use]
    pub fn count(&self) -> usize {
        self.names.count
    }

    /// Returns the order of the tables.
    #[must_use]
    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// Expands all symbols. A name amid the kernel's data is not text, whatever its kind. `end` is
    /// the first address past the image, if known.
    ///
    /// # Errors
    /// If a name is empty or too long.
    pub fn symbols(&self, end: Option<u64>) -> Result<Symbols, KallsymsError> {
        let mut builder = SymbolsBuilder::with_capacity(self.names.count);
        let mut text = Vec::with_capacity(MAX_NAME);
        let names = self.names.iter(self.bytes);
        for (index, (packed, (address, absolute))) in
            names.zip(self.addresses.iter(self.bytes)).enumerate()
        {
            text.clear();
            for token in packed {
                self.tokens.expand(*token, &mut text);
                if text.len() > MAX_NAME {
                    break;
                }
            }
            // The first character is the symbol's kind.
            match text.split_first() {
                Some((kind, name)) if !name.is_empty() && text.len() <= MAX_NAME => {
                    builder.push(name, address, *kind, absolute)?;
                }
                _ => {
                    let length = text.len().saturating_sub(1);
                    return Err(KallsymsError::BadName { index, length });
                }
            }
        }
        builder.untext_data();
        Ok(builder.finish(end))
    }
}

#[cfg(test)]
pub(super) mod tests {
    #![allow(clippy::unwrap_used)]
    use proptest::prelude::*;

    use super::test_tables::{BASE, START, TestSymbol, Variant, kernel_like, write};
    use super::*;

    pub(super) const VARIANTS: [Variant; 6] = [
        variant(Layout::AddressesFirst, false, true),
        variant(Layout::AddressesFirst, true, true),
        variant(Layout::AddressesFirst, true, false),
        variant(Layout::AddressesLast, true, true),
        variant(Layout::AddressesLast, true, false),
        variant(Layout::AddressesFromEntries, true, false),
    ];

    const fn variant(layout: Layout, sequences: bool, absolute_per_cpu: bool) -> Variant {
        Variant {
            layout,
            sequences,
            absolute_per_cpu,
        }
    }

    pub(super) fn find(bytes: &[u8]) -> Result<Kallsyms<'_>, KallsymsError> {
        super::find(bytes, standing_at(START))
    }

    #[test]
    fn every_layout_gives_back_the_symbols_written() {
        for variant in VARIANTS {
            for count in [600, 3000] {
                let written = kernel_like(count, variant.absolute_per_cpu);
                let bytes = write(&written, variant);
                let found = find(&bytes).unwrap();
                assert_eq!(
                    (found.count(), found.layout()),
                    (count, variant.layout),
                    "{variant:?}"
                );
                let symbols = found.symbols(None).unwrap();
                let read: Vec<TestSymbol> = symbols
                    .iter()
                    .map(|s| TestSymbol {
                        address: s.address,
                        kind: s.kind as u8,
                        name: s.name.to_owned(),
                    })
                    .collect();
                assert_eq!(read, written, "{variant:?}");
                let absolute = symbols.iter().filter(|s| s.absolute).count();
                let expected = written.iter().filter(|s| s.address < 1 << 40).count();
                assert_eq!(absolute, expected, "{variant:?}");
            }
        }
    }

    #[test]
    fn names_longer_than_127_tokens_are_read() {
        let mut written = kernel_like(600, false);
        // Characters that only ever occur alone stay one token each.
        written[300].name = "Zq".repeat(90);
        for variant in [VARIANTS[2], VARIANTS[4]] {
            let bytes = write(&written, variant);
            let symbols = find(&bytes).unwrap().symbols(None).unwrap();
            assert_eq!(
                symbols.address_of(&"Zq".repeat(90)),
                Some(written[300].address)
            );
        }
    }

    /// Odd numbers of symbols are tested too, because nothing pads the bytes after the addresses.
    #[test]
    fn addresses_that_count_from_themselves_need_to_know_where_they_stand() {
        let mut remainders = std::collections::BTreeSet::new();
        for count in 600..608 {
            let written = kernel_like(count, false);
            let bytes = write(&written, VARIANTS[5]);
            let nowhere = super::find(&bytes, |_| None).unwrap_err();
            assert!(matches!(nowhere, KallsymsError::NoAddresses { .. }));
            let in_the_lower_half = super::find(&bytes, standing_at(0x100_0000));
            in_the_lower_half.unwrap_err();
            let slide = 0x1e20_0000;
            let running = super::find(&bytes, standing_at(START + slide)).unwrap();
            remainders.insert(running.tokens.end() % 8);
            let symbols = running.symbols(None).unwrap();
            for symbol in &written {
                let found = symbols.address_of(&symbol.name);
                assert_eq!(found, Some(symbol.address + slide), "{}", symbol.name);
            }
        }
        assert_eq!(
            remainders,
            [0, 4].into(),
            "the tables are aligned to 4 bytes"
        );
    }

    #[test]
    fn variables_that_are_called_text_are_data() {
        let mut written = kernel_like(600, false);
        let names = [
            (b'T', "_etext"),
            (b'D', "__start_rodata"),
            (b'T', "init_task"),
            (b't', "modules"),
            (b'W', "weak_variable"),
            (b'w', "weak_local"),
            (b'T', "_sinittext"),
            (b't', "set_up"),
        ];
        for (index, (kind, name)) in names.into_iter().enumerate() {
            let (name, address) = (name.to_owned(), BASE + 0x10_0000 + index as u64 * 0x40);
            written.push(TestSymbol {
                address,
                kind,
                name,
            });
        }
        let kinds = |written: &[TestSymbol]| {
            let bytes = write(written, VARIANTS[5]);
            let symbols = find(&bytes).unwrap().symbols(None).unwrap();
            let last = symbols.iter().skip(600);
            last.map(|s| s.kind).collect::<String>()
        };
        assert_eq!(kinds(&written), "TDDdVvTt");
        // Without a symbol for the end of the text, the kinds stay unchanged.
        written.remove(600);
        assert_eq!(kinds(&written), "DTtWwTt");
    }

    #[test]
    fn an_image_without_tables_says_so() {
        let bytes = vec![0x90; 100_000];
        assert_eq!(
            find(&bytes).unwrap_err(),
            KallsymsError::NoTokens { searched: 100_000 }
        );
    }

    #[test]
    fn tables_without_addresses_are_named() {
        let written = kernel_like(600, true);
        let mut bytes = write(&written, VARIANTS[3]);
        let base = find(&bytes).unwrap().addresses.base_offset();
        bytes[base..base + 8].fill(0);
        let error = find(&bytes).unwrap_err();
        assert!(
            matches!(error, KallsymsError::NoAddresses { count: 600, .. }),
            "{error}"
        );
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(96))]
        /// Decoding ends for any damage, and never with more symbols than the stream can hold.
        #[test]
        fn damage_never_panics(
            variant in prop::sample::select(VARIANTS.to_vec()),
            damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..24),
            cut in any::<prop::sample::Index>(),
            cut_off in any::<bool>(),
        ) {
            let mut bytes = write(&kernel_like(600, variant.absolute_per_cpu), variant);
            for (place, value) in damage {
                let place = place.index(bytes.len());
                bytes[place] = value;
            }
            if cut_off {
                bytes.truncate(cut.index(bytes.len()));
            }
            if let Ok(tables) = find(&bytes) {
                prop_assert!(tables.count() <= bytes.len() / 2);
                if let Ok(symbols) = tables.symbols(None) {
                    prop_assert_eq!(symbols.len(), tables.count());
                }
            }
        }

        #[test]
        fn random_bytes_with_the_digit_pattern_never_panic(
            before in prop::collection::vec(any::<u8>(), 0..2000),
            after in prop::collection::vec(any::<u8>(), 0..2000),
        ) {
            let bytes = [before.as_slice(), tokens::DIGITS, after.as_slice()].concat();
            prop_assert!(find(&bytes).is_err());
        }
    }
}

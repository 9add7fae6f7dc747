//! A kernel's decoded symbols, types and panic finder as one block of bytes, used in place. Loading
//! a block decodes and copies nothing.
//!
//! The caller stores the bytes in a file that it replaces as a whole, and reads or maps them. It
//! names the kernel by a key that changes with its image: a build id, a hash. A block is refused if
//! it is of another kernel or version, cut short, or has lost pages. This does not defend against
//! forged blocks: their content is trusted, but cannot make a reader panic or loop forever.
//!
//! Format, little-endian: a header of 120 bytes, then key, banner, symbols, types and panic finder.
//! The header holds a magic number, the version, a checksum, and the lengths and counts of
//! `to_bytes`.

use super::btf::{self, Btf};
use super::panic::PanicFinder;
use super::shared_bytes::SharedBytes;
use super::symbol_table::TableShape;
use super::symbols::Symbols;
use crate::bytes::{u32_at, u64_at};

const MAGIC: [u8; 8] = *b"\x89exokern";
/// The format version. Raised with every change of this format or of the tables of symbols or
/// types.
const VERSION: u32 = 4;
/// Size of the header in bytes: magic, version, padding, checksum, and 12 numbers.
const HEADER: usize = 24 + 12 * 8;
const CHECKSUM: std::ops::Range<usize> = 16..24;
/// The value for an unknown end of the image.
const NO_END: u64 = 0;

/// The decoded content of a kernel image.
#[derive(Debug)]
pub struct DecodedKernel {
    /// The symbols. Their slide is 0 if they come from a cache.
    pub symbols: Symbols,
    /// The types, if the kernel has them.
    pub btf: Option<Btf>,
    /// The banner, if it was found.
    pub banner: Option<String>,
    /// The finder of its panic, if it is Linux.
    pub panic_finder: Option<PanicFinder>,
}

/// An error in loading a block.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CacheError {
    /// The bytes are not a block.
    #[error("not a cache of kernel symbols: it starts with the bytes {start:02x?}")]
    NotACache {
        /// The first bytes found, at most 8.
        start: Vec<u8>,
    },
    /// The block has another version.
    #[error("the cache has format {found}, this program reads {VERSION}: it must be made again")]
    Version {
        /// The version found.
        found: u32,
    },
    /// The block is damaged.
    #[error(
        "the cache of {length} bytes is damaged ({what}): it was cut short or not written whole"
    )]
    Damaged {
        /// The number of bytes found.
        length: usize,
        /// The damaged part.
        what: &'static str,
    },
    /// The block is of another kernel.
    #[error("the cache is of another kernel: its key is {found:02x?}")]
    OtherKernel {
        /// The key found.
        found: Vec<u8>,
    },
}

impl DecodedKernel {
    /// Writes the block for the kernel with this `key`. The slide of the symbols is not stored.
    #[must_use]
    pub fn to_bytes(&self, key: &[u8]) -> Vec<u8> {
        let banner = self.banner.as_deref().unwrap_or_default();
        let (symbols, shape) = self.symbols.table();
        let (btf, btf_shape) = self.btf.as_ref().map(Btf::table).unwrap_or_default();
        let finder = self.panic_finder.as_ref();
        let finder = finder.map(PanicFinder::to_bytes).unwrap_or_default();
        // Without types, their size is 0. Even empty ones have a string.
        let header = [
            key.len() as u64,
            banner.len() as u64,
            symbols.len() as u64,
            shape.count as u64,
            shape.absolute as u64,
            shape.end.unwrap_or(NO_END),
            btf.len() as u64,
            btf_shape.types as u64,
            btf_shape.strings as u64,
            btf_shape.count as u64,
            btf_shape.named as u64,
            finder.len() as u64,
        ];
        let parts = [key, banner.as_bytes(), symbols, btf, &finder];
        let mut out = Vec::with_capacity(HEADER + parts.iter().map(|p| p.len()).sum::<usize>());
        out.extend(MAGIC);
        out.extend(VERSION.to_le_bytes());
        out.extend([0; 12]);
        out.extend(header.iter().flat_map(|word| word.to_le_bytes()));
        for part in parts {
            out.extend_from_slice(part);
        }
        let sum = checksum(&out).to_le_bytes();
        if let Some(place) = out.get_mut(CHECKSUM) {
            place.copy_from_slice(&sum);
        }
        out
    }

    /// Loads the block of the kernel with this `key`. Keeps and shares the bytes, most of which are
    /// not looked at.
    ///
    /// # Errors
    /// If the bytes are not a valid block, or are of another kernel.
    pub fn from_bytes(key: &[u8], shared: SharedBytes) -> Result<Self, CacheError> {
        let bytes = shared.as_bytes();
        let length = bytes.len();
        let damaged = |what| CacheError::Damaged { length, what };
        if !bytes.starts_with(&MAGIC) {
            let start = bytes.iter().take(MAGIC.len()).copied().collect();
            return Err(CacheError::NotACache { start });
        }
        match u32_at(bytes, MAGIC.len()) {
            Some(VERSION) => {}
            Some(found) => return Err(CacheError::Version { found }),
            None => return Err(damaged("no header")),
        }
        let header = bytes.get(CHECKSUM.end..HEADER);
        let (header, _) = header.ok_or(damaged("no header"))?.as_chunks();
        let mut words = header.iter().map(|word| u64::from_le_bytes(*word));
        let mut number = || usize::try_from(words.next().unwrap_or_default()).unwrap_or(usize::MAX);
        let lengths = [number(), number(), number()];
        let symbols_shape = TableShape {
            count: number(),
            absolute: number(),
            end: Some(number() as u64).filter(|end| *end != NO_END),
        };
        let btf_length = number();
        let btf_shape = btf::Shape {
            types: number(),
            strings: number(),
            count: number(),
            named: number(),
        };
        let finder_length = number();
        let (mut at, mut whole) = (HEADER, true);
        let mut next = |length: usize| {
            let end = at.checked_add(length);
            let part = end.and_then(|end| shared.part(at..end));
            whole &= part.is_some();
            at = end.unwrap_or(usize::MAX);
            part.unwrap_or_else(|| SharedBytes::new([]))
        };
        let [found, banner, symbols] = lengths.map(&mut next);
        let [btf, finder] = [btf_length, finder_length].map(&mut next);
        if !whole || at != length {
            return Err(damaged("its parts are not as long as it is"));
        }
        if u64_at(bytes, CHECKSUM.start) != Some(checksum(bytes)) {
            return Err(damaged("its checksum is wrong"));
        }
        if found.as_bytes() != key {
            let found = found.as_bytes().to_vec();
            return Err(CacheError::OtherKernel { found });
        }
        let symbols = Symbols::from_table(symbols, symbols_shape);
        let btf = match btf_length {
            0 => None,
            _ => {
                let btf = Btf::from_table(btf, btf_shape);
                Some(btf.ok_or(damaged("types of another size than said"))?)
            }
        };
        let panic_finder = match finder_length {
            0 => None,
            _ => {
                let finder = PanicFinder::from_bytes(finder.as_bytes());
                Some(finder.ok_or(damaged("a panic finder of another size than said"))?)
            }
        };
        let banner = String::from_utf8_lossy(banner.as_bytes()).into_owned();
        Ok(Self {
            symbols: symbols.ok_or(damaged("more symbols than bytes"))?,
            btf,
            banner: (!banner.is_empty()).then_some(banner),
            panic_finder,
        })
    }
}

/// Writes the correct checksum into a block, for tests of other damage.
#[cfg(feature = "test-utils")]
pub fn set_checksum(block: &mut [u8]) {
    let sum = checksum(block).to_le_bytes();
    if let Some(place) = block.get_mut(CHECKSUM) {
        place.copy_from_slice(&sum);
    }
}

/// Distance between samples, and size of a sample, in bytes. A file that lost pages has zeroes
/// there.
const STEP: usize = 4096;
const SAMPLE: usize = 64;

/// Computes the checksum of the header, the start of every 4 KiB and the end. A full checksum of
/// several megabytes would take too long. Files lose whole pages, so damage also reaches a sample.
fn checksum(bytes: &[u8]) -> u64 {
    let mix = |sum: u64, word: u64| {
        (sum ^ word)
            .wrapping_mul(0x9e37_79b9_7f4a_7c15)
            .rotate_left(29)
    };
    let sample = |sum: u64, part: &[u8]| {
        let (words, rest) = part.as_chunks::<8>();
        let sum = words
            .iter()
            .fold(sum, |sum, word| mix(sum, u64::from_le_bytes(*word)));
        rest.iter().fold(sum, |sum, byte| mix(sum, (*byte).into()))
    };
    let (header, body) = bytes.split_at_checked(HEADER).unwrap_or((bytes, &[]));
    let mut sum = bytes.len() as u64;
    for part in [header.get(..CHECKSUM.start), header.get(CHECKSUM.end..)] {
        sum = sample(sum, part.unwrap_or_default());
    }
    let ends = body.last_chunk::<SAMPLE>().map_or(body, |end| end);
    sum = sample(sum, ends);
    body.chunks(STEP).fold(sum, |sum, page| {
        sample(sum, page.get(..SAMPLE).unwrap_or(page))
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use proptest::prelude::*;

    use super::*;
    use crate::kernel::btf::test_types::task_types;
    use crate::kernel::test_kernel::all_symbols;
    use crate::test_says::assert_says;

    const KEY: &[u8] = b"build id";
    const BASE: u64 = 0xffff_ffff_8100_0000;

    fn finder() -> PanicFinder {
        let words = [0x2c_d000_u64, 0x180_0000, 2, 0x200_0000, 0x2c0_0000, 5, 9];
        let mut bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        bytes.extend(b"a constant");
        PanicFinder::from_bytes(&bytes).unwrap()
    }

    fn decoded() -> DecodedKernel {
        let names: Vec<_> = (0..400).map(|index| format!("function_{index}")).collect();
        let all = (0..)
            .zip(names.iter().cycle().take(500))
            .map(|(index, name)| {
                let absolute = index < 20;
                let address = if absolute {
                    index * 8
                } else {
                    BASE + index * 64
                };
                (name.as_str(), address, b't', absolute)
            });
        DecodedKernel {
            symbols: all_symbols(all, Some(BASE + 0x1_0000)),
            btf: Some(Btf::parse(&task_types().bytes()).unwrap()),
            banner: Some("Linux version 6.1.0 #1".to_owned()),
            panic_finder: Some(finder()),
        }
    }

    fn load(bytes: &[u8]) -> Result<DecodedKernel, CacheError> {
        DecodedKernel::from_bytes(KEY, SharedBytes::new(bytes.to_vec()))
    }

    #[test]
    fn what_is_kept_answers_as_before() {
        let before = decoded();
        let after = load(&before.to_bytes(KEY)).unwrap();
        assert!(after.symbols.iter().eq(before.symbols.iter()));
        for address in (BASE..BASE + 0x1_0100).step_by(0x21) {
            assert_eq!(
                after.symbols.resolve(address),
                before.symbols.resolve(address)
            );
        }
        let all = |symbols: &Symbols| -> Vec<u64> {
            let found = symbols.all_of("function_3");
            found.map(|symbol| symbol.address).collect()
        };
        assert_eq!(all(&after.symbols), [24, BASE + 403 * 64]);
        assert_eq!(all(&after.symbols), all(&before.symbols));
        let (before_types, after_types) = (before.btf.unwrap(), after.btf.unwrap());
        assert_eq!(after_types.len(), before_types.len());
        for path in ["task_struct.pid", "pcpu_hot.preempt_count", "no.such"] {
            assert_eq!(after_types.member(path), before_types.member(path));
        }
        assert_eq!(after.banner, before.banner);
        let words = format!("{:?}", after.panic_finder);
        assert_eq!(words, format!("{:?}", Some(finder())));
        assert!(words.contains("constant"), "{words}");
    }

    #[test]
    fn a_slide_is_not_kept_and_what_is_missing_stays_missing() {
        let all = decoded();
        let kernel = DecodedKernel {
            symbols: all.symbols.with_slide(0x20_0000),
            btf: None,
            banner: None,
            panic_finder: None,
        };
        let after = load(&kernel.to_bytes(KEY)).unwrap();
        assert!(after.symbols.iter().eq(all.symbols.iter()));
        assert!(after.btf.is_none());
        assert_eq!(after.banner, None);
        assert!(after.panic_finder.is_none());
        let empty = DecodedKernel {
            symbols: all_symbols([], None),
            btf: None,
            banner: None,
            panic_finder: None,
        };
        assert!(load(&empty.to_bytes(KEY)).unwrap().symbols.is_empty());
    }

    #[test]
    fn blocks_of_others_are_refused() {
        let good = decoded().to_bytes(KEY);
        let with = |offset: usize, bytes: &[u8]| {
            let mut block = good.clone();
            block[offset..offset + bytes.len()].copy_from_slice(bytes);
            block
        };
        for (bytes, expected) in [
            (b"\x7fELF...".to_vec(), "starts with the bytes [7f, 45"),
            (Vec::new(), "starts with the bytes []"),
            (good[..10].to_vec(), "(no header)"),
            (good[..100].to_vec(), "(no header)"),
            (with(8, &[9]), "has format 9, this program reads 4"),
            (good[..good.len() - 1].to_vec(), "not as long as it is"),
            ([good.as_slice(), b"x"].concat(), "not as long as it is"),
            (with(24, &[0xff; 8]), "not as long as it is"),
            (with(48, &[0xff; 8]), "checksum is wrong"),
            (with(4096 + HEADER, &[0; 64]), "checksum is wrong"),
            (with(good.len() - 64, &[0; 64]), "checksum is wrong"),
            (
                decoded().to_bytes(b"other"),
                "another kernel: its key is [6f",
            ),
        ] {
            assert_says(load(&bytes).unwrap_err(), expected);
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(256))]
        /// Reading a damaged block ends and never panics.
        #[test]
        fn damage_that_passes_the_checks_never_panics(
            damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..40),
            counts in prop::collection::vec((2usize..11, any::<u64>()), 0..3),
        ) {
            let mut bytes = decoded().to_bytes(KEY);
            for (place, value) in damage {
                let place = HEADER + KEY.len() + place.index(bytes.len() - HEADER - KEY.len());
                bytes[place] = value;
            }
            for (word, value) in counts {
                let at = CHECKSUM.end + 8 * word;
                bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
            }
            let sum = checksum(&bytes).to_le_bytes();
            bytes[CHECKSUM].copy_from_slice(&sum);
            if let Ok(kernel) = load(&bytes) {
                let symbols = kernel.symbols.with_slide(0x20_0000);
                prop_assert!(symbols.iter().count() <= bytes.len());
                for address in (BASE..BASE + 0x1_0000).step_by(0x333) {
                    let _ = symbols.resolve(address);
                }
                prop_assert!(symbols.text_functions().count() <= symbols.len());
                prop_assert!(symbols.all_of("function_3").count() <= symbols.len());
                if let Some(btf) = kernel.btf {
                    for path in ["task_struct.pid", "task_struct.se.vruntime", "pcpu_hot.pad"] {
                        if let Ok(member) = btf.member(path) {
                            prop_assert!(member.type_name.len() <= 16384);
                        }
                    }
                    let _ = btf.func_proto_args("vfs_read");
                }
            }
        }
    }
}

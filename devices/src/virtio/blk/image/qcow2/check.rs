//! The check of a qcow2 image before it is written.
//!
//! Writing allocates clusters by the image's reference counts. With wrong ones a write destroys
//! other data, and the crate that writes may not end. So each cluster that is referenced must lie
//! in the file, be counted, and have one use. Leaked clusters are harmless. The check reads all
//! tables: some 64 KiB for each 512 MiB of data.
//!
//! The layout is in QEMU's `docs/interop/qcow2.txt`. All numbers are big-endian.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// The logarithms of the format's cluster sizes in bytes.
const CLUSTER_BITS: std::ops::RangeInclusive<u32> = 9..=21;
/// The maximum number of entries of the first-level table, and of the table of reference counts.
const MOST_ENTRIES: u64 = 4 << 20;
/// The maximum number of clusters of a file. Each takes two bits.
const MOST_CLUSTERS: u64 = 256 << 20;
/// The bits of an entry that are a place in the file.
const PLACE: u64 = 0x00ff_ffff_ffff_fe00;
/// The bit of a compressed cluster's entry.
const COMPRESSED: u64 = 1 << 62;
/// The unit of a compressed cluster's length in bytes.
const SECTOR: u64 = 512;
/// The size of an entry of a table in bytes.
pub(super) const ENTRY: u64 = 8;

/// The reason that an image is not written.
#[derive(Debug, thiserror::Error)]
pub enum Damage {
    /// The file cannot be read.
    #[error(transparent)]
    Read(#[from] io::Error),
    /// A number of the header is beyond the format's bounds.
    #[error("its {field} is {found}")]
    Header {
        /// The number's meaning.
        field: &'static str,
        /// The number.
        found: u64,
    },
    /// The image has internal snapshots.
    #[error("{0} internal snapshots, beside which images are not written; use an overlay")]
    Snapshots(u32),
    /// A reference leads out of the file, or into the middle of a cluster.
    #[error("its {table} names {place:#x}, which is no cluster of the file")]
    Place {
        /// The table with the reference.
        table: &'static str,
        /// The offset in the file.
        place: u64,
    },
    /// A cluster has two uses.
    #[error("the cluster at {place:#x} is used twice")]
    Twice {
        /// The offset in the file.
        place: u64,
    },
    /// A cluster is used but not counted.
    #[error("the cluster at {place:#x} is used and has reference count 0")]
    NotCounted {
        /// The offset in the file.
        place: u64,
    },
}

/// The numbers of the header.
struct Header {
    cluster_bits: u32,
    l1: (u64, u64),
    /// The table of blocks of reference counts.
    counts: (u64, u64),
    /// The logarithm of the number of bits of a reference count.
    count_order: u32,
}

/// Checks the image in `file`, of `length` bytes.
///
/// # Errors
/// If it is not to be written.
pub fn check(file: &File, length: u64) -> Result<(), Damage> {
    let header = Header::read(file)?;
    let mut clusters = Clusters::new(header.cluster_bits, length)?;
    clusters.claim("header", 0)?;
    let counts = header.table(
        file,
        "table of reference counts",
        header.counts,
        &mut clusters,
    )?;
    for place in counts.iter().map(|entry| entry & PLACE) {
        if place != 0 {
            clusters.claim("table of reference counts", place)?;
        }
    }
    let l1 = header.table(file, "first-level table", header.l1, &mut clusters)?;
    let cluster = 1 << header.cluster_bits;
    for place in l1.iter().map(|entry| entry & PLACE) {
        if place == 0 {
            continue;
        }
        clusters.claim("first-level table", place)?;
        for entry in words(file, place, cluster / ENTRY)? {
            clusters.claim_data(entry)?;
        }
    }
    all_counted(file, &header, &counts, &clusters)
}

/// Returns the logarithm of an image's cluster size in bytes.
///
/// # Errors
/// If the file cannot be read, or the format has no such clusters.
pub(super) fn cluster_bits(file: &File) -> Result<u32, Damage> {
    let found = word(file, 20)?;
    match CLUSTER_BITS.contains(&found) {
        true => Ok(found),
        false => Err(Damage::Header {
            field: "logarithm of the cluster size",
            found: found.into(),
        }),
    }
}

impl Header {
    fn read(file: &File) -> Result<Self, Damage> {
        let field = |field, found: u64, is_valid: bool| match is_valid {
            true => Ok(()),
            false => Err(Damage::Header { field, found }),
        };
        let version = word(file, 4)?;
        field("version", version.into(), matches!(version, 2 | 3))?;
        let cluster_bits = cluster_bits(file)?;
        let l1_entries = u64::from(word(file, 36)?);
        field(
            "size of the first-level table",
            l1_entries,
            l1_entries <= MOST_ENTRIES,
        )?;
        let count_entries = u64::from(word(file, 56)?) << cluster_bits >> 3;
        let is_valid = count_entries <= MOST_ENTRIES;
        field(
            "size of the table of reference counts",
            count_entries,
            is_valid,
        )?;
        let count_order = if version == 2 { 4 } else { word(file, 96)? };
        field(
            "width of reference counts",
            count_order.into(),
            count_order <= 6,
        )?;
        match word(file, 60)? {
            0 => Ok(Self {
                cluster_bits,
                l1: (long(file, 40)?, l1_entries),
                counts: (long(file, 48)?, count_entries),
                count_order,
            }),
            count => Err(Damage::Snapshots(count)),
        }
    }

    /// Claims and reads a table that the header names.
    fn table(
        &self,
        file: &File,
        name: &'static str,
        (place, entries): (u64, u64),
        clusters: &mut Clusters,
    ) -> Result<Vec<u64>, Damage> {
        let size = 1u64 << self.cluster_bits;
        let count = (entries * ENTRY).div_ceil(size);
        for index in 0..count {
            let cluster = place.checked_add(index << self.cluster_bits);
            clusters.claim(name, cluster.ok_or(Damage::Place { table: name, place })?)?;
        }
        Ok(words(file, place, entries)?)
    }
}

/// The clusters of the file that are in use.
struct Clusters {
    bits: u32,
    count: u64,
    used: Bits,
    /// Those of compressed data, which may share one.
    packed: Bits,
}

impl Clusters {
    fn new(bits: u32, length: u64) -> Result<Self, Damage> {
        let count = length.div_ceil(1 << bits);
        if count > MOST_CLUSTERS {
            let field = "number of clusters";
            return Err(Damage::Header {
                field,
                found: count,
            });
        }
        let none = || Bits(vec![0; count.div_ceil(64) as usize]);
        Ok(Self {
            bits,
            count,
            used: none(),
            packed: none(),
        })
    }

    /// Marks the cluster at `place` as used.
    fn claim(&mut self, table: &'static str, place: u64) -> Result<(), Damage> {
        let index = place >> self.bits;
        if index << self.bits != place || index >= self.count {
            return Err(Damage::Place { table, place });
        }
        match self.used.set(index) {
            true => Err(Damage::Twice { place }),
            false => Ok(()),
        }
    }

    /// Marks the clusters that an entry of a second-level table refers to.
    fn claim_data(&mut self, entry: u64) -> Result<(), Damage> {
        let table = "second-level table";
        if entry & COMPRESSED == 0 {
            return match entry & PLACE {
                0 => Ok(()),
                place => self.claim(table, place),
            };
        }
        let split = 62 - (self.bits - 8);
        let place = entry & ((1 << split) - 1);
        let sectors = (entry & (COMPRESSED - 1)) >> split;
        let end = (place / SECTOR + sectors + 1) * SECTOR;
        for index in place >> self.bits..=(end - 1) >> self.bits {
            if index >= self.count {
                return Err(Damage::Place { table, place });
            }
            if self.used.set(index) && !self.packed.get(index) {
                return Err(Damage::Twice { place });
            }
            self.packed.set(index);
        }
        Ok(())
    }
}

/// Checks that each used cluster has a reference count.
fn all_counted(
    file: &File,
    header: &Header,
    counts: &[u64],
    clusters: &Clusters,
) -> Result<(), Damage> {
    let block_bits = header.cluster_bits + 3 - header.count_order;
    let mut block = vec![0; 1 << header.cluster_bits];
    let mut loaded = None;
    for index in (0..clusters.count).filter(|index| clusters.used.get(*index)) {
        let not_counted = || Damage::NotCounted {
            place: index << header.cluster_bits,
        };
        let number = index >> block_bits;
        if loaded != Some(number) {
            let entry = usize::try_from(number).ok().and_then(|at| counts.get(at));
            match entry.map(|entry| entry & PLACE) {
                None | Some(0) => return Err(not_counted()),
                Some(place) => read_or_zero(file, &mut block, place)?,
            }
            loaded = Some(number);
        }
        let within = index & ((1 << block_bits) - 1);
        if !is_counted(&block, within, header.count_order) {
            return Err(not_counted());
        }
    }
    Ok(())
}

/// Returns whether count number `index` of a block is not zero.
fn is_counted(block: &[u8], index: u64, order: u32) -> bool {
    let bit = index << order;
    let first = (bit / 8) as usize;
    if order < 3 {
        // Several in a byte, the first in its lowest bits.
        let mask = ((1u32 << (1 << order)) - 1) << (bit % 8);
        return block
            .get(first)
            .is_some_and(|byte| u32::from(*byte) & mask != 0);
    }
    let bytes = block.get(first..first + (1 << (order - 3)));
    bytes.is_some_and(|bytes| bytes.iter().any(|byte| *byte != 0))
}

/// A set of small numbers.
struct Bits(Vec<u64>);

impl Bits {
    fn get(&self, index: u64) -> bool {
        let word = self.0.get((index / 64) as usize);
        word.is_some_and(|word| word >> (index % 64) & 1 != 0)
    }

    /// Adds a number. Returns whether it was in the set.
    fn set(&mut self, index: u64) -> bool {
        let Some(word) = self.0.get_mut((index / 64) as usize) else {
            return false;
        };
        let bit = 1 << (index % 64);
        let was = *word & bit != 0;
        *word |= bit;
        was
    }
}

fn word(file: &File, place: u64) -> io::Result<u32> {
    let mut bytes = [0; 4];
    file.read_exact_at(&mut bytes, place)?;
    Ok(u32::from_be_bytes(bytes))
}

fn long(file: &File, place: u64) -> io::Result<u64> {
    let mut bytes = [0; 8];
    file.read_exact_at(&mut bytes, place)?;
    Ok(u64::from_be_bytes(bytes))
}

/// Reads `count` entries of a table, which lies in clusters of the file.
fn words(file: &File, place: u64, count: u64) -> io::Result<Vec<u64>> {
    let mut bytes = vec![0; (count * ENTRY) as usize];
    read_or_zero(file, &mut bytes, place)?;
    Ok(bytes
        .as_chunks()
        .0
        .iter()
        .map(|bytes| u64::from_be_bytes(*bytes))
        .collect())
}

/// Fills `bytes` from the file. Bytes after its end are zero.
fn read_or_zero(file: &File, bytes: &mut [u8], place: u64) -> io::Result<()> {
    let mut done = 0;
    while let Some(rest) = bytes.get_mut(done..).filter(|rest| !rest.is_empty()) {
        match file.read_at(rest, place + done as u64) {
            Ok(0) => {
                rest.fill(0);
                return Ok(());
            }
            Ok(length) => done += length,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

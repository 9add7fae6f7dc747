//! Static probes of a program or library: sites that its author has marked. The macros are those of
//! SystemTap's sys/sdt.h, DTrace's `dtrace -G` or this project's own.
//!
//! The caller provides the object's headers. This module finds the sites, their names and file
//! offsets. It also finds the locations of their arguments ([`SiteArgument`]), and the counter by
//! which the program knows whether it is traced. It does not find sites whose notes are not in the
//! guest's memory, since notes are not loaded with a program. [`StaticSites::lost`] reports those.
//!
//! Addresses are link-time addresses. Notes describe the object as it was linked. A later move
//! (prelink) has moved the section `.stapsdt.base` as well, and the sites are corrected by that
//! distance.

mod notes;
mod operand;
mod register;

use std::borrow::Cow;
use std::collections::{BTreeSet, HashMap};

use super::lost::{LostPart, LostReason};
use super::object_file::ObjectFile;
use super::symbol_tables;

use notes::ProbeNote;
pub use notes::{ArgumentTypes, DeclaredName};
pub use operand::{ArgumentError, MAX_ARGUMENTS, SiteArgument, ValueKind};
pub use register::Register;

const NOTES: &str = ".note.stapsdt";
const BASE: &str = ".stapsdt.base";
const OWN_NOTES: &str = ".note.exotrace";
/// The maximum size of either section in bytes. The largest known has some hundred kilobytes.
const MAX_BYTES: u64 = 8 << 20;
/// The maximum number of symbols in arguments that are looked up.
const MAX_SYMBOLS: usize = 4096;

/// The two-byte counter of a probe's listeners in the program's own memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Semaphore {
    /// The link-time address.
    pub address: u64,
    /// The file offset, or `None` if the file does not have it (`.bss`).
    pub offset: Option<u64>,
}

/// One site of a probe.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StaticSite {
    /// The provider, as in the note.
    pub provider: String,
    /// The name, as in the note: with `__` in place of the `-` of scripts.
    pub name: String,
    /// The link-time address of the instruction, usually a NOP.
    pub address: u64,
    /// The file offset of the instruction, or `None` if no segment loads it.
    pub offset: Option<u64>,
    /// The counter. The program skips the site while it is 0.
    pub semaphore: Option<Semaphore>,
    /// The locations of its arguments, at most [`MAX_ARGUMENTS`].
    pub arguments: Vec<SiteArgument>,
    /// The probe's name, if its author has declared it in full.
    pub declared: Option<DeclaredName>,
    /// The types of its arguments, if they are declared.
    pub types: Option<Vec<ArgumentTypes>>,
}

impl StaticSite {
    /// Returns the probe's name as in scripts, with dashes: the declared one, else that of the
    /// note.
    #[must_use]
    pub fn script_name(&self) -> String {
        let declared = self.declared.as_ref();
        declared.map_or_else(|| with_dashes(&self.name), |declared| declared.name.clone())
    }
}

/// The sites of one object.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct StaticSites {
    /// The sites, in the order of their notes.
    pub sites: Vec<StaticSite>,
    /// The parts that could not be read.
    pub lost: Vec<LostPart>,
}

impl StaticSites {
    /// Reads the sites of an object, as far as its notes are available.
    #[must_use]
    pub fn read(object: &ObjectFile<'_>) -> Self {
        let mut found = Self::default();
        // Without section headers it is unknown whether there are notes.
        found.lost.extend_from_slice(object.lost());
        let Some(bytes) = section(object, NOTES, &mut found.lost) else {
            return found;
        };
        let own = section(object, OWN_NOTES, &mut found.lost).unwrap_or_default();
        let (declarations, damaged) = notes::declarations(&own);
        found.count_damaged(object, OWN_NOTES, damaged);

        let mut sites = Vec::new();
        let damaged = notes::sites(&bytes, object.is_64_bit(), |site| sites.push(site));
        found.count_damaged(object, NOTES, damaged);
        let named = sites
            .iter()
            .flat_map(|site| operand::symbols_in(site.arguments));
        let named: BTreeSet<&str> = named.take(MAX_SYMBOLS).collect();
        let addresses = match named.is_empty() {
            true => HashMap::new(),
            false => symbol_tables::addresses(object, &named),
        };
        let address_of = |name: &str| addresses.get(name).copied();
        let base = object.section(BASE).map(|section| section.address);
        let moved = |linked: u64| base.map_or(0, |base| base.wrapping_sub(linked));
        let offset_of = |address| object.file_offset_of(address).map(|(offset, _)| offset);
        let probes = declarations.probes.iter();
        let by_name: HashMap<&DeclaredName, &ProbeNote> =
            probes.clone().map(|probe| (&probe.name, probe)).collect();
        // The manual page of 2013 has the name for scripts only in the definition. A site has it
        // without dashes.
        let by_identifier: HashMap<DeclaredName, &ProbeNote> = probes
            .map(|probe| {
                let name = probe.name.name.replace('-', "_");
                let of = probe.name.clone();
                (DeclaredName { name, ..of }, probe)
            })
            .collect();
        let probe_of = |name: &DeclaredName| by_name.get(name).or_else(|| by_identifier.get(name));
        let mut owners: HashMap<(u64, Cow<'_, str>), &DeclaredName> = HashMap::new();
        for owner in &declarations.sites {
            let address = owner.address.wrapping_add(moved(owner.base));
            let key = (address, owner.name.name.as_str().into());
            owners.entry(key).or_insert(&owner.name);
        }
        for site in sites {
            let moved = moved(site.base);
            let address = site.address.wrapping_add(moved);
            let own = owners.get(&(address, with_dashes(site.name).into()));
            let own = own.copied();
            let probe = own.and_then(probe_of);
            let declared = probe.map(|probe| &probe.name).or(own);
            let semaphore = (site.semaphore != 0).then(|| {
                let address = site.semaphore.wrapping_add(moved);
                let offset = offset_of(address);
                Semaphore { address, offset }
            });
            found.sites.push(StaticSite {
                provider: site.provider.to_owned(),
                name: site.name.to_owned(),
                address,
                offset: offset_of(address),
                semaphore,
                arguments: SiteArgument::parse_all(site.arguments, &address_of),
                declared: declared.cloned(),
                types: probe.map(|probe| probe.arguments.clone()),
            });
        }
        found
    }

    fn count_damaged(&mut self, object: &ObjectFile<'_>, name: &str, damaged: usize) {
        if let Some(section) = object.section(name).filter(|_| damaged > 0) {
            let reason = format!("{damaged} of its notes cannot be read");
            let lost = LostPart::section(section, LostReason::Damaged(reason));
            self.lost.push(lost);
        }
    }
}

/// Converts a note's name to dashes, which `__` represents (SDT(9), dtrace(1)).
fn with_dashes(name: &str) -> String {
    name.replace("__", "-")
}

/// Reads the contents of a section, if there is one.
fn section(object: &ObjectFile<'_>, name: &str, lost: &mut Vec<LostPart>) -> Option<Vec<u8>> {
    let section = object.section(name)?;
    let bytes = object.section_bytes(section, MAX_BYTES);
    bytes.map_err(|reason| lost.push(reason)).ok()
}

#[cfg(test)]
mod tests;

//! The entries that the boot loaders of an image would show, and which of them is the default.
//!
//! The sources are asked in this order: entries of the Boot Loader Specification and unified
//! kernels, GRUB's configuration, kernels by their names. The default is the one of the first
//! source that has an entry whose files are there.

mod bls;
mod files;
mod uki;

use std::fmt;

use crate::grub::{self, Outcome, Variables};
use crate::place::{MOST_ENTRIES, Place};
use crate::volume::Volume;
pub(crate) use uki::{Part, section};

/// The kind of description of an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    /// A file of the Boot Loader Specification, type 1.
    BootLoaderSpec,
    /// A unified kernel image: the specification's type 2.
    UnifiedKernel,
    /// GRUB's configuration.
    Grub,
    /// Nothing but the names of kernels.
    Files,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::BootLoaderSpec => "boot loader entry",
            Self::UnifiedKernel => "unified kernel image",
            Self::Grub => "entry of GRUB",
            Self::Files => "kernel by its name",
        })
    }
}

/// Something that can be booted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// The kind of its description.
    pub origin: Origin,
    /// The title of the menu.
    pub title: String,
    /// The name by which defaults are kept.
    pub id: String,
    /// The file that describes it.
    pub source: Place,
    /// The kernel, or the unified image.
    pub kernel: Place,
    /// The parts of the initramfs, in order.
    pub initrds: Vec<Place>,
    /// The kernel's command line.
    pub options: String,
    /// It is the one that is booted.
    pub is_default: bool,
    /// The reason why it cannot be booted.
    pub trouble: Option<String>,
}

/// The entries of an image.
#[derive(Debug, Default)]
pub(crate) struct Entries {
    pub found: Vec<Entry>,
    /// The faults in descriptions of entries, a line each.
    pub troubles: Vec<String>,
}

/// One source's entries, and the index of its default.
#[derive(Debug, Default)]
struct Group {
    entries: Vec<Entry>,
    default: usize,
}

/// Finds the entries of all sources.
pub(crate) fn find(volumes: &[Volume]) -> Entries {
    let mut troubles = Vec::new();
    let grub = grub_outcome(volumes, &mut troubles);
    let variables = match &grub {
        Some(outcome) => Some(outcome.variables.clone()),
        None => environment(volumes),
    };
    let mut entries = Entries {
        found: Vec::new(),
        troubles,
    };
    entries.add(volumes, bls::find(volumes, variables.as_ref()));
    if let Some(outcome) = grub {
        entries.add(volumes, grub_group(outcome));
    }
    // Names of kernels are no entries of a menu: they serve where no entry boots.
    if !entries.has_default() {
        entries.add(volumes, files::find(volumes));
    }
    entries
}

impl Entries {
    fn has_default(&self) -> bool {
        self.found.iter().any(|entry| entry.is_default)
    }

    /// Adds a source's entries. Its default, or the first that can be booted, becomes the default
    /// if there is none yet.
    fn add(&mut self, volumes: &[Volume], group: Group) {
        let room = MOST_ENTRIES.saturating_sub(self.found.len());
        let mut added: Vec<Entry> = group.entries.into_iter().take(room).collect();
        for entry in &mut added {
            entry.trouble = trouble(volumes, entry);
        }
        let boots = |entry: &Entry| entry.trouble.is_none();
        let preferred = Some(group.default).filter(|at| added.get(*at).is_some_and(boots));
        let default = preferred.or_else(|| added.iter().position(boots));
        if let Some(entry) = default.and_then(|at| added.get_mut(at)) {
            entry.is_default = !self.has_default();
        }
        self.found.append(&mut added);
    }
}

/// Returns the reason why an entry cannot be booted: a file that is not there.
fn trouble(volumes: &[Volume], entry: &Entry) -> Option<String> {
    let places = [&entry.kernel].into_iter().chain(&entry.initrds);
    places.into_iter().find_map(|place| {
        let Some(volume) = place.volume.and_then(|index| volumes.get(index)) else {
            return Some(format!("{} is not on this disk", place.path));
        };
        match &volume.fs {
            Some(fs) => fs
                .open(&place.path)
                .err()
                .map(|error| format!("{} on {}: {error}", place.path, volume.name())),
            None => Some(format!(
                "{} is on {}, whose {} is not read",
                place.path,
                volume.name(),
                volume.kind
            )),
        }
    })
}

/// The places of GRUB's configuration within a volume.
const CONFIGURATIONS: [&str; 4] = [
    "/boot/grub/grub.cfg",
    "/boot/grub2/grub.cfg",
    "/grub/grub.cfg",
    "/grub2/grub.cfg",
];
/// The most folders of boot loaders that are read.
const MOST_LOADERS: usize = 16;

/// Executes the first configuration of GRUB that has a menu: those that its EFI program reads
/// first.
fn grub_outcome(volumes: &[Volume], troubles: &mut Vec<String>) -> Option<Outcome> {
    let mut places = Vec::new();
    for (index, volume) in volumes.iter().enumerate() {
        let mut loaders = volume.folders("/EFI");
        // The fallback loader is the last one that a firmware takes.
        loaders.sort_by_key(|name| (name.eq_ignore_ascii_case("boot"), name.clone()));
        let paths = loaders
            .iter()
            .take(MOST_LOADERS)
            .map(|name| format!("/EFI/{name}/grub.cfg"));
        places.extend(paths.map(|path| Place::new(index, &path)));
    }
    for index in 0..volumes.len() {
        places.extend(CONFIGURATIONS.map(|path| Place::new(index, path)));
    }
    for place in places {
        let Some((index, volume)) = place
            .volume
            .and_then(|index| Some((index, volumes.get(index)?)))
        else {
            continue;
        };
        if !volume.has_file(&place.path) {
            continue;
        }
        let outcome = grub::run(volumes, index, &place.path);
        if let Some(trouble) = &outcome.trouble {
            let name = volume.name();
            troubles.push(format!("{} on {name}: {trouble}", place.path));
        }
        if !outcome.entries.is_empty() || outcome.uses_bls {
            return Some(outcome);
        }
    }
    None
}

fn grub_group(outcome: Outcome) -> Group {
    let source = outcome.place;
    let entries = outcome.entries.into_iter().map(|entry| Entry {
        origin: Origin::Grub,
        title: entry.title,
        id: entry.id,
        source: source.clone(),
        kernel: entry.kernel,
        initrds: entry.initrds,
        options: entry.options,
        is_default: false,
        trouble: None,
    });
    Group {
        entries: entries.collect(),
        default: outcome.default.unwrap_or_default(),
    }
}

/// Returns GRUB's environment block, of a disk without its configuration.
fn environment(volumes: &[Volume]) -> Option<Variables> {
    let paths = CONFIGURATIONS.map(|path| path.replace("grub.cfg", "grubenv"));
    let mut texts = volumes
        .iter()
        .flat_map(|volume| paths.iter().map(|path| volume.text(path)));
    texts
        .find_map(|text| text)
        .map(|text| grub::environment(&text))
}

#[cfg(test)]
mod tests;

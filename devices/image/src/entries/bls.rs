//! Entries of the Boot Loader Specification (UAPI.1): files, and unified kernel images.

use std::cmp::Ordering;

use super::{Entry, Group, Origin, uki};
use crate::grub::Variables;
use crate::place::{MOST_ENTRIES, Place};
use crate::version::compare;
use crate::volume::Volume;

/// The most bytes of a file: a kernel's command line has 2 KiB.
const MOST_BYTES: u64 = 64 << 10;
/// The most lines of options, and the most parts of an initramfs.
const MOST_LINES: usize = 64;
/// The most bytes of a line with its variables' values.
const MOST_LINE: usize = 32 << 10;

/// The keys of a file of the specification.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
struct Description {
    title: String,
    version: String,
    machine_id: String,
    sort_key: String,
    linux: String,
    initrds: Vec<String>,
    options: Vec<String>,
    architecture: String,
}

/// An entry with what it is sorted by.
struct Sorted {
    entry: Entry,
    sort_key: String,
    machine_id: String,
    version: String,
    /// All its attempts to boot have failed.
    is_bad: bool,
}

/// Finds the entries of all volumes, and their default.
pub(super) fn find(volumes: &[Volume], variables: Option<&Variables>) -> Group {
    let mut found = Vec::new();
    let mut wanted = None;
    for (index, volume) in volumes.iter().enumerate() {
        for root in ["", "/boot"] {
            let folder = format!("{root}/loader/entries");
            for name in volume.files(&folder) {
                if found.len() < MOST_ENTRIES {
                    let path = format!("{folder}/{name}");
                    found.extend(described(volume, index, root, &path, &name, variables));
                }
            }
            wanted = wanted.or_else(|| configured(volume, &format!("{root}/loader/loader.conf")));
        }
        for name in volume.files("/EFI/Linux") {
            if found.len() < MOST_ENTRIES {
                found.extend(unified(volume, index, &name));
            }
        }
    }
    found.sort_by(order);
    let saved = variables.and_then(saved);
    let default =
        [wanted, saved]
            .into_iter()
            .flatten()
            .find_map(|wanted| match wanted.parse::<usize>() {
                Ok(number) => Some(number).filter(|number| *number < found.len()),
                Err(_) => found.iter().position(|sorted| {
                    let entry = &sorted.entry;
                    matches(&wanted, &entry.id)
                        || matches(&wanted, base_name(&entry.source.path))
                        || wanted == entry.title
                }),
            });
    Group {
        entries: found.into_iter().map(|sorted| sorted.entry).collect(),
        default: default.unwrap_or_default(),
    }
}

/// Returns the default that GRUB's script or its environment names.
fn saved(variables: &Variables) -> Option<String> {
    let names = ["default", "saved_entry"].into_iter();
    let mut values = names.filter_map(|name| variables.get(name));
    values.find(|value| !value.is_empty()).cloned()
}

/// Returns the default that systemd-boot's configuration names.
fn configured(volume: &Volume, path: &str) -> Option<String> {
    let text = volume.text(path)?;
    let mut lines = text.lines().filter_map(key_and_value);
    let value = lines.find(|(key, _)| *key == "default")?.1;
    // Names with an @ refer to variables of the firmware.
    (!value.starts_with('@')).then(|| value.to_owned())
}

/// Returns the order of a menu: bad ones last, then by key, machine and version, newest first.
fn order(a: &Sorted, b: &Sorted) -> Ordering {
    let with_key = |sorted: &Sorted| sorted.sort_key.is_empty();
    let by_key = || match a.sort_key.is_empty() || b.sort_key.is_empty() {
        true => Ordering::Equal,
        false => a
            .sort_key
            .cmp(&b.sort_key)
            .then_with(|| a.machine_id.cmp(&b.machine_id))
            .then_with(|| compare(&b.version, &a.version)),
    };
    a.is_bad
        .cmp(&b.is_bad)
        .then_with(|| with_key(a).cmp(&with_key(b)))
        .then_with(by_key)
        .then_with(|| compare(&b.entry.id, &a.entry.id))
}

fn described(
    volume: &Volume,
    index: usize,
    root: &str,
    path: &str,
    name: &str,
    variables: Option<&Variables>,
) -> Option<Sorted> {
    let name = name.strip_suffix(".conf")?;
    let text = volume.fs.as_ref()?.text(path, MOST_BYTES).ok()?;
    let description = parse(&text);
    let is_ours = matches!(
        description.architecture.to_lowercase().as_str(),
        "" | "x64" | "x86-64" | "x86_64"
    );
    (is_ours && !description.linux.is_empty()).then_some(())?;
    let (id, is_bad) = counted(name);
    let expand = |text: &str| expanded(text, variables);
    let place = |path: &str| {
        // Paths begin at the root of the volume, or of /boot.
        let below = format!("{root}{path}");
        match volume.has_file(path) || !volume.has_file(&below) {
            true => Place::new(index, path),
            false => Place::new(index, &below),
        }
    };
    let initrds = description.initrds.iter().map(|line| expand(line));
    let initrds: Vec<Place> = initrds
        .take(MOST_LINES)
        .flat_map(|line| {
            let places = line.split_whitespace().take(MOST_LINES).map(place);
            places.collect::<Vec<_>>()
        })
        .take(MOST_LINES)
        .collect();
    let lines = description.options.iter().take(MOST_LINES);
    let options = lines.map(|line| expand(line));
    let options = options.collect::<Vec<_>>().join(" ");
    let title = [&description.title, &description.version, name]
        .into_iter()
        .find(|title| !title.is_empty());
    Some(Sorted {
        entry: Entry {
            origin: Origin::BootLoaderSpec,
            title: title.unwrap_or_default().to_owned(),
            id: id.to_owned(),
            source: Place::new(index, path),
            kernel: place(&expand(&description.linux)),
            initrds,
            options: options.split_whitespace().collect::<Vec<_>>().join(" "),
            is_default: false,
            trouble: None,
        },
        sort_key: description.sort_key,
        machine_id: description.machine_id,
        version: description.version,
        is_bad,
    })
}

fn unified(volume: &Volume, index: usize, name: &str) -> Option<Sorted> {
    let end = name.len().checked_sub(4)?;
    let is_program = name.get(end..)?.eq_ignore_ascii_case(".efi");
    is_program.then_some(())?;
    let path = format!("/EFI/Linux/{name}");
    let image = uki::describe(volume, &path)?;
    let (id, is_bad) = counted(name.get(..end)?);
    Some(Sorted {
        entry: Entry {
            origin: Origin::UnifiedKernel,
            title: image.title.unwrap_or_else(|| id.to_owned()),
            id: id.to_owned(),
            source: Place::new(index, &path),
            kernel: Place::new(index, &path),
            initrds: Vec::new(),
            options: image.options,
            is_default: false,
            trouble: None,
        },
        sort_key: image.sort_key,
        machine_id: String::new(),
        version: image.version,
        is_bad,
    })
}

/// Splits the counter of attempts off a name: `NAME+LEFT-DONE`. Returns whether none are left.
fn counted(name: &str) -> (&str, bool) {
    let Some((id, counter)) = name.rsplit_once('+') else {
        return (name, false);
    };
    let (left, done) = counter.split_once('-').unwrap_or((counter, "0"));
    match (left.parse::<u32>(), done.parse::<u32>()) {
        (Ok(left), Ok(_)) => (id, left == 0),
        _ => (name, false),
    }
}

fn parse(text: &str) -> Description {
    let mut found = Description::default();
    for (key, value) in text.lines().filter_map(key_and_value) {
        let one = match key {
            "title" => &mut found.title,
            "version" => &mut found.version,
            "machine-id" => &mut found.machine_id,
            "sort-key" => &mut found.sort_key,
            "linux" => &mut found.linux,
            "architecture" => &mut found.architecture,
            "initrd" => {
                found.initrds.push(value.to_owned());
                continue;
            }
            "options" => {
                found.options.push(value.to_owned());
                continue;
            }
            _ => continue,
        };
        value.clone_into(one);
    }
    found
}

fn key_and_value(line: &str) -> Option<(&str, &str)> {
    let line = line.trim();
    let (key, value) = line.split_once(char::is_whitespace)?;
    (!line.starts_with('#')).then(|| (key, value.trim()))
}

/// Gives variables their values, if GRUB reads the file: to it, those it does not know are empty.
fn expanded(text: &str, variables: Option<&Variables>) -> String {
    let Some(variables) = variables else {
        return text.to_owned();
    };
    let mut out = String::with_capacity(text.len());
    let mut parts = text.split('$');
    out.push_str(parts.next().unwrap_or_default());
    for part in parts.take(64) {
        let (name, rest) = match part.strip_prefix('{').and_then(|part| part.split_once('}')) {
            Some(found) => found,
            None => {
                let end = part.find(|c: char| !(c.is_ascii_alphanumeric() || c == '_'));
                part.split_at_checked(end.unwrap_or(part.len()))
                    .unwrap_or_default()
            }
        };
        let value = variables.get(name).map_or("", String::as_str);
        if out.len().saturating_add(value.len()) <= MOST_LINE {
            out.push_str(value);
        }
        out.push_str(rest);
    }
    out
}

fn base_name(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or_default()
}

/// Returns whether a name matches a pattern with `*` and `?`.
fn matches(pattern: &str, name: &str) -> bool {
    let (pattern, name): (Vec<char>, Vec<char>) =
        (pattern.chars().collect(), name.chars().collect());
    let (mut p, mut n) = (0, 0);
    // The last star, and the part of the name that it stands for.
    let mut star: Option<(usize, usize)> = None;
    while let Some(c) = name.get(n) {
        match pattern.get(p) {
            Some('*') => {
                star = Some((p, n));
                p += 1;
            }
            Some(x) if x == c || *x == '?' => (p, n) = (p + 1, n + 1),
            _ => match &mut star {
                Some((at, from)) => {
                    *from += 1;
                    (p, n) = (*at + 1, *from);
                }
                None => return false,
            },
        }
    }
    pattern.iter().skip(p).all(|c| *c == '*')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_match_as_in_a_shell() {
        for (pattern, name, wanted) in [
            ("arch*", "arch-linux", true),
            ("*-lts", "arch-linux", false),
            ("*a*b*", "xaxxbx", true),
            ("?", "", false),
            ("", "", true),
            ("debian-6.?.0", "debian-6.1.0", true),
        ] {
            assert_eq!(matches(pattern, name), wanted, "{pattern} {name}");
        }
    }

    #[test]
    fn counters_of_attempts_are_no_part_of_a_name() {
        for (name, wanted) in [
            ("linux-6.1", ("linux-6.1", false)),
            ("linux-6.1+3", ("linux-6.1", false)),
            ("linux-6.1+0-3", ("linux-6.1", true)),
            ("6.1.0+deb13", ("6.1.0+deb13", false)),
        ] {
            assert_eq!(counted(name), wanted);
        }
    }
}

//! Devices and paths as GRUB names them, and what is on them.

use super::Machine;
use crate::disk::ReadAt as _;
use crate::grub::expression::Files;
use crate::place::Place;
use crate::volume::{MOST_TEXT, Volume};

impl<'a> Machine<'a> {
    /// Looks for a volume by its UUID, label or a file of it, and sets a variable to its device.
    pub(super) fn search(&mut self, command: &str, arguments: &[String]) -> bool {
        let mut by = command.strip_prefix("search.").unwrap_or("fs_uuid");
        let mut variable = "root";
        let mut names: Vec<&str> = Vec::new();
        let mut words = arguments.iter();
        while let Some(word) = words.next() {
            match word.as_str() {
                "--fs-uuid" | "-u" => by = "fs_uuid",
                "--file" | "-f" => by = "file",
                "--label" | "--fs-label" | "-l" => by = "fs_label",
                "--hint" | "-h" => drop(words.next()),
                "-s" => variable = words.next().map_or(variable, String::as_str),
                word if word.starts_with('-') => {
                    variable = word.strip_prefix("--set=").unwrap_or(variable);
                }
                word => names.push(word),
            }
        }
        let Some(wanted) = names.first().copied() else {
            return false;
        };
        if command != "search" {
            variable = names.get(1).copied().unwrap_or(variable);
        }
        let found = self.volumes.iter().position(|volume| match by {
            "file" => volume.has_file(wanted),
            "fs_label" => volume.label.as_deref() == Some(wanted),
            _ => volume
                .uuid
                .as_deref()
                .is_some_and(|uuid| uuid.eq_ignore_ascii_case(wanted)),
        });
        let Some(index) = found else {
            return false;
        };
        let variable = variable.to_owned();
        self.set(&variable, &device(self.volumes, index))
    }

    /// Returns the place that a path means: on the device that it names, or on the root.
    pub(super) fn place_of(&self, path: &str) -> Place {
        let named = path.strip_prefix('(').and_then(|rest| rest.split_once(')'));
        let root = self.variables.get("root").map_or("", String::as_str);
        let (device, rest) = named.unwrap_or((root, path));
        let device = device.trim_start_matches('(').trim_end_matches(')');
        let number = partition(device);
        let index = self
            .volumes
            .iter()
            .position(|volume| number.is_some_and(|number| volume.number() == number));
        match index {
            Some(index) => Place::new(index, rest),
            None => Place {
                volume: None,
                path: path.to_owned(),
            },
        }
    }

    pub(super) fn volume(&self, place: &Place) -> Option<&'a Volume> {
        self.volumes.get(place.volume?)
    }
}

/// Returns GRUB's name for a volume.
pub(super) fn device(volumes: &[Volume], index: usize) -> String {
    match volumes.get(index).and_then(Volume::number) {
        Some(number) => format!("hd0,gpt{number}"),
        None => "hd0".to_owned(),
    }
}

/// Returns the partition that a device's name means: `hd0,gpt2`, `hd0,msdos1`, `hd1,2`; no number
/// for a whole disk; `None` for volumes of LVM and the like.
fn partition(device: &str) -> Option<Option<u32>> {
    let (disk, part) = match device.split_once(',') {
        Some((disk, part)) => (disk, Some(part)),
        None => (device, None),
    };
    disk.starts_with("hd").then_some(())?;
    let Some(part) = part else {
        return Some(None);
    };
    let digits = part.trim_start_matches(|c: char| c.is_ascii_alphabetic());
    digits.parse().ok().map(Some)
}

impl Files for Machine<'_> {
    fn size(&self, path: &str) -> Option<u64> {
        let place = self.place_of(path);
        let file = self.volume(&place)?.fs.as_ref()?.open(&place.path).ok()?;
        Some(file.length().min(MOST_TEXT))
    }

    fn has_folder(&self, path: &str) -> bool {
        let place = self.place_of(path);
        self.volume(&place)
            .and_then(|volume| volume.fs.as_ref())
            .is_some_and(|fs| fs.has_folder(&place.path))
    }
}

//! GRUB's configuration, as far as it decides what is booted.
//!
//! A script is parsed ([`parse`]) and executed ([`machine`]) with a budget of commands. Its menu is
//! then walked for the entry that `default` names ([`menu`]). What draws, plays or writes has no
//! effect. A test that cannot be answered (a key, a clock) is false.

mod expression;
mod machine;
mod menu;
mod parse;

use std::collections::BTreeMap;

use crate::place::Place;
use crate::volume::Volume;

/// Variables of a script.
pub(crate) type Variables = BTreeMap<String, String>;

/// An entry of a menu that boots Linux.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct MenuEntry {
    pub title: String,
    pub id: String,
    pub kernel: Place,
    pub initrds: Vec<Place>,
    pub options: String,
}

/// The result of a configuration.
#[derive(Debug)]
pub(crate) struct Outcome {
    /// The entries, those of submenus included.
    pub entries: Vec<MenuEntry>,
    /// The index of the default one.
    pub default: Option<usize>,
    /// The file that made the menu, and the index of its volume.
    pub place: Place,
    pub variables: Variables,
    /// It shows the entries of the Boot Loader Specification.
    pub uses_bls: bool,
    /// The reason for an early end of the script.
    pub trouble: Option<String>,
}

/// Executes a configuration of a volume.
pub(crate) fn run(volumes: &[Volume], volume: usize, path: &str) -> Outcome {
    let mut machine = machine::Machine::new(volumes, volume, path);
    machine.run_file(Place::new(volume, path));
    menu::outcome(machine)
}

/// Reads an environment block: lines `name=value`, with backslashes before special characters.
pub(crate) fn environment(text: &str) -> Variables {
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    let pairs = lines.filter_map(|line| line.split_once('='));
    pairs
        .take(machine::MOST_VARIABLES)
        .map(|(name, value)| (name.to_owned(), unescaped(value)))
        .collect()
}

fn unescaped(value: &str) -> String {
    let mut out = String::with_capacity(value.len());
    let mut characters = value.chars();
    while let Some(c) = characters.next() {
        match c {
            '\\' => out.extend(characters.next()),
            c => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests;

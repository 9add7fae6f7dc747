//! GRUB's own commands, as far as they decide what is booted.

use std::rc::Rc;

use super::{Item, Loaded, MOST_VARIABLES, MOST_WORD, Machine};
use crate::grub::parse::Script;
use crate::grub::{environment, expression};
use crate::place::MOST_ENTRIES;

impl Machine<'_> {
    /// Executes one of GRUB's own commands.
    pub(super) fn named(&mut self, words: &[String]) -> bool {
        let Some((name, arguments)) = words.split_first() else {
            return false;
        };
        match name.as_str() {
            "[" => {
                let inner = match arguments.split_last() {
                    Some((end, inner)) if end == "]" => inner,
                    _ => arguments,
                };
                expression::is_true(inner, self)
            }
            "test" => expression::is_true(arguments, self),
            "false" | "keystatus" | "loadfont" | "cmostest" => false,
            "set" => {
                for (name, value) in arguments.iter().filter_map(|word| word.split_once('=')) {
                    self.set(name, value);
                }
                true
            }
            "unset" => {
                for name in arguments {
                    self.variables.remove(name);
                }
                true
            }
            "load_env" => self.load_environment(arguments),
            "search" | "search.fs_uuid" | "search.file" | "search.fs_label" => {
                self.search(name, arguments)
            }
            "configfile" | "source" | "." | "normal" => {
                let place = arguments.last().map(|path| self.place_of(path));
                place.is_some_and(|place| self.run_file(place))
            }
            "blscfg" => {
                self.uses_bls = true;
                true
            }
            "linux" | "linux16" | "linuxefi" => self.load_kernel(arguments),
            "initrd" | "initrd16" | "initrdefi" => {
                // A word with a prefix names a file to be put into the archive, not an archive.
                let files = arguments.iter().filter(|word| !word.starts_with("newc:"));
                let places = files.map(|path| self.place_of(path)).collect::<Vec<_>>();
                self.loaded.initrds.extend(places);
                self.loaded.initrds.truncate(MOST_VARIABLES);
                true
            }
            _ => match name.split_once('=') {
                Some((name, value)) => self.set(name, value),
                None => true,
            },
        }
    }

    fn load_kernel(&mut self, arguments: &[String]) -> bool {
        let Some((path, options)) = arguments.split_first() else {
            return false;
        };
        self.loaded = Loaded {
            kernel: Some(self.place_of(path)),
            initrds: Vec::new(),
            options: quoted(options),
        };
        true
    }

    pub(super) fn add_item(&mut self, arguments: &[String], body: &Script, is_menu: bool) -> bool {
        if self.menu.len() >= MOST_ENTRIES {
            return self.stop("its menu is too long");
        }
        let (mut title, mut id) = (None, None);
        let mut words = arguments.iter();
        while let Some(word) = words.next() {
            match word.as_str() {
                "--id" => id = words.next(),
                "--class" | "--users" | "--hotkey" | "--source" => drop(words.next()),
                word if word.starts_with("--") => {}
                _ => title = title.or(Some(word)),
            }
        }
        let given = arguments.iter().find_map(|word| word.strip_prefix("--id="));
        let title = title.cloned().unwrap_or_default();
        let id = id.map(String::as_str).or(given);
        self.menu.push(Item {
            id: id.unwrap_or(&title).to_owned(),
            title,
            body: Rc::clone(body),
            is_menu,
        });
        self.menu_file = Some(self.file.clone());
        true
    }

    fn load_environment(&mut self, arguments: &[String]) -> bool {
        let mut file = None;
        let mut wanted: Vec<&str> = Vec::new();
        let mut words = arguments.iter();
        while let Some(word) = words.next() {
            match word.as_str() {
                "-f" | "--file" => file = words.next().cloned(),
                word if word.starts_with('-') => {
                    file = word.strip_prefix("--file=").map(str::to_owned).or(file);
                }
                word => wanted.push(word),
            }
        }
        let file = file.unwrap_or_else(|| "${prefix}/grubenv".to_owned());
        let prefix = self.variables.get("prefix").cloned().unwrap_or_default();
        let place = self.place_of(&file.replace("${prefix}", &prefix));
        let Some(text) = self
            .volume(&place)
            .and_then(|volume| volume.text(&place.path))
        else {
            return false;
        };
        for (name, value) in environment(&text) {
            if wanted.is_empty() || wanted.contains(&name.as_str()) {
                self.set(&name, &clipped(value));
            }
        }
        true
    }
}

/// Joins the words of a command line as GRUB does: one with blanks gets quotes.
fn quoted(words: &[String]) -> String {
    let words = words.iter().map(|word| {
        let escaped = ['\\', '"', '\'']
            .iter()
            .fold(word.clone(), |word, c| word.replace(*c, &format!("\\{c}")));
        match word.contains(' ') {
            true => format!("\"{escaped}\""),
            false => escaped,
        }
    });
    words.collect::<Vec<_>>().join(" ")
}

fn clipped(mut value: String) -> String {
    if value.len() > MOST_WORD {
        value.clear();
    }
    value
}

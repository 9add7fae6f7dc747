//! The execution of GRUB's scripts.
//!
//! All work has a limit: commands, nesting, the length of a word, variables, entries and files.

mod commands;
mod devices;

use std::collections::BTreeMap;
use std::rc::Rc;

use super::Variables;
use super::parse::{self, Command, Piece, Script, Word};
use crate::place::Place;
use crate::volume::Volume;
use devices::device;

/// The most variables.
pub(super) const MOST_VARIABLES: usize = 512;
/// The most commands of a configuration, those of its entries included.
const MOST_STEPS: u32 = 50_000;
/// The deepest nesting of calls and blocks.
const MOST_DEPTH: u32 = 64;
/// The most bytes of the words of a command.
const MOST_WORD: usize = 32 << 10;
/// The most bytes of all variables.
const MOST_HELD: usize = 1 << 20;
/// This many words of a command count as one more command.
const WORDS_A_STEP: usize = 16;
/// The most files that a configuration names.
const MOST_FILES: u32 = 16;
/// The deepest submenu.
const MOST_MENUS: usize = 4;

/// The state of GRUB that scripts can read.
const FEATURES: [(&str, &str); 11] = [
    ("feature_menuentry_id", "y"),
    ("feature_menuentry_options", "y"),
    ("feature_platform_search_hint", "y"),
    ("feature_default_font_path", "y"),
    ("feature_all_video_module", "y"),
    ("feature_timeout_style", "y"),
    ("feature_chainloader_bpb", "y"),
    ("feature_200_final", "y"),
    ("feature_nativedisk_cmd", "y"),
    ("grub_platform", "efi"),
    ("grub_cpu", "x86_64"),
];

/// The items of a menu.
#[derive(Debug, Clone)]
pub(super) struct Item {
    pub title: String,
    pub id: String,
    pub body: Script,
    pub is_menu: bool,
}

/// The arguments of the commands `linux` and `initrd` of an entry.
#[derive(Debug, Clone, Default)]
pub(super) struct Loaded {
    pub kernel: Option<Place>,
    pub initrds: Vec<Place>,
    pub options: String,
}

/// The state of a script.
pub(super) struct Machine<'a> {
    volumes: &'a [Volume],
    functions: BTreeMap<String, Script>,
    steps: u32,
    depth: u32,
    files: u32,
    pub variables: Variables,
    pub menu: Vec<Item>,
    pub loaded: Loaded,
    pub uses_bls: bool,
    /// The file that is executed, and the last one that added to the menu.
    file: Place,
    pub menu_file: Option<Place>,
    pub trouble: Option<String>,
}

impl<'a> Machine<'a> {
    /// Returns a machine whose root is a volume, and whose files are beside `path`.
    pub(super) fn new(volumes: &'a [Volume], volume: usize, path: &str) -> Self {
        let device = device(volumes, volume);
        let folder = path.rsplit_once('/').map_or("", |(folder, _)| folder);
        let mut variables: Variables = FEATURES
            .iter()
            .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
            .collect();
        variables.insert("root".to_owned(), device.clone());
        for name in ["prefix", "config_directory"] {
            variables.insert(name.to_owned(), format!("({device}){folder}"));
        }
        Self {
            volumes,
            functions: BTreeMap::new(),
            steps: MOST_STEPS,
            depth: 0,
            files: 0,
            variables,
            menu: Vec::new(),
            loaded: Loaded::default(),
            uses_bls: false,
            file: Place::new(volume, path),
            menu_file: None,
            trouble: None,
        }
    }

    /// Returns the file of the menu, or the first one.
    pub(super) fn place(&self) -> Place {
        self.menu_file.clone().unwrap_or_else(|| self.file.clone())
    }

    /// Executes a file. Returns whether it could be read.
    pub(super) fn run_file(&mut self, place: Place) -> bool {
        self.files += 1;
        if self.files > MOST_FILES {
            return self.stop("it names too many files");
        }
        let volume = place.volume.and_then(|index| self.volumes.get(index));
        let Some(text) = volume.and_then(|volume| volume.text(&place.path)) else {
            return false;
        };
        match parse::parse(&text) {
            Ok(script) => {
                let before = std::mem::replace(&mut self.file, place);
                self.run(&script);
                self.file = before;
                true
            }
            Err(line) => self.stop(&format!("line {line} of {} makes no sense", place.path)),
        }
    }

    /// Executes an item of the menu with the variables as they are; they are kept apart.
    pub(super) fn in_item(&mut self, item: &Item) -> (Vec<Item>, Loaded) {
        let variables = self.variables.clone();
        let menu = std::mem::take(&mut self.menu);
        self.loaded = Loaded::default();
        self.set("chosen", &item.title);
        let place = self.place();
        let file = std::mem::replace(&mut self.file, place);
        self.run(&item.body);
        self.file = file;
        self.variables = variables;
        let inner = std::mem::replace(&mut self.menu, menu);
        (inner, std::mem::take(&mut self.loaded))
    }

    /// Returns whether submenus may be this deep.
    pub(super) fn may_nest(depth: usize) -> bool {
        depth < MOST_MENUS
    }

    fn stop(&mut self, reason: &str) -> bool {
        self.trouble.get_or_insert_with(|| reason.to_owned());
        false
    }

    /// Executes commands; returns the status of the last one.
    fn run(&mut self, script: &Script) -> bool {
        if self.depth >= MOST_DEPTH {
            return self.stop("it is nested too deeply");
        }
        self.depth += 1;
        let mut status = true;
        for command in script.iter() {
            match self.steps.checked_sub(1) {
                Some(left) => self.steps = left,
                None => {
                    status = self.stop("it has too many commands");
                    break;
                }
            }
            status = self.command(command);
        }
        self.depth -= 1;
        status
    }

    fn command(&mut self, command: &Command) -> bool {
        match command {
            Command::Simple { words, block } => self.simple(words, block.as_ref()),
            Command::If { arms, otherwise } => {
                let arm = arms.iter().find(|(condition, _)| self.run(condition));
                let body = arm.map_or(otherwise, |(_, body)| body);
                self.run(body)
            }
            Command::For {
                variable,
                words,
                body,
            } => {
                let mut status = true;
                for word in self.expand(words) {
                    if self.steps == 0 {
                        return self.stop("it has too many commands");
                    }
                    self.set(variable, &word);
                    status = self.run(body);
                }
                status
            }
            Command::While {
                condition,
                body,
                until,
            } => {
                // An empty condition costs nothing, and would hold for ever.
                while self.run(condition) != *until {
                    match self.steps.checked_sub(1) {
                        Some(left) => self.steps = left,
                        None => return self.stop("it has too many commands"),
                    }
                    self.run(body);
                }
                true
            }
            Command::Function { name, body } => {
                if self.functions.len() < MOST_VARIABLES {
                    self.functions.insert(name.clone(), Rc::clone(body));
                }
                true
            }
        }
    }

    fn simple(&mut self, words: &[Word], block: Option<&Script>) -> bool {
        let words = self.expand(words);
        let more = u32::try_from(words.len() / WORDS_A_STEP).unwrap_or(u32::MAX);
        self.steps = self.steps.saturating_sub(more);
        let Some((name, arguments)) = words.split_first() else {
            return block.is_none_or(|block| self.run(block));
        };
        if let Some(block) = block {
            return match name.as_str() {
                "menuentry" | "submenu" => self.add_item(arguments, block, name == "submenu"),
                // Hidden entries have no title, and cannot be the default.
                _ => true,
            };
        }
        if let Some(body) = self.functions.get(name).cloned() {
            return self.run(&body);
        }
        match name.as_str() {
            "!" => !self.named(arguments),
            _ => self.named(&words),
        }
    }

    pub(super) fn set(&mut self, name: &str, value: &str) -> bool {
        if self.variables.len() >= MOST_VARIABLES && !self.variables.contains_key(name) {
            return self.stop("it has too many variables");
        }
        let held: usize = self.variables.values().map(String::len).sum();
        if held.saturating_add(value.len()) > MOST_HELD {
            return self.stop("its variables are too long");
        }
        self.variables.insert(name.to_owned(), value.to_owned());
        true
    }

    /// Gives the variables of words their values. Values outside of quotes are split at blanks.
    fn expand(&self, words: &[Word]) -> Vec<String> {
        let mut out = Vec::new();
        let mut left = MOST_WORD;
        for word in words {
            let mut current: Option<String> = None;
            for piece in &word.pieces {
                match piece {
                    Piece::Text(text) => {
                        let current = current.get_or_insert_default();
                        if let Some(rest) = left.checked_sub(text.len()) {
                            left = rest;
                            current.push_str(text);
                        }
                    }
                    Piece::Variable { name, is_quoted } => {
                        let value = self.variables.get(name).map_or("", String::as_str);
                        // What is too long is left out: no honest script comes near.
                        let Some(rest) = left.checked_sub(value.len()) else {
                            continue;
                        };
                        left = rest;
                        match is_quoted {
                            true => current.get_or_insert_default().push_str(value),
                            false => split(value, &mut current, &mut out),
                        }
                    }
                }
            }
            out.extend(current);
        }
        out
    }
}

/// Adds a value outside of quotes to a word: each blank in it ends a word.
fn split(value: &str, current: &mut Option<String>, out: &mut Vec<String>) {
    let mut parts = value.split([' ', '\t', '\n']);
    if let Some(first) = parts.next().filter(|first| !first.is_empty()) {
        current.get_or_insert_default().push_str(first);
    }
    for part in parts {
        out.extend(current.take());
        if !part.is_empty() {
            *current = Some(part.to_owned());
        }
    }
}

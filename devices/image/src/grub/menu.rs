//! The menu of a configuration, and its default entry.

use super::machine::{Item, Machine};
use super::{MenuEntry, Outcome};
use crate::place::MOST_ENTRIES;

/// The most items that are read, submenus included.
const MOST_ITEMS: usize = 2 * MOST_ENTRIES;

/// An entry with its place in the menu.
struct Found {
    /// For each level of menus: the index, the title and the id.
    path: Vec<(usize, String, String)>,
    entry: Option<MenuEntry>,
}

/// Lists the menu of a script that was executed.
pub(super) fn outcome(mut machine: Machine<'_>) -> Outcome {
    let menu = std::mem::take(&mut machine.menu);
    let mut found = Vec::new();
    let mut left = MOST_ITEMS;
    list(&mut machine, &menu, &mut left, &mut Vec::new(), &mut found);
    let wanted = machine.variables.get("default").cloned();
    let chosen = default(&found, wanted.as_deref().unwrap_or_default());

    let mut entries = Vec::new();
    let mut index = None;
    for (at, found) in found.into_iter().enumerate() {
        let is_chosen = chosen == Some(at);
        if let Some(entry) = found.entry {
            if is_chosen {
                index = Some(entries.len());
            }
            entries.push(entry);
        }
    }
    Outcome {
        entries,
        default: index,
        place: machine.place(),
        variables: machine.variables,
        uses_bls: machine.uses_bls,
        trouble: machine.trouble,
    }
}

fn list(
    machine: &mut Machine<'_>,
    menu: &[Item],
    left: &mut usize,
    path: &mut Vec<(usize, String, String)>,
    found: &mut Vec<Found>,
) {
    for (index, item) in menu.iter().enumerate() {
        match left.checked_sub(1) {
            Some(rest) if found.len() < MOST_ENTRIES => *left = rest,
            _ => return,
        }
        let (inner, loaded) = machine.in_item(item);
        path.push((index, item.title.clone(), item.id.clone()));
        match item.is_menu {
            true if Machine::may_nest(path.len()) => list(machine, &inner, left, path, found),
            true => {}
            false => found.push(Found {
                path: path.clone(),
                entry: loaded.kernel.map(|kernel| MenuEntry {
                    title: item.title.clone(),
                    id: item.id.clone(),
                    kernel,
                    initrds: loaded.initrds,
                    options: loaded.options,
                }),
            }),
        }
        path.pop();
    }
}

/// Returns the entry that a default names: a number, a title or an id for each level, between `>`.
/// A name without an entry, or an entry without Linux, means the first entry with Linux.
fn default(found: &[Found], wanted: &str) -> Option<usize> {
    // A title may have a `>` of its own, written twice.
    let parts: Vec<String> = wanted
        .replace(">>", "\0")
        .split('>')
        .map(|part| part.replace('\0', ">"))
        .collect();
    let level = |path: &[(usize, String, String)]| {
        parts.iter().enumerate().all(|(at, part)| {
            path.get(at)
                .is_some_and(|(index, title, id)| match part.trim().parse::<usize>() {
                    Ok(number) => number == *index,
                    Err(_) => part == title || part == id,
                })
        })
    };
    let boots = |at: &usize| found.get(*at).is_some_and(|found| found.entry.is_some());
    let mut named = (0..found.len()).filter(|at| found.get(*at).is_some_and(|f| level(&f.path)));
    named.find(boots).or_else(|| (0..found.len()).find(boots))
}

//! The command `sym`: names and addresses of the kernel, its modules, and the programs and
//! libraries of a process.
//!
//! Only [`named_objects`] reads the guest. The other functions search tables already read, and need
//! no paused guest.

use std::path::PathBuf;

use introspect::Gva;
use introspect::kernel::loaded_modules::LoadedModules;
use introspect::system::{
    GeneratedPlace, PausedSystem, SymbolizedAddress, UserObject, UserObjects,
};
use introspect::user::demangle::demangle;
use introspect::user::symbols::{Binding, Function, FunctionKind};
use introspect::user::symfs::Symfs;

use super::{find, lossy, without_memory};
use crate::protocol::error::RequestError;
use crate::protocol::inspection::{ProcessName, Symbol};

/// Returns the objects of a process, with the symbols in which `what` is looked for.
pub(super) fn named_objects<'s>(
    look: &PausedSystem<'s>,
    name: &ProcessName,
    symfs: Option<PathBuf>,
    what: &[String],
) -> Result<UserObjects<'s>, RequestError> {
    let task = find(look, name)?;
    if task.user_mm().is_none() {
        return Err(without_memory(&task));
    }
    let objects = look.objects(&task, symfs.map(Symfs::new).as_ref())?;
    for object in &objects.objects {
        let asked = |word: &String| address(word).is_none_or(|at| object.text.contains(&at));
        if what.iter().any(asked) {
            object.symbols();
        }
    }
    for word in what {
        // Reads the names of generated code, if this may be such a name.
        generated(&objects, word);
    }
    Ok(objects)
}

/// Parses a hexadecimal address as people write it.
fn address(word: &str) -> Option<u64> {
    let digits = word.strip_prefix("0x").unwrap_or(word);
    let starts_as_number = word.starts_with("0x")
        || word.starts_with(|c: char| c.is_ascii_digit())
        || digits.len() == 16;
    // A sign is not a digit here.
    let is_number = starts_as_number && digits.bytes().all(|byte| byte.is_ascii_hexdigit());
    is_number
        .then(|| u64::from_str_radix(digits, 16).ok())
        .flatten()
}

/// Returns matching symbols of the kernel and its modules.
pub(super) fn kernel_symbols(
    look: &PausedSystem<'_>,
    modules: Option<&LoadedModules>,
    word: &str,
) -> Vec<Symbol> {
    let places = match address(word) {
        Some(address) => look.place(address, modules).into_iter().collect(),
        None => look.places_named(word, modules),
    };
    places.into_iter().map(symbol).collect()
}

fn symbol(place: SymbolizedAddress) -> Symbol {
    Symbol {
        address: place.address,
        name: place.name,
        offset: place.offset,
        kind: place.kind,
        object: place.module,
    }
}

/// Returns matching functions of [`named_objects`].
pub(super) fn user_symbols(objects: &UserObjects<'_>, word: &str) -> Vec<Symbol> {
    let symbol = |object: &UserObject<'_>, address, function: Function<'_>, offset| Symbol {
        address,
        name: demangle(function.name).into_owned(),
        offset,
        kind: letter(function.kind, function.binding),
        object: Some(lossy(&object.path)),
    };
    if let Some(address) = address(word) {
        let found = objects.at(address).and_then(|object| {
            let in_file = object.base.address_in_file(Gva(address));
            let (function, offset) = object.symbols().resolve(in_file)?;
            Some(symbol(object, address, function, offset))
        });
        return found.into_iter().chain(generated(objects, word)).collect();
    }
    let mut symbols = Vec::new();
    for object in &objects.objects {
        let named = object.functions_named(word);
        symbols.extend(named.map(|(address, function)| symbol(object, address, function, 0)));
    }
    symbols.extend(generated(objects, word));
    symbols
}

/// Returns matching code that the process generates.
fn generated(objects: &UserObjects<'_>, word: &str) -> Vec<Symbol> {
    let places = match address(word) {
        Some(address) => objects.generated_at(address).into_iter().collect(),
        None => objects.generated_named(word),
    };
    let symbol = |place: GeneratedPlace| Symbol {
        address: place.address,
        name: place.name,
        offset: place.offset,
        kind: 't',
        object: Some(place.file),
    };
    places.into_iter().map(symbol).collect()
}

/// Returns the type letter of nm(1).
fn letter(kind: FunctionKind, binding: Binding) -> char {
    match (kind, binding) {
        (FunctionKind::Indirect, _) => 'i',
        (_, Binding::Global) => 'T',
        (_, Binding::Weak) => 'W',
        (_, Binding::Local) => 't',
    }
}

/// Returns the message that a word has no match, with similar names.
pub(super) fn unknown_symbol(
    look: &PausedSystem<'_>,
    objects: Option<&UserObjects<'_>>,
    word: &str,
) -> String {
    let near: Vec<String> = match objects {
        Some(objects) => objects
            .objects
            .iter()
            .flat_map(|object| object.symbols().nearest_names(word, 2))
            .map(str::to_owned)
            .collect(),
        None => look
            .system()
            .symbols()
            .nearest_names(word, 3)
            .into_iter()
            .map(str::to_owned)
            .collect(),
    };
    let place = match objects {
        Some(_) => "the process's program and libraries",
        None => "the kernel",
    };
    match (address(word), near.is_empty()) {
        (Some(_), _) => format!("{place} has no function at {word}"),
        (None, true) => format!("no symbol {word:?} in {place}"),
        (None, false) => format!(
            "no symbol {word:?} in {place}; did you mean {}?",
            near.join(", ")
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_told_from_names() {
        for (word, expected) in [
            ("ffffffff81000000", Some(0xffff_ffff_8100_0000)),
            ("0xdead", Some(0xdead)),
            ("1000", Some(0x1000)),
            ("dead", None),
            ("0x", None),
            ("0x+10", None),
            ("1000000000000000f", None),
            ("9p_client", None),
        ] {
            assert_eq!(address(word), expected, "{word}");
        }
    }

    #[test]
    fn the_letters_of_functions_are_those_of_nm() {
        for (kind, binding, expected) in [
            (FunctionKind::Function, Binding::Global, 'T'),
            (FunctionKind::Label, Binding::Global, 'T'),
            (FunctionKind::Function, Binding::Weak, 'W'),
            (FunctionKind::Function, Binding::Local, 't'),
            (FunctionKind::Indirect, Binding::Global, 'i'),
        ] {
            assert_eq!(letter(kind, binding), expected, "{kind:?} {binding:?}");
        }
    }
}

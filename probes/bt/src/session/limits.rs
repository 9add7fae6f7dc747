//! The limits that a script sets itself, by `config` and by the sizes of its maps.

use crate::ast::{Script, Span};
use crate::compile::Options;
use crate::diagnostic::Diagnostic;
use crate::run::MOST_BYTES;

/// The greatest number of entries of a map that a script may ask for.
const MOST_ENTRIES: usize = 1 << 20;
/// The greatest number of bytes of a file that a script may ask for.
const LONGEST_FILE: usize = 1 << 20;

/// Returns the options with the limits that the script itself sets.
///
/// # Errors
/// A limit is above what any script may have.
pub(super) fn of(script: &Script, options: &Options) -> Result<Options, Vec<Diagnostic>> {
    let most = [
        (script.longest_text, MOST_BYTES, "max_strlen"),
        (script.longest_file, LONGEST_FILE, "max_cat_bytes"),
        (script.most_entries, MOST_ENTRIES, "max_map_keys"),
    ];
    let too_large = most
        .into_iter()
        .find(|(asked, most, _)| asked.is_some_and(|n| n > *most));
    if let Some((_, most, name)) = too_large {
        let message = format!("config: {name} is {most} at the most");
        return Err(vec![Diagnostic::new(Span::default(), message)]);
    }
    let too_large = script
        .map_sizes
        .iter()
        .find(|size| size.most > MOST_ENTRIES);
    if let Some(size) = too_large {
        let message = format!("a map has {MOST_ENTRIES} entries at the most");
        return Err(vec![Diagnostic::new(size.span, message)]);
    }
    Ok(Options {
        longest_text: script.longest_text.unwrap_or(options.longest_text),
        most_entries: script.most_entries.unwrap_or(options.most_entries),
        ..options.clone()
    })
}

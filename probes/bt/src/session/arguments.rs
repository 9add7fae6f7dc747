//! Arguments of a script in the names of its probes: `kprobe:$1`.

use std::borrow::Cow;

use crate::ast::{ProbeKind, Script, Span};
use crate::diagnostic::Diagnostic;

/// Returns the script with its arguments in place of `$1` and so on in the names of probes.
///
/// # Errors
/// A probe names an argument that was not given, or that is not text.
pub(super) fn placed<'s>(
    script: &'s Script,
    arguments: &[Vec<u8>],
) -> Result<Cow<'s, Script>, Vec<Diagnostic>> {
    let has_argument =
        |kind: &ProbeKind| matches!(kind, ProbeKind::Pattern(text) if text.contains('$'));
    let mut probes = script.rules.iter().flat_map(|rule| &rule.probes);
    if !probes.any(|spec| has_argument(&spec.kind)) {
        return Ok(Cow::Borrowed(script));
    }
    let mut placed = script.clone();
    let mut wrong = Vec::new();
    for spec in placed.rules.iter_mut().flat_map(|rule| &mut rule.probes) {
        if let ProbeKind::Pattern(text) = &mut spec.kind {
            match replaced(text, arguments, spec.span) {
                Ok(replaced) => *text = replaced,
                Err(error) => wrong.push(error),
            }
        }
    }
    match wrong.is_empty() {
        true => Ok(Cow::Owned(placed)),
        false => Err(wrong),
    }
}

/// Returns a pattern with arguments in the place of `$` and a number. Another `$` is part of a
/// name.
fn replaced(text: &str, arguments: &[Vec<u8>], span: Span) -> Result<String, Diagnostic> {
    let mut parts = text.split('$');
    let mut out = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let digits = part.bytes().take_while(u8::is_ascii_digit).count();
        let (number, rest) = part.split_at_checked(digits).unwrap_or((part, ""));
        let Some(at) = number.parse::<usize>().ok().and_then(|n| n.checked_sub(1)) else {
            out.push('$');
            out.push_str(part);
            continue;
        };
        let given = arguments.get(at).map(|given| std::str::from_utf8(given));
        let Some(Ok(given)) = given else {
            let message =
                format!("the probe takes argument {number} of the script, which is not given");
            return Err(Diagnostic::new(span, message));
        };
        out.push_str(given);
        out.push_str(rest);
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_stand_in_the_place_of_their_numbers() {
        let arguments = [b"vfs_read".to_vec(), b"4".to_vec()];
        for (text, expected) in [
            ("kprobe:$1", Some("kprobe:vfs_read")),
            ("kprobe:$1+$2", Some("kprobe:vfs_read+4")),
            ("uprobe:/bin/x:a$b", Some("uprobe:/bin/x:a$b")),
            ("kprobe:vfs_*", Some("kprobe:vfs_*")),
            ("kprobe:$3", None),
        ] {
            let found = replaced(text, &arguments, Span::default()).ok();
            assert_eq!(found.as_deref(), expected, "{text}");
        }
    }
}

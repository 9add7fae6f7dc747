//! The names of the keys of a script's maps, as the script has them.
//!
//! `@x[comm, args.filename, str($1), pid / 2]` has the names `comm`, `filename`, `key2` and `key3`.
//! The first place of a map in the script gives the names.

use std::collections::BTreeMap;

use bt::ast::{Expression, ExpressionKind, LvalueKind, Script, StatementKind};
use bt::walk;

/// The names that metrics have labels for besides the keys.
const TAKEN: [&str; 4] = ["le", "machine", "job", "instance"];

/// Returns the names of each map's keys.
pub fn labels(script: &Script, text: &str) -> BTreeMap<String, Vec<String>> {
    let mut labels = BTreeMap::new();
    for rule in &script.rules {
        walk::of_rule(rule, &mut |expression| {
            walk::below(expression, &mut |expression| {
                if let ExpressionKind::Lvalue(place) | ExpressionKind::Step { place, .. } =
                    &expression.kind
                {
                    take(&place.kind, text, &mut labels);
                }
            });
        });
        walk::statements_of_rule(rule, &mut |statement| {
            if let StatementKind::Assign { place, .. } | StatementKind::Aggregate { place, .. } =
                &statement.kind
            {
                take(&place.kind, text, &mut labels);
            }
        });
    }
    labels
}

fn take(place: &LvalueKind, text: &str, labels: &mut BTreeMap<String, Vec<String>>) {
    if let LvalueKind::Global { name, keys } = place
        && !keys.is_empty()
        && !labels.contains_key(name)
    {
        labels.insert(name.clone(), names(keys, text));
    }
}

fn names(keys: &[Expression], text: &str) -> Vec<String> {
    // A tuple is several keys.
    let keys = match keys {
        [
            Expression {
                kind: ExpressionKind::Tuple(items),
                ..
            },
        ] => items,
        keys => keys,
    };
    let mut names: Vec<String> = Vec::new();
    for (place, key) in keys.iter().enumerate() {
        let name = text.get(key.span.start..key.span.end).and_then(name);
        let name = name.filter(|name| !TAKEN.contains(name) && !names.iter().any(|n| n == name));
        names.push(name.map_or_else(|| format!("key{place}"), str::to_owned));
    }
    names
}

/// Returns the last word of a variable, a member, or a call with one of these.
fn name(expression: &str) -> Option<&str> {
    let inner = match expression.split_once('(') {
        Some((_, rest)) => rest.strip_suffix(')')?,
        None => expression,
    };
    let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    if !inner.chars().all(|c| is_word(c) || "$.->".contains(c)) {
        return None;
    }
    let word = inner.rsplit(|c| !is_word(c)).next()?;
    // Colons are kept for rules, and two underscores for Prometheus itself.
    let first = word.chars().next()?;
    (!first.is_ascii_digit() && !word.starts_with("__")).then_some(word)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::protocol::script::ScriptRequest;

    #[test]
    fn keys_have_the_names_of_their_variables() {
        for (key, expected) in [
            ("comm", "comm"),
            ("pid, comm", "pid comm"),
            ("args.filename", "filename"),
            ("str(args->filename)", "filename"),
            ("str($1), pid / 2, $x", "key0 key1 x"),
            ("comm, comm", "comm key1"),
            ("(pid, comm)", "pid comm"),
            ("kstack, kstack(3)", "kstack key1"),
        ] {
            let text = format!("kprobe:f {{ $x = 1; @a[{key}] = count(); }}");
            let request = ScriptRequest {
                text: text.clone(),
                file: "x".into(),
                arguments: vec!["1".into()],
                ..ScriptRequest::default()
            };
            let script = request.parse().map_err(|error| error.message).unwrap();
            let found = labels(&script, &text);
            assert_eq!(found.get("a").unwrap().join(" "), expected, "{key}");
        }
    }
}

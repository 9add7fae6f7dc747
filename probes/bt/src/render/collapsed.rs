//! Folded stacks, the input of flame graphs: `frame;frame;frame count`, outermost frame first, one
//! line per stack.
//!
//! The source is a map with stacks as keys. Other parts of a key, such as the thread's name, come
//! before the frames. A program's frames come before the kernel's that they have called. Frames
//! have no offsets, so entries that differ only in offsets are merged. The lines are sorted by
//! their text.

use std::collections::BTreeMap;

use crate::ast::Dialect;
use crate::maps::{MapSnapshot, Reading};
use crate::value::{Names, Value};
use crate::value_text::{parts, split_offset, text_of};

/// Renders the lines of a map; entries without a number above 0 have none. The number of a
/// histogram or of `stats` is the number of its values.
#[must_use]
pub fn render(snapshot: &MapSnapshot, names: &dyn Names) -> String {
    let mut lines: BTreeMap<String, u64> = BTreeMap::new();
    for (key, reading) in &snapshot.entries {
        let count = weight(reading);
        if count == 0 {
            continue;
        }
        let mut frames = frames(key, names);
        if frames.is_empty() {
            frames.push(format!("@{}", snapshot.name));
        }
        let line = (frames.iter())
            .map(|frame| frame.replace(';', ":").replace(['\n', '\r'], " "))
            .collect::<Vec<_>>()
            .join(";");
        let sum = lines.entry(line).or_default();
        *sum = sum.saturating_add(count);
    }
    (lines.into_iter())
        .map(|(line, count)| format!("{line} {count}\n"))
        .collect()
}

fn weight(reading: &Reading) -> u64 {
    match reading {
        Reading::Value(Value::Unsigned(number)) => *number,
        Reading::Histogram { counts, .. } => counts.total(),
        Reading::Series(_) => 0,
        Reading::Stats { count, .. } => u64::try_from(*count).unwrap_or(0),
        Reading::Value(_) | Reading::Average { .. } => {
            u64::try_from(reading.number().unwrap_or(0)).unwrap_or(0)
        }
    }
}

/// Returns the frames of a key, outermost first.
fn frames(key: &[Value], names: &dyn Names) -> Vec<String> {
    let (mut labels, mut user, mut kernel) = (Vec::new(), Vec::new(), Vec::new());
    for value in parts(key) {
        // Folded frames are names in any form.
        let value = match value {
            Value::StackAs { stack, .. } => stack.as_ref(),
            other => other,
        };
        match value {
            Value::UserStack { pid, frames } => {
                user.extend(frames.iter().rev().map(|&at| names.user(*pid, at)));
            }
            Value::KernelStack(frames) => {
                kernel.extend(frames.iter().rev().map(|&at| names.kernel(at)));
            }
            label => {
                let text = text_of(label, Dialect::Normal, names);
                labels.push(String::from_utf8_lossy(&text).into_owned());
            }
        }
    }
    let stacks = user.iter().chain(&kernel);
    labels.extend(stacks.map(|frame| split_offset(frame).0.to_owned()));
    labels
}

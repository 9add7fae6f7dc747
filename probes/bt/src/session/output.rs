//! A script's output without a guest, at its begin and its end, and the conversion of emissions,
//! here and at hits.

use std::sync::atomic::Ordering;

use crate::ast::Dialect;
use crate::context::{Clock, Context, Here};
use crate::program::{Code, Emission};
use crate::render::{FilePath, Output};
use crate::run::{self, ProbeTexts, Shared};
use crate::shape::Shape;
use crate::value::Value;

/// Runs BEGIN or END, on this thread.
pub(super) fn run(
    codes: &[Code],
    name: &str,
    shared: &Shared,
    clock: &Clock,
    each: &mut dyn FnMut(Output),
) {
    let context = Here::at(clock.unix_ns(vmm::host_tsc()));
    let texts = ProbeTexts {
        name: name.as_bytes().into(),
        function: [].into(),
    };
    for code in codes {
        if shared.exited.load(Ordering::Relaxed) {
            break;
        }
        run::run::<dyn Context>(code, shared, &context, &texts);
    }
    let unix_ns = context.unix_ns();
    for (emission, values) in context.into_emitted() {
        if let Some(output) = of(shared, emission, values, unix_ns) {
            each(output);
        }
    }
}

/// Runs END and prints the maps, unless the script has failed as one of btrace(8) does.
pub(super) fn finish(
    end: &[Code],
    printed: &[usize],
    shared: &Shared,
    clock: &Clock,
    each: &mut dyn FnMut(Output),
) {
    if shared.failed.load(Ordering::Relaxed) {
        return;
    }
    // exit() in a rule ends the rules, but not END.
    shared.exited.store(false, Ordering::Relaxed);
    run(end, "END", shared, clock, each);
    let mut ending = (shared.dialect == Dialect::Normal).then_some(Output::Ending);
    for map in printed {
        let snapshot = shared.maps.dress(*map, shared.maps.snapshot(*map));
        if !snapshot.entries.is_empty() {
            ending.take().into_iter().for_each(&mut *each);
            each(Output::Map {
                snapshot,
                top: None,
                divisor: None,
            });
        }
    }
}

/// Converts an emission and its values to output.
pub(super) fn of(
    shared: &Shared,
    emission: usize,
    mut values: Vec<Value>,
    unix_ns: u64,
) -> Option<Output> {
    Some(match shared.emissions.get(emission)? {
        Emission::Printf {
            format,
            complaint,
            shapes,
        } => {
            dress(&mut values, shapes);
            Output::Printf {
                format: format.clone(),
                arguments: values,
                complaint: complaint.clone(),
            }
        }
        Emission::File {
            format,
            shapes,
            most,
        } => {
            dress(&mut values, shapes);
            Output::File {
                path: FilePath {
                    format: format.clone(),
                    arguments: values,
                },
                most: *most,
            }
        }
        Emission::Print { shape } => Output::Print(shape.dress(values.pop()?)),
        Emission::Join { separator } => Output::Join {
            parts: values
                .into_iter()
                .filter_map(|value| match value {
                    Value::Text(text) => Some(text),
                    _ => None,
                })
                .collect(),
            separator: separator.clone(),
        },
        Emission::Time { format } => Output::Time {
            format: format.clone(),
            unix_ns: i64::try_from(unix_ns).unwrap_or(i64::MAX),
        },
        Emission::Map { map, top, divisor } => match values.pop()? {
            Value::Int(ticket) => Output::Map {
                snapshot: shared.maps.dress(*map, shared.snapshots.take(ticket)?),
                top: *top,
                divisor: *divisor,
            },
            _ => return None,
        },
        Emission::Fail { message } => Output::Fail {
            message: message.clone(),
        },
    })
}

/// Applies the shapes of their types to values. A value without a shape stays plain.
fn dress(values: &mut [Value], shapes: &[Shape]) {
    for (value, shape) in values.iter_mut().zip(shapes) {
        let plain = std::mem::replace(value, Value::ZERO);
        *value = shape.dress(plain);
    }
}

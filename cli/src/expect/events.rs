//! The last hits of a run, which show what preceded its end.

use std::collections::VecDeque;

use bt::render::Output;
use bt::value::Value;
use serde::Serialize;

/// The number of hits kept.
pub const KEPT: usize = 50;

/// A counted hit.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Hit {
    /// The time, in nanoseconds since 1970.
    pub unix_ns: u64,
    /// The indices of the expectations that counted it, from 0.
    pub expectations: Vec<usize>,
    /// The probe's four parts.
    pub probe: String,
    /// The name of the thread; `None` if there is none.
    pub comm: Option<String>,
    /// The process; `None` if there is none.
    pub pid: Option<u32>,
    /// The thread.
    pub tid: Option<u32>,
    /// The index of the vCPU.
    pub cpu: u32,
}

/// Returns the action by which the rule of the expectation at index `at` records its hits.
pub(super) fn statement(at: usize) -> String {
    format!("printf(\"%d %s %s %d %d %d %lu\\n\", {at}, probe, comm, pid, tid, cpu, nsecs);")
}

/// Returns the expectation and the hit in a rule's output.
fn read(output: Output) -> Option<(usize, Vec<Value>)> {
    let Output::Printf { mut arguments, .. } = output else {
        return None;
    };
    let at = number(arguments.first()?)?;
    arguments.remove(0);
    Some((usize::try_from(at).ok()?, arguments))
}

/// Makes a hit of its values and the expectations that counted it.
fn hit((values, expectations): (Vec<Value>, Vec<usize>)) -> Option<Hit> {
    let [probe, comm, pid, tid, cpu, unix_ns] = values.as_slice() else {
        return None;
    };
    let comm = text(comm)?;
    // A guest without tasks, and an interrupt, have no thread.
    let of_thread = |value: &Value| match comm.is_empty() {
        true => None,
        false => u32::try_from(number(value)?).ok(),
    };
    Some(Hit {
        unix_ns: number(unix_ns)?,
        expectations,
        probe: text(probe)?,
        pid: of_thread(pid),
        tid: of_thread(tid),
        cpu: u32::try_from(number(cpu)?).ok()?,
        comm: Some(comm).filter(|comm| !comm.is_empty()),
    })
}

fn text(value: &Value) -> Option<String> {
    match value {
        Value::Text(bytes) => Some(String::from_utf8_lossy(bytes).into_owned()),
        _ => None,
    }
}

fn number(value: &Value) -> Option<u64> {
    match value {
        Value::Int(number) => u64::try_from(*number).ok(),
        Value::Unsigned(number) => Some(*number),
        _ => None,
    }
}

/// The last [`KEPT`] hits.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LastHits {
    /// The hits, oldest first.
    hits: VecDeque<(Vec<Value>, Vec<usize>)>,
    /// The hits that may belong among them and were dropped because they were not drained in time.
    pub lost: u64,
}

impl LastHits {
    /// Adds a rule's output.
    pub fn push(&mut self, output: Output) {
        let Some((at, values)) = read(output) else {
            return;
        };
        // Rules at one probe run one after the other. Their outputs for one hit differ only in the
        // expectation.
        if let Some((last, expectations)) = self.hits.back_mut()
            && *last == values
            && !expectations.contains(&at)
        {
            expectations.push(at);
            return;
        }
        if self.hits.len() >= KEPT {
            self.hits.pop_front();
        }
        self.hits.push_back((values, vec![at]));
    }

    /// Returns the hits, oldest first.
    pub fn into_hits(self) -> Vec<Hit> {
        self.hits.into_iter().filter_map(hit).collect()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use bt::ast::Dialect;
    use bt::format::Format;

    use super::*;

    fn output(at: i64, comm: &str, ns: u64) -> Output {
        Output::Printf {
            format: Format::parse(b"", Dialect::Normal).unwrap().into(),
            arguments: vec![
                Value::Int(at),
                Value::text(b"kprobe:vmlinux:f:entry"),
                Value::text(comm.as_bytes()),
                Value::Int(22),
                Value::Int(23),
                Value::Int(1),
                Value::Unsigned(ns),
            ],
            complaint: None,
        }
    }

    #[test]
    fn the_last_hits_are_kept_each_once() {
        let mut last = LastHits::default();
        for ns in 0..1000 {
            last.push(output(0, "sh", ns));
            last.push(output(2, "sh", ns));
        }
        let hits = last.into_hits();
        assert_eq!(hits.len(), KEPT);
        let times: Vec<u64> = hits.iter().map(|hit| hit.unix_ns).collect();
        assert_eq!(times, (950..1000).collect::<Vec<_>>());
        assert!(hits.iter().all(|hit| hit.expectations == [0, 2]));
        assert_eq!(
            (hits[0].pid, hits[0].tid, hits[0].cpu),
            (Some(22), Some(23), 1)
        );
    }

    #[test]
    fn without_a_thread_there_is_no_number() {
        let mut last = LastHits::default();
        last.push(output(0, "", 5));
        let hit = &last.into_hits()[0];
        assert_eq!((hit.pid, hit.tid, &hit.comm), (None, None, &None));
    }
}

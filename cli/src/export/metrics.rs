//! The counts of a trace and the maps of a script as families of metrics, for any system that takes
//! such.
//!
//! All sizes are bounded: a family has at most [`MOST_SERIES`] series. Those that find no room are
//! counted in a metric of their own.

use std::collections::{BTreeMap, BTreeSet};

use crate::protocol::cost::{Cost, Unwatched};
use crate::protocol::script::{self, LONGEST_KEY, MapEntry, MapKind, MapLine, MapValue};
use crate::protocol::trace;

/// The greatest number of series of a family.
pub const MOST_SERIES: usize = 10_000;
/// The greatest number of maps.
const MOST_MAPS: usize = 100;
/// The greatest number of bounds of a map's histograms.
const MOST_BOUNDS: usize = 512;

/// The kinds of families.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A number that grows.
    Counter,
    /// Any number.
    Gauge,
    /// A histogram.
    Histogram,
}

/// Metrics of one name.
#[derive(Debug, Clone, PartialEq)]
pub struct Family {
    /// The name, without the `_total` of counters.
    pub name: String,
    /// A sentence for people.
    pub help: String,
    /// The kind.
    pub kind: Kind,
    /// The series.
    pub samples: Vec<Sample>,
}

/// The value of one series.
#[derive(Debug, Clone, PartialEq)]
pub struct Sample {
    /// The labels, besides the machine's.
    pub labels: Vec<(String, String)>,
    /// The value.
    pub value: Value,
}

/// A value.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    /// Of a counter or gauge.
    Number(f64),
    /// Of a histogram.
    Histogram {
        /// The sum of the values, from the middles of their buckets.
        sum: f64,
        /// The buckets: the largest value of each, and its count. The last is infinite.
        buckets: Vec<(f64, u64)>,
    },
}

/// All that is known of a trace or a script.
#[derive(Debug, Clone, Default)]
pub struct Metrics {
    hits: Vec<(String, u64)>,
    counters: Vec<(&'static str, &'static str, f64)>,
    unwatched: Vec<Unwatched>,
    maps: BTreeMap<String, MapLine>,
    /// The names of the keys of each map.
    labels: BTreeMap<String, Vec<String>>,
    /// The upper bounds of each map's histograms: they stay.
    bounds: BTreeMap<String, BTreeSet<i64>>,
    /// Set if there are more maps than have metrics.
    has_more_maps: bool,
}

impl Metrics {
    /// Makes the metrics of a script whose keys have these names, by map; for a trace there are
    /// none.
    pub fn new(labels: BTreeMap<String, Vec<String>>) -> Self {
        Self {
            labels,
            ..Self::default()
        }
    }

    /// Takes in the counts of a trace.
    pub fn take_trace(&mut self, counts: &trace::Counts, hits: Vec<(String, u64)>) {
        self.hits = hits;
        self.unwatched.clone_from(&counts.unwatched);
        let returns = counts.lost_returns.saturating_add(counts.without_return);
        self.counters = vec![
            (
                "events",
                "Hits that were recorded and read.",
                counts.read as f64,
            ),
            (
                "filtered_hits",
                "Hits that filters rejected.",
                counts.filtered as f64,
            ),
            (
                "lost_events",
                "Hits that found no room in a ring.",
                counts.dropped as f64,
            ),
            (
                "unseen_returns",
                "Calls whose return is not seen.",
                returns as f64,
            ),
            (
                "unknown_task_hits",
                "Hits whose process could not be read.",
                counts.unknown_task as f64,
            ),
        ];
        self.take_cost(&counts.cost);
    }

    /// Takes in the counts of a script.
    pub fn take_script(&mut self, counts: &script::Counts) {
        self.hits.clone_from(&counts.each);
        self.unwatched.clone_from(&counts.unwatched);
        self.counters = vec![
            ("events", "Hits at which a rule ran.", counts.ran as f64),
            (
                "filtered_hits",
                "Hits that filters rejected.",
                counts.filtered as f64,
            ),
            (
                "lost_events",
                "Pieces of output that were not read in time.",
                counts.lost_output as f64,
            ),
            (
                "lost_map_values",
                "Values that found no room in a map.",
                counts.lost_values as f64,
            ),
            (
                "endless_runs",
                "Runs of a rule that took too long and were ended.",
                counts.endless as f64,
            ),
        ];
        self.take_cost(&counts.cost);
    }

    fn take_cost(&mut self, cost: &Cost) {
        let seconds = |ns: u64| ns as f64 / 1e9;
        self.counters.extend([
            (
                "cost_seconds",
                "The time that all vCPUs have spent at hits.",
                seconds(cost.ns),
            ),
            (
                "busiest_vcpu_cost_seconds",
                "The time of the vCPU that has spent most at hits.",
                seconds(cost.busiest_ns),
            ),
            ("seconds", "The time of the trace.", seconds(cost.passed_ns)),
        ]);
    }

    /// Takes in a map of a script. A machine that sends more than it should is not believed.
    pub fn take_map(&mut self, mut map: MapLine) {
        if self.maps.len() >= MOST_MAPS && !self.maps.contains_key(&map.name) {
            self.has_more_maps = true;
            return;
        }
        let sent = map.entries.len();
        let fits =
            |entry: &MapEntry| entry.key.iter().map(String::len).sum::<usize>() <= LONGEST_KEY;
        map.entries.retain(fits);
        map.entries.truncate(MOST_SERIES);
        let gone = (sent - map.entries.len()) as u64;
        map.left_out = map.left_out.saturating_add(gone);
        let bounds = self.bounds.entry(map.name.clone()).or_default();
        for entry in &map.entries {
            if let MapValue::Histogram(rows) = &entry.value {
                let room = MOST_BOUNDS.saturating_sub(bounds.len());
                bounds.extend(rows.iter().filter_map(|(_, to, _)| *to).take(room));
            }
        }
        self.maps.insert(map.name.clone(), map);
    }

    /// Returns all families.
    pub fn families(&self) -> Vec<Family> {
        let mut left_out = Vec::new();
        let mut families = vec![self.hits(&mut left_out)];
        let counters = self.counters.iter().map(|(name, help, value)| {
            let value = Value::Number(*value);
            Family {
                name: format!("exotrace_{name}"),
                help: (*help).to_owned(),
                kind: Kind::Counter,
                samples: vec![Sample {
                    labels: Vec::new(),
                    value,
                }],
            }
        });
        families.extend(counters);
        families.push(self.suspensions());
        for map in self.maps.values() {
            self.map(map, &mut families, &mut left_out);
        }
        if self.has_more_maps {
            left_out.push(("maps".to_owned(), 1));
        }
        let samples = left_out.into_iter().map(|(of, count)| Sample {
            labels: vec![("of".to_owned(), of)],
            value: Value::Number(count as f64),
        });
        families.push(Family {
            name: "exotrace_series_left_out".to_owned(),
            help: "Probes, or entries of a map, that have no series.".to_owned(),
            kind: Kind::Gauge,
            samples: samples.collect(),
        });
        families
    }

    fn hits(&self, left_out: &mut Vec<(String, u64)>) -> Family {
        // A static probe of a program may stand at several places under one name.
        let mut each: BTreeMap<&str, u64> = BTreeMap::new();
        for (probe, hits) in &self.hits {
            let sum = each.entry(probe).or_default();
            *sum = sum.saturating_add(*hits);
        }
        let missing = each.len().saturating_sub(MOST_SERIES);
        left_out.push(("probes".to_owned(), missing as u64));
        let samples = each
            .into_iter()
            .take(MOST_SERIES)
            .map(|(probe, hits)| Sample {
                labels: vec![("probe".to_owned(), probe.to_owned())],
                value: Value::Number(hits as f64),
            });
        Family {
            name: "exotrace_probe_hits".to_owned(),
            help: "Hits of a probe, those that filters rejected included.".to_owned(),
            kind: Kind::Counter,
            samples: samples.collect(),
        }
    }

    fn suspensions(&self) -> Family {
        let mut each: BTreeMap<&str, u64> = BTreeMap::new();
        for unwatched in &self.unwatched {
            let sum = each.entry(&unwatched.probe).or_default();
            *sum = sum.saturating_add(unwatched.ns);
        }
        let samples = each
            .into_iter()
            .take(MOST_SERIES)
            .map(|(probe, ns)| Sample {
                labels: vec![("probe".to_owned(), probe.to_owned())],
                value: Value::Number(ns as f64 / 1e9),
            });
        Family {
            name: "exotrace_probe_suspended_seconds".to_owned(),
            help: "The time for which a budget has stopped a probe.".to_owned(),
            kind: Kind::Counter,
            samples: samples.collect(),
        }
    }

    fn map(&self, map: &MapLine, to: &mut Vec<Family>, left_out: &mut Vec<(String, u64)>) {
        let mut entries: BTreeMap<&[String], MapValue> = BTreeMap::new();
        let mut missing = map.left_out;
        for MapEntry { key, value } in &map.entries {
            // Different addresses may have one name.
            if let Some(known) = entries.get_mut(key.as_slice()) {
                add(known, value);
            } else if entries.len() < MOST_SERIES {
                entries.insert(key, value.clone());
            } else {
                missing = missing.saturating_add(1);
            }
        }
        left_out.push((format!("@{}", map.name), missing));
        let name = metric_name(&map.name);
        let labels = self.labels.get(&map.name).map_or(&[][..], Vec::as_slice);
        let family = |suffix: &str, kind, value: &dyn Fn(&MapValue) -> Option<Value>| {
            let samples = entries.iter().filter_map(|(key, reading)| {
                Some(Sample {
                    labels: named(key, labels),
                    value: value(reading)?,
                })
            });
            Family {
                name: format!("{name}{suffix}"),
                help: format!("The map @{} of the script.", map.name),
                kind,
                samples: samples.collect(),
            }
        };
        match map.kind {
            MapKind::Count => to.push(family("", Kind::Counter, &number)),
            MapKind::Number => to.push(family("", Kind::Gauge, &number)),
            MapKind::Mean => {
                let count = |value: &MapValue| match value {
                    MapValue::Mean(count, _) => Some(Value::Number(*count as f64)),
                    _ => None,
                };
                to.push(family("", Kind::Gauge, &number));
                to.push(family("_values", Kind::Counter, &count));
            }
            MapKind::Histogram => {
                let bounds = self.bounds.get(&map.name);
                let value = |value: &MapValue| Some(histogram(value, bounds?));
                to.push(family("", Kind::Histogram, &value));
            }
        }
    }
}

/// Returns the number of values in a histogram's buckets.
pub fn total(buckets: &[(f64, u64)]) -> u64 {
    let counts = buckets.iter().map(|(_, count)| *count);
    counts.fold(0, u64::saturating_add)
}

/// Returns the name of a map's metric.
fn metric_name(map: &str) -> String {
    match map {
        "" => "exotrace_map".to_owned(),
        map => format!("exotrace_map_{}", word(map)),
    }
}

/// Returns a text with only such characters as names have.
fn word(text: &str) -> String {
    let kept = |c: char| if c.is_ascii_alphanumeric() { c } else { '_' };
    text.chars().map(kept).collect()
}

/// Returns the labels of a key.
fn named(key: &[String], labels: &[String]) -> Vec<(String, String)> {
    let parts = key.iter().enumerate();
    parts
        .map(|(place, part)| {
            let name = labels.get(place).cloned();
            (name.unwrap_or_else(|| format!("key{place}")), part.clone())
        })
        .collect()
}

fn number(value: &MapValue) -> Option<Value> {
    Some(Value::Number(match value {
        MapValue::Number(number) => *number as f64,
        MapValue::Unsigned(number) => *number as f64,
        MapValue::Mean(0, _) => 0.0,
        MapValue::Mean(count, total) => *total as f64 / *count as f64,
        MapValue::Histogram(_) => return None,
    }))
}

/// Adds a value of the same key.
fn add(known: &mut MapValue, more: &MapValue) {
    match (known, more) {
        (MapValue::Number(known), MapValue::Number(more)) => *known = known.wrapping_add(*more),
        (MapValue::Mean(count, total), MapValue::Mean(more, sum)) => {
            *count = count.wrapping_add(*more);
            *total = total.wrapping_add(*sum);
        }
        (MapValue::Histogram(known), MapValue::Histogram(more)) => known.extend(more),
        _ => {}
    }
}

/// Returns a histogram with all bounds of its map.
fn histogram(value: &MapValue, bounds: &BTreeSet<i64>) -> Value {
    let rows: &[_] = match value {
        MapValue::Histogram(rows) => rows,
        _ => &[],
    };
    let mut counts: BTreeMap<i64, u64> = bounds.iter().map(|bound| (*bound, 0)).collect();
    let (mut above, mut sum) = (0_u64, 0.0);
    for (from, to, count) in rows {
        let middle = match (from, to) {
            (Some(from), Some(to)) => (*from as f64 + *to as f64) / 2.0,
            (Some(one), None) | (None, Some(one)) => *one as f64,
            (None, None) => 0.0,
        };
        sum += middle * *count as f64;
        let place = to.and_then(|to| counts.get_mut(&to));
        let place = place.unwrap_or(&mut above);
        *place = place.saturating_add(*count);
    }
    let buckets = counts.into_iter().map(|(to, count)| (to as f64, count));
    Value::Histogram {
        sum,
        buckets: buckets.chain([(f64::INFINITY, above)]).collect(),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn map(name: &str, kind: MapKind, entries: &[(&[&str], MapValue)]) -> MapLine {
        let entries = entries.iter().map(|(key, value)| MapEntry {
            key: key.iter().map(|part| (*part).to_owned()).collect(),
            value: value.clone(),
        });
        MapLine {
            name: name.to_owned(),
            kind,
            entries: entries.collect(),
            left_out: 2,
        }
    }

    fn family(metrics: &Metrics, name: &str) -> Family {
        let mut all = metrics.families().into_iter();
        all.find(|family| family.name == name).unwrap()
    }

    #[test]
    fn maps_are_families_with_their_keys_as_labels() {
        let labels = BTreeMap::from([("calls".to_owned(), vec!["comm".to_owned()])]);
        let mut metrics = Metrics::new(labels);
        let one = MapValue::Number(1);
        let entries = [(&["sh", "1"][..], one.clone()), (&["sh", "1"][..], one)];
        metrics.take_map(map("calls", MapKind::Count, &entries));
        let calls = family(&metrics, "exotrace_map_calls");
        assert_eq!(calls.kind, Kind::Counter);
        let label = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        let expected = Sample {
            labels: vec![label("comm", "sh"), label("key1", "1")],
            value: Value::Number(2.0),
        };
        assert_eq!(calls.samples, [expected]);
        let left_out = family(&metrics, "exotrace_series_left_out");
        assert_eq!(left_out.samples[1].labels, [label("of", "@calls")]);
        assert_eq!(left_out.samples[1].value, Value::Number(2.0));
    }

    #[test]
    fn histograms_of_a_map_share_their_bounds_from_then_on() {
        let mut metrics = Metrics::default();
        let rows = vec![(Some(2), Some(3), 5), (Some(8), None, 1)];
        let first = [(&["a"][..], MapValue::Histogram(rows))];
        metrics.take_map(map("", MapKind::Histogram, &first));
        let second = [(&["a"][..], MapValue::Histogram(vec![(None, Some(-1), 2)]))];
        metrics.take_map(map("", MapKind::Histogram, &second));
        let found = family(&metrics, "exotrace_map");
        let expected = Value::Histogram {
            sum: -2.0,
            buckets: vec![(-1.0, 2), (3.0, 0), (f64::INFINITY, 0)],
        };
        assert_eq!(found.samples[0].value, expected);
    }

    #[test]
    fn a_machine_that_sends_too_much_is_not_believed() {
        let mut metrics = Metrics::default();
        let rows = vec![
            (None, None, u64::MAX),
            (Some(i64::MIN), Some(i64::MAX), u64::MAX),
        ];
        let long = "k".repeat(LONGEST_KEY + 1);
        let entries = [
            (&["a"][..], MapValue::Histogram(rows.clone())),
            (&["a"][..], MapValue::Histogram(rows)),
            (&["b"][..], MapValue::Mean(-1, i64::MIN)),
            (&[long.as_str()][..], MapValue::Number(1)),
        ];
        for number in 0..=MOST_MAPS {
            let mut map = map(&format!("m{number}"), MapKind::Histogram, &entries);
            map.left_out = u64::MAX - 1;
            metrics.take_map(map);
        }
        let costs = trace::Counts {
            lost_returns: u64::MAX,
            without_return: 1,
            ..trace::Counts::default()
        };
        metrics.take_trace(
            &costs,
            vec![("p".to_owned(), u64::MAX), ("p".to_owned(), 1)],
        );
        let families = metrics.families();
        let maps = families
            .iter()
            .filter(|family| family.name.starts_with("exotrace_map_"));
        assert_eq!(maps.count(), MOST_MAPS);
        let left_out = family(&metrics, "exotrace_series_left_out").samples;
        let last = left_out.last().unwrap();
        assert_eq!(last.labels, [("of".to_owned(), "maps".to_owned())]);
        assert_eq!(left_out[1].value, Value::Number(u64::MAX as f64));
    }

    #[test]
    fn the_number_of_series_is_bounded_and_the_rest_is_counted() {
        let mut metrics = Metrics::default();
        let hits = (0..MOST_SERIES + 5).map(|number| (format!("p{number}"), 1));
        metrics.take_trace(&trace::Counts::default(), hits.collect());
        let hits = family(&metrics, "exotrace_probe_hits");
        assert_eq!(hits.samples.len(), MOST_SERIES);
        let left_out = family(&metrics, "exotrace_series_left_out");
        assert_eq!(left_out.samples[0].value, Value::Number(5.0));
    }
}

//! Families of metrics in the messages of OTLP, cumulative since the beginning of the export.

use opentelemetry_proto::tonic::common::v1::{InstrumentationScope, KeyValue};
use opentelemetry_proto::tonic::metrics::v1::metric::Data;
use opentelemetry_proto::tonic::metrics::v1::number_data_point;
use opentelemetry_proto::tonic::metrics::v1::{
    AggregationTemporality, Gauge, Histogram, HistogramDataPoint, Metric, NumberDataPoint,
    ScopeMetrics, Sum,
};
use probes::clock::unix_ns_now;

use super::records::{attribute, text};
use crate::export::metrics::{Family, Kind, Metrics, Sample, Value, total};

/// Returns the metrics of an export that began at `began`, in nanoseconds since 1970.
pub fn scoped(metrics: &Metrics, scope: InstrumentationScope, began: u64) -> ScopeMetrics {
    let now = unix_ns_now();
    let families = metrics.families().into_iter();
    let with_series = families.filter(|family| !family.samples.is_empty());
    ScopeMetrics {
        scope: Some(scope),
        metrics: with_series
            .map(|family| metric(family, began, now))
            .collect(),
        ..ScopeMetrics::default()
    }
}

fn metric(family: Family, began: u64, now: u64) -> Metric {
    let cumulative = AggregationTemporality::Cumulative.into();
    let numbers = || {
        let points = family.samples.iter();
        points
            .filter_map(|sample| point(sample, began, now))
            .collect()
    };
    let data = match family.kind {
        Kind::Counter => Data::Sum(Sum {
            data_points: numbers(),
            aggregation_temporality: cumulative,
            is_monotonic: true,
        }),
        Kind::Gauge => Data::Gauge(Gauge {
            data_points: numbers(),
        }),
        Kind::Histogram => Data::Histogram(Histogram {
            data_points: family
                .samples
                .iter()
                .filter_map(|sample| histogram(sample, began, now))
                .collect(),
            aggregation_temporality: cumulative,
        }),
    };
    Metric {
        name: family.name,
        description: family.help,
        data: Some(data),
        ..Metric::default()
    }
}

fn attributes(sample: &Sample) -> Vec<KeyValue> {
    let labels = sample.labels.iter();
    labels
        .map(|(name, value)| attribute(name, text(value.clone())))
        .collect()
}

fn point(sample: &Sample, began: u64, now: u64) -> Option<NumberDataPoint> {
    let Value::Number(number) = sample.value else {
        return None;
    };
    Some(NumberDataPoint {
        attributes: attributes(sample),
        start_time_unix_nano: began,
        time_unix_nano: now,
        value: Some(number_data_point::Value::AsDouble(number)),
        ..NumberDataPoint::default()
    })
}

fn histogram(sample: &Sample, began: u64, now: u64) -> Option<HistogramDataPoint> {
    let Value::Histogram { sum, buckets } = &sample.value else {
        return None;
    };
    // The last bound is infinite, and has no place in the message.
    let bounds = buckets.iter().map(|(bound, _)| *bound);
    Some(HistogramDataPoint {
        attributes: attributes(sample),
        start_time_unix_nano: began,
        time_unix_nano: now,
        count: total(buckets),
        sum: Some(*sum),
        bucket_counts: buckets.iter().map(|(_, count)| *count).collect(),
        explicit_bounds: bounds.filter(|bound| bound.is_finite()).collect(),
        ..HistogramDataPoint::default()
    })
}

//! Parses calls of functions that gather values in a map: `count()`, `lhist(x, 0, 100, 10)`.

use super::{Parsed, Parser};
use crate::ast::{
    Aggregation, Expression, ExpressionKind, Lvalue, SeriesKind, SeriesPart, Span, StatementKind,
};
use crate::diagnostic::Diagnostic;
use crate::names::{self, AggregateFn};

/// The greatest number of buckets of a histogram with equal steps, as in bpftrace.
const MOST_BUCKETS: i64 = 1000;
/// The greatest number of bits of a power of two that its parts stand for, as in bpftrace.
const MOST_BITS: u32 = 5;
/// The greatest number of intervals of a time series.
const MOST_INTERVALS: u32 = 4096;

impl Parser<'_> {
    /// Parses the arguments of an aggregating function, whose name was read, for a variable.
    pub(super) fn gather(
        &mut self,
        gatherer: &AggregateFn,
        place: Lvalue,
    ) -> Parsed<StatementKind> {
        let name_span = self.last;
        self.next()?;
        let what = format!("after the arguments of {}()", gatherer.name);
        let (arguments, _) = self.items(")", &what)?;
        let count = arguments.len();
        if !(gatherer.least..=gatherer.most).contains(&count) {
            let message = names::wrong_count(gatherer.name, count, gatherer.usage);
            return Err(Diagnostic::new(self.since(name_span), message));
        }
        let mut arguments = arguments.into_iter();
        let value = arguments.next();
        let mut range = Vec::new();
        let aggregation = match gatherer.name {
            "count" => Aggregation::Count,
            "sum" => Aggregation::Sum,
            "min" => Aggregation::Min,
            "max" => Aggregation::Max,
            "avg" => Aggregation::Average,
            "stats" => Aggregation::Stats,
            "hist" => {
                let bits = arguments.next();
                let parts = bits.as_ref().map_or(Some(0), |bits| match bits.kind {
                    ExpressionKind::Number(bits) => u32::try_from(bits).ok(),
                    _ => None,
                });
                match (parts, bits) {
                    (Some(parts @ 0..=MOST_BITS), _) => Aggregation::PowerHistogram(parts),
                    (_, bits) => {
                        let span = bits.map_or(name_span, |bits| bits.span);
                        let message = format!(
                            "the second argument of hist() is a number as such, 0 to {MOST_BITS}"
                        );
                        return Err(Diagnostic::new(span, message));
                    }
                }
            }
            "tseries" => {
                let rest: Vec<Expression> = arguments.collect();
                time_series(&rest, self.since(name_span))?
            }
            _ => {
                range = arguments.collect();
                let is_argument = |of: &Expression| matches!(of.kind, ExpressionKind::Argument(_));
                match range.iter().any(is_argument) {
                    true => Aggregation::LinearHistogram {
                        min: 0,
                        max: 1,
                        step: 1,
                    },
                    false => linear_histogram(&std::mem::take(&mut range))?,
                }
            }
        };
        Ok(StatementKind::Aggregate {
            place,
            aggregation,
            value,
            range,
        })
    }
}

/// Returns the time series for `interval, intervals` and perhaps the function.
fn time_series(arguments: &[Expression], span: Span) -> Parsed<Aggregation> {
    let number = |at: usize, what: &str| {
        let found = arguments.get(at);
        let number = found.and_then(Expression::as_number);
        number.filter(|number| *number > 0).ok_or_else(|| {
            let message = format!("the {what} of tseries() is a number as such, above 0");
            Diagnostic::new(found.map_or(span, |found| found.span), message)
        })
    };
    let interval = number(0, "interval")?.unsigned_abs();
    let intervals = number(1, "number of intervals")?;
    let Ok(intervals @ 1..=MOST_INTERVALS) = u32::try_from(intervals) else {
        let message = format!("tseries() of {intervals} intervals; {MOST_INTERVALS} are the most");
        let place = arguments.get(1).map_or(span, |of| of.span);
        return Err(Diagnostic::new(place, message));
    };
    let part = match arguments.get(2) {
        None => SeriesPart::Last,
        Some(Expression { kind, span }) => match kind {
            ExpressionKind::Text(text) if text == b"avg" => SeriesPart::Average,
            ExpressionKind::Text(text) if text == b"max" => SeriesPart::Max,
            ExpressionKind::Text(text) if text == b"min" => SeriesPart::Min,
            ExpressionKind::Text(text) if text == b"sum" => SeriesPart::Sum,
            _ => {
                let message = "a time series aggregates by \"avg\", \"max\", \"min\" or \"sum\"";
                return Err(Diagnostic::new(*span, message));
            }
        },
    };
    Ok(Aggregation::TimeSeries(SeriesKind {
        interval,
        intervals,
        part,
    }))
}

/// Returns the histogram with equal steps for `min, max, step`.
pub(crate) fn linear_histogram(range: &[Expression]) -> Parsed<Aggregation> {
    let mut numbers = [0i64; 3];
    for ((argument, slot), name) in range
        .iter()
        .zip(&mut numbers)
        .zip(["smallest", "largest", "step"])
    {
        let Some(number) = argument.as_number() else {
            let message = format!("the {name} of lhist() must be a number as such");
            return Err(Diagnostic::new(argument.span, message));
        };
        *slot = number;
    }
    let [min, max, step] = numbers;
    let span = range
        .iter()
        .map(|argument| argument.span)
        .reduce(Span::to)
        .unwrap_or_default();
    let wrong = |message: String| Err(Diagnostic::new(span, message));
    if max <= min {
        return wrong(format!(
            "lhist() from {min} to {max}; the largest must be above the smallest"
        ));
    }
    if step < 1 {
        return wrong(format!("lhist() with a step of {step}; 1 is the least"));
    }
    let buckets = max.abs_diff(min) / step.unsigned_abs();
    if buckets > MOST_BUCKETS.unsigned_abs() {
        return wrong(format!(
            "lhist() with {buckets} buckets; {MOST_BUCKETS} are the most: take a larger step"
        ));
    }
    Ok(Aggregation::LinearHistogram { min, max, step })
}

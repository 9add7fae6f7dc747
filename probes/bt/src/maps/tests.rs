//! The contents of maps, also when many threads change them.
#![allow(clippy::unwrap_used)]

use super::*;
use crate::ast::{SeriesKind, SeriesPart};
use crate::histogram::MOST_BUCKETS;

const ALL: [Aggregation; 8] = [
    Aggregation::Count,
    Aggregation::Sum,
    Aggregation::Min,
    Aggregation::Max,
    Aggregation::Average,
    Aggregation::Stats,
    Aggregation::PowerHistogram(0),
    Aggregation::LinearHistogram {
        min: 0,
        max: 100,
        step: 10,
    },
];

fn one(kind: MapKind, dialect: Dialect, most_entries: usize) -> Maps {
    let declaration = MapDeclaration::new("x", kind);
    Maps::new(vec![declaration], 4, dialect, most_entries)
}

fn int(number: i64) -> Value {
    Value::Int(number)
}

#[test]
fn values_of_all_shards_are_one() {
    let cases = [
        (Aggregation::Count, Some(5)),
        (Aggregation::Sum, Some(20)),
        (Aggregation::Min, Some(-3)),
        (Aggregation::Max, Some(12)),
        (Aggregation::Average, Some(4)),
        (Aggregation::Stats, Some(4)),
        (Aggregation::PowerHistogram(0), None),
    ];
    for (aggregation, expected) in cases {
        let maps = one(MapKind::Aggregation(aggregation), Dialect::Normal, 10);
        for (shard, value) in [(0, 7), (1, -3), (3, 12), (3, 4), (7, 0)] {
            maps.aggregate(0, shard, aggregation, &[int(1)], value, 0);
        }
        assert_eq!(maps.get(0, &[int(1)]), expected.map(int), "{aggregation:?}");
        assert_eq!(maps.get(0, &[int(2)]), None, "{aggregation:?}");
        assert_eq!(maps.len(0), 1, "{aggregation:?}");
    }
}

#[test]
fn a_map_forgets_what_it_is_told_to() {
    for aggregation in ALL {
        let maps = one(MapKind::Aggregation(aggregation), Dialect::Normal, 10);
        let gather =
            |shard, key, value| maps.aggregate(0, shard, aggregation, &[int(key)], value, 0);
        (0..4).for_each(|shard| gather(shard, 1, 9));
        gather(2, 2, 9);
        assert!(maps.delete(0, &[int(1)]), "{aggregation:?}");
        assert!(!maps.delete(0, &[int(1)]), "{aggregation:?}");
        assert!(!maps.contains(0, &[int(1)]) && maps.contains(0, &[int(2)]));
        assert_eq!(maps.snapshot(0).entries.len(), 1, "{aggregation:?}");
        maps.zero(0);
        assert_eq!(maps.len(0), 1, "{aggregation:?}");
        // After zero(), earlier values have no effect.
        gather(1, 2, 40);
        let again = one(MapKind::Aggregation(aggregation), Dialect::Normal, 10);
        again.aggregate(0, 0, aggregation, &[int(2)], 40, 0);
        assert_eq!(
            maps.get(0, &[int(2)]),
            again.get(0, &[int(2)]),
            "{aggregation:?}"
        );
        maps.clear(0);
        assert!(
            maps.len(0) == 0 && maps.snapshot(0).entries.is_empty(),
            "{aggregation:?}"
        );
    }
}

#[test]
fn values_are_assigned_and_changed() {
    let maps = one(MapKind::Scalar, Dialect::Normal, 10);
    let key = [Value::text(b"a"), int(1)];
    assert_eq!(maps.get(0, &key), None);
    let doubled = |old: Option<&Value>| match old {
        Some(Value::Int(number)) => int(number * 2),
        _ => int(1),
    };
    assert_eq!(maps.update(0, &key, doubled), int(1));
    assert_eq!(maps.update(0, &key, doubled), int(2));
    maps.set(0, &[], Value::text(b"t"));
    maps.set(0, &[int(3)], Value::Unsigned(u64::MAX));
    assert_eq!(maps.get(0, &[int(3)]), Some(Value::Unsigned(u64::MAX)));
    assert_eq!(maps.len(0), 3);
    // 1 and "1" are two keys.
    assert!(!maps.contains(0, &[Value::text(b"3")]));
    maps.zero(0);
    assert_eq!(maps.get(0, &key), Some(int(0)));
    assert_eq!(maps.get(0, &[]), Some(Value::text(b"")));
    assert_eq!(maps.get(0, &[int(3)]), Some(Value::Unsigned(0)));
}

#[test]
fn no_update_is_lost() {
    const THREADS: usize = 4;
    const TURNS: i64 = 100_000;
    const KEYS: i64 = 100;
    let declarations = [
        MapKind::Aggregation(Aggregation::Count),
        MapKind::Aggregation(Aggregation::Sum),
        MapKind::Scalar,
    ]
    .map(|kind| MapDeclaration::new("", kind));
    // Two threads that share a shard wait for each other, and the result is still exact.
    let maps = Maps::new(declarations.to_vec(), THREADS / 2, Dialect::Normal, 100);
    let plus_one = |old: Option<&Value>| match old {
        Some(Value::Int(number)) => int(number + 1),
        _ => int(1),
    };
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let maps = &maps;
            scope.spawn(move || {
                for turn in 0..TURNS {
                    let key = [int(turn % KEYS), Value::text(b"k")];
                    maps.aggregate(0, thread, Aggregation::Count, &key, 0, 0);
                    maps.aggregate(1, thread, Aggregation::Sum, &key, 3, 0);
                    maps.update(2, &key, plus_one);
                }
            });
        }
    });
    let expected = TURNS / KEYS * i64::try_from(THREADS).unwrap();
    for (map, expected) in [(0, expected), (1, 3 * expected), (2, expected)] {
        assert_eq!(maps.len(map), 100);
        for (key, reading) in maps.snapshot(map).entries {
            assert_eq!(reading.number(), Some(expected), "{key:?} of map {map}");
        }
    }
    assert_eq!(maps.lost(), 0);
}

#[test]
fn what_goes_away_meanwhile_is_counted_once() {
    const TURNS: usize = 20_000;
    let aggregation = Aggregation::Count;
    let maps = one(MapKind::Aggregation(aggregation), Dialect::Normal, 8);
    std::thread::scope(|scope| {
        for thread in 0..2 {
            let maps = &maps;
            scope.spawn(move || {
                for turn in 0..TURNS {
                    let key = [int(i64::try_from(turn % 8).unwrap())];
                    maps.aggregate(0, thread, aggregation, &key, 0, 0);
                }
            });
        }
        for _ in 0..200 {
            maps.delete(0, &[int(3)]);
            maps.clear(0);
            // A key that shards have but the map does not know would be shown but not counted.
            assert!(maps.snapshot(0).entries.len() <= 8);
        }
    });
    let shown = maps.snapshot(0).entries.len();
    assert_eq!(maps.len(0), shown);
    assert_eq!(maps.lost(), 0, "there is room for all keys");
}

#[test]
fn maps_are_bounded() {
    for kind in [MapKind::Scalar, MapKind::Aggregation(Aggregation::Count)] {
        let maps = one(kind, Dialect::Normal, 3);
        for (turn, key) in [1, 2, 3, 4, 1, 4].into_iter().enumerate() {
            match kind {
                MapKind::Scalar => maps.set(0, &[int(key)], int(9)),
                MapKind::Aggregation(of) => maps.aggregate(0, turn, of, &[int(key)], 9, 0),
            }
        }
        assert_eq!((maps.len(0), maps.lost()), (3, 2), "{kind:?}");
        assert!(!maps.contains(0, &[int(4)]), "{kind:?}");
        maps.delete(0, &[int(1)]);
        match kind {
            MapKind::Scalar => maps.set(0, &[int(4)], int(9)),
            MapKind::Aggregation(of) => maps.aggregate(0, 0, of, &[int(4)], 9, 0),
        }
        assert!(maps.contains(0, &[int(4)]), "{kind:?}: there is room again");
    }
    let wide = Aggregation::LinearHistogram {
        min: 0,
        max: i64::MAX,
        step: 1,
    };
    let maps = one(MapKind::Aggregation(wide), Dialect::Normal, 1);
    (0..2000).for_each(|value| maps.aggregate(0, 0, wide, &[], value, 0));
    assert_eq!(maps.lost(), 2000 - MOST_BUCKETS as u64);
}

#[test]
fn a_number_that_is_no_map_s_does_nothing() {
    let maps = one(MapKind::Scalar, Dialect::Normal, 3);
    maps.set(1, &[], int(1));
    maps.aggregate(1, 0, Aggregation::Count, &[], 1, 0);
    maps.clear(1);
    maps.zero(1);
    assert_eq!((maps.get(1, &[]), maps.len(1)), (None, 0));
    assert!(!maps.delete(1, &[]) && maps.snapshot(1).entries.is_empty());
}

#[test]
fn strict_keys_are_their_text() {
    let maps = one(MapKind::Scalar, Dialect::Strict, 10);
    maps.set(0, &[int(1), Value::text(b"b"), Value::Unsigned(3)], int(5));
    for same in [
        vec![Value::text(b"1, b, 3")],
        vec![Value::text(b"1"), Value::text(b"b, 3")],
    ] {
        assert!(maps.contains(0, &same), "{same:?}");
    }
    // Names are resolved later, so stacks are compared as they are.
    let stack = Value::KernelStack([0x1000].as_slice().into());
    maps.set(0, &[stack.clone(), int(1)], int(6));
    assert_eq!(maps.get(0, &[stack, Value::text(b"1")]), Some(int(6)));
    // Longer keys are cut.
    let long = Value::text(&[b'x'; 600]);
    maps.set(0, &[long.clone(), int(1)], int(7));
    assert_eq!(maps.get(0, &[long]), Some(int(7)));
    assert_eq!(maps.len(0), 3);
}

#[test]
fn strict_reading_makes_entries() {
    let maps = one(MapKind::Scalar, Dialect::Strict, 2);
    // A map that was never set does not exist.
    assert_eq!(maps.get(0, &[int(1)]), None);
    assert_eq!(maps.len(0), 0);
    maps.set(0, &[int(1)], Value::Unsigned(u64::MAX));
    assert_eq!(maps.get(0, &[int(1)]), Some(int(-1)), "numbers have a sign");
    assert_eq!(maps.get(0, &[int(2)]), Some(int(0)));
    assert_eq!(maps.len(0), 2);
    // There is no room for a third; it still reads as 0.
    assert_eq!(maps.get(0, &[int(3)]), Some(int(0)));
    assert_eq!((maps.len(0), maps.lost()), (2, 1));
    maps.delete(0, &[int(1)]);
    maps.delete(0, &[int(2)]);
    assert_eq!(
        maps.get(0, &[int(1)]),
        Some(int(0)),
        "a map without entries is a map"
    );
    maps.clear(0);
    assert_eq!(maps.get(0, &[int(1)]), None);
}

#[test]
fn time_series_are_bounded_together() {
    let series = Aggregation::TimeSeries(SeriesKind {
        interval: 1,
        intervals: 4096,
        part: SeriesPart::Last,
    });
    let declaration = MapDeclaration::new("x", MapKind::Aggregation(series));
    let maps = Maps::new(vec![declaration], 64, Dialect::Normal, 1 << 16);
    for key in 0..100 {
        maps.aggregate(0, 0, series, &[int(key)], 1, 1);
    }
    assert_eq!((maps.len(0), maps.lost()), (16, 84));
}

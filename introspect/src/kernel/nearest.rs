//! Names similar to a mistyped one.

/// The number of bytes of a name that are compared, which bounds the work per name.
const MAX_COMPARED: usize = 64;

/// Returns up to `count` different `names` close to `wanted`, best first. They are ordered by edit
/// distance, then by containing it (or being contained in it), then by length. A name more than a
/// third of `wanted` away is not close.
#[must_use]
pub fn nearest<'a>(
    wanted: &str,
    names: impl Iterator<Item = &'a str>,
    count: usize,
) -> Vec<&'a str> {
    let limit = (wanted.len().min(MAX_COMPARED) / 3).max(1);
    let mut found: Vec<(usize, usize, &str)> = names
        .filter_map(|name| {
            let contains = wanted.len() >= 3
                && !name.is_empty()
                && (name.contains(wanted) || (name.len() >= 4 && wanted.contains(name)));
            let rank = match edit_distance(wanted.as_bytes(), name.as_bytes(), limit) {
                Some(distance) => distance,
                None if contains => limit + 1,
                None => return None,
            };
            Some((rank, name.len().abs_diff(wanted.len()), name))
        })
        .collect();
    found.sort_unstable();
    found.dedup_by_key(|candidate| candidate.2);
    found.truncate(count);
    found.into_iter().map(|(_, _, name)| name).collect()
}

/// Returns the Levenshtein distance of `a` and `b`, or `None` if it is above `limit`.
fn edit_distance(a: &[u8], b: &[u8], limit: usize) -> Option<usize> {
    if a.len().abs_diff(b.len()) > limit {
        return None;
    }
    let a = a.get(..MAX_COMPARED).unwrap_or(a);
    let b = b.get(..MAX_COMPARED).unwrap_or(b);
    let mut row = [0usize; MAX_COMPARED + 1];
    for (column, cell) in row.iter_mut().enumerate() {
        *cell = column;
    }
    for (line, byte_a) in a.iter().enumerate() {
        let mut diagonal = line;
        let mut left = line + 1;
        let mut best = left;
        for (cell, byte_b) in row.iter_mut().skip(1).zip(b) {
            let substituted = diagonal + usize::from(byte_a != byte_b);
            diagonal = *cell;
            left = substituted.min(diagonal + 1).min(left + 1);
            *cell = left;
            best = best.min(left);
        }
        row[0] = line + 1;
        if best > limit {
            return None;
        }
    }
    row.get(b.len())
        .copied()
        .filter(|distance| *distance <= limit)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn edit_distances_match_hand_counted_ones() {
        for (a, b, limit, expected) in [
            ("vfs_read", "vfs_read", 2, Some(0)),
            ("vfs_raed", "vfs_read", 2, Some(2)),
            ("vfs_red", "vfs_read", 2, Some(1)),
            ("kitten", "sitting", 3, Some(3)),
            ("kitten", "sitting", 2, None),
            ("", "ab", 2, Some(2)),
            ("abc", "abcdefgh", 2, None),
        ] {
            assert_eq!(
                edit_distance(a.as_bytes(), b.as_bytes(), limit),
                expected,
                "{a} {b}"
            );
        }
    }

    #[test]
    fn close_names_come_before_containing_ones() {
        let names = [
            "ksys_read",
            "vfs_read",
            "vfs_readv",
            "vfs_write",
            "__vfs_read_iter_all",
            "vfs_read",
        ];
        assert_eq!(
            nearest("vfs_reed", names.into_iter(), 2),
            ["vfs_read", "vfs_readv"]
        );
        assert_eq!(
            nearest("vfs_rea", names.into_iter(), 9),
            ["vfs_read", "vfs_readv", "__vfs_read_iter_all"]
        );
    }
}

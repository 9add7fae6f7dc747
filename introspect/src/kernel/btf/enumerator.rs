//! Values of enumerators, by path.

use super::{Btf, Kind, MemberError};

impl Btf {
    /// Returns the value of an enumerator of a named enum: `pageflags.PG_uptodate`. A value of an
    /// unsigned 64-bit enum above `i64::MAX` is returned as the negative number of the same bits.
    ///
    /// # Errors
    /// If the enum or the enumerator does not exist.
    pub fn enumerator(&self, path: &str) -> Result<i64, MemberError> {
        let text = |text: &str| text.to_owned();
        let (owner, name) = path
            .split_once('.')
            .ok_or_else(|| MemberError::NoPath { path: text(path) })?;
        for id in self.find_all(owner, &[Kind::Enum, Kind::Enum64]) {
            let found = self.record(id).and_then(|record| {
                let mut all = record.enumerators();
                all.find(|(at, _)| self.string(*at) == name.as_bytes())
            });
            if let Some((_, value)) = found {
                return Ok(value);
            }
        }
        Err(MemberError::NoMember {
            path: text(path),
            owner: format!("enum {owner}"),
            name: text(name),
            near: Vec::new(),
        })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::super::test_types::TestBtf;
    use super::*;
    use crate::test_says::assert_says;

    #[test]
    fn enumerators_are_found_in_enums_of_all_widths() {
        const SIGNED: u32 = 1 << 31;
        let mut types = TestBtf::default();
        let [one, two, far] = ["ONE", "TWO", "FAR"].map(|name| types.string(name));
        types.add("plain", Kind::Enum, 2, 4, &[one, 1, two, u32::MAX]);
        types.add("negative", Kind::Enum, 1 | SIGNED, 4, &[two, u32::MAX]);
        types.add("wide", Kind::Enum64, 2, 8, &[one, 7, 0, far, 2, 1]);
        let btf = Btf::parse(&types.bytes()).unwrap();
        for (path, expected) in [
            ("plain.ONE", Ok(1)),
            ("plain.TWO", Ok(0xffff_ffff)),
            ("negative.TWO", Ok(-1)),
            ("wide.ONE", Ok(7)),
            ("wide.FAR", Ok(0x1_0000_0002)),
            ("plain.FAR", Err("enum plain has no member \"FAR\"")),
            ("none.ONE", Err("enum none has no member \"ONE\"")),
            ("plain", Err("invalid member")),
        ] {
            match (btf.enumerator(path), expected) {
                (found, Ok(value)) => assert_eq!(found, Ok(value), "{path}"),
                (found, Err(part)) => {
                    assert_says(found.unwrap_err(), part);
                }
            }
        }
    }
}

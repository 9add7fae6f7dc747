//! The share of a guest's time that a budget allows, such as `5%`.

use std::fmt;
use std::str::FromStr;

/// Parts of a whole: a share is kept in millionths.
const WHOLE: u32 = 1_000_000;
/// Millionths in a percent.
const PERCENT: f64 = 10_000.0;

/// A share of time, more than nothing and at most all of it. It is written and parsed in percent,
/// with or without the sign: `5%`, `0.5`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Share(u32);

/// A text is no share.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("invalid budget {0:?}: expected a percentage above 0 and up to 100, such as 5%")]
pub struct ShareError(String);

impl Share {
    /// Returns the share as a part of 1.
    #[must_use]
    pub fn fraction(self) -> f64 {
        f64::from(self.0) / f64::from(WHOLE)
    }
}

impl fmt::Display for Share {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}%", f64::from(self.0) / PERCENT)
    }
}

impl FromStr for Share {
    type Err = ShareError;

    fn from_str(text: &str) -> Result<Self, ShareError> {
        let number = text.strip_suffix('%').unwrap_or(text);
        // Only digits and a point: no exponent, sign or infinity.
        let is_plain = number.bytes().all(|b| b.is_ascii_digit() || b == b'.');
        let parsed = number.parse::<f64>().ok().filter(|_| is_plain);
        parsed
            .map(|percent| (percent * PERCENT).round())
            .filter(|millionths| (1.0..=f64::from(WHOLE)).contains(millionths))
            .map(|millionths| Self(millionths as u32))
            .ok_or_else(|| ShareError(text.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_is_a_percentage() {
        for (text, shown, fraction) in [
            ("5%", "5%", 0.05),
            ("5", "5%", 0.05),
            ("0.5%", "0.5%", 0.005),
            ("100%", "100%", 1.0),
            ("0.0001%", "0.0001%", 0.000_001),
        ] {
            let share: Share = text.parse().unwrap_or_else(|e| panic!("{text}: {e}"));
            assert_eq!(share.to_string(), shown);
            assert!((share.fraction() - fraction).abs() < 1e-9, "{text}");
        }
    }

    #[test]
    fn what_is_no_share_is_refused_with_an_example() {
        for text in [
            "", "%", "0", "0%", "100.1%", "101", "-5%", "+5", "1e1", "inf", "nan", "5%%", "5 %",
            "five", "0.00001%",
        ] {
            let error = text.parse::<Share>().map_err(|e| e.to_string());
            let Err(message) = error else {
                panic!("{text:?} is taken")
            };
            assert!(message.contains("such as 5%"), "{message}");
        }
    }
}

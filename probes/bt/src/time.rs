//! Formats of `time` and `strftime`, like strftime(3) with the C locale.
//!
//! A format is parsed once, with the time zone that it will show. A wrong one is an error then, and
//! rendering never fails. The caller brings the time of the event. Beyond strftime(3), `%f` is
//! microseconds with six digits, as in bpftrace (not in strict scripts), and `%+` the form of
//! date(1), as in OpenBSD.

use jiff::fmt::strtime::{BrokenDownTime, Config, PosixCustom};
use jiff::tz::TimeZone;
use jiff::{Timestamp, Zoned};

use crate::ast::Dialect;

/// The length in bytes from which bt(5) refuses a format.
const STRICT_BYTES: usize = 63;
/// The conversions that are passed on.
const PLAIN: &[u8] = b"aAbBcCdeFGhHIjklmMnpPrRsSTtuUVwWXYzZ";
/// The flags between the percent sign and the letter: no padding, padding by blanks or zeros,
/// capitals.
const FLAGS: &[u8] = b"-_0^#";

/// A time zone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Zone(TimeZone);

impl Zone {
    /// Returns the zone of this system and user (`TZ`, `/etc/localtime`), or UTC if it is not
    /// known.
    #[must_use]
    pub fn local() -> Self {
        Self(TimeZone::try_system().unwrap_or(TimeZone::UTC))
    }

    /// Returns UTC.
    #[must_use]
    pub fn utc() -> Self {
        Self(TimeZone::UTC)
    }
}

/// The reason why a text is no format of time.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TimeFormatError {
    /// A letter that is no conversion, or none at all.
    #[error("unknown conversion {text} of strftime(3); write %% for a percent sign")]
    Unknown {
        /// The conversion.
        text: String,
    },
    /// A format longer than bt(5) accepts.
    #[error("the format has {found} bytes; bt(5) takes less than {STRICT_BYTES}")]
    TooLong {
        /// The length of the format in bytes.
        found: usize,
    },
}

/// A format of time, and the zone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TimeFormat {
    pieces: Vec<Piece>,
    zone: Zone,
}

/// A part of a format.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Piece {
    Text(Vec<u8>),
    /// Conversions for the library.
    Conversions(String),
    /// The last two digits of the year; the library has them for only a hundred years.
    ShortYear,
    /// The last two digits of the year that the week belongs to.
    ShortWeekYear,
}

impl TimeFormat {
    /// Parses a format.
    ///
    /// # Errors
    ///
    /// [`TimeFormatError`] at the first `%` that starts no conversion; in strict scripts also if
    /// the format is too long.
    pub fn parse(text: &[u8], dialect: Dialect, zone: &Zone) -> Result<Self, TimeFormatError> {
        if dialect == Dialect::Strict && text.len() >= STRICT_BYTES {
            return Err(TimeFormatError::TooLong { found: text.len() });
        }
        let mut pieces = Vec::new();
        let mut rest = text;
        while !rest.is_empty() {
            let literal = rest.iter().take_while(|&&byte| byte != b'%').count();
            if let Some(literal @ [_, ..]) = rest.get(..literal) {
                pieces.push(Piece::Text(literal.to_vec()));
            }
            rest = rest.get(literal..).unwrap_or(&[]);
            if let [b'%', behind @ ..] = rest {
                let flags = behind
                    .iter()
                    .take_while(|byte| FLAGS.contains(byte))
                    .count();
                let (flags, behind) = behind.split_at(flags);
                let behind = match behind {
                    // Other eras and digits, of which the C locale has none.
                    [b'E' | b'O', behind @ ..] => behind,
                    _ => behind,
                };
                let letter = behind.first().copied();
                let known = letter.and_then(|letter| conversion(flags, letter, dialect));
                pieces.extend(known.ok_or_else(|| {
                    let length = rest.len() - behind.len() + usize::from(letter.is_some());
                    let text = rest.get(..length).unwrap_or(rest);
                    let text = String::from_utf8_lossy(text).into_owned();
                    TimeFormatError::Unknown { text }
                })?);
                rest = behind.get(1..).unwrap_or(&[]);
            }
        }
        Ok(Self {
            pieces,
            zone: zone.clone(),
        })
    }

    /// Renders a time, in nanoseconds since 1970 (UTC).
    #[must_use]
    pub fn render(&self, unix_ns: i64) -> Vec<u8> {
        let timestamp = Timestamp::from_nanosecond(unix_ns.into()).unwrap_or_default();
        let time = timestamp.to_zoned(self.zone.0.clone());
        let mut out = Vec::new();
        for piece in &self.pieces {
            match piece {
                Piece::Text(text) => out.extend_from_slice(text),
                Piece::Conversions(format) => {
                    // parse() accepts only conversions that a whole date and time has.
                    out.extend_from_slice(converted(format, &time).unwrap_or_default().as_bytes());
                }
                Piece::ShortYear => out.extend_from_slice(&short(time.year())),
                Piece::ShortWeekYear => {
                    out.extend_from_slice(&short(time.date().iso_week_date().year()));
                }
            }
        }
        out
    }
}

/// Returns the parts of a conversion.
fn conversion(flags: &[u8], letter: u8, dialect: Dialect) -> Option<Vec<Piece>> {
    let flags = String::from_utf8_lossy(flags);
    let conversions = |text: &str| Piece::Conversions(text.to_owned());
    Some(match letter {
        b'%' => vec![Piece::Text(b"%".to_vec())],
        b'y' => vec![Piece::ShortYear],
        b'g' => vec![Piece::ShortWeekYear],
        b'D' | b'x' => vec![conversions("%m/%d/"), Piece::ShortYear],
        b'+' => vec![conversions("%a %b %e %H:%M:%S %Z %Y")],
        b'v' => vec![conversions("%e-%b-%Y")],
        b'f' if dialect == Dialect::Normal => vec![conversions("%6f")],
        letter if PLAIN.contains(&letter) => {
            vec![Piece::Conversions(format!(
                "%{flags}{}",
                char::from(letter)
            ))]
        }
        _ => return None,
    })
}

fn converted(format: &str, time: &Zoned) -> Option<String> {
    let mut text = String::new();
    BrokenDownTime::from(time)
        .format_with_config(&Config::new().custom(PosixCustom::new()), format, &mut text)
        .ok()?;
    Some(text)
}

fn short(year: i16) -> [u8; 2] {
    let year = year.rem_euclid(100).to_le_bytes()[0];
    [b'0' + year / 10, b'0' + year % 10]
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    /// Sunday, 2023-03-05 04:07:09.012345678 UTC.
    const TIME: i64 = 1_677_989_229_012_345_678;

    fn rendered(dialect: Dialect, format: &str, unix_ns: i64) -> String {
        let format = TimeFormat::parse(format.as_bytes(), dialect, &Zone::utc()).unwrap();
        String::from_utf8(format.render(unix_ns)).unwrap()
    }

    #[test]
    fn times_are_as_in_c() {
        let cases: &[(&str, &str)] = &[
            ("%H:%M:%S\n", "04:07:09\n"),
            ("%Y-%m-%d %T", "2023-03-05 04:07:09"),
            ("%F %R", "2023-03-05 04:07"),
            ("%a %A %b %B %h", "Sun Sunday Mar March Mar"),
            ("%c", "Sun Mar  5 04:07:09 2023"),
            ("%+", "Sun Mar  5 04:07:09 UTC 2023"),
            ("%D %x %X", "03/05/23 03/05/23 04:07:09"),
            ("%r", "04:07:09 AM"),
            ("[%e] [%k] [%l] [%I] [%p]", "[ 5] [ 4] [ 4] [04] [AM]"),
            ("%-d %_m %^a %-H", "5  3 SUN 4"),
            ("%j %u %w %U %W %V %G %g", "064 7 0 10 09 09 2023 23"),
            ("%s %z %Z", "1677989229 +0000 UTC"),
            ("%C %y %Ey %Od", "20 23 23 05"),
            ("%v", " 5-Mar-2023"),
            ("%n%t%%", "\n\t%"),
            ("plain", "plain"),
            ("", ""),
        ];
        for &(format, expected) in cases {
            for dialect in [Dialect::Normal, Dialect::Strict] {
                assert_eq!(rendered(dialect, format, TIME), expected, "{format}");
            }
        }
        assert_eq!(rendered(Dialect::Normal, "%S.%f", TIME), "09.012345");
        assert_eq!(rendered(Dialect::Normal, "%f", 0), "000000");
    }

    #[test]
    fn all_times_have_a_text() {
        for (format, time, expected) in [
            (
                "%F %T %y %g %x",
                i64::MAX,
                "2262-04-11 23:47:16 62 62 04/11/62",
            ),
            ("%F %T", i64::MIN, "1677-09-21 00:12:43"),
            ("%F %T.%f", -1, "1969-12-31 23:59:59.999999"),
        ] {
            assert_eq!(rendered(Dialect::Normal, format, time), expected);
        }
    }

    #[test]
    fn the_zone_counts() {
        let zone = Zone(TimeZone::fixed(jiff::tz::Offset::from_hours(-5).unwrap()));
        let format = TimeFormat::parse(b"%F %T %z", Dialect::Normal, &zone).unwrap();
        assert_eq!(format.render(TIME), b"2023-03-04 23:07:09 -0500");
        let format = TimeFormat::parse(b"%s", Dialect::Normal, &Zone::local()).unwrap();
        assert_eq!(format.render(TIME), b"1677989229");
    }

    #[test]
    fn what_is_no_format_is_refused() {
        use Dialect::{Normal, Strict};
        let long = "x".repeat(63);
        for (dialect, format, message) in [
            (Normal, "%H:%Q", "unknown conversion %Q of"),
            (Normal, "at %", "unknown conversion % of"),
            (Normal, "%-", "unknown conversion %- of"),
            (Normal, "%.3f", "unknown conversion %. of"),
            (Strict, "%f", "unknown conversion %f of"),
            (Strict, &long, "63 bytes; bt(5) takes less than 63"),
        ] {
            let error = TimeFormat::parse(format.as_bytes(), dialect, &Zone::utc()).unwrap_err();
            assert!(error.to_string().contains(message), "{format}: {error}");
        }
        TimeFormat::parse(&[b'x'; 62], Dialect::Strict, &Zone::utc()).unwrap();
        TimeFormat::parse(&[b'x'; 63], Dialect::Normal, &Zone::utc()).unwrap();
    }
}

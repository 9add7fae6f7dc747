//! The size of a history, as `--history` has it.

use std::str::FromStr;
use std::time::Duration;

use vmm::snapshot::Extent;

use crate::memory_size;

/// The time between two checkpoints, unless another one is given.
const EVERY: Duration = Duration::from_secs(1);
/// The least time between two checkpoints.
const LEAST: Duration = Duration::from_millis(10);
/// The memory for all checkpoints, unless another one is given.
const MOST: u64 = 2 << 30;

/// A ring of checkpoints: `60s,every=1s,most=2G`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ring {
    /// The time that it reaches back.
    pub window: Duration,
    /// The time between two checkpoints.
    pub every: Duration,
    /// The maximum number of bytes of all checkpoints.
    pub most: u64,
}

impl Ring {
    /// Returns the extent of the machine's history.
    pub(super) fn extent(self) -> Extent {
        Extent::Ring {
            window: self.window,
            most: self.most,
        }
    }
}

/// The text is no history.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RingError {
    /// A time is not understood.
    #[error("invalid time {0:?}: expected a number of seconds, or one with ms, s, m or h: 60s")]
    Time(String),
    /// Checkpoints would follow each other too closely, or too far apart.
    #[error("every={every:?}: expected at least 10ms, and at most the {window:?} of the history")]
    Every {
        /// The given time.
        every: Duration,
        /// The time that the history reaches back.
        window: Duration,
    },
    /// A size is not understood.
    #[error("most: {0}")]
    Size(#[from] memory_size::SizeError),
    /// An option is unknown.
    #[error("unknown option {0:?}: expected TIME[,every=TIME][,most=SIZE]")]
    Option(String),
}

impl FromStr for Ring {
    type Err = RingError;

    fn from_str(text: &str) -> Result<Self, RingError> {
        let mut parts = text.split(',');
        let window = time(parts.next().unwrap_or_default())?;
        let (mut every, mut most) = (EVERY.min(window), MOST);
        for part in parts {
            match part.split_once('=') {
                Some(("every", value)) => every = time(value)?,
                Some(("most", value)) => most = memory_size::parse(value)?,
                _ => return Err(RingError::Option(part.to_owned())),
            }
        }
        match (LEAST..=window.max(LEAST)).contains(&every) {
            true => Ok(Self {
                window,
                every,
                most,
            }),
            false => Err(RingError::Every { every, window }),
        }
    }
}

/// Parses a time: seconds, or a number with a unit.
///
/// # Errors
/// If it is none, or zero.
pub fn time(text: &str) -> Result<Duration, RingError> {
    let wrong = || RingError::Time(text.to_owned());
    let units = [("ms", 0.001), ("s", 1.0), ("m", 60.0), ("h", 3600.0)];
    let with_unit = units
        .iter()
        .find_map(|(unit, scale)| Some((text.strip_suffix(unit)?, scale)));
    let (number, scale) = with_unit.unwrap_or((text, &1.0));
    let seconds: f64 = number.parse().map_err(|_| wrong())?;
    let time = Duration::try_from_secs_f64(seconds * scale).map_err(|_| wrong())?;
    match time.is_zero() {
        true => Err(wrong()),
        false => Ok(time),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_history_has_a_time_and_options() {
        let ring = |window, every, most| Ring {
            window: Duration::from_millis(window),
            every: Duration::from_millis(every),
            most,
        };
        for (text, expected) in [
            ("60s", ring(60_000, 1000, 2 << 30)),
            ("60", ring(60_000, 1000, 2 << 30)),
            ("0.5s", ring(500, 500, 2 << 30)),
            ("2m,every=100ms", ring(120_000, 100, 2 << 30)),
            ("1h,most=512M,every=2", ring(3_600_000, 2000, 512 << 20)),
        ] {
            assert_eq!(text.parse(), Ok(expected), "{text}");
        }
        for (text, message) in [
            ("", "invalid time \"\""),
            ("0s", "invalid time \"0s\""),
            ("-1s", "invalid time"),
            ("NaN", "invalid time"),
            ("long", "invalid time \"long\""),
            ("60s,every=0", "invalid time \"0\""),
            ("60s,every=1ms", "every=1ms: expected at least 10ms"),
            ("60s,every=61s", "at most the 60s"),
            ("60s,most=lots", "most: invalid size \"lots\""),
            ("60s,least=1", "unknown option \"least=1\""),
        ] {
            let error = text.parse::<Ring>().unwrap_err().to_string();
            assert!(error.contains(message), "{text:?}: {error}");
        }
    }
}

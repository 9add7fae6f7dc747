//! Names of machines.

use std::fmt;
use std::str::FromStr;

/// The longest name in bytes: together with the run directory it must fit a socket's path.
const LONGEST: usize = 32;

/// A valid name: letters, digits, `.`, `_` and `-`, not starting with `.` or `-`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct VmName(String);

/// The text is no valid name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{text:?} cannot name a machine: use 1 to {LONGEST} letters, digits, '.', '_' or '-', starting with a letter or a digit"
)]
pub struct NameError {
    text: String,
}

impl VmName {
    /// Returns the default name with this number.
    pub fn numbered(number: u32) -> Self {
        Self(format!("vm{number}"))
    }

    /// Returns the text, which is safe as one component of a path.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for VmName {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        let known = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
        let good = (1..=LONGEST).contains(&text.len())
            && text.chars().all(known)
            && text.starts_with(|c: char| c.is_ascii_alphanumeric());
        if good {
            Ok(Self(text.into()))
        } else {
            Err(NameError { text: text.into() })
        }
    }
}

impl fmt::Display for VmName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_one_harmless_component_of_a_path() {
        let longest = "x".repeat(LONGEST);
        for good in ["vm1", "a", "9", "web.test_2-x", &longest] {
            assert_eq!(
                good.parse::<VmName>().map(|n| n.to_string()),
                Ok(good.to_owned())
            );
        }
        let too_long = "x".repeat(LONGEST + 1);
        for bad in [
            "", ".", "..", ".hidden", "-v", "a/b", "a b", "ü", "a\0", "a\n", &too_long,
        ] {
            let error = bad.parse::<VmName>().map_err(|e| e.to_string());
            assert!(
                error.is_err_and(|e| e.contains("cannot name a machine")),
                "{bad:?}"
            );
        }
    }
}

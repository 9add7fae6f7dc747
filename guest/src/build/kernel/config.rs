//! Kernel configuration fragments, and a check that a finished `.config` has their options.
//!
//! `make olddefconfig` silently drops an option whose dependencies are not met; [`unmet`] finds
//! those.

use std::collections::BTreeMap;

/// Symbols and their values. `n` and absence are the same.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options(BTreeMap<String, String>);

impl Options {
    /// Reads a `.config` file or a fragment; of two lines for one symbol the later counts, as for
    /// the kernel's own tools.
    pub fn parse(text: &str) -> Self {
        Self(text.lines().filter_map(parse_line).collect())
    }

    /// Returns the symbol's value, `n` if it has none.
    pub fn get(&self, symbol: &str) -> &str {
        self.0.get(symbol).map_or("n", String::as_str)
    }

    /// Returns the symbols in alphabetical order, with their values.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0
            .iter()
            .map(|(symbol, value)| (symbol.as_str(), value.as_str()))
    }
}

/// Parses `CONFIG_X=value` or `# CONFIG_X is not set`; `None` for any other line.
fn parse_line(line: &str) -> Option<(String, String)> {
    let line = line.trim();
    if let Some(rest) = line.strip_prefix("# ") {
        let symbol = rest.strip_suffix(" is not set")?;
        return symbol
            .starts_with("CONFIG_")
            .then(|| (symbol.to_owned(), "n".to_owned()));
    }
    let (symbol, value) = line.split_once('=')?;
    symbol
        .starts_with("CONFIG_")
        .then(|| (symbol.to_owned(), value.to_owned()))
}

/// Returns the options of `wanted` that differ in `found`, as `CONFIG_X: expected y, found n`.
pub fn unmet(wanted: &Options, found: &Options) -> Vec<String> {
    wanted
        .iter()
        .filter(|(symbol, value)| found.get(symbol) != *value)
        .map(|(symbol, value)| format!("{symbol}: expected {value}, found {}", found.get(symbol)))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_mean_what_the_kernels_tools_take_them_for() {
        let text = "# a comment\nCONFIG_A=y\n# CONFIG_B is not set\n CONFIG_C=\"x=y\"\nCONFIG_A=m\nNOT_ONE=y\n# is not set\n";
        let options = Options::parse(text);
        let found: Vec<_> = options.iter().collect();
        assert_eq!(
            found,
            [
                ("CONFIG_A", "m"),
                ("CONFIG_B", "n"),
                ("CONFIG_C", "\"x=y\"")
            ]
        );
    }

    #[test]
    fn what_was_dropped_or_changed_is_found() {
        let wanted = Options::parse(
            "CONFIG_A=y\nCONFIG_B=m\n# CONFIG_C is not set\n# CONFIG_D is not set\nCONFIG_E=y\n",
        );
        let found = Options::parse("CONFIG_A=y\nCONFIG_B=y\nCONFIG_C=y\n");
        assert_eq!(
            unmet(&wanted, &found),
            [
                "CONFIG_B: expected m, found y",
                "CONFIG_C: expected n, found y",
                "CONFIG_E: expected y, found n"
            ]
        );
    }
}

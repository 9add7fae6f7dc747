//! Advice for command lines that are refused.

use clap::CommandFactory;
use clap::error::{ContextKind, ErrorKind};

use super::Cli;

/// Returns what to do about a refused command line, if that is known. The name of a machine is an
/// option's value in all commands, and a plain word in other tools.
pub fn advice(error: &clap::Error) -> Option<&'static str> {
    let told = |kind| error.get(kind).map(ToString::to_string).unwrap_or_default();
    if error.kind() != ErrorKind::UnknownArgument || told(ContextKind::InvalidArg).starts_with('-')
    {
        return None;
    }
    // `Usage: exotrace COMMAND ...`
    let usage = told(ContextKind::Usage);
    let cli = Cli::command();
    let command = cli.find_subcommand(usage.split_whitespace().nth(2)?)?;
    let mut options = command.get_arguments().filter_map(clap::Arg::get_long);
    options
        .any(|option| option == "vm")
        .then_some("a machine is named by --vm")
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[test]
    fn a_machines_name_without_its_option_is_advised() {
        for (words, advised) in [
            (&["stop", "g"][..], true),
            (&["snapshot", "folder", "g"], true),
            (&["stop", "--frob"], false),
            (&["doctor", "g"], false),
            (&["brew", "g"], false),
        ] {
            let line = ["exotrace"].iter().chain(words);
            let refused = Cli::try_parse_from(line).expect_err("it makes no sense");
            assert_eq!(advice(&refused).is_some(), advised, "{words:?}: {refused}");
        }
    }
}

//! Advice for command lines that are refused.

use clap::CommandFactory;
use clap::error::{ContextKind, ErrorKind};

use super::Cli;

/// Returns what to do about a refused command line, if that is known. The names of a machine and of
/// a process are options' values in all commands, and plain words in other tools.
pub fn advice(error: &clap::Error) -> Option<&'static str> {
    let told = |kind| error.get(kind).map(ToString::to_string).unwrap_or_default();
    if error.kind() == ErrorKind::MissingRequiredArgument {
        let is_kernel = told(ContextKind::InvalidArg).contains("--kernel");
        return is_kernel.then_some("a guest is also named by --image FILE or --restore DIR");
    }
    if error.kind() != ErrorKind::UnknownArgument || told(ContextKind::InvalidArg).starts_with('-')
    {
        return None;
    }
    // `Usage: exotrace COMMAND ...`
    let usage = told(ContextKind::Usage);
    let cli = Cli::command();
    let command = cli.find_subcommand(usage.split_whitespace().nth(2)?)?;
    let has = |wanted| {
        let mut options = command.get_arguments().filter_map(clap::Arg::get_long);
        options.any(|option| option == wanted)
    };
    match (has("process"), has("vm")) {
        (true, _) => Some("a process is named by -p, a machine by --vm"),
        (false, true) => Some("a machine is named by --vm"),
        (false, false) => None,
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[test]
    fn names_without_their_options_are_advised() {
        let machine = Some("a machine is named by --vm");
        for (words, advised) in [
            (&["stop", "g"][..], machine),
            (&["snapshot", "folder", "g"], machine),
            (
                &["stack", "fsload"],
                Some("a process is named by -p, a machine by --vm"),
            ),
            (
                &["run", "--for", "1"],
                Some("a guest is also named by --image FILE or --restore DIR"),
            ),
            (&["rewind"], None),
            (&["stop", "--frob"], None),
            (&["doctor", "g"], None),
            (&["brew", "g"], None),
        ] {
            let line = ["exotrace"].iter().chain(words);
            let refused = Cli::try_parse_from(line).expect_err("it makes no sense");
            assert_eq!(advice(&refused), advised, "{words:?}: {refused}");
        }
    }
}

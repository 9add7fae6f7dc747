//! Completions and man pages, made from the command line's definitions.

use std::path::Path;

use clap::CommandFactory;

use crate::args::Cli;
use crate::report::{Failure, ToOutput};

/// Runs `exotrace completions`.
pub fn completions(shell: clap_complete::Shell) -> Result<(), Failure> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "exotrace", &mut script);
    std::io::Write::write_all(&mut std::io::stdout().lock(), &script).to_output()
}

/// Runs `exotrace man`: `exotrace.1`, and `exotrace-COMMAND.1` for each command that is not hidden.
pub fn man(folder: &Path) -> Result<(), Failure> {
    std::fs::create_dir_all(folder)
        .and_then(|()| clap_mangen::generate_to(Cli::command(), folder))
        .map_err(|error| Failure::new(format_args!("man pages in {}: {error}", folder.display())))
}

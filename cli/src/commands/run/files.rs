//! Files and streams of a run: the guest's serial port, and the trace.

use std::io::{self, IsTerminal, Write};
use std::path::Path;

use vmm::machine::SerialOutput;

use crate::args;
use crate::output_file::OutputFile;
use crate::report::{BesideMessages, Failure};
use crate::tail::Tail;

/// Files that the run writes.
pub struct Files {
    /// The serial port's, if it goes to one.
    pub serial: Option<OutputFile>,
    /// The trace's, if it goes to one.
    pub trace: Option<OutputFile>,
}

impl Files {
    /// Opens what `args` name; nothing is emptied yet.
    ///
    /// # Errors
    /// If a file cannot be written.
    pub fn open(args: &args::Run) -> Result<Self, Failure> {
        let serial = match Serial::of(args) {
            Serial::File(path) => Some(OutputFile::open(path)?),
            Serial::Stdio | Serial::Null => None,
        };
        let trace = args.output.as_deref().map(OutputFile::open).transpose()?;
        Ok(Self { serial, trace })
    }

    /// The run has come about: the files are its own.
    ///
    /// # Errors
    /// If one cannot be emptied.
    pub fn keep(&mut self) -> Result<(), Failure> {
        for file in [&mut self.serial, &mut self.trace].into_iter().flatten() {
            file.keep()?;
        }
        Ok(())
    }
}

/// Where the serial port goes.
pub enum Serial<'a> {
    /// Standard input and output (or error).
    Stdio,
    /// Nowhere.
    Null,
    /// A file; there is no input.
    File(&'a Path),
}

impl<'a> Serial<'a> {
    /// What `args` say.
    pub fn of(args: &'a args::Run) -> Self {
        match args.serial.to_str() {
            Some("stdio") => Self::Stdio,
            Some("null") => Self::Null,
            _ => Self::File(&args.serial),
        }
    }
}

/// A writer whose end is kept in `tail`, too, if there is one.
pub fn kept(writer: Box<dyn Write + Send>, tail: Option<&Tail>) -> Box<dyn Write + Send> {
    match tail {
        Some(tail) => Box::new(tail.tee(writer)),
        None => writer,
    }
}

/// Returns whether the serial port's output is on the screen that has this command's messages.
pub fn is_beside_messages(args: &args::Run) -> bool {
    let traced = args.is_traced() && args.output.is_none();
    let one_screen = io::stdout().is_terminal() && io::stderr().is_terminal();
    matches!(Serial::of(args), Serial::Stdio) && (traced || one_screen)
}

/// The serial port's output; the end of it is kept in `tail`, too.
///
/// # Errors
/// If this process is out of descriptors.
pub fn serial_output(
    args: &args::Run,
    file: Option<&OutputFile>,
    tail: &Tail,
) -> Result<SerialOutput, Failure> {
    let kept = |writer| kept(writer, Some(tail));
    let through = |writer: Box<dyn Write + Send>| SerialOutput::write_through(kept(writer));
    Ok(match (Serial::of(args), file) {
        (Serial::File(_), Some(file)) => SerialOutput::by_lines(kept(Box::new(file.writer()?))),
        // Standard output is the trace's.
        (Serial::Stdio, _) if args.is_traced() && args.output.is_none() => {
            through(Box::new(BesideMessages(io::stderr())))
        }
        // One screen.
        (Serial::Stdio, _) if io::stdout().is_terminal() && io::stderr().is_terminal() => {
            through(Box::new(BesideMessages(io::stdout())))
        }
        (Serial::Stdio, _) => through(Box::new(io::stdout())),
        _ => through(Box::new(io::sink())),
    })
}

//! The files and streams of a run: the guest's serial port, and the trace.

use std::io::{self, IsTerminal, Write};
use std::path::Path;

use vmm::machine::{Promptness, SerialOutput};

use crate::args;
use crate::confinement::Confinement;
use crate::output_file::OutputFile;
use crate::report::{BesideMessages, Failure};
use crate::tail::Tail;

/// The files that the run writes.
pub struct Files {
    /// The serial port's file, if any.
    pub serial: Option<OutputFile>,
    /// The trace's file, if any.
    pub trace: Option<OutputFile>,
}

impl Files {
    /// Opens the files in `args` without emptying them.
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

    /// Empties the files and keeps them for the run, which has started.
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

/// The destination of the serial port.
pub enum Serial<'a> {
    /// Standard input and output (or error).
    Stdio,
    /// Nowhere.
    Null,
    /// A file, without input.
    File(&'a Path),
}

impl<'a> Serial<'a> {
    /// Returns the destination in `args`.
    pub fn of(args: &'a args::Run) -> Self {
        match args.serial.to_str() {
            Some("stdio") => Self::Stdio,
            Some("null") => Self::Null,
            _ => Self::File(&args.serial),
        }
    }
}

/// Returns a writer whose end is also kept in `tail`, if any.
pub fn kept(writer: Box<dyn Write + Send>, tail: Option<&Tail>) -> Box<dyn Write + Send> {
    match tail {
        Some(tail) => Box::new(tail.tee(writer)),
        None => writer,
    }
}

/// Checks whether the serial port's output is on the screen with this command's messages.
pub fn is_beside_messages(args: &args::Run) -> bool {
    let traced = args.is_traced() && args.output.is_none();
    let one_screen = io::stdout().is_terminal() && io::stderr().is_terminal();
    matches!(Serial::of(args), Serial::Stdio) && (traced || one_screen)
}

/// Returns the serial port's output, written by a thread in `confinement`. Its end is also kept in
/// `tail`.
///
/// # Errors
/// If this process is out of descriptors or threads.
pub fn serial_output(
    args: &args::Run,
    file: Option<&OutputFile>,
    tail: &Tail,
    confinement: &Confinement,
) -> Result<SerialOutput, Failure> {
    let (writer, promptness): (Box<dyn Write + Send>, _) = match (Serial::of(args), file) {
        (Serial::File(_), Some(file)) => (Box::new(file.writer()?), Promptness::Lines),
        // Standard output is for the trace.
        (Serial::Stdio, _) if args.is_traced() && args.output.is_none() => {
            (Box::new(BesideMessages(io::stderr())), Promptness::Bytes)
        }
        // Both are the same screen.
        (Serial::Stdio, _) if io::stdout().is_terminal() && io::stderr().is_terminal() => {
            (Box::new(BesideMessages(io::stdout())), Promptness::Bytes)
        }
        (Serial::Stdio, _) => (Box::new(io::stdout()), Promptness::Bytes),
        _ => return Ok(SerialOutput::null().observed_by(tail.observer())),
    };
    let writer = Box::new(confinement.of_writer(writer));
    let output = SerialOutput::queued(writer, promptness);
    let output = output.map_err(|error| Failure::new(format_args!("the console: {error}")))?;
    Ok(output.observed_by(tail.observer()))
}

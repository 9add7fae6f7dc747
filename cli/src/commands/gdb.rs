//! The command `gdb`: passes the GDB remote protocol between a debugger and a running machine.

use std::io::{self, IsTerminal, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread;

use parking_lot::Mutex;

use super::remote::find;
use crate::args;
use crate::client::control::{connect, first_answer, unexpected};
use crate::named_socket::{self, ListenError};
use crate::protocol::control::{Answer, Command};
use crate::registry::Running;
use crate::report::{Failure, say};
use crate::signals::StopSignals;

/// Runs `exotrace gdb`.
pub fn gdb(args: args::Gdb) -> Result<(), Failure> {
    let machine = find(args.which)?;
    let command = Command::Gdb {
        process: args.process.clone(),
        write: args.write,
    };
    let Some(path) = args.listen else {
        if io::stdin().is_terminal() {
            return Err(Failure::new(format_args!(
                "a debugger talks to this command, not a person: give it to gdb as \
                 `target remote | exotrace gdb {}`, or use --listen",
                match &args.process {
                    Some(process) => format!("-p {process}"),
                    None => "--kernel".to_owned(),
                }
            )));
        }
        let stream = attach(&machine, &command)?;
        return pass(io::stdin(), io::stdout(), &stream);
    };
    let cannot = |error: ListenError| Failure::new(format_args!("--listen: {error}"));
    let (listener, file) = named_socket::listen(&path).map_err(cannot)?;
    let file = Arc::new(Mutex::new(Some(file)));
    let signals = StopSignals::watch()?;
    let removed = file.clone();
    // A debugger that is attached ends with the process, and the guest runs on.
    signals.on_stop(move || {
        drop(removed.lock().take());
        std::process::exit(0);
    });
    say(format_args!(
        "waiting for debuggers; in gdb: target remote {}",
        path.display()
    ));
    let served = serve(&machine, &command, || {
        let accepted = listener.accept().map_err(ListenError::at(&path));
        accepted.map(|(client, _)| client).map_err(cannot)
    });
    drop(file.lock().take());
    served
}

/// Serves one debugger after the other, until none can come any more.
fn serve(
    machine: &Running,
    command: &Command,
    next: impl Fn() -> Result<UnixStream, Failure>,
) -> Result<(), Failure> {
    loop {
        let client = next()?;
        let stream = attach(machine, command)?;
        // A debugger that breaks off leaves the next one its turn.
        if let Err(error) = client
            .try_clone()
            .map_err(Failure::from)
            .and_then(|reader| pass(reader, client, &stream))
        {
            say(error.message());
        }
    }
}

/// Attaches to the process. The machine is paused from then on.
fn attach(machine: &Running, command: &Command) -> Result<UnixStream, Failure> {
    let stream = connect(machine, command)?;
    match first_answer(machine, &stream)? {
        Answer::Debugging { pid, slide, unseen } => {
            if pid.is_none() {
                say(format_args!(
                    "the kernel runs {slide:#x} bytes above its file; with a file that has types: symbol-file vmlinux -o {slide:#x}"
                ));
            }
            unseen.iter().for_each(say);
        }
        other => return Err(unexpected(machine, &other).into()),
    }
    Ok(stream)
}

/// Passes bytes both ways until the machine has closed its side, or the debugger has.
fn pass(
    mut debugger: impl Read + Send + 'static,
    mut out: impl Write,
    machine: &UnixStream,
) -> Result<(), Failure> {
    let (mut to, mut from) = (machine.try_clone()?, machine.try_clone()?);
    // It ends with the debugger's input, or with this process.
    thread::spawn(move || {
        let _ = io::copy(&mut debugger, &mut to);
        let _ = to.shutdown(Shutdown::Write);
    });
    let mut piece = vec![0; 1 << 16];
    loop {
        let read = from.read(&mut piece)?;
        let Some(bytes) = piece.get(..read).filter(|bytes| !bytes.is_empty()) else {
            return Ok(());
        };
        out.write_all(bytes)?;
        out.flush()?;
    }
}

//! The command `exotrace mount`: a running machine's trace devices as files, until either side
//! ends.

use std::time::Duration;

use super::remote::find;
use crate::args;
use crate::client::mount::{Mounted, Sockets};
use crate::client::ports::Client;
use crate::protocol::end::MachineEnd;
use crate::protocol::ports::{Target, Waited};
use crate::report::{Failure, say};
use crate::server::ports::server::FRAMED;
use crate::signals::StopSignals;

/// The interval of checks for a requested end.
const LOOK_INTERVAL: Duration = Duration::from_millis(50);
/// The time limit of one request to the machine for its end.
const QUESTION: Duration = Duration::from_secs(1);

/// Runs the command.
///
/// # Errors
/// If nothing can be mounted there, no machine runs, or the machine crashes or is killed.
pub fn mount(args: args::Mount) -> Result<(), Failure> {
    let machine = find(args.which)?;
    let sockets = Sockets {
        name: machine.name.to_string(),
        ports: machine.beside(FRAMED),
        dt: machine.dt(),
    };
    let mut watched = Client::open(&sockets.ports, Target::Stat)?;
    let signals = StopSignals::watch()?;
    let mounted = Mounted::start(&args.folder, sockets)?;
    say(format_args!(
        "{}: the trace devices of {}; ends with Ctrl-C, umount or the machine",
        args.folder.display(),
        machine.name
    ));
    // On a thread of its own, which ends with this process: a stopped machine does not answer.
    let watching = std::thread::Builder::new()
        .name("machine".into())
        .spawn(move || {
            while watched.wait(QUESTION)? != Waited::Ended {}
            watched.end()
        })?;
    while !mounted.has_ended() && !signals.arrived() {
        if watching.is_finished() {
            drop(mounted);
            let end = watching.join().unwrap_or(Ok(None))?;
            return MachineEnd::report(end.as_ref());
        }
        std::thread::sleep(LOOK_INTERVAL);
    }
    Ok(())
}

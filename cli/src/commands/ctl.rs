//! The command `exotrace ctl`: one command to a device of a running machine.

use std::io::Write;

use super::remote::find;
use crate::args;
use crate::client::ports::Client;
use crate::output_file::trace_output;
use crate::protocol::ports::Target;
use crate::report::{Failure, ToOutput};
use crate::server::ports::server::FRAMED;

/// Runs the command.
///
/// # Errors
/// If the device refuses, or there is none.
pub fn ctl(args: args::Ctl) -> Result<(), Failure> {
    let machine = find(args.which)?;
    let mut client = Client::open(&machine.beside(FRAMED), Target::Control(args.port))?;
    if args.command.is_empty() {
        let text = client.read(u32::MAX)?;
        let mut out = trace_output(None)?;
        return out.write_all(&text).and_then(|()| out.flush()).to_output();
    }
    Ok(client.command(args.command.join(" ").as_bytes())?)
}

//! The commands, one file each.

mod ctl;
#[cfg(feature = "guests")]
mod demo;
mod doctor;
#[cfg(feature = "export")]
mod exporting;
#[cfg(not(feature = "export"))]
#[path = "exporting_none.rs"]
mod exporting;
mod gdb;
mod generate;
mod guest;
#[cfg(feature = "guests")]
mod guest_files;
mod image;
mod inspect;
mod mount;
mod read;
mod remote;
mod run;
mod script;
pub mod script_output;
mod top;
mod trace;
pub mod trace_output;

use crate::args::Command;
use crate::report::Failure;

/// Executes the command.
///
/// # Errors
/// The message for the user.
pub fn execute(command: Command) -> Result<(), Failure> {
    match command {
        Command::Doctor(args) => doctor::doctor(&args),
        Command::Run(args) => run::run(*args),
        #[cfg(feature = "guests")]
        Command::Demo(args) => demo::demo(&args),
        #[cfg(feature = "guests")]
        Command::Guest(args) => guest_files::guest_files(&args),
        Command::Image(args) => image::image(&args),
        Command::Snapshot(args) => remote::snapshot(args),
        Command::Rewind(args) => remote::rewind(args),
        Command::Stop(args) => remote::stop(args),
        Command::Stat(args) => remote::stat(args),
        Command::Vms(args) => remote::vms(&args),
        Command::Ps(args) => inspect::ps(args),
        Command::Maps(args) => inspect::maps(args),
        Command::Sym(args) => inspect::sym(args),
        Command::Stack(args) => inspect::stack(args),
        Command::Gdb(args) => gdb::gdb(args),
        Command::List(args) => trace::list(args),
        Command::Scripts(args) => script::scripts(&args),
        Command::Trace(args) => trace::trace(*args),
        Command::Top(args) => top::top(args),
        Command::Ctl(args) => ctl::ctl(args),
        Command::Read(args) => read::read(*args),
        Command::Mount(args) => mount::mount(args),
        Command::ResumeGuard => Ok(crate::qemu::run_guard()?),
        Command::Completions { shell } => generate::completions(shell),
        Command::Man { folder } => generate::man(&folder),
    }
}

/// Returns the text form of a machine's answer, if it has one.
#[cfg(feature = "test-utils")]
pub(crate) fn shown(answer: &crate::protocol::control::Answer) -> Option<String> {
    use crate::protocol::control::Answer;
    Some(match answer {
        Answer::Info(info) => remote::info_line(info),
        Answer::Stat(stat) => remote::stat_text(stat),
        Answer::Ps(found) => inspect::ps_text(&found.processes, true),
        Answer::Maps(found) => inspect::maps_text(&found.mappings),
        Answer::Sym(found) => inspect::symbols_text(&found.symbols),
        Answer::Stack(found) => inspect::stacks_text(&found.threads),
        _ => return None,
    })
}

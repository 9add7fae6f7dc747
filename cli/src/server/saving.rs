//! Saving the machine for a client, which sees the progress and may disconnect.

use std::ops::ControlFlow;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use vmm::snapshot::{self, Files, SaveError, Saved, Stage};

use crate::history::KeepError;
use crate::protocol::control::Answer;
use crate::protocol::error::{ErrorKind, RequestError};
use crate::server::control::send;
use crate::vm::Vm;

/// The time between two progress messages.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(100);

/// A machine that was written.
pub struct Written {
    /// The time that the guest was paused for it.
    pub paused: Duration,
    /// The age of the moment at the request.
    pub ago: Duration,
}

/// Saves the machine to the files that a client has sent: as it is, or as it was `ago`. Ends early
/// if the client disconnects or the run ends; the files are then of no use.
///
/// # Errors
/// If the run ends, the client disconnects, the host does not write the files, or there is no
/// history to go back in.
pub fn save(
    vm: &Vm,
    descriptors: Vec<OwnedFd>,
    ago: Option<Duration>,
    client: &UnixStream,
) -> Result<Written, RequestError> {
    let ended = || vm.machine.wait(Some(Duration::ZERO));
    if let Some(end) = ended() {
        return Err(RequestError::new(
            ErrorKind::Ended,
            format_args!("cannot be saved any more: {end}"),
        ));
    }
    let files = Files::new(descriptors);
    let files = files.map_err(|error| RequestError::new(ErrorKind::Invalid, error))?;
    let mut last = Instant::now();
    let mut watch = |stage| {
        let (done, total) = match stage {
            Stage::Writing { done, total } | Stage::Hashing { done, total } => (done, total),
            Stage::Paused => return ControlFlow::Continue(()),
        };
        if ended().is_some() || has_gone(client) {
            return ControlFlow::Break(());
        }
        if last.elapsed() >= PROGRESS_INTERVAL {
            last = Instant::now();
            let hashing = matches!(stage, Stage::Hashing { .. });
            let progress = Answer::Saving {
                hashing,
                done,
                total,
            };
            if send(client, &progress).is_err() {
                return ControlFlow::Break(());
            }
        }
        ControlFlow::Continue(())
    };
    let asked = Instant::now();
    let kept = match ago {
        Some(ago) => vm.keeper.past(ago).map(Some),
        None => vm.present().map_err(KeepError::from),
    };
    let kept = kept.map_err(|error| RequestError::new(ErrorKind::Host, error))?;
    let written = match kept {
        Some(kept) => kept.write(files, &mut watch).map(|()| Written {
            paused: kept.info().paused,
            ago: asked.saturating_duration_since(kept.info().at),
        }),
        None => {
            let (kvm, info) = (&vm.host.kvm, vm.snapshot_info());
            let saved = snapshot::write(kvm, &vm.machine, &info, files, &mut watch);
            saved.map(|Saved { paused }| Written {
                paused,
                ago: Duration::ZERO,
            })
        }
    };
    written.map_err(|error| match (&error, ended()) {
        (SaveError::BrokenOff, Some(end)) => RequestError::new(
            ErrorKind::Ended,
            format_args!("ended while it was saved: {end}"),
        ),
        (SaveError::BrokenOff, None) => RequestError::new(ErrorKind::Other, "the client has gone"),
        _ => RequestError::new(ErrorKind::Host, error),
    })
}

/// Checks whether the peer has closed a connection.
fn has_gone(client: &UnixStream) -> bool {
    let mut watched = [PollFd::new(client, PollFlags::RDHUP)];
    let gone = PollFlags::HUP | PollFlags::RDHUP | PollFlags::ERR;
    let looked = poll(&mut watched, Some(&Timespec::default()));
    let [watched] = watched;
    looked.is_ok() && watched.revents().intersects(gone)
}

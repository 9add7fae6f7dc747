//! The thread that writes kept moments to the folder for snapshots, one after the other.

use std::collections::BTreeSet;
use std::io;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

use vmm::snapshot::{Kept, NewFolder};

use super::KeepError;
use crate::report::say;

/// The maximum number of snapshots that wait: each keeps its pages in memory.
const MOST_WAITING: usize = 4;
/// The maximum number of snapshots of one name in a folder.
const MOST_OF_A_NAME: usize = 1000;

/// The thread. Dropping it waits until everything is written.
pub(super) struct Writer {
    work: Option<Sender<(Kept, PathBuf)>>,
    /// The folders that wait or are being written.
    waiting: Arc<Mutex<BTreeSet<PathBuf>>>,
    thread: Option<JoinHandle<()>>,
}

impl Writer {
    pub(super) fn start() -> io::Result<Self> {
        let (work, arriving) = channel();
        let waiting = Arc::<Mutex<BTreeSet<PathBuf>>>::default();
        let done = waiting.clone();
        let thread = std::thread::Builder::new().name("snapshots".into());
        let thread = thread.spawn(move || serve(&arriving, &done))?;
        Ok(Self {
            work: Some(work),
            waiting,
            thread: Some(thread),
        })
    }

    /// Checks whether one more may wait.
    ///
    /// # Errors
    /// If not.
    pub(super) fn has_room(&self) -> Result<(), KeepError> {
        let waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        match waiting.len() {
            waiting if waiting < MOST_WAITING => Ok(()),
            waiting => Err(KeepError::Behind(waiting)),
        }
    }

    /// Has a moment written to `name` in `folder`, or with a number behind the name if that is in
    /// use. Returns the folder of the snapshot.
    ///
    /// # Errors
    /// If too many have that name.
    pub(super) fn write(
        &self,
        folder: &Path,
        name: &str,
        kept: Kept,
    ) -> Result<PathBuf, KeepError> {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        let path = free_name(folder, name, |path| waiting.contains(path))?;
        waiting.insert(path.clone());
        drop(waiting);
        let work = self.work.as_ref();
        let sent = work.is_some_and(|work| work.send((kept, path.clone())).is_ok());
        match sent {
            true => Ok(path),
            false => Err(KeepError::Behind(0)),
        }
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        drop(self.work.take());
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            log::error!("the thread that writes snapshots panicked");
        }
    }
}

fn serve(arriving: &Receiver<(Kept, PathBuf)>, waiting: &Mutex<BTreeSet<PathBuf>>) {
    for (kept, path) in arriving {
        let began = Instant::now();
        match write(&kept, &path) {
            Ok(()) => say(format_args!(
                "snapshot {}: written in {:.1} s",
                path.display(),
                began.elapsed().as_secs_f64()
            )),
            Err(error) => say(format_args!(
                "snapshot {}: not written: {}",
                path.display(),
                error
            )),
        }
        drop(kept);
        let mut waiting = waiting.lock().unwrap_or_else(PoisonError::into_inner);
        waiting.remove(&path);
    }
}

/// Writes a moment to the new folder `path`.
///
/// # Errors
/// If the folder exists or cannot be written.
pub fn write(kept: &Kept, path: &Path) -> Result<(), KeepError> {
    let mut folder = NewFolder::create(path)?;
    folder.add_overlays(kept.overlays())?;
    kept.write(folder.files()?, &mut |_| ControlFlow::Continue(()))?;
    Ok(folder.finish()?)
}

/// Returns the path of a new snapshot in `folder`: `name`, or with a number behind it. `is_used`
/// tells those that are not there yet.
///
/// # Errors
/// If too many have that name.
pub(super) fn free_name(
    folder: &Path,
    name: &str,
    is_used: impl Fn(&Path) -> bool,
) -> Result<PathBuf, KeepError> {
    let numbered = (2..=MOST_OF_A_NAME).map(|number| format!("{name}-{number}"));
    let names = std::iter::once(name.to_owned()).chain(numbered);
    let mut paths = names.map(|name| folder.join(name));
    let free = paths.find(|path| !path.exists() && !is_used(path));
    free.ok_or_else(|| KeepError::TooMany {
        folder: folder.to_path_buf(),
        count: MOST_OF_A_NAME,
    })
}

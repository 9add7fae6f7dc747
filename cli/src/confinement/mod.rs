//! What a machine's process gives up before a guest runs in it, so that who breaks out of the guest gets nowhere.
//!
//! The whole process gives up privileges by what it executes, core dumps, and being read by other processes of its user
//! ([`privileges`]). Each thread then [enters](Confinement::enter) its own confinement before it does anything for the guest:
//! no capabilities, no files but those that are open ([`reach`], Landlock), and only the system calls that its kind of thread needs
//! ([`calls`], seccomp). Threads inherit that from whoever makes them: those of clients come from the main thread, which enters last,
//! when all files are open.
//!
//! A host whose kernel lacks a wall runs machines all the same, and the user is told once; `--confine strict` refuses. Of the
//! guest's memory nothing is dumped in any case (`vmm`). Sources: prctl(2), seccomp(2), landlock(7), capabilities(7).

mod calls;
mod filter;
mod privileges;
mod reach;

use clap::ValueEnum;
use std::io;
use std::sync::Arc;

pub use calls::{EVERY_THREAD, Kind};
pub use privileges::become_user;
pub use reach::Reach;

use filter::Filters;

/// A process or thread cannot be confined.
#[derive(Debug, thiserror::Error)]
pub enum ConfinementError {
    /// The host's kernel refuses.
    #[error("confinement: {what}: {source}; `--confine off` runs without")]
    Refused {
        /// What was asked of it.
        what: &'static str,
        /// What it said.
        source: io::Error,
    },
    /// It lacks what `--confine strict` must have.
    #[error(
        "--confine strict: this host's kernel lacks {missing}; `--confine on` runs with what it has"
    )]
    Missing {
        /// What it lacks.
        missing: String,
    },
    /// A filter cannot be made of the list.
    #[error("confinement: the filter of system calls: {0}")]
    Filter(#[from] seccompiler::BackendError),
    /// The thread.
    #[error("confinement: {0}")]
    Thread(#[from] io::Error),
}

fn refused(what: &'static str) -> impl FnOnce(io::Error) -> ConfinementError {
    move |source| ConfinementError::Refused { what, source }
}

/// The walls that a host's kernel has, as tried.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct Walls {
    /// Filters of system calls.
    pub seccomp: bool,
    /// Files by rules.
    pub landlock: bool,
}

impl Walls {
    /// Tries them, on a thread that goes.
    pub fn of_host() -> Self {
        let tried = std::thread::Builder::new()
            .name("walls".into())
            .spawn(|| Self {
                landlock: reach::restrict(&Reach::default()).unwrap_or(false),
                seccomp: filter::of(Kind::Service, false)
                    .is_ok_and(|filters| filter::apply(&filters).is_ok()),
            });
        let tried = tried.ok().and_then(|thread| thread.join().ok());
        tried.unwrap_or(Self {
            seccomp: false,
            landlock: false,
        })
    }

    /// Returns the names of those that are not there, and what that means.
    pub fn missing(self) -> Option<&'static str> {
        match (self.seccomp, self.landlock) {
            (true, true) => None,
            (true, false) => Some("Landlock (files are closed to it by their permissions alone)"),
            (false, true) => Some("seccomp filters (it may make any system call)"),
            (false, false) => {
                Some("seccomp filters and Landlock (it may do whatever its user may)")
            }
        }
    }
}

/// The confinement of a run. Cloning shares it.
#[derive(Clone)]
pub struct Confinement(Option<Arc<Inner>>);

struct Inner {
    walls: Walls,
    /// By [`Kind::ALL`].
    filters: Vec<Filters>,
}

impl Confinement {
    /// Returns one that confines nothing.
    pub fn none() -> Self {
        Self(None)
    }

    /// Confines this process as far as it needs not yet open files, and prepares the rest. Tells the user what the host lacks.
    ///
    /// # Errors
    /// If the kernel refuses, or `strict` finds something missing.
    pub fn begin(mode: Confine) -> Result<Self, ConfinementError> {
        if mode == Confine::Off {
            return Ok(Self::none());
        }
        privileges::give_up()
            .map_err(|(what, source)| ConfinementError::Refused { what, source })?;
        let walls = Walls::of_host();
        let strict = mode == Confine::Strict;
        match walls.missing() {
            Some(missing) if strict => {
                let missing = missing.to_owned();
                return Err(ConfinementError::Missing { missing });
            }
            Some(missing) => crate::report::say(format_args!(
                "this process is confined without {missing}: the host's kernel does not have it"
            )),
            None => {}
        }
        let filters = Kind::ALL.iter().map(|kind| filter::of(*kind, strict));
        let filters = filters.collect::<Result<_, _>>()?;
        Ok(Self(Some(Arc::new(Inner { walls, filters }))))
    }

    /// Confines this thread as one of its kind, which opens no files.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn enter(&self, kind: Kind) -> Result<(), ConfinementError> {
        self.enter_within(kind, &Reach::default())
    }

    /// The same for a thread that opens the files of `reach`.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn enter_within(&self, kind: Kind, reach: &Reach) -> Result<(), ConfinementError> {
        let Some(inner) = &self.0 else {
            return Ok(());
        };
        if inner.walls.landlock {
            reach::restrict(reach).map_err(refused("Landlock"))?;
        }
        privileges::drop_capabilities().map_err(refused("capset"))?;
        let number = Kind::ALL.iter().position(|other| *other == kind);
        if inner.walls.seccomp
            && let Some(filters) = number.and_then(|number| inner.filters.get(number))
        {
            filter::apply(filters).map_err(refused("seccomp"))?;
        }
        Ok(())
    }

    /// Returns a writer whose thread is confined as a [writer](Kind::Writer) when it first writes.
    pub fn of_writer<W: io::Write + Send>(&self, writer: W) -> impl io::Write + Send + use<W> {
        ConfinedWriter {
            writer,
            confinement: Some(self.clone()),
        }
    }
}

/// See [`Confinement::of_writer`].
struct ConfinedWriter<W> {
    writer: W,
    /// Until it is entered.
    confinement: Option<Confinement>,
}

impl<W: io::Write> io::Write for ConfinedWriter<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if let Some(confinement) = self.confinement.take() {
            confinement.enter(Kind::Writer).map_err(io::Error::other)?;
        }
        self.writer.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.writer.flush()
    }
}

#[cfg(test)]
mod tests;

/// How a machine's process is confined.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Confine {
    /// As far as the host can; what is refused fails.
    On,
    /// Wholly, or it does not run; what is refused ends it.
    Strict,
    /// Not at all.
    Off,
}

//! The rights that a machine's process gives up before a guest runs in it, so that an escape from
//! the guest gains nothing.
//!
//! The whole process gives up gaining privileges by execution, core dumps, and being read by other
//! processes of its user ([`privileges`]). Each thread then [enters](Confinement::enter) its own
//! confinement before it does anything for the guest. That leaves no capabilities, no files but
//! those that are open ([`reach`], Landlock), and only the system calls of its kind of thread
//! ([`calls`], seccomp). The signals that end a run are for threads that may handle them
//! ([`stop_signals`]). Threads inherit the confinement of their creator. Client threads come from
//! the main thread, which enters last, when all files are open.
//!
//! A host whose kernel lacks a wall runs machines all the same, and the user is warned once;
//! `--confine strict` refuses. The guest's memory is never dumped in any case (`vmm`). Sources:
//! prctl(2), seccomp(2), landlock(7), capabilities(7).

mod calls;
mod filter;
mod privileges;
mod reach;
mod stop_signals;

use clap::ValueEnum;
use std::fmt;
use std::io;
use std::sync::Arc;

pub use calls::{EVERY_THREAD, Kind};
pub use privileges::become_user;
pub use reach::Reach;
pub use stop_signals::STOP_SIGNALS;

use filter::Filters;

/// A process or thread cannot be confined.
#[derive(Debug, thiserror::Error)]
pub enum ConfinementError {
    /// The host's kernel refuses.
    #[error("confinement: {what}: {source}; `--confine off` runs without")]
    Refused {
        /// The request.
        what: &'static str,
        /// The kernel's error.
        source: io::Error,
    },
    /// The kernel lacks something that `--confine strict` requires.
    #[error("--confine strict: this host's kernel lacks {missing}; `--confine on` runs without")]
    Missing {
        /// The missing feature.
        missing: String,
    },
    /// The list cannot be compiled to a filter.
    #[error("confinement: the filter of system calls: {0}")]
    Filter(#[from] seccompiler::BackendError),
    /// The thread cannot be made.
    #[error("confinement: {0}")]
    Thread(#[from] io::Error),
}

fn refused(what: &'static str) -> impl FnOnce(io::Error) -> ConfinementError {
    move |source| ConfinementError::Refused { what, source }
}

/// The walls that a host's kernel has, found by trying.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct Walls {
    /// Set if system calls can be filtered.
    pub seccomp: bool,
    /// Set if files can be restricted by rules.
    pub landlock: bool,
}

impl Walls {
    /// Tries them, on a thread that ends.
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

    /// Returns the names of the missing ones and the consequence.
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

impl fmt::Debug for Confinement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Confinement")
            .field("confines", &self.0.is_some())
            .finish_non_exhaustive()
    }
}

struct Inner {
    walls: Walls,
    /// The filters, indexed as [`Kind::ALL`].
    filters: Vec<Filters>,
}

impl Confinement {
    /// Returns a confinement without restrictions.
    pub fn none() -> Self {
        Self(None)
    }

    /// Confines this process as far as no files remain to be opened, and prepares the rest. Warns
    /// the user of the host's gaps.
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
        settle_allocator();
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

    /// Confines this thread as one of its kind, which opens the files of `reach`.
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
        if !matches!(kind, Kind::Signals | Kind::Service) {
            stop_signals::leave_to_others().map_err(refused("pthread_sigmask"))?;
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

/// A writer of [`Confinement::of_writer`].
struct ConfinedWriter<W> {
    writer: W,
    /// The confinement until it is entered.
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

/// Makes the C library decide whether threads give memory back.
///
/// It reads `/proc/sys/vm/overcommit_memory` for that when a thread first frees much of it
/// (`check_may_shrink_heap` of glibc), which a confined thread must not.
fn settle_allocator() {
    /// Blocks that are not mappings of their own, and too much to keep.
    const BLOCKS: usize = 16;
    const BLOCK: usize = 100 << 10;
    let freeing = std::thread::Builder::new().spawn(|| {
        let blocks: Vec<Vec<u8>> = (0..BLOCKS).map(|_| vec![1; BLOCK]).collect();
        drop(std::hint::black_box(blocks));
    });
    // Without it a confined thread may be refused the file, which does no harm.
    if let Ok(freeing) = freeing {
        let _ = freeing.join();
    }
}

#[cfg(test)]
mod tests;

/// The confinement of a machine's process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Confine {
    /// As far as the host can; a forbidden call fails.
    On,
    /// Complete, or the machine does not run; a forbidden call ends it.
    Strict,
    /// No confinement.
    Off,
}

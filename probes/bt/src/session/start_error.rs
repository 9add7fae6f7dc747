//! The reasons why a script does not start.

use probes::engine::{EnableError, SessionError};

use crate::ast::Iteration;

/// The reason why a script cannot be started.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The rings could not be made.
    #[error(transparent)]
    Rings(#[from] SessionError),
    /// A probe could not be enabled.
    #[error(transparent)]
    Enable(#[from] EnableError),
    /// A module to come cannot be seen.
    #[error("{pattern}: its module is not loaded, and the kernel does not report new ones")]
    Modules {
        /// The pattern that names it.
        pattern: String,
    },
    /// A file to come cannot be seen.
    #[error("{pattern}: no process has it mapped, and the kernel does not report new ones")]
    Files {
        /// The pattern that names it.
        pattern: String,
    },
    /// The guest cannot be iterated over.
    #[error("{}: {reason}", iteration.name())]
    Iteration {
        /// The iteration.
        iteration: Iteration,
        /// The reason.
        reason: String,
    },
}

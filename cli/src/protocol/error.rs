//! The errors of requests to a VM, as they go over its sockets and to programs that embed it.
//!
//! The message is for the user. Programs decide by the kind, whose names do not change.

use std::fmt;

use bt::session::StartError;
use introspect::system::Unavailable;
use probes::engine::{EnableError, SessionError};
use probes::kernel_view::KernelViewError;
use probes::name::PatternError;
use probes::provider::NotFound;
use serde::{Deserialize, Serialize};

use super::trace::MOST_PROBES;

/// The kind of an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum ErrorKind {
    /// The request is malformed, or of another version.
    Invalid,
    /// The caller has no right to it.
    NotPermitted,
    /// Another request takes too long.
    Busy,
    /// The run has ended.
    Ended,
    /// The guest's kernel has not booted far enough, or is not known.
    NoKernel,
    /// The kernel's structures cannot be read.
    Unreadable,
    /// No probe, function or symbol matches.
    NoMatch,
    /// No process matches, or several do.
    NoProcess,
    /// The script has errors; the message shows them with their places.
    Script,
    /// The request exceeds a limit.
    Limit,
    /// A probe cannot be enabled.
    NotEnabled,
    /// The host refused something, such as to write a file.
    Host,
    /// A fault in exotrace.
    Internal,
    /// A kind that this version does not know.
    #[serde(other)]
    Other,
}

/// An error of a request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{message}")]
pub struct RequestError {
    /// The kind, for programs.
    pub kind: ErrorKind,
    /// The reason, for the user.
    pub message: String,
}

impl RequestError {
    /// Returns an error of `kind` with the text of `reason`.
    pub fn new(kind: ErrorKind, reason: impl fmt::Display) -> Self {
        let message = reason.to_string();
        Self { kind, message }
    }

    /// Checks that a request for `count` probes is not beyond [`MOST_PROBES`].
    ///
    /// # Errors
    /// If it is.
    pub(crate) fn limit_probes(count: usize) -> Result<(), Self> {
        if count <= MOST_PROBES {
            return Ok(());
        }
        let why =
            format_args!("{count} probes: at most {MOST_PROBES} are traced at once; name fewer");
        Err(Self::new(ErrorKind::Limit, why))
    }
}

/// Defines the kind of another error.
macro_rules! kind {
    ($($error:ty => $kind:ident,)*) => {
        $(
            impl From<$error> for RequestError {
                fn from(error: $error) -> Self {
                    Self::new(ErrorKind::$kind, error)
                }
            }
        )*
    };
}

kind! {
    PatternError => Invalid,
    NotFound => NoMatch,
    KernelViewError => NoKernel,
    Unavailable => Unreadable,
    EnableError => NotEnabled,
}

impl From<StartError> for RequestError {
    fn from(error: StartError) -> Self {
        match error {
            StartError::Rings(error) => error.into(),
            StartError::Enable(error) => error.into(),
            StartError::Modules { .. } | StartError::Files { .. } => {
                Self::new(ErrorKind::NoMatch, error)
            }
            StartError::Iteration { .. } => Self::new(ErrorKind::Unreadable, error),
        }
    }
}

impl From<SessionError> for RequestError {
    fn from(error: SessionError) -> Self {
        let kind = match error {
            SessionError::Ring(_) | SessionError::Memory(_) => ErrorKind::Limit,
            SessionError::Descriptor(_) => ErrorKind::Host,
        };
        Self::new(kind, error)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::protocol::control::{Answer, decode};

    #[test]
    fn a_client_takes_kinds_that_it_knows_and_others() {
        for (kind, expected) in [
            ("no-match", ErrorKind::NoMatch),
            ("no-kernel", ErrorKind::NoKernel),
            ("of-a-later-version", ErrorKind::Other),
        ] {
            let line = format!(
                "{{\"version\":2,\"answer\":\"error\",\"kind\":\"{kind}\",\"message\":\"why\"}}\n"
            );
            let answer = decode::<Answer>(&line).unwrap();
            assert_eq!(answer, Answer::Error(RequestError::new(expected, "why")));
        }
    }
}

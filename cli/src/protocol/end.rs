//! The end of a machine, as its clients hear of it.

use serde::{Deserialize, Serialize};

/// The end of a machine, as reported to its clients.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MachineEnd {
    /// The reason, with its place where that is known.
    pub message: String,
    /// Whether the guest ended by its own will, or ours.
    pub is_orderly: bool,
}

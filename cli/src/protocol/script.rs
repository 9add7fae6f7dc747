//! What is asked of a script: its text, its arguments, whose hits, and the form of its output.

use crate::protocol::end::MachineEnd;
use crate::protocol::trace::LONGEST_LINE;
use probes::bt::ast::Dialect;
use probes::bt::compile::Options;
use probes::engine::Filter;
use probes::probe::Probe;
use serde::{Deserialize, Serialize};

use crate::protocol::trace;
use crate::protocol::trace::Request;

/// The form of a script's output.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Default)]
#[serde(rename_all = "kebab-case")]
pub enum Form {
    /// As bt(5) and bpftrace write it.
    #[default]
    Text,
    /// One JSON object a line.
    Json,
    /// Maps with stacks as lines for flame graphs.
    Collapsed,
}

/// A script, as the command line and the control socket describe it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Default)]
pub struct ScriptRequest {
    /// The text.
    pub text: String,
    /// What it is called in messages.
    pub file: String,
    /// `$1` and so on.
    pub arguments: Vec<String>,
    /// OpenBSD's bt(5), oddities included.
    pub strict: bool,
    /// Texts of translators and structures, with their files' names.
    pub library: Vec<(String, String)>,
    /// Most bytes of a string that is read from the guest; 0 for the usual.
    pub longest_text: usize,
    /// Whose hits: its probes are not looked at.
    pub whose: Request,
    /// The form of the output.
    pub form: Form,
}

impl ScriptRequest {
    /// The language.
    pub fn dialect(&self) -> Dialect {
        match self.strict {
            true => Dialect::Strict,
            false => Dialect::Normal,
        }
    }

    /// How it is compiled.
    pub fn options(&self) -> Options {
        let usual = Options::default();
        Options {
            dialect: self.dialect(),
            arguments: self
                .arguments
                .iter()
                .map(|a| a.clone().into_bytes())
                .collect(),
            longest_text: match self.longest_text {
                0 => usual.longest_text,
                length => length,
            },
            ..usual
        }
    }

    /// Whose hits of a probe are wanted.
    pub fn filter(&self, probe: &Probe) -> Filter {
        self.whose.filter(trace::process(probe))
    }
}

/// Counts of a script, for `-v`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Default)]
pub struct Counts {
    /// Hits of its probes.
    pub hits: u64,
    /// Those that predicates and `-p` left out.
    pub filtered: u64,
    /// Those that a rule ran at.
    pub ran: u64,
    /// What was put out and had no room.
    pub lost_output: u64,
    /// Values that found no room in a map.
    pub lost_values: u64,
    /// Divisions by zero.
    pub divisions_by_zero: u64,
    /// Memory that was not there.
    pub failed_reads: u64,
    /// Runs that were ended as they took too many steps.
    pub endless: u64,
    /// Ticks of timers that came too late and count as one with those before, of all traces of the machine together.
    pub joined_ticks: u64,
    /// Hits of each probe.
    pub each: Vec<(String, u64)>,
    /// Probes with places in programs that stand no more: see [`probes::engine::ProbeStats::given_up`].
    pub given_up: Vec<String>,
}

/// Most bytes of output in one line.
pub const PIECE: usize = 1 << 20;

/// What a byte takes in JSON at most: `\u001b`.
const ESCAPED: usize = 6;

// A map may have more to show than the longest line holds: it comes in several.
const _: () = assert!((ESCAPED * 2 * PIECE) as u64 <= LONGEST_LINE);

/// A line of the stream.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "line", rename_all = "kebab-case")]
pub enum Line {
    /// The first.
    Begin {
        /// Names of the probes that are enabled.
        probes: Vec<String>,
        /// Probes of patterns that cannot be traced, and why.
        skipped: Vec<String>,
    },
    /// What was put out.
    Output {
        /// For standard output. What is no UTF-8 is given as its bytes.
        #[serde(default, skip_serializing_if = "Text::is_empty")]
        out: Text,
        /// For standard error.
        #[serde(default, skip_serializing_if = "Text::is_empty")]
        err: Text,
    },
    /// The last.
    End {
        /// What it came to.
        counts: Counts,
        /// Why the machine has ended, if it has.
        machine: Option<MachineEnd>,
    },
    /// Nothing is traced.
    Refused {
        /// What is wrong, as it is to be shown.
        message: String,
    },
}

/// Bytes that mostly are text.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Text {
    /// UTF-8.
    Text(String),
    /// Something else: a guest says what it likes.
    Bytes(Vec<u8>),
}

impl Default for Text {
    fn default() -> Self {
        Self::Text(String::new())
    }
}

impl Text {
    pub fn is_empty(&self) -> bool {
        self.as_bytes().is_empty()
    }

    /// The bytes.
    pub fn as_bytes(&self) -> &[u8] {
        match self {
            Self::Text(text) => text.as_bytes(),
            Self::Bytes(bytes) => bytes,
        }
    }
}

impl From<Vec<u8>> for Text {
    fn from(bytes: Vec<u8>) -> Self {
        String::from_utf8(bytes).map_or_else(|error| Self::Bytes(error.into_bytes()), Self::Text)
    }
}

#[cfg(test)]
mod tests {
    use probes::engine::Match;
    use probes::name::ProbeName;
    use probes::probe::{StaticText, Target};

    use super::*;

    #[test]
    fn a_static_probe_of_one_process_is_of_no_other() {
        let request = ScriptRequest::default();
        for (process, expected) in [(None, Match::Any), (Some(22), Match::In(vec![22]))] {
            let probe = Probe {
                name: ProbeName::new("app22", "app", "main", "started"),
                signature: None,
                target: Target::Static(StaticText {
                    sites: Vec::new(),
                    semaphores: Vec::new(),
                    process,
                }),
            };
            assert_eq!(request.filter(&probe).pids, expected, "{process:?}");
        }
    }
}

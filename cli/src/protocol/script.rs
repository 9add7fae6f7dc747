//! The request for a script, and the lines of the stream that carries its output.

use crate::protocol::cost::{Cost, Unwatched};
use crate::protocol::end::MachineEnd;
use crate::protocol::error::RequestError;
use crate::protocol::trace::LONGEST_LINE;
use bt::ast::Dialect;
use bt::compile::Options;
use probes::engine::Filter;
use probes::probe::Probe;
use serde::{Deserialize, Serialize};

use crate::protocol::trace;
use crate::protocol::trace::Request;

/// The form of a script's output.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Default)]
#[serde(rename_all = "kebab-case")]
pub enum Form {
    /// The text that bt(5) and bpftrace write.
    #[default]
    Text,
    /// One JSON object per line.
    Json,
    /// Maps with stacks as folded lines, for flame graphs.
    Collapsed,
}

/// A script as the command line and the control socket describe it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Default)]
pub struct ScriptRequest {
    /// The script's text.
    pub text: String,
    /// The name of the script in messages.
    pub file: String,
    /// The arguments `$1` and so on.
    pub arguments: Vec<String>,
    /// Set for OpenBSD's bt(5), oddities included.
    pub strict: bool,
    /// The texts of translators and structures, with the names of their files.
    pub library: Vec<(String, String)>,
    /// The largest number of bytes of a string read from the guest; 0 for the default.
    pub longest_text: usize,
    /// The filter of hits, and the budget. The probes of this request are ignored.
    pub whose: Request,
    /// The form of the output.
    pub form: Form,
}

impl ScriptRequest {
    /// Returns the request of a script whose faults are shown as of the source `file`.
    pub fn of(text: String, file: &str) -> Self {
        Self {
            text,
            file: file.to_owned(),
            ..Self::default()
        }
    }

    /// Returns the dialect of the language.
    pub fn dialect(&self) -> Dialect {
        match self.strict {
            true => Dialect::Strict,
            false => Dialect::Normal,
        }
    }

    /// Returns the options of the compiler.
    pub fn options(&self) -> Options {
        let usual = Options::default();
        Options {
            file: self.file.clone(),
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

    /// Returns the filter for a probe's hits.
    pub fn filter(&self, probe: &Probe) -> Filter {
        self.whose.filter(trace::process(probe))
    }
}

/// The counts of a script, as `-v` shows them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Default)]
pub struct Counts {
    /// The number of hits of its probes.
    pub hits: u64,
    /// The hits that predicates and `-p` rejected.
    pub filtered: u64,
    /// The hits at which a rule ran.
    pub ran: u64,
    /// The outputs dropped because a ring was full.
    pub lost_output: u64,
    /// The values dropped because a map was full.
    pub lost_values: u64,
    /// The divisions by zero.
    pub divisions_by_zero: u64,
    /// The reads of memory that was not present.
    pub failed_reads: u64,
    /// The reads of formatted fields of tracepoints whose record could not be made.
    pub failed_fields: u64,
    /// The runs ended because they took too many steps.
    pub endless: u64,
    /// The timer ticks that came too late and were joined with the one before. All traces of the
    /// machine count together.
    pub joined_ticks: u64,
    /// The status that the script gave to `exit()`.
    #[serde(default)]
    pub exit_status: u8,
    /// The hits of each probe, by name.
    pub each: Vec<(String, u64)>,
    /// The probes with sites in programs that were given up: see
    /// [`ProbeStats::given_up`](probes::engine::ProbeStats::given_up).
    pub given_up: Vec<String>,
    /// The moments of the machine that were not kept.
    #[serde(default)]
    pub lost_moments: u64,
    /// The script's cost for the guest.
    #[serde(default)]
    pub cost: Cost,
    /// The probes that a budget has stopped for a part of the time.
    #[serde(default)]
    pub unwatched: Vec<Unwatched>,
}

/// The largest number of output bytes in one line.
pub const PIECE: usize = 1 << 20;

/// The largest size of a byte in JSON: `\u001b`.
const ESCAPED: usize = 6;

// A map may need more than the longest line holds: it is sent in several.
const _: () = assert!((ESCAPED * 2 * PIECE) as u64 <= LONGEST_LINE);

/// A line of the stream.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "line", rename_all = "kebab-case")]
pub enum Line {
    /// The first line.
    Begin {
        /// The names of the enabled probes.
        probes: Vec<String>,
        /// The probes of patterns that cannot be traced, with the reasons.
        skipped: Vec<String>,
        /// The patterns that wait for a file to be mapped, or a module to be loaded.
        open: Vec<String>,
    },
    /// A piece of output.
    Output {
        /// The bytes for standard output. Bytes that are not UTF-8 are sent as numbers.
        #[serde(default, skip_serializing_if = "Text::is_empty")]
        out: Text,
        /// The bytes for standard error.
        #[serde(default, skip_serializing_if = "Text::is_empty")]
        err: Text,
    },
    /// The counts so far, at the interval of the request, behind the maps.
    Counts {
        /// The script's counts.
        counts: Counts,
    },
    /// A map as it is, at the interval of the request and before the last line.
    Map(MapLine),
    /// The last line.
    End {
        /// The script's counts.
        counts: Counts,
        /// The end of the machine, if it has ended.
        machine: Option<MachineEnd>,
    },
    /// The script was refused; nothing is traced.
    Refused(RequestError),
}

/// The largest number of entries of a [`MapLine`].
pub const MOST_ENTRIES: usize = 10_000;
/// The largest number of bytes of an entry's key.
pub const LONGEST_KEY: usize = 512;

// All entries fit into one line.
const _: () = assert!((MOST_ENTRIES * ESCAPED * LONGEST_KEY) as u64 <= LONGEST_LINE);

/// The contents of a map.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MapLine {
    /// The map's name without `@`.
    pub name: String,
    /// The kind of values.
    pub kind: MapKind,
    /// The entries that are numbers, ordered by key.
    pub entries: Vec<MapEntry>,
    /// The entries that are not here: beyond [`MOST_ENTRIES`], with keys of more than
    /// [`LONGEST_KEY`] bytes, or no numbers.
    pub left_out: u64,
}

/// The kinds of a map's values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MapKind {
    /// Numbers of `count()`: they grow.
    Count,
    /// Other numbers.
    Number,
    /// The values of `avg()` and `stats()`.
    Mean,
    /// The values of `hist()` and `lhist()`.
    Histogram,
}

/// An entry of a map.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MapEntry {
    /// The texts of the key's parts; none for a variable without keys.
    pub key: Vec<String>,
    /// The value.
    pub value: MapValue,
}

/// The value of an entry.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MapValue {
    /// A number.
    Number(i64),
    /// A number above the largest signed one.
    Unsigned(u64),
    /// The number of values and their sum.
    Mean(i64, i64),
    /// The buckets that have values, ascending: both bounds, inclusive and `null` where there is
    /// none, and the number of values.
    Histogram(Vec<(Option<i64>, Option<i64>, u64)>),
}

/// Bytes that are text in most cases.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Text {
    /// Valid UTF-8.
    Text(String),
    /// Other bytes: a guest may print anything.
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

//! What is asked of a script: its text, its arguments, whose hits, and the form of its output.

use probes::bt::ast::{Dialect, Script};
use probes::bt::compile::Options;
use probes::bt::diagnostic::Diagnostic;
use probes::bt::parse;
use probes::engine::Filter;
use probes::probe::Probe;
use serde::{Deserialize, Serialize};

use crate::protocol::trace::Request;
use crate::scripting::{library, render_all};
use crate::tracing::{self, Refusal};

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

    /// The script with its library.
    ///
    /// # Errors
    /// What is wrong with it, to be shown.
    pub fn parse(&self) -> Result<Script, Refusal> {
        let script = parse::parse(self.text.as_bytes(), self.dialect());
        let mut script = script.map_err(|wrong| self.render(&wrong))?;
        if !self.strict {
            library::put_before(&mut script, &self.library)?;
        }
        Ok(script)
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
        self.whose.filter(tracing::process(probe))
    }

    /// What is wrong, to be shown.
    pub fn render(&self, wrong: &[Diagnostic]) -> Refusal {
        render_all(&self.file, self.text.as_bytes(), wrong)
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

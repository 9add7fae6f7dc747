//! Fuzzes a script in either dialect: it is parsed and compiled for probes with and without
//! arguments, and its begin and end are run.
#![no_main]

use bt::Clock;
use bt::ast::Dialect;
use bt::compile::{Guest, Options};
use bt::diagnostic::Diagnostic;
use bt::parse::parse;
use bt::render::{Output, collapsed, json, text};
use bt::session::{Finder, NotFound, Prepared};
use bt::value::Names;
use introspect::kernel::btf::Btf;
use libfuzzer_sys::fuzz_target;
use probes::name::ProbeName;
use probes::probe::{Argument, Moment, Probe, Signature, Target};

struct Anybody;

impl Guest for Anybody {
    fn types(&self) -> Option<&Btf> {
        None
    }

    fn symbol(&self, name: &str) -> Option<u64> {
        name.starts_with('j').then_some(0xffff_ffff_8200_0000)
    }

    fn nearest_symbols(&self, name: &str) -> Vec<String> {
        vec![name.to_owned()]
    }
}

impl Finder for Anybody {
    fn find(&self, pattern: &str) -> Result<Vec<Probe>, NotFound> {
        if pattern.contains('!') {
            return Err(NotFound {
                message: format!("no probe {pattern}"),
                nearest: Vec::new(),
            });
        }
        let argument = |name: &str, type_name: &str| Argument {
            name: name.to_owned(),
            type_name: type_name.to_owned(),
            is_string: false,
            translated: None,
        };
        let moments = [Moment::Entry, Moment::Return];
        Ok(moments
            .map(|moment| Probe {
                name: ProbeName::new("syscall", "", "read", moment.name()),
                signature: Some(Signature {
                    arguments: [argument("fd", "int"), argument("buf", "const char *")].into(),
                    returns: Some("long".to_owned()),
                }),
                target: Target::SystemCall { number: 0, moment },
            })
            .to_vec())
    }
}

impl Names for Anybody {
    fn kernel(&self, address: u64) -> String {
        format!("k{address:x}")
    }

    fn user(&self, pid: u32, address: u64) -> String {
        format!("u{pid}.{address:x}")
    }
}

fuzz_target!(|bytes: &[u8]| {
    for dialect in [Dialect::Normal, Dialect::Strict] {
        let shown = |wrong: &[Diagnostic]| {
            assert!(!wrong.is_empty(), "refused without a reason");
            for diagnostic in wrong {
                assert!(diagnostic.span.start <= diagnostic.span.end);
                assert!(!diagnostic.render("script", bytes).is_empty());
            }
        };
        let script = match parse(bytes, dialect) {
            Ok(script) => script,
            Err(wrong) => {
                shown(&wrong);
                continue;
            }
        };
        let options = Options {
            dialect,
            arguments: vec![b"12".to_vec(), b"text".to_vec()],
            most_entries: 64,
            ..Options::default()
        };
        let clock = Clock {
            tsc: 0,
            unix_ns: 1_234_567_890_000_000_000,
            hz: 1_000_000_000,
        };
        match Prepared::new(&script, &options, &Anybody, &Anybody, 2, clock) {
            Ok(prepared) => {
                let ran = prepared.run_alone(None, &mut |output| {
                    let _ = text::render(&output, dialect, &Anybody);
                    let _ = json::render(&output, dialect, &Anybody);
                    if let Output::Map { snapshot, .. } = &output {
                        let _ = collapsed::render(snapshot, &Anybody);
                    }
                });
                if let Err(refused) = ran {
                    assert!(!refused.to_string().is_empty());
                }
            }
            Err(wrong) => shown(&wrong),
        }
    }
});

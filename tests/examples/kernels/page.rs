//! The results as a table, and as a page of the documentation.

use std::fmt::Write as _;

use crate::checks::{CHECKS, Check, LEFT_OUT};

/// The outcome of one test.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outcome {
    /// The test, as `module::test`.
    pub test: String,
    /// `ok`, `FAILED` or `ignored`.
    pub result: String,
    /// The first line of the reason of a failure.
    pub why: String,
}

/// The results of one kernel.
#[derive(Debug, Clone)]
pub struct Seen {
    /// The suite and flavour.
    pub name: String,
    /// The kernel's release.
    pub release: String,
    /// The result of comparing its symbols with another decoder's.
    pub symbols: String,
    /// The outcomes of its tests.
    pub outcomes: Vec<Outcome>,
    /// The reason why tests are missing.
    pub trouble: Option<String>,
}

impl Seen {
    /// Returns the outcomes that a check rests on.
    fn of<'a>(&'a self, check: &'a Check) -> impl Iterator<Item = &'a Outcome> {
        self.outcomes.iter().filter(|outcome| {
            let left_out = LEFT_OUT.contains(&outcome.test.as_str());
            let named = |test: &&str| {
                let rest = outcome.test.strip_prefix(*test);
                rest.is_some_and(|rest| rest.is_empty() || rest.starts_with("::"))
            };
            !left_out && check.tests.iter().any(named)
        })
    }

    /// Returns a cell of the table.
    fn cell(&self, check: &Check) -> String {
        let (mut passed, mut all) = (0, 0);
        for outcome in self.of(check) {
            all += 1;
            passed += usize::from(outcome.result == "ok");
        }
        match (passed, all) {
            (_, 0) => "not run".to_owned(),
            (passed, all) if passed == all => "yes".to_owned(),
            (passed, all) => format!("**{passed} of {all}**"),
        }
    }

    /// Returns whether all checks that rest on `modules` passed, and each of these ran.
    pub fn passes(&self, modules: &[String]) -> bool {
        let is_of = |test: &str, module: &String| test.split("::").next() == Some(module);
        let ran = |module| self.outcomes.iter().any(|it| is_of(&it.test, module));
        let is_asked = |check: &&Check| {
            let mut tests = check.tests.iter();
            tests.any(|test| modules.iter().any(|module| is_of(test, module)))
        };
        let mut asked = CHECKS.iter().filter(is_asked);
        self.trouble.is_none()
            && modules.iter().all(ran)
            && asked.all(|check| self.cell(check) == "yes")
    }
}

/// Returns the table alone.
pub fn table(seen: &[Seen]) -> String {
    let mut text = String::from("| |");
    for kernel in seen {
        let _ = write!(text, " {} |", kernel.name);
    }
    text.push_str("\n|---|");
    text.push_str(&"---|".repeat(seen.len()));
    let mut line = |name: &str, cell: &dyn Fn(&Seen) -> String| {
        let _ = write!(text, "\n| {name} |");
        for kernel in seen {
            let _ = write!(text, " {} |", cell(kernel));
        }
    };
    line("kernel", &|kernel| kernel.release.clone());
    line("symbols of the image, against kallsyms-finder", &|kernel| {
        kernel.symbols.clone()
    });
    for check in &CHECKS {
        line(check.name, &|kernel| kernel.cell(check));
    }
    text.push('\n');
    text
}

/// Returns the failures, a line each.
pub fn losses(seen: &[Seen]) -> String {
    let mut text = String::new();
    for kernel in seen {
        if let Some(trouble) = &kernel.trouble {
            let _ = writeln!(text, "- {}: {trouble}", kernel.name);
        }
        for check in &CHECKS {
            for outcome in kernel.of(check).filter(|outcome| outcome.result != "ok") {
                let Outcome { test, why, .. } = outcome;
                let _ = writeln!(text, "- {}, {}: `{test}`: {why}", kernel.name, check.name);
            }
        }
    }
    text
}

//! The table of probes by number.
//!
//! Numbers begin at 1 and have OpenBSD's order. First come `profile` and `interval`, then entry and
//! return of each system call. Then come static probes: OpenBSD's, as far as Linux has a
//! counterpart, and Linux's tracepoints. Last are entry and return of each function of the kernel
//! and its modules. Numbers are stable as long as the table is kept.

use introspect::Gva;
use probes::event::MAX_ARGUMENTS;
use probes::kernel_view::KernelView;
use probes::name::ProbeName;
use probes::probe::{Moment, Probe, Target};
use probes::provider::system_calls;
use probes::provider::{kprobe, timer, tracepoint};
use probes::syscall_table;

use super::Mode;
use super::abi::{
    self, FLAG_EXECNAME, FLAG_FUNCARGS, FLAG_KSTACK, FLAG_USTACK, MAX_ARGUMENT_TYPES,
    PROBE_INFO_SIZE, ProbeInfo,
};
use super::aliases::{AliasProbe, Aliases, NO_SYSTEM_CALLS};

/// The source of a probe.
#[derive(Debug, Clone)]
pub(super) enum Source {
    /// A timer.
    Timer {
        every_vcpu: bool,
    },
    SystemCall {
        number: u32,
        moment: Moment,
    },
    Tracepoint(Box<Probe>),
    Alias(Box<AliasProbe>),
    Function {
        address: Gva,
        moment: Moment,
    },
}

/// One probe of the table.
#[derive(Debug, Clone)]
pub struct Listed {
    /// `profile`, `interval`, `syscall`, `tracepoint` or `kprobe`.
    pub provider: &'static str,
    /// The function, the group, or a timer's unit; never cut.
    pub function: Box<str>,
    /// The name; never cut.
    pub name: Box<str>,
    /// The number of arguments.
    pub arguments: u8,
    pub(super) source: Source,
}

/// All probes of a kernel.
#[derive(Debug, Default)]
pub struct Table {
    probes: Vec<Listed>,
    missing: Vec<String>,
}

impl Table {
    /// Creates the table of a kernel. `tracepoints` are those found in the guest, or the reason
    /// that there are none.
    #[must_use]
    pub fn new(view: &KernelView, tracepoints: Result<Vec<Probe>, String>) -> Self {
        let (tracepoints, why) = match tracepoints {
            Ok(found) => (found, None),
            Err(why) => (Vec::new(), Some(format!("tracepoints: {why}"))),
        };
        let aliases = Aliases::new(view, &tracepoints);
        let mut table = Self {
            probes: vec![
                timer_probe(timer::PROFILE, "97", true),
                timer_probe(timer::INTERVAL, "1", false),
            ],
            missing: aliases.missing,
        };
        if view.system_call_entry().is_some() {
            table.probes.extend(system_call_probes());
        } else {
            table
                .missing
                .push(format!("system calls: {NO_SYSTEM_CALLS}"));
        }
        let is_alias = |probe: &Probe| {
            let (group, event) = (&probe.name.function, &probe.name.name);
            let mut aliases = aliases.found.iter();
            aliases.any(|alias| alias.group == group && alias.event == event)
        };
        let own = tracepoints.iter().filter(|probe| !is_alias(probe));
        let own: Vec<Listed> = own.filter_map(tracepoint_probe).collect();
        table
            .probes
            .extend(aliases.found.into_iter().map(alias_probe));
        table.probes.extend(own);
        table.missing.extend(why);
        for function in view.text_functions() {
            table.add_function(view, function.symbol.name, function.symbol.address);
        }
        for module in view.modules.modules() {
            for function in module.text_functions() {
                table.add_function(view, function.symbol.name, function.symbol.address);
            }
        }
        table
    }

    fn add_function(&mut self, view: &KernelView, function: &str, address: u64) {
        let arguments = view.argument_registers(function).unwrap_or_default();
        for moment in [Moment::Entry, Moment::Return] {
            let arguments = match moment {
                Moment::Entry => arguments.min(MAX_ARGUMENTS),
                _ => 0,
            };
            self.probes.push(Listed {
                provider: kprobe::PROVIDER,
                function: function.into(),
                name: moment.name().into(),
                arguments: arguments as u8,
                source: Source::Function {
                    address: Gva(address),
                    moment,
                },
            });
        }
    }

    /// Returns all probes with their numbers.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (u32, &Listed)> {
        let numbered = self.probes.iter().enumerate();
        numbered.map(|(index, probe)| (u32::try_from(index + 1).unwrap_or(u32::MAX), probe))
    }

    /// Returns the probe with a number.
    #[must_use]
    pub fn get(&self, number: u32) -> Option<&Listed> {
        let index = usize::try_from(number).ok()?.checked_sub(1)?;
        self.probes.get(index)
    }

    /// Returns the number of probes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.probes.len()
    }

    /// Checks whether the table is empty; there are always timers.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.probes.is_empty()
    }

    /// Returns the size of the whole list in bytes.
    #[must_use]
    pub fn list_bytes(&self) -> u64 {
        self.probes.len() as u64 * PROBE_INFO_SIZE as u64
    }

    /// Returns the whole records of the list that fit into `size` bytes.
    #[must_use]
    pub fn list(&self, mode: Mode, size: u64) -> Vec<u8> {
        let fitting = size.min(self.list_bytes()) / PROBE_INFO_SIZE as u64;
        let fitting = usize::try_from(fitting).unwrap_or_default();
        let mut bytes = Vec::with_capacity(fitting * PROBE_INFO_SIZE);
        for (number, listed) in self.iter().take(fitting) {
            let record = abi::probe_info(&ProbeInfo {
                probe: number,
                arguments: listed.argument_count(mode),
                provider: listed.provider,
                function: &listed.function(mode),
                name: &listed.name,
            });
            bytes.extend_from_slice(&record);
        }
        bytes
    }

    /// Returns the probes of OpenBSD or Linux that are not listed, with the reasons.
    #[must_use]
    pub fn missing(&self) -> &[String] {
        &self.missing
    }
}

impl Listed {
    /// Returns the function's name in a mode: OpenBSD's system calls have numbers.
    fn function(&self, mode: Mode) -> std::borrow::Cow<'_, str> {
        match (&self.source, mode) {
            (Source::SystemCall { number, .. }, Mode::Strict) => format!("sys%{number}").into(),
            _ => (&*self.function).into(),
        }
    }

    /// Returns the number of arguments in a mode.
    pub(super) fn argument_count(&self, mode: Mode) -> u8 {
        match (&self.source, mode) {
            // OpenBSD's tracepoints have at most this many.
            (Source::Tracepoint(_), Mode::Strict) => self.arguments.min(MAX_ARGUMENT_TYPES as u8),
            _ => self.arguments,
        }
    }

    /// Returns the full name, which the list may have cut: `kprobe:vfs_read:entry`.
    #[must_use]
    pub fn full_name(&self) -> String {
        format!("{}:{}:{}", self.provider, self.function, self.name)
    }

    /// Returns the types of the arguments. Only static probes have them.
    #[must_use]
    pub fn types(&self) -> Vec<&str> {
        let types: Vec<&str> = match &self.source {
            Source::Alias(alias) => alias.types.clone(),
            Source::Tracepoint(probe) => {
                let arguments = probe.signature.iter().flat_map(|s| s.arguments.iter());
                arguments.map(|a| a.type_name.as_str()).collect()
            }
            _ => Vec::new(),
        };
        types.into_iter().take(MAX_ARGUMENT_TYPES).collect()
    }

    /// Returns the flags that the provider supports.
    #[must_use]
    pub fn flags(&self) -> u64 {
        let common = FLAG_EXECNAME | FLAG_USTACK | FLAG_KSTACK;
        match &self.source {
            Source::Timer { .. } => common,
            _ => common | FLAG_FUNCARGS,
        }
    }

    /// Returns the engine's probes for this one.
    pub(super) fn probes(&self, period: std::time::Duration) -> Vec<Probe> {
        let one = |target| {
            vec![Probe {
                name: ProbeName::new(self.provider, "", &self.function, &self.name),
                signature: None,
                target,
            }]
        };
        match &self.source {
            Source::Timer { every_vcpu } => one(Target::Timer {
                period,
                every_vcpu: *every_vcpu,
            }),
            Source::SystemCall { number, moment } => one(Target::SystemCall {
                number: *number,
                moment: *moment,
            }),
            Source::Function { address, moment } => one(Target::Kernel {
                address: *address,
                moment: *moment,
            }),
            Source::Tracepoint(probe) => vec![Probe::clone(probe)],
            Source::Alias(alias) => alias.probes.clone(),
        }
    }
}

fn timer_probe(provider: &'static str, rate: &str, every_vcpu: bool) -> Listed {
    Listed {
        provider,
        function: "hz".into(),
        name: rate.into(),
        arguments: 0,
        source: Source::Timer { every_vcpu },
    }
}

fn system_call_probes() -> impl Iterator<Item = Listed> {
    let calls = syscall_table::all().iter();
    calls.flat_map(|call| {
        [Moment::Entry, Moment::Return].map(|moment| Listed {
            provider: system_calls::PROVIDER,
            function: call.name.into(),
            name: moment.name().into(),
            arguments: match moment {
                Moment::Entry => call.arguments.len() as u8,
                _ => 0,
            },
            source: Source::SystemCall {
                number: call.number,
                moment,
            },
        })
    })
}

/// Returns the table's entry of a tracepoint; `None` if it has no site.
fn tracepoint_probe(probe: &Probe) -> Option<Listed> {
    let Target::Tracepoint(text) = &probe.target else {
        return None;
    };
    if text.sites.is_empty() {
        return None;
    }
    let known = probe.signature.as_ref().map(|s| s.arguments.len());
    Some(Listed {
        provider: tracepoint::PROVIDER,
        function: probe.name.function.as_str().into(),
        name: probe.name.name.as_str().into(),
        arguments: known.unwrap_or_default().min(MAX_ARGUMENTS) as u8,
        source: Source::Tracepoint(Box::new(probe.clone())),
    })
}

fn alias_probe(alias: AliasProbe) -> Listed {
    Listed {
        provider: tracepoint::PROVIDER,
        function: alias.group.into(),
        name: alias.event.into(),
        arguments: alias.types.len() as u8,
        source: Source::Alias(Box::new(alias)),
    }
}

#[cfg(test)]
mod tests;

//! OpenBSD's static probes and their counterparts in Linux: a tracepoint, a function, or the path
//! of all system calls.
//!
//! The arguments are OpenBSD's. Those that Linux does not provide are 0, as marked in the table. A
//! probe without a counterpart in this kernel is not listed; [`Aliases::missing`] has the reason.
//!
//! Source: dt_prov_static.c 1.26 (groups, names and types of arguments).

mod table;

use introspect::Gva;
use probes::event::Event;
use probes::kernel_view::KernelView;
use probes::name::ProbeName;
use probes::probe::{Argument, Moment, Probe, Target};
use probes::provider::kprobe::KERNEL;
use probes::syscall_table;

use super::tasks::Thread;
use table::{ALIASES, Alias, AliasTarget, Condition, GROUPS_WITHOUT, Value};

/// The reason that a kernel has no system call probes.
pub(super) const NO_SYSTEM_CALLS: &str =
    "the kernel has neither x64_sys_call nor do_syscall_64, where system calls are seen";

/// FAULT_FLAG_WRITE and FAULT_FLAG_INSTRUCTION (enum fault_flag, include/linux/mm_types.h).
const FAULT_WRITE: u64 = 0x1;
const FAULT_INSTRUCTION: u64 = 0x100;
const PROT_READ: i64 = 1;
const PROT_WRITE: i64 = 2;
const PROT_EXEC: i64 = 4;

/// A value with the positions of its arguments.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Found {
    Tid(usize),
    Pid(usize),
    Cpu(usize),
    Word(usize),
    Sum(usize, usize),
    Rights(usize),
    Access(usize),
    /// The number of the system call: an argument, or that of the probe.
    Number(Option<usize>),
    Untold,
}

/// An alias with a place in this kernel.
#[derive(Debug, Clone)]
pub struct AliasProbe {
    /// The group.
    pub group: &'static str,
    /// The name.
    pub event: &'static str,
    /// The types of the arguments.
    pub types: Vec<&'static str>,
    /// The probes that fire for it.
    pub probes: Vec<Probe>,
    values: Vec<Found>,
    /// The positions of a switch's `preempt` and `prev_state`, if only sleeping threads count.
    sleeping: Option<(usize, usize)>,
}

/// The aliases of a kernel.
#[derive(Debug, Clone, Default)]
pub struct Aliases {
    /// The aliases that the kernel has, in OpenBSD's order.
    pub found: Vec<AliasProbe>,
    /// The aliases that it lacks, as `group:event: reason`.
    pub missing: Vec<String>,
}

impl Aliases {
    /// Resolves the aliases of a kernel with these `tracepoints`.
    #[must_use]
    pub fn new(view: &KernelView, tracepoints: &[Probe]) -> Self {
        let mut aliases = Self::default();
        for alias in ALIASES {
            match resolve(alias, view, tracepoints) {
                Ok(found) => aliases.found.push(found),
                Err(why) => {
                    let (group, event) = (alias.group, alias.event);
                    aliases.missing.push(format!("{group}:{event}: {why}"));
                }
            }
        }
        let groups = GROUPS_WITHOUT.iter();
        let groups = groups.map(|(group, why)| format!("{group}:*: {why}"));
        aliases.missing.extend(groups);
        aliases
    }
}

impl AliasProbe {
    /// Returns OpenBSD's arguments of a hit; `None` if the hit does not count. `number` is that of
    /// the probe's system call. `thread` looks up tasks, and `offset` is added to thread numbers.
    pub(super) fn arguments(
        &self,
        event: &Event,
        number: u32,
        offset: u32,
        thread: impl Fn(u64) -> Thread,
    ) -> Option<Vec<i64>> {
        let word = |at: usize| event.arguments.get(at).copied().unwrap_or_default();
        if let Some((preempt, state)) = self.sleeping {
            // `bool` and `unsigned int`: the upper bits of their registers have no meaning.
            let preempted = word(preempt) & 0xff != 0;
            if preempted || word(state) & 0xffff_ffff == 0 {
                return None;
            }
        }
        let values = self.values.iter().map(|value| match *value {
            Found::Tid(at) => i64::from(thread(word(at)).tid) + i64::from(offset),
            Found::Pid(at) => i64::from(thread(word(at)).pid),
            Found::Cpu(at) => i64::from(thread(word(at)).cpu),
            Found::Word(at) => word(at).cast_signed(),
            Found::Sum(one, other) => word(one).wrapping_add(word(other)).cast_signed(),
            Found::Rights(at) => (word(at) & 7).cast_signed(),
            Found::Access(at) => match word(at) {
                flags if flags & FAULT_INSTRUCTION != 0 => PROT_EXEC,
                flags if flags & FAULT_WRITE != 0 => PROT_WRITE,
                _ => PROT_READ,
            },
            // `unsigned int` or `int` in a register.
            Found::Number(Some(at)) => i64::from(word(at) as u32 as i32),
            Found::Number(None) => i64::from(number),
            Found::Untold => 0,
        });
        Some(values.collect())
    }
}

fn resolve(alias: &Alias, view: &KernelView, tracepoints: &[Probe]) -> Result<AliasProbe, String> {
    let (probes, parameters, where_) = place(alias, view, tracepoints)?;
    let at = |name: &str| {
        let found = parameters.iter().position(|p| p.name == name);
        let found = found.filter(|at| *at < probes::event::MAX_ARGUMENTS);
        found.ok_or_else(|| {
            format!("the kernel's types do not describe an argument {name} of {where_}")
        })
    };
    let values = alias.arguments.iter().map(|(_, value)| {
        Ok(match value {
            Value::Tid(name) => Found::Tid(at(name)?),
            Value::Pid(name) => Found::Pid(at(name)?),
            Value::Cpu(name) => Found::Cpu(at(name)?),
            Value::Word(name) => Found::Word(at(name)?),
            Value::End { start, length, end } => match at(end) {
                Ok(end) => Found::Word(end),
                Err(_) => Found::Sum(at(start)?, at(length)?),
            },
            Value::Rights([name, newer]) => Found::Rights(at(name).or_else(|_| at(newer))?),
            Value::Access(name) => Found::Access(at(name)?),
            Value::Number => Found::Number(match alias.place {
                AliasTarget::SystemCallEntry => view.system_call_entry().map(|entry| entry.number),
                _ => None,
            }),
            Value::Untold => Found::Untold,
        })
    });
    let values = values.collect::<Result<_, String>>()?;
    let sleeping = match alias.only {
        Condition::All => None,
        Condition::Sleeping => Some((at("preempt")?, at("prev_state")?)),
    };
    Ok(AliasProbe {
        group: alias.group,
        event: alias.event,
        types: alias.arguments.iter().map(|(name, _)| *name).collect(),
        probes,
        values,
        sleeping,
    })
}

/// Returns the probes for an alias, their arguments in Linux, and the name of the place.
fn place(
    alias: &Alias,
    view: &KernelView,
    tracepoints: &[Probe],
) -> Result<(Vec<Probe>, Vec<Argument>, String), String> {
    let name = ProbeName::new("tracepoint", KERNEL, alias.group, alias.event);
    let function = |address: u64| Probe {
        name: name.clone(),
        signature: None,
        target: Target::Kernel {
            address: Gva(address),
            moment: Moment::Entry,
        },
    };
    match alias.place {
        AliasTarget::Nowhere(why) => Err(why.to_owned()),
        AliasTarget::Tracepoint(system, event) => {
            let found = tracepoints.iter().find(|probe| {
                probe.name.function == system
                    && probe.name.name == event
                    && probe.name.module == KERNEL
            });
            let text = format!("tracepoint {system}:{event}");
            let found = found.ok_or_else(|| format!("the kernel has no {text}"))?;
            let parameters = found.signature.clone().unwrap_or_default().arguments;
            Ok((vec![found.clone()], parameters.to_vec(), text))
        }
        AliasTarget::Functions(names) => {
            let found = names
                .iter()
                .find_map(|name| Some((*name, view.kernel.symbols.address_of(name)?)));
            let (name, address) = found
                .ok_or_else(|| format!("the kernel has no function {}", names.join(" or ")))?;
            let types = view.kernel.btf();
            let prototype = types.and_then(|types| types.func_proto_args(name).ok());
            let parameters = prototype.into_iter().flat_map(|p| p.parameters);
            let parameters = parameters.map(|parameter| Argument {
                is_string: false,
                ..Argument::from(parameter)
            });
            let probes = vec![function(address)];
            Ok((probes, parameters.collect(), name.to_owned()))
        }
        AliasTarget::SystemCallEntry | AliasTarget::SystemCallReturn => {
            let entry = view.system_call_entry().ok_or(NO_SYSTEM_CALLS)?;
            let probes = match alias.place {
                AliasTarget::SystemCallEntry => vec![function(entry.address.0)],
                _ => syscall_table::all()
                    .iter()
                    .map(|call| Probe {
                        name: name.clone(),
                        signature: None,
                        target: Target::SystemCall {
                            number: call.number,
                            moment: Moment::Return,
                        },
                    })
                    .collect(),
            };
            Ok((probes, Vec::new(), "system calls".to_owned()))
        }
    }
}

#[cfg(test)]
pub(in crate::dt) mod tests;

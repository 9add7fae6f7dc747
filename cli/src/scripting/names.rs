//! Names of the addresses in a script's output.
//!
//! Names of programs' functions are read from the guest, which is paused for it: all those of one
//! output together, each once.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bt::maps::{MapSnapshot, Reading};
use bt::render::Output;
use bt::value::{Names, Value};
use probes::kernel_view::KernelView;

use crate::protocol::inspection::ProcessName;
use crate::report::printable;
use crate::vm::Vm;

/// The largest number of cached names; beyond it all are looked up anew.
const MOST_NAMES: usize = 1 << 16;
/// The lifetime of cached names: a process may execute another program, and its pid may be reused.
const KEPT: Duration = Duration::from_secs(1);

/// The names of a guest.
pub(super) struct GuestNames {
    view: Arc<KernelView>,
    user: HashMap<(u32, u64), String>,
    /// The time of the oldest look-up.
    since: Instant,
}

impl GuestNames {
    pub(super) fn new(view: Arc<KernelView>) -> Self {
        Self {
            view,
            user: HashMap::new(),
            since: Instant::now(),
        }
    }

    /// Looks up the names of programs' functions in `outputs`.
    pub(super) fn prepare(&mut self, machine: &Vm, outputs: &[Output]) {
        let mut wanted: HashMap<u32, Vec<u64>> = HashMap::new();
        if self.user.len() > MOST_NAMES || self.since.elapsed() > KEPT {
            self.user.clear();
            self.since = Instant::now();
        }
        let mut each = |pid: u32, address: u64| {
            if !self.user.contains_key(&(pid, address)) {
                wanted.entry(pid).or_default().push(address);
            }
        };
        for output in outputs {
            match output {
                Output::Printf { arguments, .. } => {
                    arguments
                        .iter()
                        .for_each(|value| addresses(value, &mut each));
                }
                Output::Print(value) => addresses(value, &mut each),
                Output::Map { snapshot, .. } => of_map(snapshot, &mut each),
                Output::Time { .. } | Output::Join { .. } | Output::Fail { .. } => {}
            }
        }
        for (pid, mut addresses) in wanted {
            addresses.sort_unstable();
            addresses.dedup();
            self.look_up(machine, pid, &addresses);
        }
    }

    /// Looks up names in a process. One that has ended has none: its addresses are shown.
    fn look_up(&mut self, machine: &Vm, pid: u32, addresses: &[u64]) {
        let words: Vec<String> = addresses.iter().map(|a| format!("{a:#x}")).collect();
        let process = i32::try_from(pid).map(ProcessName::Pid).ok();
        let found = process.and_then(|process| {
            let found = machine.inspection().sym(&words, Some(&process), None);
            found
                .inspect_err(|why| log::debug!("names of process {pid}: {why}"))
                .ok()
        });
        let named = found.map(|found| found.symbols).unwrap_or_default();
        for address in addresses {
            self.user.insert((pid, *address), format!("{address:#x}"));
        }
        for symbol in named {
            let name = with_offset(&symbol.name, symbol.offset);
            self.user.insert((pid, symbol.address), name);
        }
    }
}

impl Names for GuestNames {
    fn kernel(&self, address: u64) -> String {
        if let Some((found, offset)) = self.view.modules.resolve(address) {
            return with_offset(found.symbol.name, offset);
        }
        match self.view.kernel.symbols.resolve(address) {
            Some((symbol, offset)) => with_offset(symbol.name, offset),
            None => format!("{address:#x}"),
        }
    }

    fn user(&self, pid: u32, address: u64) -> String {
        let known = self.user.get(&(pid, address)).cloned();
        known.unwrap_or_else(|| format!("{address:#x}"))
    }
}

/// Names without a guest: each address is its own name.
pub(super) struct Addresses;

impl Names for Addresses {
    fn kernel(&self, address: u64) -> String {
        format!("{address:#x}")
    }

    fn user(&self, _: u32, address: u64) -> String {
        format!("{address:#x}")
    }
}

/// Returns a symbol with an offset. The guest controls the symbol, so it must not move a terminal's
/// cursor.
fn with_offset(name: &str, offset: u64) -> String {
    match offset {
        0 => printable(name),
        offset => format!("{}+{offset:#x}", printable(name)),
    }
}

fn of_map(snapshot: &MapSnapshot, each: &mut impl FnMut(u32, u64)) {
    for (keys, reading) in &snapshot.entries {
        keys.iter().for_each(|key| addresses(key, each));
        if let Reading::Value(value) = reading {
            addresses(value, each);
        }
    }
}

/// Passes the programs' addresses in a value to `each`.
fn addresses(value: &Value, each: &mut impl FnMut(u32, u64)) {
    match value {
        Value::UserSymbol { pid, address } => each(*pid, *address),
        Value::UserStack { pid, frames } => frames.iter().for_each(|frame| each(*pid, *frame)),
        Value::Tuple(items) => {
            for item in items.iter() {
                addresses(item, each);
            }
        }
        _ => {}
    }
}

//! Names of the addresses in a script's output.
//!
//! Names of programs' functions, and of code that the kernel generates for BPF, are read from the
//! guest, which is paused for it: all those of one output together, each once. So are the files
//! that `cat()` prints.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bt::maps::{MapSnapshot, Reading};
use bt::render::Output;
use bt::value::{FileContent, Names, Value};
use probes::kernel_view::KernelView;

use crate::inspection::Inspection;
use crate::protocol::inspection::ProcessName;
use crate::report::printable;

/// The largest number of cached names; beyond it all are looked up anew.
const MOST_NAMES: usize = 1 << 16;
/// The lifetime of cached names: a process may execute another program, and its pid may be reused.
const KEPT: Duration = Duration::from_secs(1);
/// The lowest address of generated code: that of modules, with the smaller of two image sizes
/// (`MODULES_VADDR`).
const GENERATED: u64 = 0xffff_ffff_a000_0000;

/// The names of a guest.
pub(super) struct GuestNames {
    view: Arc<KernelView>,
    user: HashMap<(u32, u64), String>,
    /// The names of addresses that are neither the kernel's nor a module's.
    generated: HashMap<u64, String>,
    /// The paths of control groups, those that do not exist included.
    cgroups: HashMap<u64, Option<Vec<u8>>>,
    /// The files of the last outputs.
    files: HashMap<Vec<u8>, FileContent>,
    /// The time of the oldest look-up.
    since: Instant,
}

impl GuestNames {
    pub(super) fn new(view: Arc<KernelView>) -> Self {
        Self {
            view,
            user: HashMap::new(),
            generated: HashMap::new(),
            cgroups: HashMap::new(),
            files: HashMap::new(),
            since: Instant::now(),
        }
    }

    /// Looks up the names of programs' functions and of BPF programs in `outputs`, and reads the
    /// files.
    pub(super) fn prepare(&mut self, guest: &Inspection<'_>, outputs: &[Output]) {
        let mut wanted: HashMap<Option<u32>, Vec<u64>> = HashMap::new();
        let mut groups = HashSet::new();
        let known = self.user.len() + self.generated.len() + self.cgroups.len();
        if known > MOST_NAMES || self.since.elapsed() > KEPT {
            self.user.clear();
            self.generated.clear();
            self.cgroups.clear();
            self.since = Instant::now();
        }
        let mut each = |named: Named| {
            let (pid, address) = match named {
                Named::User(pid, address) => (Some(pid), address),
                Named::Kernel(address) => (None, address),
                Named::Cgroup(id) => {
                    groups.insert(id);
                    return;
                }
            };
            let is_known = match pid {
                Some(pid) => self.user.contains_key(&(pid, address)),
                None => {
                    address < GENERATED
                        || self.generated.contains_key(&address)
                        || self.static_name(address).is_some()
                }
            };
            if !is_known {
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
                Output::File { path, .. } => {
                    path.arguments
                        .iter()
                        .for_each(|value| addresses(value, &mut each));
                }
                Output::Print(value) => addresses(value, &mut each),
                Output::Map { snapshot, .. } => of_map(snapshot, &mut each),
                Output::Time { .. }
                | Output::Join { .. }
                | Output::Fail { .. }
                | Output::Ending => {}
            }
        }
        for (pid, mut addresses) in wanted {
            addresses.sort_unstable();
            addresses.dedup();
            match pid {
                Some(pid) => self.look_up(guest, pid, &addresses),
                None => self.look_up_generated(guest, &addresses),
            }
        }
        groups.retain(|id| !self.cgroups.contains_key(id));
        self.look_up_groups(guest, groups);
        self.files = guest.files(self.paths(outputs));
    }

    /// Returns the paths of the files in `outputs`, each with the number of its bytes.
    fn paths(&self, outputs: &[Output]) -> HashMap<Vec<u8>, usize> {
        let mut paths = HashMap::new();
        for output in outputs {
            if let Output::File { path, most } = output {
                let wanted = paths.entry(path.bytes(self)).or_default();
                *wanted = (*most).max(*wanted);
            }
        }
        paths
    }

    /// Looks up names in a process. One that has ended has none: its addresses are shown.
    fn look_up(&mut self, guest: &Inspection<'_>, pid: u32, addresses: &[u64]) {
        let words: Vec<String> = addresses.iter().map(|a| format!("{a:#x}")).collect();
        let process = i32::try_from(pid).map(ProcessName::Pid).ok();
        let found = process.and_then(|process| {
            let found = guest.sym(&words, Some(&process), None);
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

    /// Looks up names of BPF programs.
    fn look_up_generated(&mut self, guest: &Inspection<'_>, addresses: &[u64]) {
        let programs = guest.look(|look| look.bpf_programs());
        let programs = programs.inspect_err(|why| log::debug!("names of BPF programs: {why}"));
        let programs = programs.ok().flatten().map(|(programs, _)| programs);
        for address in addresses {
            let found = programs.as_ref().and_then(|all| all.resolve(*address));
            let name = found.map(|(found, offset)| with_offset(found.symbol.name, offset));
            let name = name.unwrap_or_else(|| format!("{address:#x}"));
            self.generated.insert(*address, name);
        }
    }

    /// Looks up the paths of control groups.
    fn look_up_groups(&mut self, guest: &Inspection<'_>, wanted: HashSet<u64>) {
        if wanted.is_empty() {
            return;
        }
        let found = guest.look(|look| match look.cgroups_numbered(&wanted) {
            Ok(Ok(paths)) => Ok(paths),
            Ok(Err(broken)) => Err(broken.to_string()),
            Err(unknown) => Err(unknown.to_string()),
        });
        let found = found.map_err(|why| why.to_string()).and_then(|found| found);
        let found = found.inspect_err(|why| log::debug!("paths of control groups: {why}"));
        let mut paths = found.unwrap_or_default();
        let known = wanted.into_iter().map(|id| (id, paths.remove(&id)));
        self.cgroups.extend(known);
    }

    /// Returns the name of an address in the kernel's image or in a module.
    fn static_name(&self, address: u64) -> Option<String> {
        if let Some((found, offset)) = self.view.modules.resolve(address) {
            return Some(with_offset(found.symbol.name, offset));
        }
        let (symbol, offset) = self.view.kernel.symbols.resolve(address)?;
        Some(with_offset(symbol.name, offset))
    }
}

impl Names for GuestNames {
    fn kernel(&self, address: u64) -> String {
        let found = self.static_name(address);
        let found = found.or_else(|| self.generated.get(&address).cloned());
        found.unwrap_or_else(|| format!("{address:#x}"))
    }

    fn user(&self, pid: u32, address: u64) -> String {
        let known = self.user.get(&(pid, address)).cloned();
        known.unwrap_or_else(|| format!("{address:#x}"))
    }

    fn cgroup(&self, id: u64) -> Option<Vec<u8>> {
        let path = self.cgroups.get(&id)?.as_ref()?;
        Some(printable(&String::from_utf8_lossy(path)).into_bytes())
    }

    fn file(&self, path: &[u8]) -> FileContent {
        self.files.get(path).cloned().unwrap_or_default()
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

/// A number in a value that has a name in the guest.
#[derive(Debug, Clone, Copy)]
enum Named {
    /// An address in a process.
    User(u32, u64),
    /// An address in the kernel.
    Kernel(u64),
    /// A control group.
    Cgroup(u64),
}

fn of_map(snapshot: &MapSnapshot, each: &mut impl FnMut(Named)) {
    for (keys, reading) in &snapshot.entries {
        keys.iter().for_each(|key| addresses(key, each));
        if let Reading::Value(value) = reading {
            addresses(value, each);
        }
    }
}

/// Passes all in a value that has a name in the guest to `each`.
fn addresses(value: &Value, each: &mut impl FnMut(Named)) {
    match value {
        Value::UserSymbol { pid, address } => each(Named::User(*pid, *address)),
        Value::UserStack { pid, frames } => {
            frames
                .iter()
                .for_each(|frame| each(Named::User(*pid, *frame)));
        }
        Value::KernelSymbol(address) => each(Named::Kernel(*address)),
        Value::KernelStack(frames) => frames.iter().for_each(|frame| each(Named::Kernel(*frame))),
        Value::Cgroup(id) => each(Named::Cgroup(*id)),
        Value::StackAs { stack, .. } => addresses(stack, each),
        Value::Tuple(items) | Value::Array(items) | Value::Record { items, .. } => {
            for item in items.iter() {
                addresses(item, each);
            }
        }
        _ => {}
    }
}

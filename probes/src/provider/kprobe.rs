//! Probes of functions of the kernel and its loaded modules: `kprobe:MODULE:FUNCTION:entry`,
//! `:return`, and `:OFFSET`. The offset is that of an instruction, in bytes from the function's
//! first (hexadecimal with 0x, else decimal).
//!
//! The module of the kernel itself is `vmlinux`. If several functions have a name, each is a probe.
//! Offsets are not listed, and are accepted only if a pattern names one.

use introspect::Gva;
use introspect::kernel::loaded_modules::{LoadedModules, ModuleSymbols};
use introspect::kernel::symbols::{Symbol, Symbols};
use vmm::machine::Handle;

use super::{SUGGESTIONS, UnknownFunction};
use crate::kernel_view::KernelView;
use crate::name::{ProbeName, ProbePattern, matches_part, offset};
use crate::probe::{Argument, Moment, Probe, Signature, Target};

/// The name of the provider.
pub const PROVIDER: &str = "kprobe";
/// The module of the kernel's own functions.
pub const KERNEL: &str = "vmlinux";

/// Passes the probes that match `pattern` to `each`.
pub fn list(view: &KernelView, pattern: &ProbePattern, each: &mut dyn FnMut(Probe)) {
    if !pattern.matches_provider(PROVIDER) {
        return;
    }
    let mut lister = Lister::new(view, pattern, each);
    match ProbePattern::is_exact(&pattern.function) {
        true => {
            let symbols = view.kernel.symbols.all_of(&pattern.function);
            for symbol in symbols.filter(|symbol| !view.has_freed(symbol.address)) {
                lister.symbol(KERNEL, symbol);
            }
            for found in view.modules.all_of(&pattern.function, None) {
                lister.symbol(found.module, found.symbol);
            }
        }
        false => {
            for function in view.text_functions() {
                lister.symbol(KERNEL, function.symbol);
            }
            for module in view.modules.modules() {
                lister.functions(module);
            }
        }
    }
}

/// Passes the probes of one module that match `pattern` to `each`.
pub(super) fn list_module(
    view: &KernelView,
    module: &ModuleSymbols,
    pattern: &ProbePattern,
    each: &mut dyn FnMut(Probe),
) {
    let mut lister = Lister::new(view, pattern, each);
    match ProbePattern::is_exact(&pattern.function) {
        true => {
            for symbol in module.symbols().all_of(&pattern.function) {
                lister.symbol(&module.module.name, symbol);
            }
        }
        false => lister.functions(module),
    }
}

/// Passes the probes to `each` that `pattern` may match in a module that is not loaded. Their
/// addresses are not known, and a function may be a pattern itself.
pub(super) fn list_to_come(view: &KernelView, pattern: &ProbePattern, each: &mut dyn FnMut(Probe)) {
    let function = match pattern.function.as_str() {
        "" => "*",
        function => function,
    };
    let symbol = Symbol {
        name: function,
        address: 0,
        kind: 't',
        absolute: false,
    };
    // The kernel's own types may have another function of that name.
    let mut each = |probe| {
        each(Probe {
            signature: None,
            ..probe
        });
    };
    Lister::new(view, pattern, &mut each).probes(&pattern.module, symbol);
}

/// Makes probes of symbols.
struct Lister<'l, 's> {
    view: &'l KernelView,
    pattern: &'l ProbePattern,
    /// The pattern's name, if it is an offset.
    offset: Option<u64>,
    /// The last function, and the names under which it was listed: a function with several names
    /// is listed under each, and only once under each. Tables of symbols ascend by address.
    taken: (u64, Vec<&'s str>),
    each: &'l mut dyn FnMut(Probe),
}

impl<'l, 's> Lister<'l, 's> {
    fn new(
        view: &'l KernelView,
        pattern: &'l ProbePattern,
        each: &'l mut dyn FnMut(Probe),
    ) -> Self {
        Self {
            view,
            pattern,
            offset: offset(&pattern.name),
            taken: (0, Vec::new()),
            each,
        }
    }

    fn functions(&mut self, module: &'s ModuleSymbols) {
        for function in module.text_functions() {
            self.symbol(&module.module.name, function.symbol);
        }
    }

    fn symbol(&mut self, module: &str, symbol: Symbol<'s>) {
        let is_function = symbol.is_text() && !symbol.absolute;
        if is_function
            && matches_part(&self.pattern.module, module)
            && matches_part(&self.pattern.function, symbol.name)
            && self.is_new(symbol)
        {
            self.probes(module, symbol);
        }
    }

    fn is_new(&mut self, symbol: Symbol<'s>) -> bool {
        let (address, names) = &mut self.taken;
        if *address != symbol.address {
            *address = symbol.address;
            names.clear();
        }
        let is_new = !names.contains(&symbol.name);
        if is_new {
            names.push(symbol.name);
        }
        is_new
    }

    fn probes(&mut self, module: &str, symbol: Symbol<'_>) {
        let Self { view, pattern, .. } = self;
        let probe = |name: &str, signature, moment, address| Probe {
            name: ProbeName::new(PROVIDER, module, symbol.name, name),
            signature,
            target: Target::Kernel {
                address: Gva(address),
                moment,
            },
        };
        if let Some(offset) = self.offset {
            let address = symbol.address.wrapping_add(offset);
            (self.each)(probe(&pattern.name, None, Moment::Point, address));
            return;
        }
        let [entry, returned] = [Moment::Entry, Moment::Return]
            .map(|moment| matches_part(&pattern.name, moment.name()).then_some(moment));
        if entry.or(returned).is_none() {
            return;
        }
        // One for both.
        let found = signature(view, symbol.name);
        let of_entry = || {
            let arguments = found.as_ref()?.arguments.clone();
            Some(Signature {
                arguments,
                returns: None,
            })
        };
        if let Some(entry) = entry {
            let of_entry = of_entry();
            (self.each)(probe(entry.name(), of_entry, entry, symbol.address));
        }
        if let Some(returned) = returned {
            (self.each)(probe(returned.name(), found, returned, symbol.address));
        }
    }
}

/// Creates a device's own probe of a kernel function that the device has found itself.
#[must_use]
pub fn of_function(provider: &str, name: &str, address: u64, moment: Moment) -> Probe {
    Probe {
        name: ProbeName::new(provider, KERNEL, name, moment.name()),
        signature: None,
        target: Target::Kernel {
            address: Gva(address),
            moment,
        },
    }
}

/// Returns those of `names` that are no function of the kernel or of its modules, in their order.
/// Each has the most similar names of the kernel.
#[must_use]
pub fn unknown_functions(
    symbols: &Symbols,
    modules: &LoadedModules,
    names: &[String],
) -> Vec<UnknownFunction> {
    let is_known = |name: &str| {
        let of_modules = modules.all_of(name, None).map(|found| found.symbol);
        symbols
            .all_of(name)
            .chain(of_modules)
            .any(|symbol| symbol.is_text() && !symbol.absolute)
    };
    let nearest = |name: &String| {
        let nearest = symbols.nearest_names(name, SUGGESTIONS).into_iter();
        nearest.map(str::to_owned).collect()
    };
    names
        .iter()
        .filter(|name| !is_known(name))
        .map(|name| UnknownFunction {
            name: name.clone(),
            nearest: nearest(name),
        })
        .collect()
}

/// Returns a function's signature from BTF.
fn signature(view: &KernelView, function: &str) -> Option<Signature> {
    let prototype = view.kernel.btf()?.func_proto_args(function).ok()?;
    Some(Signature {
        arguments: prototype
            .parameters
            .into_iter()
            .map(Argument::from)
            .collect(),
        returns: Some(prototype.returns),
    })
}

/// ENDBR64, in kernels built with indirect branch tracking.
const ENDBR64: [u8; 4] = [0xf3, 0x0f, 0x1e, 0xfa];
/// The 5-byte NOPs in the place of a call that the kernel turns on and off. Before Linux 5.13 it
/// selects one of them by the CPU (`ideal_nops`), the second on an AMD CPU of family 15.
const NOPS: [[u8; 5]; 2] = [
    [0x0f, 0x1f, 0x44, 0x00, 0x00],
    [0x66, 0x66, 0x66, 0x66, 0x90],
];
const CALL: u8 = 0xe8;
/// The function that functions call at their start if the kernel has a function tracer. The
/// compiler's name for it is in every such kernel.
const TRACER: &str = "__fentry__";

/// Returns the first instruction of the function at `address` that the kernel's own tracing does
/// not write over. It is behind the tracer's call, or the NOP in its place. Registers and stack are
/// still as at the function's start.
pub(crate) fn behind_patched_entry(machine: &Handle, view: &KernelView, address: Gva) -> Gva {
    if view.kernel.symbols.address_of(TRACER).is_none() {
        return address;
    }
    let code = machine.traps().read_code(address, view.kernel.space);
    let landing = if code.starts_with(&ENDBR64) { 4 } else { 0 };
    let patched = code.get(landing..landing + 5).unwrap_or_default();
    let is_call = patched.first() == Some(&CALL) && {
        let distance = patched.get(1..5).and_then(|d| d.try_into().ok());
        let distance = i64::from(i32::from_le_bytes(distance.unwrap_or_default()));
        let target = address
            .0
            .wrapping_add(landing as u64 + 5)
            .wrapping_add_signed(distance);
        is_tracer(view, target)
    };
    match starts_with_tracers_nop(patched) || is_call {
        true => Gva(address.0 + landing as u64 + 5),
        false => address,
    }
}

/// Checks whether code starts with a NOP that the kernel puts in the place of its tracer's call.
pub(crate) fn starts_with_tracers_nop(code: &[u8]) -> bool {
    NOPS.iter().any(|nop| code.starts_with(nop))
}

/// Checks whether `target`, of a function's first call, is the kernel's tracer: by its name, or as
/// code that the kernel has generated for it.
fn is_tracer(view: &KernelView, target: u64) -> bool {
    match view.kernel.symbols.resolve(target) {
        Some((symbol, _)) if symbol.is_text() => {
            symbol.name == TRACER || symbol.name.starts_with("ftrace_")
        }
        _ => view.modules.module_at(target).is_none(),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use introspect::Gpa;
    use introspect::kernel::symbols::SymbolsBuilder;
    use introspect::x86_64::paging::AddressSpace;

    use super::*;

    fn view() -> KernelView {
        let mut builder = SymbolsBuilder::default();
        for (name, address, kind) in [
            ("vfs_read", 0x1000, b'T'),
            ("vfs_write", 0x1100, b'T'),
            ("cleanup", 0x1200, b't'),
            ("cleanup", 0x1300, b't'),
            ("ksys_alias", 0x1100, b'T'),
            ("jiffies", 0x9000, b'D'),
        ] {
            builder
                .push(
                    name.as_bytes(),
                    0xffff_ffff_8100_0000 + address,
                    kind,
                    false,
                )
                .unwrap();
        }
        let space = AddressSpace {
            root: Gpa(0),
            levels: 4,
        };
        KernelView::without_types(builder.finish(None).with_slide(0x20_0000), space)
    }

    fn found(pattern: &str) -> Vec<(String, u64)> {
        let mut found = Vec::new();
        list(
            &view(),
            &ProbePattern::parse(pattern).unwrap(),
            &mut |probe| {
                let Target::Kernel { address, .. } = probe.target else {
                    panic!("{probe:?}")
                };
                found.push((probe.name.to_string(), address.0 - 0xffff_ffff_8120_0000));
            },
        );
        found.sort();
        found
    }

    #[test]
    fn patterns_become_entries_and_returns() {
        for (pattern, expected) in [
            (
                "kprobe:vfs_read",
                &[("kprobe:vmlinux:vfs_read:entry", 0x1000)][..],
            ),
            (
                "vfs_read",
                &[
                    ("kprobe:vmlinux:vfs_read:entry", 0x1000),
                    ("kprobe:vmlinux:vfs_read:return", 0x1000),
                ],
            ),
            (
                "kprobe:vmlinux:vfs_*:return",
                &[
                    ("kprobe:vmlinux:vfs_read:return", 0x1000),
                    ("kprobe:vmlinux:vfs_write:return", 0x1100),
                ],
            ),
            (
                "kprobe:cleanup",
                &[
                    ("kprobe:vmlinux:cleanup:entry", 0x1200),
                    ("kprobe:vmlinux:cleanup:entry", 0x1300),
                ],
            ),
            (
                "kprobe::vfs_read:0x1c",
                &[("kprobe:vmlinux:vfs_read:0x1c", 0x101c)],
            ),
            (
                "kprobe::vfs_read:+8",
                &[("kprobe:vmlinux:vfs_read:+8", 0x1008)],
            ),
            ("kprobe:jiffies", &[]),
            ("kprobe:brd:vfs_read:entry", &[]),
            ("uprobe::vfs_read:entry", &[]),
        ] {
            let expected: Vec<_> = expected
                .iter()
                .map(|(n, a)| ((*n).to_owned(), *a))
                .collect();
            assert_eq!(found(pattern), expected, "{pattern}");
        }
    }
}

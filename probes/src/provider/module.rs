//! Probes of one kernel module by its name, whether it is loaded or not:
//! `kprobe:MODULE:FUNCTION:entry`, `tracepoint:MODULE:SYSTEM:EVENT`.
//!
//! A pattern names a module if its second part is a word without wildcards. All others stand for
//! what is loaded when they are asked for.

use introspect::PausedMemory;
use introspect::kernel::loaded_modules::ModuleSymbols;
use vmm::machine::Handle;

use super::kprobe::{self, KERNEL};
use super::tracepoint;
use crate::kernel_view::KernelView;
use crate::name::{ProbeName, ProbePattern};
use crate::probe::{Probe, Target, TracepointText};

/// Returns the module that a pattern names. `None` if it names none, or the kernel itself.
#[must_use]
pub fn named(pattern: &ProbePattern) -> Option<&str> {
    let is_of_kernel = matches!(
        pattern.provider.as_str(),
        kprobe::PROVIDER | tracepoint::PROVIDER
    );
    let name = pattern.module.as_str();
    (is_of_kernel && ProbePattern::is_exact(name) && name != KERNEL).then_some(name)
}

/// Returns the module that a pattern names, if it is not loaded and the kernel can be watched for
/// it. Its probes may come with it.
#[must_use]
pub fn to_come<'p>(view: &KernelView, pattern: &'p ProbePattern) -> Option<&'p str> {
    let name = named(pattern)?;
    // `kprobe:vfs_read:retrun` is a misspelt moment rather than a module.
    let is_misspelt = pattern.is_foreign && is_function(view, name);
    (!is_misspelt && !is_loaded(view, name) && view.reports_modules()).then_some(name)
}

fn is_loaded(view: &KernelView, name: &str) -> bool {
    let mut loaded = view.modules.modules().iter();
    loaded.any(|module| module.module.name == name)
}

/// Returns the probes of a module that match a pattern.
#[must_use]
pub fn probes(
    view: &KernelView,
    machine: &Handle,
    module: &ModuleSymbols,
    pattern: &ProbePattern,
) -> Vec<Probe> {
    if named(pattern) != Some(module.module.name.as_str()) {
        return Vec::new();
    }
    let mut found = Vec::new();
    if pattern.provider == kprobe::PROVIDER {
        kprobe::list_module(view, module, pattern, &mut |probe| found.push(probe));
        return found;
    }
    let _paused = machine.pause();
    let memory = PausedMemory::new(machine.ram());
    let memory = memory.view(view.kernel.space);
    let modules = std::slice::from_ref(&module.module);
    match tracepoint::find_in(memory, modules, Some(machine), view, pattern) {
        Ok(matches) => {
            for sentence in &matches.incomplete {
                log::warn!("not all tracepoints are known: {sentence}");
            }
            matches.probes
        }
        Err(why) => {
            log::warn!("{pattern}: {why}");
            Vec::new()
        }
    }
}

/// Returns a probe for each kind of probe that a pattern may match in a module to come. A part of
/// its name may be a pattern, and its place is unknown: it cannot be enabled.
#[must_use]
pub fn forms(view: &KernelView, pattern: &ProbePattern) -> Vec<Probe> {
    let mut forms = Vec::new();
    if pattern.provider == kprobe::PROVIDER {
        kprobe::list_to_come(view, pattern, &mut |probe| forms.push(probe));
        return forms;
    }
    let whole = |part: &str| match part {
        "" => "*".to_owned(),
        part => part.to_owned(),
    };
    let (system, event) = (whole(&pattern.function), whole(&pattern.name));
    forms.push(Probe {
        name: ProbeName::new(&pattern.provider, &pattern.module, &system, &event),
        // The types of modules' tracepoints are not in the kernel's own.
        signature: None,
        target: Target::Tracepoint(TracepointText::default()),
    });
    forms
}

/// Returns an addition to the message that a pattern matches nothing: how probes of a module are
/// named that is not loaded.
pub(super) fn hint(view: &KernelView, pattern: &ProbePattern) -> String {
    match named(pattern) {
        Some(name) if is_loaded(view, name) => String::new(),
        Some(name) if is_function(view, name) => {
            format!("; {name} is a function of the kernel, whose probes are entry and return")
        }
        Some(name) => {
            format!("; the module {name} is not loaded, and this kernel cannot be watched for it")
        }
        None if pattern.module.is_empty() && view.reports_modules() => other_form(pattern),
        None => String::new(),
    }
}

/// Checks whether a name is that of a function of the kernel.
fn is_function(view: &KernelView, name: &str) -> bool {
    let mut symbols = view.kernel.symbols.all_of(name);
    symbols.any(|symbol| symbol.is_text())
}

/// Returns the addition for a pattern that may mean a module, as other tracers write it.
fn other_form(pattern: &ProbePattern) -> String {
    let ProbePattern { function, name, .. } = pattern;
    match pattern.provider.as_str() {
        tracepoint::PROVIDER => {
            format!("; of a module that is not loaded, it is tracepoint:MODULE:{function}:{name}")
        }
        _ => String::new(),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use introspect::kernel::modules::{Module, ModuleState};
    use introspect::kernel::symbols::SymbolsBuilder;
    use introspect::x86_64::paging::AddressSpace;
    use introspect::{Gpa, Gva};

    use super::*;

    fn view() -> KernelView {
        let space = AddressSpace {
            root: Gpa(0),
            levels: 4,
        };
        KernelView::without_types(SymbolsBuilder::default().finish(None), space)
    }

    fn brd() -> ModuleSymbols {
        let mut symbols = SymbolsBuilder::default();
        for (name, address, kind) in [
            ("brd_init", 0xffff_ffff_c000_0000, b't'),
            ("brd_exit", 0xffff_ffff_c000_1000, b't'),
            ("brd_devices", 0xffff_ffff_c000_2000, b'd'),
        ] {
            symbols.push(name.as_bytes(), address, kind, false).unwrap();
        }
        let module = Module {
            address: Gva(0),
            name: "brd".to_owned(),
            state: ModuleState::Coming,
            ranges: Vec::new(),
        };
        ModuleSymbols::new(module, symbols.finish(None))
    }

    fn names(probes: &[Probe]) -> Vec<String> {
        probes.iter().map(|probe| probe.name.to_string()).collect()
    }

    #[test]
    fn a_module_is_named_by_a_plain_word_in_the_second_part() {
        for (pattern, expected) in [
            ("kprobe:brd:brd_init:entry", Some("brd")),
            ("kprobe:virtio-net:virtnet_*:", Some("virtio_net")),
            ("tracepoint:ext4:ext4:*", Some("ext4")),
            ("kprobe:brd*:brd_init:entry", None),
            ("kprobe:vmlinux:vfs_read:entry", None),
            ("kprobe:vfs_read:entry", None),
            ("kprobe:vfs_read", None),
            ("tracepoint:ext4:ext4_sync_file_enter", None),
            ("uprobe:/bin/sh:main:entry", None),
            (":brd:brd_init:entry", None),
        ] {
            let parsed = ProbePattern::parse(pattern).unwrap();
            assert_eq!(named(&parsed), expected, "{pattern}");
            // This kernel has no modules that could come.
            assert_eq!(to_come(&view(), &parsed), None);
        }
    }

    #[test]
    fn probes_of_a_module_have_the_forms_that_were_known_before() {
        for (pattern, forms, expected) in [
            (
                "kprobe:brd:brd_init:",
                &["kprobe:brd:brd_init:entry", "kprobe:brd:brd_init:return"][..],
                &["kprobe:brd:brd_init:entry", "kprobe:brd:brd_init:return"][..],
            ),
            (
                "kprobe:brd::entry",
                &["kprobe:brd:*:entry"],
                &["kprobe:brd:brd_init:entry", "kprobe:brd:brd_exit:entry"],
            ),
            (
                "kprobe:brd:brd_[ie]*:0x5",
                &["kprobe:brd:brd_[ie]*:0x5"],
                &["kprobe:brd:brd_init:0x5", "kprobe:brd:brd_exit:0x5"],
            ),
            ("kprobe:brd:brd_init:exit", &[], &[]),
            (
                "kprobe:brd:brd_devices:entry",
                &["kprobe:brd:brd_devices:entry"],
                &[],
            ),
            (
                "kprobe:brd2:brd_init:entry",
                &["kprobe:brd2:brd_init:entry"],
                &[],
            ),
        ] {
            let parsed = ProbePattern::parse(pattern).unwrap();
            let mut found = Vec::new();
            kprobe::list_module(&view(), &brd(), &parsed, &mut |probe| found.push(probe));
            assert_eq!(names(&found), expected, "{pattern}");
            assert_eq!(names(&super::forms(&view(), &parsed)), forms, "{pattern}");
        }
        let tracepoint = ProbePattern::parse("tracepoint:ext4::ext4_sync_*").unwrap();
        assert_eq!(
            names(&forms(&view(), &tracepoint)),
            ["tracepoint:ext4:*:ext4_sync_*"]
        );
    }

    #[test]
    fn forms_of_other_tracers_are_told_apart() {
        for (pattern, expected) in [
            (
                "tracepoint:ext4:ext4_sync",
                "; of a module that is not loaded, it is tracepoint:MODULE:ext4:ext4_sync",
            ),
            ("kprobe:vfs_raed:entry", ""),
            ("kprobe:vfs_raed:0x4", ""),
            ("kprobe:vfs_raed", ""),
            ("vfs_raed", ""),
        ] {
            let parsed = ProbePattern::parse(pattern).unwrap();
            assert_eq!(other_form(&parsed), expected, "{pattern}");
        }
    }
}

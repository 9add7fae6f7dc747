//! The reason why a pattern matches no probe of the kernel, with similar names.

use introspect::kernel::nearest::nearest;

use super::{
    Inspectable, NotFound, SUGGESTIONS, find_tracepoints, kprobe, module, nearest_of_kernel,
    system_calls, timer, tracepoint, uprobe, usdt, watchpoint,
};
use crate::name::ProbePattern;

/// The providers that need no program of the guest.
const PROVIDERS: [&str; 8] = [
    kprobe::PROVIDER,
    system_calls::PROVIDER,
    tracepoint::PROVIDER,
    timer::PROFILE,
    timer::INTERVAL,
    uprobe::PROVIDER,
    usdt::PROVIDER,
    watchpoint::PROVIDER,
];

/// Returns the reason why `pattern` matches no probe of the guest's kernel.
pub(super) fn no_kernel_probe(guest: &dyn Inspectable, pattern: &ProbePattern) -> NotFound {
    let view = guest.view();
    let function = &pattern.function;
    let symbols = view.kernel.symbols.all_of(function);
    let mut functions = symbols.filter(|symbol| symbol.is_text());
    if functions.any(|symbol| view.has_freed(symbol.address)) {
        return NotFound::from(format!(
            "no probe {pattern}: {function} runs at boot only, and the kernel has freed its memory since"
        ));
    }
    if !pattern.text.contains(':') {
        let missing =
            format!("the guest's kernel and its loaded modules have no function {function:?}");
        return NotFound {
            message: missing + &module::hint(view, pattern),
            nearest: nearest_of_kernel(view, pattern),
        };
    }
    let provider = &pattern.provider;
    if provider == tracepoint::PROVIDER {
        return no_tracepoint(guest, pattern);
    }
    if ProbePattern::is_exact(provider) && !PROVIDERS.contains(&provider.as_str()) {
        return no_provider(guest, pattern);
    }
    NotFound {
        message: format!("no probe {pattern}") + &module::hint(view, pattern),
        nearest: nearest_of_kernel(view, pattern),
    }
}

/// Returns the reason for a pattern of tracepoints, with events of similar names.
fn no_tracepoint(guest: &dyn Inspectable, pattern: &ProbePattern) -> NotFound {
    let all = ProbePattern {
        module: String::new(),
        function: String::new(),
        name: String::new(),
        ..pattern.clone()
    };
    let all = find_tracepoints(guest, &all).unwrap_or_default();
    if all.is_empty() {
        return NotFound::from(format!(
            "no probe {pattern}: the guest's kernel has no tracepoints; functions (kprobe) and system calls (syscall) have probes"
        ));
    }
    let hint = module::hint(guest.view(), pattern);
    let similar = match ProbePattern::is_exact(&pattern.name) {
        true => nearest(
            &pattern.name,
            all.iter().map(|probe| probe.name.name.as_str()),
            SUGGESTIONS,
        ),
        false => Vec::new(),
    };
    let of_event = |event: &&str| {
        let named = all.iter().find(|probe| probe.name.name == **event);
        named.map(|probe| format!("{}:{event}", probe.name.function))
    };
    NotFound {
        message: format!("no probe {pattern}{hint}"),
        nearest: similar.iter().filter_map(of_event).collect(),
    }
}

/// Returns the reason for a pattern of an unknown provider: a function of the kernel was named
/// without its provider, or the provider is misspelt.
fn no_provider(guest: &dyn Inspectable, pattern: &ProbePattern) -> NotFound {
    let provider = &pattern.provider;
    let rest = pattern.text.trim_start().strip_prefix(provider.as_str());
    let rest = rest.unwrap_or_default();
    let mut functions = guest.view().kernel.symbols.all_of(provider);
    let nearest = match functions.any(|symbol| symbol.is_text()) {
        true => vec![format!("{}:{provider}{rest}", kprobe::PROVIDER)],
        false => nearest(provider, PROVIDERS.into_iter(), 1)
            .into_iter()
            .map(|known| format!("{known}{rest}"))
            .collect(),
    };
    NotFound {
        message: format!(
            "no probe {pattern}: there is no provider {provider:?}, nor a program with static probes of it"
        ),
        nearest,
    }
}

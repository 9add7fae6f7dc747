//! Words that a Linux kernel needs on its command line, and those that only an interpreting host
//! needs.

/// The words for a machine without ACPI, each with its reason: it has no firmware and no keyboard.
pub const WITHOUT_ACPI: [(&str, &str); 2] = [
    (
        "reboot=k",
        "reset through the keyboard controller, which ends the run",
    ),
    ("panic=-1", "a panic resets at once instead of looping"),
];

/// The words for a host that interprets kernel mode, each with its reason.
pub const INTERPRETED: [(&str, &str); 16] = [
    ("noxsave", "XSAVE is not interpreted"),
    (
        // word*32+bit of arch/x86/include/asm/cpufeatures.h
        "clearcpuid=308,295,288,154,141,151,297,580,129,137,147,148,150,153,317",
        "SMAP, SMEP, FSGSBASE, XSAVE, CX16, POPCNT, ERMS, FSRM, PCLMUL, SSSE3, SSE4, MOVBE, AES and SHA are not interpreted, or slowly",
    ),
    (
        "mitigations=off",
        "page-table isolation and VERW cost thousands of interpreted instructions",
    ),
    ("tsc=reliable", "no clocksource watchdog"),
    (
        "rodata=off",
        "splitting the kernel's large pages takes seconds",
    ),
    (
        "retain_initrd",
        "freeing the initramfs page by page takes time",
    ),
    ("percpu_alloc=page", "no search for large per-CPU areas"),
    ("noreplace-smp", "no patching of lock prefixes"),
    (
        "nokaslr",
        "the kernel stays at its link address without relocating itself",
    ),
    ("nowatchdog", "an interpreted boot looks like a lockup"),
    ("no_timer_check", "timer checks count interpreted loops"),
    ("cryptomgr.notests", "self-tests take minutes"),
    (
        "audit=0",
        "audit makes every system call take the slow path",
    ),
    (
        "cgroup_disable=memory",
        "memory accounting slows every allocation",
    ),
    ("random.trust_cpu=on", "no waiting for entropy"),
    (
        // The kernel passes it to init as an environment variable.
        "GLIBC_TUNABLES=glibc.cpu.hwcaps=-AVX512F,-AVX512VL,-AVX2,-AVX,-AVX_Fast_Unaligned_Load",
        "programs see the CPU's AVX, and a kernel without XSAVE loses its registers when it switches between them",
    ),
];

/// The properties of a machine and its host that decide on words.
#[derive(Debug, Clone, Copy)]
pub struct Needs {
    /// Whether the machine has ACPI tables.
    pub acpi: bool,
    /// Whether the host interprets kernel mode.
    pub interpreted: bool,
}

/// Returns the guest's command line, and the words that were added to `user`'s own.
///
/// Those are the words of the machine and its host, and `devices`, which announce what the guest
/// cannot find by itself. A word is not added if the user has set the same parameter, so that
/// everything can be overridden.
pub fn complete(user: &str, needs: Needs, devices: &[String]) -> (String, Vec<String>) {
    let given: Vec<&str> = user.split_whitespace().map(parameter).collect();
    let words = WITHOUT_ACPI
        .iter()
        .filter(|_| !needs.acpi)
        .chain(INTERPRETED.iter().filter(|_| needs.interpreted))
        .map(|(word, _)| *word)
        .chain(devices.iter().map(String::as_str));
    let added: Vec<String> = words
        .filter(|word| !given.contains(&parameter(word)))
        .map(str::to_owned)
        .collect();
    // The kernel passes everything after "--" to init, so our words go before the user's.
    let line = added
        .iter()
        .map(String::as_str)
        .chain([user.trim()])
        .filter(|w| !w.is_empty())
        .collect::<Vec<_>>()
        .join(" ");
    (line, added)
}

/// Returns the parameter's name. A user's `kaslr` overrides our `nokaslr`.
fn parameter(word: &str) -> &str {
    let name = word.split('=').next().unwrap_or(word);
    if name == "kaslr" { "nokaslr" } else { name }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NATIVE: Needs = Needs {
        acpi: false,
        interpreted: false,
    };

    #[test]
    fn a_machine_with_acpi_on_a_native_host_adds_nothing() {
        let needs = Needs {
            acpi: true,
            interpreted: false,
        };
        let (line, added) = complete(" root=/dev/vda1 ro ", needs, &[]);
        assert_eq!((line.as_str(), added.len()), ("root=/dev/vda1 ro", 0));
    }

    #[test]
    fn a_native_host_adds_only_what_the_machine_itself_needs() {
        let (line, added) = complete("console=ttyS0 quiet", NATIVE, &[]);
        assert_eq!(line, "reboot=k panic=-1 console=ttyS0 quiet");
        assert_eq!(added, ["reboot=k", "panic=-1"]);
    }

    #[test]
    fn what_the_user_gives_is_not_overridden() {
        let (line, added) = complete(
            "panic=5 mitigations=auto kaslr -- -x",
            Needs {
                interpreted: true,
                ..NATIVE
            },
            &[],
        );
        assert!(
            line.ends_with("panic=5 mitigations=auto kaslr -- -x"),
            "{line}"
        );
        assert!(
            !added
                .iter()
                .any(|w| w.starts_with("panic") || w.starts_with("mitig") || w == "nokaslr")
        );
        assert!(added.iter().any(|word| word == "noxsave"));
    }

    #[test]
    fn devices_are_announced_before_the_users_words_unless_the_user_announces_them() {
        let devices = ["bus.device=1".to_owned(), "bus.device=2".to_owned()];
        let (line, _) = complete("-- -x", NATIVE, &devices);
        assert_eq!(line, "reboot=k panic=-1 bus.device=1 bus.device=2 -- -x");
        let (line, added) = complete("bus.device=9", NATIVE, &devices);
        assert_eq!(line, "reboot=k panic=-1 bus.device=9");
        assert_eq!(added, ["reboot=k", "panic=-1"]);
    }
}

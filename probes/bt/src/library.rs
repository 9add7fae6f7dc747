//! Texts that come with exotrace: ready scripts, and translators which any script may use.

/// The names and texts of the structures and translators.
pub const TEXTS: [(&str, &str); 4] = [
    ("icmp.d", include_str!("../translators/icmp.d")),
    ("net.d", include_str!("../translators/net.d")),
    ("proc.d", include_str!("../translators/proc.d")),
    ("sched.d", include_str!("../translators/sched.d")),
];

/// The names and texts of the ready scripts.
pub const SCRIPTS: [(&str, &str); 15] = [
    ("biolatency.bt", include_str!("../scripts/biolatency.bt")),
    ("execsnoop.bt", include_str!("../scripts/execsnoop.bt")),
    ("exit.bt", include_str!("../scripts/exit.bt")),
    ("icmp.bt", include_str!("../scripts/icmp.bt")),
    ("mallocsizes.bt", include_str!("../scripts/mallocsizes.bt")),
    ("offcpu.bt", include_str!("../scripts/offcpu.bt")),
    ("oom.bt", include_str!("../scripts/oom.bt")),
    ("opensnoop.bt", include_str!("../scripts/opensnoop.bt")),
    ("pagefaults.bt", include_str!("../scripts/pagefaults.bt")),
    ("profile.bt", include_str!("../scripts/profile.bt")),
    ("runqlat.bt", include_str!("../scripts/runqlat.bt")),
    ("signals.bt", include_str!("../scripts/signals.bt")),
    ("syscount.bt", include_str!("../scripts/syscount.bt")),
    ("tcpstates.bt", include_str!("../scripts/tcpstates.bt")),
    ("usdt.bt", include_str!("../scripts/usdt.bt")),
];

/// Returns the line that describes a script, from its first comment: `opensnoop - files that
/// programs open`.
#[must_use]
pub fn about(script: &str) -> &str {
    let lines = script
        .lines()
        .map(|line| line.trim_start_matches([' ', '*', '/']));
    let mut said = lines.filter(|line| line.contains(" - ") && !line.starts_with("#!"));
    said.next().unwrap_or_default()
}

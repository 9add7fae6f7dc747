//! Texts that come with exotrace: ready scripts, and translators which any script may use.

/// The names and texts of the structures and translators.
pub const TEXTS: [(&str, &str); 4] = [
    ("icmp.d", include_str!("../translators/icmp.d")),
    ("net.d", include_str!("../translators/net.d")),
    ("proc.d", include_str!("../translators/proc.d")),
    ("sched.d", include_str!("../translators/sched.d")),
];

/// The names and texts of the ready scripts.
pub const SCRIPTS: [(&str, &str); 48] = [
    (
        "bashreadline.bt",
        include_str!("../scripts/bashreadline.bt"),
    ),
    ("biolatency.bt", include_str!("../scripts/biolatency.bt")),
    ("biosnoop.bt", include_str!("../scripts/biosnoop.bt")),
    ("biostacks.bt", include_str!("../scripts/biostacks.bt")),
    ("bitesize.bt", include_str!("../scripts/bitesize.bt")),
    ("cachestat.bt", include_str!("../scripts/cachestat.bt")),
    ("capable.bt", include_str!("../scripts/capable.bt")),
    ("cpuwalk.bt", include_str!("../scripts/cpuwalk.bt")),
    ("dcsnoop.bt", include_str!("../scripts/dcsnoop.bt")),
    ("drsnoop.bt", include_str!("../scripts/drsnoop.bt")),
    ("execsnoop.bt", include_str!("../scripts/execsnoop.bt")),
    ("exit.bt", include_str!("../scripts/exit.bt")),
    ("filelife.bt", include_str!("../scripts/filelife.bt")),
    ("fslatency.bt", include_str!("../scripts/fslatency.bt")),
    ("funccount.bt", include_str!("../scripts/funccount.bt")),
    ("funclatency.bt", include_str!("../scripts/funclatency.bt")),
    (
        "gethostlatency.bt",
        include_str!("../scripts/gethostlatency.bt"),
    ),
    ("hardirqs.bt", include_str!("../scripts/hardirqs.bt")),
    ("icmp.bt", include_str!("../scripts/icmp.bt")),
    ("loads.bt", include_str!("../scripts/loads.bt")),
    ("mallocsizes.bt", include_str!("../scripts/mallocsizes.bt")),
    ("modsnoop.bt", include_str!("../scripts/modsnoop.bt")),
    ("mountsnoop.bt", include_str!("../scripts/mountsnoop.bt")),
    ("naptime.bt", include_str!("../scripts/naptime.bt")),
    ("offcpu.bt", include_str!("../scripts/offcpu.bt")),
    ("oom.bt", include_str!("../scripts/oom.bt")),
    ("opensnoop.bt", include_str!("../scripts/opensnoop.bt")),
    ("pagefaults.bt", include_str!("../scripts/pagefaults.bt")),
    ("pidpersec.bt", include_str!("../scripts/pidpersec.bt")),
    ("profile.bt", include_str!("../scripts/profile.bt")),
    ("runqlat.bt", include_str!("../scripts/runqlat.bt")),
    ("runqlen.bt", include_str!("../scripts/runqlen.bt")),
    ("setuids.bt", include_str!("../scripts/setuids.bt")),
    ("signals.bt", include_str!("../scripts/signals.bt")),
    ("slabtop.bt", include_str!("../scripts/slabtop.bt")),
    ("softirqs.bt", include_str!("../scripts/softirqs.bt")),
    ("statsnoop.bt", include_str!("../scripts/statsnoop.bt")),
    ("syncsnoop.bt", include_str!("../scripts/syncsnoop.bt")),
    ("syscount.bt", include_str!("../scripts/syscount.bt")),
    ("tcpaccept.bt", include_str!("../scripts/tcpaccept.bt")),
    ("tcpconnect.bt", include_str!("../scripts/tcpconnect.bt")),
    ("tcplife.bt", include_str!("../scripts/tcplife.bt")),
    ("tcpretrans.bt", include_str!("../scripts/tcpretrans.bt")),
    ("tcpstates.bt", include_str!("../scripts/tcpstates.bt")),
    ("threadsnoop.bt", include_str!("../scripts/threadsnoop.bt")),
    ("usdt.bt", include_str!("../scripts/usdt.bt")),
    ("vfsstat.bt", include_str!("../scripts/vfsstat.bt")),
    ("writeback.bt", include_str!("../scripts/writeback.bt")),
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

/// Returns the features of a kernel that a script names as its needs in its first comment:
/// `tracepoints and IPv6`.
#[must_use]
pub fn needs(script: &str) -> Option<&str> {
    let (_, after) = script.split_once("Needs a kernel with ")?;
    after.split_once('.').map(|(needs, _)| needs)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scripts_name_tracepoints_as_their_need() {
        for (name, script) in SCRIPTS {
            let named = needs(script).is_some_and(|needs| needs.contains("tracepoints"));
            assert_eq!(named, script.contains("\ntracepoint:"), "{name}");
        }
    }
}

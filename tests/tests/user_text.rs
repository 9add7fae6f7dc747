//! Functions of programs and libraries in a running Linux guest, probed from outside: exact counts by process, and nothing of ours in any
//! byte that the guest reads, copies, runs or frees.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use iced_x86::{Decoder, DecoderOptions};
use introspect::system::TextFile;
use introspect::x86_64::PAGE;
use introspect::{Gpa, PhysicalMemory};
use probes::engine::{
    Capture, EnableError, Engine, EngineStats, Filter, Only, ProbeStats, RingSize, Session,
};
use probes::event::{Event, EventKind};
use probes::kernel_view::KernelView;
use probes::name::ProbePattern;
use probes::probe::{Moment, Probe, Target};
use probes::provider::uprobe;
use support::insight::Insight;
use support::shell::{Answer, BOOT_LIMIT, COMMAND_LIMIT};
use support::tracing::{self, SLOTS};
use support::{Host, Kernel, Linux, Shell, host, shell};
use vmm::trap::{INT3, SiteId};

const FSLOAD: &str = "/bin/fsload";
const BUSYBOX: &str = "/bin/busybox";
const ALLOCS: &str = "/bin/allocs";
const LIBC: &str = "/lib/x86_64-linux-gnu/libc.so.6";
/// Milliseconds: for a program that is to stay where it is.
const FOR_EVER: &str = "100000000";
/// Instructions of busybox that are probed, from its first on.
const POINTS: usize = 200;
/// Lets a process go on that waits for a line from `/tmp/go`, and waits until it and its children, which hold `/tmp/done` open, have ended.
const RELEASE: &str = "(cat /tmp/done & echo > /tmp/go; wait)";
/// Calls of a function whose count is to be exact.
const MANY: u64 = 20_000;

/// A traced guest.
struct Guest {
    engine: Engine,
    insight: Insight,
    view: Arc<KernelView>,
    shell: Shell,
}

impl Guest {
    fn new(host: &Host) -> Self {
        Self::of(Shell::new(host))
    }

    fn of(shell: Shell) -> Self {
        let view = Arc::new(shell.linux.view());
        Self {
            engine: tracing::engine(&shell.linux, &view),
            insight: Insight::new(&shell.linux),
            view,
            shell,
        }
    }

    /// Starts a program in the background; its number.
    fn spawn(&self, command: &str) -> u32 {
        let answer = self
            .shell
            .output(&format!("({command} > /dev/null & echo $!)"));
        let pid = answer.parse();
        pid.unwrap_or_else(|e| panic!("{command}: {answer:?}: {e}"))
    }

    /// The same, of one that does its work and then sleeps; waits for that.
    fn spawn_sleeper(&self, command: &str) -> u32 {
        let pid = self.spawn(command);
        self.shell.output(&format!(
            "until grep -q ') S ' /proc/{pid}/stat; do busybox usleep 20000; done"
        ));
        pid
    }

    /// Ends a process and waits until it is gone.
    fn kill(&self, pid: u32) {
        self.shell.output(&format!(
            "kill -9 {pid}; while [ -e /proc/{pid} ]; do busybox usleep 20000; done"
        ));
    }

    /// The probes of a pattern, once a process has mapped the file.
    fn probes(&self, pattern: &str) -> Vec<Probe> {
        let parsed = ProbePattern::parse(pattern).unwrap_or_else(|e| panic!("{e}"));
        let machine = &self.shell.linux.machine;
        let unpatched = |gpa: Gpa, buf: &mut [u8]| machine.traps().read_unpatched(gpa, buf).is_ok();
        let deadline = Instant::now() + COMMAND_LIMIT;
        loop {
            let found = self
                .insight
                .look(machine, |look| uprobe::find(&look, &parsed, &unpatched));
            let found = found.unwrap_or_else(|e| panic!("{pattern}: {e}"));
            if !found.probes.is_empty() {
                return found.probes;
            }
            assert!(Instant::now() < deadline, "{pattern}: {found:?}");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Looks at a file that a process has mapped.
    fn file<T>(&self, path: &str, ask: impl FnOnce(&TextFile<'_>) -> T) -> T {
        let machine = &self.shell.linux.machine;
        self.insight.look(machine, |look| {
            let files = look.text_files(None, &|found| found == path.as_bytes());
            let files = files.unwrap_or_else(|e| panic!("{path}: {e}"));
            let [file] = files.files.as_slice() else {
                panic!("{path}: {} files", files.files.len())
            };
            ask(file)
        })
    }

    fn session(&self) -> Traced<'_> {
        let session = self.engine.session(RingSize {
            slots: SLOTS,
            ..RingSize::default()
        });
        Traced {
            guest: self,
            session: session.unwrap_or_else(|e| panic!("{e}")),
            probes: Vec::new(),
            before: self.engine.stats(),
        }
    }

    /// User sites that are armed.
    fn user_sites(&self) -> BTreeSet<SiteId> {
        let stats = self.shell.linux.machine.traps().stats();
        let user = stats.into_iter().filter(|site| site.user);
        user.map(|site| site.site).collect()
    }

    /// User sites that are armed, but not in the pages of `sites`.
    fn sites_elsewhere(&self, sites: &BTreeSet<SiteId>) -> BTreeSet<SiteId> {
        let page = |site: &SiteId| site.0.0 / PAGE;
        let pages: BTreeSet<u64> = sites.iter().map(page).collect();
        let mut found = self.user_sites();
        found.retain(|site| !pages.contains(&page(site)));
        found
    }

    /// What stands in memory at a site, traps and all.
    fn byte(&self, site: SiteId) -> u8 {
        let mut byte = [0];
        let machine = &self.shell.linux.machine;
        let _paused = machine.pause();
        let read = machine.ram().read_physical(site.0, &mut byte);
        read.unwrap_or_else(|e| panic!("{e}"));
        byte[0]
    }

    /// Nothing is armed, and what was stands in memory no more.
    fn assert_clean(&self, sites: &BTreeSet<SiteId>) {
        assert_eq!(self.shell.linux.machine.traps().hits(), []);
        let left = sites.iter().filter(|site| self.byte(**site) == INT3);
        assert_eq!(left.collect::<Vec<_>>(), Vec::<&SiteId>::new());
    }

    /// Output and status of commands that may take longer, one after the other.
    fn answers(&self, commands: &[String]) -> Vec<Answer> {
        let answer = |command: &String| self.shell.start(command).answer(4 * COMMAND_LIMIT);
        commands.iter().map(answer).collect()
    }
}

/// A session, and its probes by their numbers.
struct Traced<'g> {
    guest: &'g Guest,
    session: Session,
    probes: Vec<Probe>,
    before: EngineStats,
}

impl Traced<'_> {
    /// Enables the probes of a pattern; their numbers.
    fn enable(&mut self, pattern: &str, filter: &Filter) -> Vec<u32> {
        let probes = self.guest.probes(pattern);
        let enabled = probes.iter().map(|probe| self.enable_one(probe, filter));
        enabled
            .map(|number| number.unwrap_or_else(|e| panic!("{pattern}: {e}")))
            .collect()
    }

    fn enable_one(&mut self, probe: &Probe, filter: &Filter) -> Result<u32, EnableError> {
        let _paused = self.guest.shell.linux.machine.pause();
        let number = self
            .session
            .enable(probe, filter.clone(), Capture::default())?;
        self.probes.push(probe.clone());
        Ok(number)
    }

    fn stats(&self, number: u32) -> ProbeStats {
        let stats = self.session.probe_stats(number);
        stats.unwrap_or_else(|| panic!("no probe {number}"))
    }

    /// Hits that were recorded of the entry and the return of a function.
    fn recorded(&self, function: &str) -> (u64, u64) {
        let of = |moment: Moment| {
            let numbers = (0..).zip(&self.probes).filter(|(_, probe)| {
                probe.name.function == function
                    && matches!(probe.target, Target::User { moment: of, .. } if of == moment)
            });
            numbers.map(|(number, _)| self.stats(number).recorded).sum()
        };
        (of(Moment::Entry), of(Moment::Return))
    }

    /// Ends it: its events. All counts agree.
    fn finish(mut self) -> Vec<Event> {
        let paused = self.guest.shell.linux.machine.pause();
        let engine = self.session.engine().stats();
        self.session.disable_all();
        drop(paused);
        let mut events = Vec::new();
        self.session.drain(|event| events.push(event));
        let stats = self.session.stats();
        let all = stats.probes;
        let told = format!("{stats:?}, {engine:?}");
        assert_eq!(
            all.hits,
            all.filtered + all.recorded + all.dropped,
            "{told}"
        );
        assert_eq!(all.dropped, 0, "{told}");
        assert_eq!(stats.read, all.recorded, "{told}");
        assert_eq!(events.len() as u64, all.recorded, "{told}");
        assert_eq!(engine.without_return, self.before.without_return, "{told}");
        assert_eq!(engine.unknown_task, self.before.unknown_task, "{told}");
        assert!(events.is_sorted_by_key(|event| event.tsc), "{told}");
        events
    }
}

/// Instruction starts of busybox, which has no symbols, from its entry point on.
fn busybox_points(guest: &Guest) -> Vec<u64> {
    guest.file(BUSYBOX, |file| {
        let header = file.bytes_at(0, 64);
        let entry = u64::from_le_bytes(header[24..32].try_into().unwrap_or_default());
        let segments = file.segments();
        let place = segments.iter().find_map(|s| s.file_offset_of(entry));
        let (offset, _) = place.unwrap_or_else(|| panic!("no segment has {entry:#x}"));
        let code = file.bytes_at(offset, 4 * POINTS);
        assert_eq!(
            code.len(),
            4 * POINTS,
            "the text at {entry:#x} is not in memory"
        );
        let decoder = Decoder::with_ip(64, &code, offset, DecoderOptions::NONE);
        let starts = decoder
            .into_iter()
            .take_while(|i| !i.is_invalid() && i.next_ip() < offset + 3 * POINTS as u64);
        starts.map(|instruction| instruction.ip()).collect()
    })
}

/// Entries and returns of the functions of fsload, or a copy of it. Its first, which is called by nobody, never returns.
fn enable_fsload(traced: &mut Traced<'_>, path: &str) {
    traced.enable(&format!("uprobe:{path}:*:entry"), &Filter::default());
    for function in ["program", "one_round", "*_file"] {
        let returns = format!("uprobe:{path}:{function}:return");
        traced.enable(&returns, &Filter::default());
    }
}

fn pid_filter(pid: u32, follow: bool) -> Filter {
    Filter {
        pids: Only::In(vec![pid]),
        follow,
        ..Filter::default()
    }
}

#[test]
fn whoever_reads_or_copies_traced_programs_gets_their_own_bytes() {
    let host = host!();
    let guest = Guest::new(host);
    let shell = &guest.shell;
    let holder = guest.spawn_sleeper(&format!("fsload 0 {FOR_EVER}"));
    guest.spawn_sleeper(&format!("allocs 0 {FOR_EVER}"));
    shell.type_lines(&["mkdir /tmp/d"]);
    // Pieces of large files around what is probed, of odd lengths at odd places.
    let malloc = guest.probes(&format!("uprobe:{LIBC}:malloc:entry"));
    let Some(Target::User { text: malloc, .. }) = malloc.first().map(|probe| &probe.target) else {
        panic!("{malloc:?}")
    };
    let piece = |file: &str, offset: u64| {
        let skip = (offset / 333).saturating_sub(20);
        format!("dd if={file} bs=333 skip={skip} count=40 2> /dev/null | busybox sha256sum")
    };
    let points = busybox_points(&guest);
    let mut commands = vec![
        format!("busybox sha256sum {FSLOAD} {ALLOCS} {LIBC}"),
        piece(LIBC, malloc.offset),
        piece(BUSYBOX, points[0]),
        // Copies run as the originals do.
        format!(
            "cp {FSLOAD} /tmp/d/fsload && busybox cmp {FSLOAD} /tmp/d/fsload && /tmp/d/fsload 2 0"
        ),
        format!("dd if={FSLOAD} bs=13 skip=7 2> /dev/null | busybox sha256sum"),
        format!(
            "dd if={FSLOAD} bs=177 of=/tmp/d/odd 2> /dev/null; busybox cmp {FSLOAD} /tmp/d/odd"
        ),
        format!(
            "tail -c 1501 {FSLOAD} | busybox sha256sum; head -c 5001 {ALLOCS} | busybox sha256sum"
        ),
        // Several segments.
        format!("scatter {FSLOAD}; scatter {ALLOCS}"),
        // As another process has it in memory.
        format!(
            "dd if=/proc/{holder}/mem bs=4096 skip=1024 count=1 2> /dev/null | busybox sha256sum"
        ),
        format!(
            "dd if=/proc/{holder}/mem bs=333 skip=12597 count=7 2> /dev/null | busybox sha256sum"
        ),
    ];
    for file in [FSLOAD, ALLOCS] {
        // sendfile(2) to a pipe, where the pages themselves lie until they are read; and to a file.
        commands.push(format!("cat {file} | busybox sha256sum"));
        commands.push(format!(
            "cat {file} > /tmp/d/cat; busybox cmp {file} /tmp/d/cat"
        ));
    }
    let started = Instant::now();
    let before = guest.answers(&commands);
    println!("untraced: {:?}", started.elapsed());
    for (command, answer) in commands.iter().zip(&before) {
        assert_eq!(answer.status, 0, "{command}: {answer:?}");
    }

    let mut traced = guest.session();
    let any = Filter::default();
    enable_fsload(&mut traced, FSLOAD);
    traced.enable(&format!("uprobe:{ALLOCS}:one_round:entry"), &any);
    traced.enable(&format!("uprobe:{ALLOCS}:one_round:return"), &any);
    for function in ["malloc", "free"] {
        for moment in ["entry", "return"] {
            traced.enable(&format!("uprobe:{LIBC}:{function}:{moment}"), &any);
        }
    }
    let mut armed_points = 0;
    for offset in points {
        let probe = guest.probes(&format!("uprobe:{BUSYBOX}:-:{offset:#x}"));
        match traced.enable_one(&probe[0], &any) {
            Ok(_) => armed_points += 1,
            Err(error) => println!("{error}"),
        }
    }
    println!("{armed_points} points in busybox");
    assert!(armed_points > 50, "{armed_points}");
    // Their return addresses get traps, too.
    for (command, printed) in [
        ("fsload 2 0", "fsload: 2 rounds"),
        ("allocs 3 0 | tail -n 1", "allocs: 3 rounds"),
    ] {
        assert_eq!(shell.output(command), printed);
    }
    assert_eq!(traced.recorded("one_round"), (5, 5));
    let mut sites = guest.user_sites();
    let (armed, stand) = (
        sites.len(),
        sites
            .iter()
            .filter(|site| guest.byte(**site) == INT3)
            .count(),
    );
    assert_eq!(armed, stand, "before anything reads them");

    let started = Instant::now();
    let after = guest.answers(&commands);
    println!("traced, {armed} sites: {:?}", started.elapsed());
    for (command, (before, after)) in commands.iter().zip(before.iter().zip(&after)) {
        assert_eq!(after, before, "{command}");
    }
    let stats = guest.engine.stats();
    println!("{stats:?}");
    assert!(stats.hidden > armed as u64, "{stats:?}");
    assert!(stats.lifted > 0, "cat to a file: {stats:?}");
    // They are still there, and hit.
    let rounds = traced.recorded("one_round");
    assert_eq!(shell.output("fsload 4 0"), "fsload: 4 rounds");
    assert_eq!(traced.recorded("one_round"), (rounds.0 + 4, rounds.1 + 4));
    assert_eq!(guest.engine.stats().waiting_pages, 0);
    sites.extend(guest.user_sites());
    traced.finish();
    guest.assert_clean(&sites);
    assert_eq!(guest.answers(&commands[..2]), before[..2]);
}

#[test]
fn pages_that_are_freed_while_traced_hold_nothing_of_ours() {
    let host = host!();
    let guest = Guest::new(host);
    let shell = &guest.shell;
    let part = format!("dd if={BUSYBOX} bs=64k count=4 2> /dev/null");
    let sum = shell.output(&format!("{part} | busybox sha256sum"));
    shell.type_lines(&[&format!("cp {FSLOAD} /tmp/y")]);
    let holder = guest.spawn_sleeper(&format!("/tmp/y 0 {FOR_EVER}"));
    let mut traced = guest.session();
    enable_fsload(&mut traced, "/tmp/y");
    assert_eq!(shell.output("/tmp/y 3 0"), "fsload: 3 rounds");
    assert_eq!(traced.recorded("one_round"), (3, 3));
    let sites = guest.user_sites();
    let entries = traced
        .probes
        .iter()
        .filter(|probe| probe.kind() == EventKind::Entry)
        .count();
    assert!(
        sites.len() > entries,
        "{} sites, no return addresses",
        sites.len()
    );
    assert!(sites.iter().all(|site| guest.byte(*site) == INT3));
    // Other files' pages are its pages' neighbours in memory.
    shell.type_lines(&[
        "for n in 1 2 3; do cp /tmp/y /tmp/y$n; done; rm /tmp/y1 /tmp/y3",
        "dd if=/dev/zero of=/tmp/near bs=4k count=64 2> /dev/null; rm /tmp/near /tmp/y2",
    ]);
    assert_eq!(guest.user_sites(), sites, "what is written next to it");

    guest.kill(holder);
    assert_eq!(guest.user_sites(), sites, "the file is still there");
    shell.type_lines(&["rm /tmp/y"]);
    assert_eq!(guest.user_sites(), BTreeSet::new());
    assert!(sites.iter().all(|site| guest.byte(*site) != INT3));
    // The memory becomes something else: zeros, and other files.
    shell.type_lines(&[
        "dd if=/dev/zero of=/tmp/zeros bs=64k count=4 2> /dev/null",
        &format!("{part} > /tmp/b1; cp /tmp/b1 /tmp/b2; cp {FSLOAD} /tmp/y"),
    ]);
    for copy in ["b1", "b2"] {
        assert_eq!(
            shell.output(&format!("busybox sha256sum < /tmp/{copy}")),
            sum
        );
    }
    assert_eq!(
        shell.output("busybox tr -d '\\000' < /tmp/zeros | wc -c"),
        "0"
    );
    // A file of the same name is another file.
    assert_eq!(shell.output("/tmp/y 2 0"), "fsload: 2 rounds");
    assert_eq!(traced.recorded("one_round"), (3, 3));
    assert_eq!(guest.engine.stats().waiting_pages, 0);
    let events = traced.finish();
    assert!(!events.is_empty());
    assert_eq!(guest.engine.stats().waiting_returns, 0);
    guest.assert_clean(&BTreeSet::new());
}

#[test]
fn a_traced_file_that_is_written_is_what_was_written() {
    let host = host!();
    let guest = Guest::new(host);
    let shell = &guest.shell;
    shell.type_lines(&[&format!("cp {FSLOAD} /tmp/y; cp {FSLOAD} /tmp/z")]);
    let holder = guest.spawn_sleeper(&format!("/tmp/y 0 {FOR_EVER}"));
    let mut traced = guest.session();
    enable_fsload(&mut traced, "/tmp/y");
    shell.output("/tmp/y 2 0");
    guest.kill(holder);
    let sites = guest.user_sites();
    let stats = guest.engine.stats();
    assert!(
        !sites.is_empty(),
        "{stats:?} {:?}",
        traced.recorded("one_round")
    );
    let overwrite = |file: &str| {
        shell.output(&format!(
            "dd if={BUSYBOX} of=/tmp/{file} bs=100 seek=3 skip=50 count=5 conv=notrunc 2> /dev/null; busybox sha256sum < /tmp/{file}"
        ))
    };
    assert_eq!(overwrite("y"), overwrite("z"));
    assert_eq!(guest.user_sites(), BTreeSet::new());
    assert!(guest.engine.stats().waiting_pages > 0);
    // What it was: its functions are found again when it is run.
    shell.type_lines(&[
        &format!("dd if={FSLOAD} of=/tmp/y conv=notrunc 2> /dev/null"),
        &format!("busybox cmp {FSLOAD} /tmp/y"),
    ]);
    let before = traced.recorded("one_round");
    assert_eq!(shell.output("/tmp/y 3 0"), "fsload: 3 rounds");
    assert_eq!(traced.recorded("one_round"), (before.0 + 3, before.1 + 3));
    assert_eq!(guest.engine.stats().waiting_pages, 0);
    assert_eq!(
        shell.output(&format!("busybox cmp {FSLOAD} /tmp/y && echo same")),
        "same"
    );
    traced.finish();
    guest.assert_clean(&sites);
}

#[test]
fn a_page_that_was_not_in_memory_is_traced_from_its_first_instruction_on() {
    let host = host!();
    let guest = Guest::new(host);
    let shell = &guest.shell;
    shell.type_lines(&[&format!("cp {FSLOAD} /tmp/y")]);
    let holder = guest.spawn_sleeper(&format!("/tmp/y 0 {FOR_EVER}"));
    let mut probes = Vec::new();
    for probe in [
        "_start:entry",
        "program:entry",
        "program:return",
        "one_round:entry",
        "one_round:return",
    ] {
        probes.extend(guest.probes(&format!("uprobe:/tmp/y:{probe}")));
    }
    guest.kill(holder);
    let mut traced = guest.session();
    for probe in &mut probes {
        // As it is of a file whose pages were never read from the disk.
        if let Target::User { text, .. } = &mut probe.target {
            text.physical = None;
            text.code.clear();
        }
        let enabled = traced.enable_one(probe, &Filter::default());
        enabled.unwrap_or_else(|e| panic!("{e}"));
    }
    assert_eq!(guest.engine.stats().waiting_pages, 3);
    assert_eq!(guest.user_sites(), BTreeSet::new());
    assert_eq!(shell.output("/tmp/y 5 0"), "fsload: 5 rounds");
    assert_eq!(guest.engine.stats().waiting_pages, 0);
    for (function, calls) in [
        ("_start", (1, 0)),
        ("program", (1, 1)),
        ("one_round", (5, 5)),
    ] {
        assert_eq!(traced.recorded(function), calls, "{function}");
    }
    let sites = guest.user_sites();
    traced.finish();
    guest.assert_clean(&sites);
}

#[test]
fn a_program_that_writes_its_own_text_sees_its_own_bytes() {
    let host = host!();
    let guest = Guest::new(host);
    let shell = &guest.shell;
    let untraced = shell.output("selfmod 7");
    assert!(untraced.starts_with("selfmod: 41 42 "), "{untraced}");
    // Its file is found while a process has it mapped.
    let holder = guest.spawn("selfmod 1000000000000");
    let mut traced = guest.session();
    let probes: Vec<Probe> = ["entry", "return"]
        .iter()
        .flat_map(|moment| guest.probes(&format!("uprobe:/bin/selfmod:steady:{moment}")))
        .collect();
    guest.kill(holder);
    for probe in &probes {
        let enabled = traced.enable_one(probe, &Filter::default());
        enabled.unwrap_or_else(|e| panic!("{e}"));
    }
    let hidden = guest.engine.stats().hidden;
    for _ in 0..2 {
        assert_eq!(shell.output("selfmod 7"), untraced);
    }
    // What it calls while it can write to its text is not seen; what it calls before and after is.
    assert_eq!(traced.recorded("steady"), (28, 28));
    let stats = guest.engine.stats();
    // The first instruction, and one return address of two: the other one was not met yet.
    assert!(stats.hidden - hidden >= 4, "{stats:?}");
    let sites = guest.user_sites();
    traced.finish();
    guest.assert_clean(&sites);
}

#[test]
fn a_program_whose_text_another_writes_has_its_own_bytes() {
    let host = host!();
    let guest = Guest::new(host);
    let shell = &guest.shell;
    shell.type_lines(&[&format!("cp {FSLOAD} /tmp/y")]);
    let pid = guest.spawn_sleeper("/tmp/y 0 1000");
    let mut traced = guest.session();
    enable_fsload(&mut traced, "/tmp/y");
    let sites = guest.user_sites();
    // A byte of the ELF header that means nothing, as a debugger would write a breakpoint.
    let seen = shell.output(&format!(
        "printf X | dd of=/proc/{pid}/mem bs=1 seek=$((0x400009)) conv=notrunc 2> /dev/null; \
         dd if=/proc/{pid}/mem bs=64 skip=$((0x400000 / 64)) count=16 2> /dev/null | busybox sha256sum; \
         head -c 1024 {FSLOAD} > /tmp/z; printf X | dd of=/tmp/z bs=1 seek=9 conv=notrunc 2> /dev/null; \
         busybox sha256sum < /tmp/z"
    ));
    let sums: Vec<&str> = seen.lines().collect();
    assert_eq!(sums.len(), 2, "{seen}");
    assert_eq!(sums[0], sums[1]);
    // It goes on, and is seen: its page is its own, with traps of its own.
    let own = guest.sites_elsewhere(&sites);
    let functions = traced.probes.iter();
    let functions = functions.filter(|probe| probe.kind() == EventKind::Entry);
    // And return addresses, if it was not asleep.
    assert!(own.len() >= functions.count(), "{own:?}");
    assert!(own.iter().all(|site| guest.byte(*site) == INT3));
    let before = traced.recorded("one_round");
    let wait = Instant::now() + 2 * COMMAND_LIMIT;
    while traced.recorded("one_round").1 < before.1 + 2 {
        assert!(
            Instant::now() < wait,
            "{before:?} {:?}",
            guest.engine.stats()
        );
        std::thread::sleep(Duration::from_millis(100));
    }
    // Other processes have the file's page, and this one's is nobody's when it has ended.
    assert_eq!(shell.output("/tmp/y 3 0"), "fsload: 3 rounds");
    guest.kill(pid);
    assert_eq!(guest.user_sites().intersection(&own).count(), 0);
    assert!(own.iter().all(|site| guest.byte(*site) != INT3));
    traced.finish();
    guest.assert_clean(&sites);
}

#[test]
fn where_another_debugger_has_its_breakpoint_ours_comes_back_after_it() {
    const TEXT: u64 = 0x40_0000;
    let host = host!();
    let guest = Guest::new(host);
    let shell = &guest.shell;
    shell.type_lines(&[&format!("cp {FSLOAD} /tmp/y")]);
    let pid = guest.spawn_sleeper(&format!("/tmp/y 0 {FOR_EVER}"));
    let mut traced = guest.session();
    enable_fsload(&mut traced, "/tmp/y");
    let of_file = guest.user_sites();
    let own = || guest.sites_elsewhere(&of_file);
    let probe = &guest.probes("uprobe:/tmp/y:one_round:entry")[0];
    let Target::User { text, .. } = &probe.target else {
        panic!("{probe:?}")
    };
    let (at, original) = (TEXT + text.offset, text.code[0]);
    let write = |byte: u8| {
        shell.output(&format!(
            "printf '\\{byte:03o}' | dd of=/proc/{pid}/mem bs=1 seek={at} conv=notrunc 2> /dev/null"
        ))
    };
    let read = || {
        shell.output(&format!(
            "dd if=/proc/{pid}/mem bs=1 skip={at} count=1 2> /dev/null | busybox od -A n -t u1"
        ))
    };
    write(original);
    let all = own();
    assert_eq!(all.len(), of_file.len(), "{all:?} {of_file:?}");
    for _ in 0..2 {
        write(INT3);
        let rest = own();
        let gone: Vec<_> = all.difference(&rest).collect();
        assert_eq!((rest.len(), gone.len()), (all.len() - 1, 1), "{gone:?}");
        assert_eq!(gone[0].0.0 % PAGE, text.offset % PAGE);
        assert_eq!(guest.byte(*gone[0]), INT3, "it is the debugger's");
        assert_eq!(read().trim(), INT3.to_string());
        write(original);
        assert_eq!(own(), all);
        assert_eq!(read().trim(), original.to_string());
    }
    // Probes come and go there as in the file.
    let mut other = guest.session();
    other.enable("uprobe:/tmp/y:program:entry", &Filter::default());
    traced.finish();
    assert_eq!(own().len(), 1);
    enable_fsload(&mut other, "/tmp/y");
    assert_eq!(own(), all);
    other.finish();
    guest.assert_clean(&all);
    guest.kill(pid);
}

#[test]
fn only_the_process_asked_for_is_traced() {
    let host = host!();
    let guest = Guest::new(host);
    let shell = &guest.shell;
    shell.type_lines(&["mkfifo /tmp/go /tmp/done"]);
    guest.spawn_sleeper(&format!("fsload 0 {FOR_EVER}"));
    // The traced one becomes another program with the same number.
    let pid = guest.spawn_sleeper("sh -c 'read line < /tmp/go; exec fsload 6 0' 3> /tmp/done");
    let mut traced = guest.session();
    let filter = pid_filter(pid, false);
    traced.enable(&format!("uprobe:{FSLOAD}:one_round:entry"), &filter);
    traced.enable(&format!("uprobe:{FSLOAD}:one_round:return"), &filter);
    let answer = shell.output(&format!("{RELEASE}; fsload 5 0"));
    assert_eq!(answer, "fsload: 5 rounds");
    assert_eq!(traced.recorded("one_round"), (6, 6));
    let (entries, returns) = (traced.stats(0), traced.stats(1));
    assert_eq!((entries.hits, entries.filtered), (11, 5));
    // Nobody waits for the others' returns.
    assert_eq!((returns.hits, returns.filtered), (6, 0));
    let events = traced.finish();
    assert!(events.iter().all(|event| event.pid == Some(pid)));
    guest.assert_clean(&BTreeSet::new());
}

#[test]
fn children_are_traced_where_the_filter_follows_them() {
    let host = host!();
    let guest = Guest::new(host);
    let shell = &guest.shell;
    shell.type_lines(&["mkfifo /tmp/go /tmp/done"]);
    guest.spawn_sleeper(&format!("fsload 0 {FOR_EVER}"));
    let children = "for i in 1 2 3; do fsload 2 0; syscount 7; done; (fsload 1 0; syscount 5); sh -c \"fsload 3 0; true\"; true";
    let pid = guest.spawn_sleeper(&format!(
        "sh -c 'read line < /tmp/go; {children}' 3> /tmp/done"
    ));
    let getppid = tracing::probe(&guest.view, "syscall::getppid:entry");
    let mut sessions = [true, false].map(|follow| {
        let mut traced = guest.session();
        let filter = pid_filter(pid, follow);
        let filter = Filter {
            comms: Only::In(vec![b"syscount".to_vec(), b"fsload".to_vec()]),
            ..filter
        };
        traced.enable(&format!("uprobe:{FSLOAD}:one_round:entry"), &filter);
        traced.enable(&format!("uprobe:{FSLOAD}:one_round:return"), &filter);
        let enabled = traced.enable_one(&getppid, &filter);
        enabled.unwrap_or_else(|e| panic!("{e}"));
        traced
    });
    shell.output(&format!("{RELEASE}; fsload 4 0; syscount 11"));
    for (traced, seen) in sessions.iter().zip([true, false]) {
        let (rounds, calls) = if seen { (10, 26) } else { (0, 0) };
        assert_eq!(traced.recorded("one_round"), (rounds, rounds), "{seen}");
        assert_eq!(traced.stats(0).hits, 14, "{seen}");
        assert_eq!(traced.stats(2).recorded, calls, "{seen}");
    }
    // Whoever gets a number of theirs later is nobody's child.
    let [following, _] = &mut sessions;
    assert_eq!(shell.output("fsload 2 0"), "fsload: 2 rounds");
    assert_eq!(following.recorded("one_round"), (10, 10));
    let [following, alone] = sessions;
    let events = following.finish();
    let pids: BTreeSet<_> = events.iter().map(|event| event.pid).collect();
    assert_eq!(pids.len(), 3 + 3 + 2 + 1, "{pids:?}");
    assert!(
        !pids.contains(&Some(pid)) && !pids.contains(&None),
        "{pids:?}"
    );
    assert_eq!(alone.finish(), []);
    guest.assert_clean(&BTreeSet::new());
}

/// `one_round` of allocs, called many times by each of `commands`' processes while another session comes and goes.
fn many_calls(guest: &Guest, command: &str, processes: u64) {
    let shell = &guest.shell;
    guest.spawn_sleeper(&format!("allocs 0 {FOR_EVER}"));
    let patterns = ["entry", "return"].map(|moment| format!("uprobe:{ALLOCS}:one_round:{moment}"));
    let probes: Vec<Probe> = patterns
        .iter()
        .flat_map(|pattern| guest.probes(pattern))
        .collect();
    let mut traced = guest.session();
    for probe in &probes {
        let enabled = traced.enable_one(probe, &Filter::default());
        enabled.unwrap_or_else(|e| panic!("{e}"));
    }
    let done = AtomicBool::new(false);
    let started = Instant::now();
    let mut events = Vec::new();
    let others = std::thread::scope(|scope| {
        let others = scope.spawn(|| {
            let (mut times, mut hits) = (0, ProbeStats::default());
            while !done.load(Ordering::Relaxed) {
                let size = RingSize {
                    slots: SLOTS,
                    ..RingSize::default()
                };
                let mut other = guest.engine.session(size).unwrap_or_else(|e| panic!("{e}"));
                for probe in &probes {
                    let enabled = other.enable(probe, Filter::default(), Capture::default());
                    enabled.unwrap_or_else(|e| panic!("{e}"));
                }
                std::thread::sleep(Duration::from_millis(50));
                other.disable_all();
                // No hit that had begun before is still under way.
                let paused = shell.linux.machine.pause();
                let mut read = 0;
                other.drain(|_| read += 1);
                let stats = other.stats().probes;
                drop(paused);
                assert_eq!(read, stats.recorded, "{stats:?}");
                assert_eq!(stats.hits, stats.recorded + stats.dropped, "{stats:?}");
                times += 1;
                hits += stats;
            }
            (times, hits)
        });
        let started = shell.start(command);
        let answer = started.answer(8 * COMMAND_LIMIT);
        done.store(true, Ordering::Relaxed);
        assert_eq!(
            answer
                .output
                .matches(&format!("allocs: {MANY} rounds"))
                .count() as u64,
            processes,
            "{answer:?}"
        );
        others
            .join()
            .unwrap_or_else(|_| panic!("the other session failed"))
    });
    let calls = MANY * processes;
    println!(
        "{calls} calls in {:?}; others came {} times and saw {:?}",
        started.elapsed(),
        others.0,
        others.1
    );
    assert!(others.0 > 2 && others.1.hits > 0, "{others:?}");
    let engine = guest.engine.stats();
    for number in 0..2 {
        let stats = traced.stats(number);
        assert_eq!(stats.hits, calls, "{stats:?}, {engine:?}");
        assert_eq!(stats.recorded + stats.dropped, stats.hits, "{stats:?}");
    }
    assert_eq!(
        (
            engine.lost_returns,
            engine.without_return,
            engine.waiting_returns,
            engine.unknown_task
        ),
        (0, 0, 0, 0),
        "{engine:?}"
    );
    let recorded = traced.stats(0).recorded + traced.stats(1).recorded;
    traced.session.disable_all();
    traced.session.drain(|event| events.push(event));
    assert_eq!(events.len() as u64, recorded);
    assert_eq!(traced.session.stats().read, recorded);
    drop(traced);
    guest.assert_clean(&BTreeSet::new());
}

#[test]
fn twenty_thousand_calls_are_twenty_thousand_events() {
    let host = host!();
    many_calls(&Guest::new(host), &format!("allocs {MANY} 0"), 1);
}

#[test]
fn calls_on_two_cpus_are_all_seen() {
    let host = host!();
    let linux = Linux::boot(
        host,
        &support::linux::BootOptions {
            kernel: Kernel::small(),
            initramfs: Some(&shell::full_initramfs()),
            command_line: &guest::kernel::cmdline(),
            cpus: 2,
            protocol: None,
        },
    );
    let started = Instant::now();
    let shell = Shell::at_prompt(linux);
    println!(
        "booted in {:?} of at most {BOOT_LIMIT:?}",
        started.elapsed()
    );
    let guest = Guest::of(shell);
    let command =
        format!("busybox taskset 1 allocs {MANY} 0 & busybox taskset 2 allocs {MANY} 0; wait");
    many_calls(&guest, &command, 2);
}

#[test]
fn what_malloc_gives_is_what_free_gets() {
    const ROUNDS: u64 = 50;
    let host = host!();
    let guest = Guest::new(host);
    let shell = &guest.shell;
    shell.type_lines(&["mkfifo /tmp/go /tmp/done"]);
    guest.spawn_sleeper(&format!("allocs 0 {FOR_EVER}"));
    let pid = guest.spawn_sleeper(&format!(
        "sh -c 'read line < /tmp/go; exec allocs {ROUNDS} 0' 3> /tmp/done"
    ));
    let mut traced = guest.session();
    let filter = pid_filter(pid, false);
    let mut number = |what: &str| traced.enable(&format!("uprobe:{LIBC}:{what}"), &filter)[0];
    let [malloc, given, free] = ["malloc:entry", "malloc:return", "free:entry"].map(&mut number);
    shell.output(&format!("{RELEASE}; allocs 9 0"));
    let events = traced.finish();
    assert!(events.iter().all(|event| event.pid == Some(pid)));
    // Other callers' come before and after, not in between.
    let mut sizes = Vec::new();
    for window in events.windows(3) {
        let [entry, result, freed] = window else {
            continue;
        };
        if (entry.probe, result.probe, freed.probe) != (malloc, given, free)
            || entry.arguments[0] != sizes.len() as u64 + 1
        {
            continue;
        }
        assert!(entry.tsc < result.tsc && result.tsc < freed.tsc);
        assert_ne!(result.arguments, [0]);
        assert_eq!(result.arguments[0], freed.arguments[0], "{window:?}");
        sizes.push(entry.arguments[0]);
    }
    assert_eq!(sizes, (1..=ROUNDS).collect::<Vec<_>>(), "{events:?}");
    guest.assert_clean(&BTreeSet::new());
}

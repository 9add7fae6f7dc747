//! The function tracer on a real KVM, over the micro guest, which knows how often each of its functions runs.
//!
//! Without `/dev/kvm` these fail; set `EXOTRACE_NO_KVM=1` where that is meant.
#![allow(clippy::unwrap_used)]

use std::io::Write;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use devices::ConsoleOutput;
use introspect::kernel::image::KernelImage;
use introspect::kernel::symbols::SymbolsBuilder;
use probes::event::{Event, EventKind, NO_PROCESS};
use probes::function_trace::{ArmFunctionsError, FunctionTracer, TraceOptions};
use probes::kernel_view::KernelView;
use probes::text_hash::{TextHash, hash_text};
use vmm::boot::KernelFile;
use vmm::host::{self, HostProfile};
use vmm::machine::{Machine, MachineConfig, RunEnd, boot};

const LIMIT: Duration = Duration::from_secs(60);

/// What the guest has printed.
#[derive(Clone, Default)]
struct Output(Arc<Mutex<Vec<u8>>>);

impl Output {
    fn text(&self) -> String {
        String::from_utf8_lossy(&self.0.lock().unwrap()).into_owned()
    }
}

impl Write for Output {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// A micro guest before its first instruction.
struct Micro {
    machine: Machine,
    view: KernelView,
    output: Output,
    image: KernelImage,
}

/// `None` if there is to be no KVM here.
fn micro(command_line: &str, cpus: u8) -> Option<Micro> {
    if std::env::var_os("EXOTRACE_NO_KVM").is_some_and(|value| value == "1") {
        eprintln!("not run: EXOTRACE_NO_KVM=1");
        return None;
    }
    let kvm = match host::open(Path::new("/dev/kvm")) {
        Ok(kvm) => kvm,
        Err(error) => panic!("{error} (or set EXOTRACE_NO_KVM=1 to leave out what needs KVM)"),
    };
    let elf = guest::micro::elf();
    let profile = HostProfile::probe(&kvm, &elf).unwrap();
    let kernel = KernelFile::from_bytes(elf.clone(), Path::new("micro")).unwrap();
    let output = Output::default();
    let config = MachineConfig {
        memory: 4 << 20,
        cpus,
        kernel: &kernel,
        initramfs: None,
        command_line,
        add_words: false,
        protocol: None,
        pit: false,
        serial: ConsoleOutput::by_lines(output.clone()),
    };
    let machine = boot(&kvm, &profile, config).unwrap().machine;
    let image = KernelImage::parse(elf).unwrap();
    let paused = machine.pause();
    let space = machine.registers(&paused, 0).unwrap().address_space();
    drop(paused);
    let view = KernelView::without_types(image.symbols().unwrap(), space);
    Some(Micro {
        machine,
        view,
        output,
        image,
    })
}

impl Micro {
    fn address(&self, name: &str) -> u64 {
        self.view.symbols.address_of(name).unwrap()
    }

    fn text_hash(&self) -> TextHash {
        let text = self
            .image
            .segments()
            .iter()
            .find(|segment| segment.executable)
            .unwrap();
        let range = text.virtual_address..text.virtual_address + text.memory_size;
        let _paused = self.machine.pause();
        hash_text(self.machine.ram(), self.view.space, range).unwrap()
    }

    fn arm(&self, functions: &[&str], options: &TraceOptions) -> FunctionTracer {
        let names: Vec<String> = functions.iter().map(|name| (*name).to_owned()).collect();
        FunctionTracer::arm(&self.machine, &self.view, &names, options).unwrap()
    }

    /// Runs the guest to its end, draining meanwhile if `events` is given.
    fn run(&mut self, tracer: &mut FunctionTracer, mut events: Option<&mut Vec<Event>>) {
        self.machine.start();
        let end = loop {
            let slice = Duration::from_millis(20);
            let end = self
                .machine
                .wait(Some(if events.is_some() { slice } else { LIMIT }));
            if let Some(events) = events.as_deref_mut() {
                tracer.drain(events);
            }
            if end.is_some() || events.is_none() {
                break end;
            }
        };
        self.machine.flush_serial();
        assert!(
            matches!(end, Some(RunEnd::Reset { .. })),
            "{end:?}: {}",
            self.output.text()
        );
    }
}

#[test]
fn every_call_is_seen_with_its_argument_and_its_result() {
    const CALLS: u64 = 10_000;
    let Some(mut micro) = micro("calls 10000", 1) else {
        return;
    };
    let before = micro.text_hash();
    let mut tracer = micro.arm(&["micro_leaf"], &TraceOptions::default());
    assert_ne!(micro.text_hash(), before, "the trap is in memory");
    let mut events = Vec::new();
    micro.run(&mut tracer, Some(&mut events));
    assert!(
        micro.output.text().contains("micro: count 10000"),
        "{}",
        micro.output.text()
    );

    assert_eq!(events.len() as u64, 2 * CALLS);
    assert!(events.is_sorted_by_key(|event| event.tsc));
    let leaf = micro.address("micro_leaf");
    let return_address = events[1].pc;
    for (number, pair) in events.chunks_exact(2).enumerate() {
        let number = number as u64;
        let [entry, exit] = pair else { panic!("pairs") };
        let found = (
            entry.kind,
            entry.pc,
            entry.arguments[0],
            entry.pid,
            entry.function,
        );
        assert_eq!(found, (EventKind::Entry, leaf, number, NO_PROCESS, 0));
        let expected = (EventKind::Exit, return_address, [number + 1, 0, 0, 0]);
        assert_eq!((exit.kind, exit.pc, exit.arguments), expected);
    }
    let caller = micro
        .view
        .symbols
        .resolve(return_address)
        .map(|(symbol, _)| symbol.name);
    assert_eq!(caller, Some("micro_call_loop"));

    tracer.stop(&micro.machine);
    let stats = tracer.stats();
    assert_eq!((stats.entries, stats.returns), (CALLS, CALLS));
    assert_eq!(
        (stats.read, stats.dropped, stats.pushed),
        (2 * CALLS, 0, 2 * CALLS)
    );
    assert_eq!(
        (
            stats.unpaired_returns,
            stats.lost_returns,
            stats.waiting_returns
        ),
        (0, 0, 0)
    );
    assert_eq!(
        micro.machine.stats().traps,
        2 * CALLS,
        "one trap for each event"
    );
    assert_eq!(micro.text_hash(), before, "every byte is restored");
    assert!(micro.machine.traps().hits().is_empty());
}

#[test]
fn what_a_small_ring_drops_is_counted_to_the_last_event() {
    const CALLS: u64 = 3_000;
    let Some(mut micro) = micro("calls 3000", 1) else {
        return;
    };
    let options = TraceOptions {
        ring_slots: 256,
        ..TraceOptions::default()
    };
    let mut tracer = micro.arm(&["micro_leaf"], &options);
    micro.run(&mut tracer, None);
    tracer.stop(&micro.machine);
    let mut events = Vec::new();
    assert_eq!(tracer.drain(&mut events), 256);
    let stats = tracer.stats();
    assert_eq!((stats.entries, stats.returns), (CALLS, CALLS));
    assert_eq!(stats.read + stats.dropped, 2 * CALLS);
    assert_eq!(
        events.last().map(|event| event.arguments[0]),
        Some(128),
        "the oldest are kept"
    );
}

#[test]
fn recursion_pairs_each_return_with_its_own_call() {
    const ROUNDS: u64 = 50;
    let Some(mut micro) = micro("nested 50", 1) else {
        return;
    };
    let before = micro.text_hash();
    let mut tracer = micro.arm(&["micro_outer", "micro_recurse"], &TraceOptions::default());
    let mut events = Vec::new();
    micro.run(&mut tracer, Some(&mut events));
    tracer.stop(&micro.machine);
    let found: Vec<_> = events
        .iter()
        .map(|e| (e.kind, e.function, e.arguments[0]))
        .collect();
    let mut round = Vec::new();
    round.extend((1..=5).rev().map(|depth| (EventKind::Entry, 1, depth)));
    round.extend((1..=5).map(|depth| (EventKind::Exit, 1, depth)));
    round.push((EventKind::Exit, 0, 5));
    for (number, found) in found.chunks(12).enumerate() {
        let (first, rest) = found.split_first().unwrap();
        assert_eq!((first.0, first.1), (EventKind::Entry, 0));
        assert_eq!(rest, round, "round {number}");
    }
    let stats = tracer.stats();
    assert_eq!((stats.entries, stats.returns), (6 * ROUNDS, 6 * ROUNDS));
    // The innermost call jumps to the place where the others return to.
    assert_eq!((stats.unpaired_returns, stats.lost_returns), (ROUNDS, 0));
    assert_eq!(micro.text_hash(), before);
}

#[test]
fn cpus_calling_at_once_are_told_apart_and_merged_in_time_order() {
    const CALLS: u64 = 2_000;
    let Some(mut micro) = micro("smp 2000 2", 2) else {
        return;
    };
    let mut tracer = micro.arm(&["micro_leaf"], &TraceOptions::default());
    let mut events = Vec::new();
    micro.run(&mut tracer, Some(&mut events));
    tracer.stop(&micro.machine);
    tracer.drain(&mut events);
    assert!(
        micro.output.text().contains("micro: count 4000"),
        "{}",
        micro.output.text()
    );
    assert!(events.is_sorted_by_key(|event| event.tsc));
    for vcpu in 0..2 {
        let of = |kind| {
            events
                .iter()
                .filter(move |e| e.vcpu == vcpu && e.kind == kind)
        };
        let entries: Vec<u64> = of(EventKind::Entry).map(|e| e.arguments[0]).collect();
        let exits: Vec<u64> = of(EventKind::Exit).map(|e| e.arguments[0]).collect();
        assert_eq!(entries, (0..CALLS).collect::<Vec<_>>());
        assert_eq!(exits, (1..=CALLS).collect::<Vec<_>>());
    }
}

#[test]
fn a_tracer_can_come_and_go_while_the_guest_runs() {
    let Some(mut micro) = micro("calls 100000000", 1) else {
        return;
    };
    let before = micro.text_hash();
    micro.machine.start();
    for _ in 0..5 {
        let mut tracer = micro.arm(&["micro_leaf"], &TraceOptions::default());
        // However slow the host is: a tracer that sees calls has seen enough at some time.
        let begin = Instant::now();
        while tracer.stats().entries < 100 {
            let end = micro.machine.wait(Some(Duration::from_millis(5)));
            assert!(end.is_none(), "{end:?}");
            assert!(begin.elapsed() < LIMIT, "{:?}", tracer.stats());
        }
        tracer.stop(&micro.machine);
        let mut events = Vec::new();
        tracer.drain(&mut events);
        let stats = tracer.stats();
        assert_eq!(
            stats.entries + stats.returns,
            stats.read + stats.dropped,
            "{stats:?}"
        );
        assert_eq!(
            stats.entries,
            stats.returns + stats.waiting_returns + stats.without_return
        );
        let first = events.first().map(|event| event.kind);
        assert_eq!(first, Some(EventKind::Entry), "no return without its call");
        assert_eq!(micro.text_hash(), before);
    }
    micro.machine.stop();
    assert!(
        !micro.output.text().contains("trap"),
        "{}",
        micro.output.text()
    );
}

#[test]
fn a_list_with_one_bad_name_arms_nothing() {
    let Some(micro) = micro("calls 1", 1) else {
        return;
    };
    let before = micro.text_hash();
    let names = ["micro_leaf".to_owned(), "micro_laef".to_owned()];
    let options = TraceOptions::default();
    let error = FunctionTracer::arm(&micro.machine, &micro.view, &names, &options)
        .err()
        .unwrap();
    assert!(matches!(error, ArmFunctionsError::Unknown { .. }));
    let text = error.to_string();
    assert!(
        text.contains("micro_laef") && text.contains("micro_leaf"),
        "{text}"
    );
    assert_eq!(micro.text_hash(), before);
}

#[test]
fn a_function_that_cannot_be_trapped_is_named_and_the_others_are_let_go() {
    let Some(mut micro) = micro("calls 1", 1) else {
        return;
    };
    let before = micro.text_hash();
    let mut builder = SymbolsBuilder::default();
    for (name, address) in [
        ("micro_leaf", micro.address("micro_leaf")),
        ("ghost", 0x7f_0000_0000),
    ] {
        builder.push(name.as_bytes(), address, b'T', false).unwrap();
    }
    micro.view.symbols = builder.finish(None);
    let names = ["micro_leaf", "ghost"].map(str::to_owned);
    let options = TraceOptions::default();
    let error = FunctionTracer::arm(&micro.machine, &micro.view, &names, &options)
        .err()
        .unwrap();
    assert!(matches!(&error, ArmFunctionsError::Refused { functions } if functions.len() == 1));
    let text = error.to_string();
    assert!(
        text.contains("ghost at 0x7f00000000") && text.contains("not mapped"),
        "{text}"
    );
    assert_eq!(micro.text_hash(), before);
    assert!(micro.machine.traps().hits().is_empty());
}

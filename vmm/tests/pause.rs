//! Pausing, resuming and ending machines, from any number of threads.
#![allow(clippy::unwrap_used)]

mod support;

use std::sync::Mutex;
use std::time::{Duration, Instant};

use support::{Guest, bare, micro, micro_on, running};
use vmm::RunEnd;

/// A lock for tests that count this process's threads: they take turns with all others here.
static THREADS: Mutex<()> = Mutex::new(());

fn alone() -> std::sync::MutexGuard<'static, ()> {
    THREADS
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Returns the names of this process's vCPU, watch and device threads.
fn machine_threads() -> Vec<String> {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let names = tasks.filter_map(|t| std::fs::read_to_string(t.ok()?.path().join("comm")).ok());
    names
        .map(|n| n.trim().to_owned())
        .filter(|n| n.starts_with("vcpu") || n == "watch" || n == "virtio")
        .collect()
}

/// Waits until no machine threads are left. A joined thread may be listed for a moment longer.
fn no_machine_threads(what: &str) {
    let deadline = Instant::now() + support::LIMIT;
    while !machine_threads().is_empty() {
        assert!(Instant::now() < deadline, "{what}: {:?}", machine_threads());
        std::thread::yield_now();
    }
}

/// Returns a guest that only clears 1 MiB of its memory, again and again.
fn clearing(host: &support::Host) -> Guest {
    use iced_x86::code_asm::*;
    let kernel = bare::kernel(|a| {
        let mut again = a.create_label();
        a.set_label(&mut again).unwrap();
        a.xor(eax, eax).unwrap();
        a.mov(edi, 0x20_0000).unwrap();
        a.mov(ecx, 1 << 20).unwrap();
        a.inc(rbx).unwrap();
        a.rep().stosb().unwrap();
        a.jmp(again).unwrap();
    });
    Guest::boot(host, kernel, "", 1)
}

#[test]
fn a_paused_guest_stands_still_and_goes_on_afterwards() {
    let _turn = alone();
    let host = host!();
    println!("pause latency, 60 tries: min / median / max in us");
    for (name, moves) in [
        ("spin", false),
        ("uspin", false),
        ("hlt", true),
        ("rep stosb", true),
        ("calls 100000000", true),
    ] {
        let mut guest = if name == "rep stosb" {
            clearing(host)
        } else {
            micro(host, name)
        };
        guest.machine.start();
        if name != "rep stosb" {
            guest.wait_for("\n");
        }
        std::thread::sleep(Duration::from_millis(2));
        let mut latencies = Vec::new();
        let mut seen = std::collections::BTreeSet::new();
        for round in 0..60 {
            let before = Instant::now();
            let paused = guest.machine.pause();
            latencies.push(before.elapsed().as_micros());
            let read = || {
                let r = guest.machine.registers(&paused, 0).unwrap().regs;
                (r, guest.variable_or_zero("micro_ticks"))
            };
            let first = read();
            if round % 6 == 0 {
                std::thread::sleep(Duration::from_millis(3));
            }
            assert_eq!(
                first,
                read(),
                "{name}: registers or memory changed while paused"
            );
            seen.insert((first.0.rip, first.0.rbx, first.0.rcx, first.1));
            drop(paused);
            std::thread::sleep(Duration::from_micros(if name == "hlt" {
                3000
            } else {
                300
            }));
        }
        assert!(
            !moves || seen.len() > 3,
            "{name}: stands at {seen:x?} after every pause"
        );
        latencies.sort_unstable();
        println!(
            "{name:16} {} / {} / {}",
            latencies[0], latencies[30], latencies[59]
        );
        guest.machine.stop();
        assert!(matches!(guest.end(), RunEnd::Stopped));
    }
}

#[test]
fn pauses_nest() {
    let _turn = alone();
    let host = host!();
    let guest = running(host, "calls 100000000");
    guest.wait_for("\n");
    let regs = |paused: &vmm::machine::Paused| guest.machine.registers(paused, 0).unwrap().regs;
    let outer = guest.machine.pause();
    let inner = guest.machine.pause();
    let before = regs(&outer);
    drop(outer);
    std::thread::sleep(Duration::from_millis(5));
    assert_eq!(regs(&inner), before, "the inner pause still holds");
    drop(inner);
    guest.wait_until("went on", || regs(&guest.machine.pause()) != before);
}

#[test]
fn many_threads_pause_while_traps_fire_on_two_cpus() {
    let _turn = alone();
    let host = host!();
    let mut guest = micro_on(host, "smp 3000 2", 2);
    let recorder = guest.record();
    let leaf = guest.arm_kernel(guest.symbol("micro_leaf"));
    guest.machine.start();
    std::thread::scope(|scope| {
        for thread in 0..4u32 {
            let machine = &guest.machine;
            scope.spawn(move || {
                while machine.wait(Some(Duration::ZERO)).is_none() {
                    let paused = machine.pause();
                    for vcpu in 0..2 {
                        let first = machine.registers(&paused, vcpu).unwrap().regs;
                        assert_eq!(first, machine.registers(&paused, vcpu).unwrap().regs);
                    }
                    drop(paused);
                    std::thread::sleep(Duration::from_micros(200 * u64::from(thread + 1)));
                }
            });
        }
    });
    assert_eq!(guest.count(), 6000, "{}", guest.situation());
    assert_eq!(guest.machine.traps().hits(), [(leaf, 6000, 0)]);
    for vcpu in 0..2 {
        let rdi: Vec<u64> = recorder
            .seen()
            .iter()
            .filter(|s| s.trap.vcpu == vcpu)
            .map(|s| s.rdi)
            .collect();
        assert_eq!(
            rdi,
            (0..3000).collect::<Vec<_>>(),
            "vCPU {vcpu} in its own order"
        );
    }
}

/// Tests two vCPUs that each need the other parked, with pauses between them.
#[test]
fn stepping_on_two_cpus_and_pausing_take_turns() {
    let _turn = alone();
    let host = host!();
    let mut guest = micro_on(host, "smp 400 2", 2);
    let space = guest.space();
    // Most are emulated. RDTSC and others that the emulator leaves out are stepped, and counted as
    // such.
    let places: Vec<_> = ["micro_smp", "micro_ap_start"]
        .iter()
        .flat_map(|f| guest.instructions(f))
        .collect();
    for place in &places {
        guest
            .machine
            .traps()
            .arm_kernel(introspect::Gva(place.ip()), space)
            .unwrap();
    }
    guest.machine.start();
    while guest.machine.wait(Some(Duration::ZERO)).is_none() {
        drop(guest.machine.pause());
        std::thread::sleep(Duration::from_micros(500));
    }
    assert_eq!(guest.count(), 800, "{}", guest.situation());
    let stepped: u64 = guest
        .machine
        .traps()
        .hits()
        .iter()
        .map(|(_, _, stepped)| stepped)
        .sum();
    assert!(stepped > 0, "{}", guest.situation());
}

#[test]
fn dropping_a_machine_ends_its_threads() {
    let _turn = alone();
    let host = host!();
    for program in ["spin", "uspin", "hlt", "dead", "calls 1", "triple"] {
        let guest = running(host, program);
        guest.wait_for("\n");
        // The watch thread ends when it has seen an end.
        guest.wait_until("has its threads", || !machine_threads().is_empty());
        drop(guest);
        no_machine_threads(program);
    }
    // Never started, just started, and paused meanwhile.
    for round in 0..30 {
        let mut guest = micro_on(host, "spin", 2);
        if round % 3 > 0 {
            guest.machine.start();
        }
        let paused = (round % 3 == 2).then(|| guest.machine.pause());
        drop(guest);
        drop(paused);
    }
    no_machine_threads("never started, started, paused");
}

/// Tests that a panic of the sink, which is the caller's code, ends the run. Nobody waits for the
/// lost vCPU.
#[test]
fn a_sink_that_panics_ends_the_run() {
    let _turn = alone();
    struct Panics;
    impl vmm::TrapSink for Panics {
        fn trap(&self, _: &vmm::trap::Trap, _: &vmm::StoppedVcpu<'_>) {
            std::panic::resume_unwind(Box::new("sink"));
        }
    }
    let host = host!();
    let mut guest = micro_on(host, "smp 100 2", 2);
    guest.arm_kernel(guest.symbol("micro_leaf"));
    guest.machine.set_sink(Some(Box::new(Panics)));
    guest.machine.start();
    let end = guest.end();
    assert!(
        matches!(&end, RunEnd::Host { message } if message.contains("panicked")),
        "{end}"
    );
    let paused = guest.machine.pause();
    drop(paused);
    drop(guest);
    no_machine_threads("after a panic");
}

//! A kernel as distributions have them, with modules, ORC and types in memory. Reads from outside
//! agree with its own reports, and its stacks reach their end from wherever it was paused.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use introspect::kernel::module_memory::RangeKind;
use introspect::kernel::running::RunningKernel;
use introspect::kernel::symbols::Symbols;
use introspect::stack::frames::{End, Found};
use introspect::{Gva, PausedMemory};
use object::read::elf::{ElfFile64, SectionHeader};
use object::{Endianness, Object, ObjectSection, ObjectSymbol, elf};
use support::crowd::Asked;
use support::proc_comparison::{Comparison, Told, compare_stacks, compare_stat};
use support::rich::{self, BRD};
use support::running_stack::{Running, Trapped, Watched};
use support::shell::COMMAND_LIMIT;
use support::{Kernel, Shell, host};

/// The least number of threads that sleep for good.
const STILL_THREADS: usize = 25;
/// The number of pauses of the busy guest.
const STOPS: u32 = 1000;
/// The least number of pauses at which it must be in kernel mode.
const KERNEL_STOPS: usize = 250;
/// The most pauses at which no task may be running.
const IDLE_STOPS: usize = 10;

/// Returns a guest with the module of the RAM disk.
fn with_module(host: &support::Host) -> Shell {
    let shell = rich::guest(host);
    shell.type_lines(&[&format!("insmod {BRD}")]);
    shell
}

/// Returns the letter that the kernel gives a symbol of a module (`elf_type`,
/// kernel/module/kallsyms.c), of those that occur in brd.
fn letter(flags: u64, kind: u32) -> char {
    match (flags, kind) {
        _ if flags & u64::from(elf::SHF_EXECINSTR) != 0 => 't',
        (_, elf::SHT_NOBITS) => 'b',
        _ if flags & u64::from(elf::SHF_WRITE) != 0 => 'd',
        _ => 'r',
    }
}

/// Returns the symbols of the module as the guest's /proc/kallsyms has them. Letters of exported
/// ones are small here too.
fn listed_symbols(shell: &Shell) -> Vec<(u64, char, String)> {
    let answer = shell
        .start("grep -F '[brd]' /proc/kallsyms")
        .answer(4 * COMMAND_LIMIT);
    let symbols = answer.output.lines().filter_map(|line| {
        let mut words = line.split_whitespace();
        let address = u64::from_str_radix(words.next()?, 16).ok()?;
        let letter = words.next()?.chars().next()?.to_ascii_lowercase();
        // Compilers' local labels are listed, and no address is ever named by them
        // (`is_mapping_symbol`).
        let name = words.next().filter(|name| !name.starts_with(".L"))?;
        Some((address, letter, name.to_owned()))
    });
    symbols.collect()
}

/// Returns the symbols of the module's file, at the guest's addresses of their sections. Reading
/// /proc/kallsyms would take a guest of a software KVM two minutes, because it formats all symbols
/// of the kernel first.
fn told_symbols(shell: &Shell, file: &[u8]) -> Vec<(u64, char, String)> {
    let answer = shell
        .start("cd /sys/module/brd/sections; grep . .[a-z]* _*; cd /")
        .answer(4 * COMMAND_LIMIT);
    let sections: HashMap<&str, u64> = answer
        .output
        .lines()
        .filter_map(|line| {
            let (name, address) = line.split_once(":0x")?;
            Some((name, u64::from_str_radix(address, 16).ok()?))
        })
        .collect();
    let file = ElfFile64::<Endianness>::parse(file).unwrap_or_else(|e| panic!("{e}"));
    let symbols = file.symbols().filter_map(|symbol| {
        let section = file.section_by_index(symbol.section_index()?).ok()?;
        let header = section.elf_section_header();
        let (name, start) = sections.get_key_value(section.name().ok()?)?;
        let symbol_name = symbol.name().ok().filter(|name| !name.is_empty())?;
        // Init sections are freed after use, and their symbols are dropped.
        (!name.starts_with(".init")).then(|| {
            let letter = letter(
                header.sh_flags(Endianness::Little),
                header.sh_type(Endianness::Little),
            );
            (start + symbol.address(), letter, symbol_name.to_owned())
        })
    });
    symbols.collect()
}

#[test]
fn a_module_and_its_symbols_are_what_the_guest_tells() {
    let host = host!();
    let shell = with_module(host);
    let system = shell.linux.system();
    let lost: Vec<_> = system.lost().collect();
    assert!(
        lost.is_empty(),
        "this kernel tells everything, not: {lost:?}"
    );
    let listed = shell.output("cat /proc/modules");
    // The fate of a module's sections is known only for our own kernel.
    let mut told = match Kernel::given() {
        Some(_) => listed_symbols(&shell),
        None => told_symbols(&shell, &shell.linux.kernel.module("brd.ko")),
    };
    told.sort();

    let mut it = Comparison::default();
    let inside = shell.linux.look(|look| {
        let modules = look.modules().unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(modules.error, None);
        // `brd 16384 0 - Live 0xffffffffa0000000`: the count of users and the users are not read
        // from outside.
        let read = modules.items.iter().map(|module| {
            let ranges = module.ranges.iter().map(|range| &range.addresses);
            let size: u64 = ranges.map(|range| range.end - range.start).sum();
            let base = module.base().unwrap_or_default();
            format!("{} {size} {} {base:#x}", module.name, module.state)
        });
        let told_modules = listed.lines().map(|line| {
            let words: Vec<&str> = line.split_whitespace().collect();
            let [name, size, _users, _by, state, address, ..] = words[..] else {
                panic!("/proc/modules: {line:?}")
            };
            format!("{name} {size} {state} {address}")
        });
        it.equal("modules", read.collect::<Vec<_>>(), told_modules.collect());

        let symbols = look.module_symbols(modules);
        let (loaded, errors) = symbols.unwrap_or_else(|e| panic!("{e}"));
        assert!(errors.is_empty(), "{errors:?}");
        let [module] = loaded.modules() else {
            panic!("{:?}", loaded.modules())
        };
        let symbols = module.symbols().iter();
        let mut read: Vec<_> = symbols
            .map(|symbol| (symbol.address, symbol.kind, symbol.name.to_owned()))
            .collect();
        read.sort();
        for (read, told) in read.iter().zip(&told) {
            it.equal("symbol", read, told);
        }
        it.equal("symbols", read.len(), told.len());

        // An address in each of its functions. Of several functions at one address, any may be
        // named.
        let text = module.module.ranges.iter();
        let text = text
            .filter(|range| range.kind == RangeKind::Text)
            .map(|range| range.addresses.clone())
            .next()
            .unwrap_or_else(|| panic!("{:?}", module.module));
        let mut functions = BTreeMap::<u64, Vec<&str>>::new();
        for (address, kind, name) in &told {
            if *kind == 't' {
                functions.entry(*address).or_default().push(name);
            }
        }
        assert!(functions.len() >= 6, "{functions:?}");
        for (start, names) in &functions {
            assert!(text.contains(start), "{names:?}");
            let place = look.place(start + 3, Some(&loaded));
            let place = place.unwrap_or_else(|| panic!("nothing at {start:#x}"));
            assert!(
                names.contains(&place.name.as_str()),
                "{place:?}, not {names:?}"
            );
            assert_eq!((place.offset, place.module.as_deref()), (3, Some("brd")));
            let named = look.places_named(&place.name, Some(&loaded));
            assert!(
                named.iter().any(|named| named.address == *start),
                "{named:?}"
            );
        }
        text.start
    });
    it.finish("modules and their symbols", 20);

    shell.output("rmmod brd");
    shell.linux.look(|look| {
        let modules = look.modules().unwrap_or_else(|e| panic!("{e}"));
        assert_eq!((&modules.items, modules.error), (&Vec::new(), None));
        let symbols = look.module_symbols(modules);
        let (loaded, errors) = symbols.unwrap_or_else(|e| panic!("{e}"));
        assert!(loaded.modules().is_empty() && errors.is_empty());
        assert_eq!(look.place(inside, Some(&loaded)), None);
    });
}

#[test]
fn stacks_by_orc_are_those_the_guest_prints() {
    let host = host!();
    let shell = rich::guest(host);
    let system = shell.linux.system();
    let (guest, moment) = Told::ask(&shell, Asked::Threads);
    let (mut stat, mut stacks) = Default::default();
    let mut still_threads = 0;
    let memory = PausedMemory::new(&moment.memory);
    let look = system.look(&memory, &moment.cpus);
    let processes = look.processes().unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(processes.error, None);
    for process in &processes.items {
        let threads = look.threads_of(process).unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(threads.error, None, "{}", process.pid);
        for thread in &threads.items {
            let path = format!("{}/task/{}", process.pid, thread.pid);
            compare_stat(&mut stat, &look, &guest, thread, &path);
            still_threads += usize::from(guest.slept(&path));
        }
        compare_stacks(&mut stacks, &look, &guest, process, &threads.items);
    }
    println!("{still_threads} threads slept");
    assert!(still_threads >= STILL_THREADS, "{still_threads}");
    Comparison::finish(stat, "stat", 500);
    Comparison::finish(stacks, "kernel stacks", 2 * STILL_THREADS);
}

#[test]
fn the_stack_of_whatever_runs_reaches_its_end() {
    let host = host!();
    let shell = with_module(host);
    // Programs are started and ended, text formatted, a disk written and read.
    shell.type_line(
        "while true; do dd if=/dev/zero of=/dev/ram0 bs=16k count=1; dd if=/dev/ram0 of=/tmp/x bs=16k count=1; \
         head -n 3 /proc/kallsyms; done > /dev/null 2> /dev/null &",
    );
    let mut counts = BTreeMap::<String, usize>::new();
    let mut faults = Vec::new();
    for stop in 0..STOPS {
        // Times that match no period of the guest's.
        std::thread::sleep(Duration::from_micros(u64::from(200 + stop * 7919 % 3_000)));
        let Some(running) = shell.linux.look(|look| Running::of(&look)) else {
            *counts.entry("idle".to_owned()).or_default() += 1;
            continue;
        };
        let mut count = |what: &str| *counts.entry(what.to_owned()).or_default() += 1;
        match &running.kernel {
            None => count("in user mode"),
            Some(stack) => {
                count("in kernel mode");
                count(&format!("end: {}", stack.end));
                if running.interrupted() > 0 {
                    count("in kernel mode, interrupted there");
                }
                if running.frames.iter().any(|frame| frame.starts_with("asm_")) {
                    count("in an interrupt or exception");
                }
                if running.frames.iter().any(|frame| frame.ends_with("[brd]")) {
                    count("in the module or called by it");
                }
            }
        }
        faults.extend(running.fault());
    }
    println!("{counts:#?}");
    assert!(
        faults.is_empty(),
        "{} of {STOPS}:\n{}",
        faults.len(),
        faults.join("\n")
    );
    let count = |what: &str| counts.get(what).copied().unwrap_or_default();
    assert!(count("in kernel mode") >= KERNEL_STOPS, "{counts:?}");
    // The guest always has something to do.
    assert!(count("idle") <= IDLE_STOPS, "{counts:?}");
}

#[test]
fn stacks_from_within_an_interrupt_lead_to_what_it_interrupted() {
    const EACH: usize = 10;
    let host = host!();
    let shell = with_module(host);
    shell.type_line("spin & while true; do head -n 1000 /proc/kallsyms > /dev/null; done &");
    // The timer's interrupt calls it; the argument tells whether it has interrupted user mode.
    let over_user = |seen: &Trapped| seen.argument & 1 == 1;
    let is_spinning = |seen: &Trapped| {
        let at = seen.running.program.first();
        seen.running.name == "spin" && at.is_some_and(|at| at == "spin_million")
    };
    let seen = Watched::new(&shell).stacks_at(&["update_process_times"], |seen| {
        let (user, kernel): (Vec<&Trapped>, Vec<_>) = seen.iter().partition(|seen| over_user(seen));
        let spinning = user.iter().filter(|seen| is_spinning(seen));
        spinning.count() >= EACH && kernel.len() >= EACH
    });
    let (mut user, mut kernel, mut spinning) = (0, 0, 0);
    for tick in &seen {
        let running = &tick.running;
        let what = || {
            format!(
                "{:?} {:#?} {:?}",
                running.name, running.frames, running.program
            )
        };
        assert_eq!(running.fault(), None);
        let at = |name: &str| running.frames.iter().position(|f| f.starts_with(name));
        assert_eq!(at("update_process_times+0x0"), Some(0), "{}", what());
        // The local APIC's timer, or the PIT of a kernel that was configured without the former.
        let entry = at("asm_sysvec_apic_timer_interrupt").or_else(|| at("asm_common_interrupt"));
        let entry = entry.unwrap_or_else(|| panic!("no entry: {}", what()));
        if over_user(tick) {
            user += 1;
            assert_eq!(running.kernel.as_ref().map(|k| k.end), Some(End::UserMode));
            assert_eq!(
                (running.interrupted(), entry),
                (0, running.frames.len() - 1),
                "{}",
                what()
            );
            // Elsewhere spin executes little, of which its first instructions have no unwind
            // information.
            if is_spinning(tick) {
                spinning += 1;
                assert_eq!(running.program_end, Some(End::Bottom), "{}", what());
            }
        } else {
            kernel += 1;
            assert!(running.interrupted() >= 1, "{}", what());
            let interrupted = running.kernel.iter().flat_map(|k| &k.frames).nth(entry + 1);
            assert_eq!(
                interrupted.map(|f| f.found),
                Some(Found::Interrupted),
                "{}",
                what()
            );
        }
    }
    println!("{user} ticks over user mode, {spinning} of them in spin, {kernel} over kernel mode");
}

#[test]
fn stacks_lead_through_the_modules_code() {
    let host = host!();
    let shell = with_module(host);
    shell.type_line(
        "while true; do dd if=/dev/zero of=/dev/ram0 bs=64k count=8; rmmod brd; insmod /lib/brd.ko; done 2> /dev/null &",
    );
    let is_own = |frame: &String| frame.ends_with(" [brd]");
    // One of them is called for each page that is written first: the second since Linux 6.5, the
    // third since 6.16.
    let inserts = ["radix_tree_insert", "__xa_insert", "__xa_cmpxchg"];
    let through = |seen: &&Trapped| seen.running.frames.get(1).is_some_and(is_own);
    let seen =
        Watched::new(&shell).stacks_at(&inserts, |seen| seen.iter().filter(through).count() >= 10);
    for Trapped { running, .. } in seen.iter().filter(through) {
        assert_eq!(running.fault(), None);
        let own: Vec<usize> = (0..running.frames.len())
            .filter(|at| is_own(&running.frames[*at]))
            .collect();
        // Compilers may inline one of its functions into another.
        assert_eq!(
            own,
            (1..=own.len()).collect::<Vec<_>>(),
            "{:#?}",
            running.frames
        );
        let outer = &running.frames[own.len()];
        assert!(
            outer.starts_with("brd_submit_bio+"),
            "{:#?}",
            running.frames
        );
    }
}

#[test]
fn stacks_reach_their_end_from_every_instruction_of_the_entries() {
    /// The time limit for an instruction to be reached: a few never are.
    const LIMIT: Duration = Duration::from_secs(1);
    /// The number of instructions that must be reached.
    const REACHED: usize = 80;
    /// The traced ranges: functions of arch/x86/entry/entry_64.S, and their lengths in bytes.
    const ENTRIES: [(&str, usize); 4] = [
        ("asm_exc_page_fault", 0x27),
        ("error_entry", 0x5e),
        ("entry_SYSCALL_64", 0x105),
        ("common_interrupt_return", 0x40),
    ];
    let host = host!();
    let shell = rich::guest(host);
    shell.type_line("while true; do true | true; done &");
    let watched = Watched::new(&shell);
    let machine = shell.linux.machine();
    let (mut reached, mut stacks, mut at_border) = (0, 0, 0);
    let (mut faults, mut missed) = (Vec::new(), Vec::new());
    for (function, length) in ENTRIES {
        for address in watched.instructions(function, length) {
            let set = |address| machine.set_breakpoint(1, address);
            set(Some(Gva(address))).unwrap_or_else(|e| panic!("{e}"));
            let here = |seen: &&Trapped| seen.address == address;
            let (seen, done) = watched.wait(LIMIT, |seen| seen.iter().any(|seen| here(&seen)));
            set(None).unwrap_or_else(|e| panic!("{e}"));
            match done {
                true => reached += 1,
                false => missed.push(format!("{address:#x}")),
            }
            for Trapped { running, .. } in seen.iter().filter(here) {
                stacks += 1;
                faults.extend(running.fault());
                // The slots of its registers still hold those of an earlier entry: that must be
                // reported.
                at_border += usize::from(running.program_end == Some(End::AtBorder));
            }
        }
    }
    println!(
        "{stacks} stacks at {reached} instructions, {at_border} of them without the program's registers; not reached: {missed:?}"
    );
    assert!(faults.is_empty(), "{}", faults.join("\n"));
    assert!(reached >= REACHED, "{reached}");
    assert!(at_border > 0, "no entry of a system call is stopped at");
}

fn addresses(symbols: &Symbols) -> Vec<(u64, String)> {
    symbols
        .iter()
        .map(|s| (s.address, s.name.to_owned()))
        .collect()
}

#[test]
fn the_kernel_found_in_memory_is_the_one_in_the_file() {
    let host = host!();
    let shell = rich::guest(host);
    let view = shell.linux.view();
    let machine = shell.linux.machine();
    let paused = machine.pause();
    let cpus = shell.linux.cpus(&paused);
    let memory = PausedMemory::new(machine.ram());
    let entry = machine.syscall_entry(&paused, 0).map_or(0, |entry| entry.0);
    let live = RunningKernel::find(memory.view(cpus[0].address_space()), &cpus[0], entry);
    let live = live.unwrap_or_else(|e| panic!("{e}"));
    assert!(
        view.kernel.symbols.len() > 20_000,
        "{}",
        view.kernel.symbols.len()
    );
    assert_eq!(live.symbols.len(), view.kernel.symbols.len());
    let (found, expected) = (addresses(&live.symbols), addresses(&view.kernel.symbols));
    let different = found
        .iter()
        .zip(&expected)
        .find(|(found, expected)| found != expected);
    assert_eq!(different, None);
    assert_eq!(live.space, view.kernel.space);
    assert_eq!(live.banner.as_deref(), shell.linux.kernel.image.banner());
    assert!(live.space_lasts);
    let types = |kernel: RunningKernel| kernel.types.unwrap_or_else(|e| panic!("{e}"));
    let (found, expected) = (types(live), types(view.kernel.clone()));
    println!("{} types", found.len());
    assert_eq!(found.len(), expected.len());
}

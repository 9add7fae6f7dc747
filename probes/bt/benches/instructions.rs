//! The number of our own instructions in a hit, counted without KVM: `cargo bench-instructions`.
//!
//! Each line is rehearsed under valgrind's callgrind, which counts only the instructions in
//! [`Rehearsal::hit`]: the same number every time. `instructions.txt` beside this file has the
//! limit of each line; above it the command fails. The guest is a few pages mapped as Linux maps
//! its kernel: 4 KiB pages, four levels.

use std::error::Error;
use std::process::Command;
use std::sync::Arc;

use bt::Clock;
use bt::compile::{self, Options};
use bt::session::{Finder, NotFound, Prepared, ScriptSession};
use introspect::kernel::btf::Btf;
use introspect::kernel::image::KernelImage;
use introspect::x86_64::paging::AddressSpace;
use introspect::{Gpa, Gva};
use probes::engine::{Capture, Engine, EngineLimits, Filter, Match, RingSize, Session};
use probes::kernel_view::KernelView;
use probes::name::ProbeName;
use probes::probe::{Moment, Probe, Target};
use vmm::rehearsal::Rehearsal;
use vmm::trap::Trap;
use vmm::{StoppedVcpu, TrapSink};

/// The limits, one a line: the most instructions, then the line's name.
const LIMITS: &str = include_str!("instructions.txt");
/// The function in which callgrind counts.
const COUNTED: &str = "*Rehearsal*hit*";
/// The number of counted hits. Others precede them, because the first setup is no part of a hit.
const HITS: u64 = 1_000;
const MEMORY: u64 = 4 << 20;
const PAGE: u64 = 4096;
const ROOT: u64 = 0x10_0000;
/// The page with all code.
const TEXT: u64 = 0xffff_ffff_8100_0000;
/// The address of the function.
const CODE: u64 = TEXT + 0x40;
const TEXT_AT: u64 = 0x20_0000;
const STACK: u64 = 0xffff_c900_0001_0000;
const STACK_AT: u64 = 0x21_0000;
const STACK_PAGES: u64 = 4;
/// RSP at the function's first instruction.
const RSP: u64 = STACK + 2 * PAGE + 0xe08;
/// The function's return address: behind a call, at a MOV.
const CALLER: u64 = TEXT + 0x100;
/// PUSH RBP; MOV RBP,RSP.
const FUNCTION: [u8; 4] = [0x55, 0x48, 0x89, 0xe5];
/// NOPs and the call, which ends there.
const CALL: [u8; 21] = {
    let mut code = [0x90; 21];
    [code[16], code[17], code[18], code[19], code[20]] = [0xe8, 0x40, 0xff, 0xff, 0xff];
    code
};
/// MOV EBX,EAX; NOPs.
const BEHIND_CALL: [u8; 4] = [0x89, 0xc3, 0x90, 0x90];
const FRAMES: u64 = 20;
const PRESENT_WRITABLE: u64 = 3;

/// The scripts by their lines.
const SCRIPTS: [(&str, &str); 5] = [
    ("script: nothing", "kprobe:f { }"),
    ("script: count() by comm", "kprobe:f { @[comm] = count(); }"),
    (
        "script: hist() of a duration",
        "kprobe:f { @took = hist(nsecs - @start[tid]); @start[tid] = nsecs; }",
    ),
    (
        "script: count() by str(arg)",
        "kprobe:f { @[str(arg0)] = count(); }",
    ),
    (
        "script: count() by kstack(5)",
        "kprobe:f { @[kstack(5)] = count(); }",
    ),
];

/// A sink that accepts a trap and does nothing.
struct Nothing;

impl TrapSink for Nothing {
    fn trap(&self, _: &Trap, _: &StoppedVcpu<'_>) {}
}

/// A machine in which a function of the kernel is entered again and again.
struct Guest {
    machine: Rehearsal,
    space: AddressSpace,
    /// The next free page for page tables.
    free: u64,
}

impl Guest {
    fn new() -> Result<Self, Box<dyn Error>> {
        let space = AddressSpace {
            root: Gpa(ROOT),
            levels: 4,
        };
        let mut guest = Self {
            machine: Rehearsal::new(MEMORY, Gpa(ROOT))?,
            space,
            free: ROOT + PAGE,
        };
        guest.map(TEXT, TEXT_AT)?;
        for page in 0..STACK_PAGES {
            guest.map(STACK + page * PAGE, STACK_AT + page * PAGE)?;
        }
        guest.write(TEXT_AT + (CODE - TEXT), &FUNCTION)?;
        let caller = TEXT_AT + (CALLER - TEXT);
        guest.write(caller - CALL.len() as u64, &CALL)?;
        guest.write(caller, &BEHIND_CALL)?;
        guest.word(RSP, CALLER)?;
        guest.write(STACK_AT, b"/etc/passwd\0")?;
        // Frames of 64 bytes above: the outer one's address, and a return address.
        for frame in 0..FRAMES {
            let at = RSP + 8 + frame * 64;
            let outer = if frame + 1 < FRAMES { at + 64 } else { 0 };
            guest.word(at, outer)?;
            guest.word(at + 8, CALLER + 16 * frame)?;
        }
        Ok(guest)
    }

    fn write(&self, at: u64, bytes: &[u8]) -> Result<(), Box<dyn Error>> {
        Ok(self.machine.handle().ram().write_physical(Gpa(at), bytes)?)
    }

    /// Writes a word to the stack.
    fn word(&self, at: u64, value: u64) -> Result<(), Box<dyn Error>> {
        self.write(STACK_AT + (at - STACK), &value.to_le_bytes())
    }

    /// Maps a page of 4 KiB.
    fn map(&mut self, address: u64, physical: u64) -> Result<(), Box<dyn Error>> {
        let mut table = ROOT;
        for shift in [39, 30, 21] {
            let slot = table + (address >> shift & 0x1ff) * 8;
            let handle = self.machine.handle();
            let mut entry = [0; 8];
            introspect::PhysicalMemory::read_physical(handle.ram(), Gpa(slot), &mut entry)?;
            let mut entry = u64::from_le_bytes(entry);
            if entry == 0 {
                entry = self.free | PRESENT_WRITABLE;
                self.free += PAGE;
                self.write(slot, &entry.to_le_bytes())?;
            }
            table = entry & !(PAGE - 1);
        }
        let slot = table + (address >> 12 & 0x1ff) * 8;
        self.write(slot, &(physical | PRESENT_WRITABLE).to_le_bytes())
    }

    /// Enters the function, and leaves it if its `return` is probed too.
    fn call(&mut self, with_return: bool) -> Result<(), Box<dyn Error>> {
        let regs = self.machine.regs();
        (regs.rip, regs.rsp, regs.rbp) = (CODE, RSP, RSP + 8);
        regs.rdi = STACK;
        let mut passed = self.machine.hit();
        if with_return {
            let regs = self.machine.regs();
            (regs.rip, regs.rsp) = (CALLER, RSP + 8);
            passed &= self.machine.hit();
        }
        match passed {
            true => Ok(()),
            false => Err("the hit was not passed by the usual way".into()),
        }
    }

    /// Returns the function's probe at its entry or return.
    fn probe(moment: Moment) -> Probe {
        Probe {
            name: ProbeName::new("rehearsal", "", "function", moment.name()),
            signature: None,
            target: Target::Kernel {
                address: Gva(CODE),
                moment,
            },
        }
    }

    fn engine(&self) -> Result<Engine, Box<dyn Error>> {
        let symbols = KernelImage::parse(guest::micro::elf())?.symbols()?;
        let view = Arc::new(KernelView::without_types(symbols, self.space).with_lasting_space());
        Ok(Engine::new(
            self.machine.handle(),
            view,
            &EngineLimits::default(),
        ))
    }

    fn script(&self, text: &str) -> Result<ScriptSession, Box<dyn Error>> {
        let options = Options::default();
        let script = bt::parse::parse(text.as_bytes(), options.dialect);
        let script = script.map_err(|wrong| format!("{text}: {wrong:?}"))?;
        let engine = self.engine()?;
        let clock = Clock::now(engine.tsc_hz());
        let prepared = Prepared::new(&script, &options, &OneFunction, &OneFunction, 1, clock);
        let prepared = prepared.map_err(|wrong| format!("{text}: {wrong:?}"))?;
        Ok(prepared.start(&engine, &|_: &Probe| Filter::default(), &mut |_| ())?)
    }

    fn session(
        &self,
        moments: &[Moment],
        filter: &Filter,
        capture: &Capture,
    ) -> Result<Session, Box<dyn Error>> {
        let mut session = self
            .engine()?
            .session(RingSize::for_capture(1 << 14, capture))?;
        for moment in moments {
            session.enable(&Self::probe(*moment), filter.clone(), capture.clone())?;
        }
        Ok(session)
    }
}

/// The only function, for scripts.
struct OneFunction;

impl compile::Guest for OneFunction {
    fn types(&self) -> Option<&Btf> {
        None
    }

    fn symbol(&self, _: &str) -> Option<u64> {
        None
    }

    fn nearest_symbols(&self, _: &str) -> Vec<String> {
        Vec::new()
    }
}

impl Finder for OneFunction {
    fn find(&self, _: &str) -> Result<Vec<Probe>, NotFound> {
        Ok(vec![Guest::probe(Moment::Entry)])
    }
}

/// Calls the function with a script's rule at it.
fn rehearse_script(line: &str, text: &str, calls: u64) -> Result<(), Box<dyn Error>> {
    let mut guest = Guest::new()?;
    let script = guest.script(text)?;
    for _ in 0..calls {
        guest.call(false)?;
    }
    let counts = script.stats().probes;
    match counts.recorded == calls {
        true => Ok(()),
        false => Err(format!("{line}: {counts:?} at {calls} calls").into()),
    }
}

/// Calls the function with the line's probes; each call is one hit or two.
fn rehearse(line: &str, calls: u64) -> Result<(), Box<dyn Error>> {
    if let Some((_, text)) = SCRIPTS.iter().find(|(known, _)| *known == line) {
        return rehearse_script(line, text, calls);
    }
    let mut guest = Guest::new()?;
    let entry = &[Moment::Entry][..];
    let both = &[Moment::Entry, Moment::Return][..];
    let (all, plain) = (Filter::default(), Capture::default());
    let nobody = Filter {
        pids: Match::In(vec![1]),
        ..Filter::default()
    };
    let stack = Capture {
        kernel_stack: FRAMES as usize,
        ..Capture::default()
    };
    let session = match line {
        "kernel trap, nothing done" => None,
        "kernel entry" => Some(guest.session(entry, &all, &plain)?),
        "filtered out by pid" => Some(guest.session(entry, &nobody, &plain)?),
        "entry and return" => Some(guest.session(both, &all, &plain)?),
        "with 20 frames" => Some(guest.session(entry, &all, &stack)?),
        _ => return Err(format!("{line}: no line of this benchmark").into()),
    };
    if session.is_none() {
        let handle = guest.machine.handle();
        handle.set_sink(Some(Box::new(Nothing)));
        handle.traps().arm_kernel_by(Gva(CODE), guest.space)?;
    }
    for _ in 0..calls {
        guest.call(line == "entry and return")?;
    }
    // A hit that was neither recorded nor filtered was not measured.
    if let Some(session) = session {
        let counts = session.stats().probes;
        let counted = match line {
            "filtered out by pid" => counts.filtered,
            "entry and return" => counts.recorded / 2,
            _ => counts.recorded,
        };
        if counted != calls {
            return Err(format!("{line}: {counts:?} at {calls} calls").into());
        }
    }
    Ok(())
}

/// Returns the instructions in `calls` calls of a line, as callgrind counts them.
fn count(line: &str, calls: u64) -> Result<u64, Box<dyn Error>> {
    let mut valgrind = Command::new("valgrind");
    valgrind
        .args(["--tool=callgrind", "--callgrind-out-file=/dev/null"])
        .args([
            "--collect-atstart=no",
            &format!("--toggle-collect={COUNTED}"),
        ])
        .arg(std::env::current_exe()?)
        .args(["--rehearse", line, &calls.to_string()]);
    let output = valgrind.output();
    let output = output.map_err(|e| format!("valgrind: {e}; install the package valgrind"))?;
    let said = String::from_utf8_lossy(&output.stderr);
    let counted = said.lines().find_map(|l| l.split_once("Collected :"));
    let counted = counted.and_then(|(_, number)| number.trim().parse().ok());
    match counted.filter(|_| output.status.success()) {
        Some(counted) => Ok(counted),
        None => Err(format!("{line}: valgrind ended with {}: {said}", output.status).into()),
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let [option, line, calls] = &arguments[..]
        && option == "--rehearse"
    {
        return rehearse(line, calls.parse()?);
    }
    println!("{:<32} {:>12} {:>8}", "", "instructions", "most");
    let mut above = Vec::new();
    for limit in LIMITS.lines() {
        let (most, line) = limit.split_once(' ').ok_or("instructions.txt: no name")?;
        let most: u64 = most.parse()?;
        // The difference of two runs removes the costs of the first hits, which are in both.
        let taken = (count(line, 2 * HITS)? - count(line, HITS)?).div_ceil(HITS);
        println!("{line:<32} {taken:12} {most:8}");
        if taken > most {
            above.push(line);
        }
    }
    match above.is_empty() {
        true => Ok(()),
        false => Err(format!("above the most: {}", above.join(", ")).into()),
    }
}

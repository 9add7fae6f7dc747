//! The commands `ps`, `maps`, `sym` and `stack`, which inspect a guest.
//!
//! A guest that does not run is read here. Of a machine, its own process reads the paused
//! guest; this module sends the request and prints the answer. The length of the pause, and what
//! could not be read, go to standard error.

use std::io::Write;
use std::path::PathBuf;

use serde::Serialize;

use super::guest::{self, Read};
use super::remote::{absolute, find};
use crate::args;
use crate::args::GuestSelector;
use crate::client::control::{AskError, ask, unexpected};
use crate::inspection::{Inspection, Inspector};
use crate::protocol::control::{Answer, Command};
use crate::protocol::error::{ErrorKind, RequestError};
use crate::protocol::inspection::{
    Frame, Mapping, Process, ProcessName, Reading, Symbol, ThreadStack,
};
use crate::registry::Running;
use crate::report::{Failure, ToOutput, printable, printable_lines, say};
use crate::saved_guest::SavedGuest;

/// The first column of a mapping's name (fs/proc/task_mmu.c).
const MAPS_NAME_COLUMN: usize = 73;
const NANOSECONDS: u64 = 1_000_000_000;
/// The largest width of the column of containers, in characters. Longer names push the command.
const MOST_CONTAINER: usize = 32;

/// Runs `exotrace ps`.
pub fn ps(args: args::Ps) -> Result<(), Failure> {
    let command = Command::Ps {
        threads: args.threads,
    };
    let (asked, answer) = Asked::ask(args.guest, command)?;
    let Answer::Ps(found) = answer else {
        return Err(asked.unexpected(&answer));
    };
    asked.tell(&found.reading);
    let text = |processes: &[Process]| ps_text(processes, args.threads);
    print(args.json, &found.processes, text)
}

/// Runs `exotrace maps`.
pub fn maps(args: args::Maps) -> Result<(), Failure> {
    let command = Command::Maps {
        process: args.process,
    };
    let (asked, answer) = Asked::ask(args.guest, command)?;
    let Answer::Maps(found) = answer else {
        return Err(asked.unexpected(&answer));
    };
    asked.tell(&found.reading);
    print(args.json, &found.mappings, maps_text)
}

/// Runs `exotrace sym`.
pub fn sym(args: args::Sym) -> Result<(), Failure> {
    let command = Command::Sym {
        what: args.what,
        process: args.process,
        symfs: symfs(args.symfs)?,
    };
    let (asked, answer) = Asked::ask(args.guest, command)?;
    let Answer::Sym(found) = answer else {
        return Err(asked.unexpected(&answer));
    };
    asked.tell(&found.reading);
    print(args.json, &found.symbols, symbols_text)?;
    let Some((last, others)) = found.unknown.split_last() else {
        return Ok(());
    };
    for unknown in others {
        say(unknown);
    }
    Err(Failure::new(last))
}

/// Runs `exotrace stack`.
pub fn stack(args: args::Stack) -> Result<(), Failure> {
    let command = Command::Stack {
        process: args.process,
        symfs: symfs(args.symfs)?,
    };
    let (asked, answer) = Asked::ask(args.guest, command)?;
    let Answer::Stack(found) = answer else {
        return Err(asked.unexpected(&answer));
    };
    asked.tell(&found.reading);
    print(args.json, &found.threads, stacks_text)
}

/// Returns the pids of processes.
///
/// # Errors
/// If the guest has no such process. Where its processes cannot be read, a name is an error, and a
/// pid is taken as it is.
pub(super) fn pids(guest: &GuestSelector, processes: &[ProcessName]) -> Result<Vec<u32>, Failure> {
    let pid = |process: &ProcessName| {
        let command = Command::Pid {
            process: process.clone(),
        };
        let looked = guest::read(guest, |saved| look_into(saved, command.clone()))?;
        let answer = match looked {
            Some((_, answer)) => Ok(answer),
            None => ask(&find(guest.which.clone())?, &command),
        };
        match (answer, process) {
            (Ok(Answer::Pid { pid }), _) => Ok(pid.unsigned_abs()),
            (Ok(_), _) => Err(Failure::new("another answer than asked for")),
            (Err(AskError::Refused { error, .. }), ProcessName::Pid(pid))
                if error.kind != ErrorKind::NoProcess =>
            {
                Ok(pid.unsigned_abs())
            }
            (Err(error), _) => Err(error.into()),
        }
    };
    processes.iter().map(pid).collect()
}

fn symfs(folder: Option<PathBuf>) -> Result<Option<PathBuf>, Failure> {
    match folder {
        Some(folder) if !folder.is_dir() => Err(Failure::new(format_args!(
            "--symfs {}: no such folder",
            folder.display()
        ))),
        folder => folder.map(|folder| absolute("--symfs", folder)).transpose(),
    }
}

/// The guest that was asked.
enum Asked {
    Machine(Running),
    Read(Read),
}

impl Asked {
    /// Asks a machine, or looks into a guest that exotrace does not run.
    fn ask(guest: GuestSelector, command: Command) -> Result<(Self, Answer), Failure> {
        let looked = guest::read(&guest, |saved| look_into(saved, command.clone()))?;
        if let Some((read, answer)) = looked {
            return Ok((Self::Read(read), answer));
        }
        let machine = find(guest.which)?;
        let answer = ask(&machine, &command)?;
        Ok((Self::Machine(machine), answer))
    }

    fn unexpected(&self, answer: &Answer) -> Failure {
        match self {
            Self::Machine(machine) => unexpected(machine, answer).into(),
            Self::Read(read) => Failure::new(format_args!(
                "{}: another answer than asked for",
                read.path.display()
            )),
        }
    }

    /// Reports the circumstances of the reading to the user.
    fn tell(&self, reading: &Reading) {
        let name = match self {
            Self::Machine(machine) => machine.name.to_string(),
            Self::Read(read) => read.path.display().to_string(),
        };
        for reason in &reading.incomplete {
            say(format_args!("{name}: {reason}"));
        }
        match self {
            Self::Machine(_) => {
                let paused = reading.standstill_us;
                say(format_args!("{name}: the guest was paused for {paused} us"));
            }
            Self::Read(read) => read.tell(),
        }
    }
}

/// Answers a command from the memory of a guest that exotrace does not run.
fn look_into(saved: &SavedGuest, command: Command) -> Result<Answer, RequestError> {
    let inspector = Inspector::default();
    let inspection = Inspection::of_saved(saved, &inspector);
    match command {
        Command::Ps { threads } => inspection.ps(threads).map(Answer::Ps),
        Command::Pid { process } => inspection.pid(&process).map(|pid| Answer::Pid { pid }),
        Command::Maps { process } => inspection.maps(&process).map(Answer::Maps),
        Command::Sym {
            what,
            process,
            symfs,
        } => inspection
            .sym(&what, process.as_ref(), symfs)
            .map(Answer::Sym),
        Command::Stack { process, symfs } => inspection.stack(&process, symfs).map(Answer::Stack),
        _ => Err(RequestError::new(
            ErrorKind::Invalid,
            "only a running machine answers this",
        )),
    }
}

/// Prints each item as a line of JSON, or all of them as text.
fn print<T: Serialize>(
    json: bool,
    items: &[T],
    text: impl FnOnce(&[T]) -> String,
) -> Result<(), Failure> {
    let mut out = std::io::stdout().lock();
    if !json {
        return out.write_all(text(items).as_bytes()).to_output();
    }
    for item in items {
        let line = serde_json::to_string(item)?;
        writeln!(out, "{line}").to_output()?;
    }
    Ok(())
}

pub(super) fn ps_text(processes: &[Process], threads: bool) -> String {
    let tid = if threads { "    TID " } else { "" };
    let containers = ContainerColumn::of(processes);
    let heading = containers.cell("CONTAINER");
    let mut text = format!("    PID {tid}   PPID S CPU     START {heading}COMMAND\n");
    for process in processes {
        let (pid, tid) = match threads {
            true => (process.tgid, format!("{:>7} ", process.pid)),
            false => (process.pid, String::new()),
        };
        let (seconds, part) = (
            process.start_ns / NANOSECONDS,
            process.start_ns % NANOSECONDS / (NANOSECONDS / 100),
        );
        text += &format!(
            "{pid:>7} {tid}{:>7} {} {:>3} {seconds:>6}.{part:02} {}{}\n",
            process.ppid,
            process.state,
            process.cpu,
            containers.cell(process.container.as_deref().unwrap_or("-")),
            command(process)
        );
    }
    printable_lines(&text)
}

/// The column of containers, which is there if any process is in one.
struct ContainerColumn {
    width: Option<usize>,
}

impl ContainerColumn {
    fn of(processes: &[Process]) -> Self {
        let names = processes.iter().filter_map(|it| it.container.as_deref());
        let longest = names.map(|name| name.chars().count()).max();
        let width = longest.map(|longest| longest.clamp("CONTAINER".len(), MOST_CONTAINER));
        Self { width }
    }

    fn cell(&self, text: &str) -> String {
        match self.width {
            Some(width) => format!("{:<width$} ", printable(text)),
            None => String::new(),
        }
    }
}

/// Returns the command line. Without one, or if a thread has its own name, it is the name in
/// brackets as in ps(1).
fn command(process: &Process) -> String {
    if process.arguments.is_empty() {
        return format!("[{}]", printable(&process.comm));
    }
    let line = printable(&process.arguments.join(" "));
    match process.pid == process.tgid {
        true => line,
        false => format!("{{{}}} {line}", printable(&process.comm)),
    }
}

pub(super) fn maps_text(mappings: &[Mapping]) -> String {
    let line = |mapping: &Mapping| {
        let (major, minor) = mapping.device;
        let head = format!(
            "{:08x}-{:08x} {} {:08x} {major:02x}:{minor:02x} {}",
            mapping.start, mapping.end, mapping.permissions, mapping.offset, mapping.inode
        );
        match mapping.name.is_empty() {
            true => format!("{head} \n"),
            false => format!("{head:<MAPS_NAME_COLUMN$}{}\n", printable(&mapping.name)),
        }
    };
    printable_lines(&mappings.iter().map(line).collect::<String>())
}

pub(super) fn symbols_text(symbols: &[Symbol]) -> String {
    symbols.iter().map(symbol_line).collect()
}

fn symbol_line(symbol: &Symbol) -> String {
    let offset = match symbol.offset {
        0 => String::new(),
        offset => format!("+{offset:#x}"),
    };
    let object = symbol.object.as_deref();
    let object = object.map_or(String::new(), |object| format!(" [{object}]"));
    let Symbol {
        address,
        kind,
        name,
        ..
    } = symbol;
    // The guest controls the letter as well.
    printable(&format!("{address:016x} {kind} {name}{offset}{object}")) + "\n"
}

pub(super) fn stacks_text(threads: &[ThreadStack]) -> String {
    let texts: Vec<String> = threads.iter().map(stack_text).collect();
    printable_lines(&texts.join("\n"))
}

fn stack_text(thread: &ThreadStack) -> String {
    let mut text = format!(
        "{} {} ({})\n",
        thread.tid,
        printable(&thread.comm),
        thread.state
    );
    for (part, frames, end) in [
        ("kernel", &thread.kernel, &thread.kernel_end),
        ("user", &thread.user, &thread.user_end),
    ] {
        if frames.is_empty() && end.is_none() {
            continue;
        }
        text += &format!("  {part}:\n");
        for (number, frame) in frames.iter().enumerate() {
            text += &frame_line(number, frame);
        }
        if let Some(end) = end {
            text += &format!("    ends here: {end}\n");
        }
    }
    text
}

fn frame_line(number: usize, frame: &Frame) -> String {
    let place = match (&frame.name, &frame.object) {
        (Some(name), None) => format!("{}+{:#x}", printable(name), frame.offset),
        (Some(name), Some(object)) => format!(
            "{}+{:#x} ({})",
            printable(name),
            frame.offset,
            printable(object)
        ),
        (None, Some(object)) => format!("? ({}+{:#x})", printable(object), frame.offset),
        (None, None) => "?".to_owned(),
    };
    let doubt = frame.doubt.as_deref().map(|doubt| format!(" ? {doubt}"));
    format!(
        "    #{number:<2} {:016x} {place}{}\n",
        frame.address,
        doubt.unwrap_or_default()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn process(pid: i32, tgid: i32, arguments: &[&str]) -> Process {
        Process {
            pid,
            tgid,
            ppid: 1,
            state: 'S',
            comm: "work\u{1b}er".into(),
            kernel_thread: arguments.is_empty(),
            threads: 2,
            start_ns: 12_345_678_901,
            cpu: 1,
            arguments: arguments.iter().map(ToString::to_string).collect(),
            program: None,
            ns_pid: Some(pid),
            cgroup: None,
            container: None,
        }
    }

    #[test]
    fn processes_are_listed_with_their_commands_and_without_control_characters() {
        let processes = [process(7, 7, &[]), process(8, 8, &["work", "a\nb"])];
        assert_eq!(
            ps_text(&processes, false),
            "    PID    PPID S CPU     START COMMAND\n\
             \u{20}     7       1 S   1     12.34 [work?er]\n\
             \u{20}     8       1 S   1     12.34 work a?b\n"
        );
        let threads = [process(8, 8, &["work"]), process(9, 8, &["work"])];
        assert_eq!(
            ps_text(&threads, true),
            "    PID     TID    PPID S CPU     START COMMAND\n\
             \u{20}     8       8       1 S   1     12.34 work\n\
             \u{20}     8       9       1 S   1     12.34 {work?er} work\n"
        );
    }

    #[test]
    fn containers_have_a_column_where_there_are_any() {
        let contained = Process {
            container: Some("libpod-0123456\u{9b}".into()),
            ..process(8, 8, &["work"])
        };
        assert_eq!(
            ps_text(&[process(7, 7, &["init"]), contained], false),
            "    PID    PPID S CPU     START CONTAINER       COMMAND\n\
             \u{20}     7       1 S   1     12.34 -               init\n\
             \u{20}     8       1 S   1     12.34 libpod-0123456? work\n"
        );
    }

    /// Also checks parts that are one letter for an honest guest, because a guest may have taken
    /// over its machine's process.
    #[test]
    fn no_part_of_an_answer_moves_the_cursor() {
        let process = Process {
            state: '\u{9b}',
            ..process(7, 7, &[])
        };
        let mapping = Mapping {
            start: 0,
            end: 0x1000,
            permissions: "\u{1b}[2J".into(),
            offset: 0,
            device: (0, 2),
            inode: 65,
            name: String::new(),
        };
        let thread = ThreadStack {
            tid: 1,
            comm: "a".into(),
            state: '\u{7f}',
            kernel: vec![Frame {
                address: 1,
                name: None,
                offset: 0,
                object: None,
                doubt: Some("\u{1b}c".into()),
            }],
            kernel_end: Some("\u{202e}".into()),
            user: Vec::new(),
            user_end: None,
        };
        for text in [
            ps_text(&[process], true),
            maps_text(&[mapping]),
            stacks_text(&[thread]),
        ] {
            assert_eq!(text, printable(&text.replace('\n', "|")).replace('|', "\n"));
        }
    }

    #[test]
    fn mappings_are_written_as_proc_does() {
        let mapping = |name: &str| Mapping {
            start: 0x40_0000,
            end: 0x40_1000,
            permissions: "r-xp".into(),
            offset: 0x1000,
            device: (0, 2),
            inode: 65,
            name: name.into(),
        };
        assert_eq!(
            maps_text(&[mapping("/bin/sh"), mapping("")]),
            "00400000-00401000 r-xp 00001000 00:02 65                                 /bin/sh\n\
             00400000-00401000 r-xp 00001000 00:02 65 \n"
        );
    }

    #[test]
    fn stacks_say_what_is_doubtful_and_why_they_end() {
        let frame = |name: Option<&str>, doubt: Option<&str>| Frame {
            address: 0x1234,
            name: name.map(str::to_owned),
            offset: 4,
            object: Some("/bin/x".into()),
            doubt: doubt.map(str::to_owned),
        };
        let thread = ThreadStack {
            tid: 5,
            comm: "x".into(),
            state: 'R',
            kernel: Vec::new(),
            kernel_end: None,
            user: vec![
                frame(Some("main"), None),
                frame(None, Some("by its frame pointer")),
            ],
            user_end: Some("0x7000 is not in memory".into()),
        };
        assert_eq!(
            stack_text(&thread),
            "5 x (R)\n  user:\n    \
             #0  0000000000001234 main+0x4 (/bin/x)\n    \
             #1  0000000000001234 ? (/bin/x+0x4) ? by its frame pointer\n    \
             ends here: 0x7000 is not in memory\n"
        );
    }

    #[test]
    fn symbols_are_lines_of_nm() {
        let symbol = |offset, object: Option<&str>| Symbol {
            address: 0xffff_ffff_8100_0000,
            name: "vfs_read".into(),
            offset,
            kind: 'T',
            object: object.map(str::to_owned),
        };
        assert_eq!(
            symbol_line(&symbol(0, None)),
            "ffffffff81000000 T vfs_read\n"
        );
        assert_eq!(
            symbol_line(&symbol(16, Some("ext4"))),
            "ffffffff81000000 T vfs_read+0x10 [ext4]\n"
        );
        let hostile = Symbol {
            kind: '\u{1b}',
            ..symbol(0, None)
        };
        assert_eq!(symbol_line(&hostile), "ffffffff81000000 ? vfs_read\n");
    }
}

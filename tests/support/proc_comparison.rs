//! Compares what is read from outside with the guest's own `/proc`.
//!
//! The guest's `/proc` is read before and after the guest is paused for a copy of its memory. A
//! task whose context switches have not changed in between has slept all the time, and must match
//! exactly. Of a task that ran, only what cannot change is compared.

use std::collections::BTreeMap;
use std::fmt::Debug;

use introspect::kernel::loaded_modules::LoadedModules;
use introspect::kernel::task_list::TaskInfo;
use introspect::stack::frames::Frame;
use introspect::system::PausedSystem;
use introspect::x86_64::CpuState;

use crate::crowd::{self, Asked, Copy, ProcTexts};
use crate::shell::Shell;

/// The differences found, and the number of comparisons.
#[derive(Default)]
pub struct Comparison {
    compared: usize,
    different: Vec<String>,
}

impl Comparison {
    /// Compares one thing.
    pub fn equal<T: PartialEq + Debug>(&mut self, what: &str, found: T, told: T) {
        self.compared += 1;
        if found != told {
            let line = format!("{what}: read {found:?}, the guest says {told:?}");
            self.different.push(line);
        }
    }

    /// Ends the comparison.
    ///
    /// # Panics
    /// If anything differed, or fewer than `least` things were compared.
    pub fn finish(self, what: &str, least: usize) {
        println!("{what}: {} compared", self.compared);
        assert!(
            self.different.is_empty(),
            "{what}: {} of {} differ\n{}",
            self.different.len(),
            self.compared,
            self.different.join("\n")
        );
        assert!(self.compared >= least, "{what}: only {}", self.compared);
    }
}

/// The guest's own reports, with its threads' context switches before and after the moment that is
/// compared.
pub struct Told {
    /// The guest's files in /proc.
    pub texts: ProcTexts,
    before: BTreeMap<String, String>,
    after: BTreeMap<String, String>,
}

/// A guest's memory and CPUs at one moment.
pub struct Moment {
    /// The guest's memory.
    pub memory: Copy,
    /// The states of the CPUs.
    pub cpus: Vec<CpuState>,
}

impl Told {
    /// Reads a running guest's `/proc`, and copies a moment between the first and the last answer.
    ///
    /// # Panics
    /// If it does not answer.
    pub fn ask(shell: &Shell, asked: Asked) -> (Self, Moment) {
        let before = crowd::switches(shell);
        let texts = crowd::proc_texts(shell, asked);
        let machine = shell.linux.machine();
        let paused = machine.pause();
        let moment = Moment {
            cpus: shell.linux.cpus(&paused),
            memory: crowd::copy_of(machine.ram()),
        };
        drop(paused);
        let told = Self {
            texts,
            before,
            after: crowd::switches(shell),
        };
        (told, moment)
    }

    /// Returns whether the thread at a path below /proc slept from the first reading to the last.
    pub fn slept(&self, path: &str) -> bool {
        let count = self.before.get(path);
        count.is_some() && count == self.after.get(path)
    }

    /// Returns whether the thread at a path below /proc still existed afterwards.
    pub fn lives_on(&self, path: &str) -> bool {
        self.after.contains_key(path)
    }
}

/// Returns bytes as text.
pub fn lossy(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Splits `/proc/PID/stat` into number, name, and the fields behind the name, of which the first is
/// the state.
fn stat_fields(text: &str) -> Option<(&str, &str, Vec<&str>)> {
    let (pid, rest) = text.trim_end().split_once(" (")?;
    let (name, rest) = rest.rsplit_once(") ")?;
    Some((pid, name, rest.split(' ').collect()))
}

/// Compares a task with its `stat` in the folder `path` below /proc.
///
/// # Panics
/// If that file is malformed.
pub fn compare_stat(
    it: &mut Comparison,
    look: &PausedSystem<'_>,
    guest: &Told,
    task: &TaskInfo,
    path: &str,
) {
    let Some(text) = guest.texts.get(&format!("{path}/stat")) else {
        return;
    };
    let (pid, name, fields) = stat_fields(text).unwrap_or_else(|| panic!("{path}: {text}"));
    let field = |number: usize| fields.get(number - 3).copied().unwrap_or("");
    let mut equal = |what: &str, found: String, told: &str| {
        it.equal(&format!("{path} {what}"), found, told.to_owned());
    };
    equal("pid", task.pid.to_string(), pid);
    equal("ppid", task.parent.to_string(), field(4));
    equal("pgrp", task.process_group.to_string(), field(5));
    equal("session", task.session.to_string(), field(6));
    equal("num_threads", task.threads.to_string(), field(20));
    equal("starttime", task.start_ticks().to_string(), field(22));
    equal("priority", task.priority.to_string(), field(18));
    equal("nice", task.nice.to_string(), field(19));
    if guest.slept(path) {
        equal("state", task.state.letter().to_string(), field(3));
        equal("flags", task.flags.to_string(), field(9));
        equal("processor", task.cpu.to_string(), field(39));
        equal("comm", lossy(&look.name(task)), name);
    }
}

/// Compares, frame by frame, the kernel stacks of the threads of a process that have slept.
///
/// # Panics
/// If the kernel's stacks cannot be read.
pub fn compare_stacks(
    it: &mut Comparison,
    look: &PausedSystem<'_>,
    guest: &Told,
    process: &TaskInfo,
    threads: &[TaskInfo],
) {
    let objects = look
        .objects(process, None)
        .unwrap_or_else(|e| panic!("{e}"));
    let modules = look.modules().unwrap_or_else(|e| panic!("{e}"));
    let unwinder = look.kernel_unwinder(&modules.items);
    let unwinder = unwinder.unwrap_or_else(|e| panic!("{e}"));
    let modules = look.module_symbols(modules).ok();
    let modules = modules.map(|(modules, _)| modules);
    let mut user = objects.unwinder();
    for thread in threads {
        let path = format!("{}/task/{}", process.pid, thread.pid);
        let Some(told) = guest.texts.get(&format!("{path}/stack")) else {
            continue;
        };
        if !guest.slept(&path) {
            continue;
        }
        let stack = look.stack(thread, &unwinder, &mut user);
        let frames = stack.kernel.iter().flat_map(|stack| &stack.frames);
        let frames = frames.filter(|frame| !unwinder.is_scheduler(frame));
        let found = frames.map(|frame| frame_name(look, modules.as_ref(), frame));
        // `[<0>] do_wait+0x10c/0x2d0`, followed by ` [brd]` for a module's function.
        let told = told.lines().filter_map(|line| {
            let (place, rest) = line.strip_prefix("[<0>] ")?.split_once('/')?;
            let module = rest.split_once(' ').map_or("", |(_size, module)| module);
            Some(format!("{place} {module}").trim_end().to_owned())
        });
        it.equal(
            &format!("{path} stack"),
            found.collect(),
            told.collect::<Vec<_>>(),
        );
        // A zombie has no stack.
        if let Some(stack) = stack.kernel.filter(|stack| !stack.frames.is_empty()) {
            it.equal(&format!("{path} is reliable"), stack.is_reliable(), true);
        }
    }
}

/// Returns a frame as the kernel prints it in stacks, without the function's size:
/// `brd_submit_bio+0x51 [brd]`.
pub fn frame_name(
    look: &PausedSystem<'_>,
    modules: Option<&LoadedModules>,
    frame: &Frame,
) -> String {
    // For a return address the kernel also names the call before it (%pB).
    let behind = frame.address.0.wrapping_sub(frame.lookup_address());
    let Some(place) = look.place(frame.lookup_address(), modules) else {
        return frame.address.to_string();
    };
    let module = place.module.map(|module| format!(" [{module}]"));
    format!(
        "{}+{:#x}{}",
        place.name,
        place.offset + behind,
        module.unwrap_or_default()
    )
}

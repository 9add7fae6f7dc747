//! Prints the processes in a saved memory image of a machine: `processes CORE VMLINUX`. It prints
//! the fields of `/proc/PID/stat`, with programs, directories and open files.

mod saved_guest;

use std::error::Error;
use std::fmt::Display;
use std::time::Instant;

use introspect::kernel::files::FilesLayout;
use introspect::kernel::path::PathRef;
use introspect::kernel::process::ProcessLayout;
use introspect::kernel::task_list::{TaskInfo, TaskListLayout};
use introspect::{MemoryView, PausedMemory};
use saved_guest::SavedGuest;

struct Layouts {
    tasks: TaskListLayout,
    processes: ProcessLayout,
    files: FilesLayout,
}

fn main() -> Result<(), Box<dyn Error>> {
    let guest = SavedGuest::of_arguments()?;
    let (btf, symbols) = (&guest.types, &guest.kernel.symbols);
    let layouts = Layouts {
        tasks: TaskListLayout::new(btf, symbols)?,
        processes: ProcessLayout::new(btf)?,
        files: FilesLayout::new(btf)?,
    };
    let start = Instant::now();
    let paused = PausedMemory::new(&guest.core);
    let view = paused.view(guest.kernel.space);
    let tasks = layouts.tasks.all_threads(view);
    eprintln!("{} threads in {:?}", tasks.items.len(), start.elapsed());
    let init = layouts.tasks.process(view, 1)?;
    let root = match init {
        Some(init) => layouts.processes.root(view, init.address)?,
        None => None,
    };
    for task in &tasks.items {
        print_task(&layouts, view, task, root);
    }
    eprintln!("everything in {:?}", start.elapsed());
    tasks.error.map_or(Ok(()), |error| Err(error.into()))
}

fn print_task(layouts: &Layouts, view: MemoryView<'_>, task: &TaskInfo, root: Option<PathRef>) {
    let name = layouts.tasks.full_name(view, task);
    println!(
        "{} ({}) {} {} {} {} flags {} prio {} nice {} threads {} start {} cpu {} on_cpu {:?} tgid {}",
        task.pid,
        shown(name.map(|name| lossy(&name))),
        task.state.letter(),
        task.parent,
        task.process_group,
        task.session,
        task.flags,
        task.priority,
        task.nice,
        task.threads,
        task.start_ticks(),
        task.cpu,
        task.on_cpu,
        task.tgid,
    );
    let (processes, paths) = (&layouts.processes, layouts.processes.paths());
    let path_text = |path| {
        paths
            .text(view, path, root)
            .map(|path| lossy(&path.printed()))
    };
    if let Some(mm) = task.mm {
        for (what, text) in [
            ("cmdline", processes.command_line(view, mm, 1 << 16)),
            ("environ", processes.environment(view, mm, 1 << 16)),
        ] {
            match text {
                Ok(text) => {
                    let list: Vec<String> = text.strings().map(lossy).collect();
                    let missing = text.missing.map(|error| format!(" ({error})"));
                    println!("  {what} {list:?}{}", missing.unwrap_or_default());
                }
                Err(error) => println!("  {what}: {error}"),
            }
        }
        match processes.executable(view, mm) {
            Ok(Some(file)) => match paths.opened_at(view, file) {
                Ok(Some(path)) => println!("  exe {}", shown(path_text(path))),
                other => println!("  exe {other:?}"),
            },
            other => println!("  exe {other:?}"),
        }
    }
    for (what, path) in [
        ("cwd", processes.working_directory(view, task.address)),
        ("root", processes.root(view, task.address)),
    ] {
        match path {
            Ok(Some(path)) => println!("  {what} {}", shown(path_text(path))),
            other => println!("  {what} {other:?}"),
        }
    }
    let files = layouts.files.open_files(view, task.address);
    for open in &files.items {
        let path = match paths.opened_at(view, open.file.address) {
            Ok(Some(path)) => shown(path_text(path)),
            other => format!("{other:?}"),
        };
        let (file, inode) = (open.file, open.file.inode);
        println!(
            "  fd {} {path} flags {:o} pos {} ino {} mode {:o} dev {:?} size {}{}",
            open.number,
            file.flags,
            file.position,
            inode.identity.inode,
            inode.mode,
            (inode.identity.major, inode.identity.minor),
            inode.size,
            if open.close_on_exec { " cloexec" } else { "" },
        );
    }
    if let Some(error) = files.error {
        println!("  files: {error}");
    }
}

fn lossy(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn shown<E: Display>(text: Result<String, E>) -> String {
    text.unwrap_or_else(|error| format!("<{error}>"))
}

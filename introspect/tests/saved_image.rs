//! Compares the readers with a guest's own `/proc`, on a saved memory image of the small kernel
//! with many processes.
//!
//! `images/small-6.1.core.xz` is its memory, as far as it is read here, and its CPU.
//! `small-6.1.btf.xz` has its types, and `small-6.1.expect` the texts of `/proc` in the guest just
//! before it was paused. `examples/shrink-core.rs` makes them anew. The differences between the two
//! moments, [`GONE`] and [`CHANGED`], must then be updated as well.
#![allow(clippy::unwrap_used)]

mod answers;
mod images;

use std::collections::{BTreeMap, BTreeSet};

use answers::{Guest, UNREAD};
use introspect::PausedMemory;
use introspect::kernel::running::RunningKernel;
use introspect::system::System;
use introspect::user::symfs::Symfs;

type Texts = BTreeMap<String, String>;

/// The processes that ended between the two moments. They are an idle thread of a workqueue, and
/// those that printed `/proc`: `head` twice and `ls`.
const GONE: [&str; 4] = ["20", "60", "61", "63"];

/// The changes between the two moments: the file, and in a `stat` the number of the field
/// (proc(5)).
///
/// Process 21 is the shell, which waited for the printing of `/proc` and runs now. It has just been
/// switched to, so its CPU is on the stack of one task and names the other. Thread 41 naps a
/// thousand times a second. Thread 5 is a workqueue's, whose name shows its last work.
const CHANGED: [(&str, usize); 6] = [
    ("21/stat", 3),
    ("21/task/21/stack", 0),
    ("21/task/21/stat", 3),
    ("35/task/41/stack", 0),
    ("5/stat", 2),
    ("5/task/5/stat", 2),
];

fn answered() -> Texts {
    let (core, types) = (images::core(), images::types());
    let guest = Guest::find(&core, core.cpus(), &types).unwrap();
    guest.answers(&core).unwrap()
}

/// Returns the guest's texts.
fn expected() -> Texts {
    let text = format!("\n{}", include_str!("images/small-6.1.expect"));
    let parts = text.split("\n==> ").skip(1);
    let parts = parts.map(|part| part.split_once(" <==\n").unwrap());
    parts
        .map(|(path, text)| (path.to_owned(), text.trim_end_matches('\n').to_owned()))
        .collect()
}

fn process(path: &str) -> &str {
    path.split('/').next().unwrap()
}

/// Splits the fields of a `stat`. A name may contain blanks.
fn fields(stat: &str) -> Vec<&str> {
    let (pid, rest) = stat.trim_end().split_once(" (").unwrap();
    let (name, rest) = rest.rsplit_once(") ").unwrap();
    [pid, name].into_iter().chain(rest.split(' ')).collect()
}

/// The number of items of each kind that were compared.
#[derive(Debug, Default, PartialEq, Eq)]
struct Compared {
    processes: usize,
    threads: usize,
    stat_fields: usize,
    maps_lines: usize,
    stack_lines: usize,
    strings: usize,
    links: usize,
}

#[test]
fn every_process_is_as_the_guest_says() {
    let (answered, expected) = (answered(), expected());
    let pids = |texts: &Texts| -> BTreeSet<String> {
        texts.keys().map(|path| process(path).to_owned()).collect()
    };
    let gone: Vec<String> = pids(&expected)
        .difference(&pids(&answered))
        .cloned()
        .collect();
    assert_eq!(gone, GONE);

    let paths = |texts: &Texts| -> BTreeSet<String> {
        let there = |path: &&String| !path.ends_with("/user") && !GONE.contains(&process(path));
        texts.keys().filter(there).cloned().collect()
    };
    assert_eq!(paths(&answered), paths(&expected), "the same files");

    let mut compared = Compared {
        processes: pids(&answered).len(),
        ..Compared::default()
    };
    let mut changed = Vec::new();
    for path in paths(&answered) {
        let (found, wanted) = (&answered[&path], &expected[&path]);
        let (folders, file) = path.rsplit_once('/').unwrap();
        if file == "stat" {
            compared.threads += usize::from(folders.contains("task"));
            let (found, wanted) = (fields(found), fields(wanted));
            assert_eq!(found.len(), wanted.len(), "{path}");
            for (index, (found, wanted)) in found.into_iter().zip(wanted).enumerate() {
                if found == UNREAD {
                    continue;
                }
                compared.stat_fields += 1;
                if found != wanted {
                    changed.push((path.clone(), index + 1));
                }
            }
            continue;
        }
        let lines = wanted.lines().count();
        match file {
            "maps" => compared.maps_lines += lines,
            "stack" => compared.stack_lines += lines,
            "cmdline" | "environ" => compared.strings += wanted.matches("\\0").count(),
            _ => compared.links += lines,
        }
        if found.trim_end_matches('\n') != wanted {
            changed.push((path.clone(), 0));
        }
    }
    let changed: Vec<(&str, usize)> = changed.iter().map(|(p, f)| (p.as_str(), *f)).collect();
    assert_eq!(changed, CHANGED);
    let all = Compared {
        processes: 40,
        threads: 45,
        stat_fields: 1275,
        maps_lines: 237,
        stack_lines: 219,
        strings: 183,
        links: 172,
    };
    assert_eq!(compared, all);
}

/// Compares more than the four threads of `workers 4 20`, which are 20 calls deep, and the one of
/// `workers 1 3`. It includes the functions that they wait in, and the C library, whose inner
/// functions have no symbols.
#[test]
fn threads_of_a_dynamically_linked_program_have_whole_stacks() {
    const LIBC: &str = "/lib/x86_64-linux-gnu/libc.so.6";
    const WORKERS: &str = "/bin/workers";
    let answered = answered();
    let main = [
        ("?", LIBC),
        ("?", LIBC),
        ("main", WORKERS),
        ("?", LIBC),
        ("__libc_start_main", LIBC),
        ("_start", WORKERS),
    ];
    let worker = |inner: &[&'static str], depth: usize| -> Vec<(&str, &str)> {
        let inner = inner.iter().map(|name| (*name, LIBC));
        let calls = std::iter::repeat_n(("descend", WORKERS), depth);
        inner
            .chain([("wait_forever", WORKERS)])
            .chain(calls)
            .chain([("worker", WORKERS), ("?", LIBC), ("?", LIBC)])
            .collect()
    };
    let sleep = ["clock_nanosleep", "nanosleep", "sleep"];
    let nap = ["clock_nanosleep", "nanosleep", "usleep"];
    for (thread, frames) in [
        ("35/task/35", main.to_vec()),
        ("35/task/38", worker(&sleep, 20)),
        ("35/task/39", worker(&["read"], 20)),
        ("35/task/40", worker(&["?", "pthread_cond_wait"], 20)),
        ("35/task/41", worker(&nap, 20)),
        ("43/task/43", main.to_vec()),
        ("43/task/46", worker(&sleep, 3)),
    ] {
        let lines: String = frames
            .iter()
            .map(|(name, object)| format!("{name} {object}\n"))
            .collect();
        let found = &answered[&format!("{thread}/user")];
        assert_eq!(*found, lines + "-- outermost frame\n", "{thread}");
    }
}

#[test]
fn stacks_without_unwind_information_say_what_is_guessed() {
    let answered = answered();
    // The first process is a program without a C library, and without unwind information for its
    // first function.
    assert_eq!(
        answered["1/task/1/user"],
        "program /init\n_start /init (a guess)\n-- outermost frame\n"
    );
    // A statically linked, stripped busybox.
    let busybox = &answered["24/task/24/user"];
    assert!(
        busybox.starts_with("? /bin/busybox\n") && busybox.contains("-- no unwind information for"),
        "{busybox}"
    );
}

#[test]
fn the_kernel_is_found_in_the_image() {
    let core = images::core();
    let (paused, cpu) = (PausedMemory::new(&core), &core.cpus()[0]);
    let kernel = RunningKernel::find(paused.view(cpu.address_space()), cpu, 0).unwrap();
    let banner = kernel.banner.unwrap();
    assert!(banner.starts_with("Linux version 6.1."), "{banner}");
    assert_eq!(kernel.build_id.map(|id| id.as_bytes().len()), Some(20));
    assert!(
        kernel.types.is_err(),
        "the types are in the kernel's file only"
    );
    assert_eq!(
        kernel.symbols.address_of("_text"),
        Some(0xffff_ffff_8020_0000)
    );
}

#[test]
fn copies_on_the_host_that_are_other_versions_are_told() {
    let (core, types) = (images::core(), images::types());
    let guest = Guest::find(&core, core.cpus(), &types).unwrap();
    let paused = PausedMemory::new(&core);
    let system = System::new(&guest.kernel, &paused);
    let look = system.look(&paused, core.cpus());
    let workers = look.process(35).unwrap().unwrap().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let symfs = Symfs::new(folder.path());
    let told = || look.objects(&workers, Some(&symfs)).unwrap().incomplete;
    assert_eq!(told(), [""; 0], "a folder need not have every file");
    let copy = folder.path().join("bin/workers");
    std::fs::create_dir(folder.path().join("bin")).unwrap();
    std::fs::copy(std::env::current_exe().unwrap(), &copy).unwrap();
    let told = told();
    let [told] = told.as_slice() else {
        panic!("{told:?}")
    };
    assert!(
        told.starts_with(copy.to_str().unwrap()) && told.contains(": another version, not used: "),
        "{told}"
    );
}

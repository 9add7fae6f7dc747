#![allow(clippy::unwrap_used)]
use std::fs::{self, File, OpenOptions};
use std::io::{Read, Seek, Write};
use std::os::unix::fs::{FileExt, PermissionsExt};

use super::*;
use crate::server::ports::server::{FRAMED, Server};
use crate::server::ports::toy::{self, LINES, REFUSED, Toy, lines, record, until};

struct World {
    toy: Toy,
    server: Option<Server>,
    mounted: Option<Mounted>,
    place: tempfile::TempDir,
    _sockets: tempfile::TempDir,
}

impl Drop for World {
    fn drop(&mut self) {
        // For a test that has failed.
        self.toy.tracectl.gate.open();
        // Before the folder is removed.
        drop(self.mounted.take());
    }
}

impl World {
    /// Returns `None` if this host is declared to have no FUSE.
    fn new() -> Option<Self> {
        if std::env::var_os("EXOTRACE_NO_FUSE").is_some() {
            return None;
        }
        let hint = "set EXOTRACE_NO_FUSE=1 to leave these tests out";
        assert!(Path::new(DEVICE).exists(), "no {DEVICE}; {hint}");
        let place = tempfile::tempdir().unwrap();
        let toy::World {
            folder: sockets,
            toy,
            server,
        } = toy::World::new();
        let machine = Sockets {
            name: "toy".into(),
            ports: sockets.path().join(FRAMED),
            dt: sockets.path().join("dt"),
        };
        let mounted = Mounted::start(place.path(), machine);
        let mounted = mounted.unwrap_or_else(|error| panic!("{error}; {hint}"));
        Some(Self {
            toy,
            server,
            mounted: Some(mounted),
            place,
            _sockets: sockets,
        })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.place.path().join(name)
    }

    /// Reads as cat(1) does. fs::read begins with 32 bytes if a file claims to be empty, which is
    /// too little for a line.
    fn read(&self, name: &str) -> Vec<u8> {
        let file = File::open(self.path(name));
        let mut file = file.unwrap_or_else(|error| panic!("{name}: {error}"));
        let (mut all, mut part) = (Vec::new(), vec![0; 1 << 16]);
        loop {
            match file.read(&mut part).unwrap() {
                0 => return all,
                read => all.extend(&part[..read]),
            }
        }
    }

    /// Runs a shell command in the folder and returns its success, output and errors.
    fn shell(&self, command: &str) -> (bool, String, String) {
        let mut shell = Command::new("sh");
        shell.args(["-c", command]).current_dir(self.place.path());
        let output = shell.output().unwrap();
        let [out, err] =
            [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap());
        (output.status.success(), out, err)
    }
}

macro_rules! world {
    () => {
        match World::new() {
            Some(world) => world,
            None => return,
        }
    };
}

fn errno<T>(result: io::Result<T>) -> i32 {
    result
        .err()
        .and_then(|error| error.raw_os_error())
        .unwrap_or(0)
}

#[test]
fn a_shell_gives_commands_and_reads_events() {
    let world = world!();
    world.toy.push_lines(0..3);
    let script = "echo trace a b new c > tracectl && echo start >tracectl && echo stop > tracectl && cat trace && cat trace";
    let (done, out, err) = world.shell(script);
    assert!(done, "{err}");
    assert_eq!(out.as_bytes(), lines(0..3));
    assert_eq!(
        world.toy.tracectl.commands(),
        ["trace a b new c", "start", "stop"]
    );
    let (done, out, _) = world.shell("printf 'a\\n\\nb' > ptracectl; tail -n +2 ptracectl");
    assert!(done);
    assert_eq!(out, "a\n\nb\n");
    let (_, out, _) = world.shell("ls -l | sed 's/ .* / /;1d'");
    let files = "-rw-rw---- dt\n-r--r----- ptrace\n-rw-rw-r-- ptracectl\n-r--r--r-- stat\n-r--r----- trace\n-rw-rw-r-- tracectl\n";
    assert_eq!(out, files);
}

#[test]
fn a_refused_command_is_an_error_of_the_write_and_its_text_is_in_stat() {
    let world = world!();
    for (command, _, number) in REFUSED {
        let written = fs::write(world.path("tracectl"), format!("{command}\n"));
        assert_eq!(errno(written), number, "{command}");
        let stat = String::from_utf8(world.read("stat")).unwrap();
        let told = format!("last error: tracectl: toy: {command} is refused\n");
        assert!(stat.ends_with(&told), "{stat}");
    }
    let several = fs::write(world.path("tracectl"), "first\nbad\nlast\n");
    assert_eq!(errno(several), 22);
    assert_eq!(world.toy.tracectl.commands(), ["first"]);
    let long = fs::write(world.path("tracectl"), vec![b'a'; 4097]);
    assert_eq!(errno(long), 22);
    let (done, ..) = world.shell("echo bad > tracectl");
    assert!(!done);
}

#[test]
fn the_folder_stays_as_it_is() {
    let world = world!();
    let path = |name| world.path(name);
    let eperm = 1;
    assert_eq!(errno(fs::write(path("new"), "a")), eperm);
    assert_eq!(errno(fs::create_dir(path("new"))), eperm);
    assert_eq!(errno(fs::remove_file(path("trace"))), eperm);
    assert_eq!(errno(fs::rename(path("trace"), path("t"))), eperm);
    let mode = fs::Permissions::from_mode(0o777);
    assert_eq!(errno(fs::set_permissions(path("trace"), mode)), eperm);
    assert_eq!(errno(File::open(path("none"))), 2);
    for name in ["trace", "stat"] {
        let open = OpenOptions::new().write(true).open(path(name));
        assert_eq!(errno(open), 13, "{name}");
    }
    assert_eq!(errno(File::open(path("dt"))), 19, "no such socket here");
}

#[test]
fn reads_give_whole_records_and_consume_and_text_is_read_by_offset() {
    let world = world!();
    world.toy.push_lines(0..4);
    let mut file = File::open(world.path("trace")).unwrap();
    let mut buffer = [0; 300];
    for expected in [lines(0..2), lines(2..4), Vec::new()] {
        let read = file.read(&mut buffer).unwrap();
        assert_eq!(buffer[..read], expected);
    }
    // Offsets have no effect.
    world.toy.push_lines(4..6);
    file.rewind().unwrap();
    assert_eq!(file.read_at(&mut buffer[..121], 1 << 40).unwrap(), 121);
    let mut other = File::open(world.path("trace")).unwrap();
    assert_eq!(
        other.read(&mut buffer[..120]).unwrap(),
        0,
        "less than a record"
    );
    assert_eq!(other.read(&mut buffer).unwrap(), 121);
    world.toy.push_records(0..1);
    let single = File::open(world.path("ptrace")).unwrap();
    assert_eq!(errno(File::open(world.path("ptrace"))), 16);
    drop(single);
    until("that the reader closes", || world.toy.ptrace.readers() == 0);
    assert_eq!(world.read("ptrace"), record(0));

    fs::write(world.path("tracectl"), "a\nb\n").unwrap();
    let text = File::open(world.path("tracectl")).unwrap();
    assert_eq!(text.read_at(&mut buffer[..9], 0).unwrap(), 9);
    fs::write(world.path("tracectl"), "c").unwrap();
    let read = text.read_at(&mut buffer, 9).unwrap();
    assert_eq!(&buffer[..read], b" 2\na\nb\n", "as at the beginning");
    assert_eq!(world.read("tracectl"), b"#commands 3\na\nb\nc\n");
}

#[test]
fn nobody_waits_for_somebody_else() {
    let world = world!();
    let mut slow: Vec<_> = (0..6)
        .map(|_| {
            let path = world.path("tracectl");
            std::thread::spawn(move || fs::write(path, "slow\n"))
        })
        .collect();
    let gate = &world.toy.tracectl.gate;
    // The kernel passes one write to a file at a time.
    until("a slow command", || gate.come() > 0);
    for number in 0..10 {
        world.toy.push_lines(number..number + 1);
        assert_eq!(world.read("trace"), lines(number..number + 1));
    }
    fs::write(world.path("ptracectl"), "quick").unwrap();
    assert!(slow.iter().all(|writer| !writer.is_finished()));
    gate.open();
    for writer in slow.drain(..) {
        writer.join().unwrap().unwrap();
    }
}

#[test]
fn readers_that_go_or_are_killed_leave_nothing_open() {
    let world = world!();
    let loops = "while cat trace; do :; done > /dev/null";
    let mut readers: Vec<_> = (0..3)
        .map(|_| {
            let mut shell = Command::new("sh");
            shell.args(["-c", &format!("exec 3< trace; {loops}")]);
            shell.current_dir(world.place.path()).spawn().unwrap()
        })
        .collect();
    until("readers", || world.toy.trace.readers() >= 3);
    for batch in 0..20 {
        world.toy.push_lines(batch..batch + LINES as u64 / 2);
    }
    for reader in &mut readers {
        reader.kill().unwrap();
        reader.wait().unwrap();
    }
    until("that readers close", || world.toy.trace.readers() == 0);
}

#[test]
fn unmounting_ends_what_is_open() {
    let mut world = world!();
    let mut file = File::open(world.path("trace")).unwrap();
    let writer = {
        let path = world.path("tracectl");
        std::thread::spawn(move || fs::write(path, "slow"))
    };
    let gate = &world.toy.tracectl.gate;
    until("the command", || gate.come() == 1);
    // The open file is not waited for.
    drop(world.mounted.take());
    file.read(&mut [0; 200]).unwrap_err();
    assert!(writer.join().unwrap().is_err());
    gate.open();
    assert_eq!(fs::read_dir(world.place.path()).unwrap().count(), 0);
    until("that the reader closes", || world.toy.trace.readers() == 0);
}

#[test]
fn umount_ends_it_and_the_end_of_the_machine_is_an_error() {
    let mut world = world!();
    let mut file = File::open(world.path("trace")).unwrap();
    let mut control = OpenOptions::new()
        .write(true)
        .open(world.path("tracectl"))
        .unwrap();
    drop(world.server.take());
    assert_eq!(errno(file.read(&mut [0; 200])), 19);
    assert_eq!(errno(control.write(b"start")), 19);
    assert_eq!(errno(File::open(world.path("stat"))), 19);
    drop((file, control));
    let (done, _, err) = world.shell("cd /; umount \"$OLDPWD\"");
    assert!(done, "{err}");
    let mounted = world.mounted.take().unwrap();
    until("the end", || mounted.has_ended());
}

#[test]
fn only_an_empty_folder_is_mounted_on() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("file"), "").unwrap();
    let machine = || Sockets {
        name: "toy".into(),
        ports: PathBuf::new(),
        dt: PathBuf::new(),
    };
    for (place, expected) in [
        (folder.path().to_path_buf(), "not empty"),
        (folder.path().join("file"), "Not a directory"),
        (folder.path().join("none"), "No such file"),
    ] {
        let refused = Mounted::start(&place, machine()).err().unwrap().to_string();
        assert!(refused.contains(expected), "{refused}");
    }
}

//! Snapshots: a machine restored from one goes on where it was saved, and a folder that is not a whole snapshot is
//! refused with the reason.
#![allow(clippy::unwrap_used)]

mod support;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::Duration;

use support::{Captured, Guest, Host, micro, micro_on};
use vmm::snapshot::{KernelReference, RestoreError, SaveError, SnapshotInfo, restore, save};
use vmm::trap::INT3;

fn info() -> SnapshotInfo {
    SnapshotInfo {
        command_line: "micro".into(),
        kernel: Some(KernelReference::new(Path::new("/none"), b"elf")),
    }
}

/// Runs `command_line` for `run`, saves it to `folder`, and gives the guest that was saved, running again.
fn saved(host: &Host, command_line: &str, cpus: u8, run: Duration, folder: &Path) -> Guest {
    /// On a busy host, the guest may be done before this thread's turn.
    const TRIES: usize = 20;
    for _ in 0..TRIES {
        let mut guest = micro_on(host, command_line, cpus);
        guest.machine.start();
        guest.wait_for("\n");
        std::thread::sleep(run);
        let paused = guest.machine.pause();
        if guest.serial.text().contains("count") {
            continue;
        }
        save(&host.kvm, &guest.machine, &paused, &info(), folder).unwrap();
        drop(paused);
        return guest;
    }
    panic!("{command_line}: done before it could be saved, {TRIES} times");
}

fn restored(host: &Host, folder: &Path) -> Guest {
    let serial = Captured::default();
    let restored = restore(&host.kvm, &host.profile, folder, serial.output());
    let restored = restored.unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(restored.command_line, "micro");
    assert_eq!(restored.kernel, info().kernel);
    Guest::restored(restored.machine, serial)
}

fn checksum(path: &Path) -> u32 {
    crc32fast::hash(&fs::read(path).unwrap())
}

#[test]
fn two_machines_go_on_from_one_snapshot_and_leave_it_as_it_is() {
    let host = host!();
    let cases = [
        ("calls 25000", 1, 25_000),
        ("syscalls 3000", 1, 3000),
        ("usercalls 60000000", 1, 60_000_000),
        ("tick 20", 1, 20),
        ("smp 10000 2", 2, 20_000),
        ("fault 2500", 1, 2500),
    ];
    for (command_line, cpus, count) in cases {
        let folder = tempfile::tempdir().unwrap();
        let snapshot = folder.path().join("snapshot");
        let first = saved(
            host,
            command_line,
            cpus,
            Duration::from_millis(30),
            &snapshot,
        );
        let memory = checksum(&snapshot.join("memory"));
        let mut copies = [restored(host, &snapshot), restored(host, &snapshot)];
        for copy in &mut copies {
            copy.machine.start();
        }
        assert_eq!(
            first.count(),
            count,
            "{command_line}: the machine that was saved goes on"
        );
        for copy in &copies {
            assert_eq!(copy.count(), count, "{command_line}: {}", copy.situation());
            assert!(
                !copy.serial.text().contains(command_line),
                "{command_line}: started anew"
            );
        }
        assert_eq!(checksum(&snapshot.join("memory")), memory, "{command_line}");
    }
}

#[test]
fn a_snapshot_of_a_restored_machine_is_as_good() {
    let host = host!();
    let folder = tempfile::tempdir().unwrap();
    let [one, two] = ["one", "two"].map(|n| folder.path().join(n));
    drop(saved(
        host,
        "calls 300000",
        1,
        Duration::from_millis(10),
        &one,
    ));
    let mut second = restored(host, &one);
    second.machine.start();
    std::thread::sleep(Duration::from_millis(10));
    let paused = second.machine.pause();
    save(&host.kvm, &second.machine, &paused, &info(), &two).unwrap();
    drop((paused, second));
    let mut third = restored(host, &two);
    third.machine.start();
    assert_eq!(third.count(), 300_000);
}

#[test]
fn traps_are_not_part_of_a_snapshot_and_stay_in_the_machine() {
    let host = host!();
    let folder = tempfile::tempdir().unwrap();
    let snapshot = folder.path().join("snapshot");
    let mut guest = micro(host, "calls 40000");
    let text = guest.text();
    let leaf = guest.symbol("micro_leaf");
    let site = guest.arm_kernel(leaf);
    guest.machine.start();
    guest.wait_until("hit", || guest.machine.stats().traps > 10);
    let paused = guest.machine.pause();
    let before = guest.machine.stats().traps;
    save(&host.kvm, &guest.machine, &paused, &info(), &snapshot).unwrap();
    assert_eq!(
        guest
            .machine
            .ram()
            .read_byte(introspect::Gpa(leaf.0))
            .unwrap(),
        INT3
    );
    drop(paused);
    let mut copy = restored(host, &snapshot);
    assert!(copy.text() == text, "an int3 was saved");
    copy.machine.start();
    assert_eq!(copy.count(), 40_000, "{}", copy.situation());
    assert_eq!(copy.machine.stats().traps, 0);
    assert_eq!(guest.count(), 40_000);
    assert!(before < 40_000);
    assert_eq!(guest.machine.traps().hits(), [(site, 40_000, 0)]);
}

#[test]
fn traps_work_in_a_restored_machine() {
    let host = host!();
    let folder = tempfile::tempdir().unwrap();
    let snapshot = folder.path().join("snapshot");
    let (guest, paused) = support::paused_before_program(host, "usercalls 200", 1);
    save(&host.kvm, &guest.machine, &paused, &info(), &snapshot).unwrap();
    let mut copy = restored(host, &snapshot);
    let user = copy.arm_user(copy.symbol("micro_user_leaf"));
    let recorder = copy.record();
    copy.machine.start();
    assert_eq!(copy.count(), 200, "{}", copy.situation());
    assert_eq!(recorder.rdi(), (0..200).collect::<Vec<_>>());
    assert!(copy.machine.disarm(user));
}

#[test]
fn the_files_are_their_owners_alone() {
    let host = host!();
    let folder = tempfile::tempdir().unwrap();
    let snapshot = folder.path().join("deep/snapshot");
    drop(saved(host, "calls 60000", 1, Duration::ZERO, &snapshot));
    for file in ["memory", "state"] {
        let mode = fs::metadata(snapshot.join(file))
            .unwrap()
            .permissions()
            .mode();
        assert_eq!(mode & 0o777, 0o600, "{file} holds what the guest knows");
    }
    let mut names: Vec<_> = fs::read_dir(&snapshot)
        .unwrap()
        .map(|e| e.unwrap().file_name())
        .collect();
    names.sort();
    assert_eq!(names, ["memory", "state"]);
}

/// Something done to the files of a whole snapshot.
type Damage = fn(&Path);

#[test]
fn a_damaged_snapshot_is_refused_with_the_reason() {
    let host = host!();
    let folder = tempfile::tempdir().unwrap();
    let snapshot = folder.path().join("snapshot");
    drop(saved(host, "calls 60000", 1, Duration::ZERO, &snapshot));
    let cases: [(&str, Damage, &[&str]); 8] = [
        (
            "cut off",
            |p| resize(&p.join("state"), -1),
            &["state", "damaged", "were written"],
        ),
        (
            "empty",
            |p| fs::write(p.join("state"), b"").unwrap(),
            &["not a snapshot"],
        ),
        (
            "a flipped bit",
            |p| flip(&p.join("state"), 100),
            &["state", "checksum"],
        ),
        (
            "another version",
            |p| flip(&p.join("state"), 8),
            &["format", "anew"],
        ),
        (
            "something else",
            |p| flip(&p.join("state"), 0),
            &["not a snapshot", "name the folder"],
        ),
        (
            "no state",
            |p| fs::remove_file(p.join("state")).unwrap(),
            &["state", "No such file", "name the folder"],
        ),
        (
            "no memory",
            |p| fs::remove_file(p.join("memory")).unwrap(),
            &["memory", "No such file"],
        ),
        (
            "short memory",
            |p| resize(&p.join("memory"), -4096),
            &["memory", "4190208", "4194304"],
        ),
    ];
    for (name, damage, words) in cases {
        let broken = folder.path().join("broken");
        fs::create_dir(&broken).unwrap();
        for file in ["state", "memory"] {
            fs::copy(snapshot.join(file), broken.join(file)).unwrap();
        }
        damage(&broken);
        let result = restore(
            &host.kvm,
            &host.profile,
            &broken,
            Captured::default().output(),
        );
        let error = result
            .err()
            .unwrap_or_else(|| panic!("{name}: restored"))
            .to_string();
        for word in words {
            assert!(
                error.contains(word),
                "{name}: {error:?} does not say {word:?}"
            );
        }
        fs::remove_dir_all(&broken).unwrap();
    }
    assert!(
        restore(
            &host.kvm,
            &host.profile,
            &snapshot,
            Captured::default().output()
        )
        .is_ok()
    );
}

fn flip(path: &Path, at: usize) {
    let mut bytes = fs::read(path).unwrap();
    bytes[at] ^= 0x10;
    fs::write(path, bytes).unwrap();
}

fn resize(path: &Path, by: i64) {
    let file = fs::OpenOptions::new().write(true).open(path).unwrap();
    let length = file.metadata().unwrap().len();
    file.set_len(length.saturating_add_signed(by)).unwrap();
}

#[test]
fn a_snapshot_of_another_kind_of_host_is_refused() {
    let host = host!();
    let folder = tempfile::tempdir().unwrap();
    let snapshot = folder.path().join("snapshot");
    drop(saved(host, "calls 60000", 1, Duration::ZERO, &snapshot));
    let mut other = host.profile.clone();
    other.kernel_mode = match other.kernel_mode {
        vmm::host::KernelMode::Native => vmm::host::KernelMode::Interpreted,
        vmm::host::KernelMode::Interpreted => vmm::host::KernelMode::Native,
    };
    let result = restore(&host.kvm, &other, &snapshot, Captured::default().output());
    let error = result.err().unwrap();
    assert!(matches!(error, RestoreError::HostKind { .. }), "{error}");
    assert!(error.to_string().contains("anew"), "{error}");
}

#[test]
fn a_save_that_fails_leaves_nothing_behind() {
    let host = host!();
    let folder = tempfile::tempdir().unwrap();
    let guest = micro(host, "calls 1");
    let paused = guest.machine.pause();
    let taken = folder.path().join("taken");
    fs::create_dir(&taken).unwrap();
    let error = save(&host.kvm, &guest.machine, &paused, &info(), &taken).unwrap_err();
    assert!(matches!(error, SaveError::Exists { .. }), "{error}");
    assert!(error.to_string().contains("taken"), "{error}");
    assert_eq!(fs::read_dir(&taken).unwrap().count(), 0);

    let file = folder.path().join("file");
    fs::write(&file, b"x").unwrap();
    let below = file.join("snapshot");
    let error = save(&host.kvm, &guest.machine, &paused, &info(), &below)
        .unwrap_err()
        .to_string();
    assert!(error.contains("file/snapshot"), "{error}");
    let mut names: Vec<_> = fs::read_dir(folder.path())
        .unwrap()
        .map(|e| e.unwrap().file_name())
        .collect();
    names.sort();
    assert_eq!(names, ["file", "taken"], "nothing else is left");
}

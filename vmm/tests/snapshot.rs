//! Snapshots: a machine restored from one continues where it was saved. A folder that is not a
//! whole snapshot is refused with the reason.
#![allow(clippy::unwrap_used)]

mod support;

use std::fs;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use iced_x86::Instruction;
use introspect::{Gpa, Gva, PhysicalMemory};

use kvm_bindings::kvm_regs;
use support::{Captured, Guest, Host, micro, micro_on, running};
use vm_memory::{Bytes, GuestAddress};
use vmm::machine::Paused;
use vmm::snapshot::{
    FolderError, KernelReference, NewFolder, RestoreError, RestoredDisks, SaveError, SavedMemory,
    SnapshotInfo, Stage, restore, save,
};
use vmm::trap::{INT3, Trap};
use vmm::{StoppedVcpu, TrapSink};

/// The disks of these machines: none has any.
const NO_DISKS: RestoredDisks = RestoredDisks::Named(Vec::new());

fn info() -> SnapshotInfo {
    SnapshotInfo {
        command_line: "micro".into(),
        kernel: Some(KernelReference::new(Path::new("/none"), b"elf")),
    }
}

/// Calls `catch` with ever more rounds until it has caught a guest before its end, on a host of any
/// speed.
///
/// Returns the rounds and the caught value.
fn with_enough_rounds<T>(first: u64, mut catch: impl FnMut(u64) -> Option<T>) -> (u64, T) {
    /// Each try makes the guest run four times as long.
    const TRIES: usize = 12;
    let mut rounds = first;
    for _ in 0..TRIES {
        if let Some(caught) = catch(rounds) {
            return (rounds, caught);
        }
        rounds *= 4;
    }
    panic!("{rounds} rounds: the guest is always through with them before it can be saved");
}

/// Pauses a running guest in the middle of its program, away from `start`. `None` if it is done.
fn midway(guest: &Guest, start: Option<kvm_regs>) -> Option<Paused> {
    loop {
        let paused = guest.machine.pause();
        if guest.serial.text().contains("count")
            || guest.machine.wait(Some(Duration::ZERO)).is_some()
        {
            return None;
        }
        let now = guest.machine.registers(&paused, 0).unwrap().regs;
        if !guest.is_in("micro_print", now.rip) && Some(now) != start {
            return Some(paused);
        }
    }
}

/// Saves the guest of `program ROUNDS more` to `folder` in the middle of its work.
///
/// Returns the rounds, `first` or as many as that needs, and the guest, running again.
fn saved(host: &Host, program: &str, first: u64, cpus: u8, folder: &Path) -> (u64, Guest) {
    with_enough_rounds(first, |rounds| {
        let mut guest = micro_on(host, &format!("{program} {rounds} {cpus}"), cpus);
        guest.machine.start();
        guest.wait_for("\n");
        let paused = midway(&guest, None)?;
        save(&host.kvm, &guest.machine, &info(), folder).unwrap();
        drop(paused);
        Some(guest)
    })
}

/// Saves a snapshot of some machine.
fn any_snapshot(host: &Host, folder: &Path) {
    let guest = micro(host, "calls 1");
    save(&host.kvm, &guest.machine, &info(), folder).unwrap();
}

fn restored(host: &Host, folder: &Path) -> Guest {
    let serial = Captured::default();
    let restored = restore(&host.kvm, &host.profile, folder, &NO_DISKS, serial.output());
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
        ("calls", 25_000, 1),
        ("syscalls", 3000, 1),
        ("usercalls", 1_000_000, 1),
        ("tick", 20, 1),
        ("smp", 10_000, 2),
        ("fault", 2500, 1),
    ];
    for (program, first, cpus) in cases {
        let folder = tempfile::tempdir().unwrap();
        let snapshot = folder.path().join("snapshot");
        let (rounds, guest) = saved(host, program, first, cpus, &snapshot);
        let count = rounds * u64::from(cpus);
        let memory = checksum(&snapshot.join("memory"));
        let mut copies = [restored(host, &snapshot), restored(host, &snapshot)];
        for copy in &mut copies {
            copy.machine.start();
        }
        assert_eq!(
            guest.count(),
            count,
            "{program}: the machine that was saved goes on"
        );
        for copy in &copies {
            assert_eq!(copy.count(), count, "{program}: {}", copy.situation());
            assert!(
                !copy.serial.text().contains(program),
                "{program}: started anew"
            );
        }
        assert_eq!(checksum(&snapshot.join("memory")), memory, "{program}");
    }
}

#[test]
fn a_snapshot_of_a_restored_machine_is_as_good() {
    let host = host!();
    let folder = tempfile::tempdir().unwrap();
    let (rounds, two) = with_enough_rounds(20_000, |first| {
        let [one, two] = ["one", "two"].map(|n| folder.path().join(format!("{n} {first}")));
        let (rounds, _) = saved(host, "calls", first, 1, &one);
        let mut second = restored(host, &one);
        let paused = second.machine.pause();
        let start = second.machine.registers(&paused, 0).unwrap().regs;
        drop(paused);
        second.machine.start();
        let _paused = midway(&second, Some(start))?;
        save(&host.kvm, &second.machine, &info(), &two).unwrap();
        Some((rounds, two))
    })
    .1;
    let mut third = restored(host, &two);
    third.machine.start();
    assert_eq!(third.count(), rounds);
}

#[test]
fn traps_are_not_part_of_a_snapshot_and_stay_in_the_machine() {
    let host = host!();
    let folder = tempfile::tempdir().unwrap();
    let snapshot = folder.path().join("snapshot");
    let (rounds, (guest, site, before)) = with_enough_rounds(40_000, |rounds| {
        let mut guest = micro(host, &format!("calls {rounds}"));
        let text = guest.text();
        let leaf = guest.symbol("micro_leaf");
        let site = guest.arm_kernel(leaf);
        guest.machine.start();
        guest.wait_until("hit", || guest.machine.stats().traps > 10);
        let paused = midway(&guest, None)?;
        let before = guest.machine.stats().traps;
        save(&host.kvm, &guest.machine, &info(), &snapshot).unwrap();
        let byte = guest.machine.ram().read_byte(Gpa(leaf.0));
        assert_eq!(byte.unwrap(), INT3);
        drop(paused);
        let copy = restored(host, &snapshot);
        assert!(copy.text() == text, "an int3 was saved");
        Some((guest, site, before))
    });
    let mut copy = restored(host, &snapshot);
    copy.machine.start();
    assert_eq!(copy.count(), rounds, "{}", copy.situation());
    assert_eq!(copy.machine.stats().traps, 0);
    assert_eq!(guest.count(), rounds);
    assert!(before < rounds);
    assert_eq!(guest.machine.traps().hits(), [(site, rounds, 0)]);
}

#[test]
fn traps_work_in_a_restored_machine() {
    let host = host!();
    let folder = tempfile::tempdir().unwrap();
    let snapshot = folder.path().join("snapshot");
    let (guest, _paused) = support::paused_before_program(host, "usercalls 200", 1);
    save(&host.kvm, &guest.machine, &info(), &snapshot).unwrap();
    let mut copy = restored(host, &snapshot);
    let user = copy.arm_user(copy.symbol("micro_user_leaf"));
    let recorder = copy.record();
    copy.machine.start();
    assert_eq!(copy.count(), 200, "{}", copy.situation());
    assert_eq!(recorder.rdi(), (0..200).collect::<Vec<_>>());
    assert!(copy.machine.disarm(user));
}

/// Code that adds to a word of each page of [`WRITTEN`], one after the other, for ever.
mod writer {
    use std::ops::Range;

    /// The address of the code, in memory that the micro guest does not use.
    pub const CODE: u64 = super::support::SPARE;
    /// The pages that it writes.
    pub const WRITTEN: Range<u64> = 0x21_0000..0x3f_0000;
    /// The pages that the sink writes, on the thread of a vCPU.
    pub const HOST_WRITTEN: Range<u64> = 0x20_1000..0x20_f000;
    /// The instruction that gets a trap. It advances to the next page.
    pub const TRAPPED: u64 = CODE + 8;

    /// Returns `start: mov edi, first; next: inc qword [rdi]; add edi, 4096; cmp edi, end; jb next;
    /// jmp start`.
    pub fn code() -> Vec<u8> {
        let [first, end] = [WRITTEN.start, WRITTEN.end].map(|a| (a as u32).to_le_bytes());
        [
            &[0xbf][..],
            &first,
            &[0x48, 0xff, 0x07],
            &[0x81, 0xc7, 0x00, 0x10, 0x00, 0x00],
            &[0x81, 0xff],
            &end,
            &[0x72, 0xef],
            &[0xeb, 0xe8],
        ]
        .concat()
    }
}

/// A sink that writes to one page of [`writer::HOST_WRITTEN`] after the other, by each way that the
/// host has.
#[derive(Default)]
struct HostWriter(AtomicU64);

impl TrapSink for HostWriter {
    fn trap(&self, _: &Trap, cpu: &StoppedVcpu<'_>) {
        let pages = (writer::HOST_WRITTEN.end - writer::HOST_WRITTEN.start) / 4096;
        let hit = self.0.fetch_add(1, Ordering::Relaxed);
        let at = writer::HOST_WRITTEN.start + hit % pages * 4096;
        let (count, ram) = (hit.to_le_bytes(), cpu.ram());
        match hit % 3 {
            0 => ram.write_physical(Gpa(at), &count).unwrap(),
            1 => ram.write_physical(Gpa(at), &[count; 16].concat()).unwrap(),
            _ => ram.map_ref().write_obj(hit, GuestAddress(at)).unwrap(),
        }
    }
}

/// Saves a guest and compares the file with memory as it is in the pause, without traps. Returns
/// that memory.
fn saved_exactly(host: &Host, guest: &Guest, folder: &Path) -> Vec<u8> {
    let machine = &guest.machine;
    let new = NewFolder::create(folder).unwrap();
    let mut memory = vec![0; support::MEMORY as usize];
    let mut watch = |stage| {
        if stage == Stage::Paused {
            machine.traps().read_unpatched(Gpa(0), &mut memory).unwrap();
        }
        ControlFlow::Continue(())
    };
    let files = new.files().unwrap();
    vmm::snapshot::write(&host.kvm, machine, &info(), files, &mut watch).unwrap();
    new.finish().unwrap();
    let file = fs::read(folder.join("memory")).unwrap();
    let different = (0..file.len()).step_by(4096);
    let different: Vec<usize> = different
        .filter(|at| file[*at..at + 4096] != memory[*at..at + 4096])
        .collect();
    assert!(different.is_empty(), "pages {different:x?}");
    assert_eq!(SavedMemory::open(folder).unwrap().verify(|_, _| ()), []);
    memory
}

#[test]
fn a_running_guest_is_saved_as_it_is_in_the_pause() {
    let logging = host!();
    let paused_for_all = Host {
        kvm: vmm::host::open(Path::new("/dev/kvm")).unwrap(),
        profile: {
            let mut profile = logging.profile.clone();
            profile.write_log = false;
            profile
        },
    };
    let cases = [
        (logging, "calls 1", 1),
        (logging, "smp 1 2", 2),
        (&paused_for_all, "calls 1", 1),
    ];
    for (host, program, cpus) in cases {
        let folder = tempfile::tempdir().unwrap();
        let mut guest = micro_on(host, program, cpus);
        guest.write(writer::CODE, &writer::code());
        guest.write_jump(guest.symbol("micro_leaf").0, writer::CODE);
        let site = guest.arm_kernel(Gva(writer::TRAPPED));
        let sink = Some(Box::new(HostWriter::default()) as Box<dyn TrapSink>);
        guest.machine.set_sink(sink);
        guest.machine.start();
        let count = |guest: &Guest, page: u64| {
            let word = guest.machine.ram().read_word(Gpa(page));
            word.unwrap()
        };
        let last = writer::WRITTEN.end - 4096;
        guest.wait_until("a round", || count(&guest, last) > 0);
        let mut before = 0;
        for save in ["one", "two"] {
            let memory = saved_exactly(host, &guest, &folder.path().join(save));
            assert_eq!(memory[writer::TRAPPED as usize], 0x81, "an int3 was saved");
            let now = u64::from_le_bytes(memory[last as usize..][..8].try_into().unwrap());
            assert!(now > before, "{program}: {now} rounds");
            before = now;
            guest.wait_until("another round", || count(&guest, last) > now);
        }
        let mut copy = restored(host, &folder.path().join("two"));
        copy.machine.start();
        copy.wait_until("a round of the copy", || count(&copy, last) > before);
        assert!(guest.machine.disarm(site));
    }
}

/// Tests arming and disarming, which do not wait for a save.
#[test]
fn traps_that_come_and_go_while_memory_is_saved_are_not_in_the_file() {
    const SAVES: usize = 60;
    let host = host!();
    let folder = tempfile::tempdir().unwrap();
    let guest = running(host, "calls 4000000000");
    let space = guest.space();
    // Code that the guest does not reach.
    let places = guest.instructions("micro_print");
    let (traps, is_over) = (guest.machine.traps(), AtomicBool::new(false));
    thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                let arm = |i: &Instruction| traps.arm_kernel(Gva(i.ip()), space).ok();
                let sites: Vec<_> = places.iter().filter_map(arm).collect();
                assert!(!sites.is_empty());
                for site in sites {
                    assert!(traps.disarm(site));
                }
            }
        });
        let _over = Over(&is_over);
        for save in 0..SAVES {
            let place = folder.path().join(save.to_string());
            saved_exactly(host, &guest, &place);
            fs::remove_dir_all(place).unwrap();
        }
    });
}

/// A guard that ends a thread, also if a test has failed.
struct Over<'o>(&'o AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn a_save_that_is_broken_off_leaves_nothing_and_can_be_made_again() {
    let host = host!();
    let folder = tempfile::tempdir().unwrap();
    let snapshot = folder.path().join("snapshot");
    let mut guest = micro(host, "calls 4000000000");
    guest.machine.start();
    for last in [0, 1, 3] {
        let new = NewFolder::create(&snapshot).unwrap();
        let mut calls = 0;
        let mut watch = |_| {
            calls += 1;
            match calls > last {
                true => ControlFlow::Break(()),
                false => ControlFlow::Continue(()),
            }
        };
        let files = new.files().unwrap();
        let broken = vmm::snapshot::write(&host.kvm, &guest.machine, &info(), files, &mut watch);
        assert!(matches!(broken, Err(SaveError::BrokenOff)), "{broken:?}");
        drop(new);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }
    saved_exactly(host, &guest, &snapshot);
}

/// A change to the files of a whole snapshot.
type Damage = fn(&Path);

#[test]
fn a_damaged_snapshot_is_refused_with_the_reason() {
    let host = host!();
    let folder = tempfile::tempdir().unwrap();
    let snapshot = folder.path().join("snapshot");
    any_snapshot(host, &snapshot);
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
            &["state", "SHA-256"],
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
            &NO_DISKS,
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
    restore(
        &host.kvm,
        &host.profile,
        &snapshot,
        &NO_DISKS,
        Captured::default().output(),
    )
    .unwrap();
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
    any_snapshot(host, &snapshot);
    let mut other = host.profile.clone();
    other.kernel_mode = match other.kernel_mode {
        vmm::host::KernelMode::Native => vmm::host::KernelMode::Interpreted,
        vmm::host::KernelMode::Interpreted => vmm::host::KernelMode::Native,
    };
    let result = restore(
        &host.kvm,
        &other,
        &snapshot,
        &NO_DISKS,
        Captured::default().output(),
    );
    let error = result.err().unwrap();
    assert!(matches!(error, RestoreError::HostKind { .. }), "{error}");
    assert!(error.to_string().contains("anew"), "{error}");
}

#[test]
fn a_save_that_fails_leaves_nothing_behind() {
    let host = host!();
    let folder = tempfile::tempdir().unwrap();
    let guest = micro(host, "calls 1");
    let taken = folder.path().join("taken");
    fs::create_dir(&taken).unwrap();
    let error = save(&host.kvm, &guest.machine, &info(), &taken).unwrap_err();
    let exists = matches!(&error, SaveError::Folder(FolderError::Exists { .. }));
    assert!(exists, "{error}");
    assert!(error.to_string().contains("taken"), "{error}");
    assert_eq!(fs::read_dir(&taken).unwrap().count(), 0);

    let file = folder.path().join("file");
    fs::write(&file, b"x").unwrap();
    let below = file.join("snapshot");
    let error = save(&host.kvm, &guest.machine, &info(), &below)
        .unwrap_err()
        .to_string();
    assert!(error.contains("file"), "{error}");
    let mut names: Vec<_> = fs::read_dir(folder.path())
        .unwrap()
        .map(|e| e.unwrap().file_name())
        .collect();
    names.sort();
    assert_eq!(names, ["file", "taken"], "nothing else is left");
}

//! A guest on qcow2 images and under overlays, made and judged by QEMU's `qemu-img` (Debian's
//! package qemu-utils).

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use devices::virtio::blk::{self, ImageOptions};
use support::shell::COMMAND_LIMIT;
use support::{Kernel, Shell, disks, host};
use vmm::machine::{DiskConfig, Overlay};

/// A place in the middle of a sector, and one in another cluster.
const PLACES: [usize; 2] = [300_001, 400_001];

/// Runs `qemu-img`, which must succeed, and returns its output.
fn qemu_img(folder: &Path, words: &str) -> String {
    let run = Command::new("qemu-img")
        .args(words.split_whitespace())
        .current_dir(folder)
        .output();
    let run = run.unwrap_or_else(|e| panic!("qemu-img (apt install qemu-utils): {e}"));
    let output = String::from_utf8_lossy(&run.stdout).into_owned();
    let errors = String::from_utf8_lossy(&run.stderr);
    assert!(run.status.success(), "qemu-img {words}: {output}{errors}");
    output
}

fn read(path: &Path) -> Vec<u8> {
    fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// Returns the whole content of a qcow2 image, as QEMU reads it, after its check.
fn content(folder: &Path, image: &str) -> Vec<u8> {
    qemu_img(folder, &format!("check -q -f qcow2 {image}"));
    qemu_img(folder, &format!("convert -f qcow2 -O raw {image} content"));
    read(&folder.join("content"))
}

fn tell(shell: &Shell, command: &str) -> String {
    let answer = shell.start(command).answer(4 * COMMAND_LIMIT);
    assert_eq!(answer.status, 0, "{command}: {answer:?}");
    answer.output.trim_end().to_owned()
}

#[test]
fn an_image_is_whole_if_its_process_is_killed_between_two_flushes() {
    let place = tempfile::tempdir().unwrap_or_else(|e| panic!("{e}"));
    let folder = place.path();
    // Clusters so small that the disk has several tables.
    qemu_img(
        folder,
        "create -q -f qcow2 -o cluster_size=4096 image.qcow2 8M",
    );
    let image = folder.join("image.qcow2");
    let disk = blk::open(&image, &ImageOptions::default());
    let mut disk = disk.unwrap_or_else(|e| panic!("{e}"));
    let mut expected = vec![0; 8 << 20];
    for (place, byte) in [(0, 1), (3 << 20, 2), (7 << 20, 3)] {
        let data = [byte; 4096];
        expected[place..place + data.len()].copy_from_slice(&data);
        let written = disk.write_at(&data, place as u64);
        written.unwrap_or_else(|e| panic!("{e}"));
    }
    // As SIGKILL leaves it: nothing is written at the end.
    std::mem::forget(disk);
    assert!(
        content(folder, "image.qcow2") == expected,
        "writes are lost"
    );
}

#[test]
fn writes_go_to_qcow2_and_overlays_and_a_snapshot_holds_the_overlays() {
    let host = host!();
    let place = tempfile::tempdir().unwrap_or_else(|e| panic!("{e}"));
    let folder = place.path();
    let pattern: Vec<u8> = (0..disks::SIZE as u32 / 4)
        .flat_map(|word| word.wrapping_mul(0x9e37_79b9).to_le_bytes())
        .collect();
    fs::write(folder.join("raw"), &pattern).unwrap_or_else(|e| panic!("{e}"));
    qemu_img(folder, "convert -c -f raw -O qcow2 raw packed.qcow2");
    qemu_img(
        folder,
        "create -q -f qcow2 -b packed.qcow2 -F qcow2 top.qcow2",
    );
    let disk = |name: &str, overlay| DiskConfig {
        overlay,
        ..DiskConfig::new(folder.join(name), false)
    };
    let kept = Overlay::Kept(folder.join("kept.qcow2"));
    let images = [
        disk("top.qcow2", None),
        disk("raw", Some(kept)),
        disk("raw", Some(Overlay::Temporary)),
    ];
    let shell = disks::guest(host, &images);
    assert_eq!(
        tell(
            &shell,
            "cmp /dev/vda /dev/vdb && cmp /dev/vda /dev/vdc && echo same"
        ),
        "same"
    );
    let mut expected = pattern.clone();
    for (disk, mark) in [("vda", "FIRST"), ("vdb", "SECOND"), ("vdc", "THIRD")] {
        let dd = format!(
            "dd of=/dev/{disk} bs=1 seek={} conv=notrunc,fsync 2> /dev/null",
            PLACES[0]
        );
        tell(&shell, &format!("printf {mark} | {dd}"));
    }
    tell(&shell, "busybox blkdiscard -o 65536 -l 131072 /dev/vda");
    let saved = folder.join("saved");
    shell.save(&saved);
    drop(shell);
    assert!(
        read(&folder.join("raw")) == pattern,
        "an image under an overlay was written"
    );
    let mut marked = |mark: &[u8]| {
        expected.copy_from_slice(&pattern);
        expected[PLACES[0]..][..mark.len()].copy_from_slice(mark);
        expected.clone()
    };
    let [mut first, second, third] = [&b"FIRST"[..], b"SECOND", b"THIRD"].map(&mut marked);
    first[65_536..65_536 + 131_072].fill(0);
    assert!(
        content(folder, "top.qcow2") == first,
        "the qcow2 image differs"
    );
    assert!(
        content(folder, "kept.qcow2") == second,
        "the kept overlay differs"
    );
    assert!(
        content(folder, "saved/overlay0") == second,
        "the saved kept overlay differs"
    );
    assert!(
        content(folder, "saved/overlay1") == third,
        "the saved overlay differs"
    );
    two_restored_guests_have_their_own_disks(folder, &saved, &third);
}

/// Checks that two guests of one snapshot run side by side and do not see each other's writes.
fn two_restored_guests_have_their_own_disks(folder: &Path, saved: &Path, third: &[u8]) {
    let host = host!();
    let named = |name: &str| DiskConfig::new(folder.join(name), false);
    let first = DiskConfig {
        overlay: Some(Overlay::Temporary),
        ..named("top.qcow2")
    };
    let disks = [first, named("raw"), named("raw")];
    let shells = [1, 2].map(|_| Shell::restore_with(host, Kernel::small(), saved, &disks));
    for (shell, mark) in shells.iter().zip(["ONE", "TWO"]) {
        tell(shell, "echo 3 > /proc/sys/vm/drop_caches");
        let dd = format!(
            "dd of=/dev/vdc bs=1 seek={} conv=notrunc,fsync 2> /dev/null",
            PLACES[1]
        );
        tell(shell, &format!("printf {mark} | {dd}"));
    }
    for (number, (shell, mark)) in shells.iter().zip(["ONE", "TWO"]).enumerate() {
        tell(shell, "echo 3 > /proc/sys/vm/drop_caches");
        let read = |disk: &str, at: usize| {
            let dd = format!("dd if=/dev/{disk} bs=1 skip={at} count=3 2> /dev/null");
            tell(shell, &dd)
        };
        let found = [
            ("vda", PLACES[0]),
            ("vdb", PLACES[0]),
            ("vdc", PLACES[0]),
            ("vdc", PLACES[1]),
        ];
        let found = found.map(|(disk, at)| read(disk, at));
        assert_eq!(found, ["FIR", "SEC", "THI", mark]);
        // A restored guest can be saved too.
        let again = PathBuf::from(format!("again{number}"));
        shell.save(&folder.join(&again));
        let mut expected = third.to_vec();
        expected[PLACES[1]..][..mark.len()].copy_from_slice(mark.as_bytes());
        let content = content(folder, &format!("{}/overlay2", again.display()));
        assert!(content == expected, "the overlay of {mark} differs");
    }
    let files = fs::read_dir(saved)
        .unwrap_or_else(|e| panic!("{e}"))
        .count();
    assert_eq!(files, 4, "of the snapshot: state, memory and two overlays");
}

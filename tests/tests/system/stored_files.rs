//! A program on a disk of the guest, of whose file the guest's memory has only what runs: the rest
//! is read from the disk.

use support::command::{World, words};
use support::host;
use support::rich::{self, DISK, STORED};
use support::shell::COMMAND_LIMIT;

#[test]
fn functions_are_named_from_the_file_on_the_disk() {
    let host = host!();
    let world = World::new();
    let mut line = words("run --name g");
    line.extend(rich::restore(host));
    let mut machine = world.start(line);
    machine.type_line(&format!(
        "mkdir /tmp/disk && mount -t ext2 -o ro {DISK} /tmp/disk"
    ));
    machine.type_line(&format!("/tmp/disk/{STORED} 0 50 > /dev/null &"));
    machine.type_line(&format!(
        "until grep -qx {STORED} /proc/$!/comm; do :; done; echo 3 > /proc/sys/vm/drop_caches && echo dropped=$((6*7))"
    ));
    machine.wait_until("program", COMMAND_LIMIT, |stdout, _| {
        stdout.contains("dropped=42")
    });
    let sym = world.run(words(&format!("sym -p {STORED} one_round")), COMMAND_LIMIT);
    assert_eq!(sym.status, 0, "{sym:?}");
    assert!(sym.stdout.contains("one_round"), "{sym:?}");
    let probe = format!("uprobe:/tmp/disk/{STORED}:one_round:entry");
    let listed = world.run(words(&format!("list {probe}")), COMMAND_LIMIT);
    assert_eq!(listed.status, 0, "{listed:?}");
    assert!(listed.stdout.contains(&probe), "{listed:?}");
    world.stop("g", machine);
}

//! Machines that are killed at any moment, with clients at work.

use std::fs;
use std::thread;
use std::time::Duration;

use fastrand::Rng;
use rustix::process::Signal;
use support::Host;
use support::command::{World, words};

use crate::guest::{HOST_LIMIT, NAME, restore, wait_for_machine};

/// The longest time from a client's start to the machine's end.
const LONGEST: Duration = Duration::from_millis(800);
/// The commands of clients. Each reports the machine's end by its status and a message.
const CLIENTS: [&str; 6] = [
    "trace --vm torture vfs_read",
    "trace --vm torture -e syscall:*:entry{@[probe]=count();}",
    "read --vm torture trace",
    "read --vm torture ptrace",
    "read --vm torture dt kprobe:vfs_read:entry",
    "snapshot --vm torture saves/saved",
];

/// Kills machines of the guest with one vCPU.
///
/// # Panics
/// If a client does not report it, or anything is left over.
pub fn run(host: &Host, seed: u64, kills: u64) {
    let mut random = Rng::with_seed(seed);
    let world = World::new();
    let place = world.path("saves");
    fs::create_dir(&place).unwrap_or_else(|e| panic!("{}: {e}", place.display()));
    let mut saved = 0;
    for _ in 0..kills {
        let mut machine = world.start(restore(host, 1, &world));
        wait_for_machine(&world, &mut machine);
        let chosen = random.choice(CLIENTS).unwrap_or(CLIENTS[0]);
        let client = world.start(words(chosen));
        thread::sleep(LONGEST.mul_f64(random.f64()));
        machine.signal(Signal::KILL);
        let ended = machine.finish(HOST_LIMIT);
        assert_eq!(ended.status, -1, "{ended:?}");
        let client = client.finish(HOST_LIMIT);
        // The save may have been complete before.
        let is_saved = place.join("saved").exists();
        if is_saved {
            assert_eq!(client.status, 0, "{chosen}: {client:?}");
            let gone = fs::remove_dir_all(place.join("saved"));
            gone.unwrap_or_else(|e| panic!("{}: {e}", place.display()));
            saved += 1;
        } else {
            assert_eq!(client.status, 1, "{chosen}: {client:?}");
            assert!(client.stderr.contains("machine"), "{chosen}: {client:?}");
        }
        let left = fs::read_dir(&place).map_or(0, Iterator::count);
        assert_eq!(left, 0, "files of a save after {chosen}");
    }
    // One more machine of the name is started, and ends in order.
    let mut last = world.start(restore(host, 1, &world));
    wait_for_machine(&world, &mut last);
    world.stop(NAME, last);
    assert_nothing_left(&world);
    eprintln!("torture: {kills} machines killed, {saved} of them just after a save");
}

/// Checks that no machine is left in the run directory, and no process works there.
fn assert_nothing_left(world: &World) {
    let vms = world.run(words("vms"), HOST_LIMIT);
    assert!(vms.stdout.is_empty(), "{vms:?}");
    let registry = fs::read_dir(world.path("run/exotrace")).map_or(0, Iterator::count);
    assert_eq!(registry, 0, "{}", world.path("run/exotrace").display());
    let folder = world.path("");
    let processes = fs::read_dir("/proc")
        .into_iter()
        .flatten()
        .filter_map(Result::ok);
    let ours = processes.filter(|process| {
        fs::read_link(process.path().join("cwd")).is_ok_and(|cwd| cwd.starts_with(&folder))
    });
    assert_eq!(ours.count(), 0, "processes left over");
}

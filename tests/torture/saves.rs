//! Saves beside all other load: complete ones, which are restored, and ones whose client is killed.

use std::fs;
use std::thread;
use std::time::Duration;

use fastrand::Rng;
use support::command::words;
use support::victims;

use crate::clients;
use crate::guest::{HOST_LIMIT, NAME};
use crate::phase::Crowd;

/// The name of the figure of complete saves.
pub const FIGURE: &str = "saves restored";
/// The part of the message by which a busy machine refuses a command.
const BUSY: &str = "busy with another command for";

/// Saves and restores until the phase ends.
///
/// # Panics
/// If a save fails, its machine does not run, or anything is left over.
pub fn run(crowd: &Crowd<'_>, mut random: Rng) {
    let world = &crowd.guest.world;
    let place = world.path("saves");
    fs::create_dir(&place).unwrap_or_else(|e| panic!("{}: {e}", place.display()));
    while crowd.goes_on() {
        crowd.pace(FIGURE);
        for _ in 0..random.usize(..3) {
            let mut client = clients::start(world, &["snapshot", "saves/whole"]);
            thread::sleep(Duration::from_millis(random.u64(..1500)));
            clients::kill(&mut client);
            crowd.count("saves killed", 1);
            // The save may have been complete.
            let _ = fs::remove_dir_all(place.join("whole"));
        }
        let saved = world.run(
            words(&format!("snapshot --vm {NAME} saves/whole")),
            HOST_LIMIT,
        );
        // On a slow host other commands may be served for longer than this one waits.
        if saved.status == 1 && saved.stderr.contains(BUSY) {
            crowd.count("saves refused", 1);
            continue;
        }
        assert_eq!(saved.status, 0, "{saved:?}");
        let verified = world.run(words("snapshot --verify saves/whole"), HOST_LIMIT);
        assert_eq!(verified.status, 0, "{verified:?}");
        let left: Vec<_> = fs::read_dir(&place)
            .unwrap_or_else(|e| panic!("{}: {e}", place.display()))
            .filter_map(|entry| Some(entry.ok()?.file_name()))
            .collect();
        assert_eq!(left, ["whole"], "left over of saves that were killed");
        victims::make_disk(&world.path("copy-disk"));
        let line =
            "run --name copy --guest-ports rw --disk copy-disk --restore saves/whole --for 2";
        let copy = world.run(words(line), HOST_LIMIT);
        assert_eq!(copy.status, 0, "{copy:?}");
        let gone = fs::remove_dir_all(place.join("whole"));
        gone.unwrap_or_else(|e| panic!("{}: {e}", place.display()));
        crowd.count(FIGURE, 1);
    }
}

//! Fuzzes the state file of a snapshot: a damaged one, and one with a forged body under a valid
//! header.
//!
//! Nothing is allocated for a length alone. Without the restorer's permission no disk outside the
//! folder is opened. The folder is the working directory: paths of a body are below it, or lead out
//! of it.
#![no_main]

use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use hostile::{Input, limit_memory};
use libfuzzer_sys::fuzz_target;
use vmm::machine::{DiskConfig, Overlay};
use vmm::snapshot::RestoredDisks;
use vmm::snapshot::test_utils::{Decoded, decode, file};

static FOLDER: LazyLock<PathBuf> = LazyLock::new(|| {
    let folder = std::env::current_dir().expect("a working directory");
    folder.canonicalize().expect("a path without links")
});

/// Returns disks that the restorer names.
fn named(input: &mut Input<'_>, count: u8) -> Vec<DiskConfig> {
    let disk = |_| {
        let [read_only, length]: [u8; 2] = input.value();
        let path = input.bytes(usize::from(length % 64));
        DiskConfig::new(
            String::from_utf8_lossy(path).into_owned(),
            read_only & 1 != 0,
        )
    };
    (0..count).map(disk).collect()
}

/// Checks that the disks are on the images that the snapshot names.
fn same_images(found: &Decoded) -> bool {
    let image = |disk: &DiskConfig| (disk.path.clone(), disk.backing.clone(), disk.read_only);
    found
        .permitted
        .iter()
        .map(image)
        .eq(found.named.iter().map(image))
}

/// The most bytes allocated at once.
const MEMORY_LIMIT: usize = 64 << 20;

fuzz_target!(|bytes: &[u8]| {
    limit_memory(MEMORY_LIMIT);
    let mut input = Input::new(bytes);
    let which: u8 = input.value();
    let disks = match which >> 1 & 3 {
        0 => RestoredDisks::Named(Vec::new()),
        1 => RestoredDisks::AsSaved,
        _ => RestoredDisks::Named(named(&mut input, which >> 3 & 3)),
    };
    let whole;
    let state = match which & 1 {
        0 => {
            whole = file(input.rest());
            &whole
        }
        _ => input.rest(),
    };
    let found = match decode(state, &FOLDER, &disks) {
        Ok(found) => found,
        Err(error) => {
            assert!(!error.to_string().is_empty());
            return;
        }
    };
    assert_eq!(found.pieces as u64, found.memory.div_ceil(2 << 20));
    assert_eq!(found.permitted.len(), found.named.len());
    // The guest's writes never go to a file that the snapshot names besides its images.
    let kept = |disk: &DiskConfig| matches!(disk.overlay, Some(Overlay::Kept(_)));
    assert!(!found.permitted.iter().any(kept));
    let inside = |path: &Path| {
        path.canonicalize()
            .is_ok_and(|path| path.starts_with(&*FOLDER))
    };
    match disks {
        RestoredDisks::AsSaved => assert!(same_images(&found)),
        RestoredDisks::Named(named) if named.is_empty() => {
            assert!(same_images(&found));
            assert!(
                found.permitted.iter().all(|disk| {
                    inside(&disk.path) && disk.backing.as_deref().is_none_or(inside)
                })
            );
        }
        RestoredDisks::Named(named) => {
            assert_eq!(named.len(), found.permitted.len());
            let saved = found.named.iter().map(|disk| disk.read_only);
            assert!(found.permitted.iter().map(|disk| disk.read_only).eq(saved));
        }
    }
});

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
use vmm::machine::DiskConfig;
use vmm::snapshot::RestoredDisks;
use vmm::snapshot::test_utils::{decode, file};

static FOLDER: LazyLock<PathBuf> = LazyLock::new(|| {
    let folder = std::env::current_dir().expect("a working directory");
    folder.canonicalize().expect("a path without links")
});

/// Returns disks that the restorer names.
fn named(input: &mut Input<'_>, count: u8) -> Vec<DiskConfig> {
    let disk = |_| {
        let [read_only, length]: [u8; 2] = input.value();
        let path = input.bytes(usize::from(length % 64));
        DiskConfig {
            path: PathBuf::from(String::from_utf8_lossy(path).into_owned()),
            read_only: read_only & 1 != 0,
        }
    };
    (0..count).map(disk).collect()
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
    let inside = |path: &Path| {
        path.canonicalize()
            .is_ok_and(|path| path.starts_with(&*FOLDER))
    };
    match disks {
        RestoredDisks::AsSaved => assert_eq!(found.permitted, found.named),
        RestoredDisks::Named(named) if named.is_empty() => {
            assert_eq!(found.permitted, found.named);
            assert!(found.permitted.iter().all(|disk| inside(&disk.path)));
        }
        RestoredDisks::Named(named) => {
            assert_eq!(named.len(), found.permitted.len());
            let saved = found.named.iter().map(|disk| disk.read_only);
            assert!(found.permitted.iter().map(|disk| disk.read_only).eq(saved));
        }
    }
});

//! The folder that a snapshot is written to until it is whole: `NAME.PID.partial`, beside the final
//! one.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

const SUFFIX: &str = ".partial";

/// Returns the name for this process.
pub(super) fn name(folder: &Path) -> PathBuf {
    let mut name = folder.file_name().unwrap_or_default().to_os_string();
    name.push(format!(".{}{SUFFIX}", std::process::id()));
    folder.with_file_name(name)
}

/// Returns the parent folder of `folder`.
pub(super) fn around(folder: &Path) -> &Path {
    match folder.parent() {
        Some(parent) if parent.as_os_str().is_empty() => Path::new("."),
        Some(parent) => parent,
        None => folder,
    }
}

/// Removes the remains of saves to `folder` whose process has ended.
pub(super) fn clear(folder: &Path) {
    let Ok(entries) = fs::read_dir(around(folder)) else {
        return;
    };
    let left = entries
        .flatten()
        .filter(|entry| is_left_behind(folder, &entry.file_name()));
    for entry in left {
        match fs::remove_dir_all(entry.path()) {
            Ok(()) => log::info!(
                "removed {}, which a killed save left behind",
                entry.path().display()
            ),
            Err(error) => log::warn!("{} is not removed: {error}", entry.path().display()),
        }
    }
}

fn is_left_behind(folder: &Path, name: &OsString) -> bool {
    let own = folder.file_name().unwrap_or_default().as_encoded_bytes();
    let process = name.as_encoded_bytes().strip_prefix(own);
    let process = process.and_then(|rest| rest.strip_prefix(b"."));
    let process = process.and_then(|rest| rest.strip_suffix(SUFFIX.as_bytes()));
    let process = process.and_then(|digits| std::str::from_utf8(digits).ok()?.parse::<u32>().ok());
    // If another process has the number by now, the folder is kept until that ends.
    process.is_some_and(|process| !Path::new(&format!("/proc/{process}")).exists())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn only_what_dead_saves_to_the_same_folder_have_left_is_removed() {
        let place = tempfile::tempdir().unwrap();
        let folder = place.path().join("saved");
        // No process has so high a number (PID_MAX_LIMIT of Linux is 2^22).
        let dead = "saved.4194305.partial";
        let kept = [
            "saved.1.partial",
            "saved.partial",
            "saved.x.partial",
            "other.4194305.partial",
            "saved.4194305.partial.old",
        ];
        for name in kept.iter().chain([&dead]) {
            fs::create_dir(place.path().join(name)).unwrap();
        }
        clear(&folder);
        assert!(!place.path().join(dead).exists());
        for name in kept {
            assert!(place.path().join(name).exists(), "{name}");
        }
    }
}

#![allow(clippy::unwrap_used)]
use proptest::prelude::*;

use super::test_paths::{STRUCTS, dentry, mount, place, vfsmount};
use super::{Gva, PathError, PathLayout, PathRef, Reach};
use crate::PausedMemory;
use crate::kernel::test_kernel::{BASE, TestKernel, types};
use crate::test_says::assert_says;

/// Dentries of the first file system: `/`, `home`, `user`, `notes`; `mnt` for the second one.
const ROOT: u64 = 0;
const HOME: u64 = 1;
const USER: u64 = 2;
const NOTES: u64 = 3;
const MNT: u64 = 4;
/// Dentries of the second one: its root, `disk`, and `gone`, which is deleted.
const ROOT2: u64 = 5;
const DISK: u64 = 6;
const GONE: u64 = 7;
/// Mounts, and their namespace.
const FIRST: u64 = 8;
const SECOND: u64 = 9;
const NAMESPACE: u64 = 10;
/// A file without a place: its dentry, inode, superblock, operations and the structures of its
/// namespace.
const PSEUDO: u64 = 11;
const INODE: u64 = 12;
const SUPERBLOCK: u64 = 13;
const OPERATIONS: u64 = 14;
const NS: u64 = 15;
const NS_OPERATIONS: u64 = 16;
const KERNEL_MOUNT: u64 = 17;

fn guest() -> TestKernel {
    let mut kernel = TestKernel::default();
    for (number, parent, name) in [
        (ROOT, ROOT, "/"),
        (HOME, ROOT, "home"),
        (USER, HOME, "a user"),
        (NOTES, USER, "notes\n"),
        (MNT, ROOT, "mnt"),
        (ROOT2, ROOT2, "/"),
        (DISK, ROOT2, "disk"),
        (GONE, DISK, "gone"),
        (PSEUDO, PSEUDO, "[eventfd]"),
    ] {
        dentry(&mut kernel, place(number), place(parent), name);
    }
    kernel.put_all(&[(place(GONE) + 0x10, 0, 8)]);
    let (first, second) = (place(FIRST), place(SECOND));
    mount(&mut kernel, first, place(ROOT), first, place(ROOT));
    mount(&mut kernel, second, place(ROOT2), first, place(MNT));
    let own = place(KERNEL_MOUNT);
    mount(&mut kernel, own, place(ROOT), own, place(ROOT));
    kernel.put_all(&[
        (first + 0xe8, place(NAMESPACE), 8),
        (place(NAMESPACE) + 0x48, 7, 8),
        (own + 0xe8, (-22i64).cast_unsigned(), 8),
        (place(PSEUDO) + 0x30, place(INODE), 8),
        (place(PSEUDO) + 0x60, place(OPERATIONS), 8),
        (place(PSEUDO) + 0x68, place(SUPERBLOCK), 8),
        (place(OPERATIONS) + 0x48, BASE, 8),
        (place(INODE) + 0x40, 4711, 8),
        (place(INODE) + 0x60, place(NS), 8),
        (place(NS) + 8, place(NS_OPERATIONS), 8),
        (place(NS_OPERATIONS), place(NS_OPERATIONS) + 8, 8),
    ]);
    kernel.put(place(NS_OPERATIONS) + 8, b"net\0");
    kernel
}

fn reference(mount: u64, dentry: u64) -> PathRef {
    PathRef {
        mount: Gva(vfsmount(place(mount))),
        dentry: Gva(place(dentry)),
    }
}

fn text(
    kernel: &TestKernel,
    path: PathRef,
    root: Option<PathRef>,
) -> Result<(String, Reach), PathError> {
    let paused = PausedMemory::new(&kernel.memory);
    let layout = PathLayout::new(&types(STRUCTS)).unwrap();
    let path = layout.text(kernel.view(&paused), path, root)?;
    let printed = String::from_utf8(path.printed()).unwrap();
    Ok((printed, path.reach))
}

#[test]
fn paths_are_told_from_a_root_across_mounts() {
    let kernel = guest();
    let top = Some(reference(FIRST, ROOT));
    for (mount, dentry, root, expected, reach) in [
        (FIRST, ROOT, top, "/", Reach::Root),
        (FIRST, NOTES, top, "/home/a user/notes\n", Reach::Root),
        (SECOND, ROOT2, top, "/mnt", Reach::Root),
        (SECOND, DISK, top, "/mnt/disk", Reach::Root),
        (SECOND, GONE, top, "/mnt/disk/gone (deleted)", Reach::Root),
        // As seen by a process with its own root, inside and outside of it.
        (
            FIRST,
            NOTES,
            Some(reference(FIRST, HOME)),
            "/a user/notes\n",
            Reach::Root,
        ),
        (FIRST, HOME, Some(reference(FIRST, HOME)), "/", Reach::Root),
        (
            SECOND,
            DISK,
            Some(reference(FIRST, HOME)),
            "/mnt/disk",
            Reach::NamespaceRoot,
        ),
        (
            FIRST,
            NOTES,
            None,
            "/home/a user/notes\n",
            Reach::NamespaceRoot,
        ),
        // The same dentry without its mount is another place.
        (KERNEL_MOUNT, HOME, top, "/home", Reach::Detached),
        // A bind mount of a directory from which the file was moved away.
        (SECOND, NOTES, top, "/", Reach::Escaped),
    ] {
        let found = text(&kernel, reference(mount, dentry), root);
        assert_eq!(found, Ok((expected.to_owned(), reach)));
    }
}

#[test]
fn mounts_outside_of_every_namespace_are_told() {
    for (namespace, sequence, expected) in [
        (place(NAMESPACE), 7, Reach::NamespaceRoot),
        (place(NAMESPACE), 0, Reach::Detached),
        (0, 7, Reach::Detached),
    ] {
        let mut kernel = guest();
        kernel.put_all(&[
            (place(FIRST) + 0xe8, namespace, 8),
            (place(NAMESPACE) + 0x48, sequence, 8),
        ]);
        let found = text(&kernel, reference(FIRST, HOME), None);
        assert_eq!(found, Ok(("/home".to_owned(), expected)));
    }
}

#[test]
fn files_without_a_place_have_the_names_that_the_kernel_gives() {
    for (magic, expected) in [
        (0x5049_5045, "pipe:[4711]"),
        (0x534f_434b, "socket:[4711]"),
        (0x0904_1934, "anon_inode:[eventfd]"),
        (0x5049_4446, "anon_inode:[pidfd]"),
        (0x6e73_6673, "net:[4711]"),
        (0x0102_1994, "/[eventfd] (deleted)"),
    ] {
        let mut kernel = guest();
        kernel.put_all(&[(place(SUPERBLOCK) + 0x60, magic, 8)]);
        let found = text(&kernel, reference(KERNEL_MOUNT, PSEUDO), None);
        assert_eq!(found, Ok((expected.to_owned(), Reach::Pseudo)));
    }
    // A namespace's file that is itself mounted has a place.
    let mut kernel = guest();
    kernel.put_all(&[(place(SECOND) + 0x20, place(PSEUDO), 8)]);
    let found = text(
        &kernel,
        reference(SECOND, PSEUDO),
        Some(reference(FIRST, ROOT)),
    );
    assert_eq!(found, Ok(("/mnt".to_owned(), Reach::Root)));
}

#[test]
fn broken_structures_end_in_an_error_that_names_them() {
    let (home, user) = (place(HOME), place(USER));
    let (first, second) = (place(FIRST), place(SECOND));
    let mounts_on_each_other = [
        (first + 0x10, second, 8),
        (first + 0x18, place(ROOT2), 8),
        (second + 0x18, place(ROOT), 8),
    ];
    for (broken, part) in [
        (&[(home + 0x18, user, 8)][..], "more than 4096 bytes long"),
        (&mounts_on_each_other, "more than 256 mounts"),
        (
            &[(user + 0x24, 256, 4)],
            "expected a name of at most 255 bytes, found 256",
        ),
        (
            &[(user + 0x28, 0x40_0000, 8)],
            "dentry.d_name: its pointer is 0x400000",
        ),
        (
            &[(user + 0x18, 0, 8)],
            "dentry (d_parent): its pointer is 0x0",
        ),
        (
            &[(user + 0x60, u64::MAX - 7, 8)],
            "dentry_operations at 0xfffffffffffffff8 cannot be read",
        ),
        (
            &[(first + 0x10, 0, 8)],
            "mount (mnt_parent): its pointer is 0x0",
        ),
    ] {
        let mut kernel = guest();
        kernel.put_all(broken);
        assert_says(
            text(&kernel, reference(FIRST, USER), None).unwrap_err(),
            part,
        );
    }
}

proptest! {
    #[test]
    fn damage_ends_in_a_bounded_path_or_an_error(damage in prop::collection::vec((0..18u64, 0..32u64, 0..36u64), 1..6)) {
        let mut kernel = guest();
        for (structure, word, value) in damage {
            // Pointers to the start of a structure or to a mount's inner part, and non-pointers.
            let value = match value {
                0..18 => place(value),
                18..34 => vfsmount(place(value - 18)),
                34 => 0,
                _ => u64::MAX,
            };
            kernel.put_all(&[(place(structure) + 8 * word, value, 8)]);
        }
        for (mount, dentry) in [(FIRST, NOTES), (SECOND, GONE), (KERNEL_MOUNT, PSEUDO)] {
            // A name may no longer be text, and the helper of the other tests is too strict for it.
            let paused = PausedMemory::new(&kernel.memory);
            let layout = PathLayout::new(&types(STRUCTS)).unwrap();
            let found = layout.text(kernel.view(&paused), reference(mount, dentry), None);
            prop_assert!(found.is_err() || found.is_ok_and(|path| path.text.len() <= 4096));
        }
    }
}

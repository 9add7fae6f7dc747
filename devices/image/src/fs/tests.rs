//! File systems as their own tools make them, read back; and damaged ones.

use super::*;
use crate::disk::Disk;
use crate::test_images::{Tree, ext, fat};
use crate::volume::{Kind, Volume};

fn volume(bytes: Vec<u8>) -> Volume {
    let disk = Disk::new(Box::new(bytes));
    disk.allow(1 << 30);
    Volume::of(&disk.window(), None)
}

fn big() -> Vec<u8> {
    (0..700_000_u32)
        .map(|at| (at / 251) as u8 ^ at as u8)
        .collect()
}

#[test]
fn files_of_each_kind_of_ext_are_read() {
    let big = big();
    let mut holes = vec![0; 3 << 20];
    holes[2 << 20] = 7;
    let long = "a/".repeat(40) + "b";
    let tree: &Tree<'_> = &[
        ("/big", &big),
        ("/holes", &holes),
        ("/empty", b""),
        ("/boot/vmlinuz-6.1", b"kernel"),
        ("/vmlinuz@", b"boot/vmlinuz-6.1"),
        ("/etc/absolute@", b"/boot/../boot/./vmlinuz-6.1"),
        ("/etc/upwards@", b"../../../vmlinuz"),
        ("/etc/self@", b"self"),
        ("/etc/none@", b"/none"),
        ("/long@", long.as_bytes()),
        (&long, b"deep"),
    ];
    let kinds: [(&str, &[&str]); 4] = [
        ("ext4", &["-t", "ext4"]),
        (
            "ext4",
            &["-t", "ext4", "-b", "1024", "-O", "^metadata_csum,^64bit"],
        ),
        ("ext3", &["-t", "ext3", "-b", "4096"]),
        ("ext2", &["-t", "ext2", "-b", "1024", "-O", "^filetype"]),
    ];
    for (name, options) in kinds {
        let volume = volume(ext(16, options, tree));
        assert_eq!(volume.kind, Kind::Ext(name));
        assert_eq!(volume.uuid.as_deref(), Some(crate::test_images::UUID));
        assert_eq!(volume.label.as_deref(), Some("root"));
        let fs = volume.fs.unwrap();
        let read = |path: &str| fs.read(path, 4 << 20);
        assert!(read("/big").unwrap() == big, "{options:?}");
        assert!(read("holes").unwrap() == holes, "{options:?}");
        assert_eq!(read("/empty").unwrap(), b"");
        for path in [
            "/vmlinuz",
            "//boot//vmlinuz-6.1",
            "/etc/absolute",
            "/etc/upwards",
        ] {
            assert_eq!(read(path).unwrap(), b"kernel", "{path} {options:?}");
        }
        assert_eq!(read("/long").unwrap(), b"deep");
        assert!(matches!(read("/etc/self"), Err(FsError::TooManyLinks)));
        assert!(matches!(read("/etc/none"), Err(FsError::NotFound)));
        assert!(matches!(read("/etc"), Err(FsError::NotAFile)));
        assert!(matches!(read("/big/x"), Err(FsError::NotAFolder)));
        let limited = fs.read("/big", 1000);
        assert!(matches!(
            limited,
            Err(FsError::TooLarge { size: 700_000, .. })
        ));
        let names: Vec<_> = fs.list("/boot").unwrap();
        assert_eq!(
            names,
            [Item {
                name: "vmlinuz-6.1".to_owned(),
                is_folder: false
            }]
        );
    }
}

#[test]
fn folders_with_an_index_are_listed_and_searched() {
    let names: Vec<String> = (0..2000).map(|n| format!("/many/{n:040}")).collect();
    let tree: Vec<(&str, &[u8])> = names
        .iter()
        .map(|name| (name.as_str(), &b"x"[..]))
        .collect();
    let volume = volume(ext(16, &["-t", "ext4", "-N", "4000"], &tree));
    let fs = volume.fs.unwrap();
    assert_eq!(fs.list("/many").unwrap().len(), 2000);
    assert!(names.iter().step_by(97).all(|name| fs.has_file(name)));
}

#[test]
fn files_of_each_kind_of_fat_are_read() {
    let big = big();
    let tree: &Tree<'_> = &[
        ("/EFI/Linux/A long name, with a version 6.1.efi", b"image"),
        ("/EFI/BOOT/BOOTX64.EFI", b"loader"),
        ("/loader/entries/ünïcode.conf", b"entry"),
        ("/big", &big),
    ];
    for (bits, kib) in [(12, 4096), (16, 16384), (32, 40960)] {
        let volume = volume(fat(bits, kib, tree));
        assert_eq!(
            (volume.kind, volume.uuid.as_deref()),
            (Kind::Fat, Some("ABCD-1234"))
        );
        assert_eq!(volume.label.as_deref(), Some("EFI"));
        let fs = volume.fs.unwrap();
        assert!(fs.read("/big", 1 << 20).unwrap() == big, "FAT{bits}");
        for (path, wanted) in [
            (
                "/efi/linux/a LONG name, with a version 6.1.EFI",
                &b"image"[..],
            ),
            ("/efi/boot/bootx64.efi", b"loader"),
            ("/loader/entries/ünïcode.conf", b"entry"),
        ] {
            assert_eq!(fs.read(path, 100).unwrap(), wanted, "{path} FAT{bits}");
        }
        let names: Vec<_> = fs
            .list("/EFI")
            .unwrap()
            .into_iter()
            .map(|i| i.name)
            .collect();
        assert!(names.contains(&"Linux".to_owned()), "{names:?}");
        assert!(matches!(fs.open("/EFI"), Err(FsError::NotAFile)));
        assert!(matches!(fs.open("/none"), Err(FsError::NotFound)));
    }
}

#[test]
fn a_circle_of_clusters_ends() {
    let mut image = fat(12, 4096, &[("/folder/name", b"x")]);
    let start = usize::from(image[14]) * 512;
    let table = usize::from(image[22]) * 512;
    // Each cluster leads to the one after it, and cluster 20 back to 2.
    for entry in image[start + 3..start + table].chunks_exact_mut(3) {
        entry.copy_from_slice(&[0x02, 0x20, 0x00]);
    }
    let fs = volume(image).fs.unwrap();
    fs.list("/folder").unwrap();
    fs.open("/folder/none").unwrap_err();
}

#[test]
fn damaged_file_systems_end_in_errors() {
    let tree: &Tree<'_> = &[("/boot/vmlinuz", b"kernel"), ("/a@", b"boot")];
    let images = [
        ext(2, &["-t", "ext4", "-b", "1024"], tree),
        ext(2, &["-t", "ext2", "-b", "1024"], tree),
        fat(12, 512, &[("/boot/vmlinuz", b"kernel")]),
    ];
    for image in images {
        // Every byte of the first structures, and some of the rest.
        let places = (0..4096).chain((4096..image.len()).step_by(1021));
        for at in places {
            let mut damaged = image.clone();
            damaged[at] = damaged[at].wrapping_add(0x7f);
            if let Some(fs) = volume(damaged).fs {
                let _ = (
                    fs.list("/"),
                    fs.read("/a/vmlinuz", 100),
                    fs.has_folder("/boot/x"),
                );
            }
        }
    }
}

#[test]
fn other_file_systems_have_names() {
    for (at, magic, name) in [
        (0x10040, &b"_BHRfS_M"[..], "btrfs"),
        (0, b"XFSB", "xfs"),
        (512, b"LABELONE", "LVM"),
        (0, b"LUKS\xba\xbe", "LUKS"),
        (4086, b"SWAPSPACE2", "swap"),
        (0, b"hsqs", "squashfs"),
        (0x8001, b"CD001", "ISO 9660"),
    ] {
        let mut bytes = vec![0; 0x12000];
        bytes[at..at + magic.len()].copy_from_slice(magic);
        let volume = volume(bytes);
        assert_eq!((volume.kind, volume.is_read()), (Kind::Other(name), false));
    }
    assert_eq!(volume(vec![0; 600]).kind, Kind::Unknown);
}

//! Files by their inodes, whose fields are as `debugfs` reports them.

use std::fs;
use std::process::Command;

use super::*;
use crate::test_images::{LINUX, Part, Tree, UUID, ext, gpt, run};

fn uuid() -> [u8; 16] {
    let digits: String = UUID.chars().filter(char::is_ascii_hexdigit).collect();
    u128::from_str_radix(&digits, 16).unwrap().to_be_bytes()
}

/// Returns the inode of a file in an ext file system, as `debugfs` reports it.
fn inode(volume: &[u8], path: &str) -> StoredInode {
    let folder = tempfile::tempdir().unwrap();
    let image = folder.path().join("image");
    fs::write(&image, volume).unwrap();
    let mut command = Command::new("debugfs");
    let text = run(command.args(["-R", &format!("stat {path}")]).arg(&image));
    let word = |name: &str| {
        let (_, rest) = text
            .split_once(name)
            .unwrap_or_else(|| panic!("no {name} in {text}"));
        rest.split_whitespace().next().unwrap().to_owned()
    };
    let hex = |text: &str| u32::from_str_radix(text.trim_start_matches("0x"), 16).unwrap();
    let changed = word("ctime:");
    // Nanoseconds behind two more bits of the seconds, if the inode has them.
    let (seconds, extra) = changed.split_once(':').unwrap_or((&changed, "0"));
    StoredInode {
        file_system: None,
        number: word("Inode:").parse().unwrap(),
        generation: word("Generation:").parse().unwrap(),
        size: word("Size:").parse().unwrap(),
        sectors: word("Blockcount:").parse().unwrap(),
        changed: (hex(seconds).into(), hex(extra) >> 2),
    }
}

/// Returns a file of so many extents that they need a node of their own.
fn scattered() -> Vec<u8> {
    let mut content = vec![0; 1 << 20];
    for at in (0..content.len()).step_by(64 << 10) {
        content[at..at + 100].fill(7);
    }
    content
}

/// Returns the content of the inode's files on a disk.
fn read(disk: &[u8], wanted: &StoredInode) -> Vec<Vec<u8>> {
    let volumes = StoredVolumes::open(Box::new(disk.to_vec())).unwrap();
    let content = |file: File| {
        let mut bytes = vec![0; usize::try_from(file.length()).unwrap()];
        file.read_at(&mut bytes, 0).unwrap();
        bytes
    };
    volumes.files(wanted).map(content).collect()
}

#[test]
fn a_file_is_found_by_its_inode_and_not_by_an_older_state_of_it() {
    let content = scattered();
    let tree: &Tree<'_> = &[("/usr/bin/program", &content), ("/other", b"other")];
    for options in [
        &["-t", "ext4"][..],
        &["-t", "ext4", "-I", "128", "-b", "1024"],
        &["-t", "ext2"],
    ] {
        let volume = ext(16, options, tree);
        let mut wanted = inode(&volume, "/usr/bin/program");
        let folder = inode(&volume, "/usr");
        let disk = gpt(&[Part::new(LINUX, vec![0; 8192]), Part::new(LINUX, volume)]);
        for file_system in [Some(uuid()), None] {
            wanted.file_system = file_system;
            assert!(read(&disk, &wanted) == [content.clone()], "{options:?}");
        }
        let changes: [fn(&mut StoredInode); 6] = [
            |inode| inode.file_system = Some([3; 16]),
            |inode| inode.number += 1,
            |inode| inode.generation += 1,
            |inode| inode.size -= 1,
            |inode| inode.sectors += 8,
            |inode| inode.changed.1 += 1,
        ];
        for (index, change) in changes.into_iter().enumerate() {
            let mut other = wanted;
            change(&mut other);
            assert!(read(&disk, &other).is_empty(), "{index} {options:?}");
        }
        assert!(read(&disk, &folder).is_empty());
    }
}

#[test]
fn a_node_of_extents_that_is_older_than_its_inode_is_refused() {
    let content = scattered();
    let volume = ext(16, &["-t", "ext4", "-b", "4096"], &[("/program", &content)]);
    let wanted = inode(&volume, "/program");
    assert_eq!(read(&volume, &wanted).len(), 1);
    // The node begins with the magic, and with the number of its extents.
    let starts = volume.chunks_exact(4096).enumerate();
    let mut nodes = starts.filter(|(_, block)| block.starts_with(&[0x0a, 0xf3]));
    let (number, _) = nodes.next().unwrap();
    let mut older = volume.clone();
    older[number * 4096 + 2] -= 1;
    assert!(read(&older, &wanted).is_empty());
}

//! Kernels by their names, on a disk without a boot loader that is understood.
//!
//! The links `/vmlinuz` and `/initrd.img` come first, then the newest kernel in `/boot`. The
//! command line names the file system that looks like a root.

use super::{Entry, Group, Origin};
use crate::place::{MOST_ENTRIES, Place};
use crate::table::Partition;
use crate::version::compare;
use crate::volume::{Kind, Volume};

/// Links to the kernel that a distribution boots, with those to its initramfs.
const LINKS: [(&str, &str); 4] = [
    ("/vmlinuz", "/initrd.img"),
    ("/boot/vmlinuz", "/boot/initrd.img"),
    ("/boot/vmlinuz", "/boot/initrd"),
    ("/boot/vmlinuz-linux", "/boot/initramfs-linux.img"),
];

/// Finds kernels, the preferred one first.
pub(super) fn find(volumes: &[Volume]) -> Group {
    let mut entries: Vec<Entry> = Vec::new();
    for (index, volume) in volumes.iter().enumerate().filter(|(_, v)| v.is_read()) {
        let links = LINKS.iter().filter(|(kernel, _)| volume.has_file(kernel));
        for (kernel, initrd) in links {
            let initrd = volume.has_file(initrd).then(|| (*initrd).to_owned());
            let is_known = entries.iter().any(|entry| entry.kernel.path == *kernel);
            if !is_known || initrd.is_some() {
                entries.retain(|entry| entry.kernel.path != *kernel);
                entries.push(entry(volumes, index, (*kernel).to_owned(), initrd));
            }
        }
    }
    let mut by_version = Vec::new();
    for (index, volume) in volumes.iter().enumerate() {
        for folder in ["/boot", "/"] {
            let names = volume.files(folder);
            for name in &names {
                let version = ["vmlinuz-", "vmlinux-", "kernel-", "bzImage-"]
                    .into_iter()
                    .find_map(|start| name.strip_prefix(start));
                if let Some(version) = version {
                    let found = initrd(&names, version);
                    by_version.push((
                        version.to_owned(),
                        index,
                        path(folder, name),
                        found.map(|name| path(folder, &name)),
                    ));
                }
            }
        }
    }
    by_version.sort_by(|a, b| compare(&b.0, &a.0));
    for (_, index, kernel, initrd) in by_version.into_iter().take(MOST_ENTRIES) {
        if !entries.iter().any(|entry| entry.kernel.path == kernel) {
            entries.push(entry(volumes, index, kernel, initrd));
        }
    }
    Group {
        entries,
        default: 0,
    }
}

fn path(folder: &str, name: &str) -> String {
    format!("{}/{name}", folder.trim_end_matches('/'))
}

/// Returns the initramfs of a version, by the names that distributions give it.
fn initrd(names: &[String], version: &str) -> Option<String> {
    let wanted = [
        format!("initrd.img-{version}"),
        format!("initramfs-{version}.img"),
        format!("initrd-{version}"),
        format!("initramfs-{version}"),
        format!("initrd-{version}.img"),
    ];
    wanted.into_iter().find(|name| names.contains(name))
}

fn entry(volumes: &[Volume], index: usize, kernel: String, initrd: Option<String>) -> Entry {
    let source = Place::new(index, &kernel);
    Entry {
        origin: Origin::Files,
        title: kernel.clone(),
        id: kernel.clone(),
        kernel: source.clone(),
        source,
        options: options(volumes, initrd.is_some()),
        initrds: initrd
            .map(|path| Place::new(index, &path))
            .into_iter()
            .collect(),
        is_default: false,
        trouble: None,
    }
}

/// Returns a command line. A kernel finds a file system by its UUID only with an initramfs; by
/// itself it knows partitions.
fn options(volumes: &[Volume], has_initrd: bool) -> String {
    let Some(root) = root(volumes) else {
        return "ro".to_owned();
    };
    let part = root.partition.as_ref();
    match (&root.uuid, part) {
        (Some(uuid), _) if has_initrd => format!("root=UUID={uuid} ro"),
        (_, Some(Partition { uuid, .. })) => format!("root=PARTUUID={uuid} ro"),
        _ => "root=/dev/vda ro".to_owned(),
    }
}

/// Returns the volume that looks like a root: one with programs of an init, else the only one that
/// is not read and could be one.
fn root(volumes: &[Volume]) -> Option<&Volume> {
    let is_root = |volume: &&Volume| {
        [
            "/sbin/init",
            "/usr/lib/systemd/systemd",
            "/etc/fstab",
            "/init",
        ]
        .iter()
        .any(|path| volume.has_file(path))
    };
    let mut unread = volumes
        .iter()
        .filter(|volume| matches!(volume.kind, Kind::Other("btrfs" | "xfs" | "F2FS" | "EROFS")));
    volumes.iter().find(is_root).or_else(|| {
        let only = unread.next()?;
        unread.next().is_none().then_some(only)
    })
}

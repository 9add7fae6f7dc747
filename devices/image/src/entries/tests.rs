//! Images with entries of each source, and what is booted of them.

use crate::test_images::{ESP, LINUX, Part, Tree, UUID, ext, fat, gpt, program};
use crate::{Image, Kind, Origin};

const ID: &str = "6f7a0c1d2e3f40516273849506a7b8c9";

fn image(parts: Vec<(&str, Vec<u8>)>) -> Image {
    let parts: Vec<Part> = parts
        .into_iter()
        .map(|(kind, bytes)| Part::new(kind, bytes))
        .collect();
    Image::open(Box::new(gpt(&parts))).unwrap()
}

fn ext4(tree: &Tree<'_>) -> Vec<u8> {
    ext(2, &["-t", "ext4", "-b", "1024"], tree)
}

fn entry(version: &str) -> String {
    format!(
        "title Fedora Linux ({version}) 40 (Server)\nversion {version}\nlinux /vmlinuz-{version}\n\
         initrd /initramfs-{version}.img $tuned_initrd\noptions root=UUID={UUID} ro $kernelopts $tuned_params\n\
         grub_users $grub_users\ngrub_arg --unrestricted\ngrub_class fedora\n"
    )
}

/// Fedora's configuration of GRUB: the entries are files of the specification.
const FEDORA: &str = r#"
if [ -f ${config_directory}/grubenv ]; then
  load_env -f ${config_directory}/grubenv
elif [ -s $prefix/grubenv ]; then
  load_env
fi
if [ "${next_entry}" ] ; then
   set default="${next_entry}"
   set next_entry=
else
   set default="${saved_entry}"
fi
if [ x"${feature_menuentry_id}" = xy ]; then menuentry_id_option="--id"; fi
if [ -z "$kernelopts" ]; then
  set kernelopts="rhgb quiet"
fi
insmod blscfg
blscfg
"#;

/// Returns Fedora's layout: an ESP, a boot partition, and a root that is not read.
fn fedora(environment: &str) -> Image {
    let new = format!("/loader/entries/{ID}-6.9.10-200.fc40.x86_64.conf");
    let old = format!("/loader/entries/{ID}-6.9.9-200.fc40.x86_64.conf");
    let rescue = format!("/loader/entries/{ID}-0-rescue.conf");
    let texts = [
        "6.9.10-200.fc40.x86_64",
        "6.9.9-200.fc40.x86_64",
        "0-rescue",
    ]
    .map(entry);
    let boot: &Tree<'_> = &[
        (&new, texts[0].as_bytes()),
        (&old, texts[1].as_bytes()),
        (&rescue, texts[2].as_bytes()),
        ("/vmlinuz-6.9.10-200.fc40.x86_64", b"new kernel"),
        ("/initramfs-6.9.10-200.fc40.x86_64.img", b"new initramfs"),
        ("/vmlinuz-6.9.9-200.fc40.x86_64", b"old kernel"),
        ("/initramfs-6.9.9-200.fc40.x86_64.img", b"old initramfs"),
        ("/vmlinuz-0-rescue", b"rescue"),
        ("/initramfs-0-rescue.img", b"rescue"),
        ("/grub2/grub.cfg", FEDORA.as_bytes()),
        ("/grub2/grubenv", environment.as_bytes()),
    ];
    let stub = format!(
        "search --no-floppy --root-dev-only --fs-uuid --set=dev {UUID}\nset prefix=($dev)/grub2\nexport $prefix\nconfigfile $prefix/grub.cfg\n"
    );
    let esp: &Tree<'_> = &[("/EFI/fedora/grub.cfg", stub.as_bytes())];
    let mut root = vec![0; 0x20000];
    root[0x10040..0x10048].copy_from_slice(b"_BHRfS_M");
    image(vec![
        (ESP, fat(12, 512, esp)),
        ("bc13c2ff-59e6-4262-a352-b275fd6f7172", ext4(boot)),
        (LINUX, root),
    ])
}

#[test]
fn fedora_boots_what_it_saved_else_the_newest() {
    let saved = format!("saved_entry={ID}-6.9.9-200.fc40.x86_64\n");
    let options = format!("{saved}kernelopts=quiet systemd.unit=rescue.target\n");
    for (environment, kernel, options) in [
        ("", "new kernel", "rhgb quiet"),
        (saved.as_str(), "old kernel", "rhgb quiet"),
        (&options, "old kernel", "quiet systemd.unit=rescue.target"),
        ("saved_entry=1\n", "old kernel", "rhgb quiet"),
        ("saved_entry=gone\n", "new kernel", "rhgb quiet"),
    ] {
        let image = fedora(environment);
        let files = image.boot_files().unwrap();
        assert_eq!(files.kernel, kernel.as_bytes(), "{environment}");
        assert_eq!(files.command_line, format!("root=UUID={UUID} ro {options}"));
        assert_eq!(files.chosen.partition, Some(2));
        assert_eq!(files.chosen.entry.origin, Origin::BootLoaderSpec);
        assert_eq!(image.volumes()[2].kind, Kind::Other("btrfs"));
    }
    let image = fedora("");
    let of_spec = image
        .entries()
        .iter()
        .filter(|e| e.origin == Origin::BootLoaderSpec);
    let ids: Vec<_> = of_spec.map(|entry| entry.id.replace(ID, "")).collect();
    assert_eq!(
        ids,
        [
            "-6.9.10-200.fc40.x86_64",
            "-6.9.9-200.fc40.x86_64",
            "-0-rescue"
        ]
    );
    assert_eq!(
        image
            .entries()
            .iter()
            .filter(|entry| entry.is_default)
            .count(),
        1
    );
}

#[test]
fn systemd_boot_takes_what_its_configuration_names() {
    let one = "title Arch Linux\nlinux /vmlinuz-linux\ninitrd /intel-ucode.img\ninitrd /initramfs-linux.img\noptions root=LABEL=root\noptions rw\n";
    let lts = "title Arch Linux LTS\nlinux /vmlinuz-linux-lts\noptions $literal\n";
    let arm = "title Other\narchitecture aa64\nlinux /vmlinuz-linux\n";
    let tree = |loader: &'static str| -> Vec<u8> {
        fat(
            12,
            1024,
            &[
                ("/loader/loader.conf", loader.as_bytes()),
                ("/loader/entries/arch.conf", one.as_bytes()),
                ("/loader/entries/arch-lts.conf", lts.as_bytes()),
                ("/loader/entries/zz-arm.conf", arm.as_bytes()),
                ("/vmlinuz-linux", b"linux"),
                ("/vmlinuz-linux-lts", b"lts"),
                ("/intel-ucode.img", b"ucode"),
                ("/initramfs-linux.img", b"initramfs"),
            ],
        )
    };
    for (loader, kernel, initramfs, options) in [
        (
            "timeout 3\ndefault arch.conf\n",
            "linux",
            Some(&b"ucode\0\0\0initramfs"[..]),
            "root=LABEL=root rw",
        ),
        (
            "#default arch.conf\ndefault *-lts\n",
            "lts",
            None,
            "$literal",
        ),
        ("default @saved\n", "lts", None, "$literal"),
    ] {
        let files = image(vec![(ESP, tree(loader))]).boot_files().unwrap();
        assert_eq!(files.kernel, kernel.as_bytes(), "{loader}");
        assert_eq!(files.initramfs.as_deref(), initramfs);
        assert_eq!(files.command_line, options);
    }
}

#[test]
fn a_unified_kernel_has_everything_in_one_file() {
    let release = b"ID=debian\nPRETTY_NAME=\"Debian GNU/Linux 13\"\nVERSION_ID=13\n";
    let sections = |version: &'static str, kernel: &'static [u8]| {
        program(&[
            (".osrel", release),
            (".cmdline", b"root=UUID=x ro  quiet\n\0"),
            (".uname", version.as_bytes()),
            (".ucode", b"ucode"),
            (".initrd", b"initramfs"),
            (".linux", kernel),
        ])
    };
    let (old, new) = (sections("6.12.9", b"old"), sections("6.12.10", b"new"));
    let failed = sections("6.13", b"failed");
    let tree: &Tree<'_> = &[
        ("/EFI/Linux/debian-6.12.9.efi", &old),
        ("/EFI/Linux/debian-6.12.10.efi", &new),
        ("/EFI/Linux/debian-6.13+0-3.efi", &failed),
        ("/EFI/Linux/empty.efi", b"MZ"),
    ];
    let image = image(vec![(ESP, fat(12, 1024, tree))]);
    let files = image.boot_files().unwrap();
    assert_eq!(files.kernel, b"new");
    assert_eq!(files.initramfs.unwrap(), b"ucode\0\0\0initramfs");
    assert_eq!(files.command_line, "root=UUID=x ro quiet");
    assert_eq!(files.chosen.entry.title, "Debian GNU/Linux 13 (6.12.10)");
    assert_eq!(image.entries().len(), 3);
}

#[test]
fn links_to_a_kernel_are_taken_before_names() {
    let tree: &Tree<'_> = &[
        ("/vmlinuz@", b"boot/vmlinuz-6.1.0-9-amd64"),
        ("/initrd.img@", b"boot/initrd.img-6.1.0-9-amd64"),
        ("/boot/vmlinuz-6.1.0-9-amd64", b"k9"),
        ("/boot/initrd.img-6.1.0-9-amd64", b"i9"),
        ("/boot/vmlinuz-6.1.0-10-amd64", b"k10"),
        ("/etc/fstab", b""),
    ];
    let files = image(vec![(LINUX, ext4(tree))]).boot_files().unwrap();
    assert_eq!(
        (files.kernel.as_slice(), files.initramfs.as_deref()),
        (&b"k9"[..], Some(&b"i9"[..]))
    );
    assert_eq!(files.command_line, format!("root=UUID={UUID} ro"));

    let files = image(vec![(LINUX, ext4(&tree[2..]))]).boot_files().unwrap();
    assert_eq!(
        (files.kernel.as_slice(), files.initramfs),
        (&b"k10"[..], None)
    );
    assert_eq!(
        files.command_line,
        "root=PARTUUID=01010101-0101-0101-0101-010101010101 ro"
    );
}

#[test]
fn a_disk_without_a_table_boots() {
    let tree: &Tree<'_> = &[("/boot/vmlinuz-6.1", b"k"), ("/sbin/init", b"")];
    let image = Image::open(Box::new(ext4(tree))).unwrap();
    let files = image.boot_files().unwrap();
    assert_eq!(
        (files.chosen.partition, files.command_line.as_str()),
        (None, "root=/dev/vda ro")
    );
}

#[test]
fn a_boot_partition_names_the_root_that_is_not_read() {
    let boot: &Tree<'_> = &[("/vmlinuz-6.1", b"k"), ("/initramfs-6.1.img", b"i")];
    let mut root = vec![0x11; 4096];
    root[..4].copy_from_slice(b"XFSB");
    let files = image(vec![(LINUX, ext4(boot)), (LINUX, root)]).boot_files();
    assert_eq!(
        files.unwrap().command_line,
        "root=UUID=11111111-1111-1111-1111-111111111111 ro"
    );
}

#[test]
fn what_is_not_read_is_named() {
    let mut root = vec![0; 4096];
    root[..4].copy_from_slice(b"XFSB");
    let error = image(vec![(ESP, fat(12, 512, &[("/x", b"")])), (LINUX, root)])
        .boot_files()
        .unwrap_err();
    assert_eq!(
        error.to_string(),
        "nothing to boot was found in the image (GPT; partition 1: FAT; partition 2: xfs, which is not read); \
         give --kernel, and --initramfs if the kernel needs one"
    );
}

#[test]
fn files_are_opened_by_their_paths_in_the_system() {
    use crate::ReadAt as _;
    let root: &Tree<'_> = &[
        ("/etc/os-release@", b"../usr/lib/os-release"),
        ("/usr/lib/os-release", b"ID=x"),
    ];
    let boot: &Tree<'_> = &[("/vmlinuz-6.1", b"kernel")];
    let esp: &Tree<'_> = &[("/EFI/BOOT/BOOTX64.EFI", b"loader")];
    let image = image(vec![
        (ESP, fat(12, 512, esp)),
        (LINUX, ext4(boot)),
        (LINUX, ext4(root)),
    ]);
    for (path, wanted) in [
        ("/etc/os-release", &b"ID=x"[..]),
        ("usr/lib/os-release", b"ID=x"),
        ("/boot/vmlinuz-6.1", b"kernel"),
        ("/boot/efi/EFI/BOOT/BOOTX64.EFI", b"loader"),
    ] {
        let file = image.open_file(path).unwrap();
        let mut bytes = vec![0; usize::try_from(file.length()).unwrap()];
        file.read_at(&mut bytes, 0).unwrap();
        assert_eq!(bytes, wanted, "{path}");
    }
    image.open_file("/vmlinuz-6.1").unwrap_err();
}

//! Configurations in the shapes that distributions write, and what is booted of them.

use super::*;
use crate::test_images::{ESP, LINUX, Part, Tree, UUID, ext, fat, gpt};
use crate::{BootError, Entry, Image};

/// Returns an image with an ESP, and a root of these files.
fn image(esp: &Tree<'_>, root: &Tree<'_>) -> Image {
    let esp = Part::new(ESP, fat(12, 1024, esp));
    let root = Part::new(LINUX, ext(2, &["-t", "ext4", "-b", "1024"], root));
    Image::open(Box::new(gpt(&[esp, root]))).unwrap()
}

/// The kernels that configurations of these tests name.
const KERNELS: [(&str, &[u8]); 8] = [
    ("/boot/vmlinuz-6.1.0-10-amd64", b"k10"),
    ("/boot/initrd.img-6.1.0-10-amd64", b"i10"),
    ("/boot/vmlinuz-6.1.0-9-amd64", b"k9"),
    ("/boot/initrd.img-6.1.0-9-amd64", b"i9"),
    ("/boot/vmlinuz-6.8.0-31-generic", b"k31"),
    ("/boot/initrd.img-6.8.0-31-generic", b"i31"),
    ("/boot/microcode.cpio", b"ucode"),
    ("/etc/fstab", b""),
];

fn with_config<'a>(config: &'a str, environment: &'a str) -> Vec<(&'a str, &'a [u8])> {
    let mut tree: Vec<(&str, &[u8])> = KERNELS.to_vec();
    tree.push(("/boot/grub/grub.cfg", config.as_bytes()));
    tree.push(("/boot/grub/grubenv", environment.as_bytes()));
    tree
}

/// A header in the shape of grub-mkconfig's.
const HEADER: &str = r#"
### BEGIN /etc/grub.d/00_header ###
if [ -s $prefix/grubenv ]; then
  set have_grubenv=true
  load_env
fi
if [ "${next_entry}" ] ; then
   set default="${next_entry}"
   set next_entry=
   save_env next_entry
   set boot_once=true
else
   set default="${saved_entry}"
fi

if [ x"${feature_menuentry_id}" = xy ]; then
  menuentry_id_option="--id"
else
  menuentry_id_option=""
fi

export menuentry_id_option
function savedefault {
  if [ -z "${boot_once}" ]; then
    saved_entry="${chosen}"
    save_env saved_entry
  fi
}
function load_video {
  if [ x$feature_all_video_module = xy ]; then
    insmod all_video
  else
    insmod vga
  fi
}
if [ x$feature_default_font_path = xy ] ; then
   font=unicode
else
insmod part_gpt
    font="/usr/share/grub/unicode.pf2"
fi
if loadfont $font ; then
  set gfxmode=auto
fi
terminal_output gfxterm
if [ x$feature_timeout_style = xy ] ; then
  set timeout_style=menu
  set timeout=5
else
  set timeout=5
fi
### END /etc/grub.d/00_header ###
"#;

fn debian_entry(title: &str, id: &str, version: &str, options: &str) -> String {
    format!(
        r#"menuentry '{title}' --class debian --class gnu-linux --class os $menuentry_id_option '{id}' {{
	load_video
	insmod gzio
	if [ x$grub_platform = xxen ]; then insmod xzio; insmod lzopio; fi
	insmod part_gpt
	insmod ext2
	set root='hd0,gpt7'
	if [ x$feature_platform_search_hint = xy ]; then
	  search --no-floppy --fs-uuid --set=root --hint-bios=hd0,gpt7 --hint-efi=hd0,gpt7  {UUID}
	else
	  search --no-floppy --fs-uuid --set=root {UUID}
	fi
	echo	'Loading Linux {version} ...'
	linux	/boot/vmlinuz-{version} root=UUID={UUID} ro {options}
	echo	'Loading initial ramdisk ...'
	initrd	/boot/initrd.img-{version}
}}
"#
    )
}

fn debian() -> String {
    let first = debian_entry(
        "Debian GNU/Linux",
        "gnulinux-simple",
        "6.1.0-10-amd64",
        " quiet",
    );
    let inner = [
        debian_entry(
            "Debian, with Linux 6.1.0-10",
            "g-10-advanced",
            "6.1.0-10-amd64",
            " quiet",
        ),
        debian_entry(
            "Debian, with Linux 6.1.0-10 (recovery)",
            "g-10-recovery",
            "6.1.0-10-amd64",
            "single",
        ),
        debian_entry(
            "Debian, with Linux 6.1.0-9",
            "g-9-advanced",
            "6.1.0-9-amd64",
            " quiet",
        ),
    ]
    .concat();
    format!(
        "{HEADER}{first}submenu 'Advanced options for Debian GNU/Linux' $menuentry_id_option 'gnulinux-advanced' {{\n{inner}}}\n\
         if [ \"$grub_platform\" = \"efi\" ]; then\n\tmenuentry 'UEFI Firmware Settings' $menuentry_id_option 'uefi-firmware' {{\n\t\tfwsetup\n\t}}\nfi\n"
    )
}

fn default(image: &Image) -> &Entry {
    image.default_entry().unwrap()
}

#[test]
fn the_default_of_debian_follows_its_environment() {
    let config = debian();
    for (environment, title, kernel) in [
        ("", "Debian GNU/Linux", "k10"),
        ("saved_entry=0\n", "Debian GNU/Linux", "k10"),
        (
            "saved_entry=gnulinux-advanced>g-9-advanced\n",
            "Debian, with Linux 6.1.0-9",
            "k9",
        ),
        ("saved_entry=1>2\n", "Debian, with Linux 6.1.0-9", "k9"),
        ("saved_entry=1\n", "Debian, with Linux 6.1.0-10", "k10"),
        (
            "saved_entry=Debian GNU/Linux\nnext_entry=1>1\n",
            "Debian, with Linux 6.1.0-10 (recovery)",
            "k10",
        ),
        ("saved_entry=gone\n", "Debian GNU/Linux", "k10"),
        ("saved_entry=uefi-firmware\n", "Debian GNU/Linux", "k10"),
    ] {
        let environment = format!("# GRUB Environment Block\n{environment}#####");
        let image = image(&[("/x", b"")], &with_config(&config, &environment));
        let entry = default(&image);
        assert_eq!(entry.title, title, "{environment}");
        assert_eq!(image.troubles(), [""; 0]);
        let files = image.boot_files().unwrap();
        assert_eq!(files.kernel, kernel.as_bytes());
        let options = files.command_line;
        assert!(
            options.starts_with(&format!("root=UUID={UUID} ro ")),
            "{options}"
        );
    }
}

#[test]
fn all_entries_are_listed_with_their_files() {
    let config = debian();
    let image = image(&[("/x", b"")], &with_config(&config, ""));
    let titles = image
        .entries()
        .iter()
        .filter(|entry| entry.origin == crate::Origin::Grub);
    assert_eq!(titles.count(), 4);
    let text = image.chosen(default(&image)).to_string();
    assert_eq!(
        text,
        format!(
            "partition 2, ext4 (GPT)\n\
             entry of GRUB \"Debian GNU/Linux\" of /boot/grub/grub.cfg\n\
             kernel /boot/vmlinuz-6.1.0-10-amd64\n\
             initramfs /boot/initrd.img-6.1.0-10-amd64\n\
             command line root=UUID={UUID} ro quiet"
        )
    );
}

#[test]
fn the_program_of_efi_leads_to_the_configuration() {
    let stub = format!(
        "search.fs_uuid {UUID} root hd0,gpt2\nset prefix=($root)'/boot/grub'\nconfigfile $prefix/grub.cfg\n"
    );
    let config = debian();
    let image = image(
        &[("/EFI/debian/grub.cfg", stub.as_bytes())],
        &with_config(&config, "saved_entry=1>2\n"),
    );
    let entry = default(&image);
    assert_eq!(entry.title, "Debian, with Linux 6.1.0-9");
    assert_eq!(entry.source.path, "/boot/grub/grub.cfg");
}

/// Ubuntu's cloud images try without an initramfs first.
const UBUNTU: &str = r#"
if [ -s $prefix/grubenv ]; then
  load_env
fi
if [ "${initrdfail}" = 2 ]; then
   set initrdfail=
elif [ "${initrdfail}" = 1 ]; then
   set next_entry="${prev_entry}"
   set prev_entry=
   if [ "${next_entry}" ]; then
      set initrdfail=2
   fi
fi
set default="0"
if [ "${recordfail}" = 1 ] ; then set timeout=30; else set timeout=0; fi
function gfxmode {
	set gfxpayload="${1}"
	if [ "${1}" = "keep" ]; then
		set vt_handoff=vt.handoff=7
	else
		set vt_handoff=
	fi
}
if [ "${recordfail}" != 1 ]; then
  set linux_gfx_mode=keep
else
  set linux_gfx_mode=text
fi
export linux_gfx_mode
menuentry "Ubuntu" --class ubuntu --class os {
	recordfail
	gfxmode $linux_gfx_mode
	search --no-floppy --label --set=root root
	if [ "${initrdfail}" = 1 ]; then
	  linux	/boot/vmlinuz-6.8.0-31-generic root=PARTUUID=02020202-0202-0202-0202-020202020202 ro  console=tty1 console=ttyS0
	  initrd	/boot/microcode.cpio /boot/initrd.img-6.8.0-31-generic
	else
	  linux	/boot/vmlinuz-6.8.0-31-generic root=PARTUUID=02020202-0202-0202-0202-020202020202 ro  console=tty1 console=ttyS0 panic=-1
	fi
	initrdfail
}
"#;

#[test]
fn ubuntu_boots_with_an_initramfs_where_it_failed_without() {
    let tree = with_config(UBUNTU, "");
    let files = image(&[("/x", b"")], &tree).boot_files().unwrap();
    assert_eq!((files.kernel, files.initramfs), (b"k31".to_vec(), None));
    assert_eq!(
        files.command_line,
        "root=PARTUUID=02020202-0202-0202-0202-020202020202 ro console=tty1 console=ttyS0 panic=-1"
    );
    let tree = with_config(UBUNTU, "initrdfail=1\n");
    let files = image(&[("/x", b"")], &tree).boot_files().unwrap();
    // Each part begins at a multiple of four.
    assert_eq!(files.initramfs.unwrap(), b"ucode\0\0\0i31");
}

/// A configuration in openSUSE's shape, with variables on the kernel's line.
const SUSE: &str = r#"
set btrfs_relative_path="y"
export btrfs_relative_path
if [ -f ${config_directory}/grubenv ]; then
  load_env -f ${config_directory}/grubenv
elif [ -s $prefix/grubenv ]; then
  load_env
fi
if [ "${env_block}" ] ; then
  set env_block="(${root})${env_block}"
  load_env -f "${env_block}"
fi
if [ "${next_entry}" ] ; then
   set default="${next_entry}"
else
   set default="${saved_entry}"
fi
if [ -z "$boot_once" ]; then menuentry_id_option="--id"; fi
menuentry 'openSUSE Leap 15.6' --class opensuse --class os $menuentry_id_option 'suse-simple' {
	load_video
	set gfxpayload=keep
	echo 'Loading Linux ...'
	linux /boot/vmlinuz-6.8.0-31-generic root=/dev/vda2  ${extra_cmdline} "dyndbg=file a.c +p" quiet
	initrd /boot/initrd.img-6.8.0-31-generic
}
"#;

#[test]
fn variables_on_the_line_of_the_kernel_are_split_at_blanks() {
    let tree = with_config(
        SUSE,
        "extra_cmdline=splash=silent mitigations=auto\nsaved_entry=suse-simple\n",
    );
    let files = image(&[("/x", b"")], &tree).boot_files().unwrap();
    assert_eq!(
        files.command_line,
        "root=/dev/vda2 splash=silent mitigations=auto \"dyndbg=file a.c +p\" quiet"
    );
}

#[test]
fn a_kernel_on_another_disk_is_named() {
    let config =
        "menuentry 'LVM' {\n set root='lvm/vg-root'\n linux /vmlinuz root=/dev/vg/root\n}\n";
    let tree: &Tree<'_> = &[("/boot/grub/grub.cfg", config.as_bytes())];
    let image = image(&[("/x", b"")], tree);
    let entry = &image.entries()[0];
    assert_eq!(
        entry.trouble.as_deref(),
        Some("/vmlinuz is not on this disk")
    );
    let error = image.boot_files().unwrap_err();
    assert!(matches!(error, BootError::Nothing(_)));
    assert!(error.to_string().contains("give --kernel"), "{error}");
    let error = image.load(entry, crate::Limits::default()).unwrap_err();
    assert!(matches!(error, BootError::NotOnTheDisk(_)), "{error}");
}

#[test]
fn scripts_that_never_end_are_ended() {
    let doubled = "set a=xxxxxxxx\n".to_owned() + &"set a=$a$a$a$a\n".repeat(2000);
    let nested = "if true; then ".repeat(500);
    let menus = "submenu x {".repeat(30) + "menuentry y { linux /boot/vmlinuz-6.1.0-9-amd64 }";
    let many = "menuentry y { linux /boot/vmlinuz-6.1.0-9-amd64 }\n".repeat(400);
    for (script, trouble) in [
        ("while true; do set a=1; done", Some("too many commands")),
        ("while ; do ; done", Some("too many commands")),
        ("until false; do true; done", Some("too many commands")),
        ("function f { f; f; }\nf", Some("nested too deeply")),
        ("configfile /boot/grub/grub.cfg", Some("too many files")),
        ("menuentry 'a", Some("line 1")),
        (&nested, Some("line 1")),
        (&doubled, None),
        (&menus, None),
        (&many, Some("menu is too long")),
        ("}", Some("line 1")),
        ("for i in a b; do set x$i=1; done; menuentry z {", None),
    ] {
        let tree = with_config(script, "");
        let image = image(&[("/x", b"")], &tree);
        let found = image
            .troubles()
            .first()
            .map(String::as_str)
            .unwrap_or_default();
        assert!(
            found.contains(trouble.unwrap_or_default()),
            "{script:.40}: {found}"
        );
        // The kernels are found by their names then.
        image.boot_files().unwrap();
    }
}

#[test]
fn an_environment_block_is_pairs() {
    let block = "# GRUB Environment Block\nsaved_entry=a\\\\b\nkernelopts=root=x ro\n####";
    let found = environment(block);
    assert_eq!(found["saved_entry"], "a\\b");
    assert_eq!(found["kernelopts"], "root=x ro");
    assert_eq!(found.len(), 2);
}

//! Writes the seeds of the fuzz target `image_boot` into a folder.
//!
//! A seed is a small image without its zeros: for each 64 bytes that have something, their number
//! (16 bits, little-endian) and the bytes. `cargo run -p exotrace-image --example fuzz-seeds --
//! devices/fuzz/seeds/image_boot`
#![allow(clippy::unwrap_used)]

#[path = "../src/test_images.rs"]
#[allow(dead_code)]
mod test_images;

use test_images::{ESP, LINUX, Part, Tree, ext, fat, gpt, mbr, program};

/// The bytes of a record, without its number.
const PIECE: usize = 64;

const GRUB: &str = "load_env\nif [ \"${next_entry}\" ]; then set default=\"${next_entry}\"; else set default=\"${saved_entry}\"; fi\n\
menuentry_id_option=--id\nfunction f { set x=${1}$x; }\nfor i in a b; do f $i; done\n\
menuentry 'one' $menuentry_id_option 'a' {\n search --no-floppy --fs-uuid --set=root 11111111-2222-3333-4444-555555555555\n linux /vmlinuz-1 root=x ${x}\n initrd /initrd.img-1 /initrd.img-1\n}\n\
submenu 'more' --id m { menuentry 'two' { linux /vmlinuz-1 \"a b\"\n } }\n";

fn main() {
    let folder = std::env::args().nth(1).unwrap();
    let folder = std::path::Path::new(&folder);
    std::fs::create_dir_all(folder).unwrap();
    for (name, image) in images() {
        std::fs::write(folder.join(name), pieces(&image)).unwrap();
    }
}

fn images() -> Vec<(&'static str, Vec<u8>)> {
    let entry = "title One\nversion 1\nsort-key x\nlinux /vmlinuz-1\ninitrd /initrd.img-1\noptions $kernelopts ro\n";
    let linux: &Tree<'_> = &[
        ("/vmlinuz-1", b"kernel"),
        ("/initrd.img-1", b"initramfs"),
        ("/vmlinuz@", b"vmlinuz-1"),
        ("/boot@", b"."),
        ("/grub/grub.cfg", GRUB.as_bytes()),
        ("/grub/grubenv", b"saved_entry=m>0\nkernelopts=quiet\n"),
    ];
    let unified = program(&[
        (".linux", b"kernel"),
        (".initrd", b"initramfs"),
        (".cmdline", b"ro"),
        (".osrel", b"ID=x\n"),
    ]);
    let loader: &Tree<'_> = &[
        ("/loader/loader.conf", b"default one*\n"),
        ("/loader/entries/one+2-1.conf", entry.as_bytes()),
        ("/EFI/Linux/long-name-of-two.efi", &unified),
        ("/vmlinuz-1", b"kernel"),
        ("/initrd.img-1", b"initramfs"),
    ];
    // Without checksums, which no change of bytes would meet.
    let plain = [
        "-t",
        "ext4",
        "-b",
        "1024",
        "-N",
        "32",
        "-O",
        "^metadata_csum,^has_journal,^resize_inode",
    ];
    let old = [
        "-t",
        "ext2",
        "-b",
        "1024",
        "-N",
        "32",
        "-O",
        "^resize_inode",
    ];
    let esp = fat(12, 256, loader);
    let root = ext(1, &plain, linux);
    let mut records = mbr(8, &[(0x83, 8, 2048), (0x05, 2056, 520)]);
    records.extend(&root);
    records.extend(mbr(1, &[(0x83, 1, 512)]));
    records.extend(&esp);
    vec![
        ("ext4-grub", root.clone()),
        ("ext2-grub", ext(1, &old, linux)),
        ("fat-entries", esp.clone()),
        ("gpt", gpt(&[Part::new(ESP, esp), Part::new(LINUX, root)])),
        ("mbr", records),
    ]
}

/// Returns an image without its zeros.
fn pieces(image: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    for (number, piece) in image.chunks(PIECE).enumerate() {
        if piece.iter().any(|byte| *byte != 0) {
            out.extend(u16::try_from(number).unwrap().to_le_bytes());
            out.extend(piece);
            out.extend(std::iter::repeat_n(0, PIECE - piece.len()));
        }
    }
    out
}

//! `run --image`: an image boots by its own boot loader's configuration, with a network, and stays
//! as it is below an overlay. Made by `mke2fs` and `qemu-img` (Debian's packages e2fsprogs and
//! qemu-utils). `cli/tests/machines.rs` has the library's way.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use support::command::{World, words};
use support::shell::{BOOT_LIMIT, COMMAND_LIMIT, full_initramfs};
use support::{Kernel, host};

const GRUB: &str = r#"set default="1"
menuentry 'Other' { linux /boot/none }
menuentry 'Traced' {
    linux /boot/vmlinuz quiet console=ttyS0 place=image
    initrd /boot/initrd.img
}
"#;

fn run(program: &str, words: &[&str], folder: &Path) {
    let ran = Command::new(program)
        .args(words)
        .current_dir(folder)
        .output();
    let ran = ran.unwrap_or_else(|e| panic!("{program}: {e}"));
    assert!(ran.status.success(), "{program}: {ran:?}");
}

/// Makes `image.qcow2`, which boots the kernel with a PCI bus.
fn make_image(world: &World) -> PathBuf {
    let boot = world.path("root/boot/grub");
    fs::create_dir_all(&boot).unwrap_or_else(|e| panic!("{e}"));
    let write = |name: &str, bytes: &[u8]| {
        let path = world.path(name);
        fs::write(&path, bytes).unwrap_or_else(|e| panic!("{name}: {e}"));
    };
    let kernel = fs::read(&Kernel::pc().path).unwrap_or_else(|e| panic!("{e}"));
    write("root/boot/vmlinuz", &kernel);
    write("root/boot/initrd.img", &full_initramfs());
    write("root/boot/grub/grub.cfg", GRUB.as_bytes());
    let folder = world.path("");
    run(
        "mke2fs",
        &["-q", "-t", "ext4", "-d", "root", "raw", "192M"],
        &folder,
    );
    run(
        "qemu-img",
        &["convert", "-O", "qcow2", "raw", "image.qcow2"],
        &folder,
    );
    world.path("image.qcow2")
}

#[test]
fn an_image_boots_by_its_boot_loaders_configuration() {
    let _ = host!();
    let world = World::new();
    let image = make_image(&world);
    let before = fs::read(&image).unwrap_or_else(|e| panic!("{e}"));

    // Less memory than an image's guest usually has: an interpreted kernel takes ten seconds to
    // make a gigabyte ready.
    let mut line =
        words("run --name web --memory 96M --overlay --net user --append more=words --image");
    line.push(image.clone().into());
    let mut machine = world.start(line);
    machine.wait_until("prompt", BOOT_LIMIT, |stdout, _| stdout.contains("# "));
    machine.type_line("stty -echo; cat /proc/cmdline /sys/class/net/eth0/mtu; dd if=/dev/zero of=/dev/vda bs=1M count=1 conv=fsync 2> /dev/null; echo done=$((6*7))");
    machine.wait_until("answer", COMMAND_LIMIT, |stdout, _| {
        stdout.contains("done=42")
    });
    // A program that reacts to the power button.
    machine.type_line(
        "exec 3< /dev/input/event0; echo armed=$((5*5)); dd bs=24 count=1 <&3 > /dev/null 2>&1 && busybox poweroff -f",
    );
    machine.wait_until("answer", COMMAND_LIMIT, |stdout, _| {
        stdout.contains("armed=25")
    });
    let stopped = world.run(words("stop --gracefully"), COMMAND_LIMIT);
    assert_eq!(stopped.status, 0, "{stopped:?}");
    let ended = machine.finish(COMMAND_LIMIT);
    assert_eq!(ended.status, 0, "{ended:?}");
    for chosen in [
        "entry of GRUB \"Traced\"",
        "kernel /boot/vmlinuz",
        "96 MiB, 1 vCPU",
        "guest powered off",
    ] {
        assert!(ended.stderr.contains(chosen), "{chosen}: {ended:?}");
    }
    let line = "quiet console=ttyS0 place=image more=words\n65520\n";
    assert!(ended.stdout.replace('\r', "").contains(line), "{ended:?}");
    assert!(
        before == fs::read(&image).unwrap_or_else(|e| panic!("{e}")),
        "the image has changed"
    );
}

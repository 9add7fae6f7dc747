//! scratch
use std::time::{Duration, Instant};
use support::linux::{BootOptions, Linux};
use support::shell;

fn main() {
    let Some(host) = support::host() else { return };
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let cpus: u8 = arguments[0].parse().unwrap();
    let words = arguments[1..].join(" ");
    let initramfs = shell::full_initramfs();
    let start = Instant::now();
    let linux = Linux::boot(host, &BootOptions { initramfs: Some(&initramfs), command_line: &format!("console=ttyS0 panic=-1 reboot=k {words}"), cpus, protocol: None });
    eprintln!("{}", linux.command_line);
    let mut seen = 0;
    while start.elapsed() < Duration::from_secs(120) {
        std::thread::sleep(Duration::from_secs(2));
        let text = linux.serial.since(seen);
        seen += text.len();
        eprint!("{text}");
        eprintln!("[{:.0?} {:?} {:?}]", start.elapsed(), linux.places(), linux.machine.wait(Some(Duration::ZERO)));
        if linux.serial.since(0).contains("exotrace: ready") { break }
    }
    eprintln!("{:?}", linux.machine.stats());
}

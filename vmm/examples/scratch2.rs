//! scratch2
use std::time::{Duration, Instant};
use std::path::Path;
fn main() {
    let t0 = Instant::now();
    let kvm = vmm::host::open(Path::new("/dev/kvm")).unwrap();
    let args: Vec<String> = std::env::args().collect();
    let p = vmm::host::HostProfile::load_or_probe(&kvm, &guest::micro::elf(), Path::new("/tmp/w/host.json")).unwrap();
    eprintln!("profile {:?}", t0.elapsed());
    match args[1].as_str() {
        "save" => {
            let kernel = vmm::boot::KernelFile::open(Path::new(&args[3])).unwrap();
            let initrd = args.get(5).map(|f| std::fs::read(f).unwrap());
            let mut m = vmm::machine::boot(&kvm, &p, vmm::MachineConfig {
                memory: 128 << 20, cpus: 1, kernel: &kernel, initramfs: initrd.as_deref(), command_line: &args[4], add_words: true, protocol: None, pit: true,
                serial: devices::ConsoleOutput::write_through(std::io::stdout()) }).unwrap();
            m.machine.start();
            while m.machine.stats().syscalls_repaired == 0 { std::thread::sleep(Duration::from_millis(10)); if let Some(e)=m.machine.wait(Some(Duration::ZERO)) { panic!("{e}"); } }
            eprintln!("first syscall {:?}", t0.elapsed());
            std::thread::sleep(Duration::from_secs(args[6].parse().unwrap()));
            let pa = m.machine.pause();
            let t = Instant::now();
            vmm::snapshot::save(&kvm, &m.machine, &pa, &vmm::snapshot::SnapshotInfo { command_line: m.command_line.clone(), kernel: None }, Path::new(&args[2])).unwrap();
            eprintln!("saved in {:?}", t.elapsed());
        }
        _ => {
            let mut r = vmm::snapshot::restore(&kvm, &p, Path::new(&args[2]), devices::ConsoleOutput::write_through(std::io::stdout())).unwrap();
            eprintln!("restored {:?}", t0.elapsed());
            r.machine.start();
            if let Some(s) = args.get(3) { std::thread::sleep(Duration::from_millis(100)); r.machine.serial_input(format!("{s}\n").as_bytes()); }
            let end = r.machine.wait(Some(Duration::from_secs(10)));
            eprintln!("{:?} {:?} {:?}", end.map(|e| e.to_string()), t0.elapsed(), r.machine.stats());
        }
    }
}

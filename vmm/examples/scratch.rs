//! scratch
use std::time::Instant;
fn main() {
    let kvm = vmm::host::open(std::path::Path::new("/dev/kvm")).unwrap();
    let t = Instant::now();
    let args: Vec<String> = std::env::args().collect();
    let p = vmm::host::HostProfile::probe(&kvm, &guest::micro::elf()).unwrap();
    eprintln!("{p:#?} in {:?}", t.elapsed());
    let t = Instant::now();
    let micro = args[1] == "micro";
    let kernel = if micro { vmm::boot::KernelFile::from_bytes(guest::micro::elf(), std::path::Path::new("micro")).unwrap() } else { vmm::boot::KernelFile::open(std::path::Path::new(&args[1])).unwrap() };
    let initrd = args.get(3).map(|f| std::fs::read(f).unwrap());
    let mut m = vmm::machine::boot(&kvm, &p, vmm::MachineConfig {
        memory: 64 << 20, cpus: 1, kernel: &kernel, initramfs: initrd.as_deref(), command_line: &args[2], add_words: !micro, protocol: None, pit: !micro,
        serial: devices::ConsoleOutput::write_through(std::io::stdout()),
    }).unwrap();
    eprintln!("cmdline {} built {:?}", m.command_line, t.elapsed());
    m.machine.start();
    let end = loop {
        if let Some(e) = m.machine.wait(Some(std::time::Duration::from_secs(5))) { break e; }
        let p = m.machine.pause();
        eprintln!("{:?} rip {:x?} {:?}", t.elapsed(), m.machine.registers(&p, 0).map(|r| r.regs.rip), m.machine.stats());
    };
    eprintln!("{end} {:?} {:?}", t.elapsed(), m.machine.stats());
    if let vmm::RunEnd::TripleFault { registers, .. } = &end { eprintln!("{registers}"); }
}

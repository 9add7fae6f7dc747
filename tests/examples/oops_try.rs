//! scratch
use introspect::x86_64::paging::AddressSpace;
use introspect::x86_64::virtual_memory::read_u64;
use introspect::{Gpa, Gva};
use probes::function_trace::{FunctionTracer, TraceOptions};
use std::time::{Duration, Instant};
use support::{Kernel, Shell};
fn main() {
    let Some(host) = support::host() else { return };
    let mode = std::env::args().nth(1).unwrap_or_default();
    let symbols = Kernel::small().image.symbols().unwrap();
    let start = Instant::now();
    let mut n = 0;
    let mut bad = 0;
    while start.elapsed() < Duration::from_secs(240) && bad < 3 {
        n += 1;
        let shell = Shell::new(host);
        let linux = &shell.linux;
        let view = (mode != "noview").then(|| linux.view());
        shell.type_line("fsload 0 1 &");
        let t = Instant::now();
        let names: Vec<String> = [
            "vfs_read",
            "vfs_write",
            "vfs_open",
            "vfs_rename",
            "vfs_unlink",
            "schedule",
        ]
        .map(String::from)
        .into();
        while t.elapsed() < Duration::from_millis(700) {
            if mode == "trace" {
                let mut tracer = FunctionTracer::arm(
                    &linux.machine,
                    view.as_ref().unwrap(),
                    &names,
                    &TraceOptions::default(),
                )
                .unwrap();
                std::thread::sleep(Duration::from_millis(2));
                tracer.stop(&linux.machine);
            } else if mode == "pause" || mode == "noview" {
                let p = linux.machine.pause();
                drop(p);
                std::thread::sleep(Duration::from_millis(1));
            } else {
                std::thread::sleep(Duration::from_millis(50));
            }
        }
        let printed = linux.serial.since(0);
        if printed.contains("PANIC")
            || printed.contains("panic")
            || linux.machine.wait(Some(Duration::ZERO)).is_some()
        {
            bad += 1;
            linux.machine.wait(Some(Duration::from_secs(5)));
            let printed = linux.serial.since(0);
            println!(
                "{mode} run {n} bad after {:?}\n{}",
                t.elapsed(),
                printed.lines().take(14).collect::<Vec<_>>().join("\n")
            );
            let field = |name: &str| {
                printed
                    .split_once(name)
                    .and_then(|(_, r)| u64::from_str_radix(r.trim_start().get(..16)?, 16).ok())
                    .unwrap_or(0)
            };
            let space = AddressSpace {
                root: Gpa(field("CR3:")),
                levels: 4,
            };
            let rsp = field("RSP: 0018:");
            println!("rsp {rsp:x} cr3 {:?}", space);
            let words: Vec<u64> = (0..4000u64)
                .map_while(|i| read_u64(linux.machine.ram(), space, Gva(rsp + 8 * i)).ok())
                .collect();
            for (i, w) in words.windows(6).enumerate() {
                if [0x10, 0x33, 0x23].contains(&w[2])
                    && [0x18, 0x2b, 0].contains(&w[5])
                    && w[3] < 1 << 22
                {
                    let name = symbols
                        .resolve(w[1])
                        .map_or(String::new(), |(s, o)| format!("{}+{o:#x}", s.name));
                    println!(
                        "{:x}: error/orig {:x} rip {:x} {name} cs {:x} flags {:x} rsp {:x} ss {:x}",
                        rsp + 8 * i as u64,
                        w[0],
                        w[1],
                        w[2],
                        w[3],
                        w[4],
                        w[5]
                    );
                }
            }
            println!("{} words", words.len());
            println!("{:?}", linux.machine.stats());
        }
    }
    println!("{mode}: {bad} bad of {n}");
}

//! What a hit costs, against a bare exit measured in the same run: `cargo bench-hits`.
//!
//! Every figure is the CPU time of a whole loop in the micro guest, less the same loop without hits, per round, the
//! least of several runs: what else the machine does costs waiting, not CPU time. The
//! bare exit from kernel mode is an `out` to a port without a device, less the interpreted or native cost of the
//! loop around it; the bare exit from user mode is a write to memory that is not there.

use std::error::Error;
use std::path::Path;
use std::time::Duration;

use introspect::Gva;
use introspect::kernel::image::KernelImage;
use probes::function_trace::{FunctionTracer, TraceOptions};
use probes::kernel_view::KernelView;
use support::Host;
use vmm::boot::KernelFile;
use vmm::machine::{Machine, MachineConfig, SerialOutput, boot};
use vmm::trap::{StoppedCpu, Trap, TrapSink};

/// Rounds of each loop.
const ROUNDS: u64 = 20_000;
/// Each figure is the least of this many runs.
const RUNS: usize = 7;
/// Instructions of one round of the micro guest's `calls`, the called function's included, and of `out`: see
/// guest/src/micro.
const CALLS_INSTRUCTIONS: f64 = 13.0;
const OUT_INSTRUCTIONS: f64 = 3.0;

/// Takes a trap and does nothing.
struct Nothing;

impl TrapSink for Nothing {
    fn trap(&self, _: &Trap, _: &StoppedCpu<'_>) {}
}

struct Bench {
    host: &'static Host,
    kernel: KernelFile,
}

type Prepare<'a> = &'a dyn Fn(&Machine) -> Result<(), Box<dyn Error>>;

impl Bench {
    fn machine(&self, program: &str) -> Result<Machine, Box<dyn Error>> {
        let config = MachineConfig {
            memory: 4 << 20,
            cpus: 1,
            kernel: &self.kernel,
            initramfs: None,
            command_line: program,
            add_words: false,
            protocol: None,
            pit: false,
            serial: SerialOutput::null(),
        };
        Ok(boot(&self.host.kvm, &self.host.profile, config)?.machine)
    }

    /// Least CPU time of one round of a program, prepared by `prepare` before its first instruction.
    fn round(&self, program: &str, prepare: Prepare<'_>) -> Result<f64, Box<dyn Error>> {
        let least = |program: &str| -> Result<Duration, Box<dyn Error>> {
            let mut least = Duration::MAX;
            for _ in 0..RUNS {
                least = least.min(self.time(program, prepare)?);
            }
            Ok(least)
        };
        let short = least(&format!("{program} 1"))?;
        let long = least(&format!("{program} {ROUNDS}"))?;
        Ok(long.saturating_sub(short).as_nanos() as f64 / (ROUNDS - 1) as f64)
    }

    fn time(&self, program: &str, prepare: Prepare<'_>) -> Result<Duration, Box<dyn Error>> {
        let mut machine = self.machine(program)?;
        prepare(&machine)?;
        let start = cpu_time();
        machine.start();
        let end = machine
            .wait(Some(Duration::from_secs(60)))
            .ok_or("not done in a minute")?;
        if !end.is_orderly() {
            return Err(format!("{program}: {end}").into());
        }
        Ok(cpu_time().saturating_sub(start))
    }

    fn symbol(&self, name: &str) -> Result<Gva, Box<dyn Error>> {
        let symbols = KernelImage::parse(self.kernel.shared_elf())?.symbols()?;
        Ok(Gva(symbols.address_of(name).ok_or("no such symbol")?))
    }
}

/// CPU time of this process so far, in user mode and in the kernel, KVM's part included.
fn cpu_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(
        time.tv_sec.unsigned_abs(),
        u32::try_from(time.tv_nsec).unwrap_or(0),
    )
}

fn main() -> Result<(), Box<dyn Error>> {
    let Some(host) = support::host() else {
        return Ok(());
    };
    let kernel = KernelFile::from_bytes(guest::micro::elf(), Path::new("(micro guest)"))?;
    let bench = Bench { host, kernel };
    let leaf = bench.symbol("micro_leaf")?;

    let plain: Prepare<'_> = &|_| Ok(());
    let trapped: Prepare<'_> = &|machine| {
        let paused = machine.pause();
        let space = machine
            .registers(&paused, 0)
            .ok_or("no vCPU")?
            .address_space();
        machine.set_sink(Some(Box::new(Nothing)));
        machine.traps().arm_kernel(leaf, space)?;
        Ok(())
    };
    let traced = |pids: Vec<u64>| {
        let image = KernelImage::parse(bench.kernel.shared_elf());
        move |machine: &Machine| -> Result<(), Box<dyn Error>> {
            let image = image.as_ref().map_err(|e| e.to_string())?;
            let paused = machine.pause();
            let space = machine
                .registers(&paused, 0)
                .ok_or("no vCPU")?
                .address_space();
            let view = KernelView::without_types(image.symbols()?, space);
            let options = TraceOptions {
                pids: pids.clone(),
                ..TraceOptions::default()
            };
            let functions = ["micro_leaf".to_string()];
            // The rings fill up and drop: that is part of what is measured.
            std::mem::forget(FunctionTracer::arm(machine, &view, &functions, &options)?);
            Ok(())
        }
    };

    let calls = bench.round("calls", plain)?;
    let instruction = calls / CALLS_INSTRUCTIONS;
    let exit = bench.round("out", plain)? - OUT_INSTRUCTIONS * instruction;
    let user_exit = bench.round("usermmio", plain)?;
    println!("bare exit, kernel mode  {exit:9.0} ns   1.00");
    let show = |name: &str, cost: f64| {
        println!(
            "{name:<23} {cost:9.0} ns   {:.2} x a bare exit",
            cost / exit
        )
    };
    show("kernel trap", bench.round("calls", trapped)? - calls);
    show(
        "  filtered out by pid",
        bench.round("calls", &traced(vec![1]))? - calls,
    );
    show(
        "  entry and return",
        bench.round("calls", &traced(Vec::new()))? - calls,
    );
    show("bare exit, user mode", user_exit);
    println!(
        "(an instruction of guest kernel mode takes {instruction:.0} ns here; {ROUNDS} rounds, least of {RUNS} runs)"
    );
    Ok(())
}

//! The present cost of a hit and of a bare exit on this host, measured with the micro guest, whose
//! every instruction is known.
//!
//! Each program runs with two counts. The difference of the times over the difference of the counts
//! excludes the cost of starting and ending a machine. A traced call has two hits, entry and
//! return.

use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use probes::engine::{Capture, Engine, EngineLimits, Filter, RingSize};
use probes::name::ProbePattern;
use probes::provider;
use vmm::boot::KernelFile;
use vmm::machine::{MachineConfig, SerialOutput};

use crate::guest_kernel::GuestKernel;
use crate::host::Host;
use crate::report::Failure;

/// The counts of the two runs.
const FEW: u32 = 500;
const MANY: u32 = 2500;
/// The function called by the program `calls`.
const LEAF: &str = "micro_leaf";
/// The size of the guest's memory in bytes.
const MEMORY: u64 = 2 << 20;
/// The time limit of a run, which takes some tens of milliseconds.
const PATIENCE: Duration = Duration::from_secs(20);
/// The number of measurements of which the best is used: other work on the host only ever adds.
const TIMES: usize = 5;

/// The measured costs.
#[derive(Debug, Clone, Copy)]
pub struct Cost {
    /// The cost of one recorded event: the exit, the capture, and passing the trapped instruction.
    hit: Duration,
    /// The cost of one port write and back.
    exit: Duration,
}

impl fmt::Display for Cost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let us = |d: Duration| d.as_secs_f64() * 1e6;
        write!(
            f,
            "{:.1} us a hit, {:.1} us a bare exit",
            us(self.hit),
            us(self.exit)
        )
    }
}

/// Measures this host.
///
/// # Errors
/// If the micro guest does not run.
pub fn measure(host: &Host) -> Result<Cost, Failure> {
    let (kernel, file) = GuestKernel::from_bytes(::guest::micro::elf(), Path::new("micro guest"))?;
    let kernel = (&kernel, &file);
    let exit = per_count(host, kernel, "out", false)?;
    let call = per_count(host, kernel, "calls", false)?;
    let traced = per_count(host, kernel, "calls", true)?;
    Ok(Cost {
        hit: traced.saturating_sub(call) / 2,
        exit,
    })
}

fn per_count(
    host: &Host,
    kernel: (&GuestKernel, &KernelFile),
    program: &str,
    traced: bool,
) -> Result<Duration, Failure> {
    let best = |count: u32| {
        let mut best = Duration::MAX;
        for _ in 0..TIMES {
            best = best.min(run(host, kernel, &format!("{program} {count}"), traced)?);
        }
        Ok::<_, Failure>(best)
    };
    Ok(best(MANY)?.saturating_sub(best(FEW)?) / (MANY - FEW))
}

/// Returns the time from the first instruction to the reset.
fn run(
    host: &Host,
    (kernel, file): (&GuestKernel, &KernelFile),
    command_line: &str,
    traced: bool,
) -> Result<Duration, Failure> {
    let config = MachineConfig {
        memory: MEMORY,
        cpus: 1,
        kernel: file,
        initramfs: None,
        command_line,
        add_words: false,
        protocol: None,
        pit: false,
        acpi: None,
        virtio: Default::default(),
        serial: SerialOutput::null(),
    };
    let mut machine = vmm::machine::boot(&host.kvm, &host.profile, config)?.machine;
    let tracing = match traced {
        false => None,
        true => {
            let view = kernel
                .locate(&machine, &machine.pause())?
                .ok_or_else(|| Failure::new("the micro guest has no symbols"))?;
            let view = Arc::new(view);
            let engine = Engine::new(machine.handle(), view.clone(), &EngineLimits::default());
            let mut session = engine.session(RingSize::default())?;
            // Entry and return.
            for probe in provider::kernel_probes(&view, &ProbePattern::parse(LEAF)?).probes {
                session.enable(&probe, Filter::default(), Capture::default())?;
            }
            Some(session)
        }
    };
    let start = Instant::now();
    machine.start();
    let end = machine.wait(Some(PATIENCE));
    let time = start.elapsed();
    drop(tracing);
    match end {
        Some(end) if end.is_orderly() => Ok(time),
        Some(end) => Err(Failure::new(format_args!(
            "micro guest ({command_line}): {end}"
        ))),
        None => Err(Failure::new(format_args!(
            "micro guest ({command_line}): no end after {PATIENCE:?}"
        ))),
    }
}

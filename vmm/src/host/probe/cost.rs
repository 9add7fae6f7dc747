//! The cost of exits and traps, timed in programs that do little else.

use std::time::Instant;

use kvm_bindings::KVM_GUESTDBG_USE_SW_BP;
use kvm_ioctls::{Kvm, SyncReg, VcpuExit};

use super::{Bench, KEYBOARD, MOST_EXITS, ProbeError, RESET_COMMAND, SERIAL, Stop};
use crate::vm::NameCall;

/// The number of exits that are timed for the cost of one.
const TIMED: u64 = 400;

/// Returns the median time from one exit to the next in nanoseconds, in a program that does little
/// else.
pub(super) fn exit_cost(kvm: &Kvm, image: &[u8], program: &str) -> Result<u64, ProbeError> {
    let mut bench = Bench::new(kvm, image, &format!("{program} {TIMED}"))?;
    let mut samples = Vec::new();
    let mut last: Option<Instant> = None;
    for _ in 0..MOST_EXITS {
        match bench.fd.run() {
            Ok(VcpuExit::IoOut(KEYBOARD, [RESET_COMMAND])) => break,
            Ok(VcpuExit::IoOut(SERIAL, _)) => last = None,
            Ok(VcpuExit::IoOut(..) | VcpuExit::MmioWrite(..)) => {
                let now = Instant::now();
                if let Some(before) = last.replace(now) {
                    samples.push((now - before).as_nanos() as u64);
                }
            }
            Ok(VcpuExit::IoIn(_, data) | VcpuExit::MmioRead(_, data)) => data.fill(0xff),
            Ok(other) => {
                let found = format!("{other:?}");
                return Err(bench.failed(program, &Stop::Other(found)));
            }
            Err(error) if error.errno() == libc::EINTR => {}
            Err(error) => return Err(bench.failed(program, &Stop::Other(error.to_string()))),
        }
    }
    let median = median(samples);
    median.ok_or_else(|| bench.failed(program, &Stop::Other("no exit seen".into())))
}

fn median(mut samples: Vec<u64>) -> Option<u64> {
    samples.sort_unstable();
    samples.get(samples.len() / 2).copied()
}

/// Returns the median time from one int3 to the next in nanoseconds, in a program that does little
/// else. RIP is moved past each, as a machine does it.
pub(super) fn trap_cost(
    kvm: &Kvm,
    image: &[u8],
    program: &str,
    sync_regs: bool,
) -> Result<u64, ProbeError> {
    let mut bench = Bench::new(kvm, image, &format!("{program} {TIMED}"))?;
    bench.debug(KVM_GUESTDBG_USE_SW_BP, None)?;
    if sync_regs {
        bench.fd.set_sync_valid_reg(SyncReg::Register);
    }
    let mut samples = Vec::new();
    let mut last: Option<Instant> = None;
    for _ in 0..TIMED {
        let stop = bench.run(&mut 0);
        if stop.int3().is_none() {
            break;
        }
        match sync_regs {
            true => {
                let regs = &mut bench.fd.sync_regs_mut().regs;
                regs.rip = regs.rip.wrapping_add(1);
                bench.fd.set_sync_dirty_reg(SyncReg::Register);
            }
            false => {
                let mut regs = bench.fd.get_regs().call("KVM_GET_REGS")?;
                regs.rip = regs.rip.wrapping_add(1);
                bench.fd.set_regs(&regs).call("KVM_SET_REGS")?;
            }
        }
        let now = Instant::now();
        if let Some(before) = last.replace(now) {
            samples.push((now - before).as_nanos() as u64);
        }
    }
    // Where the guest handles them itself, an exit of the same mode is as near as it gets.
    median(samples).map_or_else(|| exit_cost(kvm, image, "out"), Ok)
}

//! Measuring a host with the micro guest.
//!
//! The micro guest's command line selects a small program (`out`, `int3k`, `syscalls`, ...). Each
//! runs in a machine of its own without assists or traps, and the exits of KVM_RUN are examined
//! unchanged.

mod cost;

use std::path::Path;
use std::time::{Duration, Instant};

use introspect::{Gpa, Gva, PhysicalMemory};
use kvm_bindings::{
    KVM_GUESTDBG_ENABLE, KVM_GUESTDBG_SINGLESTEP, KVM_GUESTDBG_USE_HW_BP, KVM_GUESTDBG_USE_SW_BP,
    KVM_IRQCHIP_PIC_MASTER, kvm_guest_debug, kvm_irqchip, kvm_regs,
};
use kvm_ioctls::{Cap, IoEventAddress, Kvm, SyncReg, VcpuExit, VcpuFd, VmFd};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use self::cost::{exit_cost, trap_cost};
use super::{Breakpoint, FORMAT, HostProfile, Int3, KernelMode};
use crate::boot::entry;
use crate::boot::{self, BootConfig, BootError, KernelFile, KernelFileError};
use crate::host::cpuid;
use crate::memory::{GuestRam, PAGE_SIZE, RamError};
use crate::vm::{self, KvmError, NameCall};
use crate::x86_64::INT3;
use crate::x86_64::debug_exception::{DR6_STEP, VECTOR_BP, VECTOR_DB};
use crate::x86_64::watchpoint::{Access, Watchpoint};
use crate::x86_64::{msr, rflags};

/// The size in bytes of the RAM of a probe's machine.
const MEMORY: u64 = 4 << 20;
/// The number of exits after which a probe is abandoned.
const MOST_EXITS: usize = 200_000;
/// The time after which a hung program is ended. A probe's program needs milliseconds.
const LIMIT: Duration = Duration::from_secs(2);
const SERIAL: u16 = 0x3f8;
const KEYBOARD: u16 = 0x64;
const RESET_COMMAND: u8 = 0xfe;
/// The address at which the micro guest's `usermmio` writes 0, 1, 2 ...
const MICRO_MMIO: u64 = 0xd000_0000;
/// An interrupt input that a probe's machine does not use.
const FREE_PIN: u32 = 5;
/// The maximum time in which KVM must turn an event into an interrupt.
const INTERRUPT_LIMIT: Duration = Duration::from_secs(1);

/// The reason that a host cannot be measured.
#[derive(Debug, thiserror::Error)]
pub enum ProbeError {
    /// KVM refuses a call that every machine needs.
    #[error(transparent)]
    Kvm(#[from] KvmError),
    /// The memory cannot be created.
    #[error(transparent)]
    Ram(#[from] RamError),
    /// The micro guest is damaged.
    #[error(transparent)]
    Kernel(#[from] KernelFileError),
    /// The micro guest does not fit.
    #[error(transparent)]
    Boot(#[from] BootError),
    /// The micro guest does not run.
    #[error("the micro guest's program `{program}` does not run on this host: {found}")]
    Micro {
        /// The name of the program.
        program: String,
        /// The way it ended.
        found: String,
    },
    /// The micro guest lacks a function that the measurement needs.
    #[error("the micro guest has no symbol {0}")]
    Symbol(&'static str),
}

/// The way an observed program ended or stopped.
#[derive(Debug, Clone, PartialEq)]
enum Stop {
    /// The guest reset itself: the program is done.
    Done,
    /// KVM_EXIT_DEBUG with this exception at this address.
    Debug { exception: u32, pc: u64, dr6: u64 },
    /// An emulation failure at an instruction that starts with this byte.
    Failure { first: u8 },
    /// KVM_EXIT_SHUTDOWN: an exception that the guest could not deliver.
    TripleFault,
    /// Anything else, or the limit.
    Other(String),
}

impl Stop {
    /// Returns the way the host reports the guest's int3, if this is one.
    fn int3(&self) -> Option<Int3> {
        match self {
            Self::Debug {
                exception: VECTOR_BP,
                ..
            } => Some(Int3::DebugExit),
            Self::Failure { first: INT3 } => Some(Int3::EmulationFailure),
            _ => None,
        }
    }

    fn is_breakpoint_at(&self, address: u64) -> bool {
        matches!(
            self,
            Self::Debug { exception: VECTOR_DB, pc, dr6 } if *pc == address && dr6 & DR6_STEP == 0
        )
    }
}

/// A micro guest on a bare vCPU.
struct Bench {
    fd: VcpuFd,
    /// Keeps the machine alive.
    vm: VmFd,
    /// Mapped as long as the machine lives.
    ram: GuestRam,
    output: String,
    kernel: KernelFile,
}

impl Bench {
    fn new(kvm: &Kvm, image: &[u8], program: &str) -> Result<Self, ProbeError> {
        let kernel = KernelFile::from_bytes(image.to_vec(), Path::new("(micro guest)"))?;
        let ram = GuestRam::new(MEMORY)?;
        let config = BootConfig {
            kernel: &kernel,
            initramfs: None,
            command_line: program,
            cpus: 1,
            acpi: None,
            interrupts: 0,
            protocol: None,
            rng_seed: [0; 32],
        };
        let entry_point = boot::load(&ram, &config)?;
        let vm = vm::create(kvm)?;
        vm::furnish(&vm, &ram, false)?;
        let fd = vm.create_vcpu(0).call("KVM_CREATE_VCPU")?;
        let supported = kvm
            .get_supported_cpuid(kvm_bindings::KVM_MAX_CPUID_ENTRIES)
            .call("KVM_GET_SUPPORTED_CPUID")?;
        let shape = cpuid::Shape {
            vcpu: 0,
            cpus: 1,
            tsc_deadline: false,
        };
        let native = HostProfile::hardware_example();
        fd.set_cpuid2(&cpuid::shape(&supported, &native, shape))
            .call("KVM_SET_CPUID2")?;
        let sregs = fd.get_sregs().call("KVM_GET_SREGS")?;
        let (regs, sregs) = entry::prepare(&ram, entry_point, sregs).map_err(BootError::from)?;
        fd.set_sregs(&sregs).call("KVM_SET_SREGS")?;
        fd.set_regs(&regs).call("KVM_SET_REGS")?;
        Ok(Self {
            fd,
            vm,
            ram,
            output: String::new(),
            kernel,
        })
    }

    fn symbol(&self, name: &'static str) -> Result<u64, ProbeError> {
        use object::{Object, ObjectSymbol};
        let file = object::File::parse(self.kernel.elf()).map_err(|_| ProbeError::Symbol(name))?;
        let found = file
            .symbols()
            .find(|s| s.name() == Ok(name))
            .map(|s| s.address());
        found.ok_or(ProbeError::Symbol(name))
    }

    fn debug(&self, control: u32, breakpoint: Option<u64>) -> Result<(), KvmError> {
        let mut request = kvm_guest_debug {
            control: KVM_GUESTDBG_ENABLE | control,
            ..Default::default()
        };
        if let Some(address) = breakpoint {
            request.control |= KVM_GUESTDBG_USE_HW_BP;
            request.arch.debugreg[0] = address;
            request.arch.debugreg[7] = 0x400 | 2;
        }
        self.request(&request)
    }

    fn request(&self, request: &kvm_guest_debug) -> Result<(), KvmError> {
        self.fd.set_guest_debug(request).call("KVM_SET_GUEST_DEBUG")
    }

    /// Runs until an exit other than a device access. `exits` counts device accesses.
    fn run(&mut self, exits: &mut u64) -> Stop {
        let deadline = Instant::now() + LIMIT;
        for _ in 0..MOST_EXITS {
            if Instant::now() > deadline {
                return Stop::Other("not done in time".into());
            }
            match self.fd.run() {
                Ok(VcpuExit::IoOut(SERIAL, data)) => {
                    self.output.extend(data.iter().map(|b| char::from(*b)));
                }
                Ok(VcpuExit::IoOut(KEYBOARD, [RESET_COMMAND])) => return Stop::Done,
                Ok(VcpuExit::IoOut(..) | VcpuExit::MmioWrite(..)) => *exits += 1,
                Ok(VcpuExit::IoIn(_, data) | VcpuExit::MmioRead(_, data)) => data.fill(0xff),
                Ok(VcpuExit::Debug(arch)) => {
                    return Stop::Debug {
                        exception: arch.exception,
                        pc: arch.pc,
                        dr6: arch.dr6,
                    };
                }
                Ok(VcpuExit::InternalError) => {
                    return match crate::exit::internal_error(self.fd.get_kvm_run()) {
                        Ok(failure) => Stop::Failure {
                            first: failure.bytes().first().copied().unwrap_or(0),
                        },
                        Err(suberror) => Stop::Other(format!("KVM internal error {suberror}")),
                    };
                }
                Ok(VcpuExit::Shutdown) => return Stop::TripleFault,
                Ok(other) => return Stop::Other(format!("{other:?}")),
                Err(error) if error.errno() == libc::EINTR => {}
                Err(error) => return Stop::Other(error.to_string()),
            }
        }
        Stop::Other("too many exits".into())
    }

    /// Runs until the guest has printed a line. Returns `false` if it does not get there.
    fn runs_to_first_line(&mut self) -> bool {
        for _ in 0..MOST_EXITS {
            match self.fd.run() {
                Ok(VcpuExit::IoOut(SERIAL, b"\n")) => return true,
                Ok(VcpuExit::IoOut(KEYBOARD, [RESET_COMMAND])) => return false,
                Ok(VcpuExit::IoOut(..) | VcpuExit::MmioWrite(..)) => {}
                Ok(VcpuExit::IoIn(_, data) | VcpuExit::MmioRead(_, data)) => data.fill(0xff),
                Err(error) if error.errno() == libc::EINTR => {}
                Ok(_) | Err(_) => return false,
            }
        }
        false
    }

    fn pages(&self) -> Vec<Vec<u8>> {
        let page = |address| {
            let mut page = vec![0; PAGE_SIZE as usize];
            // All addresses are RAM, so the read cannot fail.
            let _ = self.ram.read_physical(Gpa(address), &mut page);
            page
        };
        (0..MEMORY).step_by(PAGE_SIZE as usize).map(page).collect()
    }

    /// Checks whether the guest itself counted `count`.
    fn counted(&self, count: u64) -> bool {
        self.output.contains(&format!("count {count}\n"))
    }
}

fn what_int3_does(kvm: &Kvm, image: &[u8], program: &str) -> Result<Int3, ProbeError> {
    let mut bench = Bench::new(kvm, image, program)?;
    bench.debug(KVM_GUESTDBG_USE_SW_BP, None)?;
    let stop = bench.run(&mut 0);
    match stop.int3() {
        Some(reported) => Ok(reported),
        None if stop == Stop::Done && bench.counted(1) => Ok(Int3::GuestHandler),
        None => Err(bench.failed(program, &stop)),
    }
}

impl Bench {
    fn failed(&self, program: &str, stop: &Stop) -> ProbeError {
        ProbeError::Micro {
            program: program.to_owned(),
            found: format!("{stop:?}, output {:?}", self.output),
        }
    }
}

/// Determines the effect of a breakpoint on the first instruction of `function`.
///
/// `program` must run the function only once, so that a second stop there belongs to the same call.
fn what_breakpoints_do(
    kvm: &Kvm,
    image: &[u8],
    program: &str,
    function: &'static str,
) -> Result<Breakpoint, ProbeError> {
    let mut bench = Bench::new(kvm, image, program)?;
    let address = bench.symbol(function)?;
    bench.debug(0, Some(address))?;
    if !bench.run(&mut 0).is_breakpoint_at(address) {
        return Ok(Breakpoint::Silent);
    }
    let regs = bench.fd.get_regs().call("KVM_GET_REGS")?;
    let resumed = kvm_regs {
        rflags: regs.rflags | rflags::RF,
        ..regs
    };
    bench.fd.set_regs(&resumed).call("KVM_SET_REGS")?;
    Ok(if bench.run(&mut 0).is_breakpoint_at(address) {
        Breakpoint::IgnoresResumeFlag
    } else {
        Breakpoint::Works
    })
}

/// A place at which a vCPU can be stopped, to be stepped from there.
struct Stand {
    /// The program that runs `function` once.
    calls: &'static str,
    /// The function at which a hardware breakpoint is tried first.
    function: &'static str,
    /// The program that runs an int3 of its own, for hosts without breakpoints in this mode.
    int3: &'static str,
}

const KERNEL: Stand = Stand {
    calls: "calls 1",
    function: "micro_leaf",
    int3: "int3k 1",
};
const USER: Stand = Stand {
    calls: "usercalls 1",
    function: "micro_user_leaf",
    int3: "int3u 1",
};

impl Stand {
    /// Returns a guest that has stopped in front of an instruction, and the address of that.
    ///
    /// Returns `None` if the host reports neither a breakpoint nor an int3 in this mode.
    fn reach(&self, kvm: &Kvm, image: &[u8]) -> Result<Option<(Bench, u64)>, ProbeError> {
        let mut bench = Bench::new(kvm, image, self.calls)?;
        let address = bench.symbol(self.function)?;
        bench.debug(0, Some(address))?;
        if bench.run(&mut 0).is_breakpoint_at(address) {
            return Ok(Some((bench, address)));
        }
        let mut bench = Bench::new(kvm, image, self.int3)?;
        bench.debug(KVM_GUESTDBG_USE_SW_BP, None)?;
        if bench.run(&mut 0).int3().is_none() {
            return Ok(None);
        }
        let mut regs = bench.fd.get_regs().call("KVM_GET_REGS")?;
        regs.rip = regs.rip.wrapping_add(1);
        bench.fd.set_regs(&regs).call("KVM_SET_REGS")?;
        Ok(Some((bench, regs.rip)))
    }

    /// Checks whether a step from there stops at the next instruction.
    fn steps(&self, kvm: &Kvm, image: &[u8]) -> Result<bool, ProbeError> {
        let Some((mut bench, address)) = self.reach(kvm, image)? else {
            return Ok(false);
        };
        bench.debug(KVM_GUESTDBG_SINGLESTEP, None)?;
        let stop = bench.run(&mut 0);
        Ok(
            matches!(stop, Stop::Debug { dr6, pc, .. } if dr6 & DR6_STEP != 0 && pc > address && pc < address + 16),
        )
    }
}

impl Stand {
    /// Checks whether a push, the function's first instruction, is reported by a watchpoint on its
    /// place in the stack.
    fn watches(&self, kvm: &Kvm, image: &[u8]) -> Result<bool, ProbeError> {
        let mut bench = Bench::new(kvm, image, self.calls)?;
        let address = bench.symbol(self.function)?;
        bench.debug(0, Some(address))?;
        if !bench.run(&mut 0).is_breakpoint_at(address) {
            return Ok(false);
        }
        let stack = bench.fd.get_regs().call("KVM_GET_REGS")?.rsp;
        let pushed = Gva(stack.wrapping_sub(8));
        let Ok(watchpoint) = Watchpoint::new(pushed, 8, Access::Write) else {
            return Ok(false);
        };
        let mut request = kvm_guest_debug {
            control: KVM_GUESTDBG_ENABLE | KVM_GUESTDBG_USE_HW_BP,
            ..Default::default()
        };
        request.arch.debugreg[0] = pushed.0;
        request.arch.debugreg[7] = 0x400 | watchpoint.control(0);
        bench.request(&request)?;
        let stop = bench.run(&mut 0);
        Ok(matches!(
            stop,
            Stop::Debug { exception: VECTOR_DB, pc, dr6 } if dr6 & 1 == 1 && pc > address && pc < address + 16
        ))
    }
}

fn does_user_syscall_work(kvm: &Kvm, image: &[u8]) -> Result<bool, ProbeError> {
    let mut bench = Bench::new(kvm, image, "syscalls 1")?;
    Ok(bench.run(&mut 0) == Stop::Done && bench.counted(1))
}

/// Checks whether a triple fault leaves the registers unchanged. KVM on AMD resets the vCPU first.
fn are_registers_kept(kvm: &Kvm, image: &[u8]) -> Result<bool, ProbeError> {
    let mut bench = Bench::new(kvm, image, "triple")?;
    let function = bench.symbol("micro_triple")?;
    let faulted = bench.run(&mut 0) == Stop::TripleFault;
    let rip = bench.fd.get_regs().call("KVM_GET_REGS")?.rip;
    Ok(faulted && (function..function + 16).contains(&rip))
}

/// Checks whether a guest's TSC continues from the value that is set.
///
/// A KVM that assumes the guest's rate to be slower than the CPU's sets an offset to a TSC of 0.
/// KVM then reads back the set value, but the guest reads that plus the host's.
fn is_tsc_settable(kvm: &Kvm, image: &[u8]) -> Result<bool, ProbeError> {
    let bench = Bench::new(kvm, image, "out 1")?;
    let far = 1u64 << 50;
    let set = bench.fd.set_msrs(&msr::list([(msr::TSC, far)])?);
    if set.ok() != Some(1) {
        return Ok(false);
    }
    let mut list = msr::list([(msr::TSC, 0)])?;
    bench.fd.get_msrs(&mut list).call("KVM_GET_MSRS")?;
    let now = list.as_slice().first().map_or(0, |e| e.data);
    Ok((far + 1..far + (1 << 40)).contains(&now))
}

/// Checks whether an event counts writes of one value, and only that one, instead of an exit.
fn do_writes_become_events(kvm: &Kvm, image: &[u8]) -> Result<bool, ProbeError> {
    let mut bench = Bench::new(kvm, image, "usermmio 4")?;
    let Ok(event) = EventFd::new(EFD_NONBLOCK) else {
        return Ok(false);
    };
    let address = IoEventAddress::Mmio(MICRO_MMIO);
    if bench.vm.register_ioevent(&event, &address, 2u32).is_err() {
        return Ok(false);
    }
    let mut exits = 0;
    let done = bench.run(&mut exits) == Stop::Done && bench.counted(4);
    Ok(done && exits == 3 && event.read().ok() == Some(1))
}

/// Checks whether an event becomes an interrupt. Nobody accepts it here, so the check reads the
/// controller's state.
fn do_events_become_interrupts(kvm: &Kvm, image: &[u8]) -> Result<bool, ProbeError> {
    let bench = Bench::new(kvm, image, "out 1")?;
    let Ok(event) = EventFd::new(EFD_NONBLOCK) else {
        return Ok(false);
    };
    if bench.vm.register_irqfd(&event, FREE_PIN).is_err() || event.write(1).is_err() {
        return Ok(false);
    }
    let deadline = Instant::now() + INTERRUPT_LIMIT;
    loop {
        let mut chip = kvm_irqchip {
            chip_id: KVM_IRQCHIP_PIC_MASTER,
            ..Default::default()
        };
        bench.vm.get_irqchip(&mut chip).call("KVM_GET_IRQCHIP")?;
        // SAFETY: all members of the union are plain integers, so any bytes are valid. The
        // requested chip is a PIC, so the kernel filled this member.
        if unsafe { chip.chip.pic }.irr & 1 << FREE_PIN != 0 {
            return Ok(true);
        }
        if Instant::now() > deadline {
            return Ok(false);
        }
        std::thread::sleep(Duration::from_micros(50));
    }
}

/// Checks whether KVM's log has every page that a guest writes, in kernel and in user mode.
///
/// The log begins when the guest has run a while, because its pages are then mapped for writing.
fn are_writes_logged(kvm: &Kvm, image: &[u8]) -> Result<bool, ProbeError> {
    for program in ["calls 20", "usercalls 20"] {
        let mut bench = Bench::new(kvm, image, program)?;
        if !bench.runs_to_first_line()
            || vm::log_written_pages(&bench.vm, &bench.ram, true).is_err()
        {
            return Ok(false);
        }
        let before = bench.pages();
        let stop = bench.run(&mut 0);
        if stop != Stop::Done {
            return Err(bench.failed(program, &stop));
        }
        let Ok(log) = vm::written_pages(&bench.vm, &bench.ram) else {
            return Ok(false);
        };
        let after = bench.pages();
        let changed = before.iter().zip(&after).zip(0u64..);
        let mut changed = changed
            .filter(|((before, after), _)| before != after)
            .map(|(_, number)| number * PAGE_SIZE)
            .peekable();
        if changed.peek().is_none() || !changed.all(|page| log.has(page)) {
            return Ok(false);
        }
    }
    Ok(true)
}

pub(super) fn measure(kvm: &Kvm, image: &[u8]) -> Result<HostProfile, ProbeError> {
    let int3_kernel = what_int3_does(kvm, image, "int3k 1")?;
    let kernel_mode = match int3_kernel {
        Int3::EmulationFailure => KernelMode::Interpreted,
        Int3::DebugExit | Int3::GuestHandler => KernelMode::Native,
    };
    let wanted = (SyncReg::Register as i32) | (SyncReg::SystemRegister as i32);
    let sync_regs = kvm.check_extension_int(Cap::SyncRegs) & wanted == wanted;
    let int3_user = what_int3_does(kvm, image, "int3u 1")?;
    let trap_kernel_ns = trap_cost(kvm, image, "int3k", sync_regs)?;
    Ok(HostProfile {
        format: FORMAT,
        host: super::host_identity(),
        cpu_flag: super::cpu_flag(),
        kernel_mode,
        sync_regs,
        int3_kernel,
        int3_user,
        breakpoint_kernel: what_breakpoints_do(kvm, image, KERNEL.calls, KERNEL.function)?,
        breakpoint_user: what_breakpoints_do(kvm, image, USER.calls, USER.function)?,
        watch_kernel: KERNEL.watches(kvm, image)?,
        watch_user: USER.watches(kvm, image)?,
        step_kernel: KERNEL.steps(kvm, image)?,
        step_user: USER.steps(kvm, image)?,
        user_syscall: does_user_syscall_work(kvm, image)?,
        triple_fault_keeps_registers: are_registers_kept(kvm, image)?,
        tsc_settable: is_tsc_settable(kvm, image)?,
        tsc_deadline: kvm.check_extension(Cap::TscDeadlineTimer),
        ioeventfd: do_writes_become_events(kvm, image)?,
        irqfd: do_events_become_interrupts(kvm, image)?,
        write_log: are_writes_logged(kvm, image)?,
        recommended_vcpus: kvm.get_nr_vcpus(),
        exit_kernel_ns: exit_cost(kvm, image, "out")?,
        exit_user_ns: exit_cost(kvm, image, "usermmio")?,
        trap_kernel_ns,
        trap_user_ns: match int3_user {
            Int3::GuestHandler => trap_kernel_ns,
            _ => trap_cost(kvm, image, "int3u", sync_regs)?,
        },
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::vcpu::recorded::{DEBUG_EXITS, FAILED_INT3, Met};

    #[test]
    fn recorded_exits_are_told_apart() {
        for (host, met, arch) in DEBUG_EXITS {
            let stop = Stop::Debug {
                exception: arch.exception,
                pc: arch.pc,
                dr6: arch.dr6,
            };
            let int3 = (met == Met::Int3).then_some(Int3::DebugExit);
            assert_eq!(stop.int3(), int3, "{host}: {met:?}");
            assert!(!stop.is_breakpoint_at(arch.pc + 1), "{host}: {met:?}");
            let there = stop.is_breakpoint_at(arch.pc);
            assert_eq!(there, met == Met::Breakpoint, "{host}: {met:?}");
        }
        let first = FAILED_INT3.3[0];
        let failed = Stop::Failure { first };
        assert_eq!(failed.int3(), Some(Int3::EmulationFailure));
    }

    /// Tests with a function that is never run, in place of a host without breakpoints in kernel
    /// mode.
    #[test]
    fn stepping_is_measured_where_no_breakpoint_fires() {
        let Some(kvm) = crate::host::test_kvm() else {
            return;
        };
        let image = guest::micro::elf();
        let silent = Stand {
            function: USER.function,
            ..KERNEL
        };
        let breakpoint = what_breakpoints_do(&kvm, &image, silent.calls, silent.function);
        assert_eq!(breakpoint.unwrap(), Breakpoint::Silent);
        assert!(silent.steps(&kvm, &image).unwrap());
    }
}

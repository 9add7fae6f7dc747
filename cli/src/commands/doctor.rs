//! The command `exotrace doctor`: this host's KVM and confinement as measured, and the consequences
//! for the user.

use std::io::{self, Write};

use serde::Serialize;
use vmm::host::{Breakpoint, HostProfile, Int3, KernelMode};

use crate::args;
use crate::confinement::{EVERY_THREAD, Kind, Walls};
use crate::host::{Host, KVM};
use crate::report::{Failure, ToOutput};

/// A line of the table.
struct Row {
    what: &'static str,
    found: String,
    consequence: &'static str,
}

fn row(what: &'static str, found: &str, consequence: &'static str) -> Row {
    Row {
        what,
        found: found.into(),
        consequence,
    }
}

/// Runs the command.
pub fn doctor(args: &args::Doctor) -> Result<(), Failure> {
    if args.calls {
        return list_calls(&mut std::io::stdout().lock()).to_output();
    }
    let host = if args.fresh {
        Host::open_fresh()?
    } else {
        Host::open()?
    };
    let walls = Walls::of_host();
    let mut out = std::io::stdout().lock();
    if args.json {
        let profile = &host.profile;
        let json = serde_json::to_string_pretty(&Record { profile, walls })?;
        return writeln!(out, "{json}").to_output();
    }
    let mut rows = rows(&host.profile);
    rows.push(confinement(walls));
    let width = |of: fn(&Row) -> usize| rows.iter().map(of).max().unwrap_or_default();
    let (first, second) = (width(|r| r.what.len()), width(|r| r.found.len()));
    for Row {
        what,
        found,
        consequence,
    } in &rows
    {
        writeln!(out, "{what:first$}  {found:second$}  {consequence}").to_output()?;
    }
    Ok(())
}

/// The output of `--json`.
#[derive(Serialize)]
struct Record<'p> {
    #[serde(flatten)]
    profile: &'p HostProfile,
    #[serde(rename = "confinement")]
    walls: Walls,
}

/// Writes a line for each system call of each kind of thread.
fn list_calls(out: &mut impl Write) -> io::Result<()> {
    let every = EVERY_THREAD.iter().map(|call| ("every thread", call));
    let kinds = Kind::ALL.into_iter();
    let own = kinds.flat_map(|kind| kind.own().map(move |call| (kind.name(), call)));
    for (kind, call) in every.chain(own) {
        let only = match call.only {
            [] => "",
            _ => " (some)",
        };
        let name = format!("{}{only}", call.name());
        writeln!(out, "{kind:13}{name:24}{}", call.reason)?;
    }
    Ok(())
}

fn confinement(walls: Walls) -> Row {
    let (found, consequence) = match (walls.seccomp, walls.landlock) {
        (true, true) => (
            "seccomp and Landlock",
            "a machine's process makes the calls of `doctor --calls` and opens no files but its own",
        ),
        (true, false) => (
            "seccomp, no Landlock",
            "a machine's process makes the calls of `doctor --calls`; it opens the files that its user may",
        ),
        (false, true) => (
            "Landlock, no seccomp",
            "a machine's process opens no files but its own, and makes any system call",
        ),
        (false, false) => (
            "no seccomp, no Landlock",
            "a machine's process may do what its user may: run it as a user of its own",
        ),
    };
    row("confinement", found, consequence)
}

fn rows(profile: &HostProfile) -> Vec<Row> {
    vec![
        row(KVM, "usable", "machines can be run"),
        row(
            "host",
            &profile.host,
            "measured on this kernel and CPU, and kept until either changes",
        ),
        kernel_mode(profile),
        cpu_flag(profile),
        sync_regs(profile),
        int3_kernel(profile),
        int3_user(profile),
        breakpoint(
            "hardware breakpoints in the kernel",
            profile.breakpoint_kernel,
        ),
        breakpoint("hardware breakpoints in programs", profile.breakpoint_user),
        watchpoint("watchpoints in the kernel", profile.watch_kernel),
        watchpoint("watchpoints in programs", profile.watch_user),
        step("single-step in the kernel", profile.step_kernel),
        step("single-step in programs", profile.step_user),
        match profile.user_syscall {
            true => row("system calls of programs", "work", "nothing to do"),
            false => row(
                "system calls of programs",
                "arrive as page faults",
                "each is turned into the kernel entry it should have been, at the cost of an exit",
            ),
        },
        match profile.triple_fault_keeps_registers {
            true => row(
                "registers at a triple fault",
                "kept",
                "the place of the fault is reported",
            ),
            false => row(
                "registers at a triple fault",
                "reset by KVM",
                "a triple fault is reported without its place",
            ),
        },
        match profile.tsc_settable {
            true => row(
                "guest's time stamp counter",
                "can be set",
                "a restored guest's clock goes on where it stopped",
            ),
            false => row(
                "guest's time stamp counter",
                "is the host's",
                "a guest's counter jumps by the time between snapshot and restore; its kvmclock does not",
            ),
        },
        virtio_events(profile),
        match profile.write_log {
            true => row(
                "pages that a guest writes",
                "logged by KVM",
                "a machine is saved while its guest runs: it is paused for some milliseconds",
            ),
            false => row(
                "pages that a guest writes",
                "not logged",
                "a guest is paused for as long as its memory is written to a snapshot",
            ),
        },
        row(
            "virtual CPUs",
            &format!("{} recommended", profile.recommended_vcpus),
            "give --cpus no more than that for speed; up to 4 work",
        ),
        row(
            "one exit from kernel mode",
            &microseconds(profile.exit_kernel_ns),
            "each access of the guest's kernel to a device costs this",
        ),
        row(
            "one exit from user mode",
            &microseconds(profile.exit_user_ns),
            "each access of a program to a device costs this",
        ),
        row(
            "one trap in the kernel",
            &microseconds(profile.trap_kernel_ns),
            "a traced kernel function costs little more than this a hit",
        ),
        row(
            "one trap in programs",
            &microseconds(profile.trap_user_ns),
            "a traced function of a program costs little more than this a hit",
        ),
    ]
}

fn virtio_events(profile: &HostProfile) -> Row {
    let (found, consequence) = match (profile.ioeventfd, profile.irqfd) {
        (true, true) => (
            "by events, both ways",
            "a guest's disks and consoles cost no exits",
        ),
        (true, false) => (
            "by events to the device alone",
            "interrupts are raised by system calls: a little slower",
        ),
        (false, true) => (
            "by events from the device alone",
            "each call of a guest for its disks and consoles is an exit",
        ),
        (false, false) => (
            "by exits and system calls",
            "a guest's disks and consoles are slower, and work",
        ),
    };
    row("virtio devices are reached", found, consequence)
}

fn microseconds(ns: u64) -> String {
    format!("{}.{} us", ns / 1000, ns % 1000 / 100)
}

fn kernel_mode(profile: &HostProfile) -> Row {
    let (found, consequence) = match profile.kernel_mode {
        KernelMode::Native => ("runs on the CPU (hardware KVM)", "guests run at full speed"),
        KernelMode::Interpreted => (
            "interpreted (software KVM)",
            "guest kernels run at some million instructions a second, programs at full speed; a small kernel boots in 10 to 20 s; missing instructions are completed by exotrace",
        ),
    };
    row("guest kernel mode", found, consequence)
}

fn cpu_flag(profile: &HostProfile) -> Row {
    let (found, consequence) = match (&profile.cpu_flag, profile.kernel_mode) {
        (Some(flag), KernelMode::Native) => {
            (flag.as_str(), "the CPU's own virtualisation is in use")
        }
        (Some(flag), KernelMode::Interpreted) => (
            flag.as_str(),
            "the CPU could run guests itself; load kvm_intel or kvm_amd to use it",
        ),
        (None, KernelMode::Native) => ("hidden", "no harm: KVM was measured, not believed"),
        (None, KernelMode::Interpreted) => (
            "none",
            "this system sees no VMX or SVM; on bare metal turn it on in the firmware, in a virtual machine ask for nested virtualisation",
        ),
    };
    row("virtualisation flag of the CPU", found, consequence)
}

fn sync_regs(profile: &HostProfile) -> Row {
    let (found, consequence) = match profile.sync_regs {
        true => ("yes", "a hit needs no further system call"),
        false => (
            "no (KVM_CAP_SYNC_REGS)",
            "each hit costs two more system calls; a Linux of 4.17 or newer has it",
        ),
    };
    row("registers in shared memory", found, consequence)
}

fn int3_kernel(profile: &HostProfile) -> Row {
    let (found, consequence) = match profile.int3_kernel {
        Int3::DebugExit => ("reported", "kernel functions are traced with it"),
        Int3::EmulationFailure => (
            "reported as an emulation failure",
            "exotrace knows its own among them; kernel functions are traced with it",
        ),
        Int3::GuestHandler => (
            "not reported",
            "kernel functions cannot be traced on this host",
        ),
    };
    row("int3 in the kernel", found, consequence)
}

fn int3_user(profile: &HostProfile) -> Row {
    let (found, consequence) = match profile.int3_user {
        Int3::DebugExit => ("reported", "programs are traced with it"),
        Int3::EmulationFailure => (
            "reported as an emulation failure",
            "programs are traced with it",
        ),
        Int3::GuestHandler => (
            "not reported",
            "exotrace watches the guest's own #BP entry instead",
        ),
    };
    row("int3 in programs", found, consequence)
}

fn breakpoint(what: &'static str, found: Breakpoint) -> Row {
    let (found, consequence) = match found {
        Breakpoint::Works => ("work", "nothing to do"),
        Breakpoint::IgnoresResumeFlag => (
            "fire again on resume",
            "the trapped instruction is executed for the guest instead",
        ),
        Breakpoint::Silent => ("never fire", "only int3 is used there"),
    };
    row(what, found, consequence)
}

fn watchpoint(what: &'static str, works: bool) -> Row {
    let (found, consequence) = match works {
        true => ("work", "nothing to do"),
        false => ("never fire", "accesses to memory cannot be watched there"),
    };
    row(what, found, consequence)
}

fn step(what: &'static str, works: bool) -> Row {
    let (found, consequence) = match works {
        true => ("works", "any instruction can be trapped"),
        false => (
            "does nothing",
            "instructions that exotrace does not emulate cannot be trapped there",
        ),
    };
    row(what, found, consequence)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_line_says_what_follows() {
        for profile in [
            HostProfile::hardware_example(),
            HostProfile::svm_example(),
            HostProfile::interpreted_example(),
        ] {
            let mut rows = rows(&profile);
            assert_eq!(rows.len(), 23);
            for (seccomp, landlock) in [(true, true), (true, false), (false, true), (false, false)]
            {
                rows.push(confinement(Walls { seccomp, landlock }));
            }
            for row in rows {
                assert!(
                    !row.found.is_empty() && row.consequence.len() > 10,
                    "{}",
                    row.what
                );
            }
        }
    }

    #[test]
    fn a_host_that_hides_user_int3_says_what_is_done_instead() {
        let row = int3_user(&HostProfile::interpreted_example());
        assert_eq!(
            (row.what, row.found.as_str()),
            ("int3 in programs", "not reported")
        );
        assert_eq!(
            row.consequence,
            "exotrace watches the guest's own #BP entry instead"
        );
        assert_eq!(microseconds(8_749), "8.7 us");
    }
}

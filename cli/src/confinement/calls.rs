//! The system calls that a machine's process may make, each with the reason, by kind of thread.
//!
//! A thread may make the calls of [`EVERY_THREAD`] and of its kind ([`Kind::own`]). Any other call
//! fails with ENOSYS, or ends the process (`--confine strict`). That excludes starting programs,
//! other processes, network, mounts, kernel modules, BPF, io_uring, and new executable memory. The
//! numbers are x86-64's.

use std::ffi::c_long;

use libc::{
    SYS_accept4, SYS_bind, SYS_brk, SYS_clock_gettime, SYS_clock_nanosleep, SYS_clone, SYS_close,
    SYS_connect, SYS_copy_file_range, SYS_dup, SYS_epoll_create1, SYS_epoll_ctl, SYS_epoll_pwait,
    SYS_epoll_wait, SYS_eventfd2, SYS_exit, SYS_exit_group, SYS_faccessat, SYS_faccessat2,
    SYS_fallocate, SYS_fchmod, SYS_fcntl, SYS_fdatasync, SYS_flock, SYS_fstat, SYS_fsync,
    SYS_ftruncate, SYS_futex, SYS_getcwd, SYS_getdents64, SYS_getegid, SYS_geteuid,
    SYS_getpeername, SYS_getpid, SYS_getrandom, SYS_getsockname, SYS_getsockopt, SYS_gettid,
    SYS_getuid, SYS_ioctl, SYS_kill, SYS_listen, SYS_lseek, SYS_madvise, SYS_memfd_create,
    SYS_mkdir, SYS_mmap, SYS_mprotect, SYS_mremap, SYS_munmap, SYS_newfstatat, SYS_open,
    SYS_openat, SYS_openat2, SYS_poll, SYS_ppoll, SYS_prctl, SYS_pread64, SYS_preadv,
    SYS_prlimit64, SYS_pwrite64, SYS_pwritev, SYS_read, SYS_readlink, SYS_readlinkat, SYS_recvfrom,
    SYS_recvmsg, SYS_rename, SYS_renameat2, SYS_restart_syscall, SYS_rmdir, SYS_rseq,
    SYS_rt_sigaction, SYS_rt_sigprocmask, SYS_rt_sigreturn, SYS_sched_getaffinity, SYS_sched_yield,
    SYS_sendfile, SYS_sendmsg, SYS_sendto, SYS_set_robust_list, SYS_setsockopt, SYS_shutdown,
    SYS_sigaltstack, SYS_socket, SYS_socketpair, SYS_stat, SYS_statx, SYS_tgkill, SYS_unlink,
    SYS_unlinkat, SYS_utimensat, SYS_write, SYS_writev,
};

/// A kind of thread of a machine's process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A vCPU: executes the guest, and the actions of hits.
    Vcpu,
    /// Serves the virtio devices: disks, console, random numbers, network.
    Devices,
    /// The same for a guest with sockets to programs of the host.
    Vsock,
    /// Writes the guest's output.
    Writer,
    /// Reads the memory of a snapshot as it comes into use.
    Verify,
    /// Waits for signals, and ends the run.
    Signals,
    /// All others: clients, traces, scripts, ports, the terminal, and the end of the run.
    Service,
}

/// A permitted system call.
#[derive(Debug)]
pub struct Call {
    /// The number.
    pub number: c_long,
    /// The number's constant, `SYS_` and the name.
    constant: &'static str,
    /// The alternative conditions under which it is permitted; none: always.
    pub only: &'static [ArgumentRule],
    /// The need for it.
    pub reason: &'static str,
}

/// A condition on an argument of a system call: its bits in `mask` are `value`.
#[derive(Debug)]
pub struct ArgumentRule {
    /// The number of the argument, from 0.
    pub argument: u8,
    /// The bits that are compared.
    pub mask: u64,
    /// The value of these bits; [`OWN_PROCESS`] stands for this process's id.
    pub value: u64,
}

/// See [`ArgumentRule::value`].
pub const OWN_PROCESS: u64 = u64::MAX;

impl Call {
    /// Returns the call's name.
    pub fn name(&self) -> &'static str {
        let constant = self.constant;
        constant.strip_prefix("SYS_").unwrap_or(constant)
    }
}

impl Kind {
    /// All kinds.
    pub const ALL: [Self; 7] = [
        Self::Vcpu,
        Self::Devices,
        Self::Vsock,
        Self::Writer,
        Self::Verify,
        Self::Signals,
        Self::Service,
    ];

    /// Returns the kind's name for a list.
    pub fn name(self) -> &'static str {
        match self {
            Self::Vcpu => "vCPU",
            Self::Devices => "devices",
            Self::Vsock => "vsock",
            Self::Writer => "writer",
            Self::Verify => "verify",
            Self::Signals => "signals",
            Self::Service => "service",
        }
    }

    /// Returns the calls that threads of this kind may make besides those of [`EVERY_THREAD`].
    pub fn own(self) -> impl Iterator<Item = &'static Call> + Clone {
        let (own, more): (&[Call], &[Call]) = match self {
            Self::Vcpu => (VCPU, &[]),
            Self::Devices => (DEVICES, &[]),
            Self::Vsock => (DEVICES, VSOCK),
            Self::Writer => (&[], &[]),
            Self::Verify => (VERIFY, &[]),
            Self::Signals => (SIGNALS, &[]),
            Self::Service => (SERVICE, &[]),
        };
        own.iter().chain(more)
    }
}

/// A [`Call`] by its constant: always permitted, or only under one of some conditions.
macro_rules! call {
    ($number:ident, $reason:literal $(,)?) => {
        call!($number, &[], $reason)
    };
    ($number:ident, $only:expr, $reason:literal $(,)?) => {
        Call {
            number: $number,
            constant: stringify!($number),
            only: $only,
            reason: $reason,
        }
    };
}

const fn is(argument: u8, value: u64) -> ArgumentRule {
    ArgumentRule {
        argument,
        mask: u32::MAX as u64,
        value,
    }
}

/// Returns the rule for an ioctl's number: its lower 16 bits. The upper bits are the size and the
/// direction of its argument.
const fn ioctl(number: u64) -> ArgumentRule {
    ArgumentRule {
        argument: 1,
        mask: 0xffff,
        value: number,
    }
}

/// The condition that memory is not executable: PROT_EXEC is not among the protections.
const NOT_EXECUTABLE: &[ArgumentRule] = &[ArgumentRule {
    argument: 2,
    mask: libc::PROT_EXEC as u64,
    value: 0,
}];
/// The flags of clone(2) for a thread rather than a process.
const THREAD: u64 = (libc::CLONE_VM | libc::CLONE_THREAD | libc::CLONE_SIGHAND) as u64;

/// The calls that the language's runtime and the C library need on any thread.
pub const EVERY_THREAD: &[Call] = &[
    call!(
        SYS_write,
        "the log, events that wake other threads, output, and frames for a TAP interface"
    ),
    call!(SYS_writev, "the same in pieces"),
    call!(SYS_close, "descriptors that are dropped"),
    call!(SYS_futex, "locks, and waiting for other threads"),
    call!(SYS_mmap, NOT_EXECUTABLE, "memory, and stacks of threads"),
    call!(SYS_mprotect, NOT_EXECUTABLE, "memory, and guards of stacks"),
    call!(SYS_mremap, "memory that grows"),
    call!(SYS_munmap, "memory that is freed"),
    call!(SYS_madvise, "the same, and the stack of a thread that ends"),
    call!(SYS_brk, "memory"),
    call!(SYS_rt_sigprocmask, "a thread's start and end"),
    call!(SYS_rt_sigreturn, "the end of a signal's handler"),
    call!(SYS_rt_sigaction, "abort(3), and the end by a signal"),
    call!(
        SYS_sigaltstack,
        "the stack on which an overflow of another is reported"
    ),
    call!(SYS_set_robust_list, "a thread's start"),
    call!(SYS_rseq, "a thread's start"),
    call!(SYS_sched_getaffinity, "the bounds of a thread's stack"),
    call!(SYS_sched_yield, "locks"),
    call!(
        SYS_prctl,
        &[is(0, libc::PR_SET_NAME as u64)],
        "the name of a thread",
    ),
    call!(
        SYS_fcntl,
        &[
            is(1, libc::F_GETFD as u64),
            is(1, libc::F_DUPFD_CLOEXEC as u64),
            is(1, libc::F_GETFL as u64),
        ],
        "descriptors that are checked and shared",
    ),
    call!(SYS_gettid, "the name of a thread in a message"),
    call!(SYS_getpid, "signals for this process"),
    call!(
        SYS_tgkill,
        &[is(0, OWN_PROCESS)],
        "a vCPU that is to leave the guest; abort(3)",
    ),
    call!(
        SYS_clock_gettime,
        "time, where the vDSO does not provide it"
    ),
    call!(SYS_clock_nanosleep, "waiting"),
    call!(SYS_poll, "a message that standard error takes late"),
    call!(SYS_ppoll, "the same"),
    call!(SYS_restart_syscall, "a wait after SIGCONT"),
    call!(SYS_getrandom, "seeds of hash tables"),
    call!(SYS_exit, "a thread's end"),
    call!(SYS_exit_group, "the end"),
];

/// The calls of a vCPU, which has its registers and nothing else of KVM, and opens no file and no
/// socket.
const VCPU: &[Call] = &[call!(
    SYS_ioctl,
    &[
        // The one that every exit needs comes first: they are compared in this order.
        ioctl(0xae80), // KVM_RUN
        ioctl(0xae81), // KVM_GET_REGS
        ioctl(0xae82), // KVM_SET_REGS
        ioctl(0xae83), // KVM_GET_SREGS
        ioctl(0xae84), // KVM_SET_SREGS
        ioctl(0xae88), // KVM_GET_MSRS
        ioctl(0xae89), // KVM_SET_MSRS
        ioctl(0xae9b), // KVM_SET_GUEST_DEBUG
        ioctl(0xae9f), // KVM_GET_VCPU_EVENTS
        ioctl(0xaea0), // KVM_SET_VCPU_EVENTS
        ioctl(0xaea1), // KVM_GET_DEBUGREGS
        ioctl(0xaea2), // KVM_SET_DEBUGREGS, KVM_SET_TSC_KHZ
        ioctl(0xaea3), // KVM_GET_TSC_KHZ
        ioctl(0xaea4), // KVM_GET_XSAVE
        ioctl(0xaea5), // KVM_SET_XSAVE, KVM_SIGNAL_MSI
        ioctl(0xaecf), // KVM_GET_XSAVE2
        ioctl(0xaea6), // KVM_GET_XCRS
        ioctl(0xaea7), // KVM_SET_XCRS
        ioctl(0xae8e), // KVM_GET_LAPIC
        ioctl(0xae8f), // KVM_SET_LAPIC
        ioctl(0xae98), // KVM_GET_MP_STATE
        ioctl(0xae99), // KVM_SET_MP_STATE
        ioctl(0xae61), // KVM_IRQ_LINE
        ioctl(0xae67), // KVM_IRQ_LINE_STATUS
    ],
    "the guest's execution and registers; interrupts of devices that are reached by exits",
)];

/// The calls of the device thread, which reads and writes disk files and connections already open.
const DEVICES: &[Call] = &[
    call!(SYS_epoll_wait, "events of queues and backends"),
    call!(SYS_epoll_pwait, "the same"),
    call!(SYS_epoll_ctl, "the same"),
    call!(
        SYS_read,
        "events that have woken this thread, and frames for the guest"
    ),
    call!(SYS_sendmsg, "frames of the guest for a socket"),
    call!(SYS_pread64, "disks"),
    call!(SYS_pwrite64, "disks"),
    call!(SYS_preadv, "disks in qcow2"),
    call!(SYS_pwritev, "disks in qcow2"),
    call!(SYS_ftruncate, "qcow2 images that grow"),
    call!(SYS_fsync, "disks"),
    call!(SYS_fdatasync, "disks"),
    call!(SYS_fallocate, "blocks of disks that the guest discards"),
    call!(
        SYS_ioctl,
        &[ioctl(0xae61), ioctl(0xae67), ioctl(0xaea5)],
        "interrupts: of PCI devices (KVM_SIGNAL_MSI), and where events do not raise them (KVM_IRQ_LINE)",
    ),
    call!(
        SYS_ioctl,
        &[ioctl(libc::TUNSETOFFLOAD & 0xffff)],
        "offloads of a TAP interface, as the guest's driver chooses them",
    ),
];

/// The further calls of the device thread of a guest with sockets to programs of the host. Their
/// sockets are reached by name.
const VSOCK: &[Call] = &[
    call!(
        SYS_socket,
        &[is(0, libc::AF_UNIX as u64)],
        "connections of the guest to programs of the host",
    ),
    call!(SYS_connect, "the same"),
    call!(SYS_accept4, "connections of programs to the guest"),
    call!(SYS_shutdown, "connections of which one side ends"),
];

const VERIFY: &[Call] = &[
    call!(
        SYS_pread64,
        "the snapshot's memory, and which of it is in use"
    ),
    call!(SYS_lseek, "pieces of it that are holes"),
    call!(SYS_statx, "the file's length, where a hole ends it"),
    call!(SYS_fstat, "the same, of kernels without statx"),
];

const SIGNALS: &[Call] = &[
    call!(SYS_read, "the end of the pipe that the handler writes to"),
    call!(SYS_recvfrom, "the same"),
    call!(SYS_sendto, "the same"),
    call!(
        SYS_ioctl,
        TERMINAL,
        "the terminal, which the second signal leaves as it was",
    ),
    call!(SYS_kill, &[is(0, OWN_PROCESS)], "the end by the signal"),
];

/// The conditions for attributes and size of a terminal, and for isatty(3).
const TERMINAL: &[ArgumentRule] = &[
    ioctl(libc::TCGETS),
    ioctl(libc::TCSETS),
    ioctl(libc::TCSETSW),
    ioctl(libc::TCSETSF),
    ioctl(libc::TIOCGWINSZ),
];

/// All calls but those that only the start needs. Landlock limits the files that they reach.
const SERVICE: &[Call] = &[
    call!(
        SYS_ioctl,
        &[
            // KVM's: interrupts, the state in a snapshot, and the log of dirty pages for it.
            ArgumentRule {
                argument: 1,
                mask: 0xff00,
                value: 0xae00,
            },
            ioctl(libc::FIONBIO),
            ioctl(libc::FIONREAD),
        ],
        "KVM's interrupts and state; sockets that do not block",
    ),
    call!(SYS_ioctl, TERMINAL, "the terminal"),
    call!(
        SYS_clone,
        &[ArgumentRule {
            argument: 0,
            mask: THREAD,
            value: THREAD,
        }],
        "threads for clients. clone3(2) fails, since its flags cannot be inspected, and the C library takes this one",
    ),
    call!(
        SYS_socket,
        &[is(0, libc::AF_UNIX as u64)],
        "sockets in the run directory",
    ),
    call!(
        SYS_socketpair,
        &[is(0, libc::AF_UNIX as u64)],
        "threads that wake each other",
    ),
    call!(SYS_bind, "sockets in the run directory"),
    call!(SYS_listen, "the same"),
    call!(SYS_connect, "the device dt(4) for a guest's port"),
    call!(SYS_accept4, "clients"),
    call!(SYS_shutdown, "clients"),
    call!(SYS_setsockopt, "limits of time for clients"),
    call!(SYS_getsockopt, "a client's user"),
    call!(SYS_getsockname, "clients"),
    call!(SYS_getpeername, "clients"),
    call!(SYS_sendto, "clients"),
    call!(SYS_sendmsg, "clients, and descriptors for them"),
    call!(SYS_recvfrom, "clients"),
    call!(SYS_recvmsg, "clients, and descriptors of theirs"),
    call!(SYS_read, "clients, the terminal, files"),
    call!(SYS_pread64, "files"),
    call!(SYS_pwrite64, "snapshots"),
    call!(SYS_preadv, "disks in qcow2, as they are saved and closed"),
    call!(SYS_pwritev, "the same"),
    call!(SYS_copy_file_range, "overlays of disks in snapshots"),
    call!(SYS_sendfile, "the same, between file systems"),
    call!(SYS_lseek, "files"),
    call!(SYS_ftruncate, "files and shared memory that are made"),
    call!(SYS_fallocate, "snapshots"),
    call!(SYS_fsync, "snapshots"),
    call!(SYS_fdatasync, "snapshots"),
    call!(SYS_flock, "the lock in the run directory"),
    call!(SYS_dup, "descriptors that are shared"),
    call!(
        SYS_fcntl,
        &[
            is(1, libc::F_SETFL as u64),
            is(1, libc::F_SETFD as u64),
            is(1, libc::F_ADD_SEALS as u64),
            is(1, libc::F_GET_SEALS as u64),
        ],
        "sockets that do not block; shared memory that is sealed",
    ),
    call!(SYS_memfd_create, "objects of dt(4) for its clients"),
    call!(SYS_eventfd2, "threads that wake each other"),
    call!(SYS_epoll_create1, "the terminal"),
    call!(SYS_epoll_ctl, "the terminal"),
    call!(SYS_epoll_wait, "the terminal"),
    call!(SYS_epoll_pwait, "the terminal"),
    call!(SYS_open, "files that Landlock leaves"),
    call!(SYS_openat, "files that Landlock leaves"),
    call!(SYS_openat2, "files of --symfs, which are not left by links"),
    call!(SYS_stat, "files"),
    call!(SYS_fstat, "files"),
    call!(SYS_newfstatat, "files"),
    call!(SYS_statx, "files"),
    call!(SYS_faccessat, "files"),
    call!(SYS_faccessat2, "files"),
    call!(SYS_readlink, "files of --symfs"),
    call!(SYS_readlinkat, "files of --symfs"),
    call!(SYS_getdents64, "the zones of time, and the run directory"),
    call!(SYS_getcwd, "names of files"),
    call!(SYS_fchmod, "files that are their owner's alone"),
    call!(SYS_mkdir, "the run directory"),
    call!(SYS_rename, "sockets that appear whole"),
    call!(SYS_renameat2, "sockets that appear whole"),
    call!(SYS_unlink, "the run directory at the end"),
    call!(SYS_unlinkat, "the run directory at the end"),
    call!(SYS_rmdir, "the run directory at the end"),
    call!(SYS_utimensat, "reports"),
    call!(SYS_getuid, "a client's user"),
    call!(SYS_geteuid, "a client's user"),
    call!(SYS_getegid, "a client's user"),
    call!(
        SYS_prlimit64,
        &[is(2, 0)],
        "the size of a thread's stack; no limit is set",
    ),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_call_is_listed_once_for_a_kind_with_a_reason() {
        for kind in Kind::ALL {
            let listed = || EVERY_THREAD.iter().chain(kind.own());
            for call in listed() {
                assert!(!call.reason.is_empty());
                let same = listed().filter(|other| other.number == call.number);
                // The same call under further conditions is joined; one that is always permitted
                // needs none.
                assert!(
                    same.clone().count() == 1 || same.clone().all(|call| !call.only.is_empty()),
                    "{}",
                    call.number
                );
            }
        }
    }
}

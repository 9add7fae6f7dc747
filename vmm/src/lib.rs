//! The KVM machine: host probing, guest memory, boot, vCPUs, traps, pause, snapshot and restore.
//!
//! The caller brings a kernel, a place for serial output and a [`TrapSink`]; this crate turns a
//! stock `/dev/kvm` into a guest that can be stopped at any instruction. It knows
//! nothing of probes. All decisions about the host follow from one record, [`host::HostProfile`],
//! measured and never assumed.
//!
//! All `unsafe` of the project is in this crate.

pub mod assist;
pub mod boot;
mod clock;
mod exit;
mod hex;
pub mod host;
pub mod lookaside;
pub mod machine;
pub mod memory;
#[cfg(feature = "test-utils")]
pub mod rehearsal;
pub mod sharded_map;
pub mod snapshot;
pub mod speculation;
mod tape;
pub mod trap;
mod vcpu;
mod vm;
pub mod walks;
mod x86_64;

pub use clock::host_tsc;
pub use machine::{Machine, MachineConfig, RunEnd};
pub use tape::{Recording, Replay, ReplayEnd};
pub use vcpu::{StoppedVcpu, TrapSink, VcpuRegisters};
pub use vm::KvmError;
#[cfg(feature = "test-utils")]
pub use x86_64::emulate;

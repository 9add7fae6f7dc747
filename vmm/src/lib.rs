//! The KVM machine: boot, vCPUs, traps, pause, snapshot, host assists.

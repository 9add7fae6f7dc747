//! The tests of the whole system, one program: a module for each part of what its users see.
//!
//! One program, so that it is linked once, reads each kernel once, and keeps all CPUs busy to its
//! end: a guest that is waited for leaves its CPU to another test. A module's tests run by its
//! name: `cargo test -p exotrace-tests --test system -- ptrace::`. Other tools choose by module
//! too: `cargo kernels --test ptrace`, `cargo host svm --tests -- ptrace`.

mod boot;
mod budget;
mod command;
mod demo;
mod disk_images;
mod dt;
mod examples;
mod expect;
mod exports;
mod gdb;
mod guest_patches;
mod guest_patches_branches;
mod guest_patches_midway;
mod guest_ports;
mod guest_uprobes;
mod image_boot;
mod inspection;
mod moments;
mod new_modules;
mod panic;
mod perfetto;
mod ports;
mod ptrace;
mod ptrace_busy;
mod ptrace_deadline;
mod qemu_guests;
mod read_events;
mod ready_scripts;
mod rich_kernel;
mod saved_guests;
mod script_command;
mod script_counts;
mod scripts;
mod second_opinion;
mod shell;
mod stored_files;
mod trace;
mod trace_device;
mod tracepoint_fields;
mod tracepoints;
mod usdt;
mod user_text;
mod user_text_copies;
mod user_text_disk;
mod user_text_hidden;
mod user_text_states;
mod virtio;
mod virtio_net;
mod virtio_vsock;

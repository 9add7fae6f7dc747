//! A small kernel for tests of stack walks: text, a task with its stack, and a CPU with its
//! interrupt and exception stacks.
#![allow(clippy::unwrap_used)]

use std::ops::{Deref, DerefMut};

use super::frames::{Found, Stack};
use super::kernel::{KernelUnwinder, Method};
use super::orc::OrcTable;
use super::orc_versions::OrcFormat;
use crate::kernel::btf::Btf;
use crate::kernel::symbols::Symbols;
use crate::kernel::test_kernel::{self, BASE, Member, WORD, all_symbols, types};
use crate::x86_64::{CpuState, GeneralRegisters};
use crate::{Gva, PausedMemory};

pub(super) const TEXT: u64 = 0xffff_ffff_8100_0000;
pub(super) const MODULE: u64 = 0xffff_ffff_c000_0000;
const IPS: u64 = TEXT + 0x3000;
const ENTRIES: u64 = TEXT + 0x3400;
pub(super) const TASK: u64 = BASE + 0x100;
const PER_CPU: u64 = BASE + 0x1000;
const EXCEPTIONS: u64 = 0xffff_fe00_0000_7000;

/// Ends of stacks. Tests address words by their distance from them.
pub(super) const TASK_STACK: u64 = 0xffff_c900_0001_4000;
pub(super) const IRQ_STACK: u64 = 0xffff_c900_0002_4000;
pub(super) const NMI_STACK: u64 = EXCEPTIONS + 0x2000;
/// The address of the registers of the entry from user mode.
pub(super) const ENTRY: u64 = TASK_STACK - 168;

/// The functions by offset in the text.
pub(super) const FUNCTIONS: [(&str, u64); 13] = [
    ("_stext", 0),
    ("__schedule", 0x100),
    ("work", 0x200),
    ("do_syscall", 0x300),
    ("entry", 0x400),
    ("asm_irq", 0x500),
    ("irq_handler", 0x600),
    ("ret_from_fork", 0x700),
    ("asm_nmi", 0x800),
    ("arch_rethook_trampoline", 0x900),
    ("error_entry", 0xa00),
    ("__x86_indirect_thunk_array", 0xb00),
    ("_etext", 0x1000),
];

/// The kernel's memory, and the number of ORC records in it.
pub(super) struct TestKernel {
    kernel: test_kernel::TestKernel,
    records: u64,
}

impl Deref for TestKernel {
    type Target = test_kernel::TestKernel;
    fn deref(&self) -> &Self::Target {
        &self.kernel
    }
}

impl DerefMut for TestKernel {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.kernel
    }
}

impl TestKernel {
    pub(super) fn new() -> Self {
        let mut kernel = Self {
            kernel: test_kernel::TestKernel::default(),
            records: 0,
        };
        for (start, pages, offset) in [
            (TEXT, 4, 0x8_0000),
            (MODULE, 1, 0x8_8000),
            (TASK_STACK - 0x4000, 4, 0xa_0000),
            (IRQ_STACK - 0x4000, 4, 0xb_0000),
            (EXCEPTIONS, 2, 0xc_0000),
        ] {
            kernel.map(start, pages, offset);
        }
        kernel.word(TASK, TASK_STACK - 0x4000);
        kernel.word(PER_CPU + 8, IRQ_STACK - 8);
        kernel.word(PER_CPU + 16, EXCEPTIONS);
        kernel
    }

    pub(super) fn word(&mut self, at: u64, value: u64) {
        self.words(at, &[value]);
    }

    /// Writes a `pt_regs` with these values. Each other register holds its own index.
    pub(super) fn registers(&mut self, at: u64, rip: u64, cs: u64, rsp: u64, rbp: u64) {
        for index in 0..21 {
            self.word(at + index * 8, index);
        }
        for (index, value) in [(16, rip), (17, cs), (19, rsp), (4, rbp)] {
            self.word(at + index * 8, value);
        }
    }

    /// Writes the frame that a task leaves at `sp` when it is switched away from.
    pub(super) fn inactive(&mut self, sp: u64, bp: u64, return_address: u64) {
        self.word(TASK + 16, sp);
        self.words(sp, &[15, 14, 13, 12, 11, bp, return_address]);
    }

    /// Adds a record of Linux 6.1 for code from `start` on: distances, bases (SP, BP), type (4: end
    /// of stack).
    pub(super) fn orc(&mut self, start: u64, sp: (u8, i16), bp: (u8, i16), kind: u8) {
        let at = IPS + self.records * 4;
        let distance = start.wrapping_sub(at) as u32;
        self.put(at, distance.to_le_bytes());
        let mut record = Vec::from(sp.1.to_le_bytes());
        record.extend(bp.1.to_le_bytes());
        record.extend([sp.0 | bp.0 << 4, kind]);
        let entry = ENTRIES + self.records * 6;
        self.put(entry, &record);
        self.records += 1;
    }

    pub(super) fn symbols(&self) -> Symbols {
        let functions = FUNCTIONS.map(|(name, offset)| (name, TEXT + offset, false));
        let others = [
            ("__sched_text_start", TEXT + 0x100, false),
            ("__sched_text_end", TEXT + 0x200, false),
            ("__start_orc_unwind_ip", IPS, false),
            ("__stop_orc_unwind_ip", IPS + self.records * 4, false),
            ("__start_orc_unwind", ENTRIES, false),
            ("__stop_orc_unwind", ENTRIES + self.records * 6, false),
            ("hardirq_stack_ptr", 8, true),
            ("cea_exception_stacks", 16, true),
        ];
        let all = functions.into_iter().chain(others);
        let all = all.map(|(name, address, absolute)| (name, address, b'T', absolute));
        all_symbols(all, Some(TEXT + 0x4000))
    }

    pub(super) fn types(&self) -> Btf {
        types(&[
            ("thread_struct", &[("sp", 8, WORD)]),
            ("llist_head", &[("first", 0, WORD)]),
            ("llist_node", &[("next", 0, WORD)]),
            (
                "task_struct",
                &[
                    ("stack", 0, WORD),
                    ("thread", 8, Member::Of("thread_struct")),
                    ("rethooks", 24, Member::Of("llist_head")),
                ],
            ),
            (
                "rethook_node",
                &[
                    ("llist", 0, Member::Of("llist_node")),
                    ("ret_addr", 8, WORD),
                    ("frame", 16, WORD),
                ],
            ),
            (
                "cea_exception_stacks",
                &[("NMI_stack", 0, Member::Bytes(8192))],
            ),
        ])
    }

    pub(super) fn unwinder(&self, orc: bool) -> KernelUnwinder {
        let symbols = self.symbols();
        let format = OrcFormat::of(None, Some("Linux version 6.1.0")).unwrap();
        let method = match orc {
            true => Method::Orc(OrcTable::of_kernel(&symbols, format).unwrap()),
            false => Method::FramePointers,
        };
        KernelUnwinder::new(&self.types(), &symbols, method).unwrap()
    }

    /// Returns the state of the task's CPU, in the kernel.
    pub(super) fn cpu(&self, rip: u64, rsp: u64, rbp: u64) -> CpuState {
        CpuState {
            general: GeneralRegisters {
                rip,
                rsp,
                rbp,
                ..GeneralRegisters::default()
            },
            cs: 0x10,
            gs_base: PER_CPU,
            ..CpuState::default()
        }
    }
}

/// Walks the stack of the task that runs on a CPU with these RIP, RSP and RBP.
pub(super) fn running(
    kernel: &TestKernel,
    unwinder: &KernelUnwinder,
    [rip, rsp, rbp]: [u64; 3],
) -> Stack {
    let paused = PausedMemory::new(&kernel.memory);
    let cpu = kernel.cpu(rip, rsp, rbp);
    unwinder.running(paused.view(kernel.space), &cpu, Gva(TASK))
}

/// Walks the stack of the sleeping task.
pub(super) fn sleeping(kernel: &TestKernel, unwinder: &KernelUnwinder) -> Stack {
    let paused = PausedMemory::new(&kernel.memory);
    unwinder.sleeping(paused.view(kernel.space), Gva(TASK))
}

/// Returns each frame's offset in the text, and how it was found.
pub(super) fn frames(stack: &Stack) -> Vec<(u64, Found)> {
    let frames = stack.frames.iter();
    frames
        .map(|frame| (frame.address.0.wrapping_sub(TEXT), frame.found))
        .collect()
}

/// The frames of a task asleep in a system call: `__schedule`, `work`, `do_syscall`, `entry`.
pub(super) const SYSTEM_CALL: [(u64, Found); 4] = [
    (0x150, Found::Return),
    (0x250, Found::Return),
    (0x350, Found::Return),
    (0x450, Found::Return),
];

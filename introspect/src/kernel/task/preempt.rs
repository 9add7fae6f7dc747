//! The kernel's nesting counter of a CPU: whether it runs a task, or an interrupt's handler.

/// The layout of a kernel's nesting counter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PreemptForm {
    /// An `int`: device interrupts from bit 16 on, non-maskable ones from bit 20 on.
    #[default]
    Int,
    /// An `unsigned long`, since Linux 7.3: a count of interrupt disables precedes the interrupt
    /// bits, which are therefore 8 bits higher.
    Long,
}

/// The kernel's nesting counter of one CPU (include/linux/preempt.h), with the bits of
/// [`PreemptForm::Int`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PreemptCount(u32);

impl PreemptCount {
    /// Makes it from the low 32 bits of the kernel's counter.
    #[must_use]
    pub fn of(word: u32, form: PreemptForm) -> Self {
        match form {
            PreemptForm::Int => Self(word),
            PreemptForm::Long => Self(word & 0xffff | word >> 8 & 0x00ff_0000),
        }
    }

    /// Checks whether the CPU is in a handler of a non-maskable interrupt. Debug exceptions and
    /// breakpoints count as such.
    #[must_use]
    pub fn in_nmi(self) -> bool {
        self.0 & 0x00f0_0000 != 0
    }

    /// Checks whether the CPU is in a handler of a device interrupt.
    #[must_use]
    pub fn in_hard_interrupt(self) -> bool {
        self.0 & 0x000f_0000 != 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_preemption_counter_tells_contexts_apart() {
        use PreemptForm::{Int, Long};
        for (form, count, expected) in [
            (Int, 0x8000_0303, (false, false)),
            (Int, 0x0001_0000, (false, true)),
            (Int, 0x0011_0001, (true, true)),
            (Long, 0x0003_0303, (false, false)),
            (Long, 0x0101_0000, (false, true)),
            (Long, 0x1100_0001, (true, true)),
        ] {
            let count = PreemptCount::of(count, form);
            let found = (count.in_nmi(), count.in_hard_interrupt());
            assert_eq!(found, expected, "{count:?}");
        }
    }
}

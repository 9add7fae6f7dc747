//! The iterations over what the guest has, as bpftrace names them (`iter:task`), and the members of
//! `ctx` in their rules.

/// The kinds of things of a paused guest for each of which a rule runs once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Iteration {
    /// Each thread.
    Task,
    /// Each open file of each process.
    TaskFile,
    /// Each mapping of each process.
    TaskVma,
}

impl Iteration {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Task, Self::TaskFile, Self::TaskVma];

    /// Returns the name as a probe.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Task => "iter:task",
            Self::TaskFile => "iter:task_file",
            Self::TaskVma => "iter:task_vma",
        }
    }

    /// Returns the members of `ctx` besides `task`, with their types in C, as the kernel's
    /// `bpf_iter__task_file` and `bpf_iter__task_vma` have them.
    #[must_use]
    pub fn members(self) -> &'static [(&'static str, &'static str)] {
        match self {
            Self::Task => &[],
            Self::TaskFile => &[("fd", "u32"), ("file", "struct file *")],
            Self::TaskVma => &[("vma", "struct vm_area_struct *")],
        }
    }

    /// Checks whether the iteration has this member of `ctx`.
    #[must_use]
    pub fn has(self, member: &str) -> bool {
        member == "task" || self.members().iter().any(|(name, _)| *name == member)
    }
}

//! A value of a script, while it runs and when it is shown.
//!
//! What needs text of the guest's programs or kernel, as symbols and stacks do, stays an address until it is shown: programs run while a
//! vCPU stands still, values are shown by whoever reads them. The caller that shows values brings [`Names`].

use std::sync::Arc;

/// A value.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Value {
    /// A number.
    Int(i64),
    /// One that has no sign: an address, an argument whose type is not known.
    Unsigned(u64),
    /// Bytes of text, without the NUL.
    Text(Arc<[u8]>),
    /// Bytes that are shown as such (`buf`).
    Bytes(Arc<[u8]>),
    /// Several together.
    Tuple(Arc<[Value]>),
    /// An address of the kernel's, shown by name.
    KernelSymbol(u64),
    /// One in a program.
    UserSymbol {
        /// The process.
        pid: u32,
        /// The address.
        address: u64,
    },
    /// Return addresses in the kernel, innermost first.
    KernelStack(Arc<[u64]>),
    /// The same in a program.
    UserStack {
        /// The process.
        pid: u32,
        /// The addresses.
        frames: Arc<[u64]>,
    },
}

impl Value {
    /// 0, what a variable holds that was not set.
    pub const ZERO: Self = Self::Int(0);

    /// Of text.
    #[must_use]
    pub fn text(bytes: &[u8]) -> Self {
        Self::Text(bytes.into())
    }
}

/// Names of what values hold the addresses of.
pub trait Names {
    /// `name`, `name+0x10`, or `0xffffffff81000000` where there is none.
    fn kernel(&self, address: u64) -> String;
    /// The same in a process.
    fn user(&self, pid: u32, address: u64) -> String;
}

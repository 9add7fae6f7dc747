//! A value of a script, while it runs and when it is shown.
//!
//! What needs text of the guest's programs or kernel, as symbols and stacks do, stays an address until it is shown: programs run while a
//! vCPU stands still, values are shown by whoever reads them. The caller that shows values brings [`Names`].

use std::sync::Arc;

/// Levels of tuples within each other. A script writes fewer (the parser bounds them), but in a loop it may put a tuple into the next one.
pub(super) const MOST_LEVELS: usize = 255;
/// Values in a tuple, with those of the tuples in it: what is compared, kept under a key and shown must end.
const MOST_ITEMS: usize = 1 << 12;

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

    /// Several together; `None` if they have tuples in them that make it too high or too large.
    pub(super) fn tuple(items: &[Self]) -> Option<Self> {
        let mut room = MOST_ITEMS;
        fits(items, MOST_LEVELS, &mut room).then(|| Self::Tuple(items.into()))
    }
}

/// Whether values, with all that is in them, have room; ends as soon as they have none.
fn fits(values: &[Value], levels: usize, room: &mut usize) -> bool {
    let Some(below) = levels.checked_sub(1) else {
        return false;
    };
    values.iter().all(|value| {
        let Some(left) = room.checked_sub(1) else {
            return false;
        };
        *room = left;
        match value {
            Value::Tuple(items) => fits(items, below, room),
            _ => true,
        }
    })
}

/// Names of what values hold the addresses of.
pub trait Names {
    /// `name`, `name+0x10`, or `0xffffffff81000000` where there is none.
    fn kernel(&self, address: u64) -> String;
    /// The same in a process.
    fn user(&self, pid: u32, address: u64) -> String;
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The tuple that comes of putting a value into itself `copies` times, again and again, and how often that went well.
    fn grown(copies: usize, most: usize) -> usize {
        let mut value = Value::ZERO;
        for times in 0..most {
            match Value::tuple(&vec![value; copies]) {
                Some(tuple) => value = tuple,
                None => return times,
            }
        }
        most
    }

    #[test]
    fn tuples_do_not_grow_without_end() {
        // 2 + 4 + ... + 2^n values.
        for (copies, most) in [(1, MOST_LEVELS), (2, 11), (MOST_ITEMS, 1)] {
            assert_eq!(grown(copies, 1000), most, "{copies}");
        }
        assert_eq!(grown(MOST_ITEMS + 1, 1), 0);
    }
}

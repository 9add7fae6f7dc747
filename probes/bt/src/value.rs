//! A value of a script, while it runs and when it is shown.
//!
//! Symbols and stacks, which need text of the guest's programs or kernel, stay addresses until they
//! are shown. Programs run while a vCPU is stopped; the reader shows the values later. The caller
//! that shows values brings [`Names`].

use std::sync::Arc;

/// The greatest depth of nested tuples. The parser bounds those that a script writes, but a loop
/// may put a tuple into the next one.
pub(crate) const MOST_LEVELS: usize = 255;
/// The greatest number of values in a tuple, nested ones included: comparing, keeping and showing
/// them must end.
const MOST_ITEMS: usize = 1 << 12;

/// The forms in which a stack is shown.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum StackForm {
    /// Names with offsets.
    #[default]
    Names,
    /// Addresses, then names with offsets (`perf`).
    Both,
    /// Addresses alone (`raw`).
    Addresses,
}

/// A value.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Value {
    /// A number.
    Int(i64),
    /// An unsigned number: an address, an argument whose type is not known.
    Unsigned(u64),
    /// Bytes of text, without the NUL.
    Text(Arc<[u8]>),
    /// Bytes that are shown as such (`buf`).
    Bytes(Arc<[u8]>),
    /// A tuple.
    Tuple(Arc<[Value]>),
    /// The elements of an array.
    Array(Arc<[Value]>),
    /// A record: the names of its members, and as many values.
    Record {
        /// The names.
        names: Arc<[Arc<str>]>,
        /// The values.
        items: Arc<[Value]>,
    },
    /// An address of the kernel's, shown by name.
    KernelSymbol(u64),
    /// An address in a program, shown by name.
    UserSymbol {
        /// The process.
        pid: u32,
        /// The address.
        address: u64,
    },
    /// A number that is shown as `true` or `false`. It and the next three are made of numbers when
    /// these are shown: see [`Shape`](crate::shape::Shape).
    Bool(bool),
    /// A number that is shown as an address.
    Address(u64),
    /// A number of an enum, shown by its name.
    Enumerator {
        /// The number.
        number: i64,
        /// The name.
        name: Arc<str>,
    },
    /// The number of a control group, shown by its path. It is made as those before.
    Cgroup(u64),
    /// A stack that is shown in another form than by names, made as the three before.
    StackAs {
        /// The form.
        form: StackForm,
        /// The stack.
        stack: Arc<Value>,
    },
    /// Return addresses in the kernel, innermost first.
    KernelStack(Arc<[u64]>),
    /// Return addresses in a program, innermost first.
    UserStack {
        /// The process.
        pid: u32,
        /// The addresses.
        frames: Arc<[u64]>,
    },
}

impl Value {
    /// 0, the value of a variable that was not set.
    pub const ZERO: Self = Self::Int(0);

    /// Makes a value of text.
    #[must_use]
    pub fn text(bytes: &[u8]) -> Self {
        Self::Text(bytes.into())
    }

    /// Makes a tuple; `None` if nested tuples make it too high or too large.
    pub(crate) fn tuple(items: &[Self]) -> Option<Self> {
        let mut room = MOST_ITEMS;
        fits(items, MOST_LEVELS, &mut room).then(|| Self::Tuple(items.into()))
    }

    /// Makes an array; `None` if nested ones make it too high or too large.
    pub(crate) fn array(items: &[Self]) -> Option<Self> {
        let mut room = MOST_ITEMS;
        fits(items, MOST_LEVELS, &mut room).then(|| Self::Array(items.into()))
    }

    /// Makes a record; `None` if nested values make it too high or too large.
    pub(crate) fn record(names: &Arc<[Arc<str>]>, items: &[Self]) -> Option<Self> {
        let mut room = MOST_ITEMS;
        fits(items, MOST_LEVELS, &mut room).then(|| Self::Record {
            names: names.clone(),
            items: items.into(),
        })
    }
}

/// Checks whether values, with all that is in them, have room; stops as soon as they have none.
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
            Value::Tuple(items) | Value::Array(items) | Value::Record { items, .. } => {
                fits(items, below, room)
            }
            _ => true,
        }
    })
}

/// Names for the addresses in values, and the files that paths name.
pub trait Names {
    /// Names a kernel address: `name`, `name+0x10`, or `0xffffffff81000000` if it has none.
    fn kernel(&self, address: u64) -> String;
    /// Names a process's address in the same way.
    fn user(&self, pid: u32, address: u64) -> String;
    /// Returns the path of the control group with this number; `None` if there is none.
    fn cgroup(&self, _id: u64) -> Option<Vec<u8>> {
        None
    }
    /// Returns the first bytes of a file of the guest.
    fn file(&self, _path: &[u8]) -> FileContent {
        FileContent {
            bytes: [].into(),
            lost: Some("there is no guest".to_owned()),
        }
    }
}

/// The content of a file of the guest. A copy shares its bytes.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct FileContent {
    /// The first bytes, as far as they are wanted and could be read.
    pub bytes: Arc<[u8]>,
    /// The reason why some of those that are wanted could not be read.
    pub lost: Option<String>,
}

impl FileContent {
    /// Checks whether nothing could be read.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        self.bytes.is_empty() && self.lost.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Puts `copies` of a value into a tuple, again and again. Returns the tuple, and how often
    /// that succeeded.
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

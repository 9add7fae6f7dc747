//! Rings of `struct list_head`, the kernel's linked lists.
//!
//! The caller knows the ring's head, the offset of the links in its structures, and the maximum
//! number of entries. A ring that does not return to its head is walked as far as possible, with an
//! error that says where it broke.

use std::collections::HashSet;

use super::structure::is_kernel_address;
use crate::x86_64::ReadVirtualError;
use crate::{Gva, MemoryView};

/// The items found up to the end, or up to a broken structure.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Partial<T, E> {
    /// The items, in the kernel's order.
    pub items: Vec<T>,
    /// The first error. If there is one, `items` is incomplete.
    pub error: Option<E>,
}

impl<T, E> Partial<T, E> {
    /// Returns all items, or the error.
    ///
    /// # Errors
    /// If the walk did not reach its end.
    pub fn complete(self) -> Result<Vec<T>, E> {
        self.error.map_or(Ok(self.items), Err)
    }

    /// Reads each item with `read`. Items that cannot be read are left out, and the error is kept
    /// if it is the first.
    pub(super) fn read_each<U, F: From<E>>(
        self,
        mut read: impl FnMut(T) -> Result<U, F>,
    ) -> Partial<U, F> {
        let mut items = Vec::with_capacity(self.items.len());
        let mut error = self.error.map(F::from);
        for item in self.items {
            match read(item) {
                Ok(found) => items.push(found),
                Err(broken) => error = error.or(Some(broken)),
            }
        }
        Partial { items, error }
    }
}

/// An error in walking a ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ListError {
    /// A link is not mapped, or not to RAM.
    #[error("the list {list} is broken: its link at {link} cannot be read: {source}")]
    Unreadable {
        /// The name of the list.
        list: &'static str,
        /// The address of the `list_head`.
        link: Gva,
        /// The cause.
        source: ReadVirtualError,
    },
    /// A link leads outside the kernel.
    #[error(
        "the list {list} is broken: its link at {link} leads to {found}, expected a kernel address"
    )]
    Wild {
        /// The name of the list.
        list: &'static str,
        /// The address of the `list_head`.
        link: Gva,
        /// The pointer in it.
        found: Gva,
    },
    /// The ring has a cycle without its head.
    #[error("the list {list} is broken: it comes back to {link} and not to its head at {head}")]
    Cycle {
        /// The name of the list.
        list: &'static str,
        /// The address of the link met twice.
        link: Gva,
        /// The address of the head.
        head: Gva,
    },
    /// The ring has more entries than the caller's limit.
    #[error("the list {list} is presumed broken: it has more than {limit} entries")]
    TooLong {
        /// The name of the list.
        list: &'static str,
        /// The maximum number of entries.
        limit: usize,
    },
}

/// A ring to be walked.
#[derive(Debug, Clone, Copy)]
pub struct List {
    /// The ring's name for errors: `init_task.tasks`.
    pub name: &'static str,
    /// The address of the head, the `list_head` that belongs to no entry.
    pub head: Gva,
    /// Offset of the `list_head` in each structure on the ring, in bytes.
    pub member: u64,
    /// The maximum number of structures.
    pub limit: usize,
}

impl List {
    /// Returns the addresses of the structures on the ring. Only their links are read.
    #[must_use]
    pub fn walk(&self, view: MemoryView<'_>) -> Partial<Gva, ListError> {
        let mut items = Vec::new();
        let mut seen = HashSet::new();
        let error = self.collect(view, &mut items, &mut seen).err();
        Partial { items, error }
    }

    fn collect(
        &self,
        view: MemoryView<'_>,
        items: &mut Vec<Gva>,
        seen: &mut HashSet<u64>,
    ) -> Result<(), ListError> {
        let (list, head) = (self.name, self.head);
        let mut link = head;
        loop {
            // `next` is the first member of a `list_head`.
            let found = view
                .u64(link)
                .map(Gva)
                .map_err(|source| ListError::Unreadable { list, link, source })?;
            if found == head {
                return Ok(());
            }
            if !is_kernel_address(found) {
                return Err(ListError::Wild { list, link, found });
            }
            if !seen.insert(found.0) {
                let link = found;
                return Err(ListError::Cycle { list, link, head });
            }
            if items.len() == self.limit {
                let limit = self.limit;
                return Err(ListError::TooLong { list, limit });
            }
            items.push(Gva(found.0.wrapping_sub(self.member)));
            link = found;
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::PausedMemory;
    use crate::kernel::test_kernel::{BASE, TestKernel};
    use crate::test_says::assert_says;

    /// Walks a ring whose head is at `BASE`, with links given as pairs of (link, next) offsets from
    /// there.
    fn walk(links: &[(u64, u64)], limit: usize) -> (Vec<u64>, Option<String>) {
        let mut kernel = TestKernel::default();
        for (link, next) in links {
            kernel.put(BASE + link, BASE.wrapping_add(*next).to_le_bytes());
        }
        let paused = PausedMemory::new(&kernel.memory);
        let list = List {
            name: "things",
            head: Gva(BASE),
            member: 0x10,
            limit,
        };
        let walk = list.walk(kernel.view(&paused));
        let items = walk.items.iter().map(|item| item.0.wrapping_sub(BASE));
        let items = items.collect();
        assert_eq!(walk.error.is_none(), walk.clone().complete().is_ok());
        (items, walk.error.map(|error| error.to_string()))
    }

    #[test]
    fn rings_are_walked_to_their_end() {
        assert_eq!(walk(&[(0, 0)], 0), (vec![], None));
        let three = [(0, 0x310), (0x310, 0x110), (0x110, 0x210), (0x210, 0)];
        assert_eq!(walk(&three, 3), (vec![0x300, 0x100, 0x200], None));
    }

    #[test]
    fn broken_rings_end_in_an_error_that_says_where() {
        let to_user = 0u64.wrapping_sub(BASE);
        let unmapped = 0x7000_0000;
        for (links, limit, items, part) in [
            (
                &[(0, 0x110), (0x110, to_user)][..],
                9,
                vec![0x100],
                "things is broken: its link at 0xffff888001000110 leads to 0x0, expected a kernel address",
            ),
            (
                &[(0, unmapped)],
                9,
                vec![unmapped - 0x10],
                "its link at 0xffff888071000000 cannot be read",
            ),
            (
                &[(0, 0x110), (0x110, 0x210), (0x210, 0x110)],
                9,
                vec![0x100, 0x200],
                "comes back to 0xffff888001000110 and not to its head at 0xffff888001000000",
            ),
            (
                &[(0, 0x110), (0x110, 0x210), (0x210, 0)],
                1,
                vec![0x100],
                "more than 1 entries",
            ),
        ] {
            let (found, error) = walk(links, limit);
            assert_eq!(found, items, "{part}");
            let error = error.unwrap();
            assert_says(&error, part);
        }
    }
}

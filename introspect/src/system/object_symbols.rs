//! The functions of a process's objects. Those of an object are read at the first request.
//!
//! A file that is mapped several times is read once. All objects of a process share a budget. This
//! is because a guest determines the size of its symbol tables, and several of them may lie in the
//! same page.

use std::cell::{Cell, OnceCell};
use std::rc::Rc;

use crate::memory_budget::{Held, Purpose};
use crate::user::file_bytes::FileBytes;
use crate::user::object_file::ObjectFile;
use crate::user::symbols::FunctionSymbols;

/// The maximum number of bytes for the functions of all objects of a process. The largest programs
/// need about 200 MB.
const MAX_BYTES: usize = 512 << 20;

/// The rest of a process's budget, in bytes.
#[derive(Clone)]
pub(super) struct Budget(Rc<Cell<usize>>);

impl Default for Budget {
    fn default() -> Self {
        Self(Rc::new(Cell::new(MAX_BYTES)))
    }
}

impl Budget {
    /// Takes `bytes` of the rest, or nothing if it is less.
    pub(super) fn take(&self, bytes: usize) -> bool {
        let left = self.0.get().checked_sub(bytes);
        self.0.set(left.unwrap_or(self.0.get()));
        left.is_some()
    }
}

/// The functions of a file, shared by all objects of that file.
#[derive(Clone)]
pub(super) struct ObjectSymbols {
    budget: Budget,
    read: Rc<OnceCell<Read>>,
}

#[derive(Default)]
struct Read {
    functions: FunctionSymbols,
    /// The part of the process's budget that they use.
    _held: Option<Held>,
    /// The reason why there are none.
    refused: Option<String>,
}

impl ObjectSymbols {
    pub(super) fn new(budget: &Budget) -> Self {
        Self {
            budget: budget.clone(),
            read: Rc::default(),
        }
    }

    /// Returns the functions, which the first call reads.
    pub(super) fn get(&self, bytes: &dyn FileBytes) -> &FunctionSymbols {
        &self.read.get_or_init(|| self.read(bytes)).functions
    }

    /// Returns one sentence for each part of the functions that could not be read. There is none
    /// before the functions are requested.
    pub(super) fn lost(&self) -> impl Iterator<Item = String> {
        let read = self.read.get().into_iter();
        read.flat_map(|read| {
            let lost = read.functions.lost().iter().map(ToString::to_string);
            read.refused.clone().into_iter().chain(lost)
        })
    }

    fn read(&self, bytes: &dyn FileBytes) -> Read {
        let left = &self.budget.0;
        if left.get() == 0 {
            return Read::refused(format!(
                "its functions are left out: those of the process's other objects take {MAX_BYTES} bytes"
            ));
        }
        match ObjectFile::parse(bytes) {
            Ok(object) => {
                let functions = FunctionSymbols::read(&object);
                let held = match Held::take(Purpose::Symbols, functions.size() as u64) {
                    Ok(held) => held,
                    Err(over) => {
                        return Read::refused(format!("its functions are left out: {over}"));
                    }
                };
                left.set(left.get().saturating_sub(functions.size()));
                Read {
                    functions,
                    _held: Some(held),
                    refused: None,
                }
            }
            Err(error) => Read::refused(error.to_string()),
        }
    }
}

impl Read {
    fn refused(reason: String) -> Self {
        Self {
            refused: Some(reason),
            ..Self::default()
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::user::test_object::TestObject;

    #[test]
    fn a_file_is_read_once_and_all_share_the_budget() {
        let library = TestObject::library().exports(&["one", "two"]).bytes();
        let budget = Budget::default();
        let first = ObjectSymbols::new(&budget);
        assert_eq!(first.lost().count(), 0);
        let count = first.get(&library.as_slice()).len();
        assert!(count > 0);
        let left = budget.0.get();
        assert!(left < MAX_BYTES);
        // The file is the same, so its bytes do not matter any more.
        assert_eq!(first.clone().get(&b"".as_slice()).len(), count);
        assert_eq!(budget.0.get(), left);

        let broken = ObjectSymbols::new(&budget);
        assert!(broken.get(&b"#!/bin/sh".as_slice()).is_empty());
        assert_eq!(broken.lost().count(), 1);

        budget.0.set(1);
        let last = ObjectSymbols::new(&budget);
        assert_eq!(last.get(&library.as_slice()).len(), count);
        let late = ObjectSymbols::new(&budget);
        assert!(late.get(&library.as_slice()).is_empty());
        let lost: Vec<_> = late.lost().collect();
        assert!(lost[0].contains("other objects"), "{lost:?}");
    }
}

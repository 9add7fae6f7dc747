//! The calls of a process that have not returned.

/// Most calls within each other that are kept of a process. Deeper ones are only counted.
const MAX_DEPTH: usize = 4096;

/// Open calls, with something kept of each.
#[derive(Debug)]
pub(super) struct Calls<T> {
    open: Vec<T>,
    deeper: u64,
}

impl<T> Default for Calls<T> {
    fn default() -> Self {
        Self {
            open: Vec::new(),
            deeper: 0,
        }
    }
}

impl<T> Calls<T> {
    /// The innermost one that is kept.
    pub(super) fn innermost(&self) -> Option<&T> {
        self.open.last()
    }

    /// A function is called.
    pub(super) fn enter(&mut self, call: T) {
        if self.open.len() < MAX_DEPTH {
            self.open.push(call);
        } else {
            self.deeper += 1;
        }
    }

    /// The innermost call returns. `None` if there is none, or if it was too deep to be kept.
    pub(super) fn leave(&mut self) -> Option<T> {
        if self.deeper > 0 {
            self.deeper -= 1;
            return None;
        }
        self.open.pop()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_return_ends_the_innermost_call_however_deep() {
        let mut calls = Calls::default();
        assert_eq!(calls.leave(), None);
        for depth in 0..MAX_DEPTH + 2 {
            calls.enter(depth);
        }
        assert_eq!(calls.innermost(), Some(&(MAX_DEPTH - 1)));
        assert_eq!(calls.leave(), None);
        assert_eq!(calls.leave(), None);
        for depth in (0..MAX_DEPTH).rev() {
            assert_eq!(calls.leave(), Some(depth));
        }
        assert_eq!(calls.leave(), None);
    }
}

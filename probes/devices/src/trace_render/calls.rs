//! The calls of a process that have not returned.

/// The greatest depth of calls kept of a process. Deeper ones are only counted.
const MAX_DEPTH: usize = 4096;

/// The open calls, with a value for each.
#[derive(Debug)]
pub struct Calls<T> {
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
    /// Returns the innermost call that is kept.
    #[must_use]
    pub fn innermost(&self) -> Option<&T> {
        self.open.last()
    }

    /// Enters a function.
    pub fn enter(&mut self, call: T) {
        if self.open.len() < MAX_DEPTH {
            self.open.push(call);
        } else {
            self.deeper += 1;
        }
    }

    /// Leaves the innermost call. Returns `None` if there is none, or if it was too deep to be
    /// kept.
    pub fn leave(&mut self) -> Option<T> {
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

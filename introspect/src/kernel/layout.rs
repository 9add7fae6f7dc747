//! Offsets of struct members, looked up once by the readers of a structure.
//!
//! Each reader of a kernel structure has a `…Layout` with its offsets, which this makes from the
//! kernel's own types. A member of an unexpected size is an error; it is never read as something
//! else.

use super::btf::{Btf, MemberError};

/// An error that prevents reading a structure in this kernel.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LayoutError {
    /// A struct or member does not exist.
    #[error("{0}")]
    Member(#[from] MemberError),
    /// A member has an unexpected size.
    #[error("{path} is {found} bytes in this kernel, {expected} were expected")]
    Size {
        /// The path of the member.
        path: String,
        /// The member's size in bytes.
        found: u64,
        /// The size that this crate reads, in bytes.
        expected: u64,
    },
    /// A symbol does not exist.
    #[error("the kernel names no {name}, which {used_for}; build it with CONFIG_KALLSYMS_ALL=y")]
    Symbol {
        /// The name of the variable or function.
        name: &'static str,
        /// The function that is lost without it: `lists its tasks`.
        used_for: &'static str,
    },
}

/// Returns the byte offset of the member at `path` ([`Btf::member`]), which must have `expected`
/// bytes.
///
/// # Errors
/// If the member does not exist or has another size.
pub fn offset(btf: &Btf, path: &str, expected: u64) -> Result<u64, LayoutError> {
    let member = btf.member(path)?;
    match member.size == expected {
        true => Ok(member.byte_offset),
        false => Err(LayoutError::Size {
            path: path.to_owned(),
            found: member.size,
            expected,
        }),
    }
}

/// Returns the offset of the first of several members that exists, because kernels rename members.
///
/// # Errors
/// If none exists: the error of the first path.
pub fn first_offset(btf: &Btf, paths: &[&str], expected: u64) -> Result<u64, LayoutError> {
    let found = paths
        .iter()
        .find_map(|path| offset(btf, path, expected).ok());
    let first = paths.first().copied().unwrap_or_default();
    found.map_or_else(|| offset(btf, first, expected), Ok)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::btf::test_types::task_types;

    #[test]
    fn members_are_found_by_name_and_size() -> Result<(), crate::kernel::btf::BtfError> {
        let btf = Btf::parse(&task_types().bytes())?;
        assert_eq!(offset(&btf, "task_struct.pid", 4), Ok(32));
        assert_eq!(
            first_offset(&btf, &["task_struct.__state", "task_struct.state"], 8),
            Ok(0)
        );
        let size = offset(&btf, "task_struct.pid", 8).map_err(|e| e.to_string());
        assert_eq!(
            size,
            Err("task_struct.pid is 4 bytes in this kernel, 8 were expected".to_owned())
        );
        let none = first_offset(&btf, &["task_struct.old", "task_struct.older"], 8);
        assert!(none.is_err_and(|e| e.to_string().contains("no member \"old\"")));
        Ok(())
    }
}

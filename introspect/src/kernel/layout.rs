//! Offsets of struct members, looked up once by those who read a structure.
//!
//! Each reader of a kernel structure has a `…Layout` with its offsets, made from the kernel's own types by this. A member
//! that is not of the expected size is an error and never read as something else.

use super::btf::{Btf, MemberError};

/// Why a structure cannot be read in this kernel.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LayoutError {
    /// A struct or member is not there.
    #[error("{0}")]
    Member(#[from] MemberError),
    /// A member has an unexpected size.
    #[error("{path} is {found} bytes in this kernel, {expected} were expected")]
    Size {
        /// The member.
        path: String,
        /// Its size.
        found: u64,
        /// What this crate reads.
        expected: u64,
    },
    /// A symbol is not there.
    #[error("the kernel names no {name}, which {used_for}; build it with CONFIG_KALLSYMS_ALL=y")]
    Symbol {
        /// The variable or function.
        name: &'static str,
        /// What is lost without it: `lists its tasks`.
        used_for: &'static str,
    },
}

/// Byte offset of the member at `path` ([`Btf::member`]), which must have `expected` bytes.
///
/// # Errors
/// If it is not there or has another size.
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

/// Offset of the first of several members that is there: kernels rename.
///
/// # Errors
/// That of the first path, if none is there.
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

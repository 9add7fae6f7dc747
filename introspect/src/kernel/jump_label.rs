//! Jump labels: the branches that the kernel rewrites in its own code (`CONFIG_JUMP_LABEL`), each
//! with the key that switches it. Tracepoints are behind such branches.
//!
//! The caller pauses the CPUs and has the list of modules ([`modules`](super::modules)). This
//! module reads the site, target and key of each branch. It does not read the instruction at the
//! site. That is a NOP or a JMP, of 2 or 5 bytes. The table does not hold the length: a writer of
//! the site must decode the instruction.
//!
//! Structures: `jump_entry` in include/linux/jump_label.h with
//! `CONFIG_HAVE_ARCH_JUMP_LABEL_RELATIVE` (Linux since 4.20 on x86-64), kernel/jump_label.c.

use super::btf::Btf;
use super::layout::{LayoutError, offset};
use super::modules::Module;
use super::section_table::{SectionNames, SectionTable, SectionTableError, Table, TableOwner};
use super::structure::is_kernel_address;
use super::symbols::Symbols;
use crate::bytes::{u32_at, u64_at};
use crate::{Gva, MemoryView};

/// The maximum number of entries of all tables; a distribution kernel has about 15,000.
const MAX_ENTRIES: u64 = 1 << 20;
/// Size of a `jump_entry` in bytes: two numbers of four bytes and one of eight.
const ENTRY: std::ops::RangeInclusive<u64> = 16..=64;
/// Flags in the lower bits of the key: the branch is likely, and its code is freed after
/// initialisation.
const LIKELY: u64 = 1;
const INIT: u64 = 2;

/// The location of a kernel's jump labels.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JumpLabelLayout {
    tables: SectionTable,
    code: usize,
    target: usize,
    key: usize,
}

/// An error that prevents reading jump labels in this kernel.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum JumpLabelLayoutError {
    /// The kernel has no jump labels.
    #[error("the kernel has no jump labels (built without CONFIG_JUMP_LABEL)")]
    NoJumpLabels,
    /// A symbol or member is missing or has another size. Kernels before 4.20 have entries of
    /// absolute addresses, whose `code` has 8 bytes.
    #[error("the kernel's jump labels are not known: {0}")]
    Layout(#[from] LayoutError),
}

/// A branch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct JumpEntry {
    /// The site: the first byte of the rewritten instruction, a NOP or a JMP.
    pub code: Gva,
    /// The target of the JMP.
    pub target: Gva,
    /// The address of the `static_key`.
    pub key: Gva,
    /// Whether the source marks the branch as likely: then it is a JMP while the key is off.
    pub likely: bool,
    /// Whether the site is in initialisation code, whose memory is reused afterwards.
    pub init: bool,
}

/// An error in a jump table.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum JumpTableError {
    /// The table cannot be read.
    #[error(transparent)]
    Table(#[from] SectionTableError),
    /// Some entries are damaged and left out.
    #[error(
        "{owner}: {count} entries of the jump table are damaged; that at {first} has code {code}, target {target} and key {key}"
    )]
    Entries {
        /// The owner of the table.
        owner: TableOwner,
        /// The number of damaged entries.
        count: usize,
        /// The address of the first of them.
        first: Gva,
        /// The site that it names.
        code: Gva,
        /// The target that it names.
        target: Gva,
        /// The key that it names.
        key: Gva,
    },
}

/// The branches of the kernel and its modules, by key.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct JumpLabels {
    /// The branches, ascending by key, then by code.
    entries: Vec<JumpEntry>,
    /// The errors of the tables. If there are any, some branches are missing.
    pub unread: Vec<JumpTableError>,
}

impl JumpLabels {
    /// Returns all branches, ascending by key, then by address.
    #[must_use]
    pub fn entries(&self) -> &[JumpEntry] {
        &self.entries
    }

    /// Returns the branches that the `static_key` at `key` switches, ascending by address.
    #[must_use]
    pub fn of_key(&self, key: Gva) -> &[JumpEntry] {
        let start = self.entries.partition_point(|entry| entry.key < key);
        let rest = self.entries.get(start..).unwrap_or_default();
        let count = rest.partition_point(|entry| entry.key == key);
        rest.get(..count).unwrap_or_default()
    }
}

impl JumpLabelLayout {
    /// Looks up the tables and the offsets. `symbols` must have the slide of the running kernel.
    ///
    /// # Errors
    /// If the kernel has no jump labels, or its types or symbols do not describe them.
    pub fn new(btf: &Btf, symbols: &Symbols) -> Result<Self, JumpLabelLayoutError> {
        let Some(entry) = btf.size_of("jump_entry") else {
            return Err(JumpLabelLayoutError::NoJumpLabels);
        };
        let member = |path, size| {
            let found = offset(btf, path, size)?;
            let inside = found.checked_add(size).is_some_and(|end| end <= entry);
            match usize::try_from(found) {
                Ok(found) if inside && ENTRY.contains(&entry) => Ok(found),
                _ => Err(LayoutError::Size {
                    path: "jump_entry".to_owned(),
                    found: entry,
                    expected: *ENTRY.start(),
                }),
            }
        };
        let (code, target) = (
            member("jump_entry.code", 4)?,
            member("jump_entry.target", 4)?,
        );
        let names = SectionNames {
            kind: "jump table",
            bounds: ["__start___jump_table", "__stop___jump_table"],
            used_for: "lists its jump labels",
            module: ["module.jump_entries", "module.num_jump_entries"],
            entry,
            most: MAX_ENTRIES,
        };
        Ok(Self {
            tables: SectionTable::new(btf, symbols, &names)?,
            code,
            target,
            key: member("jump_entry.key", 8)?,
        })
    }

    /// Reads the branches of the kernel and of these modules, with the errors of their tables.
    #[must_use]
    pub fn read_all(&self, view: MemoryView<'_>, modules: &[Module]) -> JumpLabels {
        let mut found = JumpLabels::default();
        let mut left = self.tables.most();
        let table = self.tables.kernel(view, &mut left);
        self.take(&mut found, TableOwner::Kernel, table);
        for module in modules {
            let table = self.tables.module(view, module, &mut left);
            self.take(&mut found, TableOwner::of(module), table);
        }
        found
            .entries
            .sort_unstable_by_key(|entry| (entry.key, entry.code));
        found
    }

    /// Adds the entries of a table.
    fn take(
        &self,
        found: &mut JumpLabels,
        owner: TableOwner,
        table: Result<Table, SectionTableError>,
    ) {
        let table = match table {
            Ok(table) => table,
            Err(error) => return found.unread.push(error.into()),
        };
        let (mut damaged, mut example) = (0, None);
        for (address, bytes) in table.entries() {
            let entry = self.entry(address, bytes);
            match [entry.code, entry.target, entry.key]
                .into_iter()
                .all(is_kernel_address)
            {
                true => found.entries.push(entry),
                false => {
                    damaged += 1;
                    example.get_or_insert((address, entry));
                }
            }
        }
        if let Some((first, entry)) = example {
            found.unread.push(JumpTableError::Entries {
                owner,
                count: damaged,
                first,
                code: entry.code,
                target: entry.target,
                key: entry.key,
            });
        }
    }

    /// Decodes the entry at `address`. Each of its members is a distance from the member itself.
    fn entry(&self, address: Gva, bytes: &[u8]) -> JumpEntry {
        let from = |offset: usize, distance: u64| {
            let member = address.0.wrapping_add(offset as u64);
            Gva(member.wrapping_add(distance))
        };
        // The members are inside the entry, which was checked when their offsets were looked up.
        let near = |offset| {
            let distance = u32_at(bytes, offset).unwrap_or_default().cast_signed();
            from(offset, i64::from(distance).cast_unsigned())
        };
        let key = u64_at(bytes, self.key).unwrap_or_default();
        JumpEntry {
            code: near(self.code),
            target: near(self.target),
            key: from(self.key, key & !(LIKELY | INIT)),
            likely: key & LIKELY != 0,
            init: key & INIT != 0,
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::kernel::test_kernel::{
        BASE, HALF, Struct, TestKernel, WILD, WORD, module, symbols, types as types_of,
    };
    use crate::test_says::assert_says;

    const TABLE: u64 = BASE + 0x2000;
    const OTHER: u64 = BASE + 0x3000;
    const TEXT: u64 = BASE + 0x8000;
    const KEY: u64 = BASE + 0x9000;
    const MODULE: u64 = BASE + 0xa000;

    pub(in crate::kernel) const ENTRY_TYPE: Struct<'static> = (
        "jump_entry",
        &[("code", 0, HALF), ("target", 4, HALF), ("key", 8, WORD)],
    );
    const MODULE_TYPE: Struct<'static> = (
        "module",
        &[
            ("state", 0, HALF),
            ("jump_entries", 8, WORD),
            ("num_jump_entries", 16, HALF),
        ],
    );

    fn bounds(count: u64) -> Symbols {
        symbols(&[
            ("__start___jump_table", TABLE),
            ("__stop___jump_table", TABLE + 16 * count),
        ])
    }

    fn layout(count: u64) -> JumpLabelLayout {
        JumpLabelLayout::new(&types_of(&[ENTRY_TYPE, MODULE_TYPE]), &bounds(count)).unwrap()
    }

    /// Writes entry `index` of the table at `table`; `key` has the flags.
    pub(in crate::kernel) fn put(
        kernel: &mut TestKernel,
        table: u64,
        index: u64,
        [code, target, key]: [u64; 3],
    ) {
        let at = table + index * 16;
        kernel.put_all(&[
            (at, code.wrapping_sub(at), 4),
            (at + 4, target.wrapping_sub(at + 4), 4),
            (at + 8, key.wrapping_sub(at + 8), 8),
        ]);
    }

    fn read(kernel: &TestKernel, count: u64) -> JumpLabels {
        kernel.look(|view| layout(count).read_all(view, &[module(MODULE, "brd", &[])]))
    }

    #[test]
    fn branches_are_found_by_their_key_in_kernel_and_modules() {
        let mut kernel = TestKernel::default();
        put(&mut kernel, TABLE, 0, [TEXT + 8, TEXT + 0x100, KEY + 16]);
        put(&mut kernel, TABLE, 1, [TEXT + 4, TEXT - 0x100, KEY | 1]);
        put(&mut kernel, TABLE, 2, [TEXT + 2, TEXT, (KEY + 16) | 2]);
        // A branch in the module, by a key of the kernel.
        put(&mut kernel, OTHER, 0, [TEXT + 0x800, TEXT + 0x900, KEY]);
        kernel.put_all(&[(MODULE + 8, OTHER, 8), (MODULE + 16, 1, 4)]);
        let found = read(&kernel, 3);
        assert_eq!(found.unread, []);
        let shown = |entry: &JumpEntry| {
            let JumpEntry {
                code, target, key, ..
            } = *entry;
            (
                [code.0, target.0, key.0].map(|at| at.wrapping_sub(TEXT)),
                entry.likely,
                entry.init,
            )
        };
        let (first, second) = (KEY - TEXT, KEY - TEXT + 16);
        let expected = [
            ([4, 0u64.wrapping_sub(0x100), first], true, false),
            ([0x800, 0x900, first], false, false),
            ([2, 0, second], false, true),
            ([8, 0x100, second], false, false),
        ];
        let all: Vec<_> = found.entries().iter().map(shown).collect();
        assert_eq!(all, expected);
        for (key, range) in [(KEY, 0..2), (KEY + 16, 2..4), (KEY + 8, 2..2), (0, 0..0)] {
            let of_key: Vec<_> = found.of_key(Gva(key)).iter().map(shown).collect();
            assert_eq!(of_key, expected[range], "{key:#x}");
        }
    }

    #[test]
    fn what_is_damaged_is_left_out_and_told() {
        let mut kernel = TestKernel::default();
        put(&mut kernel, TABLE, 0, [TEXT, TEXT, 0x40_0000]);
        put(&mut kernel, TABLE, 1, [TEXT, TEXT + 1, KEY]);
        put(&mut kernel, TABLE, 2, [TEXT, TEXT, 0x50_0000]);
        kernel.put_all(&[(MODULE + 8, WILD, 8), (MODULE + 16, 1, 4)]);
        let found = read(&kernel, 3);
        let targets: Vec<_> = found.entries().iter().map(|entry| entry.target.0).collect();
        assert_eq!(targets, [TEXT + 1]);
        let told: Vec<String> = found.unread.iter().map(|error| error.to_string()).collect();
        let [entries, table] = &told[..] else {
            panic!("{told:?}")
        };
        assert!(
            entries.starts_with("the kernel: 2 entries of the jump table are damaged; that at 0xffff888001002000 has code 0xffff888001008000"),
            "{entries}"
        );
        assert!(
            table.starts_with("module brd: jump table at"),
            "the module's: {table}"
        );
        kernel.put_all(&[(MODULE + 16, MAX_ENTRIES, 4)]);
        let told = read(&kernel, 3).unread[1].to_string();
        assert_says(&told, "found 1048576");
    }

    #[test]
    fn kernels_without_jump_labels_and_with_old_ones_say_so() {
        let none = JumpLabelLayout::new(&types_of(&[MODULE_TYPE]), &bounds(0));
        assert_eq!(none, Err(JumpLabelLayoutError::NoJumpLabels));
        let absolute = (
            "jump_entry",
            &[("code", 0, WORD), ("target", 8, WORD), ("key", 16, WORD)][..],
        );
        let refused = JumpLabelLayout::new(&types_of(&[absolute]), &bounds(0)).unwrap_err();
        let text = refused.to_string();
        assert_says(
            &text,
            "jump_entry.code is 8 bytes in this kernel, 4 were expected",
        );
        let unnamed = JumpLabelLayout::new(&types_of(&[ENTRY_TYPE]), &symbols(&[])).unwrap_err();
        let text = unnamed.to_string();
        assert_says(&text, "names no __start___jump_table");
    }
}

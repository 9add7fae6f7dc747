//! A writer of BTF for tests.
#![allow(clippy::unwrap_used)]

use super::Kind;

/// A builder of types.
#[derive(Default)]
pub(crate) struct TestBtf {
    types: Vec<u8>,
    strings: Vec<u8>,
    count: u32,
}

impl TestBtf {
    /// Returns the number that the next type will have.
    pub(crate) fn next(&self) -> u32 {
        self.count + 1
    }

    /// Adds a string; returns its offset.
    pub(crate) fn string(&mut self, text: &str) -> u32 {
        if self.strings.is_empty() {
            self.strings.push(0);
        }
        if text.is_empty() {
            return 0;
        }
        let offset = self.strings.len() as u32;
        self.strings.extend(text.bytes());
        self.strings.push(0);
        offset
    }

    /// Adds a type; returns its number. `info` is the number of elements, with bit 31 as the kind's
    /// flag.
    pub(crate) fn add(
        &mut self,
        name: &str,
        kind: Kind,
        info: u32,
        size_or_type: u32,
        rest: &[u32],
    ) -> u32 {
        let name = self.string(name);
        for word in [name, kind.number() << 24 | info, size_or_type]
            .iter()
            .chain(rest)
        {
            self.types.extend(word.to_le_bytes());
        }
        self.count += 1;
        self.count
    }

    /// Adds a struct or union of (name, type, offset word) members.
    pub(crate) fn composite(
        &mut self,
        name: &str,
        kind: Kind,
        flag: bool,
        size: u32,
        members: &[(&str, u32, u32)],
    ) -> u32 {
        let words: Vec<u32> = members
            .iter()
            .flat_map(|(name, type_id, place)| [self.string(name), *type_id, *place])
            .collect();
        self.add(
            name,
            kind,
            members.len() as u32 | u32::from(flag) << 31,
            size,
            &words,
        )
    }

    /// Returns the bytes of the file.
    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut out = vec![0x9f, 0xeb, 1, 0];
        let (types, strings) = (self.types.len() as u32, self.strings.len() as u32);
        for word in [24, 0, types, types, strings] {
            out.extend(word.to_le_bytes());
        }
        out.extend(&self.types);
        out.extend(&self.strings);
        out
    }
}

/// Makes a task, a `pcpu_hot` and some functions, shaped like a kernel's.
pub(crate) fn task_types() -> TestBtf {
    let mut t = TestBtf::default();
    let int = t.add("int", Kind::Int, 0, 4, &[0x0100_0020]);
    let long = t.add("long int", Kind::Int, 0, 8, &[0x0100_0040]);
    let char = t.add("char", Kind::Int, 0, 1, &[8]);
    let pid = t.add("pid_t", Kind::Typedef, 0, int, &[]);
    let comm = t.add("", Kind::Array, 0, 0, &[char, int, 16]);
    let pad = t.add("", Kind::Array, 0, 0, &[char, int, 64]);
    let mm = t.add("mm_struct", Kind::Forward, 0, 0, &[]);
    let mm_pointer = t.add("", Kind::Pointer, 0, mm, &[]);
    let entity = t.composite(
        "sched_entity",
        Kind::Struct,
        false,
        16,
        &[("load", long, 0), ("vruntime", long, 64)],
    );
    let ids = t.composite(
        "",
        Kind::Struct,
        false,
        8,
        &[("pid", pid, 0), ("tgid", pid, 32)],
    );
    let task = t.composite(
        "task_struct",
        Kind::Struct,
        true,
        128,
        &[
            ("state", long, 0),
            ("", ids, 32 * 8),
            ("comm", comm, 48 * 8),
            ("mm", mm_pointer, 64 * 8),
            ("se", entity, 72 * 8),
            ("in_execve", int, 1 << 24 | (96 * 8 + 3)),
        ],
    );
    let task_pointer = t.add("", Kind::Pointer, 0, task, &[]);
    let hot = t.composite(
        "",
        Kind::Struct,
        false,
        16,
        &[
            ("current_task", task_pointer, 0),
            ("preempt_count", int, 64),
        ],
    );
    let hot = t.composite("", Kind::Union, false, 64, &[("", hot, 0), ("pad", pad, 0)]);
    t.composite("pcpu_hot", Kind::Struct, false, 64, &[("", hot, 0)]);
    let text = t.add("", Kind::Pointer, 0, char, &[]);
    let names: Vec<u32> = ["mm", "count", "pid", "fmt"]
        .iter()
        .map(|name| t.string(name))
        .collect();
    let read = t.add(
        "",
        Kind::Prototype,
        3,
        long,
        &[names[0], mm_pointer, names[1], long, names[2], pid],
    );
    t.add("vfs_read", Kind::Function, 0, read, &[]);
    let printk = t.add("", Kind::Prototype, 2, int, &[names[3], text, 0, 0]);
    t.add("_printk", Kind::Function, 0, printk, &[]);
    let schedule = t.add("", Kind::Prototype, 0, 0, &[]);
    t.add("schedule", Kind::Function, 0, schedule, &[]);
    t
}

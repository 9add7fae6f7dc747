//! Stacks folded to lines, for flame graphs: `do_sys_openat2;do_filp_open;path_openat 5120`,
//! outermost function first.
//!
//! The number is the time in the last function itself, without the traced functions that it called.
//! Its unit is nanoseconds if the ticks of a second are known, otherwise ticks. It is wall-clock
//! time, also while the process waits. Calls of all processes are summed. A call that has not
//! returned counts up to the last line of its process. Lines are sorted.

use std::collections::BTreeMap;
use std::fmt;
use std::io::{self, Write};

use super::calls::Calls;
use lru::LruCache;

use super::{MAX_TASKS, Symbols, named};
use crate::render::Render;
use crate::trace_line::{LineKind, TraceLine};

/// The greatest number of different stacks, and of functions in all their lines. Time beyond it is
/// summed as that of one function.
const MAX_STACKS: usize = 1 << 18;
const MAX_FRAMES: usize = 1 << 22;
/// The name of that function.
const LEFT_OUT: &str = "[further stacks]";
const NANOSECONDS: u128 = 1_000_000_000;

/// A renderer that sums up, and writes at the end.
pub struct Collapsed {
    symbols: Symbols,
    ticks_per_second: Option<u64>,
    tasks: LruCache<u64, Task>,
    stacks: Vec<Stack>,
    /// The indexes in `stacks` by the stack below (one more than its index, 0 for none) and the
    /// function on top.
    places: BTreeMap<(usize, u64), usize>,
    /// The number of functions in the lines of all stacks.
    frames: usize,
    left_out: u128,
}

impl fmt::Debug for Collapsed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Collapsed")
            .field("ticks_per_second", &self.ticks_per_second)
            .field("left_out", &self.left_out)
            .finish_non_exhaustive()
    }
}

/// A process.
#[derive(Default)]
struct Task {
    /// The indexes of stacks; `None` for one that is left out.
    calls: Calls<Option<usize>>,
    last: u64,
}

/// A stack of nested functions.
struct Stack {
    below: Option<usize>,
    function: u64,
    /// The number of functions in its line.
    depth: usize,
    /// The ticks in the function on top.
    ticks: u128,
}

impl Collapsed {
    /// Makes a renderer. If the ticks of a second are given, numbers are nanoseconds.
    #[must_use]
    pub fn new(symbols: Symbols, ticks_per_second: Option<u64>) -> Self {
        Self {
            symbols,
            ticks_per_second,
            tasks: LruCache::sparse(MAX_TASKS),
            stacks: Vec::new(),
            places: BTreeMap::new(),
            frames: 0,
            left_out: 0,
        }
    }

    /// Returns the index of the stack with `function` on that of `below`.
    fn place(&mut self, below: Option<Option<usize>>, function: u64) -> Option<usize> {
        let below = match below {
            // A stack on top of one that is left out is left out, too.
            Some(None) => return None,
            Some(below) => below,
            None => None,
        };
        let key = (below.map_or(0, |place| place + 1), function);
        if let Some(place) = self.places.get(&key) {
            return Some(*place);
        }
        let below_it = below.and_then(|place| self.stacks.get(place));
        let depth = below_it.map_or(0, |stack| stack.depth) + 1;
        if self.stacks.len() >= MAX_STACKS || self.frames + depth > MAX_FRAMES {
            return None;
        }
        self.frames += depth;
        let stack = Stack {
            below,
            function,
            depth,
            ticks: 0,
        };
        self.stacks.push(stack);
        self.places.insert(key, self.stacks.len() - 1);
        Some(self.stacks.len() - 1)
    }

    /// Returns the names of a stack's functions, outermost first.
    fn text(&self, stack: &Stack) -> String {
        let mut functions = vec![frame(&self.symbols, stack.function)];
        let mut below = stack.below;
        while let Some(stack) = below.and_then(|place| self.stacks.get(place)) {
            functions.push(frame(&self.symbols, stack.function));
            below = stack.below;
        }
        functions.reverse();
        functions.join(";")
    }
}

/// Returns a function's name as part of a line.
fn frame(symbols: &Symbols, pc: u64) -> String {
    named(symbols, pc).replace(|c: char| c == ';' || c.is_whitespace(), "_")
}

impl Render<TraceLine> for Collapsed {
    fn record(&mut self, line: &TraceLine, _: &mut dyn Write) -> io::Result<()> {
        let task = self.tasks.get_or_insert_mut(line.pid, Task::default);
        let ticks = u128::from(line.ticks.saturating_sub(task.last));
        task.last = task.last.max(line.ticks);
        let innermost = task.calls.innermost().copied();
        match innermost {
            Some(Some(place)) => {
                if let Some(stack) = self.stacks.get_mut(place) {
                    stack.ticks += ticks;
                }
            }
            Some(None) => self.left_out += ticks,
            None => {}
        }
        match line.kind {
            LineKind::Entry => {
                let place = self.place(innermost, line.pc);
                let task = self.tasks.get_or_insert_mut(line.pid, Task::default);
                task.calls.enter(place);
            }
            LineKind::Exit => {
                task.calls.leave();
            }
        }
        Ok(())
    }

    fn finish(&mut self, out: &mut dyn Write) -> io::Result<()> {
        let weight = |ticks: u128| match self.ticks_per_second {
            Some(hz) => ticks * NANOSECONDS / u128::from(hz.max(1)),
            None => ticks,
        };
        // Different addresses can have one name.
        let mut lines: BTreeMap<String, u128> = BTreeMap::new();
        for stack in &self.stacks {
            if stack.ticks > 0 {
                *lines.entry(self.text(stack)).or_default() += stack.ticks;
            }
        }
        if self.left_out > 0 {
            lines.insert(LEFT_OUT.to_owned(), self.left_out);
        }
        for (stack, ticks) in lines {
            writeln!(out, "{stack} {}", weight(ticks))?;
        }
        Ok(())
    }
}

//! Executes the operations of a rule.
//!
//! It runs on a vCPU's thread while that is stopped. It waits only for the locks of the maps and of
//! their snapshots, and allocates only its own stack and values. It ends after a bounded number of
//! operations, whatever the script says. An error (a division by zero, memory that is not there)
//! yields 1, 0 or empty text, and is counted.

mod known;
mod memory;
pub(crate) use memory::{MOST_BYTES, MOST_STRINGS};
mod number_names;
pub(crate) mod numbers;
mod scratch;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use self::scratch::Scratch;
use crate::ast::{Aggregation, Dialect};
use crate::context::Context;
use crate::maps::{MapNumber, Maps, Reading};
use crate::moments::{Moment, Moments, Wish};
use crate::program::{Code, Emission, Operation};
use crate::snapshots::Snapshots;
use crate::value::Value;

/// The greatest number of operations of one run of a rule, and of entries of maps that its single
/// operations may visit.
pub(crate) const MOST_OPERATIONS: usize = 1 << 17;
/// The greatest number of values on the stack at a time. The parser bounds the depth of
/// expressions.
const MOST_VALUES: usize = 1 << 12;

/// The state that all rules of a script share while they run.
pub(crate) struct Shared {
    pub(crate) dialect: Dialect,
    pub(crate) maps: Maps,
    pub(crate) emissions: Vec<Emission>,
    pub(crate) snapshots: Snapshots,
    pub(crate) moments: Moments,
    /// The start of the script, in nanoseconds since 1970.
    pub(crate) began: u64,
    /// Set by `exit()`: no rule begins any more.
    pub(crate) exited: AtomicBool,
    /// Set where btrace(8) ends at once: nothing follows, not even END.
    pub(crate) failed: AtomicBool,
    /// The status that `exit()` gave.
    pub(crate) status: AtomicU64,
    /// The number of vCPUs.
    pub(crate) cpus: usize,
    pub(crate) faults: Faults,
    pub(crate) random: AtomicU64,
}

impl Shared {
    /// Returns the status that the script gave to `exit()`.
    pub(crate) fn exit_status(&self) -> u8 {
        u8::try_from(self.status.load(Ordering::Relaxed)).unwrap_or(u8::MAX)
    }
}

/// The errors in rules that ran.
#[derive(Debug, Default)]
pub(crate) struct Faults {
    /// The number of divisions by zero.
    pub(crate) divisions: AtomicU64,
    /// The number of reads of memory that was not there, which yielded 0.
    pub(crate) reads: AtomicU64,
    /// The number of reads of fields whose record could not be made, which yielded 0.
    pub(crate) records: AtomicU64,
    /// The number of rules ended because they took too many operations, or made an endless tuple.
    pub(crate) endless: AtomicU64,
    /// The number of emissions dropped: the ring had no room, or no snapshot was free.
    pub(crate) lost: AtomicU64,
}

/// The texts of the probe for which a rule runs.
pub(crate) struct ProbeTexts {
    pub(crate) name: Arc<[u8]>,
    pub(crate) function: Arc<[u8]>,
}

/// The outcome of a rule for a hit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RuleOutcome {
    /// The rule's predicate was false.
    Filtered,
    /// The rule was executed, to its end or to a limit.
    Executed,
}

/// Runs a rule once. Hits name the type of their context: then its values cost no calls.
pub(crate) fn run<C: Context + ?Sized>(
    code: &Code,
    shared: &Shared,
    context: &C,
    probe: &ProbeTexts,
) -> RuleOutcome {
    let mut machine = Machine {
        shared,
        context,
        probe,
        scratch: Scratch::take(code.locals),
        walked: 0,
        now: None,
    };
    let outcome = machine.execute(code);
    machine.scratch.give_back();
    outcome
}

/// The next operation.
enum Next {
    Follows,
    At(usize),
    End,
    Filtered,
}

struct Machine<'r, C: ?Sized> {
    shared: &'r Shared,
    context: &'r C,
    probe: &'r ProbeTexts,
    scratch: Box<Scratch>,
    /// The number of map entries that single operations have visited.
    walked: usize,
    /// The time of the hit in nanoseconds since 1970, once it was asked for.
    now: Option<u64>,
}

impl<C: Context + ?Sized> Machine<'_, C> {
    fn execute(&mut self, code: &Code) -> RuleOutcome {
        let mut at = 0;
        for _ in 0..MOST_OPERATIONS {
            let Some(operation) = code.operations.get(at) else {
                return RuleOutcome::Executed;
            };
            match self.step(operation) {
                Next::Follows => at += 1,
                Next::At(to) => at = to,
                Next::End => return RuleOutcome::Executed,
                Next::Filtered => return RuleOutcome::Filtered,
            }
        }
        self.endless();
        RuleOutcome::Executed
    }

    #[inline]
    fn pop(&mut self) -> Value {
        self.scratch.stack.pop().unwrap_or(Value::ZERO)
    }

    #[inline]
    fn push(&mut self, value: Value) {
        if self.scratch.stack.len() < MOST_VALUES {
            self.scratch.stack.push(value);
        }
    }

    /// Takes the last `count` values off the stack, after `with` has seen them in the order in
    /// which they were pushed.
    fn take<R>(&mut self, count: usize, with: impl FnOnce(&[Value]) -> R) -> R {
        let from = self.scratch.stack.len().saturating_sub(count);
        let found = with(self.scratch.stack.get(from..).unwrap_or_default());
        self.scratch.stack.truncate(from);
        found
    }

    /// Takes the keys of an entry from the stack. A tuple alone stands for its items.
    fn take_keys<R>(&mut self, count: usize, with: impl FnOnce(&[Value]) -> R) -> R {
        self.take(count, |keys| match keys {
            [Value::Tuple(items)] => with(items),
            keys => with(keys),
        })
    }

    #[inline]
    fn word(&mut self) -> u64 {
        match self.pop() {
            Value::Int(number) => number.cast_unsigned(),
            Value::Unsigned(number) => number,
            other => word_of(other, self.shared.dialect),
        }
    }

    #[inline]
    fn now(&mut self) -> u64 {
        let context = self.context;
        *self.now.get_or_insert_with(|| context.unix_ns())
    }

    /// Executes an operation: here the commonest, so that they cost no call.
    #[inline]
    fn step(&mut self, operation: &Operation) -> Next {
        match operation {
            Operation::Constant(value) => self.push(value.clone()),
            Operation::Known(known) => {
                let value = self.known(*known);
                self.push(value);
            }
            Operation::Count { map, keys } => {
                let (maps, shard) = (&self.shared.maps, self.context.cpu());
                self.take_keys(*keys, |keys| {
                    maps.aggregate(*map, shard, Aggregation::Count, keys, 1, 0);
                });
            }
            Operation::Return => return Next::End,
            Operation::Filter => {
                let value = self.pop();
                if !numbers::is_true(&value) {
                    return Next::Filtered;
                }
            }
            Operation::ReadText { most } => {
                let address = self.word();
                let text = self.text(address, *most);
                self.push(text);
            }
            Operation::KernelStack(most) => {
                let context = self.context;
                let frames = (self.scratch).frames(*most, |room| context.kernel_stack(room));
                self.push(Value::KernelStack(frames));
            }
            Operation::Binary(operator) => {
                let right = self.pop();
                let left = self.pop();
                let found = numbers::binary(*operator, &left, &right, self.shared.dialect);
                self.push(found.unwrap_or_else(|numbers::ByZero| {
                    count(&self.shared.faults.divisions);
                    numbers::by_zero(self.shared.dialect)
                }));
            }
            Operation::Global { .. }
            | Operation::SetGlobal { .. }
            | Operation::UpdateGlobal { .. }
            | Operation::StepGlobal { .. }
            | Operation::Aggregate { .. }
            | Operation::Delete { .. }
            | Operation::HasKey { .. }
            | Operation::MapLength(_)
            | Operation::Clear(_) => self.on_map(operation),
            other => return self.seldom(other),
        }
        Next::Follows
    }

    #[inline(never)]
    fn seldom(&mut self, operation: &Operation) -> Next {
        let shared = self.shared;
        match operation {
            Operation::Drop => {
                self.pop();
            }
            Operation::Local(slot) => {
                let value = self.scratch.locals.get(*slot).cloned();
                self.push(value.unwrap_or(Value::ZERO));
            }
            Operation::SetLocal(slot) => {
                let value = self.pop();
                if let Some(place) = self.scratch.locals.get_mut(*slot) {
                    *place = value;
                }
            }
            Operation::StepLocal { slot, by, postfix } => {
                let before = self
                    .scratch
                    .locals
                    .get(*slot)
                    .cloned()
                    .unwrap_or(Value::ZERO);
                let after = stepped(&before, *by, shared.dialect);
                if let Some(place) = self.scratch.locals.get_mut(*slot) {
                    *place = after.clone();
                }
                self.push(if *postfix { before } else { after });
            }
            Operation::Zero(map) => match self.may_walk(*map) {
                true => shared.maps.zero(*map),
                false => return self.endless(),
            },
            Operation::Iterate(map) => match self.items(*map) {
                Some(items) => self.scratch.iterations.push(items.into_iter()),
                None => return self.endless(),
            },
            Operation::Unary(operator) => {
                let operand = self.pop();
                self.push(numbers::unary(*operator, &operand, shared.dialect));
            }
            Operation::CompareUnsigned(operator) => {
                let (right, left) = (self.word(), self.word());
                let (left, right) = (numbers::unsigned(left), numbers::unsigned(right));
                let found = numbers::binary(*operator, &left, &right, shared.dialect);
                self.push(found.unwrap_or(Value::ZERO));
            }
            Operation::Truth => {
                let value = self.pop();
                self.push(Value::Int(numbers::is_true(&value).into()));
            }
            Operation::Jump(to) => return Next::At(*to),
            Operation::JumpIfZero(to) => {
                let value = self.pop();
                if !numbers::is_true(&value) {
                    return Next::At(*to);
                }
            }
            Operation::Next { slot, end } => {
                let iterations = &mut self.scratch.iterations;
                let Some(item) = iterations.last_mut().and_then(Iterator::next) else {
                    iterations.pop();
                    return Next::At(*end);
                };
                if let Some(place) = self.scratch.locals.get_mut(*slot) {
                    *place = item;
                }
            }
            Operation::EndIteration => {
                self.scratch.iterations.pop();
            }
            Operation::Tuple(items) => match self.take(*items, Value::tuple) {
                Some(tuple) => self.push(tuple),
                None => return self.endless(),
            },
            Operation::Record(names) => {
                match self.take(names.len(), |items| Value::record(names, items)) {
                    Some(record) => self.push(record),
                    None => return self.endless(),
                }
            }
            Operation::Arrange(by) => {
                let value = self.pop();
                self.push(by.of(&value));
            }
            Operation::SplitNumber {
                bytes,
                signed,
                elements,
            } => {
                let word = self.word();
                self.push(numbers::split(word, *bytes, *signed, *elements));
            }
            Operation::JoinNumber { bytes } => {
                let array = self.pop();
                self.push(numbers::join(&array, *bytes, shared.dialect));
            }
            Operation::Group(elements) => {
                let array = self.pop();
                match numbers::group(&array, *elements) {
                    Some(grouped) => self.push(grouped),
                    None => return self.endless(),
                }
            }
            Operation::Element => {
                let index = usize::try_from(self.word()).unwrap_or(usize::MAX);
                let element = match self.pop() {
                    Value::Array(items) => items.get(index).cloned(),
                    _ => None,
                };
                self.push(element.unwrap_or(Value::ZERO));
            }
            Operation::ByteOfText => {
                let index = usize::try_from(self.word()).unwrap_or(usize::MAX);
                let byte = match self.pop() {
                    Value::Text(text) => text.get(index).copied(),
                    _ => None,
                };
                self.push(Value::Int(byte.unwrap_or_default().into()));
            }
            Operation::Item(index) => {
                let tuple = self.pop();
                let item = match &tuple {
                    Value::Tuple(items) | Value::Record { items, .. } => items.get(*index).cloned(),
                    _ => None,
                };
                self.push(item.unwrap_or(Value::ZERO));
            }
            Operation::Emit { emission, values } => {
                let context = self.context;
                let emitted = self.take(*values, |values| context.emit(*emission, values));
                self.note(emitted);
            }
            Operation::EmitMap { emission, map } => {
                if !self.may_walk(*map) {
                    return self.endless();
                }
                let emitted = self.emit_map(*emission, *map);
                self.note(emitted);
            }
            Operation::Exit => {
                let status = self.word();
                // The first one counts: later ones of other vCPUs have no effect.
                if !shared.exited.swap(true, Ordering::Relaxed) {
                    shared.status.store(status & 0xff, Ordering::Relaxed);
                }
                return Next::End;
            }
            Operation::Abort => {
                if !shared.exited.swap(true, Ordering::Relaxed) {
                    shared.status.store(1, Ordering::Relaxed);
                    shared.failed.store(true, Ordering::Relaxed);
                }
                return Next::End;
            }
            Operation::Keep(name) => self.keep(Wish::Snapshot, name),
            Operation::Rewind { name, has_ago } => {
                let ago = has_ago.then(|| Duration::from_nanos(self.word()));
                self.keep(Wish::Rewind(ago), name);
            }
            other => self.on_memory(other),
        }
        Next::Follows
    }

    /// Asks the script's owner to keep a moment.
    fn keep(&self, wish: Wish, name: &Arc<str>) {
        let added = self.shared.moments.add(Moment {
            wish,
            name: name.clone(),
            unix_ns: self.context.unix_ns(),
            hold: match wish {
                Wish::Snapshot => self.context.hold_here(),
                Wish::Rewind(_) => None,
            },
        });
        self.context.wake();
        self.note(added);
    }

    /// Counts an emission that was dropped.
    fn note(&self, emitted: bool) {
        if !emitted {
            count(&self.shared.faults.lost);
        }
    }

    /// Emits a map with its current contents. Returns `false` if there is no room for it.
    fn emit_map(&self, emission: usize, map: MapNumber) -> bool {
        let Shared {
            maps, snapshots, ..
        } = self.shared;
        let Some(ticket) = snapshots.put(|| maps.snapshot(map)) else {
            return false;
        };
        let emitted = self.context.emit(emission, &[Value::Int(ticket)]);
        if !emitted {
            snapshots.take(ticket);
        }
        emitted
    }

    /// Ends a rule that goes too far.
    fn endless(&self) -> Next {
        count(&self.shared.faults.endless);
        Next::End
    }

    /// Checks whether one operation may visit all of a map. The vCPU is stopped for as long as that
    /// takes, which a count of operations alone would not bound.
    fn may_walk(&mut self, map: MapNumber) -> bool {
        let may = self.walked < MOST_OPERATIONS;
        self.walked = self.walked.saturating_add(self.shared.maps.len(map));
        may
    }

    /// Returns the items of an iteration over a map: a tuple of key and value for each entry.
    fn items(&mut self, map: MapNumber) -> Option<Vec<Value>> {
        if !self.may_walk(map) {
            return None;
        }
        let entries = self.shared.maps.snapshot(map).entries.into_iter();
        let items = entries.map(|(keys, reading)| {
            let key = match &*keys {
                [one] => one.clone(),
                _ => Value::Tuple(keys),
            };
            let value = match reading {
                Reading::Value(value) => value,
                other => Value::Int(other.number().unwrap_or_default()),
            };
            Value::tuple(&[key, value])
        });
        items.collect()
    }

    #[inline(never)]
    fn on_map(&mut self, operation: &Operation) {
        let shared = self.shared;
        let (maps, dialect) = (&shared.maps, shared.dialect);
        match operation {
            Operation::Global { map, keys } => {
                let value = self.take_keys(*keys, |keys| maps.get(*map, keys));
                self.push(value.unwrap_or(Value::ZERO));
            }
            Operation::SetGlobal { map, keys } => {
                let value = self.pop();
                self.take_keys(*keys, |keys| maps.set(*map, keys, value));
            }
            Operation::UpdateGlobal {
                map,
                keys,
                operator,
            } => {
                let value = self.pop();
                let mut failed = false;
                let change = |before: Option<&Value>| {
                    let before = before.unwrap_or(&Value::ZERO);
                    numbers::binary(*operator, before, &value, dialect).unwrap_or_else(|_| {
                        failed = true;
                        numbers::by_zero(dialect)
                    })
                };
                self.take_keys(*keys, |keys| maps.update(*map, keys, change));
                if failed {
                    count(&shared.faults.divisions);
                }
            }
            Operation::StepGlobal {
                map,
                keys,
                by,
                postfix,
            } => {
                let mut old = Value::ZERO;
                let change = |before: Option<&Value>| {
                    old = before.cloned().unwrap_or(Value::ZERO);
                    stepped(&old, *by, dialect)
                };
                let after = self.take_keys(*keys, |keys| maps.update(*map, keys, change));
                self.push(if *postfix { old } else { after });
            }
            Operation::Aggregate {
                map,
                keys,
                aggregation,
            } => {
                let value = self.word().cast_signed();
                let shard = self.context.cpu();
                let at = match aggregation {
                    Aggregation::TimeSeries(_) => self.now(),
                    _ => 0,
                };
                self.take_keys(*keys, |keys| {
                    maps.aggregate(*map, shard, *aggregation, keys, value, at);
                });
            }
            Operation::Delete { map, keys } => {
                let was_there = self.take_keys(*keys, |keys| maps.delete(*map, keys));
                self.push(Value::Int(was_there.into()));
            }
            Operation::HasKey { map, keys } => {
                let is_there = self.take_keys(*keys, |keys| maps.contains(*map, keys));
                self.push(Value::Int(is_there.into()));
            }
            Operation::MapLength(map) => {
                let length = maps.len(*map);
                self.push(Value::Int(i64::try_from(length).unwrap_or(i64::MAX)));
            }
            Operation::Clear(map) => maps.clear(*map),
            _ => {}
        }
    }
}

/// Returns the word of a value that is no plain number.
#[cold]
#[inline(never)]
fn word_of(value: Value, dialect: Dialect) -> u64 {
    numbers::number(&value, dialect) as u64
}

fn stepped(before: &Value, by: i64, dialect: Dialect) -> Value {
    let sum = numbers::number(before, dialect) + i128::from(by);
    numbers::value(sum, dialect)
}

pub(crate) fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

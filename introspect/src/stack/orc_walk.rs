//! Walks one kernel stack by the kernel's unwind information, as arch/x86/kernel/unwind_orc.c does.

use super::code::{Code, KernelCode};
use super::frames::{End, Found, Guess, SavedRegisters};
use super::kernel::{MAX_KERNEL_FRAMES, Walk};
use super::orc::OrcTable;
use super::orc_versions::{Base, OrcEntry, OrcType};
use crate::Gva;
use crate::x86_64::GeneralRegisters;

/// DWARF's numbers of registers, for [`End::LostRegister`].
const DX: u16 = 1;
const DI: u16 = 5;
const R10: u16 = 10;
const R13: u16 = 13;

/// The position of the walk.
struct Position {
    ip: u64,
    sp: u64,
    bp: u64,
    /// True if `ip` is an instruction that runs next rather than a return address.
    exact: bool,
    /// All registers at this position, known only if they were saved.
    all: Option<GeneralRegisters>,
    /// An address in the function that returns to `ip`, or 0 if none does.
    callee: u64,
}

/// Adds the frames outside the one whose RIP, RSP and RBP are in `registers`, which has been added.
/// `exact` is true if that frame is at an instruction, and false if it is after a call. `all` has
/// its other registers, if known.
pub(super) fn walk(
    walk: &mut Walk<'_, '_>,
    table: OrcTable,
    registers: GeneralRegisters,
    exact: bool,
    all: Option<GeneralRegisters>,
) -> Result<End, End> {
    let mut position = Position {
        ip: registers.rip,
        sp: registers.rsp,
        bp: registers.rbp,
        exact,
        all,
        callee: 0,
    };
    // If the stack pointer is on no stack, as in the first instructions of an entry, the table says
    // so.
    let _ = walk.stacks.enter(position.sp, 8);
    for _ in 0..MAX_KERNEL_FRAMES {
        if let Some(end) = step(walk, table, &mut position)? {
            return Ok(end);
        }
    }
    Ok(End::TooLong)
}

/// The record assumed for generated code, which no table covers.
const WITH_FRAME_POINTER: OrcEntry = OrcEntry {
    sp_offset: 16,
    bp_offset: -16,
    sp: Base::Bp,
    bp: Base::PreviousSp,
    kind: OrcType::Call,
    signal: false,
};
/// The state right after a call through a null pointer or of a thunk.
const CALLED: OrcEntry = OrcEntry {
    sp_offset: 8,
    bp_offset: 0,
    sp: Base::Sp,
    bp: Base::Undefined,
    kind: OrcType::Call,
    signal: false,
};

/// Finds the record for a position, and how its return address will be marked.
fn find(
    walk: &Walk<'_, '_>,
    table: OrcTable,
    position: &Position,
) -> Result<(OrcEntry, Found), End> {
    // A call may be the last instruction of its function, or of its record's range.
    let ip = match position.exact {
        true => position.ip,
        false => position.ip.wrapping_sub(1),
    };
    let address = Gva(ip);
    if position.ip == 0 {
        return Ok((CALLED, Found::Return));
    }
    let table = match walk.code().at(ip) {
        Some(Code::Kernel) => Some(table),
        Some(Code::Module(module)) => module.orc,
        Some(Code::Generated) => {
            return Ok((WITH_FRAME_POINTER, Found::Guess(Guess::FramePointer)));
        }
        None => return Err(End::NotCode { address }),
    };
    let table = table.ok_or(End::NoUnwindInfo { address })?;
    let found = table.find(walk.view, ip);
    let found = found.map_err(|_| End::NoUnwindInfo { address })?;
    let found = found.ok_or(End::BadUnwindInfo { address })?;
    // Tables are wrong for the one instruction there. objtool does not see that the function leaves
    // all registers on the stack in place of those that the CPU had pushed. Another function can
    // return there, because `error_entry` jumps to one at its end (`sync_regs`, from Linux 6.2 on).
    let left = position.exact || !walk.code().is_in_error_entry(position.callee);
    let wrong = found.kind == OrcType::HardwareFrame
        && left
        && walk.code().follows_error_entry(walk.view, position.ip);
    // ORC marks a thunk's first instructions as the end of a stack (UNWIND_HINT_EMPTY,
    // UNWIND_HINT_UNDEFINED), although only calls have run.
    let ends = matches!(found.kind, OrcType::EndOfStack | OrcType::Undefined);
    let thunk = match ends && position.exact {
        true => walk.code().in_thunk(walk.view, ip),
        false => None,
    };
    let entry = match (wrong, thunk) {
        (true, _) => OrcEntry::REGISTERS,
        (false, Some(sp_offset)) => OrcEntry {
            sp_offset,
            ..CALLED
        },
        (false, None) => found,
    };
    Ok((entry, Found::Return))
}

/// Returns the record for a function that has none, as the kernel's own functions that save
/// registers at a crash (`__crash_kexec`, STACK_FRAME_NON_STANDARD): its return address is the
/// nearest one on the stack that follows a call of it. Returns `None` if there is none.
fn by_call(walk: &mut Walk<'_, '_>, position: &Position) -> Option<OrcEntry> {
    /// The maximum distance of the return address in words.
    const MOST_WORDS: i16 = 128;
    let function = walk.code().symbols.resolve(position.ip)?.0.address;
    (0..MOST_WORDS).find_map(|word| {
        let at = position.sp.wrapping_add_signed(i64::from(word) * 8);
        let address = walk.read_stack(at).ok()?;
        let is_call = KernelCode::follows_call_of(walk.view, address, function);
        is_call.then_some(OrcEntry {
            sp_offset: (word + 1) * 8,
            ..CALLED
        })
    })
}

/// Moves one frame outwards. Returns `Some` at the end.
fn step(
    walk: &mut Walk<'_, '_>,
    table: OrcTable,
    position: &mut Position,
) -> Result<Option<End>, End> {
    let (mut entry, mut found) = find(walk, table, position)?;
    let address = Gva(position.ip);
    if entry.kind == OrcType::Undefined
        && let Some(called) = by_call(walk, position)
    {
        (entry, found) = (called, Found::Guess(Guess::Caller));
    }
    match entry.kind {
        OrcType::EndOfStack => return Ok(Some(End::Bottom)),
        OrcType::Undefined => return Err(End::NoUnwindInfo { address }),
        _ => {}
    }
    let before = (walk.stacks.current(), position.sp);
    let previous_sp = previous_sp(walk, &table, &entry, position)?;
    match entry.kind {
        OrcType::Registers => {
            let saved = walk.read_registers(previous_sp)?;
            if saved.in_user_mode() {
                walk.entry = Some(saved);
                return Ok(Some(End::UserMode));
            }
            interrupted(walk, position, saved.general, Some(saved.general))?;
        }
        OrcType::HardwareFrame => {
            walk.stacks
                .enter(previous_sp, SavedRegisters::HARDWARE_SIZE)?;
            let word = |walk: &mut Walk<'_, '_>, index: u64| {
                walk.read_stack(previous_sp.wrapping_add(index * 8))
            };
            // The CPU has not changed the other registers since.
            let general = GeneralRegisters {
                rip: word(walk, 0)?,
                rflags: word(walk, 2)?,
                rsp: word(walk, 3)?,
                rbp: position.bp,
                ..position.all.unwrap_or_default()
            };
            let saved = SavedRegisters {
                general,
                cs: word(walk, 1)? as u16,
                orig_rax: u64::MAX,
            };
            if saved.in_user_mode() {
                walk.entry = position.all.map(|_| saved);
                return Ok(Some(End::UserMode));
            }
            let all = position.all.map(|_| general);
            interrupted(walk, position, general, all)?;
        }
        _ => {
            let callee = position.ip;
            position.ip = walk.push_return(previous_sp.wrapping_sub(8), found)?;
            position.callee = callee;
            position.sp = previous_sp;
            position.all = None;
        }
    }
    position.exact = entry.signal || walk.is_first_code(position.ip);
    match entry.bp {
        Base::Undefined => {
            if let Some(all) = position.all {
                position.bp = all.rbp;
            }
        }
        Base::PreviousSp => {
            let at = previous_sp.wrapping_add_signed(entry.bp_offset.into());
            position.bp = walk.read_stack(at)?;
        }
        Base::Bp => {
            let at = position.bp.wrapping_add_signed(entry.bp_offset.into());
            position.bp = walk.read_stack(at)?;
        }
        _ => return Err(End::BadUnwindInfo { address }),
    }
    let (stack, sp) = before;
    let inwards =
        walk.stacks.current() == stack && position.sp <= sp && walk.stacks.holds(position.sp, 8);
    match inwards {
        true => Err(End::NotOutwards {
            pointer: Gva(position.sp),
        }),
        false => Ok(None),
    }
}

/// Adds the frame that was interrupted with these registers.
fn interrupted(
    walk: &mut Walk<'_, '_>,
    position: &mut Position,
    at: GeneralRegisters,
    all: Option<GeneralRegisters>,
) -> Result<(), End> {
    if at.rip != 0 {
        walk.push(at.rip, Found::Interrupted)?;
    }
    position.ip = at.rip;
    position.sp = at.rsp;
    position.all = all;
    Ok(())
}

/// Returns the stack pointer that the record computes: the end of its return address, or the start
/// of its registers.
fn previous_sp(
    walk: &mut Walk<'_, '_>,
    table: &OrcTable,
    entry: &OrcEntry,
    position: &Position,
) -> Result<u64, End> {
    let address = Gva(position.ip);
    let offset = |base: u64| base.wrapping_add_signed(entry.sp_offset.into());
    let register = |register: u16, choose: fn(&GeneralRegisters) -> u64| {
        let known = position.all.as_ref().map(choose);
        known.ok_or(End::LostRegister { address, register })
    };
    Ok(match entry.sp {
        Base::Sp => offset(position.sp),
        Base::Bp => offset(position.bp),
        Base::BpIndirect => walk.read_stack(offset(position.bp))?,
        Base::SpIndirect => match table.format().offset_after_indirection {
            true => offset(walk.read_stack(position.sp)?),
            false => walk.read_stack(offset(position.sp))?,
        },
        Base::R10 => register(R10, |all| all.r10)?,
        Base::R13 => register(R13, |all| all.r13)?,
        Base::Di => register(DI, |all| all.rdi)?,
        Base::Dx => register(DX, |all| all.rdx)?,
        Base::Undefined | Base::PreviousSp => return Err(End::BadUnwindInfo { address }),
    })
}

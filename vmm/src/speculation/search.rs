//! The search for a call in the kernel's code, by reading it alone.

use iced_x86::FlowControl;
use introspect::Gva;
use introspect::x86_64::paging::AddressSpace;

use crate::trap::TrapTable;
use crate::x86_64::emulate;

/// An instruction that transfers control to a function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Transfer {
    /// The address of the instruction.
    pub at: Gva,
    /// Whether it is a CALL, which pushes a return address. Otherwise it is a JMP.
    pub is_call: bool,
}

/// Returns the CALL or JMP to one of `wanted` that the code at `start` leads to, within at most
/// `most` instructions.
///
/// If `divert` returns another address for one, the search continues there.
pub fn find_call(
    traps: &TrapTable,
    space: AddressSpace,
    start: Gva,
    wanted: &[Gva],
    divert: &dyn Fn(Gva) -> Option<Gva>,
    most: usize,
) -> Option<Transfer> {
    let mut open = vec![start];
    let mut seen = std::collections::HashSet::new();
    while let Some(at) = open.pop() {
        if seen.len() >= most || !seen.insert(at) {
            continue;
        }
        if let Some(to) = divert(at) {
            open.push(to);
            continue;
        }
        let code = traps.read_code(at, space);
        let Ok(found) = emulate::decode(&code, at.0) else {
            continue;
        };
        let to = Gva(found.near_branch_target());
        let next = Gva(found.next_ip());
        let flow = found.flow_control();
        match flow {
            FlowControl::Call | FlowControl::UnconditionalBranch if wanted.contains(&to) => {
                let is_call = flow == FlowControl::Call;
                return Some(Transfer { at, is_call });
            }
            FlowControl::Next | FlowControl::Call | FlowControl::IndirectCall => open.push(next),
            FlowControl::ConditionalBranch => open.extend([to, next]),
            FlowControl::UnconditionalBranch => open.push(to),
            _ => {}
        }
    }
    None
}

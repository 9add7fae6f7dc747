//! The kernel stack of a crashed guest.

use serde::Serialize;
use vmm::RunEnd;

use crate::end_report::{message, registers};
use crate::guest_kernel::symbolize;
use crate::protocol::inspection::Frame;
use crate::report::printable;
use crate::vm::Vm;

/// The largest number of frames shown.
const MOST_FRAMES: usize = 100;

/// A crash.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Crash {
    /// The description.
    pub message: String,
    /// The frames of the kernel's stack, innermost first: `0xffffffff81000000 name+0x12`.
    pub kernel_stack: Vec<String>,
    /// The reason why the stack ends early, if it does.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stack_ends: Option<String>,
}

impl Crash {
    /// Returns the crash of a run; `None` if the run ended in order.
    pub fn of(end: &RunEnd, vm: &Vm) -> Option<Self> {
        if end.is_orderly() {
            return None;
        }
        let symbols = vm.engine.get().map(|engine| &engine.view().kernel.symbols);
        let message = message(end, symbols, vm);
        let (kernel_stack, stack_ends) = match registers(end) {
            None => (Vec::new(), None),
            Some(registers) => {
                match vm.inspection().kernel_stack(registers) {
                    Ok((frames, ends)) => {
                        let shown = frames.iter().take(MOST_FRAMES).map(frame);
                        let more = frames.len() > MOST_FRAMES;
                        let cut = more.then(|| format!("{} frames", frames.len()));
                        (shown.collect(), cut.or(ends))
                    }
                    // The place is known all the same.
                    Err(why) => {
                        let place = symbolize(symbols, registers.regs.rip);
                        (vec![place], Some(why.message))
                    }
                }
            }
        };
        Some(Self {
            message: printable(&message),
            kernel_stack: kernel_stack.iter().map(|frame| printable(frame)).collect(),
            stack_ends: stack_ends.map(|ends| printable(&ends)),
        })
    }
}

/// Formats a frame: `0xffffffff81000000 name+0x12 (module) ? doubt`
fn frame(frame: &Frame) -> String {
    let mut text = format!("{:#x}", frame.address);
    if let Some(name) = &frame.name {
        text += &format!(" {name}");
        if frame.offset > 0 {
            text += &format!("+{:#x}", frame.offset);
        }
    }
    if let Some(object) = &frame.object {
        text += &format!(" ({object})");
    }
    if let Some(doubt) = &frame.doubt {
        text += &format!(" ? {doubt}");
    }
    text
}

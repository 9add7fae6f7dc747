//! The function that the call programs call, and the loop around it. Kernel text and user text both
//! have them.

use iced_x86::IcedError;
use iced_x86::code_asm::*;

/// Assembles a leaf with a frame pointer: RAX = RDI + 1.
pub fn leaf(a: &mut CodeAssembler) -> Result<(), IcedError> {
    a.push(rbp)?;
    a.mov(rbp, rsp)?;
    a.lea(rax, ptr(rdi + 1))?;
    a.pop(rbp)?;
    a.ret()
}

/// Assembles a loop that calls `function`, which should return n + 1, RDI times with n = 0, 1, ….
/// It stops at the first wrong answer. RBX = right answers; `function` must keep RBX and R12.
pub fn call_loop(a: &mut CodeAssembler, function: CodeLabel) -> Result<(), IcedError> {
    let mut again = a.create_label();
    let mut done = a.create_label();
    a.mov(r12, rdi)?;
    a.xor(ebx, ebx)?;
    a.set_label(&mut again)?;
    a.mov(rdi, rbx)?;
    a.call(function)?;
    a.lea(rcx, ptr(rbx + 1))?;
    a.cmp(rax, rcx)?;
    a.jne(done)?;
    a.mov(rbx, rcx)?;
    a.cmp(rbx, r12)?;
    a.jb(again)?;
    a.set_label(&mut done)
}

//! The effects of single instructions, as a table. A line: instruction bytes (with their text),
//! state before, changes.
//!
//! `name=value` sets a register, and `[address]=value` eight bytes of memory. All numbers are
//! hexadecimal. State that is not named in the last column must stay as it was. RIP is expected at
//! the next instruction.

use super::super::cpu::slot;
use super::*;
use iced_x86::Register;

const CASES: &str = "
# what functions start with
90                         nop                        |  |
66 90                      xchg ax,ax                 |  |
0f 1f 44 00 00             nop dword [rax+rax]        | rax=dead000000000000 |
66 0f 1f 84 00 00 00 00 00 nop word [rax+rax]         |  |
66 2e 0f 1f 84 00 00 00 00 00 nop cs                  |  |
0f 1f 00                   nop dword [rax]            |  |
0f 1f c8                   unassigned hint            |  |
0f 19 c0                   unassigned hint            |  |
f3 90                      pause                      |  |
f3 0f 1e fa                endbr64                    | rflags=10002 | rflags=2
0f 0d 08                   prefetchw [rax]            |  |
0f 18 08                   prefetcht0 [rax]           |  |
0f ae e8                   lfence                     |  |
0f ae f0                   mfence                     |  |
0f ae f8                   sfence                     |  |

# stack
55                         push rbp                   | rbp=1122334455667788 rsp=1800 | rsp=17f8 [17f8]=1122334455667788
41 57                      push r15                   | r15=15 rsp=1800 | rsp=17f8 [17f8]=15
54                         push rsp                   | rsp=1800 | rsp=17f8 [17f8]=1800
ff 74 24 08                push qword [rsp+8]         | rsp=1800 [1808]=77 | rsp=17f8 [17f8]=77
6a ff                      push -1                    | rsp=1800 | rsp=17f8 [17f8]=ffffffffffffffff
68 00 00 00 80             push -80000000h            | rsp=1800 | rsp=17f8 [17f8]=ffffffff80000000
66 50                      push ax                    | rax=123456 rsp=1802 | rsp=1800 [1800]=3456
5d                         pop rbp                    | rsp=17f8 [17f8]=1234 | rbp=1234 rsp=1800
5c                         pop rsp                    | rsp=17f8 [17f8]=1234 | rsp=1234
8f 44 24 08                pop qword [rsp+8]          | rsp=1800 [1800]=9 | rsp=1808 [1810]=9
66 58                      pop ax                     | rsp=1800 [1800]=ffffbeef rax=11112222 | rsp=1802 rax=1111beef
c9                         leave                      | rbp=1800 rsp=1000 [1800]=1900 | rbp=1900 rsp=1808
9c                         pushfq                     | rflags=10246 rsp=1800 | rflags=246 rsp=17f8 [17f8]=246
9d                         popfq, kernel              | rflags=2 rsp=1800 [1800]=ffffffffffe7feff | rflags=247ed7 rsp=1808

# moves
48 89 e5                   mov rbp,rsp                | rsp=1800 | rbp=1800
89 c0                      mov eax,eax                | rax=1111111122222222 | rax=22222222
66 89 d8                   mov ax,bx                  | rax=1111111111111111 rbx=2222 | rax=1111111111112222
88 e0                      mov al,ah                  | rax=1122 | rax=1111
40 88 e0                   mov al,spl                 | rax=1122 rsp=1855 | rax=1155
48 c7 c0 ff ff ff ff       mov rax,-1                 |  | rax=ffffffffffffffff
48 b8 08 07 06 05 04 03 02 01 mov rax,imm64           |  | rax=102030405060708
48 a1 00 10 00 00 00 00 00 00 mov rax,[1000h] moffs   | [1000]=abcdef | rax=abcdef
65 48 8b 04 25 28 00 00 00 mov rax,gs:[28h]           | gs=1000 [1028]=5a5a | rax=5a5a
65 48 8b 05 28 00 c0 ff    mov rax,gs:[rip-3fffd8h]   | gs=0 [1028]=77 rip=400ff8 | rax=77
64 48 89 08                mov fs:[rax],rcx           | fs=1000 rax=10 rcx=99 | [1010]=99
48 8b 05 f9 0f c0 ff       mov rax,[rip-3ff007h]      | [1000]=1234 | rax=1234
67 8b 00                   mov eax,[eax]              | rax=ffffffff00001000 [1000]=1 | rax=1
67 48 8d 44 08 ff          lea rax,[eax+ecx-1]        | rax=ffffffff rcx=2 | rax=0
48 8d 64 24 f8             lea rsp,[rsp-8]            | rsp=1800 | rsp=17f8
8d 44 88 04                lea eax,[rax+rcx*4+4]      | rax=ffffffffffffffff rcx=1 | rax=7
65 48 8d 00                lea rax,gs:[rax]           | gs=1000 rax=5 |
c6 00 12                   mov byte [rax],12h         | rax=1001 [1000]=0 | [1000]=1200
0f b6 47 01                movzx eax,byte [rdi+1]     | rdi=1000 rax=ffffffffffffffff [1000]=8000 | rax=80
66 0f be c4                movsx ax,ah                | rax=118000 | rax=11ff80
48 63 c7                   movsxd rax,edi             | rdi=80000000 | rax=ffffffff80000000
0f 45 c1                   cmovne eax,ecx, false      | rflags=42 rax=ffffffff00000001 | rax=1
0f 95 c0                   setne al                   | rflags=2 rax=ff00 | rax=ff01
48 98                      cdqe                       | rax=80000000 | rax=ffffffff80000000
48 99                      cqo                        | rax=8000000000000000 | rdx=ffffffffffffffff
99                         cdq                        | rax=7fffffff rdx=ffffffffffffffff | rdx=0
0f c3 08                   movnti [rax],ecx           | rax=1000 rcx=ffffffffffffffff | [1000]=ffffffff
48 0f c8                   bswap rax                  | rax=102030405060708 | rax=807060504030201

# arithmetic: flags are c=1 p=4 a=10 z=40 s=80 o=800
48 83 ec 10                sub rsp,10h                | rsp=1800 | rsp=17f0 rflags=6
31 c0                      xor eax,eax                | rax=ffffffffffffffff rflags=8d7 | rax=0 rflags=46
48 85 ff                   test rdi,rdi               | rdi=8000000000000000 | rflags=86
80 3f 00                   cmp byte [rdi],0           | rdi=1000 | rflags=46
00 c8                      add al,cl                  | rax=1ff rcx=1 | rax=100 rflags=57
ff c0                      inc eax keeps carry        | rax=7fffffff rflags=3 | rax=80000000 rflags=897
48 f7 d8                   neg rax                    | rax=1 | rax=ffffffffffffffff rflags=97
f0 48 ff 00                lock inc qword [rax]       | rax=1000 [1000]=1 | [1000]=2
65 ff 05 00 10 c0 ff       inc dword gs:[rip-3ff000h] | gs=0 [2007]=7fffffff rip=401000 | [2007]=80000000 rflags=896
48 c1 e8 0c                shr rax,12                 | rax=1800 | rax=1 rflags=3
f7 f1                      div ecx                    | rax=7 rdx=0 rcx=2 | rax=3 rdx=1
48 f7 f9                   idiv rcx                   | rax=fffffffffffffff9 rdx=ffffffffffffffff rcx=2 | rax=fffffffffffffffd rdx=ffffffffffffffff
f3 48 0f b8 c7             popcnt rax,rdi             | rdi=ff00ff rflags=8d7 | rax=10 rflags=2
0f bc c1                   bsf eax,ecx of zero        | rax=1234 | rflags=42
48 0f ab 08                bts [rax],rcx, far         | rax=1800 rcx=ffffffffffffffff [17f8]=0 | [17f8]=8000000000000000
f0 48 0f ba 28 03          lock bts qword [rax],3     | rax=1000 [1000]=8 | rflags=3

# control
e8 fb ff ff ff             call self                  | rsp=1800 | rsp=17f8 [17f8]=400005 rip=400000
ff 54 24 08                call [rsp+8]               | rsp=1800 [1808]=5555 | rsp=17f8 [17f8]=400004 rip=5555
ff d0                      call rax                   | rax=ffffffff81000000 rsp=1800 | rsp=17f8 [17f8]=400002 rip=ffffffff81000000
3e ff e0                   notrack jmp rax            | rax=1234 | rip=1234
ff 64 c5 00                jmp [rbp+rax*8]            | rbp=1000 rax=2 [1010]=99 | rip=99
eb 10                      jmp short                  |  | rip=400012
e9 00 00 00 80             jmp near, backwards        | rip=90000000 | rip=10000005
74 10                      je, taken                  | rflags=42 | rip=400012
75 10                      jne, not taken             | rflags=42 |
0f 8f 00 01 00 00          jg, taken                  | rflags=882 | rip=400106
7c 10                      jl, taken                  | rflags=82 | rip=400012
e3 10                      jrcxz, taken               | rcx=0 | rip=400012
67 e3 10                   jecxz, taken               | rcx=100000000 | rip=400013
e2 fe                      loop, taken                | rcx=2 | rcx=1 rip=400000
e2 fe                      loop, ends                 | rcx=1 | rcx=0
e1 fe                      loope, not equal           | rcx=5 | rcx=4
c3                         ret                        | rsp=1800 [1800]=1234 | rsp=1808 rip=1234
f3 c3                      rep ret                    | rsp=1800 [1800]=1234 | rsp=1808 rip=1234
c2 10 00                   ret 16                     | rsp=1800 [1800]=1234 | rsp=1818 rip=1234

# exchanges
87 07                      xchg [rdi],eax             | rdi=1000 rax=1 [1000]=2 | rax=2 [1000]=1
48 93                      xchg rax,rbx               | rax=1 rbx=2 | rax=2 rbx=1
f0 48 0f c1 07             lock xadd [rdi],rax        | rdi=1000 rax=1 [1000]=2 | rax=2 [1000]=3 rflags=6
48 0f c1 c0                xadd rax,rax               | rax=2 | rax=4
f0 48 0f b1 0f             lock cmpxchg, equal        | rdi=1000 rax=2 rcx=9 [1000]=2 | [1000]=9 rflags=46
f0 48 0f b1 0f             lock cmpxchg, different    | rdi=1000 rax=1 rcx=9 [1000]=2 | rax=2 rflags=97
f0 48 0f c7 0f             lock cmpxchg16b, equal     | rdi=1000 rax=1 rdx=2 rbx=3 rcx=4 [1000]=1 [1008]=2 | [1000]=3 [1008]=4 rflags=42
65 48 0f c7 0f             cmpxchg16b gs, different   | rdi=10 gs=1000 rax=1 rdx=2 [1010]=5 [1018]=6 rflags=42 | rax=5 rdx=6 rflags=2
0f c7 0f                   cmpxchg8b, different       | rdi=1000 rax=ffffffff00000000 rdx=1 [1000]=700000006 | rax=6 rdx=7

# flags and segments
0f 01 ca                   clac                       | rflags=40002 | rflags=2
0f 01 cb                   stac                       |  | rflags=40002
fc                         cld                        | rflags=402 | rflags=2
fd                         std                        |  | rflags=402
f8                         clc                        | rflags=3 | rflags=2
f9                         stc                        |  | rflags=3
f5                         cmc                        | rflags=3 | rflags=2
fa                         cli                        | rflags=202 | rflags=2
9f                         lahf                       | rflags=8d7 rax=0 | rax=d700
9e                         sahf                       | rax=ff00 | rflags=d7
f3 48 0f ae c8             rdgsbase rax               | gs=ffff888000000000 | rax=ffff888000000000
f3 48 0f ae d0             wrfsbase rax               | rax=7fff00001000 | fs=7fff00001000
9b                         fwait                      |  |
0f ae 1f                   stmxcsr [rdi]              | rdi=1000 [1000]=ffffffff00000000 | [1000]=ffffffff00001f80
";

fn number(text: &str) -> u64 {
    u64::from_str_radix(text, 16).unwrap()
}

fn set(state: &str, regs: &mut kvm_regs, machine: &mut Machine) {
    for item in state.split_whitespace() {
        let (name, value) = item.split_once('=').unwrap();
        let value = number(value);
        match name {
            "fs" => machine.fs = value,
            "gs" => machine.gs = value,
            "rip" => regs.rip = value,
            "rflags" => regs.rflags = value,
            _ => match name.strip_prefix('[') {
                Some(address) => {
                    machine
                        .write(number(address.trim_end_matches(']')), &value.to_le_bytes())
                        .unwrap();
                }
                None => {
                    let register =
                        Register::values().find(|r| format!("{r:?}").eq_ignore_ascii_case(name));
                    *slot(regs, register.unwrap()).unwrap() = value;
                }
            },
        }
    }
}

#[test]
fn instructions_do_what_the_manual_says() {
    let lines = CASES
        .lines()
        .filter(|line| !line.is_empty() && !line.starts_with('#'));
    let mut wrong = Vec::new();
    for line in lines {
        let [code, before, after] = line.split('|').collect::<Vec<_>>()[..] else {
            panic!("{line}")
        };
        let bytes = code.split_whitespace().map_while(|word| {
            (word.len() == 2)
                .then(|| u8::from_str_radix(word, 16).ok())
                .flatten()
        });
        let bytes: Vec<u8> = bytes.collect();
        let (mut regs, mut machine) = (registers(), Machine::default());
        set(before, &mut regs, &mut machine);
        let (mut expected_regs, mut expected) = (regs, machine.clone());
        expected_regs.rip += bytes.len() as u64;
        set(after, &mut expected_regs, &mut expected);

        if let Err(error) = run(&bytes, &mut regs, &mut machine) {
            wrong.push(format!("{line}: {error}"));
        } else if regs != expected_regs {
            wrong.push(format!("{line}: {regs:x?}"));
        } else if machine != expected {
            wrong.push(format!("{line}: memory or other state differs"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn sti_holds_interrupts_off_for_one_instruction_only_if_they_were_off() {
    for (before, shadow) in [(2, true), (0x202, false)] {
        let (mut regs, mut machine) = (registers(), Machine::default());
        regs.rflags = before;
        run(&[0xfb], &mut regs, &mut machine).unwrap();
        assert_eq!((regs.rflags, machine.shadow), (0x202, shadow));
    }
}

#[test]
fn hlt_halts_the_kernels_cpu_and_lets_interrupts_come() {
    let (mut regs, mut machine) = (registers(), Machine::default());
    (regs.rflags, machine.shadow) = (0x202, true);
    run(&[0xf4], &mut regs, &mut machine).unwrap();
    assert_eq!((machine.halted, machine.shadow), (true, false));
    assert_eq!((regs.rip, regs.rflags), (IP + 1, 0x202));
}

#[test]
fn popf_in_user_mode_leaves_the_kernels_flags() {
    let (mut regs, mut machine) = (
        registers(),
        Machine {
            cpl: 3,
            ..Machine::default()
        },
    );
    regs.rflags = 0x202;
    machine.write(regs.rsp, &0x3001u64.to_le_bytes()).unwrap();
    run(&[0x9d], &mut regs, &mut machine).unwrap();
    assert_eq!(regs.rflags, 0x203, "IF stays on, IOPL stays 0");
}

#[test]
fn a_locked_instruction_starts_over_when_another_cpu_was_faster() {
    let (mut regs, mut machine) = (
        registers(),
        Machine {
            races: 3,
            ..Machine::default()
        },
    );
    regs.rdi = MEMORY;
    run(&hex("f0 ff 07"), &mut regs, &mut machine).unwrap();
    assert_eq!(machine.memory[0], 4, "three increments elsewhere, one here");
}

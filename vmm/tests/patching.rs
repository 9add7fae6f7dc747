//! Text that changes under its sites: the guest finds and executes what it has written.
//!
//! A site follows its instruction, and is out of memory while there is none.
#![allow(clippy::unwrap_used)]

mod support;

use iced_x86::Mnemonic;
use introspect::{Gpa, Gva};
use support::{Guest, Host, SPARE, micro, paused_before_program};
use vmm::machine::Paused;
use vmm::trap::{INT3, SiteId};

/// The number of rounds of the guest's loop.
const ROUNDS: u8 = 50;
/// The address to which it writes its count.
const RESULT: u64 = SPARE + 0x1000;
/// The instructions that change: at 0 `push rbx`, at 1 `push rbp`, at 2 `add rsi, 1`, at 6 `pop
/// rbp`, at 7 `pop rbx`.
const BODY: u64 = SPARE + 7;

/// Returns a guest before a loop of [`ROUNDS`] rounds through [`BODY`]. Its result is 1 a round.
fn looping(host: &Host) -> (Guest, Paused) {
    let (guest, paused) = paused_before_program(host, "calls 1", 1);
    let mut code = vec![0x31, 0xf6]; // xor esi, esi
    code.extend([0xbb, ROUNDS, 0, 0, 0]); // mov ebx, ROUNDS
    code.extend([0x53, 0x55, 0x48, 0x83, 0xc6, 0x01, 0x5d, 0x5b]);
    code.extend([0xff, 0xcb, 0x75, 0xf4]); // dec ebx; jnz BODY
    code.extend([0x48, 0x89, 0x34, 0x25]); // mov [RESULT], rsi
    code.extend(u32::try_from(RESULT).unwrap().to_le_bytes());
    code.push(0xc3);
    guest.write(SPARE, &code);
    guest.write_jump(guest.symbol("micro_calls").0, SPARE);
    (guest, paused)
}

fn bytes<const N: usize>(guest: &Guest, at: u64) -> [u8; N] {
    use introspect::PhysicalMemory;
    let mut bytes = [0; N];
    guest
        .machine
        .ram()
        .read_physical(Gpa(at), &mut bytes)
        .unwrap();
    bytes
}

/// Returns (hits, whether it is suspended for lack of its instruction) of a site.
fn state(guest: &Guest, site: SiteId) -> (u64, bool) {
    let stats = guest.machine.traps().stats();
    let found = stats.iter().find(|stats| stats.site == site).unwrap();
    (found.hits, found.suspended)
}

/// Writes `new` at `at` as the guest does, which reads it back before the sites are resumed.
fn poke(guest: &Guest, at: u64, new: &[u8]) {
    let range = at..at + new.len() as u64;
    let suspended = guest.machine.traps().suspend(range.clone());
    guest.write(at, new);
    guest
        .machine
        .traps()
        .resume_sites(suspended, Some(range), guest.space());
}

/// Writes instructions of several bytes as Linux does (`text_poke_bp`): an int3, the bytes after
/// the first, the first byte.
fn poke_running(guest: &Guest, at: u64, new: &[u8]) {
    poke(guest, at, &[INT3]);
    poke(guest, at + 1, &new[1..]);
    poke(guest, at, &new[..1]);
}

/// Runs the guest to its end and returns its loop's count.
fn result(guest: &Guest, paused: Paused) -> u64 {
    drop(paused);
    guest.end();
    u64::from_le_bytes(bytes(guest, RESULT))
}

#[test]
fn a_site_follows_the_instruction_that_was_written() {
    let host = host!();
    let rounds = u64::from(ROUNDS);
    for (what, new, hits, counted) in [
        ("as it was", [0x48, 0x83, 0xc6, 0x01], rounds, rounds),
        (
            "another operand",
            [0x48, 0x83, 0xc6, 0x05],
            rounds,
            5 * rounds,
        ),
        ("a jump to the next", [0xeb, 0x02, 0xcc, 0xcc], rounds, 0),
        ("a nop", [0x0f, 0x1f, 0x40, 0x00], rounds, 0),
    ] {
        let (guest, paused) = looping(host);
        let at = BODY + 2;
        let site = guest.arm_kernel(Gva(at));
        let suspended = guest.machine.traps().suspend(at..at + 4);
        assert_eq!(suspended.len(), 1, "{what}");
        assert_eq!(
            bytes(&guest, at),
            [0x48, 0x83, 0xc6, 0x01],
            "{what}: what the guest compares"
        );
        guest.write(at, &new);
        assert_eq!(bytes(&guest, at), new, "{what}: what it reads back");
        guest
            .machine
            .traps()
            .resume_sites(suspended, Some(at..at + 4), guest.space());
        assert_eq!(bytes(&guest, at), [INT3], "{what}");
        assert_eq!(
            result(&guest, paused),
            counted,
            "{what}: {}",
            guest.situation()
        );
        assert_eq!(state(&guest, site), (hits, false), "{what}");
        assert!(guest.machine.traps().disarm(site));
        assert_eq!(bytes(&guest, at), new, "{what}: afterwards");
    }
}

/// Tests a jump over several instructions and back, as kernels use to optimise their own probes.
#[test]
fn a_site_waits_while_another_instruction_lies_over_its_own() {
    let host = host!();
    // From `push rbx` behind `pop rbx`.
    const JUMP: [u8; 5] = [0xe9, 3, 0, 0, 0];
    // The site right behind the first byte, and further in.
    for inside in [1, 2] {
        for restored in [false, true] {
            let what = format!("inside: {inside}, restored: {restored}");
            let (guest, paused) = looping(host);
            let before: [u8; 8] = bytes(&guest, BODY);
            let [first, inner, behind] = [0, inside, 6].map(|at| guest.arm_kernel(Gva(BODY + at)));
            poke_running(&guest, BODY, &JUMP);
            let now: [u8; 5] = bytes(&guest, BODY);
            assert_eq!((now[0], &now[1..]), (INT3, &JUMP[1..]), "{what}");
            assert_eq!(
                [first, inner, behind].map(|site| state(&guest, site).1),
                [false, true, false],
                "{what}"
            );
            if restored {
                poke_running(&guest, BODY, &before[..5]);
                assert!(!state(&guest, inner).1, "{what}");
            }
            let rounds = u64::from(ROUNDS);
            let passed = if restored { rounds } else { 0 };
            assert_eq!(
                result(&guest, paused),
                passed,
                "{what}: {}",
                guest.situation()
            );
            let hits = [first, inner, behind].map(|site| state(&guest, site).0);
            assert_eq!(hits, [rounds, passed, passed], "{what}");
            for site in [first, inner, behind] {
                assert!(guest.machine.traps().disarm(site));
            }
            let after: [u8; 8] = bytes(&guest, BODY);
            let start = if restored { &before[..5] } else { &JUMP };
            assert_eq!((&after[..5], &after[5..]), (start, &before[5..]), "{what}");
        }
    }
}

#[test]
fn an_int3_that_the_guest_puts_under_a_site_is_hit_and_the_guests() {
    let host = host!();
    for removed in [false, true] {
        let mut guest = micro(host, "int3k 40");
        let own = guest
            .instructions("micro_int3")
            .into_iter()
            .find(|i| i.mnemonic() == Mnemonic::Int3);
        let own = own.unwrap().ip();
        guest.write(own, &[0x90]);
        let site = guest.arm_kernel(Gva(own));
        poke(&guest, own, &[INT3]);
        if removed {
            poke(&guest, own, &[0x90]);
        }
        guest.machine.start();
        guest.end();
        assert_eq!(state(&guest, site), (40, false), "{}", guest.situation());
        let expected = if removed { (0, 0x90) } else { (40, INT3) };
        assert_eq!(
            guest.machine.stats().guest_int3,
            expected.0,
            "{}",
            guest.situation()
        );
        guest.machine.traps().disarm(site);
        assert_eq!(bytes(&guest, own), [expected.1]);
    }
}

#[test]
fn a_site_comes_back_when_the_last_who_took_it_out_is_done() {
    let host = host!();
    let (guest, _paused) = looping(host);
    let (traps, space) = (guest.machine.traps(), guest.space());
    let site = guest.arm_kernel(Gva(BODY + 2));
    // A range that ends before it, and one that has only its last byte.
    assert!(traps.suspend(BODY..BODY + 2).is_empty());
    let last = traps.suspend(BODY + 5..BODY + 6);
    let mut both = traps.suspend(0..u64::MAX);
    both.append(traps.suspend(BODY + 3..BODY + 4));
    assert_eq!((last.len(), both.len()), (1, 2));
    for suspended in [last, both] {
        assert_eq!(bytes(&guest, BODY + 2), [0x48]);
        traps.resume_sites(suspended, None, space);
    }
    assert_eq!(bytes(&guest, BODY + 2), [INT3]);
    assert_eq!(state(&guest, site), (0, false));
}

/// Tests arming and disarming by callers that do not know that the guest is writing.
#[test]
fn sites_that_come_and_go_meanwhile_leave_the_guest_its_bytes() {
    let host = host!();
    let (guest, paused) = looping(host);
    let (traps, space) = (guest.machine.traps(), guest.space());
    let at = BODY + 2;
    let old = guest.arm_kernel(Gva(at));
    let suspended = traps.suspend(at..at + 4);
    assert!(traps.disarm(old));
    let new = [0x48, 0x83, 0xc6, 0x03];
    guest.write(at, &new);
    assert_eq!(
        bytes(&guest, at),
        new,
        "nothing comes back of what was removed"
    );
    let site = guest.arm_kernel(Gva(at));
    let neighbour = guest.arm_kernel(Gva(BODY + 6));
    assert_eq!(bytes(&guest, at), new, "what is armed waits");
    assert_eq!(bytes(&guest, BODY + 6), [INT3], "elsewhere it does not");
    traps.resume_sites(suspended, Some(at..at + 4), space);
    assert_eq!(bytes(&guest, at), [INT3]);
    assert_eq!(
        result(&guest, paused),
        3 * u64::from(ROUNDS),
        "{}",
        guest.situation()
    );
    for site in [site, neighbour] {
        assert_eq!(state(&guest, site), (u64::from(ROUNDS), false));
    }
}

#[test]
fn sites_in_freed_memory_are_gone_and_their_bytes_are_anybodys() {
    let host = host!();
    let (guest, paused) = looping(host);
    let (traps, space) = (guest.machine.traps(), guest.space());
    let at = BODY + 2;
    let gone = guest.arm_kernel(Gva(at));
    let suspended = traps.suspend(0..u64::MAX);
    assert_eq!(traps.evict(SPARE..SPARE + 0x1000), 1);
    assert!(traps.is_gone(gone) && state(&guest, gone).1);
    traps.resume_sites(suspended, None, space);
    assert_eq!(
        bytes(&guest, at),
        [0x48],
        "not even where its instruction still stands"
    );
    let none = traps.suspend(0..u64::MAX);
    assert!(none.is_empty());
    traps.resume_sites(none, None, space);
    // Another user of the same byte, unknown to the first.
    let again = guest.arm_kernel(Gva(at));
    assert!(!traps.is_gone(again));
    assert_eq!(bytes(&guest, at), [INT3]);
    assert_eq!(
        result(&guest, paused),
        u64::from(ROUNDS),
        "{}",
        guest.situation()
    );
    assert_eq!(state(&guest, again), (u64::from(ROUNDS), false));
    assert!(traps.disarm(gone) && traps.disarm(again) && !traps.disarm(gone));
    assert_eq!(bytes(&guest, at), [0x48]);
    assert_eq!(traps.stats(), []);
}

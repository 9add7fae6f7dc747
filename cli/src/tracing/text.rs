//! An event as a line for people: time, vCPU, thread, name, what happened.

use std::fmt::Write;

use probes::provider::system_calls;
use probes::syscall_table::{Syscall, by_name};

use super::call_values;
use crate::protocol::event::{EventLine, number};
use crate::protocol::trace::Traced;
use crate::report::printable;

/// Returns the line of `event`, `seconds` after the start of the trace, without a newline.
pub fn line(event: &EventLine, probe: Option<&Traced>, seconds: f64) -> String {
    let tid = event
        .tid
        .map_or_else(|| "-".to_owned(), |tid| tid.to_string());
    let comm = printable(event.comm.as_deref().unwrap_or("-"));
    let mut line = format!("{seconds:12.6} {:>3} {tid:>7} {comm:<15} ", event.cpu);
    let name = printable(&event.function);
    // Writing to memory cannot fail.
    let _ = match event.event.as_str() {
        "entry" => write!(line, "-> {name}({})", arguments(event, probe)),
        "return" => write!(
            line,
            "<- {name} = {}{}{}",
            returned(event),
            failure(event),
            late(event, probe)
        ),
        "tick" => write!(line, "{} at {}", event.probe, event.pc),
        _ => write!(
            line,
            "{} at {} ({})",
            event.probe,
            event.pc,
            arguments(event, probe)
        ),
    };
    for frame in &event.kstack {
        let _ = write!(line, "\n{:16}{frame}", "");
    }
    for frame in &event.ustack {
        let _ = write!(line, "\n{:16}{frame} (user)", "");
    }
    line
}

fn arguments(event: &EventLine, probe: Option<&Traced>) -> String {
    let values = event.args.as_deref().unwrap_or_default();
    let call = call(event);
    let shown = values.iter().enumerate().map(|(at, hex)| {
        let of_call = call.and_then(|call| Some((call.name, call.arguments.get(at)?)));
        let name = probe
            .and_then(|p| p.arguments.get(at))
            .filter(|n| !n.is_empty());
        let signed = probe.and_then(|p| p.signed.get(at)) == Some(&true);
        let value = match (event.strings.get(&at.to_string()), number(hex)) {
            (Some(Some(text)), _) => format!("\"{}\"", printable(text)),
            (_, Some(value)) if let Some((call, argument)) = of_call => {
                call_values::argument(call, argument, value)
            }
            (_, Some(value)) if signed => int(value),
            _ => hex.clone(),
        };
        match name {
            Some(name) => format!("{}={value}", printable(name)),
            None => value,
        }
    });
    shown.collect::<Vec<_>>().join(", ")
}

/// Returns the error of a system call that has failed.
fn failure(event: &EventLine) -> String {
    let returned = call(event).and(event.returned.as_deref());
    returned
        .and_then(number)
        .map_or_else(String::new, call_values::error)
}

/// Returns the strings that were read at the return.
fn late(event: &EventLine, probe: Option<&Traced>) -> String {
    let shown = event.strings.iter().filter_map(|(at, text)| {
        let name = probe.and_then(|p| p.arguments.get(at.parse::<usize>().ok()?));
        let text = printable(text.as_deref()?);
        Some(format!(" {}=\"{text}\"", name.map_or("", String::as_str)))
    });
    shown.collect()
}

/// Returns the system call of an event.
fn call(event: &EventLine) -> Option<&'static Syscall> {
    let is_call = event.probe.starts_with(system_calls::PROVIDER);
    is_call.then(|| by_name(&event.function)).flatten()
}

/// Returns a value as C's int if that is negative: the upper half of the register is undefined.
fn int(value: u64) -> String {
    match value {
        0x8000_0000..=0xffff_ffff => (value as u32).cast_signed().to_string(),
        _ => value.cast_signed().to_string(),
    }
}

/// Returns the value that a call has returned.
fn returned(event: &EventLine) -> String {
    match event.returned.as_deref().and_then(number) {
        None => "?".to_owned(),
        // Numbers and errors are decimal; addresses stay hexadecimal.
        Some(number @ 0..=0xffff_ffff) => number.to_string(),
        Some(number) if number >= 4096u64.wrapping_neg() => number.cast_signed().to_string(),
        Some(number) => format!("{number:#x}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event() -> EventLine {
        EventLine {
            event: "entry".into(),
            probe: "syscall::openat:entry".into(),
            function: "openat".into(),
            pc: "0xffffffff81000000".into(),
            tsc: 5,
            cpu: 1,
            pid: Some(21),
            tid: Some(22),
            comm: Some("sh\u{1b}".into()),
            args: Some(vec!["0xffffff9c".into(), "0x7ffe0000".into(), "0x0".into()]),
            returned: None,
            strings: [("1".to_owned(), Some("/etc/passwd".into()))].into(),
            kstack: Vec::new(),
            ustack: Vec::new(),
        }
    }

    fn probe() -> Traced {
        Traced {
            name: "syscall::openat:entry".into(),
            function: "openat".into(),
            arguments: vec!["dfd".into(), "filename".into(), "flags".into()],
            signed: vec![true, false, false],
        }
    }

    #[test]
    fn an_entry_shows_its_arguments_by_name() {
        assert_eq!(
            line(&event(), Some(&probe()), 1.5),
            "    1.500000   1      22 sh?             -> openat(dfd=AT_FDCWD, filename=\"/etc/passwd\", flags=O_RDONLY)"
        );
    }

    #[test]
    fn a_return_shows_its_value_and_what_is_known_only_now() {
        for (returned, shown) in [
            ("0x3", "3"),
            ("0xfffffffffffffffe", "-2 (No such file or directory)"),
            ("0xffff888003000000", "0xffff888003000000"),
        ] {
            let event = EventLine {
                event: "return".into(),
                args: None,
                returned: Some(returned.into()),
                kstack: vec!["0xffffffff81000000 do_syscall_64+0x2f".into()],
                ..event()
            };
            let line = line(&event, Some(&probe()), 0.0);
            assert!(
                line.contains(&format!("<- openat = {shown} filename=\"/etc/passwd\"\n")),
                "{line}"
            );
            assert!(line.ends_with("do_syscall_64+0x2f"), "{line}");
        }
    }
}

//! The tables that `exotrace top` shows, and the scripts that fill them.
//!
//! A script prints its maps at each tick, and then the word [`TICK`]. A column takes its numbers
//! from one map, whose keys are the rows.

use bt::ast::{Aggregation, Dialect, Script, StatementKind};
use bt::parse::parse;
use bt::walk;

use crate::args::TopKind as Kind;

/// The text that a script prints after its maps.
pub const TICK: &str = "top";

/// The unit of a column.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Unit {
    /// A number, as it is.
    Number,
    /// A number a second.
    PerSecond,
    /// Bytes a second.
    Bytes,
    /// Samples taken 99 times a second, as percent of one CPU.
    Percent,
    /// Nanoseconds, as the mean in microseconds of as many as this map counts.
    MeanOf(&'static str),
}

/// A column of numbers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Column {
    /// The title.
    pub title: String,
    /// The map without `@`.
    pub map: String,
    /// The unit.
    pub unit: Unit,
}

/// A table and its script.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct View {
    /// The name.
    pub title: String,
    /// The script, which ticks each second.
    pub script: String,
    /// The titles of the parts of a row's key. Names that a guest chooses are last, since they may
    /// have commas.
    pub keys: Vec<&'static str>,
    /// The columns; the first one orders the rows.
    pub columns: Vec<Column>,
}

impl View {
    /// Returns the view of a kind.
    pub fn of(kind: Kind) -> Self {
        let column = |title: &str, map: &str, unit| Column {
            title: title.to_owned(),
            map: map.to_owned(),
            unit,
        };
        let view = |title: &str, body: &str, keys: &[&'static str], columns: Vec<Column>| Self {
            title: title.to_owned(),
            script: format!(
                "{body}\n{}",
                ticks(columns.iter().map(|c| c.map.as_str()), true)
            ),
            keys: keys.to_vec(),
            columns,
        };
        match kind {
            Kind::Processes => view(
                "processes",
                "profile:hz:99 /pid != 0/ { @samples[pid, comm] = count(); }
                 syscall:::entry { @calls[pid, comm] = count(); }
                 kprobe:handle_mm_fault:entry { @faults[pid, comm] = count(); }",
                &["PID", "COMM"],
                vec![
                    column("CPU %", "samples", Unit::Percent),
                    column("CALLS/s", "calls", Unit::PerSecond),
                    column("FAULTS/s", "faults", Unit::PerSecond),
                ],
            ),
            Kind::Calls => view(
                "system calls",
                "syscall:::entry { @began[tid] = nsecs; }
                 syscall:::return /@began[tid] != 0/ {
                     @calls[func] = count();
                     @time[func] = sum(nsecs - @began[tid]);
                     if ((int64)retval < 0) { @failed[func] = count(); }
                     delete(@began[tid]);
                 }",
                &["CALL"],
                vec![
                    column("CALLS/s", "calls", Unit::PerSecond),
                    column("MEAN us", "time", Unit::MeanOf("calls")),
                    column("FAILED/s", "failed", Unit::PerSecond),
                ],
            ),
            Kind::Files => view(
                "files",
                "kprobe:vfs_read:entry, kprobe:vfs_write:entry { @file[tid] = args.file; }
                 kprobe:vfs_read:return /@file[tid] != 0/ {
                     if ((int64)retval > 0) {
                         @read[pid, str(@file[tid]->f_path.dentry->d_name.name), comm] = sum(retval);
                     }
                     delete(@file[tid]);
                 }
                 kprobe:vfs_write:return /@file[tid] != 0/ {
                     if ((int64)retval > 0) {
                         @written[pid, str(@file[tid]->f_path.dentry->d_name.name), comm] = sum(retval);
                     }
                     delete(@file[tid]);
                 }",
                &["PID", "FILE", "COMM"],
                vec![
                    column("READ/s", "read", Unit::Bytes),
                    column("WRITTEN/s", "written", Unit::Bytes),
                ],
            ),
            Kind::Connections => view(
                "connections",
                "macro local(sk) {
                     sk->__sk_common.skc_family == 2 ? ntop(2, sk->__sk_common.skc_rcv_saddr)
                         : ntop(10, sk->__sk_common.skc_v6_rcv_saddr.in6_u.u6_addr8)
                 }
                 macro remote(sk) {
                     sk->__sk_common.skc_family == 2 ? ntop(2, sk->__sk_common.skc_daddr)
                         : ntop(10, sk->__sk_common.skc_v6_daddr.in6_u.u6_addr8)
                 }
                 kprobe:tcp_sendmsg:entry {
                     @sent[pid, local(args.sk), args.sk->__sk_common.skc_num, remote(args.sk),
                         ntohs(args.sk->__sk_common.skc_dport), comm] = sum(args.size);
                 }
                 kprobe:tcp_cleanup_rbuf:entry /args.copied > 0/ {
                     @received[pid, local(args.sk), args.sk->__sk_common.skc_num, remote(args.sk),
                         ntohs(args.sk->__sk_common.skc_dport), comm] = sum(args.copied);
                 }",
                &["PID", "LOCAL", "PORT", "REMOTE", "PORT", "COMM"],
                vec![
                    column("SENT/s", "sent", Unit::Bytes),
                    column("RECEIVED/s", "received", Unit::Bytes),
                ],
            ),
        }
    }

    /// Returns the view of a script's own maps: those of assigned values and of numbers.
    ///
    /// # Errors
    /// The messages about the script, or that it has no such map.
    pub fn of_script(text: &str, title: &str) -> Result<Self, String> {
        let script = parse(text.as_bytes(), Dialect::Normal).map_err(|wrong| {
            let shown = wrong
                .iter()
                .map(|wrong| wrong.render(title, text.as_bytes()));
            shown.collect::<String>()
        })?;
        let maps = maps(&script);
        if maps.is_empty() {
            return Err(format!(
                "{title}: no map of numbers, such as @[comm] = count()"
            ));
        }
        Ok(Self {
            title: title.to_owned(),
            script: format!("{text}\n{}", ticks(maps.iter().map(String::as_str), false)),
            keys: vec!["KEY"],
            columns: maps
                .into_iter()
                .map(|map| Column {
                    title: format!("@{map}"),
                    map,
                    unit: Unit::Number,
                })
                .collect(),
        })
    }
}

/// Returns the script of where a process spends its time.
pub fn stacks_of(pid: u32) -> View {
    View {
        title: format!("stacks of process {pid}"),
        script: format!(
            "profile:hz:99 /pid == {pid}/ {{ @stacks[kstack(24), ustack(24)] = count(); }}\n{}",
            ticks(["stacks"].into_iter(), true)
        ),
        keys: vec!["STACK"],
        columns: vec![Column {
            title: "CPU %".to_owned(),
            map: "stacks".to_owned(),
            unit: Unit::Percent,
        }],
    }
}

/// Returns the rule that prints maps each second, and empties them if they are of one second.
fn ticks<'m>(maps: impl Iterator<Item = &'m str>, empties: bool) -> String {
    let statements = maps.map(|map| match empties {
        true => format!("print(@{map}); clear(@{map}); "),
        false => format!("print(@{map}); "),
    });
    let statements: String = statements.collect();
    format!("interval:s:1 {{ {statements}print(\"{TICK}\"); }}\n")
}

/// Returns the maps of a script that hold numbers, in the order of their first assignment.
fn maps(script: &Script) -> Vec<String> {
    let mut found = Vec::new();
    for rule in &script.rules {
        walk::statements_of_rule(rule, &mut |statement| {
            let place = match &statement.kind {
                StatementKind::Assign { place, .. } => place,
                StatementKind::Aggregate {
                    place, aggregation, ..
                } if !matches!(
                    aggregation,
                    Aggregation::PowerHistogram(_)
                        | Aggregation::LinearHistogram { .. }
                        | Aggregation::TimeSeries(_)
                        | Aggregation::Stats
                ) =>
                {
                    place
                }
                _ => return,
            };
            if let bt::ast::LvalueKind::Global { name, .. } = &place.kind
                && !found.contains(name)
            {
                found.push(name.clone());
            }
        });
    }
    found
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use clap::ValueEnum;

    use super::*;

    #[test]
    fn scripts_of_all_views_are_read() {
        let views = Kind::value_variants().iter().map(|kind| View::of(*kind));
        for view in views.chain([stacks_of(7)]) {
            let wrong = parse(view.script.as_bytes(), Dialect::Normal).err();
            let shown = wrong
                .iter()
                .flatten()
                .map(|wrong| wrong.render(&view.title, view.script.as_bytes()));
            assert_eq!(shown.collect::<String>(), "");
        }
    }

    #[test]
    fn a_scripts_own_maps_are_columns() {
        let text = "kprobe:f { @a[comm] = count(); @h = hist(1); @b = 1; @a[comm] = count(); }";
        let view = View::of_script(text, "x.bt").unwrap();
        let titles: Vec<&str> = view.columns.iter().map(|c| c.title.as_str()).collect();
        assert_eq!(titles, ["@a", "@b"]);
        assert!(
            view.script
                .ends_with("interval:s:1 { print(@a); print(@b); print(\"top\"); }\n")
        );
        for (text, message) in [
            ("kprobe:f { @h = hist(1); }", "no map of numbers"),
            ("kprobe:f { @h = ; }", "expected an expression"),
        ] {
            let error = View::of_script(text, "x.bt").unwrap_err();
            assert!(error.contains(message), "{error}");
        }
    }
}

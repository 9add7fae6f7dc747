//! Compiles control groups by path and by number.

use super::types::Type;
use super::{RuleCompiler, shared_text, text_of};
use crate::ast::{Expression, Span};
use crate::program::Operation;
use crate::run::numbers;
use crate::value::Value;

/// The folders at which guests mount the hierarchy, the longest first.
const MOUNTS: [&str; 2] = ["/sys/fs/cgroup/unified", "/sys/fs/cgroup"];
/// The name of the hierarchy, as bpftrace gives it.
const HIERARCHY: &[u8] = b"unified";

impl RuleCompiler<'_, '_> {
    /// Compiles `cgroupid("/sys/fs/cgroup/system.slice")`.
    pub(super) fn cgroup_id(&mut self, of: Option<&Expression>, span: Span) -> Type {
        let path = shared_text(&self.literal(of).unwrap_or_default());
        let below = MOUNTS.iter().find_map(|mount| path.strip_prefix(mount));
        let Some(below) = below.filter(|below| below.is_empty() || below.starts_with('/')) else {
            let message = format!(
                "{path:?} is no control group: its path begins with {}",
                MOUNTS[1]
            );
            return self.refuse(span, message);
        };
        let below = format!("/{}", below.trim_matches('/'));
        match self.shared.guest.cgroup(&below) {
            Ok(Some(id)) => self.gives(Operation::Constant(numbers::unsigned(id)), Type::Unsigned),
            Ok(None) => self.refuse(span, format!("the guest has no control group {path:?}")),
            Err(reason) => self.refuse(span, format!("cgroupid({path:?}): {reason}")),
        }
    }

    /// Compiles `cgroup_path(id, "filter")`: the path is looked up when it is shown.
    pub(super) fn cgroup_path(&mut self, arguments: &[Expression]) -> Type {
        let is_left_out =
            text_of(arguments.get(1)).is_some_and(|filter| !probes::name::glob(filter, HIERARCHY));
        if is_left_out {
            return self.gives(Operation::Constant(Value::text(b"")), Type::Text);
        }
        self.number(arguments.first());
        Type::Cgroup
    }
}

//! The parts of a process by which a container is known: its control group, its number in its own
//! pid namespace, and its own host name.

use std::collections::{HashMap, HashSet};

use super::{PausedSystem, Unavailable, known};
use crate::Gva;
use crate::kernel::cgroup::CgroupError;
use crate::kernel::cgroup_tree::CgroupTreeError;
use crate::kernel::namespaces::{NamespaceError, NamespacePid};
use crate::kernel::task_list::TaskInfo;

impl PausedSystem<'_> {
    /// Returns the address of the node of a task's control group, which tasks of one group share.
    /// Returns `None` in a kernel without control groups.
    ///
    /// # Errors
    /// If a structure is broken.
    pub fn cgroup_node(&self, task: &TaskInfo) -> Result<Option<Gva>, CgroupError> {
        match &self.system.cgroups {
            Some(layout) => layout.node(self.view, task.address),
            None => Ok(None),
        }
    }

    /// Returns the path of the control group with this [`node`](Self::cgroup_node), as the first
    /// process sees it: `/user.slice`. Returns `None` in a kernel without control groups.
    ///
    /// # Errors
    /// If a structure is broken.
    pub fn cgroup_path(&self, node: Gva) -> Result<Option<Vec<u8>>, CgroupError> {
        let layout = self.system.cgroups.as_ref();
        layout
            .map(|layout| layout.path(self.view, node))
            .transpose()
    }

    /// Returns the paths of the control groups with these numbers, as the first process sees them.
    /// Those that do not exist are left out.
    ///
    /// # Errors
    /// The inner one if a structure is broken. The outer one if the kernel's layout for it is
    /// unknown: it may have no control groups.
    pub fn cgroups_numbered(
        &self,
        wanted: &HashSet<u64>,
    ) -> Result<Result<HashMap<u64, Vec<u8>>, CgroupTreeError>, Unavailable> {
        let layout = known(&self.system.cgroup_tree)?;
        let mut paths = HashMap::new();
        let found = layout.find(self.view, |group| {
            if wanted.contains(&group.id) {
                paths.insert(group.id, group.path.clone());
            }
            paths.len() == wanted.len()
        });
        Ok(found.map(|_| paths))
    }

    /// Returns the number of the control group at this path in the unified hierarchy:
    /// `/system.slice`. Returns `None` if there is none.
    ///
    /// # Errors
    /// As of [`cgroups_numbered`](Self::cgroups_numbered).
    pub fn cgroup_at(
        &self,
        path: &[u8],
    ) -> Result<Result<Option<u64>, CgroupTreeError>, Unavailable> {
        let layout = known(&self.system.cgroup_tree)?;
        let found = layout.find(self.view, |group| group.path == path);
        Ok(found.map(|group| group.map(|group| group.id)))
    }

    /// Returns a task's number in its innermost pid namespace; `None` once it has ended.
    ///
    /// # Errors
    /// The inner one if a structure is broken. The outer one if the kernel's layout for it is
    /// unknown.
    pub fn namespace_pid(
        &self,
        task: &TaskInfo,
    ) -> Result<Result<Option<NamespacePid>, NamespaceError>, Unavailable> {
        let layout = known(&self.system.namespaces)?;
        Ok(layout.pid(self.view, task.address))
    }

    /// Returns the host name that a task sees, if it is not in the initial UTS namespace.
    ///
    /// # Errors
    /// The inner one if a structure is broken. The outer one if the kernel's layout for it is
    /// unknown.
    pub fn own_host_name(
        &self,
        task: &TaskInfo,
    ) -> Result<Result<Option<Vec<u8>>, NamespaceError>, Unavailable> {
        let layout = known(&self.system.namespaces)?;
        Ok(layout.own_host_name(self.view, task.address))
    }
}

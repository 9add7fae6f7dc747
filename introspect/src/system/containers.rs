//! The parts of a process by which a container is known: its control group, its number in its own
//! pid namespace, and its own host name.

use super::{PausedSystem, Unavailable, known};
use crate::Gva;
use crate::kernel::cgroup::CgroupError;
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

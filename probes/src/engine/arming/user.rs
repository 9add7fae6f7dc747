//! Arms probes in programs' text, by file and offset: see [`super::super::user_text`].

use std::sync::Arc;

use vmm::trap::ArmError;

use super::super::Engine;
use super::super::plan::Enabled;
use super::super::returns::FunctionKey;
use super::super::user_text::Traps;
use super::{Armed, ArmedAt};
use crate::probe::{Moment, UserText};

impl Engine {
    pub(super) fn arm_user(
        &self,
        armed: &mut Armed,
        text: &UserText,
        moment: Moment,
        enabled: &Arc<Enabled>,
    ) -> Result<ArmedAt, ArmError> {
        self.hold_user(armed)?;
        let path = &self.0.path;
        let mut function = 0;
        let result = path.user_sites.change(self.traps(), text, |plan, key| {
            function = key;
            match moment {
                Moment::Return => {
                    self.add_return(key, |plan| plan.probes.push(enabled.clone()));
                    plan.returns = Some(key);
                }
                Moment::Entry | Moment::Point => plan.probes.push(enabled.clone()),
            }
        });
        if let Err(error) = result {
            self.disarm_user(armed, text, moment, function, enabled);
            return Err(error);
        }
        Ok(ArmedAt::User(Box::new(text.clone()), moment, function))
    }

    pub(super) fn disarm_user(
        &self,
        armed: &mut Armed,
        text: &UserText,
        moment: Moment,
        function: FunctionKey,
        enabled: &Arc<Enabled>,
    ) {
        let at_entry = |last: bool| {
            // An error means that the guest has removed the file, or that it is another file by
            // now. Nothing is left to disarm.
            let sites = &self.0.path.user_sites;
            let _ = sites.change(self.traps(), text, |plan, _| {
                plan.probes.retain(|probe| !Arc::ptr_eq(probe, enabled));
                if last && plan.returns == Some(function) {
                    plan.returns = None;
                }
            });
        };
        match moment {
            Moment::Return => {
                self.less_at_return(function, |plan| plan.forget(enabled), at_entry);
            }
            Moment::Entry | Moment::Point => at_entry(false),
        }
        self.release_user(armed);
    }

    /// Counts one more probe with a trap in a program's text.
    pub(super) fn hold_user(&self, armed: &mut Armed) -> Result<(), ArmError> {
        if armed.user_probes == 0 {
            self.0.machine.hold_user_traps()?;
            self.watch_pages(armed);
        }
        armed.user_probes += 1;
        Ok(())
    }

    /// Counts one such probe fewer. With the last one the watches are removed.
    pub(super) fn release_user(&self, armed: &mut Armed) {
        armed.user_probes -= 1;
        if armed.user_probes == 0 {
            for spot in std::mem::take(&mut armed.page_watches) {
                self.unwatch(armed, spot);
            }
            self.0.path.user_sites.clear();
            self.0.machine.release_user_traps();
        }
    }

    pub(super) fn traps(&self) -> Traps<'_> {
        Traps {
            table: self.0.machine.traps(),
            plans: &self.0.path.plans,
        }
    }
}

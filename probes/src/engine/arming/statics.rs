//! Arms static probes of programs: a trap at each site, and their semaphores.

use std::sync::Arc;

use super::super::Engine;
use super::super::plan::{Enabled, StaticPlan};
use super::{Armed, ArmedAt, EnableError};
use crate::probe::{StaticText, UserText};

impl Engine {
    /// Arms all sites, then raises the semaphore. Returns what the probe then holds.
    pub(super) fn arm_static(
        &self,
        armed: &mut Armed,
        text: &StaticText,
        enabled: &Arc<Enabled>,
        probe: impl Fn() -> String,
    ) -> Result<Vec<ArmedAt>, EnableError> {
        let mut places = Vec::new();
        for place in &text.sites {
            let plan = Arc::new(StaticPlan {
                place: place.clone(),
                probe: enabled.clone(),
            });
            let result = self.hold_user(armed).and_then(|()| {
                // From here on it counts as armed, so that it is disarmed on an error.
                places.push(ArmedAt::Static(Box::new(place.text.clone())));
                let sites = &self.0.path.user_sites;
                sites.change(self.traps(), &place.text, |site, _| site.statics.push(plan))
            });
            if let Err(source) = result {
                for place in &places {
                    if let ArmedAt::Static(text) = place {
                        self.disarm_static(armed, text, enabled);
                    }
                }
                let probe = probe();
                return Err(EnableError::Arm { probe, source });
            }
        }
        for semaphore in &text.semaphores {
            self.raise(semaphore);
            places.push(ArmedAt::Semaphore(Box::new(semaphore.clone())));
        }
        Ok(places)
    }

    /// Disarms one site.
    pub(super) fn disarm_static(&self, armed: &mut Armed, text: &UserText, enabled: &Arc<Enabled>) {
        let path = &self.0.path;
        // An error means that the file is gone, as with functions.
        let _ = path.user_sites.change(self.traps(), text, |plan, _| {
            plan.statics
                .retain(|place| !Arc::ptr_eq(&place.probe, enabled));
        });
        self.release_user(armed);
    }
}

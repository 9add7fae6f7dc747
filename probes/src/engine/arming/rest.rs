//! Takes the traps of probes away for a while, and puts them back, for a budget.
//!
//! A probe that rests holds no place in any plan, so other sessions' probes at its sites go on and
//! it costs nothing there. It still counts as enabled: the guest's changes of its text are watched.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use introspect::Gva;

use super::super::Engine;
use super::super::plan::Enabled;
use super::super::system_call::system_call_key;
use super::super::watchlist::Active;
use super::{Armed, ArmedAt};
use crate::probe::{Moment, Target};

/// The parts by which a suspended probe is armed again.
#[derive(Debug, Default)]
pub(crate) struct Resting {
    /// The code at its sites in modules' text, which the guest may free meanwhile.
    code: Vec<(Gva, Vec<u8>)>,
    /// The number of its sites in programs' text. They are counted on, so that the watches on
    /// programs' pages stay.
    user_sites: usize,
}

impl Engine {
    /// Takes the traps of watching probes away.
    pub(in crate::engine) fn rest(&self, probes: &mut [&mut Active]) {
        let mut armed = self.armed();
        for active in probes.iter_mut().filter(|probe| probe.resting.is_none()) {
            let places = active.places.iter();
            let is_user =
                |place: &&ArmedAt| matches!(place, ArmedAt::User(..) | ArmedAt::Static(_));
            let user_sites = places.clone().filter(is_user).count();
            armed.user_probes += user_sites;
            let code = places.filter_map(|place| self.code_to_expect(place));
            active.resting = Some(Resting {
                code: code.collect(),
                user_sites,
            });
        }
        let calls: Vec<_> = probes
            .iter()
            .flat_map(|probe| system_calls(probe))
            .collect();
        self.disarm_system_calls(&mut armed, &calls);
        for active in probes {
            let places = std::mem::take(&mut active.places);
            let is_left = |place: &ArmedAt| !matches!(place, ArmedAt::SystemCall { .. });
            let places: Vec<_> = places.into_iter().filter(is_left).collect();
            self.release(&mut armed, &active.enabled, &places);
        }
    }

    /// Puts the traps of probes that rest back. One that cannot be armed now rests on, until it is
    /// tried again: its module or file is gone.
    pub(in crate::engine) fn wake(&self, probes: &mut [&mut Active]) {
        let mut armed = self.armed();
        let now = vmm::host_tsc();
        let mut calls = Vec::new();
        for active in probes {
            let Some(probe) = &active.probe else { continue };
            let Some(resting) = active.resting.take_if(|resting| self.is_unchanged(resting)) else {
                continue;
            };
            // Calls that began meanwhile belong to other probes of the function.
            active.enabled.since.store(now, Ordering::Relaxed);
            if let Some(call) = self.call_of(active) {
                active.places.push(ArmedAt::SystemCall {
                    number: call.0,
                    moment: call.1,
                });
                calls.push(call);
                continue;
            }
            match self.place(&mut armed, probe, &active.enabled) {
                Ok(places) => {
                    active.places = places;
                    for _ in 0..resting.user_sites {
                        self.release_user(&mut armed);
                    }
                }
                Err(error) => {
                    log::debug!("not watched again: {error}");
                    active.resting = Some(resting);
                }
            }
        }
        self.arm_system_calls(&mut armed, &calls);
    }

    /// Forgets what a disabled probe needed to be armed again.
    pub(in crate::engine) fn forget_resting(&self, resting: &Resting) {
        let mut armed = self.armed();
        for _ in 0..resting.user_sites {
            self.release_user(&mut armed);
        }
    }

    /// Returns the code at a place in a module's text.
    fn code_to_expect(&self, place: &ArmedAt) -> Option<(Gva, Vec<u8>)> {
        let (ArmedAt::Site(spot) | ArmedAt::Return(spot, _) | ArmedAt::Tracepoint(spot)) = place
        else {
            return None;
        };
        let address = spot.address;
        let own = self.0.view.text().ok();
        // The kernel's own text stays, whatever it writes there.
        let is_own = own.is_some_and(|own| own.contains(&address.0));
        (!is_own).then(|| (address, self.code_at(address)))
    }

    fn code_at(&self, address: Gva) -> Vec<u8> {
        let space = self.0.view.kernel.space;
        self.0.machine.traps().read_code(address, space)
    }

    fn is_unchanged(&self, resting: &Resting) -> bool {
        let mut code = resting.code.iter();
        code.all(|(address, code)| self.code_at(*address) == *code)
    }

    fn call_of(&self, active: &Active) -> Option<SystemCall> {
        match &active.probe.as_ref()?.target {
            Target::SystemCall { number, moment } => {
                let number = usize::try_from(*number).ok()?;
                Some((number, *moment, active.enabled.clone()))
            }
            _ => None,
        }
    }

    /// Arms system calls, which were armed before, by one change of their trap's plan.
    fn arm_system_calls(&self, armed: &mut Armed, calls: &[SystemCall]) {
        let Some((address, layout)) = self.0.system_calls.filter(|_| !calls.is_empty()) else {
            return;
        };
        let (spot, mut plans) = self.system_call_plans(armed, address);
        for (number, moment, enabled) in calls {
            let Some(plan) = plans.get_mut(*number) else {
                continue;
            };
            match moment {
                Moment::Return => {
                    self.add_return(system_call_key(*number as u64), |plan| {
                        plan.result_in_memory = !layout.returns_result;
                        plan.probes.push(enabled.clone());
                    });
                    plan.returns = true;
                }
                Moment::Entry | Moment::Point => plan.entries.push(enabled.clone()),
            }
        }
        if let Err(error) = self.publish_system_calls(armed, spot, layout, &plans) {
            log::warn!("system calls are not watched again: {error}");
        }
        armed.system_calls = Some((spot, plans));
    }
}

/// A system call's number, and a probe of its entry or return.
pub(super) type SystemCall = (usize, Moment, Arc<Enabled>);

fn system_calls(active: &Active) -> impl Iterator<Item = SystemCall> {
    active.places.iter().filter_map(|place| match place {
        ArmedAt::SystemCall { number, moment } => Some((*number, *moment, active.enabled.clone())),
        _ => None,
    })
}

//! Arms system calls, all at the one function that they pass, and tracepoints, at all branches to
//! their calls.

use std::sync::Arc;

use introspect::Gva;
use vmm::trap::ArmError;

use super::super::Engine;
use super::super::plan::{Enabled, SystemCallPlan, SystemCalls, TracepointPlan};
use super::super::system_call::system_call_key;
use super::rest::SystemCall;
use super::{Armed, ArmedAt, EnableError, KernelSite, MAX_SYSTEM_CALLS};
use crate::probe::{Moment, TracepointText};
use crate::provider::tracepoint::keep_what_leads_to_the_call;
use crate::syscall_entry::SystemCallRegisters;

impl Engine {
    pub(super) fn arm_system_call(
        &self,
        armed: &mut Armed,
        number: usize,
        moment: Moment,
        enabled: &Arc<Enabled>,
        named: impl Fn() -> String,
    ) -> Result<ArmedAt, EnableError> {
        let Some((address, layout)) = self.0.system_calls else {
            return Err(EnableError::NoSystemCalls { probe: named() });
        };
        let (spot, mut plans) = self.system_call_plans(armed, address);
        let key = system_call_key(number as u64);
        if let Some(plan) = plans.get_mut(number) {
            match moment {
                Moment::Return => {
                    self.add_return(key, |plan| {
                        plan.result_in_memory = !layout.returns_result;
                        plan.probes.push(enabled.clone());
                    });
                    plan.returns = true;
                }
                Moment::Entry | Moment::Point => plan.entries.push(enabled.clone()),
            }
        }
        let result = self.publish_system_calls(armed, spot, layout, &plans);
        armed.system_calls = Some((spot, plans));
        if let Err(source) = result {
            self.disarm_system_call(armed, number, moment, enabled);
            return Err(EnableError::Arm {
                probe: named(),
                source,
            });
        }
        Ok(ArmedAt::SystemCall { number, moment })
    }

    /// Takes the plans of all system calls, and the site at which they are seen.
    pub(super) fn system_call_plans(
        &self,
        armed: &mut Armed,
        address: Gva,
    ) -> (KernelSite, Vec<SystemCallPlan>) {
        let spot = self.kernel_spot(address, Moment::Entry);
        let known = armed.system_calls.take();
        let plans = known.map(|(_, plans)| plans);
        let new = || vec![SystemCallPlan::default(); MAX_SYSTEM_CALLS];
        (spot, plans.unwrap_or_else(new))
    }

    pub(super) fn disarm_system_call(
        &self,
        armed: &mut Armed,
        number: usize,
        moment: Moment,
        enabled: &Arc<Enabled>,
    ) {
        self.disarm_system_calls(armed, &[(number, moment, enabled.clone())]);
    }

    /// Disarms system calls by one change of their trap's plan. Until then no return is expected
    /// for those whose return traps are gone.
    pub(super) fn disarm_system_calls(&self, armed: &mut Armed, calls: &[SystemCall]) {
        if calls.is_empty() {
            return;
        }
        let Some((spot, mut plans)) = armed.system_calls.take() else {
            return;
        };
        for (number, moment, enabled) in calls {
            let key = system_call_key(*number as u64);
            let mut at_entry = |last: bool| {
                if let Some(plan) = plans.get_mut(*number) {
                    plan.entries.retain(|probe| !Arc::ptr_eq(probe, enabled));
                    plan.returns &= !last;
                }
            };
            match moment {
                Moment::Return => self.less_at_return(key, |plan| plan.forget(enabled), at_entry),
                Moment::Entry | Moment::Point => at_entry(false),
            }
        }
        if let Some((_, layout)) = self.0.system_calls {
            let _ = self.publish_system_calls(armed, spot, layout, &plans);
        }
        if plans
            .iter()
            .any(|plan| plan.returns || !plan.entries.is_empty())
        {
            armed.system_calls = Some((spot, plans));
        }
    }

    pub(super) fn publish_system_calls(
        &self,
        armed: &mut Armed,
        spot: KernelSite,
        layout: SystemCallRegisters,
        plans: &[SystemCallPlan],
    ) -> Result<(), ArmError> {
        let any = plans
            .iter()
            .any(|plan| plan.returns || !plan.entries.is_empty());
        let plans = plans.to_vec();
        let calls = any.then(|| Arc::new(SystemCalls { layout, plans }));
        self.change(armed, spot, |plan| plan.system_calls = calls)
    }

    pub(super) fn arm_tracepoint(
        &self,
        armed: &mut Armed,
        text: &TracepointText,
        enabled: &Arc<Enabled>,
        named: impl Fn() -> String,
    ) -> Result<Vec<ArmedAt>, EnableError> {
        let mut text = text.clone();
        keep_what_leads_to_the_call(&mut text, &self.0.machine, &self.0.view);
        if text.sites.is_empty() {
            return Err(EnableError::NoBranch { probe: named() });
        }
        let plan = Arc::new(TracepointPlan {
            text,
            probe: enabled.clone(),
        });
        let mut places = Vec::new();
        for (address, target) in &plan.text.sites {
            let spot = self.kernel_spot_at(*address, *address);
            let here = (plan.clone(), *target);
            let armed_here = self.change(armed, spot, |plan| plan.tracepoints.push(here));
            if let Err(source) = armed_here {
                for place in places {
                    if let ArmedAt::Tracepoint(spot) = place {
                        let _ = self.change(armed, spot, |plan| {
                            plan.tracepoints
                                .retain(|(plan, _)| !Arc::ptr_eq(&plan.probe, enabled));
                        });
                    }
                }
                let probe = named();
                return Err(EnableError::Arm { probe, source });
            }
            places.push(ArmedAt::Tracepoint(spot));
        }
        Ok(places)
    }
}

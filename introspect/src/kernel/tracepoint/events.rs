//! The event of a tracepoint: its system and class.
//!
//! The kernel's array of its own events (`__start_ftrace_events`) is freed after initialisation.
//! All events, including those of modules, are on the list `ftrace_events`.
//!
//! Structures: `trace_event_call` and `trace_event_class` in include/linux/trace_events.h,
//! kernel/trace/trace_events.c.

use std::collections::{HashMap, HashSet};
use std::rc::Rc;

use crate::kernel::btf::Btf;
use crate::kernel::layout::{LayoutError, offset};
use crate::kernel::list::{List, ListError};
use crate::kernel::structure::{Structure, StructureError};
use crate::kernel::symbols::Symbols;
use crate::{Gva, MemoryView};

/// The maximum number of events; a distribution kernel has about 3,000, including those of system
/// calls.
const MAX_EVENTS: usize = 1 << 16;
/// The maximum length of a system's name in bytes.
const MAX_NAME: usize = 256;

/// The location of a kernel's events.
#[derive(Debug, Clone, Copy)]
pub(super) struct EventsLayout {
    head: Gva,
    /// Offsets in `trace_event_call`. Events without a tracepoint have a name in its place.
    list: u64,
    tracepoint: u64,
    class: u64,
    /// Offset in `trace_event_class`.
    system: u64,
}

/// An error in reading the events.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum EventError {
    /// The list is broken.
    #[error(transparent)]
    List(#[from] ListError),
    /// An event or its class is broken.
    #[error(transparent)]
    Structure(#[from] StructureError),
    /// An event has no class with a system.
    #[error("the event at {event} has no system")]
    NoSystem {
        /// The address of the `trace_event_call`.
        event: Gva,
    },
    /// A field has no name or type, or reaches too far.
    #[error("the event's field at {field} has no name or type, or is outside of a record")]
    BadField {
        /// The address of the `ftrace_event_field`.
        field: Gva,
    },
}

/// An event as far as it is known.
#[derive(Debug, Clone)]
pub(super) struct Event {
    pub(super) system: Rc<str>,
    /// The address of its `trace_event_class`.
    pub(super) class: Gva,
}

/// The event of each tracepoint that has one.
pub(super) type Events = HashMap<Gva, Event>;

impl EventsLayout {
    /// Looks up list and offsets. Returns `None` in a kernel without events
    /// (`CONFIG_EVENT_TRACING`).
    ///
    /// # Errors
    /// If the kernel's types do not describe them.
    pub(super) fn new(btf: &Btf, symbols: &Symbols) -> Result<Option<Self>, LayoutError> {
        let Some(head) = symbols.address_of("ftrace_events") else {
            return Ok(None);
        };
        Ok(Some(Self {
            head: Gva(head),
            list: offset(btf, "trace_event_call.list.next", 8)?,
            tracepoint: offset(btf, "trace_event_call.tp", 8)?,
            class: offset(btf, "trace_event_call.class", 8)?,
            system: offset(btf, "trace_event_class.system", 8)?,
        }))
    }

    /// Returns the events of those of the `known` tracepoints that have one, and the first error.
    pub(super) fn read(
        &self,
        view: MemoryView<'_>,
        known: &HashSet<Gva>,
    ) -> (Events, Option<EventError>) {
        let list = List {
            name: "ftrace_events",
            head: self.head,
            member: self.list,
            limit: MAX_EVENTS,
        };
        let walk = list.walk(view);
        let mut error = walk.error.map(EventError::from);
        let (mut events, mut of_class) = (Events::new(), HashMap::new());
        for event in walk.items {
            match self.event(view, event, known, &mut of_class) {
                // The list starts with the newest. A module may add an event to a tracepoint that
                // already has one.
                Ok(Some((tracepoint, event))) => _ = events.insert(tracepoint, event),
                Ok(None) => {}
                Err(broken) => error = error.or(Some(broken)),
            }
        }
        (events, error)
    }

    /// Returns the tracepoint of an event and the event; `None` if it belongs to none of the known
    /// ones.
    fn event(
        &self,
        view: MemoryView<'_>,
        event: Gva,
        known: &HashSet<Gva>,
        of_class: &mut HashMap<Gva, Rc<str>>,
    ) -> Result<Option<(Gva, Event)>, EventError> {
        let structure = Structure::at(view, "trace_event_call", event)?;
        let tracepoint = Gva(structure.u64(self.tracepoint)?);
        if !known.contains(&tracepoint) {
            return Ok(None);
        }
        let none = EventError::NoSystem { event };
        let class = structure
            .follow(self.class, "trace_event_class")?
            .ok_or(none)?;
        let class_at = class.address();
        let event = |system: &Rc<str>| Event {
            system: Rc::clone(system),
            class: class_at,
        };
        if let Some(system) = of_class.get(&class_at) {
            return Ok(Some((tracepoint, event(system))));
        }
        let system = class
            .string(self.system, "name of an event system", MAX_NAME)?
            .filter(|system| !system.is_empty())
            .ok_or(none)?;
        let system: Rc<str> = String::from_utf8_lossy(&system).into();
        of_class.insert(class_at, Rc::clone(&system));
        Ok(Some((tracepoint, event(&system))))
    }
}

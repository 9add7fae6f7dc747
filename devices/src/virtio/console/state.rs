//! A console in a snapshot: its driver's knowledge, and the progress of its bytes.

use serde::{Deserialize, Serialize};

use super::port::{BufferCredits, Port, Stage};
use super::{Console, DeviceStateError, FEATURE_MULTIPORT, NullBackend, PortConfig, Size};
use super::{EndOfFile, WhenFull};
use crate::virtio::VirtioDevice;

#[derive(Debug, Serialize, Deserialize)]
struct SavedConsole {
    max_ports: u32,
    size: Size,
    listening: bool,
    control_initial: u16,
    ports: Vec<SavedPort>,
}

#[derive(Debug, Serialize, Deserialize)]
struct SavedPort {
    id: u32,
    name: Option<String>,
    console: bool,
    /// True if the driver was notified of the port. `ready` is true if it uses the port.
    announced: bool,
    ready: bool,
    removing: bool,
    tell_console: bool,
    tell_name: bool,
    tell_size: bool,
    told_open: bool,
    guest_open: bool,
    unread: Vec<u32>,
    receive_initial: u16,
    taken: u64,
}

fn save_port(port: &Port) -> SavedPort {
    SavedPort {
        id: port.id,
        name: port.config.name.clone(),
        console: port.config.console,
        announced: port.stage != Stage::Unknown,
        ready: port.stage == Stage::Ready,
        removing: port.removing,
        tell_console: port.tell_console,
        tell_name: port.tell_name,
        tell_size: port.tell_size,
        told_open: port.told_open,
        guest_open: port.guest_open,
        unread: port.unread.iter().copied().collect(),
        receive_initial: port.ledger.initial,
        taken: port.taken as u64,
    }
}

fn restore_port(port: &mut Port, saved: &SavedPort) {
    port.stage = match (saved.ready, saved.announced) {
        (true, _) => Stage::Ready,
        (_, true) => Stage::Announced,
        _ => Stage::Unknown,
    };
    port.removing |= saved.removing;
    port.tell_console = saved.tell_console;
    port.tell_name = saved.tell_name;
    port.tell_size = saved.tell_size;
    port.told_open = saved.told_open;
    port.unread = saved.unread.iter().copied().collect();
    port.ledger = BufferCredits {
        initial: saved.receive_initial,
    };
    port.taken = usize::try_from(saved.taken).unwrap_or(usize::MAX);
    if saved.guest_open {
        port.reopen();
    }
}

impl Console {
    fn refuse(&self, problem: String) -> DeviceStateError {
        DeviceStateError {
            device: self.name(),
            problem,
        }
    }

    pub(super) fn save_state(&self) -> Vec<u8> {
        let state = SavedConsole {
            max_ports: self.max_ports,
            size: self.size,
            listening: self.listening,
            control_initial: self.control.initial,
            ports: self.ports.values().map(save_port).collect(),
        };
        // Writing to memory does not fail. An empty state would be rejected.
        postcard::to_stdvec(&state).unwrap_or_default()
    }

    /// Restores a state. Ports that the guest knows and that are not configured any more are
    /// removed. Configured ports that it does not know are announced.
    pub(super) fn restore_state(
        &mut self,
        state: &[u8],
        features: Option<u64>,
    ) -> Result<(), DeviceStateError> {
        let state: SavedConsole =
            postcard::from_bytes(state).map_err(|error| self.refuse(error.to_string()))?;
        if state.max_ports != self.max_ports {
            let (found, here) = (state.max_ports, self.max_ports);
            return Err(self.refuse(format!("made for {found} ports, this one for {here}")));
        }
        for saved in &state.ports {
            let id = saved.id;
            if id >= self.max_ports || saved.unread.len() > usize::from(u16::MAX) {
                return Err(self.refuse(format!("port {id} cannot be")));
            }
            let differs = |port: &&Port| {
                port.config.name != saved.name || port.config.console != saved.console
            };
            if let Some(port) = self.ports.get(&id).filter(differs) {
                let name = |name: &Option<String>| name.clone().unwrap_or_default();
                let (found, here) = (name(&saved.name), name(&port.config.name));
                return Err(self.refuse(format!("port {id} was `{found}`, it is `{here}` now")));
            }
        }
        self.multiport = features.is_some_and(|features| features & FEATURE_MULTIPORT != 0);
        self.listening = state.listening;
        self.size = state.size;
        self.control = BufferCredits {
            initial: state.control_initial,
        };
        for saved in &state.ports {
            if let Some(port) = self.ports.get_mut(&saved.id) {
                restore_port(port, saved);
            } else if let Some(counts) = self.shared.enter(saved.id) {
                let mut port = Port::new(saved.id, gone(saved), Box::new(NullBackend), counts);
                port.removing = true;
                restore_port(&mut port, saved);
                self.ports.insert(saved.id, port);
            }
        }
        self.let_go();
        Ok(())
    }
}

/// Returns a port that exists only until its removal is reported.
fn gone(saved: &SavedPort) -> PortConfig {
    PortConfig {
        name: saved.name.clone(),
        console: saved.console,
        end_of_file: EndOfFile::Never,
        when_full: WhenFull::Hold,
        connected: false,
    }
}

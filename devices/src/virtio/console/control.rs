//! Messages of the control queues: virtio 1.2 section 5.3.6.2.

/// A port id that means the device itself.
pub const BAD_ID: u32 = u32::MAX;

/// What a message is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u16)]
pub enum Event {
    /// Driver to device: the driver is there (1) or has failed (0).
    DeviceReady = 0,
    /// Device to driver: a port is there.
    DeviceAdd = 1,
    /// Device to driver: a port is gone.
    DeviceRemove = 2,
    /// Driver to device: the driver uses a port (1) or cannot (0).
    PortReady = 3,
    /// Device to driver: the port is a console.
    ConsolePort = 4,
    /// Device to driver: the console's size; columns and rows follow.
    Resize = 5,
    /// Either way: the sender's side of the port was opened (1) or closed (0).
    PortOpen = 6,
    /// Device to driver: the port's name follows.
    PortName = 7,
}

impl Event {
    /// The event of a number.
    #[must_use]
    pub fn from_number(number: u16) -> Option<Self> {
        [
            Self::DeviceReady,
            Self::DeviceAdd,
            Self::DeviceRemove,
            Self::PortReady,
            Self::ConsolePort,
            Self::Resize,
            Self::PortOpen,
            Self::PortName,
        ]
        .into_iter()
        .find(|&event| event as u16 == number)
    }
}

/// The fixed part of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Message {
    /// The port.
    pub id: u32,
    /// What happened.
    pub event: u16,
    /// Its value, where it has one.
    pub value: u16,
}

impl Message {
    /// Bytes of the fixed part.
    pub const LENGTH: usize = 8;

    /// A message.
    #[must_use]
    pub fn new(id: u32, event: Event, value: u16) -> Self {
        Self {
            id,
            event: event as u16,
            value,
        }
    }

    /// As it lies in a buffer.
    #[must_use]
    pub fn encode(self) -> [u8; Self::LENGTH] {
        let [a, b, c, d] = self.id.to_le_bytes();
        let ([e, f], [g, h]) = (self.event.to_le_bytes(), self.value.to_le_bytes());
        [a, b, c, d, e, f, g, h]
    }

    /// Reads it.
    #[must_use]
    pub fn decode([a, b, c, d, e, f, g, h]: [u8; Self::LENGTH]) -> Self {
        Self {
            id: u32::from_le_bytes([a, b, c, d]),
            event: u16::from_le_bytes([e, f]),
            value: u16::from_le_bytes([g, h]),
        }
    }
}

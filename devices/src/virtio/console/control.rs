//! Messages of the control queues: virtio 1.2 section 5.3.6.2.

/// The port id of the device itself.
pub const BAD_ID: u32 = u32::MAX;

/// The type of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u16)]
pub enum Event {
    /// Driver to device: the driver is ready (1) or has failed (0).
    DeviceReady = 0,
    /// Device to driver: a port was added.
    DeviceAdd = 1,
    /// Device to driver: a port was removed.
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
    /// Returns the event of a number.
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
    /// The number of the port.
    pub id: u32,
    /// The number of the event.
    pub event: u16,
    /// The value of the event, if it has one.
    pub value: u16,
}

impl Message {
    /// The size of the fixed part in bytes.
    pub const LENGTH: usize = 8;

    /// Makes a message.
    #[must_use]
    pub fn new(id: u32, event: Event, value: u16) -> Self {
        Self {
            id,
            event: event as u16,
            value,
        }
    }

    /// Encodes the message as in a buffer.
    #[must_use]
    pub fn encode(self) -> [u8; Self::LENGTH] {
        let [a, b, c, d] = self.id.to_le_bytes();
        let ([e, f], [g, h]) = (self.event.to_le_bytes(), self.value.to_le_bytes());
        [a, b, c, d, e, f, g, h]
    }

    /// Decodes a message.
    #[must_use]
    pub fn decode([a, b, c, d, e, f, g, h]: [u8; Self::LENGTH]) -> Self {
        Self {
            id: u32::from_le_bytes([a, b, c, d]),
            event: u16::from_le_bytes([e, f]),
            value: u16::from_le_bytes([g, h]),
        }
    }
}

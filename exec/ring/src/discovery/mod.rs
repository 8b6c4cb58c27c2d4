//! Discovery: workers announce themselves by multicast DNS, and a head finds them by name.

mod announcement;
mod search;

pub use announcement::{Announcement, AnnouncementError, MdnsScope, host_name};
pub use search::{DiscoveryError, browse, find_workers};

//! Discovery: workers announce themselves by multicast DNS, and a head finds them by name.

mod announcement;
mod search;

pub use announcement::{
    Announcement, AnnouncementError, MAX_NAME, MdnsScope, PORT, SERVICE, host_name, is_name,
};
pub use search::{DiscoveredService, DiscoveryError, SearchState, browse, find_workers};

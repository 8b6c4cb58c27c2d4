//! Discovery: workers announce themselves by multicast DNS, and a head finds them by name.

mod announcement;
mod search;

pub use announcement::{
    Announcement, AnnouncementError, MAX_NAME_LEN, MDNS_PORT, MdnsScope, SERVICE_TYPE, host_name,
    is_valid_name,
};
pub use search::{DiscoveredService, DiscoveryError, SearchState, browse, find_workers};

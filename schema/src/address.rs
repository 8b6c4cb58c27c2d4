//! Addresses: `HOST:PORT`, where the host is a name, an IPv4 address or an IPv6 address in brackets.

use core::net::Ipv6Addr;

/// Splits an address into host and port; returns `None` if the address is not valid. Port 0, which only a listener may
/// use, is valid.
///
/// ```
/// use hearth_schema::address::split_host_port;
/// assert_eq!(split_host_port("laptop.local:9001"), Some(("laptop.local", 9001)));
/// assert_eq!(split_host_port("[fe80::1]:9001"), Some(("[fe80::1]", 9001)));
/// assert_eq!(split_host_port("192.168.1.7"), None);
/// ```
pub fn split_host_port(address: &str) -> Option<(&str, u16)> {
    let (host, port) = address.rsplit_once(':')?;
    let inside = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
    let address = inside.map(|inside| inside.split_once('%').map_or(inside, |(address, _)| address));
    let bracketed = address.is_some_and(|address| address.parse::<Ipv6Addr>().is_ok());
    let named =
        !host.is_empty() && !host.contains([':', '[', ']', '/', '@']) && !host.contains(char::is_whitespace);
    // `parse` would accept a sign before the number.
    let digits = port.bytes().all(|byte| byte.is_ascii_digit());
    (digits && (bracketed || named)).then(|| Some((host, port.parse().ok()?)))?
}

/// Returns an address from the command line if it is valid; the error explains the format of an address.
pub fn validate(address: &str) -> Result<String, String> {
    let error = "write HOST:PORT, such as 127.0.0.1:9001, with a port up to 65535";
    split_host_port(address).map(|_| address.to_owned()).ok_or_else(|| error.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_host_with_a_port_is_an_address() {
        let wrong = "|:|9001|:9001|laptop|laptop:|laptop:http|laptop:65536|laptop:+1|laptop:-1|fe80::1|[]:9001|\
            [::1]|::1:9001|[a b]:1|[http://x]:1|[::1]]:1|http://laptop:9001|a b:1|me@laptop:9001";
        for wrong in wrong.split('|') {
            assert_eq!(split_host_port(wrong), None, "{wrong}");
            assert!(validate(wrong).is_err());
        }
        assert_eq!(split_host_port("0.0.0.0:0"), Some(("0.0.0.0", 0)));
        assert_eq!(validate("[::1]:9001").as_deref(), Ok("[::1]:9001"));
    }
}

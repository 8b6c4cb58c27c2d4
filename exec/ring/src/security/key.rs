//! The key of a ring: 32 secret bytes, the same on every device.
//!
//! The key is given as a file or in the environment variable `HEARTH_KEY`. It is written as 64 hexadecimal digits,
//! or as a passphrase of at least 16 bytes, which is hashed (SHA-256 with a prefix). A random key is best
//! ([`create_secret_file`]).
//!
//! Anybody who has recorded a connection can guess a passphrase offline, and each guess costs only one hash. So use a
//! passphrase only if it cannot be guessed. A device with the key can pretend to be any other device, so replace the
//! key when a device is lost.

use std::fmt;
use std::fmt::Write as _;
use std::fs::{File, OpenOptions};
use std::io::{Read, Write as _};
use std::path::{Path, PathBuf};

use rand::TryRng;
use rand::rngs::SysRng;
use sha2::{Digest, Sha256};

/// The environment variable that contains the key, as hexadecimal digits or as a passphrase.
pub const KEY_VARIABLE: &str = "HEARTH_KEY";

const MIN_PASSPHRASE_LEN: usize = 16;
/// Maximum length of a file with a secret, in bytes. source: the private key of a certificate has 3.3 kB with RSA of 4096
/// bits, and up to 6.4 kB with 8192
const MAX_TEXT_LEN: u64 = 8192;
/// The prefix that is hashed with a passphrase, so that no other hash of the passphrase is the key.
const DOMAIN: &[u8] = b"hearth ring key, version 1\0";

/// The secret that all devices of a ring share.
#[derive(Clone, PartialEq, Eq)]
pub struct Key([u8; 32]);

#[derive(Debug, thiserror::Error)]
pub enum KeyError {
    #[error("cannot read the key file: {reason}")]
    Unreadable { path: PathBuf, reason: String },
    #[error("cannot write the key file: {reason}")]
    Unwritable { path: PathBuf, reason: String },
    /// Other users of this machine have permission to read or change the key file.
    #[error("the key file can be read or changed by other users of this machine (mode {mode:o})")]
    Exposed { path: PathBuf, mode: u32 },
    /// The given string is not a valid key. `what` says why, and does not contain the string.
    #[error("the key {what}")]
    Invalid { location: String, what: String },
}

impl KeyError {
    /// Returns the place of the key: the path of the file, or the name of the environment variable.
    pub fn location(&self) -> String {
        match self {
            KeyError::Unreadable { path, .. }
            | KeyError::Unwritable { path, .. }
            | KeyError::Exposed { path, .. } => path.display().to_string(),
            KeyError::Invalid { location, .. } => location.clone(),
        }
    }

    pub fn hint(&self) -> String {
        match self {
            KeyError::Unreadable { .. } => "check the path and its permissions".into(),
            KeyError::Unwritable { .. } => "name a new file; keys are not overwritten".into(),
            KeyError::Exposed { path, .. } => format!("run `chmod 600 {}`", path.display()),
            KeyError::Invalid { .. } => format!(
                "use 64 random hexadecimal digits, or a passphrase of at least {MIN_PASSPHRASE_LEN} bytes"
            ),
        }
    }
}

impl Key {
    /// Reads the key from a file if one is given, otherwise from [`KEY_VARIABLE`] if this variable is set.
    pub fn from_file_or_env(file: Option<&Path>) -> Result<Option<Key>, KeyError> {
        if let Some(path) = file {
            return Key::read(path).map(Some);
        }
        let invalid = |what: String| KeyError::Invalid { location: KEY_VARIABLE.into(), what };
        match std::env::var(KEY_VARIABLE) {
            Ok(text) => Key::parse(&text).map(Some).map_err(invalid),
            Err(std::env::VarError::NotPresent) => Ok(None),
            Err(std::env::VarError::NotUnicode(_)) => Err(invalid("is not UTF-8".into())),
        }
    }

    /// Reads the key from a file. Fails if other users have permission to read or change the file.
    pub fn read(path: &Path) -> Result<Key, KeyError> {
        let invalid = |what: String| KeyError::Invalid { location: path.display().to_string(), what };
        Key::parse(&read_secret_file(path)?).map_err(invalid)
    }

    /// Parses a key, and ignores surrounding white space. The error is a predicate such as "is too long", and does not
    /// contain the parsed string.
    pub fn parse(text: &str) -> Result<Key, String> {
        let text = text.trim();
        if text.len() as u64 > MAX_TEXT_LEN {
            return Err(format!("is longer than {MAX_TEXT_LEN} bytes"));
        }
        if let Some(bytes) = parse_hexadecimal(text) {
            return Ok(Key(bytes));
        }
        if text.len() < MIN_PASSPHRASE_LEN {
            return Err(format!("is only {} bytes long", text.len()));
        }
        Ok(Key(Sha256::new().chain_update(DOMAIN).chain_update(text).finalize().into()))
    }

    pub(super) fn secret(&self) -> &[u8; 32] {
        &self.0
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key(secret)")
    }
}

/// Reads a text of at most 8192 bytes from a file that other users have no permission to read or change.
pub fn read_secret_file(path: &Path) -> Result<String, KeyError> {
    let file = File::open(path).map_err(|error| unreadable(path, &error))?;
    check_file_mode(path, &file)?;
    let mut text = Vec::new();
    let read = file.take(MAX_TEXT_LEN + 1).read_to_end(&mut text);
    read.map_err(|error| unreadable(path, &error))?;
    let invalid = |what: String| KeyError::Invalid { location: path.display().to_string(), what };
    if text.len() as u64 > MAX_TEXT_LEN {
        return Err(invalid(format!("is longer than {MAX_TEXT_LEN} bytes")));
    }
    String::from_utf8(text).map_err(|_| invalid("is not UTF-8".into()))
}

/// Writes 32 random bytes as 64 hexadecimal digits to a new file that only its owner can read. They are a key of a ring
/// or an API key of a server.
pub fn create_secret_file(path: &Path) -> Result<(), KeyError> {
    let failed = |reason: String| KeyError::Unwritable { path: path.into(), reason };
    let mut secret = [0; 32];
    SysRng.try_fill_bytes(&mut secret).map_err(|error| failed(error.to_string()))?;
    let mut options = OpenOptions::new();
    options.write(true).create_new(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    let mut text = String::new();
    for byte in secret {
        // Writing to a string cannot fail.
        let _ = write!(text, "{byte:02x}");
    }
    let mut file = options.open(path).map_err(|error| failed(error.to_string()))?;
    file.write_all(format!("{text}\n").as_bytes()).map_err(|error| {
        // A part of a key would be in the way of the next attempt.
        let _ = std::fs::remove_file(path);
        failed(error.to_string())
    })
}

fn parse_hexadecimal(text: &str) -> Option<[u8; 32]> {
    let digits: Vec<u8> =
        text.chars().map(|digit| digit.to_digit(16).map(|value| value as u8)).collect::<Option<_>>()?;
    let digits: [u8; 64] = digits.try_into().ok()?;
    Some(std::array::from_fn(|index| digits[2 * index] << 4 | digits[2 * index + 1]))
}

fn unreadable(path: &Path, error: &std::io::Error) -> KeyError {
    KeyError::Unreadable { path: path.into(), reason: error.to_string() }
}

/// Checks that only the owner can access the key file. The file is open, so nobody can replace it before it is read.
#[cfg(unix)]
fn check_file_mode(path: &Path, file: &File) -> Result<(), KeyError> {
    use std::os::unix::fs::PermissionsExt;
    let metadata = file.metadata().map_err(|error| unreadable(path, &error))?;
    let mode = metadata.permissions().mode() & 0o777;
    let of_others = mode & 0o077;
    if of_others == 0 { Ok(()) } else { Err(KeyError::Exposed { path: path.into(), mode }) }
}

/// Accepts every key file, because only Unix has file modes.
#[cfg(not(unix))]
fn check_file_mode(_: &Path, _: &File) -> Result<(), KeyError> {
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hex_digits_are_bytes_and_passphrases_are_hashed() {
        let digits = "000102030405060708090a0b0c0d0e0f101112131415161718191A1B1C1D1E1F";
        let counted: [u8; 32] = std::array::from_fn(|at| at as u8);
        assert_eq!(Key::parse(&format!("{digits}\n")).unwrap().0, counted);
        let phrase = Key::parse("sixteen bytes ok").unwrap();
        assert_eq!(phrase, Key::parse("  sixteen bytes ok\n").unwrap(), "surrounding space is ignored");
        assert_ne!(phrase, Key::parse("sixteen bytes oK").unwrap());
        let hash: [u8; 32] = Sha256::digest("sixteen bytes ok").into();
        assert_ne!(phrase.0, hash, "the prefix is hashed too");
        assert_ne!(Key::parse(&digits[2..]).unwrap().0[..31], counted[1..], "62 digits are a phrase");
    }

    #[test]
    fn invalid_key_error_does_not_show_the_key() {
        for text in ["", "hunter2", "fifteen bytes .", &"x".repeat(9000)] {
            let reason = Key::parse(text).unwrap_err();
            assert!(reason.contains("bytes") && (text.is_empty() || !reason.contains(text)), "{reason}");
        }
    }

    #[test]
    fn created_files_are_new_and_random() {
        let folder = tempfile::tempdir().unwrap();
        let [first, second] = ["first", "second"].map(|name| folder.path().join(name));
        create_secret_file(&first).unwrap();
        create_secret_file(&second).unwrap();
        assert!(Key::read(&first).unwrap() != Key::read(&second).unwrap());
        assert_eq!(read_secret_file(&first).unwrap().trim().len(), 64);
        let again = create_secret_file(&first).unwrap_err();
        assert!(matches!(again, KeyError::Unwritable { .. }) && again.hint().contains("not overwritten"));
    }

    #[test]
    fn debug_output_hides_the_key() {
        assert_eq!(format!("{:?}", Key::parse("correct horse battery staple").unwrap()), "Key(secret)");
    }

    #[cfg(unix)]
    #[test]
    fn key_file_readable_by_others_is_rejected() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ring.key");
        std::fs::write(&path, "correct horse battery staple\n").unwrap();
        for (mode, fine) in [(0o644, false), (0o640, false), (0o620, false), (0o600, true), (0o400, true)] {
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
            let read = Key::read(&path);
            assert_eq!(read.is_ok(), fine, "{mode:o}: {read:?}");
            if let Err(error) = read {
                assert!(error.hint().contains("chmod 600"), "{error}");
            }
        }
        assert!(matches!(Key::read(&folder.path().join("none")), Err(KeyError::Unreadable { .. })));
    }
}

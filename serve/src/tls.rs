//! TLS of the server: a certificate and its private key, from files in PEM format.

use std::path::Path;
use std::sync::Arc;

use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};

/// Reads a certificate with its chain, and its private key. The error names the file and the reason.
pub fn tls_acceptor(certificate: &Path, key: &Path) -> Result<TlsAcceptor, String> {
    let failed = |path: &Path, reason: String| format!("{}: {reason}", path.display());
    let chain: Vec<CertificateDer> = CertificateDer::pem_file_iter(certificate)
        .and_then(Iterator::collect)
        .map_err(|error| failed(certificate, error.to_string()))?;
    if chain.is_empty() {
        return Err(failed(certificate, "the file has no certificate in PEM format".to_owned()));
    }
    let pem = hearth_ring::read_secret_file(key).map_err(|error| failed(key, error.to_string()))?;
    let private =
        PrivateKeyDer::from_pem_slice(pem.as_bytes()).map_err(|error| failed(key, error.to_string()))?;
    let mut config = ServerConfig::builder()
        .with_no_client_auth()
        .with_single_cert(chain, private)
        .map_err(|error| failed(certificate, error.to_string()))?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(TlsAcceptor::from(Arc::new(config)))
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio_rustls::TlsConnector;
    use tokio_rustls::rustls::{ClientConfig, RootCertStore};

    use super::*;

    /// A self-signed certificate for `localhost` that is valid for a hundred years, and its key.
    const CERTIFICATE: &str = "tests/data/localhost.cert.pem";
    const KEY: &str = "tests/data/localhost.key.pem";

    /// Copies the key to a file that only its owner can read: a checkout gives others permission to read it.
    fn private_key() -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().expect("a file");
        std::fs::write(file.path(), std::fs::read(KEY).expect("the key")).expect("written");
        file
    }

    #[tokio::test]
    async fn client_that_trusts_the_certificate_can_talk() {
        let key = private_key();
        let acceptor = tls_acceptor(CERTIFICATE.as_ref(), key.path()).expect("a certificate and its key");
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_file(CERTIFICATE).expect("a certificate")).expect("a root");
        let config = ClientConfig::builder().with_root_certificates(roots).with_no_client_auth();
        let connector = TlsConnector::from(Arc::new(config));
        let (client, server) = tokio::io::duplex(1 << 16);
        let name = "localhost".try_into().expect("a name");
        let (client, server) = tokio::join!(connector.connect(name, client), acceptor.accept(server));
        let (mut client, mut server) = (client.expect("connected"), server.expect("accepted"));
        client.write_all(b"hello").await.expect("sent");
        let mut received = [0; 5];
        server.read_exact(&mut received).await.expect("received");
        assert_eq!(&received, b"hello");
    }

    #[cfg(unix)]
    #[test]
    fn key_that_others_can_read_is_refused() {
        use std::os::unix::fs::PermissionsExt;
        let key = private_key();
        std::fs::set_permissions(key.path(), std::fs::Permissions::from_mode(0o644)).expect("set");
        let refused = tls_acceptor(CERTIFICATE.as_ref(), key.path()).map(drop).expect_err("refused");
        assert!(refused.contains("can be read or changed by other users"), "{refused}");
    }

    #[test]
    fn unusable_files_are_named() {
        let error = |certificate: &str, key: &str| {
            tls_acceptor(certificate.as_ref(), key.as_ref()).map(drop).expect_err("not usable")
        };
        assert!(error("missing.pem", KEY).starts_with("missing.pem: "));
        assert!(error(KEY, KEY).contains("no certificate"));
        let no_key = tempfile::NamedTempFile::new().expect("a file");
        let unusable = error(CERTIFICATE, &no_key.path().display().to_string());
        assert!(unusable.starts_with(&no_key.path().display().to_string()), "{unusable}");
    }
}

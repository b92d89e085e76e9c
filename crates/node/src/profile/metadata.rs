//! Queries the cloud's metadata service about this machine: a few bytes over HTTP from a link-local address.
//!
//! There is no name lookup, and no packet leaves the host's link. A service that does not answer within a second is
//! treated as absent, and the machine type is detected by other signs.

use std::{
    io::{self, Read, Write},
    net::{SocketAddr, TcpStream},
    time::{Duration, Instant},
};

use doctor_core::sku_detection::Cloud;

/// The address of the service in all clouds.
pub const LINK_LOCAL: &str = "http://169.254.169.254";

/// Time limit of one request, from the first packet to the last byte.
const PATIENCE: Duration = Duration::from_secs(1);

/// An instance type is one word; anything much longer is not one.
const MAX_BYTES: u64 = 16 << 10;

#[derive(Debug, thiserror::Error)]
pub enum MetadataError {
    #[error("`{0}` is not an address; expected one such as http://169.254.169.254")]
    BadUrl(String),
    #[error("its metadata service does not answer: {0}")]
    Io(#[from] io::Error),
    #[error("its metadata service responded with `{0}`")]
    Status(String),
    #[error("its metadata service returned an invalid machine type: `{0}`")]
    InvalidMachineType(String),
}

/// Queries the instance type.
///
/// # Errors
/// If the query fails or the answer is not a machine type; the caller continues without it.
pub fn instance_type(cloud: Cloud, url: &str) -> Result<String, MetadataError> {
    let service = Service::new(url)?;
    let name = match cloud {
        Cloud::Aws => {
            let token = service.token()?;
            service.request("GET", "/latest/meta-data/instance-type", ("X-aws-ec2-metadata-token", &token))?
        }
        Cloud::Azure => {
            let path = "/metadata/instance/compute/vmSize?api-version=2021-02-01&format=text";
            service.request("GET", path, ("Metadata", "true"))?
        }
        Cloud::Gcp => {
            let path = "/computeMetadata/v1/instance/machine-type";
            service.request("GET", path, ("Metadata-Flavor", "Google"))?
        }
        Cloud::Oci => service.request("GET", "/opc/v2/instance/shape", OCI_HEADER)?,
    };
    machine_type(&name)
}

/// Oracle's service requires this fixed header, so that a forwarded request is not answered.
const OCI_HEADER: (&str, &str) = ("Authorization", "Bearer Oracle");

/// Metadata fields for a support case, each with its name in our report. Only the instance and its location: the
/// service also holds user data and credentials, which must not be read.
const AWS: [(&str, &str); 8] = [
    ("instance_id", "instance-id"),
    ("availability_zone", "placement/availability-zone"),
    ("availability_zone_id", "placement/availability-zone-id"),
    ("placement_group", "placement/group-name"),
    ("placement_partition", "placement/partition-number"),
    ("host_id", "placement/host-id"),
    ("image", "ami-id"),
    ("local_hostname", "local-hostname"),
];
const AZURE: [(&str, &str); 7] = [
    ("vm_id", "vmId"),
    ("vm_name", "name"),
    ("resource_id", "resourceId"),
    ("scale_set", "vmScaleSetName"),
    ("placement_group", "placementGroupId"),
    ("location", "location"),
    ("zone", "zone"),
];
const GCP: [(&str, &str); 5] = [
    ("instance_id", "id"),
    ("instance_name", "name"),
    ("zone", "zone"),
    ("image", "image"),
    ("physical_host", "attributes/physical_host"),
];
const OCI: [(&str, &str); 6] = [
    ("instance_id", "id"),
    ("instance_name", "displayName"),
    ("availability_domain", "availabilityDomain"),
    ("fault_domain", "faultDomain"),
    ("region", "canonicalRegionName"),
    ("image", "image"),
];

/// Returns the cloud's identifiers of this instance. Fields that it does not have are left out.
///
/// # Errors
/// If the service does not answer.
pub fn instance_ids(cloud: Cloud, url: &str) -> Result<Vec<(&'static str, String)>, MetadataError> {
    let service = Service::new(url)?;
    let token = match cloud {
        Cloud::Aws => service.token()?,
        Cloud::Azure | Cloud::Gcp | Cloud::Oci => String::new(),
    };
    let fields: &[(&'static str, &str)] = match cloud {
        Cloud::Aws => &AWS,
        Cloud::Azure => &AZURE,
        Cloud::Gcp => &GCP,
        Cloud::Oci => &OCI,
    };
    let mut ids = Vec::new();
    for (name, path) in fields {
        let response = match cloud {
            Cloud::Aws => {
                service.request("GET", &format!("/latest/meta-data/{path}"), ("X-aws-ec2-metadata-token", &token))
            }
            Cloud::Azure => {
                let path = format!("/metadata/instance/compute/{path}?api-version=2021-02-01&format=text");
                service.request("GET", &path, ("Metadata", "true"))
            }
            Cloud::Gcp => {
                service.request("GET", &format!("/computeMetadata/v1/instance/{path}"), ("Metadata-Flavor", "Google"))
            }
            Cloud::Oci => service.request("GET", &format!("/opc/v2/instance/{path}"), OCI_HEADER),
        };
        match response {
            Ok(text) => ids.extend(single_line(&text).map(|text| (*name, text))),
            // The cloud has no such field.
            Err(MetadataError::Status(_)) => {}
            // A service that does not answer once is not queried seven more times.
            Err(error) => return Err(error),
        }
    }
    Ok(ids)
}

/// Accepts one line of plain text only: a captive portal answers with pages.
fn single_line(text: &str) -> Option<String> {
    let plain = !text.is_empty() && text.len() <= 512 && !text.contains('<') && !text.chars().any(char::is_control);
    plain.then(|| text.to_owned())
}

/// Parses a complete response like [`instance_type`] does.
///
/// # Errors
/// If it is not a response or does not name a machine type.
pub fn parse_response(response: &[u8]) -> Result<String, MetadataError> {
    machine_type(&body(response)?)
}

fn machine_type(text: &str) -> Result<String, MetadataError> {
    // Google's is a path: projects/1234/machineTypes/a3-highgpu-8g.
    let name = text.rsplit('/').next().unwrap_or_default();
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-');
    if name.is_empty() || name.len() > 64 || !name.bytes().all(plain) {
        return Err(MetadataError::InvalidMachineType(for_message(name)));
    }
    Ok(name.to_owned())
}

#[derive(Debug)]
struct Service {
    address: SocketAddr,
}

impl Service {
    fn new(url: &str) -> Result<Self, MetadataError> {
        let bad = || MetadataError::BadUrl(for_message(url));
        let host = url.strip_prefix("http://").ok_or_else(bad)?.trim_end_matches('/');
        let address = host.parse().or_else(|_| host.parse().map(|ip| SocketAddr::new(ip, 80))).map_err(|_| bad())?;
        Ok(Self { address })
    }

    /// Fetches the session token that AWS requires.
    fn token(&self) -> Result<String, MetadataError> {
        self.request("PUT", "/latest/api/token", ("X-aws-ec2-metadata-token-ttl-seconds", "60"))
    }

    fn request(&self, method: &str, path: &str, (name, value): (&str, &str)) -> Result<String, MetadataError> {
        let deadline = Instant::now() + PATIENCE;
        let mut stream = TcpStream::connect_timeout(&self.address, PATIENCE)?;
        stream.set_write_timeout(Some(PATIENCE))?;
        let host = self.address.ip();
        let request =
            format!("{method} {path} HTTP/1.0\r\nHost: {host}\r\n{name}: {value}\r\nContent-Length: 0\r\n\r\n");
        stream.write_all(request.as_bytes())?;
        let response = read_until(&mut stream, deadline)?;
        body(&response)
    }
}

/// Reads to the end within the time limit, so that a service that sends one byte a second cannot block us.
fn read_until(stream: &mut TcpStream, deadline: Instant) -> Result<Vec<u8>, MetadataError> {
    let mut response = Vec::new();
    let mut some = [0; 4096];
    loop {
        if is_complete(&response) {
            return Ok(response);
        }
        let remaining = deadline.saturating_duration_since(Instant::now());
        if remaining.is_zero() {
            return Err(io::Error::from(io::ErrorKind::TimedOut).into());
        }
        stream.set_read_timeout(Some(remaining))?;
        match stream.read(&mut some)? {
            0 => return Ok(response),
            read => response.extend_from_slice(&some[..read]),
        }
        if response.len() as u64 > MAX_BYTES {
            return Err(MetadataError::InvalidMachineType("more than 16 KiB".to_owned()));
        }
    }
}

fn split(response: &[u8]) -> Option<(String, &[u8])> {
    let end = response.windows(4).position(|four| four == b"\r\n\r\n")?;
    Some((String::from_utf8_lossy(&response[..end]).into_owned(), &response[end + 4..]))
}

/// Whether the response has reached its declared length. Without one, it ends with the connection.
pub fn is_complete(response: &[u8]) -> bool {
    let Some((head, body)) = split(response) else { return false };
    let length = head.lines().find_map(|line| {
        let (name, value) = line.split_once(':')?;
        name.eq_ignore_ascii_case("content-length").then(|| value.trim().parse::<usize>().ok())?
    });
    length.is_some_and(|length| body.len() >= length)
}

fn body(response: &[u8]) -> Result<String, MetadataError> {
    let Some((head, body)) = split(response) else {
        return Err(MetadataError::Status(for_message(&String::from_utf8_lossy(response))));
    };
    let status = head.lines().next().unwrap_or_default();
    if status.split(' ').nth(1) != Some("200") {
        return Err(MetadataError::Status(for_message(status)));
    }
    Ok(String::from_utf8_lossy(body).trim().to_owned())
}

fn for_message(text: &str) -> String {
    text.chars().take(64).collect::<String>().escape_debug().to_string()
}

#[cfg(test)]
mod tests {
    use std::{
        io::{BufRead, BufReader},
        net::TcpListener,
        thread::{self, JoinHandle},
    };

    use super::*;

    /// Serves these responses like a cloud would, and returns the requests' first lines and headers.
    fn service(responses: &'static [&'static str]) -> (String, JoinHandle<Vec<String>>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let served = thread::spawn(move || {
            let mut requests = Vec::new();
            for response in responses {
                let (mut stream, _) = listener.accept().unwrap();
                let lines = BufReader::new(stream.try_clone().unwrap()).lines().map_while(Result::ok);
                requests.push(lines.take_while(|line| !line.is_empty()).collect::<Vec<_>>().join("\n"));
                stream.write_all(response.as_bytes()).unwrap();
            }
            requests
        });
        (url, served)
    }

    #[test]
    fn each_cloud_is_queried_with_its_own_request() {
        const TOKEN: &str = "HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nTOKEN=";
        let (url, served) = service(&[TOKEN, "HTTP/1.1 200 OK\r\nContent-Length: 11\r\n\r\np5.48xlarge"]);
        assert_eq!(instance_type(Cloud::Aws, &url).unwrap(), "p5.48xlarge");
        let requests = served.join().unwrap();
        assert!(
            requests[0].starts_with("PUT /latest/api/token ") && requests[0].contains("token-ttl-seconds: 60"),
            "{requests:?}"
        );
        assert!(requests[1].contains("X-aws-ec2-metadata-token: TOKEN="), "{requests:?}");

        let (url, served) = service(&["HTTP/1.0 200 OK\r\n\r\nStandard_ND96isr_H100_v5"]);
        assert_eq!(instance_type(Cloud::Azure, &url).unwrap(), "Standard_ND96isr_H100_v5");
        assert!(served.join().unwrap()[0].contains("Metadata: true"));

        let (url, served) = service(&["HTTP/1.1 200 OK\r\n\r\nprojects/1234/machineTypes/a3-highgpu-8g"]);
        assert_eq!(instance_type(Cloud::Gcp, &url).unwrap(), "a3-highgpu-8g");
        assert!(served.join().unwrap()[0].contains("Metadata-Flavor: Google"));

        let (url, served) = service(&["HTTP/1.1 200 OK\r\n\r\nBM.GPU.H100.8"]);
        assert_eq!(instance_type(Cloud::Oci, &url).unwrap(), "BM.GPU.H100.8");
        assert!(served.join().unwrap()[0].contains("Authorization: Bearer Oracle"));
    }

    #[test]
    fn instance_ids_are_what_the_cloud_has_and_a_silent_service_is_queried_once() {
        const NO: &str = "HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n";
        let (url, served) = service(&[
            "HTTP/1.1 200 OK\r\n\r\n02aab8a4",
            "HTTP/1.1 200 OK\r\n\r\n<html>sign in</html>",
            NO,
            "HTTP/1.1 200 OK\r\n\r\n",
            NO,
            "HTTP/1.1 200 OK\r\n\r\neastus",
            NO,
        ]);
        let ids = instance_ids(Cloud::Azure, &url).unwrap();
        assert_eq!(ids, [("vm_id", "02aab8a4".to_owned()), ("location", "eastus".to_owned())]);
        let requests = served.join().unwrap();
        assert!(requests[0].starts_with("GET /metadata/instance/compute/vmId?") && requests.len() == 7, "{requests:?}");
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let silent = format!("http://{}", listener.local_addr().unwrap());
        assert!(matches!(instance_ids(Cloud::Gcp, &silent), Err(MetadataError::Io(_))));
        listener.set_nonblocking(true).unwrap();
        assert!(listener.accept().is_ok() && listener.accept().is_err(), "it was queried once");
    }

    #[test]
    fn an_invalid_machine_type_is_rejected() {
        for response in [
            &["HTTP/1.1 404 Not Found\r\n\r\nno"][..],
            &["HTTP/1.1 200 OK\r\n\r\n"],
            &["HTTP/1.1 200 OK\r\n\r\n<html>sign in</html>"],
            &["hello"],
        ] {
            let (url, served) = service(response);
            assert!(instance_type(Cloud::Azure, &url).is_err(), "{response:?}");
            served.join().unwrap();
        }
        for url in ["https://127.0.0.1", "http://metadata.google.internal", "127.0.0.1", "http://"] {
            assert!(matches!(instance_type(Cloud::Gcp, url), Err(MetadataError::BadUrl(_))), "{url}");
        }
    }

    #[test]
    fn a_silent_service_times_out() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let started = Instant::now();
        assert!(matches!(instance_type(Cloud::Azure, &url), Err(MetadataError::Io(_))));
        assert!(started.elapsed() < PATIENCE * 10, "{:?}", started.elapsed());
        drop(listener);
    }
}

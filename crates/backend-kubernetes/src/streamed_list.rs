//! Lists objects, and parses them as they arrive.
//!
//! The text of two hundred pods is two megabytes, of which little is kept. It is never in memory as a whole.

use std::{
    fmt::Debug,
    io::{self, BufReader, ErrorKind, Read},
    pin::Pin,
    time::{Duration, Instant},
};

use doctor_backend::{BackendError, Effect, deadline};
use futures_util::io::{AsyncRead, AsyncReadExt};
use kube::{
    api::ListParams,
    core::{ApiResource, Request},
};
use serde::{Deserialize, de::DeserializeOwned};
use tokio::runtime::Runtime;

use super::{
    KubernetesBackend,
    cluster::{DynamicResource, REQUEST_TIMEOUT},
    names,
};

/// A list that is longer is an error. A pod has about 10 kB.
const MAX_LIST_BYTES: u64 = 256 << 20;
const BUFFER_BYTES: usize = 64 << 10;

#[derive(Debug, Deserialize)]
struct List<K> {
    items: Vec<K>,
}

impl KubernetesBackend {
    /// Returns our objects of one kind.
    pub(super) fn list<K>(&self, operation: &'static str, of: &ApiResource) -> Result<Vec<K>, BackendError>
    where
        K: DynamicResource + DeserializeOwned + Debug,
    {
        let ours = ListParams::default().labels(&names::run_label(&self.config));
        let path = K::url_path(of, Some(&self.config.namespace));
        let ends = Instant::now() + deadline::time_left(REQUEST_TIMEOUT);
        let body = self.request(operation, async {
            let request = Request::new(path).list(&ours).map_err(kube::Error::BuildRequest)?;
            self.client.request_stream(request).await
        })?;
        let body = BlockingBody { runtime: &self.runtime, body: Box::pin(body), ends };
        parse(body, MAX_LIST_BYTES).map_err(|text| BackendError { operation, text, effect: Effect::Unknown })
    }
}

fn parse<K: DeserializeOwned>(body: impl Read, max_bytes: u64) -> Result<Vec<K>, String> {
    // One byte more, so that a list of exactly the limit ends.
    let mut body = body.take(max_bytes.saturating_add(1));
    let parsed = serde_json::from_reader(BufReader::with_capacity(BUFFER_BYTES, &mut body));
    match parsed {
        _ if body.limit() == 0 => Err(format!("the list has more than {max_bytes} bytes")),
        Ok(List { items }) => Ok(items),
        Err(error) if error.is_io() => Err(error.to_string()),
        Err(error) => Err(format!("the API server sent a list that cannot be read: {error}")),
    }
}

/// Reads the body of a response on the calling thread.
struct BlockingBody<'a, B> {
    runtime: &'a Runtime,
    body: Pin<Box<B>>,
    ends: Instant,
}

impl<B: AsyncRead> Read for BlockingBody<'_, B> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let left = self.ends.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        let read = self.runtime.block_on(async { tokio::time::timeout(left, self.body.read(buffer)).await });
        read.unwrap_or_else(|_| {
            Err(io::Error::new(ErrorKind::TimedOut, "the API server did not send the whole list in time"))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::{StreamExt, TryStreamExt, stream};

    fn body<'a>(
        runtime: &'a Runtime,
        chunks: &[&'static [u8]],
        end: Result<(), ErrorKind>,
    ) -> BlockingBody<'a, impl AsyncRead + use<>> {
        let chunks: Vec<io::Result<&[u8]>> = chunks.iter().map(|chunk| Ok(*chunk)).collect();
        let end = stream::iter(end.err().map(|kind| Err(kind.into())));
        let body = stream::iter(chunks).chain(end).into_async_read();
        BlockingBody { runtime, body: Box::pin(body), ends: Instant::now() + Duration::from_secs(60) }
    }

    fn runtime() -> Runtime {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
    }

    #[test]
    fn a_list_in_pieces_is_read_and_a_broken_one_is_an_error() {
        let runtime = runtime();
        let read = |chunks: &[&'static [u8]], end| parse::<u8>(body(&runtime, chunks, end), MAX_LIST_BYTES);
        assert_eq!(read(&[b"{\"kind\":\"PodList\",\"ite", b"ms\":[1,2", b"3]}"], Ok(())), Ok(vec![1, 23]));
        let failed = read(&[b"{\"items\":[1,"], Err(ErrorKind::ConnectionReset)).unwrap_err();
        assert!(failed.contains("connection reset"), "{failed}");
        for chunks in [&[b"{\"items\":[1,".as_slice()], &[b"{}"], &[b"{\"items\":[1]} x"], &[b""]] {
            let failed = read(chunks, Ok(())).unwrap_err();
            assert!(failed.contains("cannot be read"), "{failed}");
        }
    }

    #[test]
    fn a_server_that_stops_sending_is_an_error_in_time() {
        let runtime = runtime();
        let body = stream::iter([Ok(b"{\"items\":[")]).chain(stream::pending()).into_async_read();
        let ends = Instant::now() + Duration::from_millis(20);
        let failed = parse::<u8>(BlockingBody { runtime: &runtime, body: Box::pin(body), ends }, 100).unwrap_err();
        assert!(failed.contains("did not send the whole list in time"), "{failed}");
    }

    #[test]
    fn a_list_that_is_too_long_is_an_error() {
        let endless = io::Cursor::new(b"{\"items\":[").chain(io::repeat(b' '));
        assert_eq!(parse::<u8>(endless, 100), Err("the list has more than 100 bytes".to_owned()));
    }
}

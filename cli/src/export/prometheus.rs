//! Metrics as Prometheus scrapes them: the text of OpenMetrics over HTTP/1.
//!
//! One thread serves all clients, so they cost a trace nothing: it swaps what is shown, and waits
//! for nobody. A client is bounded in the number of connections, the time of a request, and the
//! whole time.

use std::convert::Infallible;
use std::fmt;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::header::{ALLOW, CONTENT_TYPE};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, MetricEncoder, text};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::exemplar::Exemplar;
use prometheus_client::registry::Registry;
use tokio::sync::{Semaphore, oneshot};

use super::metrics::{Family, Kind, Metrics, Value, total};

/// The most clients at a time.
const MOST_CLIENTS: usize = 32;
/// The time that a client has to send a request's head.
const HEAD: Duration = Duration::from_secs(10);
/// The time of a whole connection, whatever it is used for.
const CONNECTION: Duration = Duration::from_secs(300);
/// The time for which the server rests where it cannot take a client: no descriptor is left.
const REST: Duration = Duration::from_millis(100);
/// The media type of the answer.
const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// The metrics cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The address cannot be listened at.
    #[error("--metrics {address}: {source}")]
    Listen {
        /// The address as it was given.
        address: String,
        /// The reason.
        source: io::Error,
    },
    /// The server's thread cannot be made.
    #[error("the server of --metrics: {0}")]
    Thread(io::Error),
}

/// The metrics that are shown now.
type Shown = Arc<Mutex<Arc<Metrics>>>;

/// A server of metrics. It ends when this is dropped.
pub struct Server {
    shown: Shown,
    address: SocketAddr,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Server")
            .field("address", &self.address)
            .finish_non_exhaustive()
    }
}

impl Server {
    /// Serves metrics at an address such as `127.0.0.1:9464`, all with the label `machine`.
    ///
    /// # Errors
    /// If the address is in use, or is none of this host.
    pub fn start(address: &str, machine: &str) -> Result<Self, ServeError> {
        let failed = |source| ServeError::Listen {
            address: address.to_owned(),
            source,
        };
        let listener = TcpListener::bind(address).map_err(failed)?;
        listener.set_nonblocking(true).map_err(failed)?;
        let bound = listener.local_addr().map_err(failed)?;
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_io()
            .enable_time()
            .build()
            .map_err(ServeError::Thread)?;
        let shown = Shown::default();
        let (stop, stopped) = oneshot::channel();
        let metrics = shown.clone();
        let machine = machine.to_owned();
        let thread = std::thread::Builder::new()
            .name("metrics".into())
            .spawn(move || {
                // The server's own task ends with the runtime.
                runtime.block_on(async {
                    tokio::spawn(async move {
                        if let Err(error) = serve(listener, metrics, machine).await {
                            log::error!("--metrics: {error}");
                        }
                    });
                    let _ = stopped.await;
                });
            })
            .map_err(ServeError::Thread)?;
        Ok(Self {
            shown,
            address: bound,
            stop: Some(stop),
            thread: Some(thread),
        })
    }

    /// Returns the address at which the server listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Shows these metrics from now on.
    pub fn show(&self, metrics: Arc<Metrics>) {
        *self.shown.lock().unwrap_or_else(PoisonError::into_inner) = metrics;
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            log::error!("the thread of --metrics panicked");
        }
    }
}

async fn serve(listener: TcpListener, shown: Shown, machine: String) -> io::Result<()> {
    let listener = tokio::net::TcpListener::from_std(listener)?;
    let room = Arc::new(Semaphore::new(MOST_CLIENTS));
    loop {
        let (stream, _) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                log::info!("--metrics: {error}");
                tokio::time::sleep(REST).await;
                continue;
            }
        };
        // A client too many is sent away.
        let Ok(place) = room.clone().try_acquire_owned() else {
            continue;
        };
        let (shown, machine) = (shown.clone(), machine.clone());
        tokio::spawn(async move {
            let answering = service_fn(move |request| {
                let answer = answer(&request, &shown, &machine);
                async move { Ok::<_, Infallible>(answer) }
            });
            let connection = http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(HEAD)
                .serve_connection(TokioIo::new(stream), answering);
            match tokio::time::timeout(CONNECTION, connection).await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => log::debug!("a client of --metrics: {error}"),
                Err(_) => log::debug!("a client of --metrics took too long"),
            }
            drop(place);
        });
    }
}

fn answer(request: &Request<Incoming>, shown: &Shown, machine: &str) -> Response<Full<Bytes>> {
    let plain = |status, text: &'static str| {
        let mut response = Response::new(Full::new(Bytes::from_static(text.as_bytes())));
        *response.status_mut() = status;
        response
    };
    if request.uri().path() != "/metrics" {
        return plain(StatusCode::NOT_FOUND, "the metrics are at /metrics\n");
    }
    if !matches!(*request.method(), Method::GET | Method::HEAD) {
        let mut response = plain(StatusCode::METHOD_NOT_ALLOWED, "");
        let allowed = hyper::header::HeaderValue::from_static("GET, HEAD");
        response.headers_mut().insert(ALLOW, allowed);
        return response;
    }
    let metrics = shown.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let Ok(text) = render(&metrics, machine) else {
        return plain(StatusCode::INTERNAL_SERVER_ERROR, "");
    };
    let mut response = Response::new(Full::new(Bytes::from(text)));
    let kind = hyper::header::HeaderValue::from_static(OPEN_METRICS);
    response.headers_mut().insert(CONTENT_TYPE, kind);
    response
}

/// Returns the text of metrics.
fn render(metrics: &Metrics, machine: &str) -> Result<String, fmt::Error> {
    let labels = [("machine".into(), machine.to_owned().into())];
    let mut registry = Registry::with_labels(labels.into_iter());
    registry.register_collector(Box::new(Families(metrics.families())));
    let mut text = String::new();
    text::encode(&mut text, &registry)?;
    Ok(text)
}

#[derive(Debug)]
struct Families(Vec<Family>);

impl Collector for Families {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        for family in &self.0 {
            let kind = match family.kind {
                Kind::Counter => MetricType::Counter,
                Kind::Gauge => MetricType::Gauge,
                Kind::Histogram => MetricType::Histogram,
            };
            let mut encoder = encoder.encode_descriptor(&family.name, &family.help, None, kind)?;
            for sample in &family.samples {
                let one = encoder.encode_family(&sample.labels)?;
                encode(one, family.kind, &sample.value)?;
            }
        }
        Ok(())
    }
}

fn encode(mut encoder: MetricEncoder<'_>, kind: Kind, value: &Value) -> Result<(), fmt::Error> {
    type Labels = Vec<(String, String)>;
    let no_exemplar: Option<&Exemplar<Labels, f64>> = None;
    match (kind, value) {
        (Kind::Counter, Value::Number(number)) => encoder.encode_counter(number, no_exemplar),
        (_, Value::Number(number)) => encoder.encode_gauge(number),
        (_, Value::Histogram { sum, buckets }) => {
            encoder.encode_histogram::<Labels>(*sum, total(buckets), buckets, None)
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::io::{Read, Write};
    use std::net::TcpStream;

    use super::*;
    use crate::protocol::script::{MapEntry, MapKind, MapLine, MapValue};

    fn shown() -> Arc<Metrics> {
        let mut metrics = Metrics::default();
        let line = |name: &str, kind, value| MapLine {
            name: name.to_owned(),
            kind,
            entries: vec![MapEntry {
                key: vec!["a\"b\\\n".to_owned()],
                value,
            }],
            left_out: 0,
        };
        metrics.take_map(line("calls", MapKind::Count, MapValue::Number(7)));
        let rows = vec![(Some(2), Some(3), 5), (Some(4), Some(7), 1)];
        metrics.take_map(line("time", MapKind::Histogram, MapValue::Histogram(rows)));
        Arc::new(metrics)
    }

    fn ask(address: SocketAddr, request: &str) -> String {
        let mut stream = TcpStream::connect(address).unwrap();
        let request = format!("{request} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    }

    #[test]
    fn metrics_are_served_as_text() {
        let server = Server::start("127.0.0.1:0", "vm \"1\"").unwrap();
        server.show(shown());
        let answer = ask(server.address(), "GET /metrics");
        assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
        for line in [
            "content-type: application/openmetrics-text; version=1.0.0; charset=utf-8\r\n",
            "# TYPE exotrace_map_calls counter\n",
            "exotrace_map_calls_total{machine=\"vm \\\"1\\\"\",key0=\"a\\\"b\\\\\\n\"} 7.0\n",
            "exotrace_map_time_bucket{machine=\"vm \\\"1\\\"\",le=\"3.0\",key0=\"a\\\"b\\\\\\n\"} 5\n",
            "exotrace_map_time_bucket{machine=\"vm \\\"1\\\"\",le=\"+Inf\",key0=\"a\\\"b\\\\\\n\"} 6\n",
            "# EOF\n",
        ] {
            assert!(answer.contains(line), "{line} is not in\n{answer}");
        }
        for (request, status) in [("GET /", "404"), ("POST /metrics", "405"), ("\u{1}", "400")] {
            let answer = ask(server.address(), request);
            assert!(
                answer.starts_with(&format!("HTTP/1.1 {status}")),
                "{answer}"
            );
        }
    }

    #[test]
    fn an_address_in_use_is_told_with_its_name() {
        let server = Server::start("127.0.0.1:0", "vm").unwrap();
        let address = server.address().to_string();
        let error = Server::start(&address, "vm").unwrap_err().to_string();
        assert!(
            error.starts_with(&format!("--metrics {address}: Address already in use")),
            "{error}"
        );
        let error = Server::start("nonsense", "vm").unwrap_err().to_string();
        assert!(error.starts_with("--metrics nonsense: "), "{error}");
    }

    /// Silent clients hold all places, until one of them leaves.
    #[test]
    fn clients_that_say_nothing_hold_up_nobody() {
        let server = Server::start("127.0.0.1:0", "vm").unwrap();
        let mut silent: Vec<TcpStream> = (0..MOST_CLIENTS)
            .map(|_| TcpStream::connect(server.address()).unwrap())
            .collect();
        server.show(shown());
        // One too many is closed at once.
        let mut more = TcpStream::connect(server.address()).unwrap();
        assert_eq!(more.read(&mut [0]).unwrap_or(0), 0);
        silent.truncate(1);
        let answered = std::iter::repeat_with(|| {
            let mut stream = TcpStream::connect(server.address()).unwrap();
            let _ =
                stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
            let mut answer = String::new();
            let _ = stream.read_to_string(&mut answer);
            answer
        });
        let mut answered = answered.take(10_000);
        assert!(answered.any(|answer| answer.contains("exotrace_map_calls_total")));
        // The end waits for no client.
        drop(server);
    }
}

//! The way to a collector: OTLP over HTTP/1 with protobuf, or over gRPC, without TLS.
//!
//! Each call runs a runtime of this thread until the answer or the time is up. Answers are bounded.

use std::fmt;
use std::io;
use std::str::FromStr;
use std::time::Duration;

use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Bytes;
use hyper::client::conn::http1::{self, SendRequest};
use hyper::header::{CONTENT_TYPE, HOST};
use hyper::{StatusCode, Uri};
use hyper_util::rt::TokioIo;
use opentelemetry_proto::tonic::collector::logs::v1::logs_service_client::LogsServiceClient;
use opentelemetry_proto::tonic::collector::logs::v1::{
    ExportLogsServiceRequest, ExportLogsServiceResponse,
};
use opentelemetry_proto::tonic::collector::metrics::v1::metrics_service_client::MetricsServiceClient;
use opentelemetry_proto::tonic::collector::metrics::v1::{
    ExportMetricsServiceRequest, ExportMetricsServiceResponse,
};
use opentelemetry_proto::tonic::collector::trace::v1::trace_service_client::TraceServiceClient;
use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTraceServiceRequest, ExportTraceServiceResponse,
};
use prost::Message;
use tokio::net::TcpStream;
use tokio::runtime::Runtime;
use tonic::Code;
use tonic::transport::Channel;

/// The longest answer of a collector, in bytes.
const LONGEST_ANSWER: usize = 1 << 20;

/// A collector's place: `http://HOST:4318` or `grpc://HOST:4317`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Endpoint {
    is_grpc: bool,
    host: String,
    port: u16,
    /// The path before `/v1/logs`, without a slash at its end.
    path: String,
}

/// A text is no endpoint.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EndpointError {
    /// The text is none.
    #[error("invalid URL {0:?}: expected http://HOST:4318 or grpc://HOST:4317")]
    Form(String),
    /// TLS is asked for.
    #[error(
        "{0:?}: TLS is not supported; send to a collector on this host, which can forward with TLS"
    )]
    Tls(String),
}

impl FromStr for Endpoint {
    type Err = EndpointError;

    fn from_str(text: &str) -> Result<Self, EndpointError> {
        let wrong = || EndpointError::Form(text.to_owned());
        let uri: Uri = text.parse().map_err(|_| wrong())?;
        let is_grpc = match uri.scheme_str() {
            Some("http") => false,
            Some("grpc") => true,
            Some("https" | "grpcs") => return Err(EndpointError::Tls(text.to_owned())),
            _ => return Err(wrong()),
        };
        let host = uri.host().filter(|host| !host.is_empty());
        let path = uri.path().trim_end_matches('/');
        let has_more = uri.query().is_some() || is_grpc && !path.is_empty();
        if has_more || uri.authority().is_some_and(|a| a.as_str().contains('@')) {
            return Err(wrong());
        }
        Ok(Self {
            is_grpc,
            host: host.ok_or_else(wrong)?.to_owned(),
            port: uri.port_u16().unwrap_or(if is_grpc { 4317 } else { 4318 }),
            path: path.to_owned(),
        })
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = if self.is_grpc { "grpc" } else { "http" };
        write!(f, "{scheme}://{}:{}{}", self.host, self.port, self.path)
    }
}

/// A request to a collector, with the number of its records. Metrics are none.
#[derive(Debug, Clone)]
pub enum Request {
    /// Logs.
    Logs(ExportLogsServiceRequest, u64),
    /// Spans.
    Spans(ExportTraceServiceRequest, u64),
    /// Metrics.
    Metrics(ExportMetricsServiceRequest),
}

impl Request {
    /// Returns the number of records.
    pub fn len(&self) -> u64 {
        match self {
            Self::Logs(_, count) | Self::Spans(_, count) => *count,
            Self::Metrics(_) => 0,
        }
    }

    fn path(&self) -> &'static str {
        match self {
            Self::Logs(..) => "/v1/logs",
            Self::Spans(..) => "/v1/traces",
            Self::Metrics(_) => "/v1/metrics",
        }
    }

    fn encoded(&self) -> Vec<u8> {
        match self {
            Self::Logs(request, _) => request.encode_to_vec(),
            Self::Spans(request, _) => request.encode_to_vec(),
            Self::Metrics(request) => request.encode_to_vec(),
        }
    }

    /// Returns the number of records that an answer refuses.
    fn refused(&self, answer: &[u8]) -> u64 {
        let refused = match self {
            Self::Logs(..) => ExportLogsServiceResponse::decode(answer)
                .ok()
                .and_then(|answer| answer.partial_success)
                .map(|partial| partial.rejected_log_records),
            Self::Spans(..) => ExportTraceServiceResponse::decode(answer)
                .ok()
                .and_then(|answer| answer.partial_success)
                .map(|partial| partial.rejected_spans),
            Self::Metrics(_) => ExportMetricsServiceResponse::decode(answer)
                .ok()
                .and_then(|answer| answer.partial_success)
                .map(|partial| partial.rejected_data_points),
        };
        refused
            .and_then(|count| u64::try_from(count).ok())
            .unwrap_or(0)
    }
}

/// A request was not taken.
#[derive(Debug)]
pub enum SendError {
    /// It may be taken another time.
    Away(String),
    /// It will never be.
    Refused(String),
}

/// A client of one collector.
pub struct Client {
    endpoint: Endpoint,
    runtime: Runtime,
    connection: Option<SendRequest<Full<Bytes>>>,
    channel: Option<Channel>,
}

impl Client {
    /// Makes a client, which connects when it has something to send.
    ///
    /// # Errors
    /// If there is no runtime.
    pub fn new(endpoint: Endpoint) -> io::Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_io()
            .enable_time()
            .build()?;
        Ok(Self {
            endpoint,
            runtime,
            connection: None,
            channel: None,
        })
    }

    /// Sends a request, and returns the number of records that the collector has refused of it.
    ///
    /// # Errors
    /// If the collector is away, has not answered in time, or refuses the whole request.
    pub fn send(&mut self, request: &Request, limit: Duration) -> Result<u64, SendError> {
        let Self {
            endpoint,
            runtime,
            connection,
            channel,
        } = self;
        let sent = runtime.block_on(async {
            let sending = async {
                match endpoint.is_grpc {
                    true => call(endpoint, channel, request).await,
                    false => post(endpoint, connection, request).await,
                }
            };
            let late = |_| SendError::Away(format!("no answer in {} s", limit.as_secs_f32()));
            tokio::time::timeout(limit, sending).await.map_err(late)?
        });
        if sent.is_err() {
            self.connection = None;
        }
        sent
    }
}

async fn post(
    endpoint: &Endpoint,
    kept: &mut Option<SendRequest<Full<Bytes>>>,
    request: &Request,
) -> Result<u64, SendError> {
    let away = |error: &dyn fmt::Display| SendError::Away(error.to_string());
    let connection = match kept {
        Some(connection) if !connection.is_closed() => connection,
        _ => {
            // An address of IPv6 stands in brackets.
            let host = endpoint.host.trim_matches(['[', ']']);
            let stream = TcpStream::connect((host, endpoint.port)).await;
            let stream = TokioIo::new(stream.map_err(|error| away(&error))?);
            let made = http1::handshake(stream).await;
            let (connection, driver) = made.map_err(|error| away(&error))?;
            tokio::spawn(async move {
                if let Err(error) = driver.await {
                    log::debug!("--otlp: {error}");
                }
            });
            kept.insert(connection)
        }
    };
    let post = hyper::Request::post(format!("{}{}", endpoint.path, request.path()))
        .header(HOST, format!("{}:{}", endpoint.host, endpoint.port))
        .header(CONTENT_TYPE, "application/x-protobuf")
        .body(Full::new(Bytes::from(request.encoded())))
        .map_err(|error| SendError::Refused(error.to_string()))?;
    connection.ready().await.map_err(|error| away(&error))?;
    let answer = connection.send_request(post).await;
    let (head, body) = answer.map_err(|error| away(&error))?.into_parts();
    let body = Limited::new(body, LONGEST_ANSWER).collect().await;
    let body = body.map_err(|error| away(&error))?.to_bytes();
    match head.status {
        status if status.is_success() => Ok(request.refused(&body)),
        // The statuses after which OTLP lets a client try again.
        status @ (StatusCode::TOO_MANY_REQUESTS
        | StatusCode::BAD_GATEWAY
        | StatusCode::SERVICE_UNAVAILABLE
        | StatusCode::GATEWAY_TIMEOUT) => Err(away(&format_args!("status {status}"))),
        status => Err(SendError::Refused(format!("status {status}"))),
    }
}

async fn call(
    endpoint: &Endpoint,
    kept: &mut Option<Channel>,
    request: &Request,
) -> Result<u64, SendError> {
    let channel = match kept {
        Some(channel) => channel.clone(),
        None => {
            let uri = format!("http://{}:{}", endpoint.host, endpoint.port);
            let made = Channel::from_shared(uri);
            let made = made.map_err(|error| SendError::Refused(error.to_string()))?;
            kept.insert(made.connect_lazy()).clone()
        }
    };
    let refused = match request {
        Request::Logs(request, _) => LogsServiceClient::new(channel)
            .export(request.clone())
            .await
            .map(|answer| answer.into_inner().partial_success)
            .map(|partial| partial.map_or(0, |partial| partial.rejected_log_records)),
        Request::Spans(request, _) => TraceServiceClient::new(channel)
            .export(request.clone())
            .await
            .map(|answer| answer.into_inner().partial_success)
            .map(|partial| partial.map_or(0, |partial| partial.rejected_spans)),
        Request::Metrics(request) => MetricsServiceClient::new(channel)
            .export(request.clone())
            .await
            .map(|answer| answer.into_inner().partial_success)
            .map(|partial| partial.map_or(0, |partial| partial.rejected_data_points)),
    };
    match refused {
        Ok(count) => Ok(u64::try_from(count).unwrap_or(0)),
        Err(status) => {
            let why = format!("{}: {}", status.code(), status.message());
            Err(match status.code() {
                // The codes after which OTLP lets a client try again.
                Code::Cancelled
                | Code::DeadlineExceeded
                | Code::Aborted
                | Code::OutOfRange
                | Code::Unavailable
                | Code::DataLoss
                | Code::ResourceExhausted
                // What a broken connection becomes.
                | Code::Unknown => SendError::Away(why),
                _ => SendError::Refused(why),
            })
        }
    }
}

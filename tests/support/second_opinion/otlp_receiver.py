"""Receives OTLP by HTTP and gRPC with OpenTelemetry's own definitions, and prints it.

otlp_receiver.py HTTP-PORT GRPC-PORT [STATUS TIMES]

Each request becomes a line of JSON: {"kind": ..., "path": ..., "message": ...}. With STATUS, so many
requests by HTTP are answered with that status first, and are not printed.
"""

import json
import sys
import threading
from concurrent import futures
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import grpc
from google.protobuf.json_format import MessageToDict
from opentelemetry.proto.collector.logs.v1 import logs_service_pb2, logs_service_pb2_grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

KINDS = {
    "/v1/logs": (
        "logs",
        logs_service_pb2.ExportLogsServiceRequest,
        logs_service_pb2.ExportLogsServiceResponse,
    ),
    "/v1/traces": (
        "spans",
        trace_service_pb2.ExportTraceServiceRequest,
        trace_service_pb2.ExportTraceServiceResponse,
    ),
    "/v1/metrics": (
        "metrics",
        metrics_service_pb2.ExportMetricsServiceRequest,
        metrics_service_pb2.ExportMetricsServiceResponse,
    ),
}
lock = threading.Lock()
refusals = [int(sys.argv[3]), int(sys.argv[4])] if len(sys.argv) > 3 else [200, 0]


def show(kind, path, message):
    line = json.dumps({"kind": kind, "path": path, "message": MessageToDict(message)})
    with lock:
        print(line, flush=True)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        kind, request, response = KINDS[self.path]
        assert self.headers["Content-Type"] == "application/x-protobuf", self.headers
        with lock:
            refused = refusals[1] > 0
            refusals[1] -= 1
        if refused:
            self.answer(refusals[0], b"")
            return
        message = request()
        message.ParseFromString(body)
        show(kind, self.path, message)
        self.answer(200, response().SerializeToString())

    def answer(self, status, body):
        self.send_response(status)
        self.send_header("Content-Type", "application/x-protobuf")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


def exporter(kind, base, response):
    class Service(base):
        def Export(self, request, _):
            show(kind, "grpc", request)
            return response()

    return Service()


server = grpc.server(futures.ThreadPoolExecutor(max_workers=4))
logs_service_pb2_grpc.add_LogsServiceServicer_to_server(
    exporter("logs", logs_service_pb2_grpc.LogsServiceServicer, KINDS["/v1/logs"][2]), server
)
trace_service_pb2_grpc.add_TraceServiceServicer_to_server(
    exporter("spans", trace_service_pb2_grpc.TraceServiceServicer, KINDS["/v1/traces"][2]), server
)
metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(
    exporter("metrics", metrics_service_pb2_grpc.MetricsServiceServicer, KINDS["/v1/metrics"][2]),
    server,
)
server.add_insecure_port(f"127.0.0.1:{sys.argv[2]}")
server.start()
http = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
print(json.dumps({"kind": "ready"}), flush=True)
http.serve_forever()

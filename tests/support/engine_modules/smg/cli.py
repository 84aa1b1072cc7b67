"""Takes the place of the gateway: forwards to its workers in turn, and asks for its key."""

import argparse
import http.client
import http.server
import itertools
import sys
from urllib.parse import urlsplit

__all__ = ("main",)


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("command", choices=["launch"])
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--prometheus-host", required=True)
    parser.add_argument("--prometheus-port", required=True)
    parser.add_argument("--policy", required=True)
    parser.add_argument("--worker-urls", nargs="*", required=True)
    parser.add_argument("--api-key")
    flags = parser.parse_args(sys.argv[1:])
    workers = itertools.cycle(flags.worker_urls)

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.answer(200 if self.path == "/readiness" else 404, b"{}")

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            key = self.headers.get("authorization")
            if flags.api_key and key != f"Bearer {flags.api_key}":
                self.answer(401, b"{}")
                return
            worker = http.client.HTTPConnection(urlsplit(next(workers)).netloc, timeout=30)
            headers = {"content-type": "application/json"} | ({"authorization": key} if key else {})
            worker.request("POST", self.path, body, headers)
            reply = worker.getresponse()
            self.answer(reply.status, reply.read())
            worker.close()

        def answer(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    http.server.ThreadingHTTPServer((flags.host, flags.port), Handler).serve_forever()
    return 0

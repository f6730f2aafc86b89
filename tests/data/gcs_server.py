"""A server with the part of Google Cloud Storage's JSON API that pyarrow uses for small files."""

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar
from urllib.parse import parse_qs, unquote, urlsplit

BUCKET = "logs"


class _Handler(BaseHTTPRequestHandler):
    """Stores the objects of one bucket in memory."""

    protocol_version = "HTTP/1.1"
    # Do not wait for acknowledgements before sending.
    disable_nagle_algorithm, wbufsize = True, 1 << 16
    objects: ClassVar[dict[str, bytes]] = {}
    metadata: ClassVar[dict[str, dict[str, str]]] = {}  # with which pyarrow marks folders

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _answer(self, code: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(code)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def _json(self, value: dict[str, Any], code: int = 200) -> None:
        self._answer(code, json.dumps(value).encode(), Content_Type="application/json")

    def _missing(self) -> None:
        self._json({"error": {"code": 404, "message": "not found"}}, 404)

    def _about(self, name: str) -> dict[str, Any]:
        now = "2026-01-01T00:00:00Z"
        return {"kind": "storage#object", "bucket": BUCKET, "name": name, "generation": "1",
                "metageneration": "1", "size": str(len(self.objects[name])), "timeCreated": now,
                "updated": now, "contentType": "application/octet-stream",
                "metadata": self.metadata.get(name, {})}

    def _request(self) -> tuple[str, dict[str, str]]:
        """Return the name of the requested object ("" = list the bucket) and the query parameters.
        """
        url = urlsplit(self.path)
        name = url.path.partition(f"/b/{BUCKET}/o/")[2]
        return unquote(name), {k: v[0] for k, v in parse_qs(url.query).items()}

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def do_GET(self) -> None:
        name, asked = self._request()
        if not name:
            if not urlsplit(self.path).path.endswith("/o"):
                self._json({"kind": "storage#bucket", "name": BUCKET, "id": BUCKET})
                return
            below = asked.get("prefix", "")
            self._json({"kind": "storage#objects", "items": [
                self._about(n) for n in sorted(self.objects) if n.startswith(below)]})
        elif name not in self.objects:
            self._missing()
        elif asked.get("alt") == "media":
            self._answer(200, self.objects[name], x_goog_generation="1")
        else:
            self._json(self._about(name))

    def do_POST(self) -> None:
        _, asked = self._request()
        body, name = self._body(), asked["name"]
        if asked["uploadType"] == "multipart":
            boundary = self.headers["Content-Type"].partition("boundary=")[2].strip('"')
            about, data = (part.partition(b"\r\n\r\n")[2].removesuffix(b"\r\n")
                           for part in body.split(f"--{boundary}".encode())[1:3])
            self.objects[name], self.metadata[name] = data, json.loads(about).get("metadata", {})
            self._json(self._about(name))
        else:
            self._answer(200, Location=f"http://{self.headers['Host']}/upload/storage/v1/b/{BUCKET}"
                                       f"/o?uploadType=resumable&name={name}&upload_id={name}")

    def do_PUT(self) -> None:
        name = self._request()[1]["upload_id"]
        self.objects[name] = self._body()
        self._json(self._about(name))


@contextlib.contextmanager
def gcs_server() -> Iterator[str]:
    """Run the server; yields the bucket's URL, with ``{}`` for the path."""
    with subprocess.Popen([sys.executable, __file__], text=True, stdout=subprocess.PIPE) as server:
        try:
            assert server.stdout is not None
            address = f"scheme=http&endpoint_override=127.0.0.1%3A{int(server.stdout.readline())}"
            yield f"gs://anonymous@{BUCKET}/{{}}?{address}&retry_limit_seconds=5"
        finally:
            server.kill()


if __name__ == "__main__":
    running = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    print(running.server_port, flush=True)
    running.serve_forever()

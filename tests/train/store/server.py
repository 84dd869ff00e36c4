"""Stand-in of Google Cloud Storage: its JSON API over HTTP, as far as gcsfs and TensorStore use it.

Objects live in memory, appear whole with the last byte of their upload, and have a generation and a
CRC-32C, as the service's do. Requests can be slow, fail with 503, or have their connection reset
before or after they take effect.
"""

import base64
import json
import random
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import google_crc32c


def crc32c(data: bytes) -> str:
    """Return the CRC-32C in the form of the API, as base64 of its big-endian bytes."""
    return base64.b64encode(google_crc32c.Checksum(data).digest()).decode()


@dataclass(frozen=True)
class StoredObject:
    """Object of a bucket."""

    name: str
    data: bytes
    generation: int
    crc32c: str
    updated: str

    def describe(self) -> dict[str, Any]:
        """Return the resource of the JSON API."""
        return {
            "kind": "storage#object",
            "name": self.name,
            "size": str(len(self.data)),
            "generation": str(self.generation),
            "metageneration": "1",
            "crc32c": self.crc32c,
            "updated": self.updated,
            "timeCreated": self.updated,
        }


@dataclass
class Faults:
    """Faults of the store: fractions of requests, and seconds.

    Attributes:
        failed: Fraction of requests that are answered with 503 and change nothing.
        reset: Fraction of requests whose connection is reset; half of them take effect before.
        delay: Seconds that a request waits at most.
        down: Every request is answered with 503.
        refused: Requests whose paths this pattern matches are answered with 403.
    """

    failed: float = 0.0
    reset: float = 0.0
    delay: float = 0.0
    down: bool = False
    refused: str = ""


@dataclass
class Bucket:
    """Objects of a bucket, and what was requested of it.

    Attributes:
        objects: Objects by name.
        faults: What goes wrong.
        requests: Method and path of each request.
        injected: Number of requests that went wrong.
    """

    objects: dict[str, StoredObject] = field(default_factory=dict)
    faults: Faults = field(default_factory=Faults)
    requests: list[str] = field(default_factory=list)
    injected: int = 0
    lock: threading.RLock = field(default_factory=threading.RLock)
    uploads: dict[str, tuple[str, str | None, bytearray]] = field(default_factory=dict)
    chance: random.Random = field(default_factory=lambda: random.Random(0))

    def put(self, name: str, data: bytes, if_generation: str | None = None) -> StoredObject | None:
        """Store an object; return None if it has another generation than the one expected."""
        with self.lock:
            if if_generation is not None and int(if_generation) != self.generation(name):
                return None
            generation = time.time_ns() // 1000
            now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
            stored = StoredObject(name, bytes(data), generation, crc32c(data), now)
            self.objects[name] = stored
            return stored

    def generation(self, name: str) -> int:
        """Return the generation of an object; 0 without one."""
        return self.objects[name].generation if name in self.objects else 0

    def text(self, name: str) -> str:
        """Return the text of an object."""
        return self.objects[name].data.decode()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    bucket: Bucket

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _handle(self) -> None:
        url = urlsplit(self.path)
        body = self._read_body()
        bucket = self.bucket
        bucket.requests.append(f"{self.command} {url.path}")
        faults, chance = bucket.faults, bucket.chance.random()
        if faults.delay:
            time.sleep(faults.delay * bucket.chance.random())
        if faults.refused and re.search(
            faults.refused, f"{self.command} {self.path} {body[:500]!r}"
        ):
            self._answer(403, {"error": {"code": 403, "message": "no access"}})
            return
        if faults.down or chance < faults.failed:
            bucket.injected += 1
            self._answer(503, {"error": {"code": 503, "message": "try again"}})
            return
        reset = chance - faults.failed
        if reset < faults.reset:
            bucket.injected += 1
            if reset < faults.reset / 2:
                self.close_connection = True
                self.connection.close()
                return
            self._lost = True
        self._serve(url.path, {k: v[0] for k, v in parse_qs(url.query, True).items()}, body)

    _lost = False
    do_GET = do_POST = do_PUT = do_DELETE = _handle

    def _read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            parts = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _answer(self, status: int, content: Any = b"", **headers: str) -> None:
        if self._lost:
            self._lost, self.close_connection = False, True
            self.connection.close()
            return
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(data)

    def _serve(self, path: str, words: dict[str, str], body: bytes) -> None:
        if path.startswith("/upload/"):
            self._upload(words, body)
            return
        match = re.fullmatch(r"(?:/download)?/storage/v1/b/[^/]+(?:/o(?:/(.+))?)?", path)
        if match is None:
            self._answer(404)
        elif match[1] is not None:
            self._serve_object(unquote(match[1]), words)
        elif path.endswith("/o"):
            self._answer(200, self._list(words))
        else:
            self._answer(200, {"kind": "storage#bucket", "name": "bucket"})

    def _serve_object(self, name: str, words: dict[str, str]) -> None:
        bucket = self.bucket
        with bucket.lock:
            stored = bucket.objects.get(name)
            if self.command == "DELETE":
                expected = words.get("ifGenerationMatch")
                if expected is not None and int(expected) != bucket.generation(name):
                    self._answer(412)
                    return
                bucket.objects.pop(name, None)
                self._answer(204 if stored else 404)
                return
        if stored is None:
            self._answer(404, {"error": {"code": 404, "message": "No such object"}})
        elif words.get("ifGenerationNotMatch") == str(stored.generation):
            self._answer(304)
        elif words.get("ifGenerationMatch", str(stored.generation)) != str(stored.generation):
            self._answer(412)
        elif words.get("alt") == "media":
            self._send_data(stored)
        else:
            self._answer(200, stored.describe())

    def _send_data(self, stored: StoredObject) -> None:
        headers = {
            "x_goog_generation": str(stored.generation),
            "x_goog_hash": f"crc32c={stored.crc32c}",
            "Content_Type": "application/octet-stream",
        }
        data, size = stored.data, len(stored.data)
        asked = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
        if asked is None:
            self._answer(200, data, **headers)
            return
        if not asked[1]:
            begin, end = max(size - int(asked[2]), 0), size
        else:
            begin, end = int(asked[1]), min(int(asked[2]) + 1, size) if asked[2] else size
        if begin >= size:
            self._answer(416)
            return
        headers["Content_Range"] = f"bytes {begin}-{end - 1}/{size}"
        self._answer(206, data[begin:end], **headers)

    def _list(self, words: dict[str, str]) -> dict[str, Any]:
        prefix, delimiter = words.get("prefix", ""), words.get("delimiter", "")
        start, end = words.get("startOffset", ""), words.get("endOffset", "")
        after, most = words.get("pageToken", ""), int(words.get("maxResults", 1000))
        with self.bucket.lock:
            names = sorted(self.bucket.objects)
        found: dict[str, dict[str, Any] | None] = {}
        for name in names:
            if not name.startswith(prefix) or name < start or (end and name >= end):
                continue
            rest = name[len(prefix) :]
            if delimiter and delimiter in rest:
                found[prefix + rest[: rest.index(delimiter) + 1]] = None
            elif name in self.bucket.objects:
                found[name] = self.bucket.objects[name].describe()
        page = [name for name in found if name > after][:most]
        answer: dict[str, Any] = {
            "kind": "storage#objects",
            "items": [found[name] for name in page if found[name]],
            "prefixes": [name for name in page if not found[name]],
        }
        if page and page[-1] != list(found)[-1]:
            answer["nextPageToken"] = page[-1]
        return answer

    def _upload(self, words: dict[str, str], body: bytes) -> None:
        bucket, kind = self.bucket, words.get("uploadType")
        if "upload_id" in words:
            self._continue_upload(words["upload_id"], body)
            return
        expected = words.get("ifGenerationMatch")
        if kind == "resumable":
            name = words.get("name") or json.loads(body)["name"]
            number = str(len(bucket.uploads))
            bucket.uploads[number] = name, expected, bytearray()
            host, place = self.headers["Host"], urlsplit(self.path).path
            self._answer(200, Location=f"http://{host}{place}?upload_id={number}")
            return
        if kind == "multipart":
            boundary = re.search('boundary="?([^";]+)', self.headers["Content-Type"])
            assert boundary is not None
            _, head, data, _ = body.split(f"--{boundary[1]}".encode(), 3)
            name = json.loads(re.split(rb"\r?\n\r?\n", head, maxsplit=1)[1])["name"]
            body = re.split(rb"\r?\n\r?\n", data, maxsplit=1)[1]
            body = body.removesuffix(b"\n").removesuffix(b"\r")
        else:
            name = words["name"]
        self._store(name, body, expected)

    def _continue_upload(self, number: str, body: bytes) -> None:
        name, expected, data = self.bucket.uploads[number]
        place = re.fullmatch(r"bytes (\d+|\*)(?:-\d+)?/(\d+|\*)", self.headers["Content-Range"])
        assert place is not None
        if place[1] != "*":
            # A chunk that is sent again takes the place of the first one.
            del data[int(place[1]) :]
            data += body
        if place[2] != "*" and len(data) == int(place[2]):
            self._store(name, bytes(data), expected)
        else:
            self._answer(308, **({"Range": f"bytes=0-{len(data) - 1}"} if data else {}))

    def _store(self, name: str, data: bytes, expected: str | None) -> None:
        stored = self.bucket.put(name, data, expected)
        if stored is None:
            self._answer(412, {"error": {"code": 412, "message": "conditionNotMet"}})
        else:
            self._answer(200, stored.describe())


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # Clients that were killed, and connections that were reset on purpose.


@contextmanager
def serve_bucket() -> Iterator[tuple[Bucket, dict[str, str]]]:
    """Serve a bucket on this machine.

    Yields:
        The bucket, and the variables by which clients find it in place of Google's.
    """
    bucket = Bucket()
    server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"bucket": bucket}))
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield (
            bucket,
            {
                "STORAGE_EMULATOR_HOST": url,
                "TENSORSTORE_GCS_HTTP_URL": url,
                # No look at metadata servers, and none by gRPC at the kind of bucket.
                "GCE_METADATA_ROOT": "127.0.0.1:9",
                "GCE_METADATA_HOST": "127.0.0.1:9",
                "NO_GCE_CHECK": "true",
                "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
            },
        )
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

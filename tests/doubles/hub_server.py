"""A model hub on loopback, as far as huggingface_hub asks: repositories, commits, a separate host for large files.

    with HubServer() as hub:
        hub.add("user/tiny", folder)
        hub.url                       # for HF_ENDPOINT
        hub.asked                     # the requests so far

Large files (.safetensors, .bin, .gguf) are redirected to another origin, as the hub redirects to its CDN.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qs, unquote, urlsplit

LARGE = (".safetensors", ".bin", ".gguf")


@dataclass(frozen=True)
class Asked:
    """One request."""

    method: str
    path: str
    range: str
    token: str
    host: str  # "hub" or "cdn"


@dataclass
class Repository:
    files: dict[str, bytes]
    commit: str
    branches: tuple[str, ...]
    token: str = ""
    gated: bool = False


@dataclass
class HubServer:
    repos: dict[str, Repository] = field(default_factory=dict)
    asked: list[Asked] = field(default_factory=list)
    cuts: dict[str, int] = field(default_factory=dict)  # file -> how often its body breaks off half way
    status: int = 0  # answer everything with this
    whole: bool = False  # answer a Range with everything

    def add(self, name: str, folder: Path, *, branches: tuple[str, ...] = ("main",), **more: Any) -> str:
        """Publish a folder; returns its commit."""
        files = {str(f.relative_to(folder)): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file()}
        commit = hashlib.sha1(repr(sorted((n, hashlib.sha256(b).digest()) for n, b in files.items())).encode())
        self.repos[f"{name}@{commit.hexdigest()}"] = Repository(files, commit.hexdigest(), branches, **more)
        return commit.hexdigest()

    def find(self, name: str, revision: str) -> Repository | None | str:
        own = [repo for key, repo in self.repos.items() if key.rpartition("@")[0] == name]
        if not own:
            return "RepoNotFound"
        found = [repo for repo in own if revision == repo.commit or revision in repo.branches]
        return found[-1] if found else "RevisionNotFound"

    def got(self, host: str = "cdn", method: str = "GET") -> list[str]:
        """The paths asked for, without Range requests."""
        return [one.path for one in self.asked if (one.host, one.method) == (host, method) and not one.range]

    def __enter__(self) -> Self:
        self._servers = {host: _Server(("127.0.0.1", 0), _handler(self, host)) for host in ("hub", "cdn")}
        self.url, self.cdn = (f"http://127.0.0.1:{server.server_port}" for server in self._servers.values())
        for server in self._servers.values():
            threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        for server in self._servers.values():
            server.shutdown()
            server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """A client that goes away in the middle is nothing to print."""


def _handler(hub: HubServer, host: str) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None: ...

        def do_GET(self) -> None:
            url = urlsplit(self.path)
            path = unquote(url.path)
            token = self.headers.get("Authorization", "").removeprefix("Bearer ")
            hub.asked.append(Asked(self.command, path, self.headers.get("Range", ""), token, host))
            if hub.status:
                return self.answer(hub.status, b"")
            if host == "cdn":
                return self.send_file(path, next(r.files for r in hub.repos.values() if r.commit in path))
            if found := re.fullmatch(r"/api/models/(.+?)/(revision|tree)/(.+)", path):
                repo = self.repository(found[1], found[3], token)
                if repo is not None:
                    self.json(_info(found[1], repo, url.query) if found[2] == "revision" else _tree(repo))
                return None
            if found := re.fullmatch(r"/(.+?)/resolve/([^/]+|refs/pr/\d+)/(.+)", path):
                repo = self.repository(found[1], found[2], token)
                if repo is None:
                    return None
                if found[3] not in repo.files:
                    return self.refuse(404, "EntryNotFound", repo.commit)
                return self.send_small_or_redirect(found[3], repo)
            return self.answer(404, b"")

        do_HEAD = do_GET

        def repository(self, name: str, revision: str, token: str) -> Repository | None:
            repo = hub.find(name, revision)
            if isinstance(repo, Repository) and repo.token and token != repo.token:
                repo = "GatedRepo" if repo.gated else "RepoNotFound"
            if isinstance(repo, Repository):
                return repo
            return self.refuse(404 if repo == "RevisionNotFound" else 403 if repo == "GatedRepo" else 401, str(repo))

        def send_small_or_redirect(self, file: str, repo: Repository) -> None:
            data = repo.files[file]
            more = {"X-Repo-Commit": repo.commit, "ETag": f'"{_etag(file, data)}"'}
            if not file.endswith(LARGE):
                return self.answer(200, data, more)
            more |= {"X-Linked-Size": str(len(data)), "X-Linked-Etag": more["ETag"]}
            return self.answer(302, b"", {**more, "Location": f"{hub.cdn}/{repo.commit}/{file}"})

        def send_file(self, path: str, files: dict[str, bytes]) -> None:
            file = path.split("/", 2)[2]
            data, asked = files[file], re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
            status, more, size = 200, {"Accept-Ranges": "bytes"}, len(data)
            if asked and not hub.whole:
                start, stop = int(asked[1]), min(int(asked[2] or size - 1) + 1, size)
                status, more = 206, {"Content-Range": f"bytes {start}-{stop - 1}/{size}"}
                data = data[start:stop]
            if hub.cuts.get(file, 0) > 0:
                hub.cuts[file] -= 1
                self.answer(status, data[: len(data) // 2], more, length=len(data))
                self.close_connection = True
                return
            self.answer(status, data, more)

        def json(self, value: Any) -> None:
            self.answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

        def refuse(self, status: int, code: str, commit: str = "") -> None:
            more = {"X-Error-Code": code, "X-Error-Message": code} | ({"X-Repo-Commit": commit} if commit else {})
            self.answer(status, b"", more)

        def answer(self, status: int, data: bytes, more: dict[str, str] | None = None, length: int = -1) -> None:
            self.send_response(status)
            for name, value in (more or {}).items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(data) if length < 0 else length))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

    return Handler


def _etag(file: str, data: bytes) -> str:
    blob = hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()
    return hashlib.sha256(data).hexdigest() if file.endswith(LARGE) else blob


def _info(name: str, repo: Repository, query: str) -> dict[str, Any]:
    blobs = "blobs" in parse_qs(query)
    siblings = [{"rfilename": file, **({"size": len(data)} if blobs else {})} for file, data in repo.files.items()]
    return {"id": name, "modelId": name, "sha": repo.commit, "private": bool(repo.token), "siblings": siblings}


def _tree(repo: Repository) -> list[dict[str, Any]]:
    entries = []
    for file, data in repo.files.items():
        entry: dict[str, Any] = {"type": "file", "path": file, "size": len(data), "oid": _etag("", data)}
        if file.endswith(LARGE):
            entry["lfs"] = {"oid": _etag(file, data), "size": len(data), "pointerSize": 130}
        entries.append(entry)
    return entries

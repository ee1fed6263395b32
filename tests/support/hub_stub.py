"""A Hub on the loopback interface: as much of its protocol as pushing a model and reading it back needs.

Regular files arrive base64-encoded in the commit, weights by LFS. All is kept in memory, with a list of commits.
"""

import base64
import hashlib
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlparse

import yaml


@dataclass
class Commit:
    """One push: its message, the files that it carried, and all files of the repository after it."""

    repo: str
    message: str
    added: list[str]
    files: dict[str, bytes]


@dataclass
class HubStub:
    """`with HubStub() as hub`: serves at `hub.url` until the block ends."""

    commits: list[Commit] = field(default_factory=list)
    blobs: dict[str, bytes] = field(default_factory=dict)
    seen: list[str] = field(default_factory=list)  # every file that was announced, uploaded or not
    bodies: list[bytes] = field(default_factory=list)
    sizes: dict[str, str] = field(default_factory=dict)
    yaml_errors: list[str] = field(default_factory=list)

    def __enter__(self) -> "HubStub":
        hub = self

        class Handler(_Handler):
            stub = hub

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    def files(self, repo: str) -> dict[str, bytes]:
        """All files of a repository now."""
        return next((commit.files for commit in reversed(self.commits) if commit.repo == repo), {})

    def sha(self, repo: str) -> str:
        """A commit hash."""
        return hashlib.sha1(f"{repo} {len(self.commits)}".encode()).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    stub: HubStub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self, body: dict | list | bytes = b"", status: int = 200, **headers: str) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    # ---- writing

    def do_PUT(self) -> None:
        data = self._body()
        oid = self.path.rpartition("/")[2]
        assert hashlib.sha256(data).hexdigest() == oid
        self.stub.blobs[oid] = data
        self._answer(b"", ETag=f'"{oid}"')

    def do_POST(self) -> None:
        path, body = unquote(urlparse(self.path).path), self._body()
        self.stub.bodies.append(body)
        if path == "/api/repos/create":
            name = json.loads(body)["name"]
            self._answer({"url": f"{self.stub.url}/someone/{name}", "name": f"someone/{name}", "id": name})
        elif path == "/api/validate-yaml":
            errors = self._yaml_errors(json.loads(body)["content"])
            self.stub.yaml_errors += errors
            answer = {"errors": [{"message": error} for error in errors], "warnings": []}
            self._answer(answer, status=400 if errors else 200)
        elif "/preupload/" in path:
            self._answer({"files": [self._preupload(file) for file in json.loads(body)["files"]]})
        elif path.endswith("/info/lfs/objects/batch"):
            objects = [self._lfs(item["oid"], item["size"]) for item in json.loads(body)["objects"]]
            self._answer({"transfer": "basic", "objects": objects})
        elif path.startswith("/verify/"):
            self._answer({})
        elif "/commit/" in path:
            self._commit(path.removeprefix("/api/models/").partition("/commit/")[0], body)
        else:
            self._answer({"error": path}, status=404)

    def _preupload(self, file: dict) -> dict:
        self.stub.seen.append(file["path"])
        mode = "lfs" if file["path"].endswith(".safetensors") else "regular"
        return {"path": file["path"], "uploadMode": mode, "shouldIgnore": False, "oid": None}

    def _lfs(self, oid: str, size: int) -> dict:
        actions = {
            "upload": {"href": f"{self.stub.url}/blob/{oid}"},
            "verify": {"href": f"{self.stub.url}/verify/{oid}"},
        }
        return {"oid": oid, "size": size, "actions": actions}

    def _commit(self, repo: str, body: bytes) -> None:
        header, added, files = {}, [], dict(self.stub.files(repo))
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "header":
                header = value
            elif line["key"] == "deletedFile":
                files.pop(value["path"], None)
            else:
                data = base64.b64decode(value["content"]) if line["key"] == "file" else self.stub.blobs[value["oid"]]
                files[value["path"]] = data
                added.append(value["path"])
        self.stub.commits.append(Commit(repo, header["summary"], added, files))
        sha = self.stub.sha(repo)
        self._answer({"commitUrl": f"{self.stub.url}/{repo}/commit/{sha}", "commitOid": sha, "hookOutput": ""})

    def _yaml_errors(self, content: str) -> list[str]:
        """The rules that the Hub is known to apply: ids look like ids, and so on."""
        try:
            data = yaml.safe_load(content.split("---")[1])
        except (yaml.YAMLError, IndexError) as error:
            return [str(error)]
        base = data.get("base_model")
        wrong = [f'"base_model" must be an id, got {base!r}'] if isinstance(base, str) and base.count("/") > 1 else []
        wrong += [f'"datasets" must be ids, got {name!r}' for name in data.get("datasets", ()) if name.count("/") > 1]
        return wrong + [
            f'"tags" must be strings, got {tag!r}' for tag in data.get("tags", ()) if not isinstance(tag, str)
        ]

    # ---- reading

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlparse(self.path).path)
        if "/resolve/" in path:
            repo, _, rest = path.strip("/").partition("/resolve/")
            self._file(repo, rest.partition("/")[2])
        elif path.startswith("/api/models/"):
            repo, _, kind = path.removeprefix("/api/models/").partition("/tree/")
            self._tree(repo) if kind else self._info(repo.partition("/revision/")[0])
        else:
            self._answer({"error": path}, status=404)

    def _file(self, repo: str, name: str) -> None:
        files = self.stub.files(repo)
        if name not in files:
            self._answer(b"", status=404, X_Error_Code="EntryNotFound", X_Error_Message="Entry not found")
            return
        tag = f'"{hashlib.sha256(files[name]).hexdigest()}"'
        self._answer(files[name], ETag=tag, X_Repo_Commit=self.stub.sha(repo), Content_Type="application/octet-stream")

    def _info(self, repo: str) -> None:
        files = self.stub.files(repo)
        if not files:
            self._answer({"error": "no"}, status=404, X_Error_Code="RepoNotFound", X_Error_Message="Repo not found")
            return
        siblings = []
        for name, data in files.items():
            lfs = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
            extra = {"lfs": lfs} if name.endswith(".safetensors") else {}
            siblings.append({"rfilename": name, "size": len(data), "blobId": "0" * 40, **extra})
        self._answer({"id": repo, "sha": self.stub.sha(repo), "siblings": siblings, "tags": [], "private": False})

    def _tree(self, repo: str) -> None:
        files = self.stub.files(repo).items()
        self._answer(
            [{"type": "file", "path": n, "size": len(d), "oid": hashlib.sha1(d).hexdigest()} for n, d in files]
        )

"""A hub repository as a folder that fills itself: configs and tokenizer at once, weight files when they are read.

Everything goes through huggingface_hub, its cache and its settings (HF_TOKEN, HF_HOME, HF_HUB_CACHE, HF_ENDPOINT,
HF_HUB_OFFLINE). A folder in its cache tells by its path which repository and commit it is, so nothing else is kept.
Imports errors, gguf and shard; huggingface_hub only inside the functions that need it.
"""

from __future__ import annotations

import functools
import glob
import logging
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from kwflow.errors import KwflowError, ModelError
from kwflow.models.files.gguf import cache_folder
from kwflow.models.files.shard import ByteRange

SMALL = ["*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt"]  # what is no weights and no code
ROOM = 64 << 20  # bytes that a download leaves free
REQUESTS = 8  # at once, where many small parts of a file are read
PART_SECONDS = 10.0  # silence that one part of a file may have

log = logging.getLogger(__name__)


class Repo(NamedTuple):
    """A repository and one of its branches, tags or commits."""

    id: str
    revision: str = "main"


class Snapshot(NamedTuple):
    """One commit of a repository in huggingface_hub's cache."""

    cache: Path
    repo: str
    commit: str


def parse(name: str) -> Repo | None:
    """Read a hub id with an optional revision; None for what is none.

    >>> parse("HuggingFaceTB/SmolLM2-135M@refs/pr/1")
    Repo(id='HuggingFaceTB/SmolLM2-135M', revision='refs/pr/1')
    """
    part = r"[A-Za-z0-9][\w.-]*"
    match = re.fullmatch(rf"({part}(?:/{part})?)(?:@({part}(?:/{part})*))?", name)
    return Repo(match[1], match[2] or "main") if match and ".." not in name else None


def snapshot_of(folder: Path) -> Snapshot | None:
    """Which commit a folder of huggingface_hub's cache holds; None for any other folder."""
    folders = folder.absolute().parts
    if len(folders) < 4 or folders[-2] != "snapshots" or not re.fullmatch(r"[0-9a-f]{40}", folders[-1]):
        return None
    kind, *parts = folders[-3].split("--")
    return Snapshot(Path(*folders[:-3]), "/".join(parts), folders[-1]) if kind == "models" and parts else None


def snapshot(repo: Repo) -> Path:
    """A repository's folder with its configs, tokenizer and index; the cache is used as it is where it has these.

    Without a request when they were fetched before; so a branch that moved is not noticed. Raises ModelError.
    """
    from huggingface_hub import snapshot_download

    def fetch(only_here: bool) -> Path:
        wanted: dict[str, Any] = {"allow_patterns": SMALL, "ignore_patterns": ["*/*"]}  # folders hold other formats
        return Path(snapshot_download(repo.id, revision=repo.revision, local_files_only=only_here, **wanted))

    try:
        folder = fetch(only_here=True)
        if (folder / "config.json").is_file():
            return folder
    except OSError:  # huggingface_hub's LocalEntryNotFoundError too: not here, or not all of it
        pass
    with _explained(repo):
        folder = fetch(only_here=False)
    return folder


def list_files(snap: Snapshot) -> dict[str, int]:
    """The files in the repository's root and their sizes in bytes, as the hub has them: one request, once."""
    with _explained(Repo(snap.repo, snap.commit)):
        return _listed(snap)


@functools.lru_cache
def _listed(snap: Snapshot) -> dict[str, int]:
    from huggingface_hub import HfApi

    info = HfApi().model_info(snap.repo, revision=snap.commit, files_metadata=True)
    return {file.rfilename: file.size or 0 for file in info.siblings or () if "/" not in file.rfilename}


def fetch(folder: Path, files: Iterable[str]) -> None:
    """Download those of ``files`` that a snapshot's folder lacks; says how large they are, and refuses without room."""
    missing = sorted({file for file in files if not (folder / file).is_file()})
    snap = snapshot_of(folder)
    if not missing:
        return
    if snap is None:
        raise ModelError(f"{folder} lacks {', '.join(missing)}")
    from huggingface_hub import snapshot_download

    sizes = list_files(snap)
    if absent := [file for file in missing if file not in sizes]:
        raise ModelError(f"{snap.repo}@{snap.commit[:12]} names files that it does not have: {', '.join(absent)}")
    total, free = sum(sizes[file] for file in missing), shutil.disk_usage(folder).free
    what = f"{len(missing)} file{'s' if len(missing) > 1 else ''} of {snap.repo}, {_bytes(total)}"
    if total + ROOM > free:
        raise ModelError(
            f"{what}, do not fit into {snap.cache}, which has {_bytes(free)} free; "
            f"free some (`hf cache prune`), or set HF_HOME to a folder on another disk"
        )
    print(f"kwflow: downloading {what}, to {snap.cache}", file=sys.stderr, flush=True)
    with _explained(Repo(snap.repo, snap.commit)):
        patterns = [glob.escape(file) for file in missing]
        snapshot_download(snap.repo, revision=snap.commit, cache_dir=snap.cache, allow_patterns=patterns)
    if torn := [file for file in missing if not (folder / file).is_file()]:
        raise ModelError(f"{snap.repo}: {', '.join(torn)} did not arrive in {folder}")


def read_parts(folder: Path, file: str, ranges: Sequence[ByteRange]) -> list[bytes]:
    """Read bytes ``[start, stop)`` of a file on the hub, several, without downloading the file."""
    snap = snapshot_of(folder)
    if snap is None:
        raise ModelError(f"cannot read {folder / file}: no such file")
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_stream_backoff

    url, headers = hf_hub_url(snap.repo, file, revision=snap.commit), build_hf_headers()

    def part(byte_range: ByteRange) -> bytes:
        start, stop = byte_range
        if start == stop:
            return b""
        part_headers = {**headers, "Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}
        with http_stream_backoff("GET", url, headers=part_headers, timeout=PART_SECONDS, max_retries=3) as response:
            hf_raise_for_status(response)
            if response.status_code != 206:
                raise ModelError(f"{snap.repo}: the hub does not send parts of {file} (status {response.status_code})")
            read = response.read()
        if len(read) != stop - start:
            raise ModelError(f"{snap.repo}: bytes {start}:{stop} of {file} were asked, {len(read)} came")
        return read

    with _explained(Repo(snap.repo, snap.commit)), ThreadPoolExecutor(REQUESTS) as pool:
        return list(pool.map(part, ranges))


def remembered_id(folder: Path) -> str | None:
    """The checkpoint id of a snapshot whose files are not all here, as it was once made; None when it was not."""
    try:
        checkpoint = _id_file(folder).read_text().strip()
    except OSError:
        return None
    return checkpoint if re.fullmatch(r"[0-9a-f]{64}", checkpoint) else None


def remember_id(folder: Path, checkpoint: str) -> None:
    """Keep a checkpoint id in kwflow's cache: a commit does not change."""
    file = _id_file(folder)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        new = file.with_name(f"{file.name}.{os.getpid()}")
        new.write_text(checkpoint)
        new.replace(file)
    except OSError as error:  # it costs requests to make it again, and nothing else
        log.info("could not keep the checkpoint id of %s: %s", folder, error)


def _id_file(folder: Path) -> Path:
    snap = snapshot_of(folder)
    if snap is None:
        raise ModelError(f"{folder} is not in the hub's cache")
    return cache_folder() / "checkpoints" / f"{snap.repo.replace('/', '--')}-{snap.commit}"


def _bytes(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"


# ---------------------------------------------------------------- what went wrong


@contextmanager
def _explained(repo: Repo) -> Iterator[None]:
    """Turn what huggingface_hub, its HTTP client and the system raise into one ModelError that says what to do."""
    try:
        yield
    except KwflowError:
        raise
    except Exception as error:
        from huggingface_hub import get_token

        name = repo.id if repo.revision == "main" else f"{repo.id}@{repo.revision}"
        message, token = f"cannot get {name}: {_reason(error, repo)}", get_token()
        if token and any(token in str(cause) for cause in _chain(error)):  # a header that cannot be sent is quoted
            raise ModelError(message.replace(token, "***")) from None
        raise ModelError(message) from error


def _reason(error: Exception, repo: Repo) -> str:
    from huggingface_hub import constants, errors, get_token

    causes = list(_chain(error))

    def is_a(*kinds: type[BaseException]) -> bool:
        return any(isinstance(cause, kinds) for cause in causes)

    status = next((c.response.status_code for c in causes if isinstance(c, errors.HfHubHTTPError)), None)
    cache = constants.HF_HUB_CACHE
    if is_a(errors.OfflineModeIsEnabled):
        return f"HF_HUB_OFFLINE is set, and {cache} does not have all of it; unset it once to download the rest"
    if is_a(errors.GatedRepoError):
        return f"its authors give access on request, at its page on the hub; then set HF_TOKEN ({_sent(get_token())})"
    if is_a(errors.RepositoryNotFoundError) or status in (401, 403):
        return (
            f"there is no folder {repo.id!r} here, and no such repository on the hub, or it is private: "
            f"set HF_TOKEN, or `hf auth login` ({_sent(get_token())})"
        )
    if is_a(errors.RevisionNotFoundError):
        return f"it has no revision {repo.revision!r}"
    if status is not None:
        return f"the hub answered with status {status}"
    why = (str(error).splitlines() or [""])[0]
    if is_a(errors.LocalEntryNotFoundError):  # huggingface_hub's word for a hub that does not answer
        why = f"the hub ({_plain(constants.ENDPOINT)}) does not answer, and {cache} does not have all of it; "
        why += "without a network, give the path of a folder, or of a .gguf file"
    return f"{why} ({type(causes[-1]).__name__})"


def _sent(token: str | None) -> str:
    return "a token was sent" if token else "no token was sent"


def _plain(url: str) -> str:
    return re.sub(r"//[^/@]*@", "//", url)


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__

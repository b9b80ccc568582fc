"""What a worker and a client of SmolLM2 read from disk and hold in memory, counted by the system.

Each case runs in a fork of one process that has imported everything, on a copy of the model that nobody else maps and
whose pages were dropped from the system's cache. Pages of the file that are in that cache afterwards were read from
disk: mapped reads are in no process's I/O counters. RssFile counts mapped pages of files, RssAnon all other memory.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc and asks mincore"),
]

MEASURE = '''
import ctypes, gc, json, mmap, os, sys
import torch
torch.set_num_threads(1)
from transformers import AutoConfig, LlamaForCausalLM
from kwflow.models.files.checkpoint import Checkpoint
from kwflow.models.ends import ModelEnds
from kwflow.models.spans import load_span

folder = sys.argv[1]
file = os.path.join(folder, "model.safetensors")
load_span(folder, 0, 1), ModelEnds(folder)  # whatever is imported or made once
gc.collect()

def memory():
    said = dict(line.split(":") for line in open("/proc/self/status") if line.startswith(("Rss", "VmRSS")))
    return {name: int(value.split()[0]) * 1024 for name, value in said.items()}

def cached():
    """Bytes of the file that the system has in memory."""
    with open(file, "r+b") as data:
        pages = mmap.mmap(data.fileno(), 0)
    count = -(-len(pages) // mmap.PAGESIZE)
    state = (ctypes.c_ubyte * count)()
    at = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(at), ctypes.c_size_t(len(pages)), state) == 0
    return sum(page & 1 for page in state) * mmap.PAGESIZE

def drop():
    handle = os.open(file, os.O_RDONLY)
    os.fsync(handle)
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(handle)

for line in sys.stdin:
    drop()
    if os.fork():
        os.wait()
        continue
    left, before = cached(), memory()
    made = eval(line)
    gc.collect()
    after = memory()
    grown = {name: after[name] - before[name] for name in after}
    mappings = sum(file in line for line in open("/proc/self/maps"))
    print(json.dumps({**grown, "left": left, "read": cached() - left, "mappings": mappings, **made[1]}), flush=True)
    os._exit(0)
'''
MB = 1_000_000
SLACK = 30 * MB  # modules, code that runs for the first time, allocator


@pytest.fixture(scope="module")
def measure(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("copy") / "smollm2"
    shutil.copytree(smollm2, folder)
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", MEASURE, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as child:
        assert child.stdin and child.stdout

        def run(expression: str) -> dict[str, Any]:
            assert child.stdin and child.stdout
            print(expression, file=child.stdin, flush=True)
            return json.loads(child.stdout.readline())

        yield run
        child.stdin.close()
    shutil.rmtree(folder)


def span(start: int, stop: int, dtype: str = "auto") -> str:
    sizes = '{"own": sum(t.nbytes for p in s.params for t in p.values()), "counted": s.identity["bytes_read"]}'
    return f"(lambda s: (s, {sizes}))(load_span(folder, {start}, {stop}, dtype={dtype!r}))"


CLIENT = """(lambda e, c: (e, {"id": c.checkpoint_id(), "counted": c.bytes_read,
"own": sum(p.nbytes for p in e.shell.parameters())}))(ModelEnds(folder), Checkpoint(folder))""".replace("\n", " ")


def test_a_worker_of_two_blocks_reads_its_tensors_and_five_percent(measure: Callable[[str], dict[str, Any]]) -> None:
    for start in (0, 14, 28):
        said = measure(span(start, start + 2))
        assert said["left"] == 0, "the file could not be dropped from the cache"
        assert said["own"] == 2 * 14_160_384
        assert said["own"] < said["counted"] <= 1.05 * said["own"]
        # 4 KiB of a tensor lie on two pages; the system may take pages back meanwhile
        assert 0.8 * said["own"] < said["read"] <= 1.07 * said["own"], said


def test_a_worker_holds_its_blocks_mapped_from_the_file(measure: Callable[[str], dict[str, Any]]) -> None:
    for blocks in (2, 30):
        said = measure(span(0, blocks))
        assert said["mappings"] == 1
        assert 0.99 * said["own"] < said["RssFile"] < said["own"] + SLACK, said
        assert said["RssAnon"] < SLACK, said


def test_a_cast_is_a_copy_and_lets_go_of_the_file(measure: Callable[[str], dict[str, Any]]) -> None:
    for blocks in (2, 30):
        said = measure(span(0, blocks, "bfloat16"))
        assert said["own"] == blocks * 14_160_384 // 2
        assert said["mappings"] == 0
        assert 0.99 * said["own"] < said["RssAnon"] < said["own"] + SLACK, said
        assert said["RssFile"] < SLACK, said


def test_a_client_holds_no_block_and_reads_none(measure: Callable[[str], dict[str, Any]]) -> None:
    said = measure(CLIENT)
    assert said["left"] == 0
    assert said["own"] == 4 * (49152 * 576 + 576)  # embeddings, tied to the head, and the final norm
    assert said["counted"] < 0.05 * said["own"]  # the checkpoint id
    assert 0.8 * said["own"] < said["read"] < 1.05 * said["own"]  # the system may take pages back meanwhile
    assert said["VmRSS"] < SLACK, "embeddings are mapped: they take memory where a token needs them"

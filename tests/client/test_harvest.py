"""Data sets of activations against the Hugging Face model's own: values, resumption, refusals, reading back."""

# B batch, S seq, D hidden, N tokens

from __future__ import annotations

import os
import pickle
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import kwflow as kf
from kwflow.client.flow import Flow
from kwflow.errors import KwargError, ModelError, SpanError
from kwflow.kwargs.points import PATTERN
from kwflow.worker.server import Served
from tests.doubles.mortal import Swarm
from tests.doubles.workers import Workers
from tests.families.marks import every_family
from tests.oracle import assert_bits, assert_near, layers_of
from tests.oracle.tiny import HEADS, HIDDEN, TWO, WORDS, Requests, flow, huggingface, make_flow, span

D = HIDDEN
TEXTS = ["w3 w4 w5", "w6 w7", "w8 w9 w10 w11 w12", "w13", "w14 w15 w16 w17", "w18 w19", "w3 w5 w7", "w4 w6"]
IDS = [[WORDS.index(word) for word in text.split()] for text in TEXTS]
POINTS = {"resid": [1, 3], "head": [2]}
TOKEN = 3 * D * 4 + 3 * 8  # bytes of a token in a shard
SHARD = {"batch_size": 2, "shard_mb": 9 * TOKEN / 1e6}


def harvest(folder: Path, texts: Any = TEXTS, points: Any = POINTS, family: str = "llama", **more: Any) -> Any:
    return (more.pop("flow", None) or flow(family, TWO)).harvest(texts, points, folder, **more)


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def alone(family: str, ids: list[int]) -> dict[Any, Tensor]:
    """By plain hooks on the Hugging Face model, which runs one text alone."""
    model: Any = huggingface(family)
    found: dict[Any, Tensor] = {}
    hooks = [
        layer.register_forward_hook(
            lambda _, __, out, n=n: found.update({n: out[0] if isinstance(out, tuple) else out})
        )
        for n, layer in enumerate(layers_of(model))
    ]
    model(torch.tensor([ids]))
    for hook in hooks:
        hook.remove()
    return {("resid", n): value[0] for n, value in found.items()}


@every_family
def test_it_keeps_what_the_model_has_at_every_token_and_no_pads(family: str, tmp_path: Path) -> None:
    acts = harvest(tmp_path / "a", family=family, **SHARD)
    assert acts.complete and acts.rows == len(TEXTS) and len(acts) == sum(map(len, IDS)) == len(acts["token"])
    assert acts["token"].tolist() == sum(IDS, [])
    assert acts["row"].tolist() == [row for row, ids in enumerate(IDS) for _ in ids]
    assert acts["position"].tolist() == [position for ids in IDS for position in range(len(ids))]
    expected = [alone(family, ids) for ids in IDS]
    for layer in POINTS["resid"]:
        assert_near(acts["resid", layer], torch.cat([one["resid", layer] for one in expected]), f"layer {layer}")
    assert acts["head", 2].shape == (len(acts), HEADS, D // HEADS)


def test_what_is_kept_is_bitwise_what_a_call_captures(tmp_path: Path) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        here = make_flow("llama", TWO, dtype)
        acts = harvest(tmp_path / str(dtype), TEXTS[:3], {**POINTS, "mlp.down_proj.in": [0]}, flow=here)
        _, captured = here.capture({**POINTS, "mlp.down_proj.in": [0]}, **here.inputs(TEXTS[:3]))  # type: ignore[arg-type]
        for key in acts.points:
            assert acts[key].dtype is dtype
            assert_bits(acts[key], captured[key][captured.mask], f"{key} {dtype}")


def test_positions_are_chosen_as_in_a_call(tmp_path: Path) -> None:
    last = harvest(tmp_path / "last", at="prompt[-1]", batch_size=8)
    assert last["position"].tolist() == [len(ids) - 1 for ids in IDS] and last.rows == len(last) == len(IDS)
    assert last["token"].tolist() == [ids[-1] for ids in IDS]
    some = harvest(tmp_path / "some", TEXTS[4:5], at=[3, 1], batch_size=8)
    assert some["position"].tolist() == [1, 3] and some["token"].tolist() == [IDS[4][1], IDS[4][3]]
    every = harvest(tmp_path / "every", batch_size=8)
    assert_bits(last["resid", 3], every["resid", 3][torch.tensor([len(ids) for ids in IDS]).cumsum(0) - 1])


def test_texts_may_be_token_ids_and_are_cut(tmp_path: Path) -> None:
    whole = harvest(tmp_path / "texts", max_tokens=2, **SHARD)
    assert whole["token"].tolist() == [token for ids in IDS for token in ids[:2]]
    for name, texts in {
        "lists": IDS,
        "tensors": (torch.tensor(ids) for ids in IDS),
        "mixed": [*TEXTS[:3], *IDS[3:]],
    }.items():
        harvest(tmp_path / name, texts, max_tokens=2, **SHARD)
        assert files(tmp_path / name) == files(tmp_path / "texts")
    assert harvest(tmp_path / "one", "w3 w4").rows == 1
    assert harvest(tmp_path / "rectangle", torch.tensor([IDS[1], IDS[5]]))["row"].tolist() == [0, 0, 1, 1]


# ---- it goes on --------------------------------------------------------------------------------------------------


def interrupted(at: int) -> Iterator[str]:
    yield from TEXTS[:at]
    raise KeyboardInterrupt


@pytest.mark.parametrize("at", [0, 4, 7])
def test_an_interrupted_run_goes_on_with_the_same_files(at: int, tmp_path: Path) -> None:
    harvest(tmp_path / "whole", **SHARD)
    with pytest.raises(KeyboardInterrupt):
        harvest(tmp_path / "parts", interrupted(at), **SHARD)
    begun = kf.activations.Activations(tmp_path / "parts")
    assert not begun.complete and len(begun) < sum(map(len, IDS)) and "not complete" in repr(begun)
    expected = files(tmp_path / "whole")
    # what a crash leaves: half a file, and a whole one that the index does not have yet
    next_shard = f"shard-{len(list(begun.shards())):06d}.safetensors"
    (tmp_path / "parts" / next_shard).write_bytes(b"other")
    (tmp_path / "parts" / f"{next_shard}.tmp").write_bytes(b"half")
    with Requests(flow("llama", TWO)) as asked:
        harvest(tmp_path / "parts", iter(TEXTS), **SHARD)
    assert files(tmp_path / "parts") == expected and len(asked) > 0
    with Requests(flow("llama", TWO)) as asked:
        harvest(tmp_path / "parts", TEXTS, **SHARD)
    assert len(asked) == 0 and files(tmp_path / "parts") == expected


def killed_after(texts: int) -> Iterator[str]:
    yield from TEXTS[:texts]
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_a_killed_process_loses_no_text_and_repeats_none(tmp_path: Path) -> None:
    run = f"harvest(Path({str(tmp_path / 'killed')!r}), killed_after(5), **SHARD)"
    code = f"from tests.client.test_harvest import *; {run}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    begun = kf.activations.read(tmp_path / "killed")
    assert not begun.complete and 0 < len(begun) < sum(map(len, IDS))
    harvest(tmp_path / "killed", **SHARD)
    harvest(tmp_path / "whole", **SHARD)
    # its model is another folder's, of the same weights
    assert files(tmp_path / "killed") == files(tmp_path / "whole")


def test_weights_without_a_name_go_by_the_models(tmp_path: Path) -> None:
    harvest(tmp_path / "a", **SHARD)
    index = tmp_path / "a" / "activations.json"
    index.write_text(re.sub(r'"model": "[^"]*"', '"model": "other"', index.read_text()))
    assert harvest(tmp_path / "a", **SHARD).complete  # these weights have one
    specs = [span("llama", *layers) for layers in ((0, 2), (2, 4))]
    served = [Served(replace(spec, identity={**spec.identity, "checkpoint": ""}), model="llama") for spec in specs]
    nameless = Flow(flow("llama", TWO).ends, Workers(served).peers(), (0, 4))
    harvest(tmp_path / "b", flow=nameless, **SHARD)
    index = tmp_path / "b" / "activations.json"
    index.write_text(re.sub(r'"model": "[^"]*"', '"model": "other"', index.read_text()))
    with pytest.raises(KwargError, match="model: 'other' there, 'llama-float32' here"):
        harvest(tmp_path / "b", flow=nameless, **SHARD)


def test_only_what_is_missing_is_asked(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        harvest(tmp_path / "a", interrupted(6), batch_size=1, shard_mb=TOKEN / 1e6)
    with Requests(flow("llama", TWO)) as asked:
        harvest(tmp_path / "a", TEXTS, batch_size=1, shard_mb=TOKEN / 1e6)
    assert len(asked) == 2 * 2  # two texts, two workers


def test_more_texts_extend_it(tmp_path: Path) -> None:
    harvest(tmp_path / "a", TEXTS[:3])
    acts = harvest(tmp_path / "a", TEXTS)
    assert acts["token"].tolist() == sum(IDS, []) and len(list(acts.shards())) == 2


def test_it_survives_a_worker(tmp_path: Path) -> None:
    swarm = Swarm("llama", (0, 2), (2, 4), (0, 2), (2, 4))

    def texts() -> Iterator[str]:
        yield from TEXTS[:4]
        first = next(iter(swarm.flow.plan(torch.zeros(1, 1, D), {}).route)).peer
        swarm.kill(first)
        yield from TEXTS[4:]

    harvest(tmp_path / "killed", texts(), flow=swarm.flow, **SHARD)
    harvest(tmp_path / "whole", **SHARD)
    assert files(tmp_path / "killed") == files(tmp_path / "whole")


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"points": {"resid": [1]}}, r"points: \{'resid': \[1, 3\], 'head': \[2\]\} there, \{'resid': \[1\]\} here"),
        ({"at": "prompt[-1]"}, r"at: 'all' there, 'prompt\[-1\]' here"),
        ({"max_tokens": 4}, "max_tokens: None there, 4 here"),
        ({"family": "gpt2"}, "model: 'llama-float32' there, 'gpt2-float32' here.*checkpoint"),
        ({"flow": "float64"}, r"workers: \['float32'\] there, \['float64'\] here"),
        ({"texts": [*TEXTS[:4], "w9", *TEXTS[5:]]}, "text 4 has other tokens"),
        ({"texts": TEXTS[:5]}, "has 8 texts already, and 5 were given"),
    ],
)
def test_it_does_not_go_on_with_something_else(other: dict[str, Any], says: str, tmp_path: Path) -> None:
    harvest(tmp_path / "a", **SHARD)
    before = files(tmp_path / "a")
    if other.get("flow"):
        other = {"flow": flow("llama", TWO).options(dtype=other["flow"])}
    with Requests(flow("llama", TWO)) as asked, pytest.raises(KwargError, match=says):
        harvest(tmp_path / "a", **{**SHARD, **other})
    assert files(tmp_path / "a") == before and len(asked) == 0


# ---- what cannot be ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "error", "says"),
    [
        ({"points": {"resid": [9]}}, SpanError, "names layer 9"),
        ({"points": {"resid": [-1]}}, SpanError, "names layer -1"),
        ({"points": {"rezid": [1]}}, KwargError, "Did you mean 'resid'"),
        ({"points": {PATTERN: [1]}}, KwargError, "as wide as its text"),
        ({"points": {}}, KwargError, "say what"),
        ({"at": torch.tensor([1])}, KwargError, "same for every text"),
        ({"at": "prompt[7]"}, KwargError, r"texts 0:2: .*row 0 has 3 tokens"),
        ({"texts": ["w3", ""]}, KwargError, "text 1: '' is not one token"),
        ({"texts": [[3, 4], 5]}, KwargError, "text 1 is 5"),
        ({"texts": [[0.5]]}, KwargError, "as ints"),
        ({"texts": {"input_ids": IDS}}, KwargError, "without pads"),
        ({"texts": 3}, KwargError, "texts is a int"),
        ({"batch_size": 0}, KwargError, "batch_size=0"),
        ({"max_tokens": 0}, KwargError, "max_tokens=0"),
        ({"shard_mb": 0}, KwargError, "shard_mb is 0"),
        ({"flow": "slice"}, SpanError, "runs texts from layer 0"),
    ],
)
def test_refusals(wrong: dict[str, Any], error: type[Exception], says: str, tmp_path: Path) -> None:
    here = flow("llama", TWO)
    given = {**SHARD, **wrong, "flow": here[1:] if wrong.get("flow") else here}
    with Requests(here) as asked, pytest.raises(error, match=says):
        harvest(tmp_path / "a", **given)
    assert len(asked) == 0


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(KwargError, match="not empty"):
        harvest(tmp_path)
    with pytest.raises(ModelError, match="cannot read"):
        kf.activations.Activations(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


# ---- read back ---------------------------------------------------------------------------------------------------


def test_it_reads_as_a_torch_dataset(tmp_path: Path) -> None:
    acts = harvest(tmp_path / "a", **SHARD)
    assert len(list(acts.shards())) == 4
    every = {key: acts[key] for key in ("row", "position", "token", *acts.points)}
    for dataset in (acts, pickle.loads(pickle.dumps(acts))):  # noqa: S301
        for number in (4, 0, 21, -1, 13):
            sample = dataset[number]
            assert sample.keys() == every.keys()
            for key, value in sample.items():
                assert_bits(value, every[key][number], f"{key} of {number}")
    shards = list(acts.shards())
    for key, value in every.items():
        assert_bits(torch.cat([shard[key] for shard in shards]), value)
    batches = list(DataLoader(acts, batch_size=5, shuffle=True))
    assert sorted(torch.cat([batch["token"] for batch in batches]).tolist()) == sorted(every["token"].tolist())
    for batch in batches:
        at = [(every["row"] * 9 + every["position"]).tolist().index(int(r * 9 + p)) for r, p in
              zip(batch["row"], batch["position"], strict=True)]  # fmt: skip
        assert_bits(batch["resid", 3], every["resid", 3][at])
    assert_bits(kf.activations.read(tmp_path / "a")["resid", 3], every["resid", 3])
    with pytest.raises(IndexError, match="token 22 of 22"):
        acts[22]
    with pytest.raises(KeyError, match="acts\\[point, layer\\]"):
        acts["resid", 0]


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=[pytest.mark.slow, pytest.mark.rest])])
def test_a_loader_with_workers_reads_every_token_once(start: str, tmp_path: Path) -> None:
    acts = harvest(tmp_path / "a", **SHARD)
    acts[0]  # a shard is open
    batches = list(DataLoader(acts, batch_size=5, num_workers=2, multiprocessing_context=start))
    for key in ("row", "position", "token", *acts.points):
        assert_bits(torch.cat([batch[key] for batch in batches]), acts[key])


def test_more_shards_than_are_mapped_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kwflow.client.activations.MAPPED", 2)
    acts = harvest(tmp_path / "a", **SHARD)
    for number in (*range(len(acts)), *reversed(range(len(acts)))):
        assert acts[number]["token"] == acts["token"][number]


def test_a_damaged_folder_says_what_is_wrong(tmp_path: Path) -> None:
    harvest(tmp_path / "a", **SHARD)
    shard = tmp_path / "a" / "shard-000001.safetensors"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1])
    with pytest.raises(ModelError, match="shard-000001.safetensors is .* bytes long, and the index says"):
        kf.activations.Activations(tmp_path / "a")
    shard.unlink()
    with pytest.raises(ModelError, match="is missing"):
        harvest(tmp_path / "a", **SHARD)
    for text in ("{", "[]", '{"format": "other", "version": 1}', '{"format": "kwflow.activations", "version": 2}'):
        (tmp_path / "a" / "activations.json").write_text(text)
        with pytest.raises(ModelError, match="activations.json is"):
            kf.activations.Activations(tmp_path / "a")

"""Control vectors: arithmetic, from texts, in files, in flows and on a plain Hugging Face model."""

# B batch, S seq, D hidden, L layers

from __future__ import annotations

import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import grad, vmap

import kwflow as kf
from kwflow.errors import KwargError, KwflowError, ModelError, ShapeError, SpanError, UnsupportedError
from kwflow.research.steering import Vectors, contrast
from tests.families.configs import HIDDEN, LAYERS
from tests.families.marks import families
from tests.oracle import assert_bits, assert_close, assert_near, cache_name, layers_of
from tests.oracle.tiny import (
    TWO,
    Requests,
    flow,
    folder,
    huggingface,
    ids,
    left_padded,
    make_flow,
    positions_of,
    random,
)

D, L = HIDDEN, LAYERS
A, B = random(D, seed=1), random(D, seed=2)
POSITIVE = ["w3 w4 w5", "w6 w7", "w8 w9 w10 w11 w12"]
NEGATIVE = ["w13 w14", "w15 w16 w17 w18", "w19"]


# ---- arithmetic --------------------------------------------------------------------------------------------------


def test_vectors_are_read_by_layer() -> None:
    v = Vectors({3: B, 1: A})
    assert v.layers == (1, 3) == tuple(v) and len(v) == 2 and 3 in v and 2 not in v
    assert v[1] is A and dict(v.items()) == {1: A, 3: B}
    assert v[2:].layers == (3,) == v.at_layers(3).layers and v[:3].layers == (1,) and v[:].layers == (1, 3)
    assert repr(v) == f"Vectors(layers [1, 3] at resid, float32({D},))"
    with pytest.raises(AttributeError):
        v.point = "attn"  # type: ignore[misc]
    with pytest.raises(TypeError):
        v.by_layer[1] = B  # type: ignore[index]


def test_arithmetic_is_layer_by_layer() -> None:
    v, w = Vectors({1: A, 2: B}), Vectors({2: A, 3: B})
    for made, expected in {
        v * 2: {1: 2 * A, 2: 2 * B},
        torch.tensor(2.0) * v: {1: 2 * A, 2: 2 * B},
        np.float32(2) * v: {1: 2 * A, 2: 2 * B},
        v * np.float32(2): {1: 2 * A, 2: 2 * B},
        -v: {1: -A, 2: -B},
        v / 3: {1: A / 3, 2: B / 3},
        v + w: {1: A, 2: A + B, 3: B},
        v - w: {1: A, 2: B - A, 3: -B},
        v.to(torch.float64): {1: A.double(), 2: B.double()},
    }.items():
        assert made.layers == tuple(expected)
        for layer, tensor in expected.items():
            assert_bits(made[layer], tensor)
    for _, unit in (v * 7).normalized().items():
        assert_close(unit.norm(), torch.tensor(1.0))
    rest = v.project_out(Vectors({1: B, 2: A, 3: A}))
    assert_close(rest[1], A - (A @ B) / (B @ B) * B)
    assert_close(rest[2], B - (A @ B) / (A @ A) * A)
    (cosine,) = v.cosine(w).items()
    assert cosine[0] == 2
    assert_close(cosine[1], torch.cosine_similarity(A, B, 0))
    said = {"model": "m", "model_type": "llama", "method": "mean"}
    one, other = Vectors({1: A}, **said), Vectors({1: A}, model="n", model_type="llama")
    assert (one * 2).method == "mean" and ((one + other).model, (one + other).model_type) == ("", "llama")


def test_operations_are_differentiable() -> None:
    a, b = A.double().requires_grad_(), B.double().requires_grad_()

    def everything(a: Tensor, b: Tensor) -> Tensor:
        v, w = Vectors({1: a, 2: b}), Vectors({1: b, 2: a})
        out = (3 * v - w / 2).normalized().project_out(w) + v
        return torch.cat([*(t for _, t in out.items()), *(c[None] for c in v.cosine(w).values())])

    assert torch.autograd.gradcheck(everything, (a, b))


BAD: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "nothing": (lambda: Vectors({}), KwargError, "at least one layer"),
    "a list": (lambda: Vectors([A]), KwargError, "at least one layer"),  # type: ignore[arg-type]
    "a bool layer": (lambda: Vectors({True: A}), KwargError, "layers=\\[True\\]"),
    "kf.add to True": (lambda: kf.add(A, True), KwargError, "layers=True"),
    "a negative layer": (lambda: Vectors({-1: A}), SpanError, "from 0"),
    "no point": (lambda: Vectors({1: A}, "residual"), KwargError, "Did you mean 'resid'"),
    "embed of layer 3": (lambda: Vectors({3: A}, "embed"), SpanError, "embed"),
    "a float": (lambda: Vectors({1: 2.0}), KwargError, "layer 1 has a float"),  # type: ignore[dict-item]
    "ints": (lambda: Vectors({1: torch.ones(D, dtype=torch.long)}), KwargError, "int64"),
    "a matrix": (lambda: Vectors({1: random(2, D)}), ShapeError, r"layer 1 has float32\(2, 32\)"),
    "two sizes": (lambda: Vectors({1: A, 2: A[1:]}), ShapeError, "all of one shape"),
    "a missing layer": (lambda: Vectors({1: A})[4], SpanError, "no vector for layer 4"),
    "a slice of nothing": (lambda: Vectors({1: A})[2:4], SpanError, "no vector for layer 2"),
    "a negative slice": (lambda: Vectors({1: A})[-2:], SpanError, "layer numbers"),
    "times a bool": (lambda: Vectors({1: A}) * True, TypeError, "unsupported operand"),
    "times vectors": (lambda: Vectors({1: A}) * Vectors({1: A}), TypeError, "unsupported operand"),
    "by zero": (lambda: Vectors({1: A}) / 0, KwargError, "division by zero"),
    "plus a number": (lambda: Vectors({1: A}) + 1, TypeError, "unsupported operand"),
    "plus another point": (lambda: Vectors({1: A}) + Vectors({1: A}, "attn"), ShapeError, "different points"),
    "minus another size": (lambda: Vectors({1: A}) - Vectors({1: A[1:]}), ShapeError, "sizes"),
    "a zero's direction": (lambda: Vectors({1: A * 0}).normalized(), KwargError, "layer 1 is zero"),
    "ablate a zero": (lambda: Vectors({1: A * 0}).ablate(), KwargError, "layer 1 is zero"),
    "project out of less": (lambda: Vectors({1: A, 2: A}).project_out(Vectors({1: B})), SpanError, "layer 2"),
    "project out a tensor": (lambda: Vectors({1: A}).project_out(A), KwargError, "Tensor is not"),  # type: ignore[arg-type]
    "nothing in common": (lambda: Vectors({1: A}).cosine(Vectors({2: A})), SpanError, "no layer in common"),
    "edits of a missing layer": (lambda: Vectors({1: A}).edits(layers=[1, 2]), SpanError, "layer 2"),
    "steer": (lambda: flow("llama")(random(1, 3, D), steer=Vectors({1: A})), KwargError, "steer"),
    "inside kf.add": (lambda: flow("llama")(random(1, 3, D), edit=kf.add(Vectors({1: A}), 1)), KwargError, "Vectors"),  # type: ignore[arg-type]
    "another model's": (
        lambda: flow("llama")(random(1, 3, D), edit=Vectors({1: random(D + 1)}).edits()),
        ShapeError,
        "hidden.*33|33.*hidden",
    ),
    "of deeper layers": (lambda: flow("llama")(random(1, 3, D), edit=Vectors({9: A}).edits()), SpanError, "layer 9"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_wrong_is_named(case: str) -> None:
    call, kind, said = BAD[case]
    with pytest.raises(kind, match=said):
        call()


# ---- in a flow ---------------------------------------------------------------------------------------------------


def test_edits_add_and_ablate() -> None:
    remote, hidden = flow("llama", TWO), random(2, 5, D)
    v = Vectors({1: A, 3: B})
    added = remote(hidden, edit=v.edits(2.0, at=[0, 4]))
    assert_bits(added, remote(hidden, edit=[kf.add(A, 1, at=[0, 4], scale=2.0), kf.add(B, 3, at=[0, 4], scale=2.0)]))
    assert_bits(remote(hidden, edit=v.edits(layers=3)), remote(hidden, steer={3: B}))
    _, acts = remote.capture({"resid": [1, 3]}, hidden, edit=v.ablate())
    for layer, vector in v.items():
        assert (acts["resid", layer] @ vector).abs().max() < 1e-4
    rows = torch.tensor([0.0, 2.0])
    assert_near(remote(hidden, edit=v.edits(rows))[1], remote(hidden, edit=v.edits(2.0))[1])
    at_heads = Vectors({2: random(4, 8)}, "head")
    assert_bits(remote(hidden, edit=at_heads.edits()), remote(hidden, edit=kf.add(at_heads[2], 2, point="head")))
    embedded = Vectors({0: A}, "embed").edits()
    assert_bits(remote(hidden, edit=embedded), remote(hidden + A))


def test_zero_times_a_vector_is_the_baseline_to_the_bit() -> None:
    remote, hidden = flow("opt", TWO), random(2, 5, D)
    hidden[0, 0, :4] = -0.0
    v, baseline = Vectors({0: A}, "embed"), remote(hidden)
    for edits in ((v * 0).edits(), (v * 0).edits(3.0), v.edits(0), v.edits(0.0), (v - v).edits()):
        assert_bits(remote(hidden, edit=edits), baseline)
    acts = [remote.capture({"embed": 0}, hidden, edit=edits)[1]["embed", 0] for edits in ((v * 0).edits(), None)]
    assert_bits(acts[0], acts[1])


def test_what_a_derivative_needs_is_never_left_out() -> None:
    remote, hidden = flow("llama", TWO, torch.float64), random(1, 3, D, dtype=torch.float64)
    a = A.double()
    zero = torch.zeros(D, dtype=torch.float64, requires_grad=True)
    remote(hidden, edit=Vectors({1: zero}).edits()).sum().backward()
    strength = torch.zeros((), dtype=torch.float64, requires_grad=True)
    remote(hidden, edit=Vectors({1: a}).edits(strength)).sum().backward()
    assert zero.grad is not None and strength.grad is not None
    assert_close(strength.grad, zero.grad @ a)
    by_func = grad(lambda t: remote(hidden, edit=Vectors({1: t}).edits()).sum())(torch.zeros_like(a))
    assert_close(by_func, zero.grad)
    swept = vmap(lambda s: remote(hidden, edit=(Vectors({1: a}) * s).edits()))(torch.tensor([0.0, 1.0]).double())
    assert_close(swept[1], remote(hidden, edit=Vectors({1: a}).edits()))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.zeros_like(a), a)
        assert len(Vectors({1: dual}).edits()) == 1


# ---- from texts --------------------------------------------------------------------------------------------------


def seen(family: str, text: str, layer: int, place: int = -1) -> Tensor:
    """The output of a layer of the Hugging Face model, for one text alone."""
    model, found = huggingface(family), []
    made = flow(family).ends.tokenize([text])  # type: ignore[attr-defined]
    handle = layers_of(model)[layer].register_forward_hook(
        lambda _, __, out: found.append(out[0] if isinstance(out, tuple) else out)
    )
    try:
        model(input_ids=made["input_ids"], attention_mask=made["attention_mask"])
    finally:
        handle.remove()
    return found[0][0, place].double()


@families(["llama", "gpt2"])
def test_mean_is_the_difference_of_means(family: str) -> None:
    made = contrast(flow(family, TWO), POSITIVE, NEGATIVE[:2], batch_size=2)
    assert made.layers == tuple(range(L)) and made.method == "mean" and made.model_type == family
    for layer, vector in made.items():
        means = [torch.stack([seen(family, text, layer) for text in own]).mean(0) for own in (POSITIVE, NEGATIVE[:2])]
        assert_near(vector, (means[0] - means[1]).float(), f"layer {layer}")


def test_a_text_means_the_same_alone_and_padded() -> None:
    remote = flow("llama", TWO)
    whole = contrast(remote, POSITIVE, NEGATIVE, layers=[1, 3], at="prompt[-1]")
    for size in (1, 2):
        for layer, vector in contrast(remote, POSITIVE, NEGATIVE, layers=[1, 3], batch_size=size).items():
            assert_near(whole[layer], vector)
    first = contrast(remote, POSITIVE, NEGATIVE, layers=2, at=0)
    several = contrast(remote, POSITIVE, NEGATIVE, layers=2, at="all")
    at_first = [torch.stack([seen("llama", t, 2, 0) for t in own]).mean(0) for own in (POSITIVE, NEGATIVE)]
    assert_near(first[2], (at_first[0] - at_first[1]).float())
    over_all = [
        torch.stack([torch.stack([seen("llama", t, 2, i) for i in range(len(t.split()))]).mean(0) for t in own]).mean(0)
        for own in (POSITIVE, NEGATIVE)
    ]
    assert_near(several[2], (over_all[0] - over_all[1]).float())


@pytest.mark.parametrize("pairs", [1, 3, pytest.param(40, marks=pytest.mark.slow)])
def test_pca_is_the_first_singular_vector_towards_the_positives(pairs: int) -> None:
    remote = flow("llama", TWO)
    sides = [[f"w{2 + (n * k) % 60} w{2 + (n * m) % 60}" for n in range(1, pairs + 1)] for k, m in ((7, 11), (13, 5))]
    made = contrast(remote, *sides, layers=[0, 3], method="pca")
    means = contrast(remote, *sides, layers=[0, 3])
    for layer, vector in made.items():
        difference = torch.stack(
            [seen("llama", p, layer) - seen("llama", n, layer) for p, n in zip(*sides, strict=True)]
        )
        first = torch.linalg.svd(difference).Vh[0]
        first = first if difference.mean(0) @ first > 0 else -first
        assert_close(vector, first.float())
        assert means[layer] @ vector > 0
    swapped = contrast(remote, sides[1], sides[0], layers=[0, 3], method="pca")
    assert_close(swapped[3], -made[3])


def test_only_what_is_asked_for_runs_and_travels() -> None:
    remote = make_flow("llama", TWO)
    with Requests(remote) as requests:
        contrast(remote, POSITIVE, NEGATIVE, layers=[0, 1], batch_size=3)
    assert len(requests) == 2, "the second worker was asked, or a batch came in parts"
    assert [[tuple(t.shape) for t in reply.tree[1:]] for _, _, reply in requests.seen] == [[(3, 1, D)] * 2] * 2
    at_heads = contrast(remote, POSITIVE, NEGATIVE, layers=1, point="head", method="pca")
    assert at_heads[1].shape == (4, 8)
    assert contrast(remote, POSITIVE, NEGATIVE, point="embed").layers == (0,)
    assert not any(t.requires_grad for _, t in at_heads.items())


TEXTS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no texts": ({"positive": []}, KwargError, "positive is \\[\\]"),
    "no strings": ({"negative": [3]}, KwargError, "negative is"),
    "unequal pairs": ({"negative": ["w3"], "method": "pca"}, KwargError, "3 positive texts, 1 negative"),
    "not one token": ({"negative": ["w3", "w4", ""]}, KwargError, "negative\\[2\\]: '' is not one token"),
    "not one token alone": ({"positive": "", "batch_size": 1}, KwargError, "token"),
    "the same texts": ({"negative": POSITIVE, "method": "pca"}, KwargError, "the same at layer 0"),
    "a method": ({"method": "umap"}, KwargError, "mean or pca"),
    "a bool layer": ({"layers": True}, KwargError, "layers=True"),
    "bool layers": ({"layers": [True, False]}, KwargError, "layers=\\[True"),
    "a layer too deep": ({"layers": [1, 9]}, SpanError, "no layer 9"),
    "a negative layer": ({"layers": -1}, SpanError, "no layer -1"),
    "a point": ({"point": "residual"}, KwargError, "no point 'residual'"),
    "a phase": ({"at": "generated"}, KwargError, "generated"),
    "a place that one text lacks": ({"at": 3, "batch_size": 1}, KwargError, "positive\\[0:1\\].*row 0 has 3 tokens"),
    "rows": ({"at": torch.zeros(3, 1)}, KwargError, "at is a Tensor"),
    "a batch size": ({"batch_size": 0}, KwargError, "batch_size is 0"),
}


@pytest.mark.parametrize("case", TEXTS)
def test_contrast_says_what_is_wrong(case: str) -> None:
    given, kind, said = TEXTS[case]
    call = {"positive": POSITIVE, "negative": NEGATIVE, **given}
    with pytest.raises(kind, match=said):
        contrast(flow("llama", TWO), **call)


def test_contrast_starts_at_the_embeddings() -> None:
    with pytest.raises(SpanError, match="from layer 0; this flow has layers 1:4"):
        contrast(flow("llama", TWO)[1:], POSITIVE, NEGATIVE)
    assert contrast(flow("llama", TWO)[:3], POSITIVE, NEGATIVE).layers == (0, 1, 2)


# ---- files -------------------------------------------------------------------------------------------------------

SAID = {"model": "tiny", "model_type": "llama", "method": "pca"}


@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
def test_files_hold_every_bit(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"v.{kind}"
    odd = random(D, seed=9)
    odd[:4] = torch.tensor([-0.0, 1e-42, 3.4e38, -1e-30])
    v = Vectors({1: odd, 3: A, 12: B}, **SAID)
    v.save(path)
    again = kf.steering.load(path)
    assert again.layers == v.layers and again.point == "resid"
    assert {name: getattr(again, name) for name in SAID} == SAID
    for layer, vector in v.items():
        assert_bits(again[layer], vector)
    (tmp_path / "other.name").write_bytes(path.read_bytes())
    assert kf.steering.load(tmp_path / "other.name").layers == v.layers


def test_safetensors_hold_every_dtype_and_point(tmp_path: Path) -> None:
    for number, (tensors, point) in enumerate(
        [({0: A.double()}, "attn"), ({0: A.bfloat16(), 1: A.bfloat16()}, "resid_pre"), ({2: random(4, 8)}, "head")]
    ):
        path = tmp_path / f"{number}.safetensors"
        Vectors({n: t.requires_grad_() for n, t in tensors.items()}, point).save(path)
        again = kf.steering.load(path)
        assert again.point == point
        for layer, vector in tensors.items():
            assert_bits(again[layer], vector.detach())


def test_gguf_is_what_llama_cpp_and_repeng_read(tmp_path: Path) -> None:
    """Their readers' own rules: architecture, hint and count, and float32 vectors direction.N from 1 on."""
    import gguf

    Vectors({1: A.bfloat16(), 3: B.bfloat16()}, model="m", model_type="llama").save(tmp_path / "v.gguf")
    reader = gguf.GGUFReader(tmp_path / "v.gguf")
    fields = {name: reader.get_field(name).contents() for name in reader.fields if not name.startswith("GGUF.")}
    assert fields["general.architecture"] == "controlvector"
    assert fields["controlvector.model_hint"] == "llama" and fields["controlvector.layer_count"] == 2
    assert [(t.name, t.tensor_type.name, t.data.shape) for t in reader.tensors] == [
        ("direction.1", "F32", (D,)),
        ("direction.3", "F32", (D,)),
    ]
    assert np.array_equal(reader.tensors[1].data, B.bfloat16().float().numpy())


def test_gguf_as_repeng_writes_it(tmp_path: Path) -> None:
    """direction.N is added to the output of layer N, counted from 0, in repeng as in llama.cpp."""
    import gguf

    writer = gguf.GGUFWriter(str(tmp_path / "v.gguf"), "controlvector")
    writer.add_string("controlvector.model_hint", "mistral")
    writer.add_uint32("controlvector.layer_count", 2)
    for layer in (3, 1):  # repeng goes from the last layer down
        writer.add_tensor(f"direction.{layer}", (layer * A).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    v, hidden = kf.steering.load(tmp_path / "v.gguf"), random(1, 3, D)
    assert (v.layers, v.model_type, v.method) == ((1, 3), "mistral", "")
    remote = flow("llama", TWO)
    assert_bits(remote(hidden, edit=v.edits()), remote(hidden, steer={1: A, 3: 3 * A}))


REFUSED: dict[str, tuple[Callable[[Path], Any], type[Exception], str]] = {
    "a name": (lambda p: Vectors({1: A}).save(p / "v.pt"), KwargError, ".safetensors, or .gguf"),
    "not finite": (lambda p: Vectors({1: A / 0.0}).save(p / "v.gguf"), KwargError, "layer 1 .* finite"),
    "layer 0": (lambda p: Vectors({0: A, 1: A}).save(p / "v.gguf"), KwargError, "no direction.0"),
    "a point": (lambda p: Vectors({1: A}, "attn").save(p / "v.gguf"), KwargError, "not at 'attn'"),
    "float64": (lambda p: Vectors({1: A.double()}).save(p / "v.gguf"), KwargError, "to\\(torch.float32\\)"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_format_cannot_say_is_not_written(tmp_path: Path, case: str) -> None:
    call, kind, said = REFUSED[case]
    with pytest.raises(kind, match=said):
        call(tmp_path)
    assert not list(tmp_path.iterdir())


def gguf_bytes(
    fields: list[tuple[str, int, bytes]], tensors: list[tuple[str, list[int], int]], data: bytes = b"", count: int = -1
) -> bytes:
    """A GGUF file by hand: fields (name, type, value), tensors (name, dims, type), all at offset 0."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors) if count < 0 else count, len(fields))
    for name, kind, value in fields:
        head += text(name) + struct.pack("<I", kind) + value
    for name, dims, kind in tensors:
        head += text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, 0)
    return head + bytes(-len(head) % 32) + data


def controlvector(name: str = "controlvector") -> tuple[str, int, bytes]:
    return "general.architecture", 8, struct.pack("<Q", len(name)) + name.encode()


ONE = [("direction.1", [D], 0)]
DATA = bytes(4 * D)
HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "neither"),
    "text": (b"once upon a time, and long after", "neither"),
    "a pickle": (b"\x80\x04\x95" + bytes(60), "neither"),
    "magic only": (b"GGUF", "broken GGUF"),
    "cut in the header": (gguf_bytes([controlvector()], ONE, DATA)[:50], "broken GGUF"),
    "cut in the data": (gguf_bytes([controlvector()], ONE, DATA)[:-8], "broken GGUF"),
    "another architecture": (gguf_bytes([controlvector("llama")], ONE, DATA), "of 'llama'"),
    "no architecture": (gguf_bytes([], ONE, DATA), "of ''"),
    "an endless array": (gguf_bytes([("x", 9, struct.pack("<IQ", 0, 2**60)), controlvector()], ONE), "broken GGUF"),
    "an endless text": (gguf_bytes([("x", 8, struct.pack("<Q", 2**62))], ONE), "broken GGUF"),
    "endless tensors": (gguf_bytes([controlvector()], ONE, DATA, count=2**60), "broken GGUF"),
    "a huge tensor": (gguf_bytes([controlvector()], [("direction.1", [2**40], 0)], DATA), "broken GGUF"),
    "no vectors": (gguf_bytes([controlvector()], []), "no vectors"),
    "direction.0": (gguf_bytes([controlvector()], [("direction.0", [D], 0)], DATA), "from 1 on"),
    "direction.-1": (gguf_bytes([controlvector()], [("direction.-1", [D], 0)], DATA), "direction.N only"),
    "another tensor": (gguf_bytes([controlvector()], [("blk.0.attn", [D], 0)], DATA), "'blk.0.attn'"),
    "half precision": (gguf_bytes([controlvector()], [("direction.1", [D], 1)], DATA), "not a float32 vector"),
    "a matrix": (gguf_bytes([controlvector()], [("direction.1", [8, 4], 0)], DATA), "not a float32 vector"),
    "two sizes": (gguf_bytes([controlvector()], [*ONE, ("direction.2", [8], 0)], DATA), "sizes"),
    "not finite": (gguf_bytes([controlvector()], ONE, struct.pack("<f", float("nan")) * D), "not finite"),
    "a number for a text": (gguf_bytes([("general.architecture", 4, bytes(4))], ONE, DATA), "not a text"),
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("case", HOSTILE)
def test_broken_files_are_named(tmp_path: Path, case: str) -> None:
    content, said = HOSTILE[case]
    path = tmp_path / "v.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=said) as caught:
        kf.steering.load(path)
    assert str(path) in str(caught.value)


FOREIGN: dict[str, tuple[dict[str, Tensor], dict[str, str], str]] = {
    "a model": ({"w": A}, {"format": "pt"}, "lacks 'kwflow.steering'"),
    "no metadata": ({"direction.1": A}, {}, "lacks"),
    "a later version": ({"direction.1": A}, {"kwflow.steering": "2"}, "version '2'"),
    "another name": ({"layers.1": A}, {"kwflow.steering": "1"}, "'layers.1'"),
    "another size": ({"direction.1": A}, {"kwflow.steering": "1", "hidden_size": "64"}, "hidden_size 64, .* have 32"),
    "two sizes": ({"direction.1": A, "direction.2": A[1:]}, {"kwflow.steering": "1"}, "sizes"),
    "nothing": ({}, {"kwflow.steering": "1"}, "no vectors"),
}


@pytest.mark.parametrize("case", FOREIGN)
def test_foreign_safetensors_are_named(tmp_path: Path, case: str) -> None:
    tensors, metadata, said = FOREIGN[case]
    save_file({n: t.detach().clone() for n, t in tensors.items()}, tmp_path / "v.safetensors", metadata=metadata)
    with pytest.raises(ModelError, match=said):
        kf.steering.load(tmp_path / "v.safetensors")


def test_bad_metadata_and_missing_files_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match="cannot read"):
        kf.steering.load(tmp_path / "absent.gguf")
    save_file({"direction.1": A.clone()}, tmp_path / "v.safetensors", metadata={"kwflow.steering": "1", "point": "x"})
    with pytest.raises(KwflowError, match="no point 'x'"):
        kf.steering.load(tmp_path / "v.safetensors")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ModelError, match=r"pip install 'kwflow\[embedded\]'"):
        Vectors({1: A}).save(tmp_path / "v.gguf")


# ---- on a plain model --------------------------------------------------------------------------------------------

PADS = (0, 3)
MASK = left_padded(PADS, 7)
SOME = ["llama", *(pytest.param(family, marks=pytest.mark.rest) for family in ("gemma2", "opt"))]
V = Vectors({1: A, 3: B})


def inputs(family: str) -> dict[str, Tensor]:
    return {"input_ids": ids(2, 7), "attention_mask": MASK}


def edits_at(at: Any) -> list[Any]:
    points = [kf.scale(0.5, 0, point="attn", at=at), kf.project_out(A, 2, point="mlp", at=at), kf.put(B, 0, at=at)]
    return [*V.edits(2.0, at=at), *points, kf.add(random(4, 8), 2, point="head", at=at)]


@pytest.fixture(scope="module", params=SOME)
def pair(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    """A family's model over two workers, and the local one."""
    family = request.param
    ours = kf.AutoDistributedModelForCausalLM.from_pretrained(folder(family), flow=flow(family, TWO))
    return ours, huggingface(family)


@pytest.mark.parametrize("at", ["all", "prompt", "prompt[-1]", "prompt[1:3]", "prompt[-2:]", [0, 2], 1])
def test_forward_with_hooks_is_the_flow(pair: tuple[Any, Any], at: Any) -> None:
    ours, local = pair
    with torch.no_grad():
        expected = ours(**inputs(""), edit=edits_at(at)).logits
        baseline = local(**inputs("")).logits
        with kf.steering.as_hooks(local, edits_at(at)) as same:
            found = local(**inputs("")).logits
        assert same is local
        there = MASK.bool()  # what pads compute is nobody's
        assert_bits(found[there], expected[there])
        assert not torch.equal(found[there], baseline[there])
        assert_bits(local(**inputs("")).logits, baseline)


GENERATED = ["all", "prompt", "prompt[-1]", "generated", "prompt[1:3]", [0, 2, 8]]


@pytest.mark.parametrize("at", GENERATED)
def test_generate_with_hooks_is_the_distributed_generate(pair: tuple[Any, Any], at: Any) -> None:
    ours, local = pair
    more = {**inputs(""), "max_new_tokens": 6, "min_new_tokens": 6, "output_logits": True}
    more |= {"return_dict_in_generate": True, "pad_token_id": 0}
    expected = ours.generate(**more, edit=edits_at(at))
    with kf.steering.as_hooks(local, edits_at(at)):
        found = local.generate(**more)
    assert torch.equal(found.sequences, expected.sequences)
    for step, (a, b) in enumerate(zip(found.logits, expected.logits, strict=True)):
        # gemma2's own cache drops columns that its window has left, so even plain decoding differs in the last bit
        same = assert_close if ours.config.model_type == "gemma2" else assert_bits
        same(a, b, f"step {step}")
    assert not torch.equal(torch.cat(found.logits), torch.cat(local.generate(**more).logits))


def test_beams_and_samples_with_hooks() -> None:
    family = "llama"
    ours = kf.AutoDistributedModelForCausalLM.from_pretrained(folder(family), flow=flow(family, TWO))
    local = huggingface(family)
    for way in ({"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2}):
        more = {**inputs(family), "max_new_tokens": 5, "pad_token_id": 0, **way}
        torch.manual_seed(0)
        expected = ours.generate(**more, edit=V.edits(3.0, at="generated"))
        torch.manual_seed(0)
        with V.as_hooks(local, 3.0, at="generated"):
            assert torch.equal(local.generate(**more), expected)


def test_steps_by_hand_with_hooks() -> None:
    """A cache that the caller carries: its first step is the prompt."""
    local, x = huggingface("llama"), inputs("llama")
    name = cache_name(layers_of(local)[0])
    with torch.no_grad(), V.as_hooks(local, 2.0, at="generated"):
        first = local(**x, position_ids=positions_of(MASK), use_cache=True)
        token = first.logits[:, -1:].argmax(-1)
        mask = torch.cat([MASK, torch.ones(2, 1, dtype=torch.long)], 1)
        step = {"input_ids": token, "attention_mask": mask, "position_ids": mask.cumsum(-1)[:, -1:] - 1}
        second = local(**step, use_cache=True, **{name: first[1]})
        more = {"max_new_tokens": 2, "min_new_tokens": 2, "pad_token_id": 0, "return_dict_in_generate": True}
        whole = local.generate(**x, **more, output_logits=True)
    assert_near(first.logits[:, -1], whole.logits[0])  # generate's head computes the last column alone
    assert_near(second.logits[:, -1], whole.logits[1])


def test_gradients_pass_the_hooks() -> None:
    local = huggingface("llama")
    ours = kf.AutoDistributedModelForCausalLM.from_pretrained(folder("llama"), flow=flow("llama", TWO))
    a, b = (A.clone().requires_grad_() for _ in range(2))
    with Vectors({1: a}).as_hooks(local, at="prompt[-1]"):
        local(**inputs("llama")).logits[:, -1].square().sum().backward()
    ours(**inputs("llama"), edit=Vectors({1: b}).edits(at="prompt[-1]")).logits[:, -1].square().sum().backward()
    assert a.grad is not None and b.grad is not None
    assert_close(a.grad, b.grad)


def test_the_model_is_as_before_after_errors() -> None:
    local, x = huggingface("llama"), inputs("llama")
    with torch.no_grad():
        baseline = local(**x).logits
        with pytest.raises(ShapeError, match="33"), Vectors({1: random(D + 1)}).as_hooks(local):
            local(**x)
        with V.as_hooks(local):
            with pytest.raises(RuntimeError):
                local(input_ids=ids(2, 7), attention_mask=MASK, position_ids=torch.zeros(3, 9, dtype=torch.long))
            assert not any(layer._forward_hooks for layer in layers_of(local))
            steered = local(**x).logits
        assert not torch.equal(steered, baseline)
        assert_bits(local(**x).logits, baseline)
        with V.as_hooks(local), (-V).as_hooks(local):
            assert_close(local(**x).logits[MASK.bool()], baseline[MASK.bool()])
        with (V * 0).as_hooks(local):
            assert_bits(local(**x).logits, baseline)
        base: Any = getattr(local, local.base_model_prefix)  # type: ignore[arg-type]
        with V.as_hooks(base):
            assert_bits(local(**x).logits, steered)
    hooks = [module for module in local.modules() if module._forward_hooks or module._forward_pre_hooks]
    assert not hooks


REPEATING = torch.tensor([[5, 6, 7, 5, 6, 7, 5, 6]])  # prompt lookup finds drafts here


def checkpointing() -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder("llama")).train()
    model.activation_checkpointing_enable()
    with V.as_hooks(model):
        model(**inputs("llama"))


def cache_from_elsewhere(at: Any) -> Any:
    local = huggingface("llama")
    out = local(**inputs("llama"), use_cache=True)
    mask = torch.cat([MASK, torch.ones(2, 1, dtype=torch.long)], 1)
    with torch.no_grad(), V.as_hooks(local, at=at):
        given = {cache_name(layers_of(local)[0]): out[1]}
        return local(input_ids=ids(2, 1), attention_mask=mask, use_cache=True, **given)


def stepped(at: Any) -> Any:
    local = huggingface("llama")
    with torch.no_grad(), V.as_hooks(local, at=at):
        given = {cache_name(layers_of(local)[0]): local(ids(1, 3), use_cache=True)[1]}
        return local(ids(1, 2), use_cache=True, **given)


def plain(at: Any) -> Any:
    local = huggingface("llama")
    with V.as_hooks(local, at=at):
        return local(**inputs("llama"))


def distributed() -> Any:
    made = kf.AutoDistributedModelForCausalLM.from_pretrained(folder("llama"), flow=flow("llama", TWO))
    with V.as_hooks(made):
        pass


def hooked(model: Any, edits: Any) -> None:
    with kf.steering.as_hooks(model, edits):
        pass


HOOKS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "several columns later": (lambda: stepped("prompt"), UnsupportedError, "several columns after"),
    "a cache from elsewhere": (lambda: cache_from_elsewhere("generated"), UnsupportedError, "begun outside"),
    "generated in a plain call": (lambda: plain("generated"), KwargError, "plain call"),
    "a place that is not there": (lambda: plain([9]), KwargError, "row 0 has 7 tokens"),
    "checkpointing": (checkpointing, UnsupportedError, "gradient checkpointing"),
    "a distributed model": (distributed, KwargError, "give it edit="),
    "no model": (lambda: hooked(torch.nn.Linear(2, 2), V.edits()), KwargError, "Linear"),
    "no edits": (lambda: hooked(huggingface("llama"), [A]), KwargError, "not a Tensor"),
    "vectors": (lambda: hooked(huggingface("llama"), [V]), KwargError, "v.edits"),
}


@pytest.mark.parametrize("case", HOOKS)
def test_hooks_refuse_by_name(case: str) -> None:
    call, kind, said = HOOKS[case]
    with pytest.raises(kind, match=said):
        call()


def test_a_cache_from_elsewhere_is_taken_where_no_phase_is_named() -> None:
    local = huggingface("llama")
    for at in ("all", [5, 8]):
        cache_from_elsewhere(at)
    assert "generate" not in vars(local)


@pytest.mark.parametrize("at", ["all", "prompt[-1]", "generated", "prompt[:3]", [1, 8]])
@pytest.mark.parametrize("way", [{"prefill_chunk_size": 3}, {"prompt_lookup_num_tokens": 2}], ids=["chunks", "drafts"])
def test_a_prompt_is_known_in_chunks_and_before_drafts(way: dict[str, Any], at: Any) -> None:
    ours = kf.AutoDistributedModelForCausalLM.from_pretrained(folder("llama"), flow=flow("llama", TWO))
    x = {"input_ids": REPEATING, "attention_mask": torch.ones_like(REPEATING)}
    if "prefill_chunk_size" in way:
        x = inputs("llama")
    more = {**x, **way, "max_new_tokens": 6, "min_new_tokens": 6, "pad_token_id": 0}
    local = huggingface("llama")
    with V.as_hooks(local, 3.0, at=at):
        found = local.generate(**more)
    assert torch.equal(found, ours.generate(**more, edit=V.edits(3.0, at=at)))


# ---- the real model ----------------------------------------------------------------------------------------------

TEMPLATES = ["{}. I think that", "{} when", "Today {} because", "{}, and"]
LOVE = [text.format("I love you") for text in TEMPLATES]
HATE = [text.format("I hate you") for text in TEMPLATES]


@pytest.mark.slow
@pytest.mark.swarm
def test_love_and_hate_on_smollm2(smollm2_swarm: Any, smollm2: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    x = tokenizer(["I think that you are"], return_tensors="pt")
    local = AutoModelForCausalLM.from_pretrained(smollm2).eval().requires_grad_(False)
    more = {**x, "max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    ours = kf.AutoDistributedModelForCausalLM.from_pretrained("smollm2-135m", initial_peers=smollm2_swarm.peers)
    made = contrast(ours.flow, LOVE, HATE, layers=12)
    v = made.normalized() * 20
    v.save(tmp_path / "love.gguf")
    again = kf.steering.load(tmp_path / "love.gguf")
    assert_bits(again[12], v[12])
    baseline = ours.generate(**more)
    assert torch.equal(ours.generate(**more, edit=(v * 0).edits()), baseline)
    texts = {}
    for name, steered in {"love": again, "hate": -again}.items():
        found = ours.generate(**more, edit=steered.edits())
        with steered.as_hooks(local):
            assert torch.equal(local.generate(**more), found)
        texts[name] = tokenizer.decode(found[0, x["input_ids"].shape[1] :])
    words = tokenizer([" love", " hate"], add_special_tokens=False)["input_ids"]
    love, hate = (own[0] for own in words)
    gaps = [
        float(row[love] - row[hate])
        for row in (ours(**x, edit=s).logits[0, -1] for s in (again.edits(), (v * 0).edits(), (-again).edits()))
    ]
    print(texts, gaps)
    assert gaps[0] > gaps[1] > gaps[2]
    assert len({*texts.values(), tokenizer.decode(baseline[0, x["input_ids"].shape[1] :])}) == 3

"""Checks of one family against transformers, lists of (what, ours, expected): tests assert them, a table shows them.

``expected`` is the Hugging Face model's own forward, cache or generate on the same text, padded on the left.
"""

# B batch, S seq, D hidden, L layers

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, jvp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

import kwflow as kf
from kwflow.blocks.precision import LiftFloat32
from tests.oracle import layers_of, residual
from tests.oracle.tiny import (
    HIDDEN,
    LAYERS,
    TWO,
    derivable,
    flow,
    folder,
    huggingface,
    ids,
    left_padded,
    make_flow,
    positions_of,
    random,
    stored,
)

Compared = list[tuple[str, Tensor, Tensor]]

PADS = (0, 1, 3, 8)
B, S, D, L = len(PADS), 6 + max(PADS), HIDDEN, LAYERS
MASK, IDS = left_padded(PADS, S), ids(B, S)
REAL = MASK.bool()
STEPS = 4


def reference(name: str, dtype: torch.dtype) -> Any:
    return huggingface(name, dtype, stored(dtype))


def positions(model: Any, mask: Tensor, seq: int) -> dict[str, Tensor]:
    """What generate gives the model's forward: token positions, where it takes any."""
    takes = "position_ids" in inspect.signature(model.forward).parameters
    return {"position_ids": positions_of(mask)[:, -seq:]} if takes else {}


@torch.no_grad()
def forward(name: str, dtype: torch.dtype) -> Compared:
    """Embedding, residual and logits of texts with left pads."""
    model, remote = reference(name, dtype), flow(name, TWO, dtype)
    entered: list[Tensor] = []
    hook = layers_of(model)[0].register_forward_pre_hook(lambda _, args: entered.append(args[0]))
    logits = model(input_ids=IDS, attention_mask=MASK, use_cache=True, **positions(model, MASK, S)).logits
    hook.remove()
    x = remote.inputs({"input_ids": IDS, "attention_mask": MASK})
    out = remote(**x)
    given = {key: value for key, value in x.items() if key != "hidden"}
    return [
        ("embedding", x["hidden"][REAL], entered[0][REAL]),
        ("residual", out, residual(model, x["hidden"], **given)),
        ("logits", remote.head(out)[REAL], logits[REAL]),
    ]


@torch.no_grad()
def decode(name: str, dtype: torch.dtype) -> Compared:
    """A prefill with left pads and some steps, against Hugging Face's own cache."""
    model, remote, found = reference(name, dtype), flow(name, TWO, dtype), []
    mask, cache = MASK, None
    cache_name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    with remote.session(S + STEPS) as session:
        for step in range(STEPS + 1):
            tokens = ids(B, 1, seed=step) if step else IDS
            mask = torch.cat([MASK, torch.ones(B, step, dtype=torch.long)], 1)
            call = {**positions(model, mask, tokens.shape[1]), "attention_mask": mask, cache_name: cache}
            out = model(input_ids=tokens, use_cache=True, **call)
            cache = out[cache_name]
            given = session.inputs({"input_ids": tokens, "attention_mask": mask} if not step else tokens)
            ours = remote.head(session.step(**given))
            keep = REAL if not step else torch.ones(B, 1, dtype=torch.bool)
            found.append((f"logits of step {step}", ours[keep], out.logits[keep]))
    return found


@torch.no_grad()
def sub_batch(name: str, dtype: torch.dtype) -> Compared:
    """Rows computed three and one at a time: as Hugging Face computes the same rows."""
    model, remote = reference(name, dtype), flow(name, TWO, dtype)
    x = remote.inputs({"input_ids": IDS, "attention_mask": MASK})
    given = {key: value for key, value in x.items() if key != "hidden"}
    cuts = [slice(0, 3), slice(3, 4)]
    parts = [residual(model, x["hidden"][rows], **{k: v[rows] for k, v in given.items()}) for rows in cuts]
    return [("rows", remote.options(batch_tokens=3 * S)(**x), torch.cat(parts))]


def gradient(name: str, dtype: torch.dtype) -> Compared:
    """Of a steering vector, deep prompts and hidden."""
    model, remote = reference(name, dtype), flow(name, TWO, dtype)
    x = remote.inputs({"input_ids": IDS, "attention_mask": MASK})
    given = {key: value for key, value in x.items() if key != "hidden"}
    weights = random(B, S, D, seed=99, dtype=dtype) * MASK[..., None].to(dtype)

    def leaves() -> list[Tensor]:
        made = [x["hidden"].clone(), random(D, seed=1, dtype=dtype), random(L, 1, 3, D, seed=2, dtype=dtype)]
        return [leaf.detach().requires_grad_() for leaf in made]

    ours, theirs = leaves(), leaves()
    (remote(ours[0], steer={1: ours[1]}, prompts=ours[2], **given) * weights).sum().backward()
    local = {"steer": {1: theirs[1][None, None]}, "prompts": dict(enumerate(theirs[2]))}
    (residual(model, theirs[0], **local, **given) * weights).sum().backward()
    names = ("hidden", "steer", "prompts")
    return [(f"gradient of {n}", a.grad, b.grad) for n, a, b in zip(names, ours, theirs, strict=True)]  # type: ignore[misc]


def beams(name: str, dtype: torch.dtype) -> Compared:
    """The ids of generate with three beams, from texts with left pads."""
    ours, theirs = distributed(name, dtype), reference(name, dtype)
    call = {"input_ids": IDS, "attention_mask": MASK, "max_new_tokens": 6, "num_beams": 3, "do_sample": False}
    return [("ids", ours.generate(**call), theirs.generate(**call))]


@functools.cache
def distributed(name: str, dtype: torch.dtype) -> Any:
    remote = make_flow(name, TWO, dtype, own_ends=True)
    return kf.AutoDistributedModelForCausalLM.from_pretrained(folder(name, stored(dtype)), flow=remote)


CHECKS: dict[str, Callable[[str, torch.dtype], Compared]] = {
    "forward": forward,
    "cached decode": decode,
    "sub-batch": sub_batch,
    "gradient": gradient,
    "beams": beams,
}


# families whose own code in transformers fails in float64, with the words of the error
NOT_IN_FLOAT64 = {"xglm": "without overflow"}


def crops(name: str) -> bool:
    """Whether Hugging Face's own cache keeps only a window of columns in some layers."""
    from transformers import DynamicCache

    return any(DynamicCache(config=huggingface(name).config).is_sliding)


def higher_order(name: str) -> Compared:
    """Derivatives of a steering vector beyond plain backward, in float64."""
    dtype = torch.float64
    model, remote = derivable(name), flow(name, TWO, dtype)
    x = remote.inputs({"input_ids": IDS, "attention_mask": MASK})
    given = {key: value for key, value in x.items() if key != "hidden"}
    v, weights = random(D, seed=1, dtype=dtype), random(B, S, D, seed=9, dtype=dtype) * MASK[..., None]

    def ours(v: Tensor) -> Tensor:
        return (remote(x["hidden"], steer={1: v}, **given) * weights).sum()

    def local(v: Tensor) -> Tensor:
        with LiftFloat32(), sdpa_kernel(SDPBackend.MATH):
            return (residual(model, x["hidden"], steer={1: v[None, None]}, **given) * weights).sum()

    transforms: dict[str, Callable[[Callable[[Tensor], Tensor]], Any]] = {
        "jvp": lambda fn: jvp(fn, (v,), (torch.sin(v),))[1],
        "vmap": lambda fn: vmap(fn)(torch.stack([v, -v])),
        "vmap of grad": lambda fn: vmap(grad(fn))(torch.stack([v, -v])),
        "reverse over reverse": lambda fn: grad(lambda u: (grad(fn)(u) * torch.sin(u)).sum())(v),
        "forward over reverse": lambda fn: jvp(grad(fn), (v,), (torch.cos(v),))[1],
    }
    return [(what, transform(ours), transform(local)) for what, transform in transforms.items()]

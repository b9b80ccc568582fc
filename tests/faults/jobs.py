"""What is run under fault scripts: generation, forward and backward, beam search, each drawn from a seed.

A job calls ``before(moment)`` where something may happen to the swarm, and returns what it computed, by name; what is
named "bits …" must come out to the bit, the rest within the table.
"""

# B batch, S seq, L layers, D hidden, R rank, P prefix, T tokens

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import kwflow as kf
from kwflow.client.flow import Flow
from kwflow.research.verify import OTHER_SHAPES
from tests.oracle.tiny import left_padded

Before = Callable[[int], None]
Results = dict[str, Tensor]

S, R, P = 6, 2, 3
TOKENS, CALLS, BEAMS = 16, 6, 3


@dataclass(frozen=True)
class Sizes:
    """What jobs need to know of a model: numbers, and the features in and out of what ``lora`` is put on."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    projections: Mapping[str, tuple[int, int]]

    @classmethod
    def of(cls, flow: Flow) -> Sizes:
        config = flow.ends.config
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        found = flow.projections()
        names = [next(name for name in found if name.endswith(end)) for end in ("q_proj", "down_proj")]
        return cls(
            flow.stop,
            config.hidden_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            head_dim,
            config.vocab_size,
            {name: found[name] for name in names},
        )


class Draw:
    """Numbers and tensors from a seed."""

    def __init__(self, seed: int, sizes: Sizes):
        self.random, self.made, self.sizes = random.Random(seed), torch.Generator().manual_seed(seed), sizes

    def chance(self, share: float) -> bool:
        return self.random.random() < share

    def tensor(self, *shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*shape, generator=self.made) * scale

    def layers(self) -> list[int]:
        some = self.random.sample(range(self.sizes.layers), self.random.choice([1, 2]))
        return sorted(some)

    def steer(self) -> Any:
        if self.chance(0.5):
            return {layer: self.tensor(self.sizes.hidden) for layer in self.layers()}
        return kf.axes(self.tensor(self.sizes.layers, self.sizes.hidden, scale=0.3), "layer hidden")

    def edit(self) -> Any:
        at = self.random.choice(["all", "generated", "prompt[-1]", [0, 2, S + 2]])
        v, layers = self.tensor(self.sizes.hidden), self.layers()
        return self.random.choice(
            [
                [kf.add(v, layers, at=at, scale=0.5)],
                [kf.put(v, layers, at=at)],
                [kf.project_out(v, layers, at=at), kf.scale(0.5, layers, point="head", heads=[1], at=at)],
            ]
        )

    def lora(self) -> Any:
        return {
            name: {
                "A": self.tensor(self.sizes.layers, R, features[0], scale=0.3),
                "B": self.tensor(self.sizes.layers, features[1], R, scale=0.3),
                "scale": 0.75,
            }
            for name, features in self.sizes.projections.items()
        }

    def head_mask(self) -> Tensor:
        return self.tensor(self.sizes.layers, self.sizes.heads)

    def prompts(self) -> Tensor:
        return self.tensor(self.sizes.layers, 1, P, self.sizes.hidden, scale=0.3)

    def prefix_kv(self) -> dict[str, Tensor]:
        shape = (self.sizes.layers, 1, self.sizes.kv_heads, P, self.sizes.head_dim)
        return {"k": self.tensor(*shape), "v": self.tensor(*shape)}

    def ids(self, batch: int, seq: int) -> Tensor:
        return torch.randint(2, self.sizes.vocab, (batch, seq), generator=self.made)


class Changing:
    """Kwargs that appear, change and vanish from step to step."""

    def __init__(self, draw: Draw):
        self._draw, self._held = draw, dict[str, Any]()

    def next(self) -> dict[str, Any]:
        for name in ("steer", "edit", "lora", "head_mask"):
            if name in self._held and self._draw.chance(0.3):
                del self._held[name]
            elif self._draw.chance(0.25):
                self._held[name] = getattr(self._draw, name)()
        return dict(self._held)


def session(flow: Flow, max_length: int) -> Any:
    """A session that rebuilds what is lost step by step."""
    stepwise = {"replay": "stepwise"} if "replay" in inspect.signature(flow.session).parameters else {}
    return flow.session(max_length, **stepwise)


def generation(flow: Flow, draw: Draw, before: Before, said: list[str]) -> Results:
    """Greedy or sampled tokens of a left-padded batch, with kwargs that change, jumps of positions and rollbacks."""
    batch, sampled = draw.random.choice([1, 3]), draw.chance(0.5)
    ids, mask = draw.ids(batch, S), left_padded([draw.random.randrange(3) if row else 0 for row in range(batch)], S)
    first = {name: getattr(draw, name)() for name in ("prefix_kv", "prompts") if draw.chance(0.4)}
    x = flow.inputs({"input_ids": ids, "attention_mask": mask}, prefix=P if "prefix_kv" in first else 0)
    kwargs, acts, results = Changing(draw), kf.Capture(resid=draw.layers()), Results()
    with session(flow, P + S + TOKENS) as steps:
        for token in range(TOKENS):
            before(token)
            given = {**kwargs.next(), **(first if token == 0 else {})}
            if "prompts" in first and token and draw.chance(0.3):
                given["prompts"] = first["prompts"]
            if draw.chance(0.5):
                given["capture"] = acts
            out = steps.step(**x, **given, phase="generated" if token else "prompt")
            logits = flow.head(out)[:, -1]
            results[f"bits logits {token}"] = logits
            chances = logits.nan_to_num().softmax(-1)  # NaN is found at the end, beside what it should have been
            chosen = torch.multinomial(chances, 1, generator=draw.made) if sampled else logits.argmax(-1)
            back = draw.random.choice([1, 2]) if draw.chance(0.1) and token > 2 else 0
            if back:
                steps.rollback(steps.position - back)
            x = steps.inputs(chosen.reshape(batch, 1))
            if draw.chance(0.05):
                x["position_ids"] = x["position_ids"] + 2
        said += _replays(steps)
    return results | {f"bits capture {key}": acts[key] for key in acts}


def gradients(flow: Flow, draw: Draw, before: Before, said: list[str]) -> Results:
    """Outputs, and gradients of hidden and of every kwarg; something may happen before each, and between."""
    results = Results()
    for call in range(CALLS):
        before(2 * call)
        batch = draw.random.choice([1, 3])
        hidden = draw.tensor(batch, S, draw.sizes.hidden).requires_grad_()
        given: dict[str, Any] = {"steer": {layer: draw.tensor(draw.sizes.hidden) for layer in draw.layers()}}
        given |= {name: getattr(draw, name)() for name in ("prompts", "lora", "head_mask") if draw.chance(0.5)}
        leaves = {"hidden": hidden, **{f"steer {layer}": v for layer, v in given["steer"].items()}}
        leaves |= {name: given[name] for name in ("prompts", "head_mask") if name in given}
        leaves |= {f"lora {name}": pair["A"] for name, pair in given.get("lora", {}).items()}
        for leaf in leaves.values():
            leaf.requires_grad_()
        out = flow(hidden, attention_mask=left_padded([draw.random.randrange(3)] * batch, S), **given)
        before(2 * call + 1)
        found = torch.autograd.grad(out.square().mean(), list(leaves.values()))
        results[f"bits out {call}"] = out.detach()
        results |= {f"gradient {call} of {name}": grad for name, grad in zip(leaves, found, strict=True)}
    return results


def beams(flow: Flow, draw: Draw, before: Before, said: list[str]) -> Results:
    """A beam search by hand: rows change places at each step, and some columns are taken back."""
    tokens = draw.ids(1, S).expand(BEAMS, S)
    scores = torch.tensor([0.0, *[-1e9] * (BEAMS - 1)])
    kwargs, results = Changing(draw), Results()
    x = flow.inputs(tokens)
    with session(flow, S + TOKENS) as steps:
        for step in range(TOKENS):
            before(step)
            out = steps.step(**x, **kwargs.next(), phase="generated" if step else "prompt")
            chances = flow.head(out)[:, -1].log_softmax(-1)
            results[f"bits chances {step}"] = chances
            scores, best = (scores[:, None] + chances).flatten().topk(BEAMS)
            parents, chosen = best // chances.shape[1], best % chances.shape[1]
            if not torch.equal(parents, torch.arange(BEAMS)) or draw.chance(0.5):
                steps.reorder(parents)
            tokens = torch.cat([tokens[parents], chosen[:, None]], 1)
            if draw.chance(0.15) and step > 3:
                steps.rollback(steps.position - draw.random.choice([1, 2]))
                tokens = tokens[:, : steps.position + 1]
            x = steps.inputs(tokens[:, -1:])
        said += _replays(steps)
    return results | {"bits tokens": tokens, "bits scores": scores}


def _replays(steps: Any) -> list[str]:
    return [str(one) for one in getattr(steps, "replays", ())]


Work = Callable[[Flow, Draw, Before, list[str]], Results]
JOBS: dict[str, tuple[Work, int]] = {
    "generation": (generation, TOKENS),
    "gradients": (gradients, 2 * CALLS),
    "beams": (beams, TOKENS),
}


def differences(results: Results, expected: Results) -> list[str]:
    """What did not come out as in the undisturbed run."""
    wrong = [f"{name} is missing" for name in expected if name not in results]
    for name, theirs in expected.items():
        if name not in results:
            continue
        ours = results[name]
        if ours.shape != theirs.shape:
            wrong.append(f"{name}: {tuple(ours.shape)} for {tuple(theirs.shape)}")
            continue
        gap = (ours.double() - theirs.double()).abs().max().item() if ours.numel() else 0.0
        bound = 0.0 if name.startswith("bits") else OTHER_SHAPES[theirs.dtype] * theirs.abs().max().item()
        if not gap <= bound:
            wrong.append(f"{name}: off by {gap:.1e}")
    return wrong

"""``flow.probe``: gradients at activations, against the Hugging Face model's own with plain hooks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import kwflow as kf
from kwflow.blocks.precision import LiftFloat32
from kwflow.errors import KwargError, SpanError
from kwflow.models.families import family_of
from tests.doubles.mortal import Swarm
from tests.families.configs import config
from tests.families.table import MASK
from tests.oracle import Hook, assert_bits, assert_close, layers_of, residual
from tests.oracle.tiny import TWO, derivable, flow, ids, make_flow, random

B, S = MASK.shape
LAYERS, TOKENS = range(4), MASK.sum(1).tolist()


def by_hand(family: str, hidden: Tensor, points: list[str], loss: Any) -> dict[tuple[str, int], tuple[Tensor, Tensor]]:
    """Activations and their gradients in the local model, rows left-aligned."""
    model, row, kept, hooks = derivable(family), family_of(config(family)), {}, list[Hook]()

    def keep(key: Any) -> Any:
        def hook(_: Any, args: Any, out: Any = None) -> None:
            value = args[0] if out is None else out[0] if isinstance(out, tuple) else out
            value.retain_grad()
            kept[key] = value

        return hook

    for number, layer in enumerate(layers_of(model)):
        for point in points:
            when = "pre" if point in ("head", "neuron") else "post"
            hooks.append((layer.get_submodule(row.points.get(point, "")), when, keep((point, number))))
    with torch.enable_grad(), LiftFloat32(), sdpa_kernel(SDPBackend.MATH):
        loss(residual(model, hidden, extra=hooks, attention_mask=MASK)).backward()
    return {key: (left(value.detach()), left(value.grad)) for key, value in kept.items()}


def left(value: Tensor) -> Tensor:
    """Rows begin at their first token; zeros behind."""
    value = value.reshape(B, S, -1)
    rows = [torch.cat([row[S - n :], torch.zeros_like(row[: S - n])]) for row, n in zip(value, TOKENS, strict=True)]
    return torch.stack(rows)


def loss_of(out: Tensor) -> Tensor:
    return (out[:, -1] * torch.linspace(-1, 1, out.shape[-1], dtype=out.dtype)).square().sum()


@pytest.mark.parametrize("family", ["llama", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_values_and_gradients_are_the_local_ones(family: str) -> None:
    points = ["resid", "attn", "mlp", "head", "neuron"]
    hidden = random(B, S, 32, dtype=torch.float64)
    expected = by_hand(family, hidden.clone().requires_grad_(), points, loss_of)
    remote = make_flow(family, TWO, torch.float64)
    out, acts = remote.probe(dict.fromkeys(points, "all"), hidden, attention_mask=MASK)
    loss_of(out).backward()
    assert acts.keys() == expected.keys()
    assert torch.equal(acts.mask.sum(1), MASK.sum(1))
    for key, (value, grad) in expected.items():
        assert acts[key].is_leaf and acts[key].requires_grad
        assert_close(acts[key].detach().flatten(2), value, f"{key}")
        assert_close(acts[key].grad.flatten(2), grad, f"gradient at {key}")
    assert_close(acts.stack("resid"), torch.stack([acts["resid", n].detach() for n in LAYERS]))
    assert_close(acts.stack("mlp", grad=True), torch.stack([acts["mlp", n].grad for n in LAYERS]))


def test_the_output_is_the_calls_and_autograd_grad_takes_activations() -> None:
    remote, x, v = flow("llama", TWO), random(B, S, 32), random(32, seed=2)
    kwargs = {"attention_mask": MASK, "edit": kf.add(v, 1)}
    out, acts = remote.probe({"resid": [1, 3], "q_proj.out": [2]}, x, at="prompt[-1]", **kwargs)
    assert torch.equal(out.detach(), remote(x, **kwargs))
    _, captured = remote.capture({"resid": [1, 3], "q_proj.out": [2]}, x, at="prompt[-1]", **kwargs)
    for key in captured:
        assert torch.equal(acts[key].detach(), captured[key]) and acts[key].shape[1] == 1
    first = torch.autograd.grad(loss_of(out), [acts["resid", 1], acts["q_proj.out", 2]], retain_graph=True)
    again = torch.autograd.grad(loss_of(out), [acts["resid", 1], acts["q_proj.out", 2]])
    for a, b in zip(first, again, strict=True):
        assert torch.equal(a, b) and bool(a.any())
    assert acts["resid", 1].grad is None


def test_attribution_patching_is_the_first_order_of_patching() -> None:
    """What it says of a small change is what patching does (Nanda 2023)."""
    remote = flow("llama", TWO, torch.float64)
    clean = random(2, 5, 32, dtype=torch.float64)
    corrupt = clean + 1e-5 * random(2, 5, 32, seed=3, dtype=torch.float64)
    _, source = remote.capture({"attn": "all"}, clean)
    out, acts = remote.probe({"attn": "all"}, corrupt)
    loss = loss_of(out)
    loss.backward()
    estimate = ((source.stack("attn") - acts.stack("attn")) * acts.stack("attn", grad=True)).sum((1, 2, 3))
    for layer in LAYERS:
        patch = kf.put(kf.axes(source["attn", layer], "batch pos hidden"), layer, point="attn")
        patched = loss_of(remote(corrupt, edit=patch))
        assert abs((patched - loss.detach()) - estimate[layer]) < 1e-3 * abs(estimate[layer]) + 1e-9


def test_sub_batches_and_other_sizes() -> None:
    remote, x = flow("llama", TWO), random(3, 4, 32)
    out, acts = remote.options(batch_tokens=4).probe({"mlp": [0, 2]}, x)
    loss_of(out).backward()
    one, alone = remote.probe({"mlp": [0, 2]}, x[1:2])
    loss_of(one).backward()
    assert_close(acts["mlp", 2].grad[1:2], alone["mlp", 2].grad)
    out, acts = remote[1:3].probe({"resid": "all"}, x[:1, :1])
    assert list(acts) == [("resid", 1), ("resid", 2)] and acts["resid", 1].shape == (1, 1, 32)


def test_what_is_refused() -> None:
    remote, x = flow("llama", TWO), random(1, 3, 32)
    with torch.no_grad(), pytest.raises(KwargError, match="torch.no_grad.. is on; use flow.capture"):
        remote.probe({"resid": "all"}, x)
    with pytest.raises(KwargError, match="no point 'pattern'"):
        remote.probe({"pattern": [0]}, x)
    with pytest.raises(KwargError, match="give {point: layers}"):
        remote.probe(["resid"], x)  # type: ignore[arg-type]
    with pytest.raises(KwargError, match="layers='every'"):
        remote.capture({"resid": "every"}, x)
    _, acts = remote.probe({"resid": [1]}, x)
    with pytest.raises(KeyError, match="'mlp' was not probed"):
        acts.stack("mlp")
    assert remote.probe({"embed": "all"}, ids(1, 3) @ torch.zeros(3, 32).long() + x)[1]["embed", 0].shape == (1, 3, 32)


def test_layers_are_all_slices_and_numbers_from_the_end() -> None:
    remote, x = flow("llama", TWO), random(1, 3, 32)
    for layers, expected in (
        ("all", [0, 1, 2, 3]),
        (slice(1, 3), [1, 2]),
        (slice(-2, None), [2, 3]),
        (slice(None, 2), [0, 1]),
        (-1, [3]),
        ([0, -1], [0, 3]),
        (range(2), [0, 1]),
    ):
        _, acts = remote.capture({"resid": layers}, x)
        assert [layer for _, layer in sorted(acts)] == expected
    assert [layer for _, layer in sorted(remote[1:3].capture({"mlp": "all"}, x)[1])] == [1, 2]
    for wrong in (slice(0, 9), slice(3, 1), slice(0, 4, 2), [-5], 4):
        with pytest.raises((KwargError, SpanError), match="layers 0:4|layer -1|layer 4"):
            remote.capture({"resid": wrong}, x)


def test_integrated_gradients_sum_to_the_difference() -> None:
    """Sundararajan et al. 2017, at the input of the layers: 32 steps of the midpoint rule."""
    remote, steps = flow("llama", TWO, torch.float64), 32
    base, x = (random(1, 4, 32, seed=seed, dtype=torch.float64) for seed in (5, 6))
    along = torch.cat([base + (x - base) * (n + 0.5) / steps for n in range(steps)])
    out, acts = remote.probe({"embed": "all"}, along)
    sum(loss_of(row[None]) for row in out).backward()
    total = ((x - base)[0] * acts["embed", 0].grad.mean(0)).sum()
    with torch.no_grad():
        difference = loss_of(remote(x)) - loss_of(remote(base))
    assert abs(total - difference) < 0.05 * abs(difference)


def test_a_worker_may_die_before_the_backward() -> None:
    swarm, x = Swarm("llama", (0, 2), (2, 4), (2, 4)), random(2, 4, 32)
    out, acts = swarm.flow.probe({"resid": "all"}, x)
    expected = torch.autograd.grad(loss_of(out), list(acts.values()), retain_graph=True)
    swarm.kill(1)
    loss_of(out).backward()
    for leaf, right in zip(acts.values(), expected, strict=True):
        assert leaf.grad is not None
        assert_bits(leaf.grad, right)

"""docs/recipes.md: its numbers are what the recipes give on SmolLM2, through two worker processes."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

import kwflow as kf
from tests.whole.test_recipes import PAGE, RECIPES


def says(title: str, *numbers: str) -> None:
    """The section has these words."""
    (section,) = [part for part in re.split(r"^## ", PAGE, flags=re.MULTILINE) if part.startswith(f"{title}\n")]
    for words in numbers:
        assert words in " ".join(section.split()), f"{title}: {words}"


@pytest.mark.swarm
@pytest.mark.slow
@pytest.mark.rest
def test_its_numbers_are_smollm2s(smollm2_swarm: Any) -> None:
    with kf.connect(smollm2_swarm.model, peers=smollm2_swarm.peers) as remote:
        clean, corrupted, country = ["The capital of Italy is"], ["The capital of France is"], 3
        paris, rome, great, bad = (remote.tokenizer(w).input_ids[0] for w in (" Paris", " Rome", " great", " bad"))

        def turn(logits: Tensor) -> Tensor:
            return (logits[:, rome] - logits[:, paris]).sum()

        def run(name: str, *args: Any, **more: Any) -> Any:
            return RECIPES[name](remote, *args, **more)

        logits = run("logit_lens", corrupted)[:, 0]
        rank = (logits > logits[:, [paris]]).sum(-1) + 1
        says("Logit lens", f"rank {rank[0]} after layer 0, {rank[27]} after layer 27, {rank[29]} after layer 29")
        parts = run("logit_attribution", clean, [rome], [paris])[:, 0]
        says("Direct logit attribution", f"sum to {parts.sum():.2f}", f"29, {parts[60]:.2f}", f"23, {parts[24]:.2f}")
        assert parts.topk(2).indices.tolist() == [60, 24]
        cells = run("activation_patching", clean, corrupted, turn)
        says("Activation patching", f"{cells[0, country]:.2f} at layer 0, {cells[22, country]:.2f} at layer 22")
        says("Activation patching", f"token {cells[22, -1]:.2f} at layer 22 and {cells[23, -1]:.2f} at layer 23")
        says("Activation patching", f"and {cells[23, country]:.2f} at layer 23; at the last")
        heads = run("head_ablation", clean, 9, turn).flatten()
        lowest = heads.topk(2, largest=False)
        assert lowest.indices[0] == 23 * 9 + 4
        says("Head ablation", f"{lowest.values[0]:.2f}; without any other single head it is {lowest.values[1]:.2f}")
        says("Neuron ablation", f"{run('neuron_ablation', clean, 24, [1005], turn)[0]:.2f}")
        torch.manual_seed(0)
        _, losses = run("alignment_search", corrupted, clean, [rome], 24, steps=4)
        says("Distributed alignment search", f"from {losses[0]:.2f} to {losses[3]:.2f} in four steps")
        first = run("attribution_patching", clean, corrupted, turn)
        says("Attribution patching", f"{first[0, country]:.2f} at layer 0 and {first[23, country]:.2f} at layer 23")
        says("Attribution patching", f"{first[23, -1]:.2f} at layer 23 and {first[29, -1]:.2f} at layer 29")
        path = run("path_patching", clean, corrupted, (22, 0), 23, "q_proj", list(range(256, 320)))
        says("Path patching", f"{turn(path):.2f}, so next to nothing")
        for start, stop in ((0, 10), (20, 24), (24, 30)):
            cut = turn(run("attention_knockout", clean, [country], start, stop))
            says("Attention knockout", f"{cut:.2f} in layers {start} to {stop}")
        torch.manual_seed(0)
        text, of_paris = "The Eiffel Tower is in the city of", lambda logits: logits.softmax(-1)[:, paris].mean()
        traced = run("causal_tracing", text, [1, 2, 3], of_paris)
        assert (traced[0] > 0.3).nonzero().flatten().tolist() == [2]
        assert (traced[29] > 0.3).nonzero().flatten().tolist() == [8]
        films = ["I love this film", "What a joy"], ["I hate this film", "What a pain"]
        steered = run("contrastive_steering", *films, 12, ["I think this film is"] * 3, [-4.0, 0.0, 4.0])
        low, none, high = (steered[:, great] - steered[:, bad]).tolist()
        says("Contrastive steering", f"{low:.2f}, {none:.2f} and {high:.2f}")
        tokens = run("integrated_gradients", clean, corrupted, turn)
        assert tokens[0].abs().sum() == tokens[0, country].abs()
        says("Integrated gradients", f"{tokens[0, country]:.2f} of a difference of {cells[29, -1] - cells[0, 0]:.2f}")
        edges = run("edge_attribution", clean, corrupted, turn)
        writer, reader = divmod(int(edges.abs().argmax()), edges.shape[1])
        assert (writer, reader) == (1 + 2 * 23, 60)
        says("Edge attribution patching", f"{edges[writer, reader]:.2f}")

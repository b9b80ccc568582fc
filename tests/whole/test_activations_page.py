"""docs/activations.md: its code runs, as it stands there, over two workers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.utils.data import DataLoader

import kwflow as kf
from tests.oracle.tiny import HIDDEN, TWO, flow, random
from tests.whole.test_house import ROOT

PAGE = (ROOT / "docs" / "activations.md").read_text()
TEXTS = ["w3 w4 w5", "w6 w7 w8 w9 w10", "w3 w6"]


def test_its_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    published = tmp_path / "gpt2-small" / "blocks.2.hook_resid_pre"
    published.mkdir(parents=True)
    (published / "cfg.json").write_text(json.dumps({"architecture": "standard", "hook_name": published.name}))
    weights = {"W_enc": random(HIDDEN, 9), "b_enc": random(9), "W_dec": random(9, HIDDEN), "b_dec": random(HIDDEN)}
    save_file(weights, published / "sae_weights.safetensors")
    names: dict[str, Any] = {"kf": kf, "flow": flow("gpt2", TWO), "texts": TEXTS, "DataLoader": DataLoader}
    for code in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(compile(code, "docs/activations.md", "exec"), names)
    assert len(names["acts"]) == 10 and names["batch"]["resid", 2].shape == (2, HIDDEN)
    assert names["f"].shape == (3, 5, 9)
    added = torch.zeros(9).index_fill(0, torch.tensor([7]), 1.0)
    direction = names["sae"].decode(added) - names["sae"].decode(0 * added)
    torch.testing.assert_close(names["sae"].direction(7), direction)
    assert not torch.equal(names["out"], flow("gpt2", TWO)(**flow("gpt2", TWO).inputs(TEXTS)))


def test_it_is_short() -> None:
    assert len(PAGE.splitlines()) <= 60

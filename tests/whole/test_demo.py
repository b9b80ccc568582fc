"""``kwflow demo`` as a stranger runs it: a process of its own, its output piped."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest


@pytest.mark.rest
@pytest.mark.swarm
@pytest.mark.timeout(400)
def test_the_demo_proves_what_it_says() -> None:
    """Every proof holds; stdout has one table and both texts, stderr nothing at all."""
    done = subprocess.run(
        [sys.executable, "-m", "kwflow", "demo", "--tokens", "20"],
        capture_output=True,
        text=True,
        timeout=360,
        env={**os.environ, "TERM": "dumb", "COLUMNS": "120"},
    )
    out = " ".join(done.stdout.split())
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert "9 of 9 proofs hold" in out and "✗" not in out and "\x1b" not in out
    assert len(set(re.findall(r"pid (\d+): layers", out))) == 2
    assert out.count("20 of 20 tokens equal") == 2
    assert "every bit of hidden" in out
    assert out.count("max relative error 0 (every bit of") == 2
    assert "NoRoute after" in out and "every bit of 3 steps after it; 2 steps repeated there" in out
    plain, steered = re.findall(r"^\s*(?:plain|steered): +(.+)$", done.stdout, re.M)
    assert plain.strip() != steered.strip()


def test_a_false_proof_is_an_exit_status(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from kwflow.cli import demo

    def run(facts: list[demo.Fact]) -> int:
        monkeypatch.setattr(demo, "_run", lambda *_: (facts, {"plain": "a [b] c", "steered": "d"}))
        return demo.run_demo("toy", 40)

    held, measured = demo.Fact("It holds.", "yes", True), demo.Fact("It was measured.", "[3 ms]", None)
    assert run([held, measured]) == 0
    assert "1 of 1 proofs hold" in capsys.readouterr().out
    assert run([held, measured, demo.Fact("It does not.", "no", False)]) == 1
    out = capsys.readouterr().out
    assert "1 of 2 proofs hold" in out and "✗" in out and "[3 ms]" in out and "a [b] c" in out

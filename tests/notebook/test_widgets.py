"""The live panels, driven without a browser: values set, buttons clicked, what they show compared with plain calls."""

from __future__ import annotations

import builtins
import gc
import re
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import kwflow as kf
from kwflow.errors import KwargError, SpanError, UnsupportedError
from kwflow.swarm import local
from tests.doubles import here
from tests.doubles.mortal import Swarm
from tests.doubles.processes import until
from tests.oracle import tiny
from tests.oracle.tiny import HIDDEN, random

PROMPT = "w3 w5 w7"
V = kf.steering.Vectors({1: random(HIDDEN), 3: random(HIDDEN, seed=1)})
W = kf.steering.Vectors({2: random(HIDDEN, seed=2)})


def threads(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == name]


def page_of(panel: Any) -> str:
    """What a viewer without widgets shows."""
    return str(panel._repr_mimebundle_()["text/html"])


@pytest.fixture
def lab() -> Iterator[Any]:
    lab = kf.notebook.steer_lab(tiny.make_flow("llama", tiny.TWO), {"v": V, "w": W}, prompt=PROMPT)
    lab.new_tokens.value = 6
    yield lab
    lab.close()
    lab.wait(10)
    assert not threads("kwflow-steer-lab")


def generated(lab: Any, edit: Any = None) -> torch.Tensor:
    """The new tokens that a plain call of generate gives for two rows of the prompt."""
    model = kf.AutoDistributedModelForCausalLM.from_pretrained(lab.flow.ends.folder, flow=lab.flow)
    batch = lab.flow.ends.tokenize([lab.prompt.value] * 2)
    ids = {name: batch[name] for name in ("input_ids", "attention_mask")}
    kwargs = {} if edit is None else {"edit": edit}
    out = model.generate(**ids, **kwargs, max_new_tokens=lab.new_tokens.value, do_sample=False, pad_token_id=0)
    return out[:, ids["input_ids"].shape[1] :]


# ---------------------------------------------------------------- steer_lab


def test_both_texts_are_those_of_generate(lab: Any) -> None:
    lab.strength.value = 1.0
    lab.go.click()
    lab.wait(30)
    plain, steered = generated(lab), generated(lab, V.edits(lab.scale, layers=[3]))
    assert torch.equal(lab.ids[0], plain[0]) and torch.equal(lab.ids[1], steered[1])
    assert not torch.equal(lab.ids[0], lab.ids[1]), "the vector acts"
    assert lab.texts == tuple(lab.flow.tokenizer.batch_decode(lab.ids, skip_special_tokens=True))
    assert all(text in widget.value for text, widget in zip(lab.texts, (lab.baseline, lab.steered), strict=True))
    assert all(text in page_of(lab) for text in lab.texts)
    assert f"edit=v.edits({lab.scale:.4g}, layers=[3], at=&#x27;all&#x27;)" in lab.status.value


def test_strength_is_a_share_of_what_the_vector_is_added_to(lab: Any) -> None:
    lab.layer.value, lab.strength.value = 1, -0.3
    lab.go.click()
    lab.wait(30)
    _, acts = lab.flow.capture({"resid": [1]}, at="prompt[-1]", **lab.flow.inputs([PROMPT] * 2))
    size = torch.linalg.vector_norm(acts["resid", 1][0])
    assert lab.scale == pytest.approx(float(-0.3 * size / V[1].norm()), rel=1e-6)
    lab.strength.value = 0.0
    lab.go.click()
    lab.wait(30)
    assert lab.scale == 0 and lab.texts[0] == lab.texts[1] and torch.equal(lab.ids, generated(lab))


def test_positions_are_those_of_at(lab: Any) -> None:
    lab.vector.value, lab.strength.value, lab.at.value = "w", 1.0, "generated"
    lab.go.click()
    lab.wait(30)
    assert torch.equal(lab.ids[1], generated(lab, W.edits(lab.scale, at="generated"))[1])
    assert not torch.equal(lab.ids[1], generated(lab, W.edits(lab.scale))[1]), "all would be another text"
    assert torch.equal(lab.ids[:, 0], generated(lab)[:, 0]), "the first token comes from the prompt alone"


def test_layers_are_the_vector_s_and_the_flow_s(lab: Any) -> None:
    assert (lab.layer.options, lab.layer.value) == ((1, 3), 3)
    lab.vector.value = "w"
    assert (lab.layer.options, lab.layer.value) == ((2,), 2)
    lab.vector.value = "v"
    assert (lab.layer.options, lab.layer.value) == ((1, 3), 1)
    half = kf.notebook.steer_lab(lab.flow[:2], V)
    assert half.layer.options == (1,)
    half.close()


def test_what_fails_is_said_in_the_panel_and_the_next_goes_on(lab: Any) -> None:
    lab.prompt.value = ""
    lab.go.click()
    lab.wait(30)
    assert "failed" in lab.status.value and "at least one token" in lab.status.value
    lab.prompt.value = "w3 <tag>"
    lab.go.click()
    lab.wait(30)
    assert "6 tokens in" in lab.status.value and "w3 &lt;tag&gt;" in lab.baseline.value
    lab.new_tokens.value = 200
    lab.go.click()
    until(lambda: lab.ids is not None)
    lab.flow.close()  # under way
    lab.wait(10)
    assert "the flow is closed" in lab.status.value and lab.stop.disabled


def test_stop_and_a_second_generate_end_the_first(lab: Any) -> None:
    lab.new_tokens.value = 200
    lab.go.click()
    (first,) = threads("kwflow-steer-lab")
    until(lambda: lab.ids is not None)
    assert not lab.stop.disabled
    lab.new_tokens.value = 6
    lab.go.click()
    lab.wait(30)
    until(lambda: not first.is_alive())
    assert lab.ids.shape == (2, 6) and "6 tokens in" in lab.status.value and lab.stop.disabled
    lab.new_tokens.value = 200
    lab.go.click()
    until(lambda: lab.ids is not None)
    lab.stop.click()
    lab.wait(10)
    assert re.search(r"stopped after \d+ tokens", lab.status.value) and lab.ids.shape[1] < 200
    assert lab.texts[0] in lab.baseline.value, "what was written stays"
    tiny.settle(lab.flow, [0, 0])


def test_a_step_that_hangs_is_stopped_too() -> None:
    swarm = here.HereSwarm(tiny.folder("llama"), [(0, tiny.LAYERS)])
    flow = swarm.flow()
    lab = kf.notebook.steer_lab(flow, V, prompt=PROMPT)
    lab.new_tokens.value = 200
    lab.go.click()
    until(lambda: lab.ids is not None)
    swarm.pause(0)  # and nobody else is there
    until(lambda: flow.peers.avoided(swarm.workers[0].peer))
    lab.stop.click()
    lab.wait(10)
    assert "stopped after" in lab.status.value
    swarm.resume(0)
    lab.close()
    flow.close()
    swarm.close()


def test_a_worker_that_dies_is_replaced_while_a_panel_writes() -> None:
    swarm = Swarm("llama", (0, 2), (2, tiny.LAYERS), (2, tiny.LAYERS))
    lab = kf.notebook.steer_lab(swarm.flow.options(push=False), V, prompt=PROMPT)
    lab.new_tokens.value = 12
    swarm.kill(1, after=5)
    lab.go.click()
    lab.wait(60)
    assert "12 tokens in" in lab.status.value and swarm.asked(1) >= 5 and swarm.asked(2)
    assert torch.equal(lab.ids[0], generated(lab)[0])
    lab.close()


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (lambda flow: kf.notebook.steer_lab(flow, {}), KwargError, "takes kf.steering vectors"),
        (lambda flow: kf.notebook.steer_lab(flow, {"v": random(HIDDEN)}), KwargError, "takes kf.steering vectors"),
        (lambda flow: kf.notebook.steer_lab(flow[1:], V), SpanError, "this flow has layers 1:4"),
        (lambda flow: kf.notebook.steer_lab(flow[:1], {"old": V}), SpanError, "'old' has layers [1, 3], the flow 0:1"),
    ],
)
def test_a_panel_refuses_what_does_not_fit(make: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=re.escape(said)):
        make(tiny.flow("llama"))


def test_a_panel_without_ipywidgets_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    found = builtins.__import__

    def absent(name: str, *args: Any) -> Any:
        if name == "ipywidgets":
            raise ImportError(name)
        return found(name, *args)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(UnsupportedError, match=re.escape("pip install 'kwflow[notebook]'")):
        kf.notebook.steer_lab(tiny.flow("llama"), V)


# ---------------------------------------------------------------- swarm_view


class Processes(here.HereSwarm):
    """What the panel needs of a local swarm, without processes."""

    model, closed = "llama", False

    def add(self, start: int, stop: int) -> Any:
        if stop > tiny.LAYERS or start >= stop:
            raise SpanError(f"no layers {start}:{stop}")
        return super().add(start, stop)

    def close(self) -> None:
        self.closed = True
        super().close()


@pytest.fixture
def swarm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr("kwflow.notebook.live.LOOK_SECONDS", 0.02)
    swarm = Processes(tiny.folder("llama"), [(0, 2), (2, 4)])
    yield swarm
    swarm.close()
    until(lambda: not threads("kwflow-swarm-view"))


def buttons(row: Any) -> dict[str, bool]:
    return {name: not getattr(row, name).disabled for name in ("pause", "resume", "kill")}


def test_a_view_follows_the_swarm_and_its_buttons_act(swarm: Any) -> None:
    flow = swarm.flow()
    view = kf.notebook.swarm_view(swarm, flow=flow)
    first, second = view.rows
    assert "alive, 0:2 of the next call" in first.map.value and "margin-left:50.00%" in second.map.value
    assert buttons(first) == {"pause": True, "resume": False, "kill": True}
    second.pause.click()
    assert swarm.workers[1].paused and "paused" in second.map.value
    assert buttons(second) == {"pause": False, "resume": True, "kill": True}
    second.resume.click()
    assert not swarm.workers[1].paused and "alive" in second.map.value
    swarm.pause(0)  # by hand
    until(lambda: "paused" in first.map.value)
    first.kill.click()
    assert "dead" in first.map.value and not any(buttons(first).values())
    assert "nobody serves layers 0:2" in view.lines.value
    view.start.value, view.stop.value = 0, 3
    view.add.click()
    view.wait(20)
    assert "the worker of layers 0:3 serves" in view.status.value and "alive" in view.rows[2].map.value
    assert "nobody serves" not in view.lines.value and not view.add.disabled
    assert all(word in page_of(view) for word in ("dead", "alive", "all layers"))
    view.start.value, view.stop.value = 3, 3
    view.add.click()
    view.wait(20)
    assert "failed" in view.status.value and "no layers 3:3" in view.status.value

    def without_a_word(start: int, stop: int) -> None:
        raise OSError

    swarm.add = without_a_word
    view.add.click()
    view.wait(20)
    assert "OSError()" in view.status.value and not view.add.disabled
    view.close()
    flow.close()


def test_a_view_goes_on_after_any_error(swarm: Any, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    view = kf.notebook.swarm_view(swarm, flow=swarm.flow())
    look, broken = view.look, list[int]()

    def breaks() -> None:
        if not broken:
            broken.append(1)
            raise ZeroDivisionError
        look()

    monkeypatch.setattr(view, "look", breaks)
    until(lambda: "tried again" in caplog.text)
    swarm.pause(0)
    until(lambda: "paused" in view.rows[0].map.value)
    view.close()


def test_a_view_ends_with_itself_and_with_its_swarm(swarm: Any) -> None:
    view = kf.notebook.swarm_view(swarm, flow=swarm.flow())
    view.close()
    until(lambda: not threads("kwflow-swarm-view"))
    kf.notebook.swarm_view(swarm, flow=swarm.flow()).box.close()  # as ipywidgets.Widget.close_all does
    until(lambda: not threads("kwflow-swarm-view"))
    other = kf.notebook.swarm_view(swarm, flow=swarm.flow())
    swarm.close()
    until(lambda: not threads("kwflow-swarm-view"))
    assert "the swarm is closed" in other.lines.value and other.flow is None
    assert not any(any(buttons(row).values()) for row in other.rows) and other.add.disabled
    other.close()


def test_a_view_does_not_keep_its_swarm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kwflow.notebook.live.LOOK_SECONDS", 0.02)
    swarm = Processes(tiny.folder("llama"), [(0, 4)])
    flow = tiny.flow("llama")
    view = kf.notebook.swarm_view(swarm, flow=flow)
    for worker in swarm.workers:
        worker.faulty.close()
    del worker, swarm
    gc.collect()
    until(lambda: not threads("kwflow-swarm-view"))
    assert "the swarm is closed" in view.lines.value and "dead" in view.rows[0].map.value
    view.close()


@pytest.mark.swarm
@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_view_of_real_processes() -> None:
    with kf.local_swarm(tiny.folder("llama"), workers=2) as swarm:
        flow = kf.connect(swarm.model, peers=swarm.peers)
        x = {"hidden": random(1, 5, HIDDEN)}
        expected = flow(**x)
        view = kf.notebook.swarm_view(swarm, flow=flow)
        view.start.value, view.stop.value = 1, 4
        view.add.click()
        view.wait(120)
        assert len(view.rows) == 3 and view.rows[2].map.value.count("alive") == 1, view.status.value
        until(lambda: len(flow.peers.known()) == 3)
        view.rows[0].pause.click()
        assert swarm.workers[0].paused and "paused" in view.rows[0].map.value
        view.rows[0].resume.click()
        view.rows[1].kill.click()
        assert not swarm.workers[1].alive and "dead" in view.rows[1].map.value
        assert torch.equal(flow(**x), expected), "by the worker that was added"
        until(lambda: "of the next call" in view.rows[2].map.value)
        flow.close()
        view.rows[2].kill.click()
        added = swarm.workers
    until(lambda: "the swarm is closed" in view.lines.value and not threads("kwflow-swarm-view"))
    assert not any(worker.alive for worker in added)
    view.close()


@pytest.mark.swarm
@pytest.mark.rest
@pytest.mark.timeout(180)
def test_a_worker_that_starts_while_its_swarm_is_closed_ends_too(monkeypatch: pytest.MonkeyPatch) -> None:
    swarm = kf.local_swarm(tiny.folder("llama"), workers=[(0, 4)])
    make, spawned = local.LocalWorker, list[Any]()
    monkeypatch.setattr(local, "LocalWorker", lambda *a: spawned.append(make(*a)) or spawned[-1])
    view = kf.notebook.swarm_view(swarm)
    view.add.click()
    until(lambda: spawned)
    swarm.close()
    view.wait(120)
    assert "failed" in view.status.value and not spawned[0].alive
    with pytest.raises(kf.errors.WorkerFailed, match="the swarm is closed"):
        swarm.add(0, 4)
    view.close()

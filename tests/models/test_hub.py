"""Models of a hub: a real huggingface_hub client against a hub's layout served on loopback."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from kwflow.errors import ModelError
from kwflow.models.ends import ModelEnds
from kwflow.models.files import hub
from kwflow.models.files.checkpoint import Checkpoint, find_model, layer_count, model_name, model_path
from kwflow.models.spans import load_span
from tests.doubles.hub_server import HubServer

LAYERS, TOKEN = 4, "hf_SecretOfTheTests"


def save(folder: Path, *, shards: bool = True, seed: int = 0, layers: int = LAYERS) -> Path:
    """A tiny llama: embeddings, final norm and head in the first shard, then a shard for each layer."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "vocab_size": 600}
    config = LlamaConfig(num_hidden_layers=layers, **sizes, bos_token_id=None, eos_token_id=None)
    model = AutoModelForCausalLM.from_config(config)
    folder.mkdir(parents=True)
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    (folder / "config.json").write_text(json.dumps({**config.to_dict(), "architectures": ["LlamaForCausalLM"]}))
    (folder / "generation_config.json").write_text("{}")
    if not shards:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    where = {name: int(name.split(".")[2]) + 1 if ".layers." in name else 0 for name in weights}
    files = [f"model-{number + 1:05}-of-{layers + 1:05}.safetensors" for number in range(layers + 1)]
    for number, file in enumerate(files):
        own = {name: weights[name] for name in weights if where[name] == number}
        save_file(own, folder / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: files[number] for name, number in where.items()}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("published") / "tiny")


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A hub, and huggingface_hub turned to it, with an empty cache and no token."""
    from huggingface_hub import close_session, constants

    with HubServer() as server:
        template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        for name, value in {
            "ENDPOINT": server.url,
            "HUGGINGFACE_CO_URL_TEMPLATE": template,
            "HF_URL_HOSTS": frozenset(),
            "HF_HUB_OFFLINE": False,
            "HF_HUB_CACHE": str(tmp_path / "hub"),
            "HF_TOKEN_PATH": str(tmp_path / "token"),
            "HF_STORED_TOKENS_PATH": str(tmp_path / "tokens"),
        }.items():
            monkeypatch.setattr(constants, name, value)
        for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("KWFLOW_CACHE", str(tmp_path / "kwflow"))
        hub._listed.cache_clear()
        close_session()
        yield server
        close_session()


def shard(number: int) -> str:
    return f"model-{number + 1:05}-of-{LAYERS + 1:05}.safetensors"


def downloaded(server: HubServer) -> list[str]:
    """The weight files that were fetched whole."""
    return sorted(path.rpartition("/")[2] for path in server.got("cdn"))


def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


# ---------------------------------------------------------------- what is fetched


def test_a_worker_fetches_the_shards_of_its_layers_and_a_client_those_of_its_ends(
    served: HubServer, published: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    served.add("user/tiny", published)
    spec = load_span("user/tiny", 1, 3)
    assert downloaded(served) == [shard(2), shard(3)]
    assert "downloading 2 files of user/tiny" in capsys.readouterr().err  # all at once, so that it says how much
    whole = load_span(published)
    assert spec.identity["checkpoint"] == whole.identity["checkpoint"]
    assert spec.identity["layers"] == whole.identity["layers"][1:3]
    heads = sum(one.host == "cdn" and bool(one.range) for one in served.asked)
    names = json.loads((published / "model.safetensors.index.json").read_text())["weight_map"].values()
    there = [name for name in names if name not in (shard(2), shard(3))]
    assert heads == len(there) + 2 * len(set(there))  # of each tensor one part, of each file the header in two

    served.asked.clear()
    ends = ModelEnds("user/tiny")
    assert downloaded(served) == [shard(0)]
    assert Checkpoint(ends.folder).checkpoint_id() == whole.identity["checkpoint"]
    assert not [one for one in served.asked if one.range], "the checkpoint id of a commit is made once"
    assert layer_count("user/tiny") == LAYERS
    assert model_name("user/tiny") == model_name(ends.folder) == "tiny"


def test_model_path_gives_a_whole_folder_and_the_second_time_asks_nothing(
    served: HubServer, published: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM

    commit = served.add("user/tiny", published)
    folder = model_path("user/tiny")
    assert downloaded(served) == [shard(number) for number in range(LAYERS + 1)]
    size = sum((published / shard(number)).stat().st_size for number in range(LAYERS + 1)) / 1e6
    assert f"downloading 5 files of user/tiny, {size:.1f} MB" in capsys.readouterr().err
    assert all((folder / shard(number)).is_symlink() for number in range(LAYERS + 1))  # as the hub's cache has them
    served.asked.clear()
    assert model_path("user/tiny") == model_path("user/tiny@main") == model_path(f"user/tiny@{commit}") == folder
    assert model_path(folder) == folder
    AutoModelForCausalLM.from_pretrained(folder)
    load_span("user/tiny")
    assert served.asked == []
    assert "downloading" not in capsys.readouterr().err


def test_a_single_file_is_fetched_when_it_is_read(served: HubServer, tmp_path: Path) -> None:
    served.add("user/one", save(tmp_path / "one", shards=False))
    find_model("user/one")
    assert layer_count("user/one") == LAYERS
    assert downloaded(served) == []
    load_span("user/one", 0, 1)
    assert downloaded(served) == ["model.safetensors"]


def test_a_revision_is_a_branch_a_pull_request_or_a_commit(served: HubServer, published: Path, tmp_path: Path) -> None:
    old = served.add("user/tiny", published, branches=("v1", "refs/pr/1"))
    served.add("user/tiny", save(tmp_path / "new", seed=1))
    folders = {name: find_model(f"user/tiny@{name}") for name in ("main", "v1", "refs/pr/1", old, old[:40])}
    assert folders["v1"] == folders["refs/pr/1"] == folders[old] != folders["main"]
    assert {model_name(f"user/tiny@{name}") for name in folders} == {"tiny"}
    with pytest.raises(ModelError, match=r"cannot get user/tiny@v9: it has no revision 'v9'"):
        find_model("user/tiny@v9")


def test_never_bin_never_code_and_nothing_of_other_formats(served: HubServer, published: Path, tmp_path: Path) -> None:
    mixed = tmp_path / "mixed"
    shutil.copytree(published, mixed)
    for extra in ("pytorch_model.bin", "consolidated.safetensors", "modeling.py", "onnx/model.safetensors", "a/b.json"):
        (mixed / extra).parent.mkdir(exist_ok=True)
        (mixed / extra).write_bytes(b"x")
    (mixed / "chat_template.jinja").write_text("{{ messages }}")
    served.add("user/mixed", mixed)
    here = {str(file.relative_to(model_path("user/mixed"))) for file in model_path("user/mixed").rglob("*")}
    assert here == {file.name for file in published.iterdir()} | {"chat_template.jinja"}


# ---------------------------------------------------------------- offline


def test_offline_what_is_cached_works_and_what_is_not_is_named(
    served: HubServer, published: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served.add("user/tiny", published)
    spec = load_span("user/tiny", 0, 1)
    offline(monkeypatch)
    served.asked.clear()
    again = load_span("user/tiny", 0, 1)
    assert again.identity == {**spec.identity, "bytes_read": again.identity["bytes_read"]}
    with pytest.raises(ModelError, match="HF_HUB_OFFLINE is set.*unset it once"):
        load_span("user/tiny", 0, 2)
    with pytest.raises(ModelError, match="HF_HUB_OFFLINE is set"):
        model_path("user/tiny")
    with pytest.raises(ModelError, match=r"cannot get user/other: HF_HUB_OFFLINE is set"):
        find_model("user/other")
    assert served.asked == []


def test_a_hub_that_is_down_does_not_matter_to_what_is_cached(served: HubServer, published: Path) -> None:
    served.add("user/tiny", published)
    load_span("user/tiny", 0, 1)
    served.status = 418
    load_span("user/tiny", 0, 1)
    with pytest.raises(ModelError, match="cannot get user/tiny.*status 418"):
        load_span("user/tiny", 1, 2)


def test_a_hub_that_does_not_answer_is_named_without_its_password(
    served: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://me:password@127.0.0.1:9")
    with pytest.raises(
        ModelError, match=r"the hub \(http://127\.0\.0\.1:9\) does not answer.*without a network, give"
    ) as raised:
        find_model("user/tiny")
    assert "password" not in str(raised.value)


def test_a_snapshot_that_another_tool_left_is_completed(served: HubServer, published: Path) -> None:
    from huggingface_hub import hf_hub_download

    served.add("user/tiny", published)
    hf_hub_download("user/tiny", "README.md" if (published / "README.md").exists() else "generation_config.json")
    folder = find_model("user/tiny")
    assert (folder / "config.json").is_file()
    (folder / "generation_config.json").unlink()  # huggingface_hub knows what the commit has
    assert (find_model("user/tiny") / "generation_config.json").is_file()


# ---------------------------------------------------------------- tokens


def test_a_private_repository_needs_its_token_which_nobody_else_sees(
    served: HubServer, published: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    served.add("user/private", published, token=TOKEN)
    with pytest.raises(ModelError, match=r"it is private: set HF_TOKEN.*no token was sent"):
        find_model("user/private")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(ModelError, match=r"it is private.*a token was sent") as raised:
        find_model("user/private")
    assert "hf_wrong" not in str(raised.value)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    load_span("user/private", 0, 1)
    assert {one.token for one in served.asked if one.host == "hub"} >= {TOKEN}
    assert {one.token for one in served.asked if one.host == "cdn"} == {""}
    kept = [file for file in Path(os.environ["KWFLOW_CACHE"]).parent.rglob("*") if file.is_file()]
    assert not [file for file in kept if TOKEN.encode() in file.read_bytes()]
    assert TOKEN not in "".join(capsys.readouterr())


def test_a_gated_repository_says_where_to_ask(served: HubServer, published: Path) -> None:
    served.add("user/gated", published, token=TOKEN, gated=True)
    with pytest.raises(ModelError, match="access on request"):
        find_model("user/gated")


def test_an_error_that_quotes_the_token_is_not_passed_on(served: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    import traceback

    import huggingface_hub

    def quotes(*_: object, local_files_only: bool, **__: object) -> str:
        raise (FileNotFoundError if local_files_only else ValueError)(f"illegal header value 'Bearer {TOKEN}'")

    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", quotes)
    with pytest.raises(ModelError, match=r"illegal header value 'Bearer \*\*\*'") as raised:
        find_model("user/tiny")
    assert TOKEN not in "".join(traceback.format_exception(raised.value))


# ---------------------------------------------------------------- what goes wrong


@pytest.mark.slow
def test_a_download_that_breaks_off_is_taken_up_where_it_was(
    served: HubServer, published: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)
    served.add("user/tiny", published)
    served.cuts[shard(1)] = 1
    spec = load_span("user/tiny", 0, 1)
    assert spec.identity["layers"] == load_span(published, 0, 1).identity["layers"]
    (again,) = [one for one in served.asked if one.path.endswith(shard(1)) and one.range.endswith("-")]
    half = (published / shard(1)).stat().st_size // 2
    assert again.range == f"bytes={half // 1000 * 1000}-"


@pytest.mark.slow
def test_a_download_that_cannot_end_leaves_nothing_torn(
    served: HubServer, published: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import time

    monkeypatch.setattr(time, "sleep", lambda seconds: None)  # between huggingface_hub's tries
    served.add("user/tiny", published)
    served.cuts[shard(1)] = 1000
    served.whole = True
    with pytest.raises(ModelError, match="cannot get user/tiny"):
        load_span("user/tiny", 0, 1)
    folder = find_model("user/tiny")
    assert not list(folder.glob("*.safetensors"))
    assert not list(folder.parents[1].rglob("*.incomplete"))
    served.cuts.clear()
    served.whole = False
    load_span("user/tiny", 0, 1)


def test_a_disk_without_room_is_refused_before_the_download(
    served: HubServer, published: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served.add("user/tiny", published)
    folder = find_model("user/tiny")
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(hub.shutil, "disk_usage", lambda _: usage(1 << 40, 1 << 40, hub.ROOM + 1000))
    with pytest.raises(ModelError, match=r"1 file of user/tiny, 0\.0 MB, do not fit into .* free.*HF_HOME"):
        load_span("user/tiny", 0, 1)
    assert downloaded(served) == []
    assert not list(folder.glob("*.safetensors"))


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("pytorch_model.bin", "never read"),
        ("model-q4.gguf", "one of its .gguf files"),
        ("x.txt", "no .safetensors file"),
    ],
)
def test_a_repository_without_safetensors_is_refused(served: HubServer, tmp_path: Path, file: str, said: str) -> None:
    folder = tmp_path / "other"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama", "num_hidden_layers": 2}')
    (folder / file).write_bytes(b"x")
    served.add("user/other", folder)
    with pytest.raises(ModelError, match=rf"user/other on the hub has .*{said}"):
        find_model("user/other")
    assert downloaded(served) == []


def test_an_index_that_names_absent_shards_is_refused(served: HubServer, published: Path, tmp_path: Path) -> None:
    torn = tmp_path / "torn"
    shutil.copytree(published, torn)
    (torn / shard(2)).unlink()
    served.add("user/torn", torn)
    with pytest.raises(ModelError, match=rf"names files that it does not have: {shard(2)}"):
        load_span("user/torn", 1, 2)


def test_a_hub_that_sends_no_parts_is_an_error_not_a_download(served: HubServer, published: Path) -> None:
    served.add("user/tiny", published)
    served.whole = True
    with pytest.raises(ModelError, match="does not send parts"):
        Checkpoint(find_model("user/tiny")).checkpoint_id()


@pytest.mark.slow
def test_nothing_is_written_into_a_folder_and_kwflows_cache_is_not_needed(
    served: HubServer, published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served.add("user/tiny", published)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KWFLOW_CACHE", str(tmp_path / "file"))  # where no folder can be made
    load_span("user/tiny", 0, 1)
    folder = find_model("user/tiny")
    before = {file: file.stat().st_mtime_ns for file in (folder, *folder.iterdir())}
    load_span(folder, 0, 1)
    assert {file: file.stat().st_mtime_ns for file in (folder, *folder.iterdir())} == before


def test_a_repository_without_config_or_that_is_none(served: HubServer, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "README.md").write_text("x")
    served.add("user/empty", tmp_path / "empty")
    with pytest.raises(ModelError, match=r"has no config\.json"):
        find_model("user/empty")
    with pytest.raises(ModelError, match=r"no folder 'user/absent' here, and no such repository"):
        find_model("user/absent")
    with pytest.raises(ModelError, match=r"Did you mean 'smollm2-135m'\?"):
        find_model("smollm2-135")


@pytest.mark.parametrize("name", ["a/b/c", "user/", "@main", "user/name@", "user/name@../../x", "user name", "-x/y"])
def test_what_is_no_hub_id_is_not_asked_for(served: HubServer, name: str) -> None:
    with pytest.raises(ModelError, match="no model folder at"):
        find_model(name)
    assert served.asked == []


# ---------------------------------------------------------------- its settings


@pytest.mark.slow
def test_huggingface_hubs_own_environment_is_what_counts(tmp_path: Path, published: Path) -> None:
    code = (
        "from kwflow.models.files.checkpoint import model_path\n"
        "try: print(model_path('user/private'))\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    with HubServer() as server:
        server.add("user/private", published, token=TOKEN)
        env = {**os.environ, "HF_ENDPOINT": server.url, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
        env["PYTHONPATH"] = str(Path(__file__).parents[2])

        def run(**more: str) -> str:
            done = subprocess.run(
                [sys.executable, "-c", code],
                env={**env, **more},
                capture_output=True,
                text=True,
                timeout=60,
                check=True,
            )
            assert TOKEN not in done.stdout + done.stderr
            return done.stdout

        assert "no token was sent" in run()
        folder = Path(run(HF_TOKEN=TOKEN).strip())
        assert folder.is_relative_to(tmp_path / "hub" / "models--user--private")
        server.asked.clear()
        assert run(HF_HUB_OFFLINE="1").strip() == str(folder)
        assert server.asked == []

"""The client's part of a model: tokenizer, embeddings, final norm and head, around a stand-in for the layers.

transformers' forward and generate run unchanged: the layer list holds one stand-in, which hands hidden to whatever
the bridge (a ContextVar) says: a flow, a session, or nothing at all (embed and head).
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from kwflow.errors import ModelError, ShapeError, UnsupportedError
from kwflow.kwargs.axes import describe
from kwflow.kwargs.tree import as_int
from kwflow.models.families import family_of
from kwflow.models.files.checkpoint import Checkpoint, model_name
from kwflow.models.layout import blank_inputs, replace_layers
from kwflow.models.spans import quiet, read_config, resolve_dtype, skeleton
from kwflow.models.weights import Sources, fill_buffers

Bridge = Callable[[Tensor, Mapping[str, Any]], Tensor]
_bridge: ContextVar[Bridge] = ContextVar("kwflow_bridge")


class ModelEnds:
    """Tokenizer, embeddings, final norm and head of a model: what a client holds. See ``kwflow.client.inputs.Ends``."""

    def __init__(
        self, model: str | os.PathLike[str], dtype: torch.dtype | str | None = None, shell: nn.Module | None = None
    ):
        config, self.folder = read_config(model)
        self.name = model_name(model)
        self.config, self.layers, self.hidden_size = config, config.num_hidden_layers, config.hidden_size
        family = family_of(config)
        self.learned, self.counts_mask = family.learned, family.counts_mask
        self.takes_positions = not family.positions
        self._list = family.layers
        self.shell: Any = load_shell(model, dtype) if shell is None else shell
        self.base: Any = getattr(self.shell, self.shell.base_model_prefix)
        self.dtype: torch.dtype = next(self.shell.parameters()).dtype
        self._tokenizer: Any = None

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer, padding on the left."""
        if self._tokenizer is None:
            from transformers import AutoTokenizer

            try:
                with quiet():
                    self._tokenizer = AutoTokenizer.from_pretrained(self.folder)
            except (OSError, ValueError, KeyError) as error:
                raise ModelError(
                    f"{self.folder} has no tokenizer that transformers reads; tokenizer.save_pretrained(folder) adds "
                    "one, and flow.inputs(ids) takes token ids (batch, seq)"
                ) from error
            self._tokenizer.padding_side = "left"  # whatever its folder says: what is generated follows the last column
            if self._tokenizer.pad_token is None:
                self._tokenizer.pad_token = self._tokenizer.eos_token
        return self._tokenizer

    def tokenize(self, texts: Sequence[str]) -> Mapping[str, Tensor]:
        return self.tokenizer(list(texts), return_tensors="pt", padding=True, padding_side="left")

    @property
    def layers_name(self) -> str:
        """The dotted name of the list of layers in the model: ``model.layers``, ``transformer.h``."""
        return f"{self.shell.base_model_prefix}.{self._list}"

    def embed(self, input_ids: Tensor, position_ids: Tensor | None = None, *, before: Tensor | None = None) -> Tensor:
        """``before`` (prefix, width): stands before each row as if it were tokens' embeddings; positions are of all."""
        seen: list[Tensor] = []

        def keep(hidden: Tensor, _: Mapping[str, Any]) -> Tensor:
            seen.append(hidden)
            return hidden

        positions = {"position_ids": position_ids} if self.learned and position_ids is not None else {}
        inputs: dict[str, Tensor] = {"input_ids": input_ids}
        if before is not None:
            tokens = self.base.get_input_embeddings()(input_ids)
            if before.shape[-1] != tokens.shape[-1]:
                raise ShapeError(f"{describe(before)} stands before embeddings of width {tokens.shape[-1]}")
            inputs = {"inputs_embeds": torch.cat([before.to(tokens.dtype).expand(len(tokens), -1, -1), tokens], 1)}
        with bridged(keep):
            self.base(**inputs, use_cache=False, **positions)
        return seen[0]

    def head(self, hidden: Tensor) -> Tensor:
        self.check_head()
        with bridged(lambda _, __: hidden):
            blank = blank_inputs(self.shell, hidden)
            return self.shell(inputs_embeds=blank, use_cache=False).logits

    def check_head(self) -> None:
        """Raise UnsupportedError if the checkpoint is one without a language-model head."""
        missing = [name for name, tensor in self.shell.named_parameters() if tensor.is_meta]
        if missing:
            raise UnsupportedError(f"{self.folder} has no tensor for {missing[0]!r} of {type(self.shell).__name__}")


def load_shell(model: str | os.PathLike[str], dtype: torch.dtype | str | None) -> Any:
    """The family's CausalLM with a stand-in for its layers: embeddings, final norm and head are read, frozen."""
    config, folder = read_config(model)
    family, target = family_of(config), resolve_dtype(dtype, config)
    layers, config.num_hidden_layers = config.num_hidden_layers, 1
    shell, checkpoint = skeleton(config, target), Checkpoint(folder)
    shell.config.num_hidden_layers = layers
    replace_layers(getattr(shell, shell.base_model_prefix), family, StandIns([StandIn(family.tuples)], layers))
    fill_buffers(shell, shell)
    tensors, _ = Sources(shell, checkpoint, target).read(lambda name: True)
    shell.load_state_dict(tensors, strict=False, assign=True)
    shell.tie_weights()
    base = getattr(shell, shell.base_model_prefix)
    missing = [name for name, tensor in [*base.named_parameters(), *base.named_buffers()] if tensor.is_meta]
    if missing:
        raise UnsupportedError(f"{folder} has no tensor for {missing[0]!r} of {type(shell).__name__}")
    return shell.requires_grad_(False).eval()


@contextmanager
def bridged(bridge: Bridge) -> Iterator[None]:
    """Within, the stand-in layer is ``bridge``."""
    token = _bridge.set(bridge)
    try:
        yield
    finally:
        _bridge.reset(token)


_REMOTE = "the layers are on the workers"
_INSTEAD = "edit= and steer= act there, and capture= or flow.capture brings back what they give"


class StandIns(nn.ModuleList):
    """The list of layers, which is one stand-in for all: whichever layer is asked for, it is the one."""

    def __init__(self, modules: Iterable[nn.Module] | None = None, layers: int = 1):
        super().__init__(modules)
        self.layers = layers

    def __getitem__(self, which: Any) -> Any:
        number = as_int(which)
        return super().__getitem__(0 if number is not None and -self.layers <= number < self.layers else which)


class StandIn(nn.Module):
    """The one module in the layer list, in place of all."""

    def __init__(self, tuples: bool):
        super().__init__()
        self.tuples = tuples

    def register_forward_hook(self, *_: Any, **__: Any) -> NoReturn:
        """A hook here would see what all layers together give, and nothing inside. Raises UnsupportedError."""
        raise UnsupportedError(f"{_REMOTE}, so hooks do not reach them: {_INSTEAD}")

    register_forward_pre_hook = register_full_backward_hook = register_forward_hook
    register_full_backward_pre_hook = register_forward_hook

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            raise AttributeError(f"no {name!r} here: {_REMOTE}, their modules too; {_INSTEAD}") from None

    def forward(self, hidden: Tensor, *_: Any, **kwargs: Any) -> Any:
        bridge = _bridge.get(None)
        if bridge is None:
            raise UnsupportedError(
                "the layers are on the workers: call the model itself, or flow(...), not its base model"
            )
        out = bridge(hidden, kwargs)
        return (out, None) if self.tuples else out


def shared(module: nn.Module, kind: type) -> Any:
    """A module of class ``kind`` with ``module``'s tensors and submodules; what is set on one is not on the other."""
    copied: Any = object.__new__(kind)
    copied.__dict__.update({k: copy.copy(v) if isinstance(v, dict) else v for k, v in vars(module).items()})
    return copied


def classifier(ends: ModelEnds, changes: Mapping[str, Any]) -> tuple[Any, list[str]]:
    """The family's ForSequenceClassification around the same base model, and what the checkpoint had no tensor for.

    Those are initialised as transformers initialises them, and trainable. ``changes``: of the config.
    """
    from transformers import AutoConfig, AutoModelForSequenceClassification

    config = AutoConfig.from_pretrained(ends.folder, **changes)
    with torch.device("meta"), quiet():
        model = AutoModelForSequenceClassification.from_config(config)
    setattr(model, model.base_model_prefix, ends.base)
    checkpoint = Checkpoint(ends.folder)
    heads = [name for name, tensor in model.named_parameters() if tensor.is_meta]
    tensors = checkpoint.read(set(heads) & set(checkpoint.names()), ends.dtype)
    for name, tensor in tensors.items():
        if tensor.shape != model.get_parameter(name).shape:
            raise ModelError(
                f"{name} of {ends.folder} is {tuple(tensor.shape)}; num_labels={config.num_labels} makes it "
                f"{tuple(model.get_parameter(name).shape)}"
            )
    model.load_state_dict(tensors, strict=False, assign=True)
    missing = [name for name in heads if name not in tensors]
    for owner in dict.fromkeys(name.rpartition(".")[0] for name in missing):
        module = model.get_submodule(owner).to(ends.dtype).to_empty(device="cpu", recurse=False)
        model._init_weights(module)
    model.eval().requires_grad_(False)
    for name in missing:
        model.get_parameter(name).requires_grad_(True)
    return model, missing


def layer_dropouts(config: Any) -> list[str]:
    """What a layer of the model drops out in training, as ``name p``; from the config, which may be changed."""
    values = config.to_dict()
    if not any("drop" in name and isinstance(p, float) and p > 0 for name, p in values.items()):
        return []
    model = skeleton(copy.deepcopy(config))
    layer = getattr(model, model.base_model_prefix).get_submodule(family_of(config).layers)[0]
    dropouts = []
    for name, module in layer.named_modules():
        attributes = {name: module.p} if isinstance(module, nn.Dropout) else vars(module)
        dropouts += [f"{n} {p}" for n, p in attributes.items() if "drop" in n and isinstance(p, float) and p > 0]
    return dropouts

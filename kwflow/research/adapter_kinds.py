"""What an adapter is, and the kinds that are no matrices: IA3, BEFT, prefix tuning and cartridges, prompt and P-tuning.

Each holds PEFT's tensors under PEFT's names, and gives them as kwargs of a call. See ``kwflow.research.adapters``; the
kinds that come to two narrow matrices are in ``kwflow.research.adapter_low_rank``.
"""

# L layers, P virtual tokens, D hidden, O out

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from kwflow.client.flow import Flow
from kwflow.client.inputs import token_ids
from kwflow.errors import ModelError, UnsupportedError
from kwflow.kwargs.axes import axes, describe
from kwflow.kwargs.bind import per_layer
from kwflow.kwargs.edit import Edit
from kwflow.research.edits import add
from kwflow.research.peft_files import PROMPTS, Saved, place, write_folder


class Adapter(Mapping[str, Any]):
    """One adapter: the kwargs of a call, made of tensors that may be trained.

        adapter = kf.adapters.read("my-lora").requires_grad_()
        loss(flow(**x, **adapter)).backward()
        torch.optim.AdamW(adapter.parameters())
        adapter.save("my-lora-further")

    ``tensors`` are PEFT's, by PEFT's names, ``config`` is what PEFT's adapter_config.json says.
    """

    kwarg: ClassVar[str]
    fixed: ClassVar[tuple[str, ...]] = ()  # names of tensors that are not trained

    def __init__(self, saved: Saved):
        self.where, self.config, self.tensors = saved.where, saved.config, saved.tensors

    __eq__ = object.__eq__  # Mapping would compare tensors
    __hash__ = object.__hash__  # type: ignore[assignment]

    def value(self) -> Any:
        """The kwarg's value, made anew of the tensors."""
        raise NotImplementedError

    def __getitem__(self, name: str) -> Any:
        if name != self.kwarg:
            raise KeyError(name)
        return self.value()

    def __iter__(self) -> Iterator[str]:
        return iter((self.kwarg,))

    def __len__(self) -> int:
        return 1

    def parameters(self) -> list[Tensor]:
        """The tensors that are trained, for an optimizer."""
        return [tensor for name, tensor in self.tensors.items() if name not in self.fixed]

    def requires_grad_(self, requires_grad: bool = True) -> Adapter:
        """Train the tensors, or no longer."""
        for tensor in self.parameters():
            tensor.requires_grad_(requires_grad)
        return self

    def delta_weights(self) -> dict[str, Tensor]:
        """What a merge would add to the base model's weights, by their names there; of what adds low-rank matrices."""
        raise UnsupportedError(f"{type(self).__name__} adds nothing to weights that could be said without having them")

    def save(self, folder: str | os.PathLike[str], base_model: str | None = None) -> None:
        """Write a folder that ``PeftModel.from_pretrained`` reads; ``base_model``: the name of the model it is for."""
        base = {} if base_model is None else {"base_model_name_or_path": base_model}
        write_folder(folder, {**self.config, **base, "inference_mode": True}, self.tensors)

    def __repr__(self) -> str:
        count = sum(tensor.numel() for tensor in self.tensors.values())
        dtypes = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in self.tensors.values()})
        return f"{type(self).__name__}({self._summary()}; {count:,} numbers of {', '.join(dtypes)}, from {self.where})"

    def _summary(self) -> str:
        raise NotImplementedError


class Projected(Adapter):
    """An adapter at projections of layers: ``modules`` by PEFT's name, with layer and projection."""

    suffixes: ClassVar[tuple[str, ...]]

    def __init__(self, saved: Saved):
        super().__init__(saved)
        names = [name for name in saved.tensors if name.endswith(self.suffixes)]
        if unknown := saved.tensors.keys() - set(names) - set(self.fixed):
            name = min(unknown)
            place(re.split(r"\.(?:lora|ia3|vera|hada|lokr|beft)_", name)[0], self.where)  # of an embedding it says so
            raise UnsupportedError(f"{self.where} holds {name!r}, which is not carried: {', '.join(self.suffixes)} are")
        modules = dict.fromkeys(name.removesuffix(end) for name in names for end in self.suffixes if name.endswith(end))
        if not modules:
            raise ModelError(f"{self.where} holds no tensor {' or '.join(self.suffixes)}")
        self.modules = {module: place(module, self.where) for module in modules}
        if len(lists := sorted({at.layers for at in self.modules.values()})) > 1:
            raise UnsupportedError(
                f"{self.where} adapts layers of {' and of '.join(map(repr, lists))}; a flow has one list"
            )
        for module in self.modules:
            if missing := self.missing(module):
                raise ModelError(f"{self.where} has no tensor {module + missing!r}")

    def missing(self, module: str) -> str | None:
        """The end of the name of a tensor that ``module`` must have and does not."""
        return next((end for end in self.suffixes if module + end not in self.tensors), None)

    def part(self, module: str) -> Any:
        """What one layer's kwarg has for the projection ``module``."""
        raise NotImplementedError

    def by_layer(self) -> dict[int, dict[str, Any]]:
        """The kwarg's parts by layer and projection."""
        parts: dict[int, dict[str, Any]] = {}
        for module, at in self.modules.items():
            parts.setdefault(at.layer, {})[at.projection] = self.part(module)
        return dict(sorted(parts.items()))

    def value(self) -> Any:
        return self.at_layers(at.layer for at in self.modules.values())[self.kwarg]

    def at_layers(self, layers: Iterable[int]) -> dict[str, Any]:
        """The kwargs of some layers, for a slice of a flow: ``flow[3:7](hidden, **adapter.at_layers(range(3, 7)))``."""
        chosen = set(layers)
        return per_layer({layer: {self.kwarg: value} for layer, value in self.by_layer().items() if layer in chosen})

    def _summary(self) -> str:
        layers = sorted({at.layer for at in self.modules.values()})
        whole = layers == list(range(layers[0], layers[-1] + 1))
        layers_text = f"{layers[0]}:{layers[-1] + 1}" if whole else ", ".join(map(str, layers))
        projections = dict.fromkeys(at.projection for at in self.modules.values())
        return f"{', '.join(projections)} of layers {layers_text}"


class IA3(Projected):
    """Vectors that multiply what projections give, or what feed-forward ones get (Liu et al. 2022): ``ia3``."""

    kwarg, suffixes = "ia3", (".ia3_l",)

    def part(self, module: str) -> Any:
        tensor = self.tensors[f"{module}.ia3_l"]
        if tensor.dim() != 2 or 1 not in tensor.shape:
            raise ModelError(f"{self.where}: {module}.ia3_l is {describe(tensor)}; PEFT's are (out, 1) or (1, in)")
        return axes(tensor.flatten(), "out" if tensor.shape[1] == 1 else "in")


class BEFT(Projected):
    """Biases added to what projections give (BEFT, arXiv:2509.15974): entries of ``edit``, behind ``lora`` and ``ia3``.

    With edits of your own: ``flow(**x, edit=[*adapter["edit"], kf.add(…)])``.
    """

    kwarg, suffixes = "edit", (".beft_bias",)

    def part(self, module: str) -> Tensor:
        tensor = self.tensors[f"{module}.beft_bias"]
        if tensor.dim() != 2 or len(tensor) != 1:
            raise ModelError(f"{self.where}: {module}.beft_bias is {describe(tensor)}; PEFT's are (1, out)")
        return tensor[0]

    def at_layers(self, layers: Iterable[int]) -> dict[str, list[Edit]]:
        chosen, biases = set(layers), dict[str, dict[int, Tensor]]()
        for layer, projections in self.by_layer().items():
            for projection, bias in projections.items():
                if layer in chosen:
                    biases.setdefault(projection, {})[layer] = bias
        return {"edit": [add(by_layer, point=f"{projection}.out") for projection, by_layer in biases.items()]}


class Prefix(Adapter):
    """Prefix tuning (Li & Liang 2021): keys and values before the first column: the kwarg ``prefix_kv``.

    Cartridges (Eyuboglu et al. 2025) are the same; of their first tokens, the frozen ones, no gradient is taken.

    Positions start behind them: ``x = flow.inputs(texts, prefix=adapter.length)``.
    """

    kwarg = "prefix_kv"

    def __init__(self, saved: Saved):
        super().__init__(saved)
        config, (self.length, width) = self.config, _prompts(saved)
        sizes: list[Any] = [config.get(name) for name in ("num_layers", "num_attention_heads", "token_dim")]
        layers, heads, token_dim = sizes if all(type(size) is int and size > 0 for size in sizes) else (0, 1, 0)
        self.layers: int = layers
        self.frozen: Any = config.get("num_frozen_tokens") or 0
        if type(self.frozen) is not int or not 0 <= self.frozen <= self.length:
            raise ModelError(f"{self.where}: num_frozen_tokens is {self.frozen!r:.40}, of {self.length} tokens")
        if not layers or token_dim % heads or width != 2 * layers * token_dim:
            raise ModelError(
                f"{self.where}: {PROMPTS} is {describe(self.tensors[PROMPTS])}, its config says num_layers, "
                f"num_attention_heads and token_dim {sizes}"
            )
        # what was projected is saved as what it projects to
        self.config = {**config, "prefix_projection": False} if "prefix_projection" in config else config

    def value(self) -> dict[str, Tensor]:
        heads, prompts = self.config["num_attention_heads"], self.tensors[PROMPTS]
        if self.frozen:
            prompts = torch.cat([prompts[: self.frozen].detach(), prompts[self.frozen :]])
        by_head = prompts.reshape(self.length, self.layers, 2, heads, -1)
        keys, values = by_head.permute(2, 1, 3, 0, 4)[:, :, None]  # layer, one row for all, head, token, head_dim
        return {"k": keys, "v": values}

    def _summary(self) -> str:
        return f"prefix of {self.length} keys and values at layers 0:{self.layers}"


class Prompt(Adapter):
    """Prompt tuning (Lester et al. 2021): vectors that stand before the text as if they were tokens' embeddings.

    P-tuning (Liu et al. 2021) is the same, as PEFT saves it: what its encoder made of them.

        x = adapter.inputs(flow, ["Hello", "The weather"])          # hidden has adapter.length columns more
        out = flow(**x)[:, adapter.length :]

    They are columns of their own and no kwarg of the blocks. A model does it in every call and in generate:
    ``model = kf.AutoDistributed….from_pretrained(path, tuning_mode="ptune", pre_seq_len=adapter.length)`` and
    ``model.prompt_embeddings.data.copy_(adapter.vectors)``.
    """

    kwarg = ""

    def __init__(self, saved: Saved):
        super().__init__(saved)
        self.length, _ = _prompts(saved)

    @property
    def vectors(self) -> Tensor:
        """(prefix, width of the embedding)"""
        return self.tensors[PROMPTS]

    def inputs(self, flow: Flow, texts: Any) -> dict[str, Tensor]:
        """What ``flow.inputs(texts)`` gives, with the vectors before each row, pads included."""
        ids, mask = token_ids(flow.ends, texts)
        mask = torch.cat([mask.new_ones(len(mask), self.length), mask], 1)
        positions = (mask.long().cumsum(-1) - 1).clamp(min=0)
        out = {"hidden": flow.ends.embed(ids, positions, before=self.vectors), "attention_mask": mask}
        return {**out, "position_ids": positions} if flow.ends.takes_positions else out

    def __iter__(self) -> Iterator[str]:
        raise UnsupportedError(
            "prompt tuning is columns before the text, and no kwarg of the blocks: x = adapter.inputs(flow, texts)"
        )

    def _summary(self) -> str:
        return f"{self.length} vectors before the text, by x = adapter.inputs(flow, texts)"


def _prompts(saved: Saved) -> tuple[int, int]:
    """Their number and width. Raises ModelError unless they are all that is there."""
    prompts = saved.tensors.get(PROMPTS)
    if len(saved.tensors) != 1 or prompts is None or prompts.dim() != 2:
        raise ModelError(f"{saved.where} holds {', '.join(saved.tensors) or 'nothing'}; expected one {PROMPTS}")
    tokens = saved.config.get("num_virtual_tokens")
    if tokens != len(prompts):
        raise ModelError(
            f"{saved.where}: {PROMPTS} is {describe(prompts)}, its config says num_virtual_tokens {tokens}"
        )
    return prompts.shape[0], prompts.shape[1]

"""A conversation over a kept session: a turn runs what is new, with the kwargs of the blocks that are given to it.

    chat = kf.chat(model)
    chat.turn("What is the capital of France?", max_new_tokens=40)        # the reply's text
    chat.turn("And of Italy?", steer={12: v}, max_new_tokens=40)          # what was said is not computed again
    chat.rollback()                                                       # as before the last turn

The text is what the model's chat template makes of the messages, each turn anew: what the session holds of other tokens
is cropped and run again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kwflow.client.flow import Flow
from kwflow.client.session import Session
from kwflow.errors import KwargError, ModelError, SessionError, SpanError
from kwflow.huggingface.auto import AutoDistributedModelForCausalLM
from kwflow.huggingface.distributed import columns_of
from kwflow.huggingface.generation import Generates
from kwflow.huggingface.remote_cache import RemoteCache
from kwflow.kwargs import prefix_kv
from kwflow.kwargs.tree import as_int
from kwflow.models.prepare import cache_argument

NEW_TOKENS = 256  # of a reply, where nobody says how long it may become
_OWN = ("input_ids", "inputs", "inputs_embeds", "attention_mask", "cache", "past_key_values", "return_dict_in_generate")
_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


class Chat:
    """Turns of a user and a model, made by ``kf.chat``; a context manager, which closes the session.

    ``messages``: what was said, as transformers' templates take it. ``session``: the one that holds it; its last token
    is run with the next turn. ``rerun``: how many columns that were held the last turn cropped and ran again, because
    the template writes them otherwise by now.
    """

    def __init__(self, model: Generates, template: str | None = None, system: str | None = None):
        self.model, self.template = model, template
        self.session: Session = model.flow.session()
        self.rerun = 0
        self._cropped = 0  # columns, by turns that failed
        self._messages = [] if system is None else [_message("system", system)]
        self._turns: list[tuple[int, Tensor | None]] = []  # messages and tokens before each

    @property
    def messages(self) -> list[dict[str, str]]:
        """``[{"role": "user", "content": …}, {"role": "assistant", "content": …}, …]``, a copy."""
        return [dict(message) for message in self._messages]

    def turn(self, text: str, **kwargs: Any) -> str:
        """Say ``text``; the reply's text.

        kwargs are those of ``model.generate``, and of the blocks: they act on the columns that this turn runs, which
        are the last reply's last token, ``text`` and the reply; those that are held stay as they were computed. 256 new
        tokens at most where nobody says (``max_new_tokens=``). A turn that fails, or is interrupted, did not happen;
        columns that it cropped, as the template writes them otherwise by now, the next one runs again.
        Raises KwargError for what the chat gives itself and for more than one row, and what ``generate`` raises.
        """
        messages = [*self._messages, _message("user", text)]
        settings = self._settings(kwargs)
        ids = self._ids(messages)
        before, cache = self.session.token_ids, RemoteCache(self.session, self.model.tuning.length)
        held, keep = cache.get_seq_length(), min(cache.common(ids), ids.shape[1] - 1)
        if held and not keep and self.session.prefix and not columns_of(prefix_kv.named(kwargs, len(self.model.flow))):
            raise SessionError(
                "the chat template writes this conversation otherwise from its first token on, and the prefix_kv "
                "before that came with an earlier turn: give it again, turn(…, prefix_kv=…)"
            )
        cache.crop(keep - held)
        self._cropped += held - keep
        name = cache_argument(self.model.forward)
        try:
            out = self.model.generate(ids, attention_mask=torch.ones_like(ids), **{name: self.session}, **settings)
            tokens = out if isinstance(out, Tensor) else out.sequences
            reply = self.model.flow.tokenizer.decode(tokens[0, ids.shape[1] :], skip_special_tokens=True)
        except BaseException:
            if not self.session.closed:
                cache.crop(min(0, keep - cache.get_seq_length()))
            raise
        self._turns.append((len(self._messages), before))
        self._messages = [*messages, _message("assistant", reply)]
        self.rerun, self._cropped = self._cropped, 0
        return reply

    def rollback(self, turns: int = 1) -> None:
        """Forget the last turns: messages and session are as before them. Raises KwargError where there are fewer."""
        count = as_int(turns)
        if count is None or not 0 <= count <= len(self._turns):
            raise KwargError(f"rollback({turns!r:.40}): this chat has {len(self._turns)} turns to forget")
        if not count:
            return
        messages, tokens = self._turns[-count]
        cache = RemoteCache(self.session, self.model.tuning.length)
        left = 0 if tokens is None else cache.common(tokens[:, self.model.tuning.length :])
        cache.crop(left - cache.get_seq_length())
        self._cropped = 0
        self._messages, self._turns = self._messages[:messages], self._turns[:-count]

    def close(self) -> None:
        """Free the keys and values on the workers. A closed chat takes no turn."""
        self.session.close()

    def __enter__(self) -> Chat:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Chat({len(self._turns)} turns, {self.session!r})"

    def _ids(self, messages: Sequence[Mapping[str, str]]) -> Tensor:
        """The whole conversation's tokens (1, seq), up to where the model's reply begins."""
        from jinja2 import TemplateError

        given = {"chat_template": self.template, "add_generation_prompt": True, "return_tensors": "pt"}
        try:
            ids = self.model.flow.tokenizer.apply_chat_template(messages, return_dict=True, **given)["input_ids"]
        except TemplateError as error:
            raise KwargError(f"the chat template does not take this conversation: {error}") from error
        if not ids.shape[-1]:
            raise KwargError("the chat template makes not one token of this conversation")
        return ids.long()

    def _settings(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """What generate is given. Raises KwargError for what a chat cannot take."""
        for name in _OWN:
            if name in kwargs:
                raise KwargError(f"turn({name}=…): the chat gives it itself, from its messages and its session")
        config = kwargs.get("generation_config") or self.model.generation_config  # type: ignore[attr-defined]
        for name in ("num_beams", "num_return_sequences"):
            if (kwargs.get(name, getattr(config, name, None)) or 1) != 1:
                raise KwargError(
                    f"turn({name}=…): a conversation has one row, and goes on with one reply; leave it out"
                )
        said = any(kwargs.get(name, getattr(config, name, None)) for name in ("max_new_tokens", "max_length"))
        return dict(kwargs) if said else {**kwargs, "max_new_tokens": NEW_TOKENS}


def chat(model: Generates | Flow, template: str | None = None, *, system: str | None = None) -> Chat:
    """Begin a conversation with a model over one session, as a ``Chat``; nothing is sent before its first turn.

    ``model``: a distributed causal language model, or a flow over all layers of one. ``template``: a chat template
    (Jinja) instead of the model's own. ``system``: the message that stands first.
    Raises ModelError where there is no template, SpanError for a flow over some layers, KwargError.
    """
    if isinstance(model, Flow):
        if model.span != (0, model.ends.layers):
            raise SpanError(f"kf.chat takes a flow over all {model.ends.layers} layers, this one has {model!r}")
        folder = getattr(model.ends, "folder", model.ends.name)
        model = AutoDistributedModelForCausalLM.from_pretrained(folder, flow=model)
    if not isinstance(model, Generates):
        raise KwargError(
            f"kf.chat takes what kf.AutoDistributedModelForCausalLM.from_pretrained or kf.connect returns, "
            f"got {type(model).__name__}"
        )
    if template is not None and not isinstance(template, str):
        raise KwargError(f"template is a {type(template).__name__}; give a chat template, the text of one in Jinja")
    if template is None and not model.flow.tokenizer.chat_template:
        raise ModelError(
            f"{model.flow.ends.name} has no chat template: give one, kf.chat(model, template=…), in Jinja, such as "
            f"{_TEMPLATE!r}; or load a model that was trained to chat"
        )
    return Chat(model, template, system)


def _message(role: str, text: str) -> dict[str, str]:
    if not isinstance(text, str):
        raise KwargError(f"the {role}'s message is a {type(text).__name__}; give its text")
    return {"role": role, "content": text}

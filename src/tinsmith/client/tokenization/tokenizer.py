"""A tokenizer with the interface of Hugging Face's.

Text to ids, ids to text, and conversations with the model's chat template.
`tokenization/tokenizer_handle.py` has the state that handles share, and the methods that change it.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tinsmith.client.tokenization.names import resolve
from tinsmith.client.tokenization.tokenizer_files import load_parts
from tinsmith.client.tokenization.tokenizer_handle import TokenizerHandle
from tinsmith.errors import ValidationError, shown

if TYPE_CHECKING:
    from tokenizers import Encoding
    from tokenizers import Tokenizer as Backend

import collections


class Encoded(collections.UserDict[str, Any]):
    """The result of calling a tokenizer: `input_ids` and `attention_mask`, also as attributes."""

    def __getattr__(self, name: str) -> Any:
        # Unpickling looks up attributes before `data` is set.
        data = self.__dict__.get("data", {})
        if name in data:
            return data[name]
        raise AttributeError(f"{name!r} is not among {', '.join(data)}")


def as_ids(ids: Any) -> list[int]:
    """Convert a list, an array, a tensor or a single id to a list of ids."""
    if hasattr(ids, "tolist"):
        ids = ids.tolist()
    return [ids] if isinstance(ids, int) else [int(number) for number in ids]


def as_tensor(rows: list[Any], kind: str) -> Any:
    """Convert rows of equal length to an array of numpy or a tensor of torch.

    Args:
        kind: `"np"` or `"pt"`.
    """
    if len({len(row) for row in rows}) > 1:
        raise ValidationError("rows differ in length", remedy="pass padding=True")
    if kind == "np":
        import numpy

        return numpy.array(rows, dtype=numpy.int64)
    if kind == "pt":
        import torch

        return torch.tensor(rows, dtype=torch.int64)
    raise ValidationError(f'return_tensors must be "np" or "pt", not {shown(kind)}')


UNKNOWN_LENGTH = 1 << 31
"""Lengths from here on mean "unknown": configurations use 1e30 for that."""


class Tokenizer(TokenizerHandle):
    """A tokenizer: `encode`, `decode`, `apply_chat_template` and related methods."""

    @classmethod
    def from_pretrained(cls, name: str, *, revision: str | None = None) -> Tokenizer:
        """Load a tokenizer by name or from a directory, as `load_tokenizer` does."""
        return cls(load_parts(resolve(name, revision=revision, kind="tokenizers")))

    def __repr__(self) -> str:
        return f"Tokenizer({self.name_or_path!r}, tokens={len(self)})"

    # Text to ids

    def encode(self, text: str, add_special_tokens: bool = True, **options: Any) -> list[int]:
        """Encode a text; `options` are those of calling the tokenizer."""
        if options:
            ids: list[int] = self(text, add_special_tokens=add_special_tokens, **options).input_ids
            return ids
        _check_text(text)
        return self.native().encode(text, add_special_tokens=add_special_tokens).ids

    def __call__(
        self,
        text: str | Sequence[str],
        *,
        add_special_tokens: bool = True,
        padding: bool | str = False,
        truncation: bool | None = None,
        max_length: int | None = None,
        return_tensors: str | None = None,
        return_offsets_mapping: bool = False,
    ) -> Encoded:
        """Encode one text, or many at once.

        Args:
            padding: `True` or `"longest"` pads to the longest text, `"max_length"` to that length.
            truncation: Truncate to `max_length`, including special tokens. None means to truncate
                if `max_length` is given and padding is off.
            max_length: By default the model's maximum length.
            return_tensors: `"np"` or `"pt"` for two-dimensional arrays instead of lists.
            return_offsets_mapping: Add `offset_mapping`, each token's span in the text.

        Raises:
            ValidationError: An input is not text, or padding is requested without a padding token.
        """
        texts = [text] if isinstance(text, str) else list(text)
        for each in texts:
            _check_text(each)
        own = self.model_max_length if self.model_max_length < UNKNOWN_LENGTH else None
        length = own if max_length is None else max_length
        if truncation is None:
            truncation = max_length is not None and padding is False
        limit = length if truncation else None
        rows = self._encode_all(texts, limit, add_special_tokens=add_special_tokens)
        self._pad(rows, padding, length)
        found: dict[str, list[Any]] = {
            "input_ids": [row.ids for row in rows],
            "attention_mask": [row.attention_mask for row in rows],
        }
        if return_offsets_mapping:
            found["offset_mapping"] = [row.offsets for row in rows]
        if return_tensors is not None:
            return Encoded({key: as_tensor(many, return_tensors) for key, many in found.items()})
        if isinstance(text, str):
            return Encoded({key: many[0] for key, many in found.items()})
        return Encoded(found)

    def tokenize(self, text: str, add_special_tokens: bool = False) -> list[str]:
        """Split a text into tokens, spelled as in the vocabulary."""
        _check_text(text)
        return self.native().encode(text, add_special_tokens=add_special_tokens).tokens

    def num_special_tokens_to_add(self) -> int:
        """The number of tokens that `add_special_tokens=True` adds to a text."""
        return self.native().num_special_tokens_to_add(False)

    # Ids to text

    def decode(
        self,
        token_ids: int | Iterable[int],
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,  # noqa: ARG002 - existing code passes it
    ) -> str:
        """Decode ids (a list, an array, a tensor, or one id) to text. Spaces are not cleaned up."""
        return self.native().decode(as_ids(token_ids), skip_special_tokens=skip_special_tokens)

    def batch_decode(
        self,
        sequences: Iterable[Iterable[int]],
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,  # noqa: ARG002 - as for decode
    ) -> list[str]:
        """Decode many lists of ids."""
        rows = [as_ids(sequence) for sequence in sequences]
        return self.native().decode_batch(rows, skip_special_tokens=skip_special_tokens)

    def convert_tokens_to_ids(self, tokens: str | Iterable[str]) -> Any:
        """The id of a token, or of each token in a list; `unk_token`'s for unknown tokens."""
        native, unknown = self.native(), self.unk_token_id
        if isinstance(tokens, str):
            number = native.token_to_id(tokens)
            return unknown if number is None else number
        return [self.convert_tokens_to_ids(token) for token in tokens]

    def convert_ids_to_tokens(
        self, ids: int | Iterable[int], skip_special_tokens: bool = False
    ) -> Any:
        """The token with this id, or a list of tokens for a list of ids."""
        native = self.native()
        if isinstance(ids, int):
            return native.id_to_token(ids)
        skipped = set(self.all_special_ids) if skip_special_tokens else set()
        return [native.id_to_token(number) for number in as_ids(ids) if number not in skipped]

    # Conversations

    def apply_chat_template(
        self,
        conversation: Sequence[Any],
        tools: Sequence[Any] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool | str = False,
        tokenize: bool = True,
        *,
        padding: bool | str = False,
        truncation: bool = False,
        max_length: int | None = None,
        return_tensors: str | None = None,
        return_dict: bool = False,
        **variables: Any,
    ) -> Any:
        """Render a conversation with the model's chat template.

        Args:
            conversation: Messages with `role` and `content`, or a list of such lists.
            tools: JSON schemas of the tools.
            chat_template: A template, or the name of one, to use instead of the default.
            add_generation_prompt: End with the header of the assistant's reply.
            continue_final_message: Leave the last message open, so that the model continues it.
            tokenize: Return ids instead of text.
            return_dict: Return `input_ids` and `attention_mask` instead of only the ids.
            variables: Further variables for the template, such as `enable_thinking`.

        Raises:
            ValidationError: There is no template, or it rejects the conversation.
        """
        if not conversation:
            raise ValidationError("the conversation is empty")
        chosen = self.get_chat_template(chat_template, tools)
        is_many = not isinstance(conversation[0], Mapping)
        texts = [
            _templates().render(
                chosen,
                messages,
                tools=tools,
                documents=documents,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                variables={**self.special_tokens_map, **variables},
            )
            for messages in (conversation if is_many else [conversation])
        ]
        if not tokenize:
            return texts if is_many else texts[0]
        # The template wrote the special tokens: adding them again would give a second BOS.
        encoded = self(
            texts if is_many else texts[0],
            add_special_tokens=False,
            padding=padding,
            truncation=truncation,
            max_length=max_length,
            return_tensors=return_tensors,
        )
        return encoded if return_dict else encoded.input_ids

    def get_chat_template(
        self, chat_template: str | None = None, tools: Sequence[Any] | None = None
    ) -> str:
        """The template that is used for a conversation with these tools."""
        templates = _templates()
        chosen: str = templates.choose(
            self.chat_template, chat_template, has_tools=tools is not None
        )
        return chosen

    # Internals

    def _encode_all(
        self, texts: list[str], limit: int | None, *, add_special_tokens: bool
    ) -> list[Encoding]:
        native = self.native()
        if limit is None:
            return self._encode_rows(native, texts, add_special_tokens=add_special_tokens)
        # Truncate before special tokens are added, so that they stay. Native truncation is a
        # setting of the shared tokenizer, and would affect other threads.
        room = limit - (native.num_special_tokens_to_add(False) if add_special_tokens else 0)
        rows = self._encode_rows(native, texts, add_special_tokens=False)
        for row in rows:
            row.truncate(max(room, 0), direction=self.truncation_side)
        return [native.post_process(row, None, add_special_tokens) for row in rows]

    @staticmethod
    def _encode_rows(
        native: Backend, texts: list[str], *, add_special_tokens: bool
    ) -> list[Encoding]:
        if len(texts) == 1:  # no native threads, which are unsafe with a later fork
            return [native.encode(texts[0], add_special_tokens=add_special_tokens)]
        return native.encode_batch(texts, add_special_tokens=add_special_tokens)

    def _pad(self, rows: list[Encoding], padding: bool | str, max_length: int | None) -> None:
        is_endless = padding == "max_length" and max_length is None
        if padding is False or padding == "do_not_pad" or not rows or is_endless:
            return
        number = self.pad_token_id
        if number is None or self.pad_token is None:
            raise ValidationError(
                "the tokenizer has no padding token",
                remedy="set tokenizer.pad_token = tokenizer.eos_token",
            )
        longest = max(len(row) for row in rows)
        length = max_length if padding == "max_length" and max_length is not None else longest
        for row in rows:
            row.pad(length, direction=self.padding_side, pad_id=number, pad_token=self.pad_token)


def _templates() -> types.ModuleType:
    """Import the chat template module, which requires jinja2."""
    try:
        from tinsmith.client.tokenization import chat_template
    except ImportError as exc:
        raise ImportError(
            "chat templates require jinja2: `pip install 'tinsmith[tokenizers]'`"
        ) from exc
    return chat_template


def _check_text(text: object) -> None:
    if not isinstance(text, str):
        raise ValidationError(f"a tokenizer encodes text, not {shown(text)}")

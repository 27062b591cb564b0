"""What a tokenizer's call gives back, and the forms in which ids come and go."""

from __future__ import annotations

import collections
from typing import Any

from tinsmith.errors import ValidationError, shown


class Encoded(collections.UserDict[str, Any]):
    """What a call of a tokenizer gives: `input_ids` and `attention_mask`, also as attributes."""

    def __getattr__(self, name: str) -> Any:
        # Unpickling asks for names before there is any data.
        data = self.__dict__.get("data", {})
        if name in data:
            return data[name]
        raise AttributeError(f"{name!r} is not among {', '.join(data)}")


def as_ids(ids: Any) -> list[int]:
    """Ids as a list, from a list, an array, a tensor or one id."""
    if hasattr(ids, "tolist"):
        ids = ids.tolist()
    return [ids] if isinstance(ids, int) else [int(number) for number in ids]


def as_tensor(rows: list[Any], kind: str) -> Any:
    """Rows of one length as an array of numpy or torch.

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
    raise ValidationError(f'return_tensors is "np" or "pt", not {shown(kind)}')

"""Validation of uploaded losses: every operation known, every value bounded.

A loss is untrusted data that an engine later runs on tensors. It is checked here node by node: its
arguments by `loss_arguments.py`, the results of its operations by `loss_sizes.py`, from the tables
of `types/loss_operations.py`. Nothing of it is run.

Knows nothing of torch, nor of how a loss is stored.
"""

from __future__ import annotations

import re
from typing import NoReturn

from tinsmith.errors import ValidationError, shown
from tinsmith.service.api.loss_arguments import TENSOR, ArgumentReader, Value, is_tensor
from tinsmith.service.api.loss_sizes import Operations
from tinsmith.types.loss_operations import INPUT_NAME, LOGPROBS, MAX_INPUTS, METRIC_NAME
from tinsmith.types.requests import CreateCustomLossRequest
from tinsmith.types.training import CustomLossGraph, CustomLossInput, CustomLossNode

MOST_NODES = 1000
MOST_METRICS = 32

_NODE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")


def check_custom_loss(request: CreateCustomLossRequest) -> None:
    """Check an uploaded loss in full.

    Raises:
        ValidationError: It breaks a rule; the message names the node and the rule.
    """
    _check_inputs(request.inputs)
    _Graph(request.inputs).check(request.graph)


def _check_inputs(inputs: list[CustomLossInput]) -> None:
    if not 1 <= len(inputs) <= MAX_INPUTS:
        raise ValidationError(f"inputs has {len(inputs)} entries; it must have 1 to {MAX_INPUTS}")
    names = [given.name for given in inputs]
    if names[0] != LOGPROBS:
        raise ValidationError(f"inputs[0] is {shown(names[0])}; the first input is {LOGPROBS!r}")
    if inputs[0].rank == 0:
        raise ValidationError(f"inputs[0] has rank 0; {LOGPROBS} has rank 1 or 2")
    for index, name in enumerate(names):
        if not INPUT_NAME.fullmatch(name):
            raise ValidationError(
                f"inputs[{index}] is called {shown(name)}",
                remedy="names have at most 64 lower-case letters, digits and underscores",
            )
        if name in names[:index]:
            raise ValidationError(f"inputs[{index}] has the name {name!r} of another input")


class _Graph:
    """One pass over the nodes of a loss."""

    def __init__(self, inputs: list[CustomLossInput]) -> None:
        self._waiting = [given.name for given in inputs]
        self._values: dict[str, Value] = {}
        self._node: CustomLossNode | None = None
        self._index = 0
        self._arguments = ArgumentReader(self._values, self._refuse)
        self._operations = Operations(self._refuse)

    def check(self, graph: CustomLossGraph) -> None:
        nodes = graph.nodes
        if not 1 <= len(nodes) <= MOST_NODES:
            raise ValidationError(
                f"graph.nodes has {len(nodes)} entries; it must have 1 to {MOST_NODES}"
            )
        for self._index, self._node in enumerate(nodes):
            if (self._node.op == "output") != (self._index == len(nodes) - 1):
                self._refuse("is out of place", "the output must be the last node, and only that")
            self._check_name(self._node.name)
            self._values[self._node.name] = self._value(self._node)

    # One node

    def _value(self, node: CustomLossNode) -> Value:
        if node.op == "output":
            return self._output(node)
        if node.op == "placeholder":
            return self._placeholder(node)
        if node.op not in ("call_function", "call_method"):
            self._refuse(f"has the op {node.op!r}", "only functions and methods are supported")
        args, kwargs = self._arguments.of(node)
        if node.op == "call_method":
            return self._operations.method(node.target, args, kwargs)
        return self._operations.function(node.target, args, kwargs)

    def _placeholder(self, node: CustomLossNode) -> Value:
        if not self._waiting or node.target != self._waiting[0]:
            wanted = repr(self._waiting[0]) if self._waiting else "no more inputs"
            self._refuse(f"is input {shown(node.target)}, but {wanted} was expected")
        if node.args or node.kwargs:
            self._refuse("is an input and has arguments", "inputs have no defaults")
        del self._waiting[0]
        return TENSOR

    def _output(self, node: CustomLossNode) -> Value:
        if self._waiting:
            self._refuse(f"is the output, and there was no node for {self._waiting[0]!r}")
        args, kwargs = self._arguments.of(node)
        returned = args[0] if len(args) == 1 and not kwargs else None
        if not isinstance(returned, tuple | list) or len(returned) != 2:
            self._refuse("must return (loss, metrics)")
        loss, metrics = returned
        if not is_tensor(loss):
            self._refuse("must return its loss as a tensor")
        if not isinstance(metrics, dict):
            self._refuse("must return its metrics as a dict")
        if len(metrics) > MOST_METRICS:
            self._refuse(f"has {len(metrics)} metrics; {MOST_METRICS} are allowed")
        for name, value in metrics.items():
            if not METRIC_NAME.fullmatch(name):
                self._refuse(
                    f"has a metric {shown(name)}",
                    "name it custom/<name>:sum or custom/<name>:mean, in lower case",
                )
            if not is_tensor(value):
                self._refuse(f"returns metric {shown(name)} that is not a tensor")
        return Value("constant")

    def _check_name(self, name: str) -> None:
        if not _NODE_NAME.fullmatch(name):
            self._refuse("has an invalid name", "use up to 128 letters, digits and underscores")
        if name in self._values:
            self._refuse("has the name of another node")

    def _refuse(self, why: str, remedy: str | None = None) -> NoReturn:
        assert self._node is not None
        raise ValidationError(
            f"graph.nodes[{self._index}] {shown(self._node.name)} {why}", remedy=remedy
        )

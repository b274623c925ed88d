"""Faults of a compiler and of what it compiles. In: a graph or a function. Out: the same with a fault."""

from collections.abc import Callable
from typing import Any

import torch


def _changed(graph: torch.fx.GraphModule, names: tuple[str, ...], change: Callable[[Any, Any], None]) -> None:
    for node in list(graph.graph.nodes):
        if str(node.target).rpartition(".")[2] in names or getattr(node.target, "__name__", "") in names:
            change(graph.graph, node)
    graph.recompile()


def _through(graph: Any, node: Any, method: str) -> None:
    """Let the users of a node see what a method makes of it."""
    with graph.inserting_after(node):
        other = graph.call_method(method, (node,))
    node.replace_all_uses_with(other, lambda user: user is not other)


def _made(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
    return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)


def no_gradient_of_a_part(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
    """A compiler that loses the gradient of what is written over a part."""

    def cut(nodes: Any, node: Any) -> None:
        with nodes.inserting_before(node):
            node.args = (node.args[0], nodes.call_method("detach", (node.args[1],)), *node.args[2:])

    _changed(graph, ("slice_scatter", "diagonal_scatter"), cut)
    return _made(graph, inputs)


def views_are_copies(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
    """A compiler that takes a view for a copy, so what is written to it is lost."""
    _changed(graph, ("narrow", "select"), lambda nodes, node: _through(nodes, node, "clone"))
    return _made(graph, inputs)


def skips_the_last(step: Callable[[], Any]) -> Callable[[], Any]:
    """An optimizer's step without its last tensor."""

    def without() -> Any:
        step.__self__.param_groups[0]["params"][-1].grad = None  # type: ignore[attr-defined]
        return step()

    return without

"""transformers: `attn_implementation="fusion"`, for models that are not compiled as a whole.

It compiles the function that a model's own file has for "eager" attention, with all that it contains (soft-caps, sinks,
position biases, groups of heads), and gives it the masks that eager attention has. Every model that can run its
attention in eager mode thus has it, with eager's results.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fusion.errors import IntegrationError, MissingPackageError
from fusion.options import Options
from fusion.torch_private import tensors

NAME = "fusion"
_EAGER = "eager_attention_forward"
_OURS = "_fusion_mask"
"""Attribute of a mask that `_mask` made: the version of the tensor, into which a model may write, and whether it is
causal and nothing else, which is then computed from positions and not read. At that version it holds two numbers."""


def register(options: Mapping[str, Any] | None = None) -> None:
    """Let models of transformers take `attn_implementation="fusion"`.

    options: of our backend; a second call replaces those of the first. Raises OptionError, and MissingPackageError
    without transformers.
    """
    Options.parse(options)
    attention, masks = _interfaces()
    attention.register(NAME, functools.partial(_attention, functools.cache(_compiler(dict(options or {})))))
    masks.register(NAME, _mask)


def unregister() -> None:
    """Undo `register`. Models that have it need another one before their next call (`set_attn_implementation`)."""
    for interface in _interfaces():
        interface._global_mapping.pop(NAME, None)


def _interfaces() -> tuple[Any, Any]:
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as problem:
        raise MissingPackageError(
            "fusion.integrations.transformers needs transformers 5 or later, which cannot be imported "
            f"({problem}); pip install transformers"
        ) from problem
    return AttentionInterface, AttentionMaskInterface


def _mask(*args: Any, allow_is_causal_skip: bool = True, **kwargs: Any) -> Tensor | None:
    """The mask that eager attention has, [B, 1, Nq, Nk]: 0 where a key is seen, the dtype's lowest number elsewhere.

    Models do with it what they do with eager's. One that is causal and nothing else, of square shape or for a single
    query, says so.
    """
    from transformers.masking_utils import eager_mask, sdpa_mask

    mask = eager_mask(*args, **kwargs)
    if mask is not None and not torch.compiler.is_compiling() and not mask.is_inference():
        causal = allow_is_causal_skip and sdpa_mask(*args, allow_is_causal_skip=True, **kwargs) is None
        setattr(mask, _OURS, (tensors.version(mask), causal))
    return mask


def _attention(
    compiled: Callable[[Any], Any],
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention function that transformers calls.

    query: [B, H, Nq, d].
    key, value: [B, G, Nk, d], G a divisor of H.
    attention_mask: of `_mask`, or the model's own.

    Returns [B, Nq, H, d_v], and weights if requested.
    """
    if kwargs.get("cache") is not None:
        raise IntegrationError(
            "attn_implementation='fusion' was called with a paged cache, which it does not write; use "
            "attn_implementation='sdpa' for continuous batching"
        )
    file, name = eager_of(type(module))
    eager = getattr(sys.modules[file], name)
    version, causal = getattr(attention_mask, _OURS, (None, False))
    ours = attention_mask is not None and version is not None and version == tensors.version(attention_mask)
    weighed = bool(kwargs.get("output_attentions"))
    run = _run if weighed or torch.compiler.is_compiling() else compiled(eager)
    mask = None if ours and causal else attention_mask
    return run(eager, module, query, key, value, mask, ours, weighed, kwargs)


@torch.compiler.assume_constant_result
def eager_of(kind: type) -> tuple[str, str]:
    """Function that a class of attention modules has for eager attention, the one that its `forward` names: its module
    and its name, which Dynamo can trace.

    Raises IntegrationError where there is none, or more than one.
    """
    forward = inspect.unwrap(kind.forward)
    names = [name for name in forward.__code__.co_names if name.endswith(_EAGER) and name in forward.__globals__]
    if len(names) != 1:
        raise IntegrationError(
            f"attn_implementation='fusion' was asked for in {kind.__module__}.{kind.__name__}, whose forward names "
            f"{len(names) or 'no'} functions for eager attention; use torch.compile(model, backend='fusion')"
        )
    return forward.__globals__["__name__"], names[0]


def _run(
    eager: Any,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    ours: bool,
    weighed: bool,
    kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention by the model's function. ours: whether the mask is `_mask`'s; None is then a causal one."""
    if ours and (mask is not None or query.shape[-2] > 1):
        keys = torch.arange(key.shape[-2], device=query.device)
        seen = keys <= keys[:, None] if mask is None else mask == 0
        zero = torch.zeros((), dtype=query.dtype if mask is None else mask.dtype, device=query.device)
        mask = torch.where(seen, zero, torch.finfo(zero.dtype).min)
    output, weights = eager(module, query, key, value, mask, **kwargs)
    return output, weights if weighed else None


def _compiler(options: dict[str, Any]) -> Callable[[Any], Any]:
    def compiled(eager: Callable[..., Any]) -> Callable[..., Any]:
        """`_run` for one function: with a separate code object, since Dynamo counts how often it compiles one."""
        own = types.FunctionType(_run.__code__.replace(), _run.__globals__, f"{eager.__module__}.{eager.__name__}")
        return torch.compile(own, backend="fusion", options=options)

    return compiled

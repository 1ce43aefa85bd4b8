"""Options of `torch.compile(model, backend="fusion", options={...})`."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args, get_origin, get_type_hints

from fusion.errors import OptionError
from fusion.ir.request import Approximation, Request

When = Literal["auto", "always", "never"]
Linear = Literal["auto", "always", "never", "packed"]
Approximate = Literal[None, "polynomial"]
Sequences = Literal["auto", "gather", "ring", "zigzag", "mesh", "all_to_all"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of one compilation.

    inner: what compiles the rest of the model: a backend of Dynamo, by the name that torch.compile knows or as a
        callable `(graph, example_inputs) -> callable`.
    emitter: what makes the kernels, by its name: "auto" takes the emitter of the device; "mlir" serves CPUs and
        "triton" GPUs; "reference" runs every fused attention in plain torch, which is slow and exists to tell an error
        of a kernel from one of the analysis. One that does not serve the device of an attention is an error.
    tile_maps: whether masks that are data (padding, document numbers, mask tensors) or that leave keys in several
        places (a window or the first keys) are searched for tiles that need not be computed: "auto" where that costs
        next to nothing by the cost model, "always", or "never".
    transforms: whether attention inside of `torch.func.jvp`, `grad` and their kin is fused: "auto" where kernels
        compute what is asked for, or where the table of scores that is not made is large; "always", or "never".
    training: whether attention with few scores is fused where it is trained on a CPU: "auto" where that is predicted to
        be as fast as code that stores the scores, for lengths that are fixed (docs/options.md), or "always"; "never"
        says that nothing is trained, although parameters require gradients.
    linear: whether products of float32 matrices on CPUs, as in linear layers, are computed by oneDNN: "auto" where that
        was measured to be faster than MKL on this processor (docs/linear.md), "always", or "never"; "packed" is "auto"
        with weights that are packed once in inference, and again when they change.
    autotune: measure a few tiles of each kernel at its first call (on CPUs in inference), and take the fastest from
        then on; `mode="max-autotune"` asks for it, too.
    strict: raise `StrictError` instead of leaving an attention unfused.
    verify: compare every attention with the graph's own operations on a sample of made-up values before it is put in
        place; one that differs is left as it was, with an error on the log, and one whose kernel is wrong on small
        made-up operands (docs/validation.md).
    approximate: allow this approximation of attention in inference, where it is certified from the data and predicted
        to be faster; exact otherwise. See docs/approximate.md.
    epsilon: the error of attention weights that it may have, relative to a row's sum; between 0 and 0.5.
    sequences: the schedule of DTensors whose sequence is sharded over processes (docs/sequences.md): "auto" for the one
        that is predicted to be fastest. Where one cannot run, "gather" does.
    reproducible: a row of an attention's result has the same bits whatever else is in the call, and on any number of
        threads and processes (docs/reproducible.md). Implies `strict`: what cannot be computed so is an error.
    """

    inner: str | Callable[..., Any] = "inductor"
    emitter: str = "auto"
    tile_maps: When = "auto"
    transforms: When = "auto"
    training: When = "auto"
    linear: Linear = "auto"
    autotune: bool = False
    strict: bool = False
    verify: bool = True
    approximate: Approximate = None
    epsilon: float = 1e-2
    sequences: Sequences = "auto"
    reproducible: bool = False

    @property
    def request(self) -> Request:
        """Request that the op passes to the emitter."""
        method = self.approximate
        allowed = None if method is None else Approximation(method=method, epsilon=float(self.epsilon))
        across = "gather" if self.reproducible and self.sequences == "auto" else self.sequences
        return Request(
            emitter=self.emitter, tuned=self.autotune, approximation=allowed, proved=self.verify, across=across
        )

    @classmethod
    def parse(cls, given: Mapping[str, Any] | None, mode: str | None = None) -> Options:
        """Options from the caller's dict, which is not changed.

        mode: that of torch.compile, which sets `autotune` where the dict does not.

        Raises `OptionError`, which names the valid options.
        """
        if str(mode).startswith("max-autotune"):
            given = {"autotune": True, **(given or {})}
        hints = get_type_hints(cls)
        known = [field.name for field in fields(cls)]
        for name, value in (given or {}).items():
            if name not in known:
                close = difflib.get_close_matches(name, known, 1)
                hint = f" Did you mean {close[0]!r}?" if close else ""
                raise OptionError(
                    f"unknown option {name!r} of backend 'fusion'.{hint} Valid options: {', '.join(known)}."
                )
            _check(name, value, hints[name])
            if name in _CHECKS:
                _CHECKS[name](value)
        result = cls(**(given or {}))
        return _reproducible(result) if result.reproducible else result


def _reproducible(options: Options) -> Options:
    """Options with what `reproducible` implies. Raises `OptionError` where another option contradicts it."""
    if options.approximate is not None:
        raise OptionError(
            f"option 'approximate' is {options.approximate!r} and 'reproducible' is set; whether an approximation is "
            "taken follows from all that is in a call: leave out one of them."
        )
    if options.sequences in ("ring", "zigzag", "mesh"):
        raise OptionError(
            f"option 'sequences' is {options.sequences!r} and 'reproducible' is set; a ring adds up results of each "
            "process's keys, whose bits follow from the number of processes: choose 'gather' or 'all_to_all'."
        )
    return replace(options, strict=True)


def _check(name: str, value: Any, hint: Any) -> None:
    if get_origin(hint) is Literal and value not in (choices := get_args(hint)):
        raise OptionError(f"option {name!r} is {value!r}; it must be one of {', '.join(map(repr, choices))}.")
    if hint is bool and not isinstance(value, bool):
        raise OptionError(f"option {name!r} is {value!r}; it must be True or False.")
    if hint is float and (isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 0.5):
        raise OptionError(f"option {name!r} is {value!r}; it must be a number above 0 and at most 0.5.")


def _check_emitter(value: Any) -> None:
    from fusion.codegen.emitter import names

    if value not in names():
        raise OptionError(f"option 'emitter' is {value!r}; it must be one of {', '.join(map(repr, names()))}.")


def _check_inner(value: Any) -> None:
    if callable(value) or value == "inductor":
        return
    from fusion.torch_private.dynamo import list_backends

    if value == "fusion" or value not in list_backends(None):
        names = ", ".join(repr(name) for name in list_backends() if name != "fusion")
        raise OptionError(
            f"option 'inner' is {value!r}; it must be 'eager', 'aot_eager', the name of another backend that "
            f"torch.compile knows ({names}) or a callable. Import the package of a backend that registers itself."
        )


_CHECKS = {"emitter": _check_emitter, "inner": _check_inner}

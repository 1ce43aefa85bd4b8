"""Build small `transformers` models whose attention is clearly not uniform."""

import contextlib
import copy
import math
import os
import warnings
from collections.abc import Callable

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "critical")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
import transformers
from torch import nn
from torch.overrides import TorchFunctionMode

from tests.models.shrink import shrink

transformers.logging.set_verbosity(50)
warnings.filterwarnings("ignore", module="transformers")
warnings.filterwarnings("ignore", module="torch")


@torch.no_grad()
def randomize(model: nn.Module, *, seed: int = 0, gain: float = 1.5) -> None:
    """Give every weight a size at which scores spread (their standard deviation is about gain^2) and biases matter."""
    generator = torch.Generator().manual_seed(seed)

    def noise(parameter: torch.Tensor) -> torch.Tensor:
        return torch.randn(parameter.shape, generator=generator)

    dense = (nn.Linear, nn.modules.conv._ConvNd)
    owned = {id(m.weight): m for m in model.modules() if isinstance(m, (*dense, nn.Embedding)) and m.weight is not None}
    done = set()
    for parameter in model.parameters():
        if id(parameter) in done or not parameter.is_floating_point():
            continue
        done.add(id(parameter))
        owner = owned.get(id(parameter))
        if isinstance(owner, dense):
            parameter.copy_(noise(parameter) * gain / math.sqrt(max(1, parameter[0].numel())))
        elif isinstance(owner, nn.Embedding):
            parameter.copy_(noise(parameter))
        elif parameter.dim() < 2:
            parameter.add_(0.1 * noise(parameter))
        else:
            parameter.add_(0.5 * noise(parameter))


def build(model_class: type, *, seed: int = 0, gain: float = 1.5, **overrides) -> nn.Module:
    """A small random model in eval mode, eager attention, float32; `overrides` are fields of its configuration."""
    config = shrink(model_class.config_class, **overrides)
    return from_config(model_class, config, seed=seed, gain=gain)


def from_config(model_class: type, config, *, seed: int = 0, gain: float = 1.5) -> nn.Module:
    """The model of `config`, random from `seed`."""
    config = copy.deepcopy(config)

    def make() -> nn.Module:
        if hasattr(model_class, "_from_config"):
            return model_class._from_config(config, attn_implementation="eager", dtype=torch.float32)
        return model_class(config)

    return random_model(make, seed=seed, gain=gain)


def random_model(make: Callable[[], nn.Module], *, seed: int = 0, gain: float = 1.5) -> nn.Module:
    """What `make` builds, in eval mode, its weights random from `seed`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = make()
    randomize(model, seed=seed, gain=gain)
    return model.eval().requires_grad_(False)


@torch.no_grad()
def settle(model: nn.Module, inputs: dict) -> None:
    """Give batch normalisations the statistics of what `inputs` bring them, as training would have.

    With the statistics that they start from they normalise nothing: activations grow from layer to layer until a score
    is so large that its rounding decides which key wins, and two correct runs differ.
    """
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.track_running_stats]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = 1.0
        norm.train()
    if norms:
        model(**inputs)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
        norm.eval()


def cast(inputs, dtype: torch.dtype):
    """Floating-point tensors in (nested) inputs, in `dtype`."""
    if isinstance(inputs, torch.Tensor):
        return inputs.to(dtype) if inputs.is_floating_point() else inputs
    if isinstance(inputs, dict):
        return {k: cast(v, dtype) for k, v in inputs.items()}
    if isinstance(inputs, (list, tuple)):
        return type(inputs)(cast(v, dtype) for v in inputs)
    return inputs


class InFloat64(TorchFunctionMode):
    """Makes casts to float32 that are written into a model casts to float64, so that a reference is one throughout."""

    _methods = {torch.Tensor.float: torch.Tensor.double}

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if function in self._methods:
            return self._methods[function](*args)
        wide = [torch.float64 if a is torch.float32 else a for a in args]
        kwargs = {k: torch.float64 if v is torch.float32 else v for k, v in kwargs.items()}
        return function(*wide, **kwargs)


@contextlib.contextmanager
def float64_everywhere():
    """Default dtype and hard-coded casts are float64 inside."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with InFloat64(), torch.autocast("cpu", enabled=False):
            yield
    finally:
        torch.set_default_dtype(before)


def in_float64(model: nn.Module) -> nn.Module:
    """A copy of `model` with its parameters in float64."""
    wide = copy.deepcopy(model).double()
    if hasattr(wide, "set_experts_implementation"):
        with contextlib.suppress(ValueError, NotImplementedError):
            wide.set_experts_implementation("batched_mm")  # grouped products refuse float64
    return wide


def reference(model: nn.Module, inputs: dict):
    """What `model` computes in float64, from the same weights and inputs."""
    wide = in_float64(model)
    with torch.no_grad(), float64_everywhere():
        return wide(**cast(inputs, torch.float64))


class Entropy(TorchFunctionMode):
    """Records how far the softmaxes of a run are from uniform: `shares` holds mean entropy / log(N) of each."""

    def __init__(self):
        super().__init__()
        self.shares: list[float] = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if getattr(function, "__name__", "") == "softmax" and result.dim() >= 3 and result.shape[-1] > 3:
            weights = result.detach().double()
            entropy = -(weights * weights.clamp_min(1e-30).log()).sum(-1)
            self.shares.append(float(entropy.mean() / math.log(result.shape[-1])))
        return result

"""Refusals: reasons why an attention is not fused, as data, with advice."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Reason(enum.Enum):
    """Closed list of reasons for refusing an attention; the value of each is its advice."""

    WEIGHTS_NEEDED = (
        "Use nothing elsewhere that is computed before the weights are complete: return the weights themselves, or "
        "turn that output off (output_attentions=False, need_weights=False)."
    )
    NOT_POINTWISE = (
        "The operation named here mixes scores of different keys or heads, works along another axis, or is not known. "
        "A pointwise one can be added (docs/extending.md). A threshold or a mask that is made of other scores is read "
        "as a tensor: compute it from a product of its own."
    )
    OTHER_SOFTMAX = (
        "A product of weights with weights, (a @ b) @ v, is two attentions as a @ (b @ v), which takes fewer "
        "operations, too. A softmax of a softmax, or over more than the keys, has no kernel."
    )
    OPAQUE = (
        "Fusing would lose its own backward, or its level of a transform. Under torch.no_grad a "
        "torch.autograd.Function is analysed. For training write it as ordinary operations, where these have the "
        "gradient that you want."
    )
    DISTANCES = (
        "Write the distance by a product: the square is |q|^2 + |k|^2 - 2 q @ k.T, of which a softmax over the keys "
        "ignores |q|^2. It rounds otherwise than the difference does."
    )
    HEADS_MIXED = (
        "On CPUs heads can be mixed once before the softmax and once after it, by a linear layer, a convolution of one "
        "element or an einsum with a matrix. Pointwise functions may stand before, between and after."
    )
    HEADS_COMBINED = (
        "A sum or mean of products over heads is one product of the heads side by side: q.transpose(1, 2).flatten(2), "
        "and k likewise. Another function over heads, such as a softmax, is another computation, and has no kernel."
    )
    NOT_LINEAR = (
        "Apply it before the softmax, or to the result of the product with V; products, masks and dropout may stay."
    )
    WEIGHTS_ADDED = "Multiply what is added with V separately and add the results: (w + a) @ v = w @ v + a @ v."
    WEIGHTS_REPLACED = "Set weights to zero only, or set scores before the softmax."
    MASKED_AFTER = (
        "Mask the scores with the same predicate before the softmax, or by a large finite number instead of -inf."
    )
    NAN_GRADIENT = (
        "In training, keep rows without a live key out of the softmax: mask them by a large finite number, or call "
        "scaled_dot_product_attention, which gives zeros and finite gradients."
    )
    SOFTMAX_BY_HAND = "Call torch.softmax, or subtract the row's maximum before the exponential."
    ADDED_TO_PRODUCT = "Add after the product: torch.bmm, then `+`."
    FURTHER_REDUCTION = (
        "Of other scores only what is computed outside and passed in as a tensor can be used, as the softmax ignores "
        "what is the same for all keys of a row."
    )
    COLUMN_OF_SCORES = "Columns concatenated to the scores may depend on the query, not on other scores."
    OTHER_NORMALISER = (
        "Write the normaliser as a softmax over the keys, or as exponentials divided by a function of their sum. "
        "Weights that are divided by a sum of themselves can be divided behind the product: "
        "(w @ v) / w.sum(-1, keepdim=True)."
    )
    NO_NORMALISER = (
        "Nothing: without anything between the two products, (q @ k.T) @ v is better computed as q @ (k.T @ v)."
    )
    CHANGED_IN_PLACE = "Move the in-place change behind the attention, or make it out of place (add instead of add_)."
    LAYOUT = "Materialise the tensor first (contiguous, or a clone), or reshape heads and rows separately."
    PRODUCT_FORM = (
        "Write the product with matrices, by torch.matmul or torch.bmm: with a vector, keep a dimension of size 1; add "
        "a bias after the product; split an einsum into products of two operands that each sum over one index."
    )
    DROPOUT = "Use torch.nn.functional.dropout with a probability that is a Python number."
    RUN_TIME_SCALAR = (
        "Make it a Python number, or a tensor: `x * tensor` can be read by the kernel, `x * tensor.item()` cannot."
    )
    DETACHED_MAXIMUM = "Detach the whole input of the maximum, or none of it."
    FIRST_MAXIMUM = "Take the maximum by amax, which shares the gradient among equal scores, or detach it."
    DTYPE = "Convert to float32, bfloat16 or float16 before the attention."
    TWO_ELEMENTS = "Compute the product once per element that enters the score."
    SIZE = "Compile with dynamic=False, or mark the dimension static (torch._dynamo.mark_static)."
    LIMIT = (
        "Analysis stops there so that its time stays proportional to the graph. Compute masks and positions that take "
        "more operations once, outside, and pass them in as a tensor."
    )
    NO_EMITTER = "Run on a CPU or a CUDA or ROCm device."
    NOT_INSTALLED = "Run `fusion doctor`: it says what to install."
    OTHER_MACHINE = "Plan for the processor that the model runs on."
    INDIRECT_COLUMN = "Gather the columns first, and multiply the result."
    TRANSFORM = "Compile the function inside the transform, not around it; write the change out of place."
    DERIVATIVES = (
        'Ask for it with options={"transforms": "always"}: memory is then linear in the length, and more time is taken.'
    )
    SHORT_TRAINING = (
        "This call records gradients. For inference call the model under torch.no_grad(), and fusion.explain likewise. "
        'To train such short texts by kernels set options={"training": "always"}: by default the inner compiler trains '
        "them on CPUs, for speed."
    )
    ONE_QUERY = (
        'Ask for it with options={"emitter": "mlir"}: by default one query over so few keys is left to the inner '
        "compiler on CPUs, for speed."
    )
    DISTRIBUTED_DROPOUT = "Leave that dropout out, or compile the attention on local tensors (use_local_output=True)."
    CONTEXT_PARALLEL = (
        "There it stays torch's own ring. Outside of it fusion.sequence_parallel, or DTensors whose shards follow each "
        "other, have kernels for sharded sequences (docs/sequences.md)."
    )
    OTHER_PROCESSES = "Compile on the processes of its mesh only."
    LOST_TENSOR = "Pass the tensor in as an argument, or register it as a buffer."
    NESTED = (
        "Make a new nested tensor instead of changing one in place, without holes; or pass values and offsets of the "
        "sequences to torch.nn.attention.varlen_attn, which is fused."
    )
    NOT_REPRODUCIBLE = (
        'Leave out options={"reproducible": True}, or compute this attention outside of what is compiled; '
        "docs/reproducible.md says what can be had."
    )
    HOOK = "Register the hook outside of what is compiled, or on a parameter."
    DEFECT = "This is a defect of fusion; please report it with the message and the model's code."


@dataclass(frozen=True, slots=True)
class Refusal:
    """Reason why an attention is not fused. kind: the class of the reason, which has the advice. message: the obstacle,
    in the user's terms."""

    kind: Reason
    message: str

    def __str__(self) -> str:
        return self.message

    @property
    def advice(self) -> str:
        """Change of the model or the options that would make the attention fusable."""
        return self.kind.value

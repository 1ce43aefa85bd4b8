"""What would make an attention fusable, for every reason that the analysis gives."""

from __future__ import annotations

import re

#: (beginning of the reason, as a regular expression; what to do)
_ADVICE: tuple[tuple[str, str], ...] = (
    (r"the attention weights are needed elsewhere",
     "Let nothing but the product with V use the weights: do not return them (output_attentions=False, "
     "need_weights=False, or compile the function without that output)."),
    (r"the softmax is not of a pointwise function of a product|the weights do not come from a product",
     "The operation named here mixes scores of different keys or heads, works along another axis, or is not known. If "
     "it is meant, this is another computation than attention and stays as it is; if it is pointwise, it can be added "
     "(docs/extending.md)."),
    (r"the softmax is followed by an operation that is not linear",
     "Apply it before the softmax, or to the result of the product with V; products, masks and dropout may stay."),
    (r"something independent of the softmax is added",
     "Multiply what is added with V separately and add the results: (w + a) @ v = w @ v + a @ v."),
    (r"something independent of the softmax takes the place",
     "Set weights to zero only, or set scores before the softmax."),
    (r"the weights are masked after the softmax",
     "Mask the scores with the same predicate before the softmax, or by a large finite number instead of -inf."),
    (r"a softmax by hand", "Call torch.softmax, or subtract the row's maximum before the exponential."),
    (r"the product with V is added", "Add after the product: torch.bmm, then `+`."),
    (r"the scores of the softmax contain another reduction|the result is scaled by another reduction",
     "Scores that are themselves normalised over the keys need two passes; take that reduction out of the scores."),
    (r"a further column of the softmax depends on the scores",
     "Columns concatenated to the scores may depend on the query, not on other scores."),
    (r"the weights are normalised in a way that is not a softmax",
     "Write the normaliser as a softmax over the keys, or as exponentials divided by a function of their sum."),
    (r"there is no normaliser",
     "Nothing: without anything between the two products, (q @ k.T) @ v is better computed as q @ (k.T @ v)."),
    (r"a tensor that the attention reads is changed in place",
     "Move the in-place change behind the attention, or make it out of place (add instead of add_)."),
    (r"an operand of the product is indexed in a way that is not linear|a reshape from|a dimension or step"
     r"|a slice whose|a roll over|an index that may be negative",
     "Make the tensor first (contiguous, or a clone) and multiply that, or reshape heads and rows apart from each "
     "other."),
    (r"a product with a vector", "Write the product with matrices: keep a dimension of size 1."),
    (r"an einsum of|the einsum", "Split the einsum into products of two operands that each sum over one index."),
    (r"dropout of a kind", "Use torch.nn.functional.dropout with a probability that is a Python number."),
    (r"a scalar that is computed at run time|a scale or head dimension|a .* that is known only at run time",
     "Make it a Python number, or a tensor: `x * tensor` can be read by the kernel, `x * tensor.item()` cannot."),
    (r"a normaliser that depends on the row's maximum",
     "Subtract the maximum without detaching it; softmax's gradient does not depend on it."),
    (r"attention over .* tensors|values of dtype|operand .* has dtype|the output has dtype|.*; kernels take",
     "Convert to float32, bfloat16 or float16 before the attention."),
    (r"two products to which something is added", "Add after one of the products: torch.bmm, then `+`."),
    (r"two different elements of one product", "Compute the product once per element that enters the score."),
    (r"a size (that|written)|the size|a result whose strides",
     "Compile with dynamic=False, or mark the dimension static (torch._dynamo.mark_static)."),
    (r"vmap", "Write the mapped function with broadcasting."),
    (r"there is no emitter for device", "Run on a CPU or a CUDA or ROCm device."),
    (r"torch-mlir|triton cannot|torch's OpenMP", "Run `fusion doctor`: it says what to install."),
    (r".* is not a CPU", "Plan for the processor that the model runs on."),
    (r"its kernel could not be built", "This is a defect of ours; please report it with the message."),
    (r"a column of Q, K or V is itself read", "Gather the columns first, and multiply the result."),
    (r"the graph calls a torch.autograd.Function",
     "Run under torch.no_grad() for inference, or write the function so that autograd derives it."),
    (r"a function transform of torch.func", "Compile the function inside the transform, not around it."),
    (r"dropout on the weights of DTensors",
     "Leave that dropout out, or compile the attention on local tensors (use_local_output=True)."),
    (r".* is a DTensor of other processes", "Compile on the processes of its mesh only."),
    (r"a (checkpointed part|conversion of a DTensor) outside of a trace",
     "This is a defect of ours; please report it with the model's code."),
    (r"the trace lost sight", "Pass the tensor in as an argument, or register it as a buffer."),
)  # fmt: skip


def advice(reason: str) -> str | None:
    """What to do about a reason, or None where there is nothing to say beyond it."""
    return next((text for pattern, text in _ADVICE if re.match(pattern, reason)), None)

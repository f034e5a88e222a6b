"""Log-probabilities of chosen tokens."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from . import checks
from .backends import BACKENDS
from .backends.operators import ops
from .backends.operators.registry import lead_to


def token_logprobs(
    logits: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    valid_vocab: int | None = None,
    mask: Tensor | None = None,
    ignore_index: int = -100,
    with_entropy: bool = False,
    vocab_group: ProcessGroup | None = None,
    vocab_start: int | None = None,
    inplace: bool = False,
    validate: bool | None = None,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """log softmax(transform(logits))[target], and optionally the entropy of that distribution.

    transform: x·logit_scale, then softcap·tanh(x/softcap), then x/temperature. Both outputs are differentiable with
    respect to the logits. [..., V] is read once forward; backward reads it once more and writes the gradient.

    Args:
        logits: [..., V] float32, bfloat16, float16 (float64 with the PyTorch path), any strides.
        targets: [...] int32 or int64, token ids; ignore_index counts as masked.
        temperature, softcap, logit_scale: > 0; softcap None: none.
        valid_vocab: columns from here on are padding and not part of the distribution; None: all V are valid.
        mask: [...] bool (or numbers, non-zero keeps); masked tokens give 0, gradient exactly 0, and may hold anything.
        with_entropy: also return the entropy, in nats.
        vocab_group: processes that the vocabulary is spread over; `logits` are then this process's columns, targets
            and results are the same on all of them, and a target that nobody has gives NaN.
        vocab_start: token of this process's first column. None: the columns of the ranks before, whose numbers the
            processes tell each other in each call; to be given under torch.compile.
        inplace: let the backward pass overwrite `logits` with their gradient. Only when nothing else reads them
            afterwards (autograd raises where it would), they need no copy to become 3-dimensional, and no two of
            them share memory.
        validate: check that targets are in range (a host synchronisation on accelerators). None: on the PyTorch path
            only. Unchecked out-of-range targets give NaN on Triton.
        backend: "auto", "torch" or "triton".

    Returns:
        logp [...] in float32 (float64 for float64 logits), or (logp, entropy). A target whose logit is -inf gives
        -inf and no gradient.

    Raises:
        TypeError, ValueError: an argument of a wrong type, shape, device or range, named.
        RuntimeError: a backend that was asked for and cannot run here.
    """
    checks.floating("logits", logits)
    checks.integer("targets", targets)
    if logits.dim() < 1 or logits.shape[-1] < 1:
        raise ValueError(f"logits must be [..., V] with V >= 1, got {list(logits.shape)}")
    lead, vocab = logits.shape[:-1], logits.shape[-1]
    checks.same_shape("targets", targets, lead, "logits without the last dimension")
    checks.same_device("targets", targets, logits.device, "logits")
    if mask is not None:
        mask = checks.as_mask("mask", mask, lead, logits.device, "targets")
    checks.one_of("backend", backend, BACKENDS)
    settings = checks.transform(
        vocab,
        logit_scale,
        softcap,
        temperature,
        valid_vocab,
        ignore_index,
        vocab_group,
        vocab_start,
        logits.device,
    )

    rows, shape = as_batch(logits, inplace), batch_shape(lead)
    logp, entropy, _, _ = ops.token_logprobs(
        rows,
        targets.reshape(shape),
        None if mask is None else mask.reshape(shape),
        *settings,
        with_entropy,
        inplace,
        validate,
        backend,
    )
    lead_to(logp, rows)
    if with_entropy:
        return logp.reshape(lead), entropy.reshape(lead)
    return logp.reshape(lead)


def linear_token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    valid_vocab: int | None = None,
    mask: Tensor | None = None,
    ignore_index: int = -100,
    with_entropy: bool = False,
    vocab_group: ProcessGroup | None = None,
    vocab_start: int | None = None,
    chunk_rows: int | None = None,
    validate: bool | None = None,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """token_logprobs of the logits hidden·weightᵀ + bias, which never exist in full.

    Masked tokens enter no matmul. Differentiable by hidden, weight and bias; the backward pass makes the logits again,
    a chunk at a time, for tokens that have an upstream gradient. Where no gradient is wanted, Triton multiplies in a
    kernel of its own that writes no logits; a weight that tensor descriptors cannot read (rows or address not
    multiples of 16 bytes) goes the way of the chunks.

    Args:
        hidden: [..., H] float32, bfloat16, float16 (float64 with the PyTorch path).
        weight: [V, H] of the same dtype, the lm_head (or tied embedding). bias: [V] or None.
        targets: [...] int32 or int64.
        chunk_rows: tokens whose logits exist at once, at most; None: 256 on the CPU, 2048 elsewhere, or up to a quarter
            more where that saves a chunk.
        vocab_group, vocab_start: as in token_logprobs, for the rows of weight; the gradient of hidden is summed over
            the processes.
        temperature, softcap, logit_scale, valid_vocab, mask, ignore_index, with_entropy, validate, backend: as in
            token_logprobs.

    Returns:
        logp [...] in float32 (float64 for float64), or (logp, entropy).

    Raises:
        TypeError, ValueError: an argument of a wrong type, shape, device or range, named.
        RuntimeError: a backend that was asked for and cannot run here.
    """
    hidden, weight, bias, lead = checks.lm_head(hidden, weight, bias, targets)
    if mask is not None:
        mask = checks.as_mask("mask", mask, lead, hidden.device, "targets").reshape(-1)
    checks.one_of("backend", backend, BACKENDS)
    settings = checks.transform(
        weight.shape[0],
        logit_scale,
        softcap,
        temperature,
        valid_vocab,
        ignore_index,
        vocab_group,
        vocab_start,
        hidden.device,
    )
    checks.chunk_rows(chunk_rows)
    wants = (x is not None and x.requires_grad for x in (hidden, weight, bias))
    logp, entropy, _, _ = ops.linear_token_logprobs(
        hidden,
        weight,
        bias,
        targets.reshape(-1),
        mask,
        *settings,
        with_entropy,
        torch.is_grad_enabled() and any(wants),
        validate,
        chunk_rows,
        backend,
    )
    lead_to(logp, hidden, weight, bias)
    if with_entropy:
        return logp.reshape(lead), entropy.reshape(lead)
    return logp.reshape(lead)


def batch_shape(lead: torch.Size) -> tuple[int, int]:
    """[...] as [B, L]: slices like logits[:, :-1] keep their two strides and are never copied."""
    if len(lead) == 0:
        return 1, 1
    if len(lead) == 1:
        return 1, lead[0]
    return lead[:-1].numel(), lead[-1]


def as_batch(logits: Tensor, inplace: bool) -> Tensor:
    """Logits [..., V] as [B, L, V], a view if inplace."""
    shape = (*batch_shape(logits.shape[:-1]), logits.shape[-1])
    if not inplace:
        return logits.reshape(shape)
    if _may_overlap(logits):
        raise ValueError(
            f"inplace=True needs logits whose elements each have memory of their own; shape {list(logits.shape)} with "
            f"strides {list(logits.stride())} (expanded, or a sliding window) has not"
        )
    try:
        return logits.view(shape)
    except RuntimeError as error:
        raise ValueError(
            f"inplace=True needs logits that can be viewed as [B, L, V]; shape {list(logits.shape)} with strides "
            f"{list(logits.stride())} would have to be copied"
        ) from error


def _may_overlap(x: Tensor) -> bool:
    """Whether two elements can lie at one address: unless each stride steps over all that the smaller ones reach."""
    if x.numel() == 0:
        return False
    reach = 0
    dims = [i for i in range(x.dim()) if x.shape[i] > 1]
    while dims:
        # By hand, since torch.compile cannot sort sizes that it does not know.
        smallest = dims[0]
        for i in dims[1:]:
            if x.stride(i) < x.stride(smallest):
                smallest = i
        if x.stride(smallest) <= reach:
            return True
        reach += (x.shape[smallest] - 1) * x.stride(smallest)
        dims.remove(smallest)
    return False

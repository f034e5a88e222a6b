"""token_logprobs against its float64 reference: values and gradients, over what users and models do to logits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numerics import EPS, assert_close, assert_rows_close

from rspo_kernels import reference, token_logprobs

# 1 and 7: less than any vector; 64, 128: whole tiles; 127, 129: one off; 257, 1000: several small blocks and a tail.
VOCABS = (1, 2, 7, 64, 127, 128, 129, 257, 1000)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@st.composite
def problems(draw: st.DrawFn) -> dict:
    """Logits, targets and everything that can be asked of the op."""
    seed = draw(st.integers(0, 2**31))
    rng = torch.Generator().manual_seed(seed)
    vocab = draw(st.sampled_from(VOCABS))
    lead = draw(st.sampled_from([(1,), (5,), (2, 3), (3, 1), (2, 2, 2)]))
    dtype = draw(st.sampled_from(DTYPES))
    spread = draw(st.sampled_from([1.0, 10.0, 100.0]))
    logits = torch.randn(*lead, vocab, generator=rng) * spread
    if draw(st.booleans()):
        share = draw(st.sampled_from([0.1, 0.9, 1.0]))
        logits[torch.rand(logits.shape, generator=rng) < share] = -torch.inf
    valid = draw(st.sampled_from([None, max(1, vocab - 1), max(1, vocab // 2)]))
    targets = torch.randint(0, valid or vocab, lead, generator=rng)
    targets = targets.to(draw(st.sampled_from([torch.int64, torch.int32])))
    mask = None
    if draw(st.booleans()):
        mask = torch.rand(lead, generator=rng) < draw(st.sampled_from([0.0, 0.5]))
    if draw(st.booleans()):
        targets[torch.rand(lead, generator=rng) < 0.3] = -100
    return {
        "logits": logits.to(dtype),
        "targets": targets,
        "mask": mask,
        "grad_logp": torch.randn(lead, generator=rng) * (torch.rand(lead, generator=rng) < 0.8),
        "grad_entropy": torch.randn(lead, generator=rng) if draw(st.booleans()) else None,
        "options": {
            "temperature": draw(st.sampled_from([1.0, 0.4, 3.0])),
            "softcap": draw(st.sampled_from([None, None, 1.0, 30.0])),
            "logit_scale": draw(st.sampled_from([1.0, 0.25])),
            "valid_vocab": valid,
        },
    }


def run(op, logits, problem, device="cpu", **extra):
    """Values and the gradient of the logits under the problem's upstream gradients."""
    logits = logits.to(device).detach().requires_grad_()
    mask = problem["mask"]
    logp, entropy = op(
        logits,
        problem["targets"].to(device),
        mask=None if mask is None else mask.to(device),
        **problem["options"],
        **extra,
    )
    total = (logp.masked_fill(logp == -torch.inf, 0) * problem["grad_logp"].to(device)).sum()
    if problem["grad_entropy"] is not None:
        total = total + (entropy * problem["grad_entropy"].to(device)).sum()
    total.backward()
    return logp, entropy, logits.grad


def without_gradient(problem, logp):
    """Rows whose gradient is zero by contract: masked, no upstream gradient, or an impossible target."""
    kept = problem["targets"] != -100
    if problem["mask"] is not None:
        kept = kept & problem["mask"]
    moved = (problem["grad_logp"] != 0) & (logp > -torch.inf)
    if problem["grad_entropy"] is not None:
        moved = moved | (problem["grad_entropy"] != 0)
    return ~(kept & moved)


@given(problem=problems())
def test_agrees_with_the_float64_reference(place, problem):
    device, backend = place
    logits = problem["logits"]
    logp, entropy, grad = run(token_logprobs, logits, problem, device, with_entropy=True, backend=backend)
    logp_64, entropy_64, grad_64 = run(reference.token_logprobs, logits.double(), problem)
    assert logp.dtype == entropy.dtype == torch.float32
    assert grad.dtype == logits.dtype
    # Differences of float32 scores: their error grows with them; a softcapped score is rounded before the difference.
    options = problem["options"]
    rounding = 4 * EPS[torch.float32] * (options["softcap"] or 0.0) / options["temperature"]
    assert_close("logp", logp, logp_64, rtol=4 * EPS[torch.float32], atol=1e-6 + rounding)
    assert_close("entropy", entropy, entropy_64, rtol=1e-5, atol=2e-6 + rounding)
    # An entropy near 0 is known to one rounding of 1 only, and so is its gradient.
    upstream = 0.0 if problem["grad_entropy"] is None else problem["grad_entropy"].abs().double()
    floor = 4 * EPS[torch.float32] * upstream / options["temperature"]
    # Below the smallest normal number digits are lost whatever one does; the reference itself knows 1 - p to 2^-52.
    floor = floor + torch.finfo(logits.dtype).tiny * (1 + upstream) + 8 * EPS[torch.float64]
    assert_rows_close(
        "gradient",
        grad,
        grad_64,
        rtol=max(1e-4, EPS[logits.dtype]),
        floor=floor,
        zero=without_gradient(problem, logp_64),
    )


@given(problem=problems())
def test_float64_on_the_pytorch_path(problem):
    logits = problem["logits"].double()
    logp, entropy, grad = run(token_logprobs, logits, problem, with_entropy=True)
    logp_64, entropy_64, grad_64 = run(reference.token_logprobs, logits, problem)
    assert logp.dtype == grad.dtype == torch.float64
    assert_close("logp", logp, logp_64, rtol=1e-13, atol=1e-13)
    assert_close("entropy", entropy, entropy_64, rtol=1e-11, atol=1e-12)
    assert_rows_close("gradient", grad, grad_64, rtol=1e-10, floor=1e-14, zero=without_gradient(problem, logp_64))


def test_gradcheck_on_the_pytorch_path():
    torch.manual_seed(0)
    logits = torch.randn(3, 9, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([0, 8, -100])
    for softcap in (None, 2.0):
        assert torch.autograd.gradcheck(
            lambda x, cap=softcap: token_logprobs(x, targets, softcap=cap, temperature=0.7, with_entropy=True), logits
        )


def test_peaked_rows_keep_their_tiny_gradients(place):
    """1 - p of 1e-9 is below float32's resolution near 1; the gradient still has its digits."""
    device, backend = place
    logits = torch.zeros(4, 300)
    logits[:, 17] = torch.tensor([5.0, 15.0, 20.0, 25.0])
    problem = {
        "targets": torch.full((4,), 17),
        "mask": None,
        "grad_logp": torch.ones(4),
        "grad_entropy": None,
        "options": {},
    }
    _, _, grad = run(token_logprobs, logits, problem, device, with_entropy=True, backend=backend)
    _, _, grad_64 = run(reference.token_logprobs, logits.double(), problem)
    assert_rows_close("gradient", grad, grad_64, rtol=1e-5)


@pytest.mark.parametrize("cut", [slice(None, -1), slice(1, None), slice(None, None, 2)])
def test_sliced_sequences_are_not_copied(place, cut):
    """logits[:, :-1] with labels[:, 1:], the way every trainer calls it."""
    device, backend = place
    torch.manual_seed(1)
    whole = torch.randn(2, 5, 33, device=device, requires_grad=True)
    labels = torch.randint(0, 33, (2, 5), device=device)
    logp = token_logprobs(whole[:, cut], labels[:, cut], backend=backend)
    logp.sum().backward()
    other = whole.detach().double().requires_grad_()
    reference.token_logprobs(other[:, cut], labels[:, cut])[0].sum().backward()
    assert_rows_close("gradient", whole.grad, other.grad, rtol=1e-5)


@pytest.mark.parametrize("layout", ["transposed", "expanded", "column_step"])
def test_unusual_layouts_of_logits(place, layout):
    device, backend = place
    torch.manual_seed(2)
    logits = {
        "transposed": lambda: torch.randn(40, 6, device=device).T,
        "expanded": lambda: torch.randn(1, 40, device=device).expand(6, 40),
        "column_step": lambda: torch.randn(6, 80, device=device)[:, ::2],
    }[layout]()
    targets = torch.randint(0, 40, (6,), device=device)
    logp, entropy = token_logprobs(logits, targets, with_entropy=True, backend=backend)
    logp_64, entropy_64 = reference.token_logprobs(logits.double(), targets)
    assert_close("logp", logp, logp_64, rtol=1e-6, atol=1e-6)
    assert_close("entropy", entropy, entropy_64, rtol=1e-5)


def test_huge_finite_logits_stay_finite(place):
    device, backend = place
    logits = torch.tensor([[3e38, -3e38, 0.0], [-3e38, -3e38, -3e38], [3e38, 3e38, 3e38]], device=device)
    logits.requires_grad_()
    targets = torch.tensor([1, 0, 2], device=device)
    for options in ({}, {"temperature": 0.1}, {"softcap": 20.0}):
        logits.grad = None
        logp, entropy = token_logprobs(logits, targets, with_entropy=True, backend=backend, **options)
        (logp.clamp(min=-1e30).sum() + entropy.sum()).backward()
        assert logp.isfinite().all()
        assert entropy.isfinite().all()
        assert logits.grad.isfinite().all()


def test_masked_rows_may_hold_anything(place):
    device, backend = place
    logits = torch.randn(4, 50, device=device)
    logits[1], logits[2] = torch.nan, torch.inf
    logits.requires_grad_()
    targets = torch.tensor([3, 10_000, -100, 4], device=device)
    mask = torch.tensor([1, 0, 1, 1], device=device)
    logp, entropy = token_logprobs(logits, targets, mask=mask, with_entropy=True, backend=backend)
    (logp.sum() + entropy.sum()).backward()
    assert logp[1:3].tolist() == entropy[1:3].tolist() == [0.0, 0.0]
    assert (logits.grad[1:3] == 0).all()
    assert (logits.grad[[0, 3]] != 0).all()
    assert logits.grad.isfinite().all()


def test_inplace_gives_the_same_gradient_in_the_same_memory(place):
    device, backend = place
    torch.manual_seed(3)
    weight = torch.randn(20, 33, device=device)
    hidden = torch.randn(6, 20, device=device, requires_grad=True)
    targets = torch.tensor([0, 5, -100, 7, 32, 1], device=device)
    grads = []
    for inplace in (False, True):
        hidden.grad = None
        logits = hidden @ weight
        logp = token_logprobs(logits, targets, valid_vocab=33, inplace=inplace, backend=backend)
        before = logits.detach().clone()
        (logp * torch.arange(6, device=device)).sum().backward()
        assert torch.equal(before, logits.detach()) is not inplace
        grads.append(hidden.grad.clone())
    assert torch.equal(*grads)


def test_inplace_refuses_logits_that_someone_else_needs(place):
    device, backend = place
    logits = (torch.randn(4, 20, device=device, requires_grad=True)) * 1.0
    targets = torch.tensor([1, 2, 3, 4], device=device)
    other_use = logits.square().sum()  # its backward runs after ours and needs the logits
    total = other_use + token_logprobs(logits, targets, inplace=True, backend=backend).sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()


def test_no_tokens_at_all(place):
    device, backend = place
    logits = torch.randn(0, 12, device=device, requires_grad=True)
    logp = token_logprobs(logits, torch.empty(0, dtype=torch.int64, device=device), backend=backend)
    logp.sum().backward()
    assert logp.shape == (0,)
    assert logits.grad.shape == (0, 12)


def test_out_of_range_targets():
    logits = torch.randn(3, 10)
    with pytest.raises(ValueError, match=r"targets must lie in 0 .. 9 .*got 10 at flat position 1"):
        token_logprobs(logits, torch.tensor([0, 10, -100]))
    with pytest.raises(ValueError, match=r"targets must lie in 0 .. 7 .*got 8"):
        token_logprobs(logits, torch.tensor([0, 8, -100]), valid_vocab=8)
    with pytest.raises(ValueError, match=r"got -1 at flat position 0"):
        token_logprobs(logits, torch.tensor([-1, 0, 0]))


def test_out_of_range_targets_on_triton():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    logits = torch.randn(3, 10, device=device, requires_grad=True)
    targets = torch.tensor([0, 2**31 - 1, -1], device=device)
    logp = token_logprobs(logits, targets, backend="triton")
    assert logp.isnan().tolist() == [False, True, True]
    with pytest.raises(ValueError, match="targets must lie in"):
        token_logprobs(logits, targets, backend="triton", validate=True)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"logits": torch.zeros(2, 3, dtype=torch.int64)}, TypeError, "logits must be float32"),
        ({"logits": [[0.0]]}, TypeError, "logits must be a tensor, got list"),
        ({"targets": torch.zeros(2)}, TypeError, "targets must be int32 or int64, got torch.float32"),
        ({"targets": torch.zeros(3, dtype=torch.int64)}, ValueError, r"targets must have the shape .*\[2\], got \[3\]"),
        ({"mask": torch.ones(2, 1)}, ValueError, r"mask must have the shape of targets"),
        ({"temperature": 0.0}, ValueError, "temperature must be a finite number > 0, got 0.0"),
        ({"temperature": float("nan")}, ValueError, "temperature must be a finite number > 0, got nan"),
        ({"softcap": -1.0}, ValueError, "softcap must be a finite number > 0, got -1.0"),
        ({"valid_vocab": 4}, ValueError, "valid_vocab must be an int in 1 .. V = 3, got 4"),
        ({"valid_vocab": 2.0}, ValueError, "valid_vocab must be an int in 1 .. V = 3, got 2.0"),
        ({"ignore_index": None}, ValueError, "ignore_index must be an int, got None"),
        ({"backend": "cuda"}, ValueError, "backend must be one of 'auto', 'torch', 'triton', got 'cuda'"),
    ],
)
def test_wrong_arguments_are_named(change, error, message):
    arguments = {"logits": torch.zeros(2, 3), "targets": torch.zeros(2, dtype=torch.int64)} | change
    with pytest.raises(error, match=message):
        token_logprobs(**arguments)


def test_broken_logits_show(place):
    """NaN and +inf logits give NaN log-probs and gradients in their row, and nothing in others."""
    device, backend = place
    logits = torch.randn(3, 40, device=device)
    logits[0, 7], logits[1, 7] = torch.nan, torch.inf
    logits.requires_grad_()
    logp = token_logprobs(logits, torch.tensor([1, 2, 3], device=device), backend=backend)
    logp.sum().backward()
    assert logp.isnan().tolist() == [True, True, False]
    assert logits.grad[:2].isnan().any(-1).all()
    assert logits.grad[2].isfinite().all()

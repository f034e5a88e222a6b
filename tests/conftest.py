"""Common ground of the tests: which places (device, backend) the kernels are tested in.

Without a CUDA device the Triton kernels run in Triton's interpreter, which must be asked for before triton is imported.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch

if torch.cuda.is_available():
    torch.set_float32_matmul_precision("highest")  # some images of CUDA machines come with TF32 switched on
else:
    os.environ["TRITON_INTERPRET"] = "1"

import pytest
from hypothesis import HealthCheck, settings

from rspo.models.reproducible import reproducible_products

# As a run on one thread does, before anything multiplies matrices: tests compare runs bit for bit.
reproducible_products()

settings.register_profile(
    "default",
    deadline=None,
    max_examples=40,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.register_profile("thorough", parent=settings.get_profile("default"), max_examples=1000, derandomize=False)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

PLACES = [("cpu", "torch"), ("cuda", "torch"), ("cuda", "triton")]
if not torch.cuda.is_available():
    PLACES = [("cpu", "torch"), ("cpu", "triton")]


@pytest.fixture(scope="module", autouse=True)
def _nothing_stays() -> Iterator[None]:
    """What a file's tests put into the environment, or a process group that they made, is not the next file's."""
    variables, had_group = dict(os.environ), torch.distributed.is_initialized()
    yield
    os.environ.clear()
    os.environ.update(variables)
    if torch.distributed.is_initialized() and not had_group:
        torch.distributed.destroy_process_group()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """The same random tensors in every run."""
    torch.manual_seed(0)


@pytest.fixture(params=PLACES, ids=lambda place: "-".join(place))
def place(request: pytest.FixtureRequest) -> tuple[str, str]:
    """(device, backend) to run an op in."""
    return request.param


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 8 for the scans and of 32 for whitening, where the interpreter takes about 1 ms for each element."""
    if ("cpu", "triton") in PLACES:
        from rspo_kernels.backends.triton_impl import scans, whiten

        monkeypatch.setattr(scans, "BLOCK", 8)
        monkeypatch.setattr(whiten, "BLOCK", 32)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """One thread of PyTorch, with which runs are repeatable bit for bit."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved start policy for household, untrained."""
    from rspo_toys import small_policy

    folder = tmp_path_factory.mktemp("start")
    small_policy().save(folder)
    return folder

"""The README's figures from a small made-up report: which cases, whose ratios, and that a stale README is noticed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench import readme, scaling
from bench.report import Report

ENVIRONMENT = {"machine": "a GPU, 132 SMs", "versions": {"torch": "2.11"}, "date": "2026-01-02"}
TEXT = f"# Title\n\nBefore.\n\n{readme.BEGIN}\nstale\n{readme.END}\n\nAfter.\n"


def row(provider: str, library: str, milliseconds: float | None, **changes: Any) -> dict[str, Any]:
    return {
        "op": "linear_policy_loss",
        "shape": "N 1,024, H 576, V 49,152",
        "rows": "25%",
        "active": 0.25,
        "dtype": "fp32",
        "direction": "both",
        "provider": provider,
        "library": library,
        "status": "absent" if milliseconds is None else "right",
        "median_ms": milliseconds,
        "peak_bytes": None if milliseconds is None else int(milliseconds * 1e7),
    } | changes


def case(**changes: Any) -> list[dict[str, Any]]:
    return [
        row("rspo_kernels", "rspo_kernels", 10.0, **changes),
        row("torch", "eager", 40.0, **changes),
        row("torch compiled", "compile", 25.0, **changes),
        row("liger chunked", "liger", 9.0, **changes),
        row("liger fused", "liger", 8.0, **changes),
        row("verl", "verl", None, **{"status": "wrong", **changes}),
        row("trl", "trl", None, **changes),
    ]


KERNELS = Report(
    "kernels", "cuda", ENVIRONMENT, {},
    [
        *case(),
        *case(active=1.0, rows="100%"),
        *case(direction="forward"),
        *case(shape="another"),
        *[r for r in case(op="policy_loss") if r["library"] == "rspo_kernels"],
        *[r | {"library": "verl"} if r["library"] == "liger" else r for r in case(op="token_logprobs")],
    ],
)  # fmt: skip


def traffic_row(provider: str, active: float, reads: float, **changes: Any) -> dict[str, Any]:
    return {
        "op": "logits_policy_loss",
        "direction": "forward+backward",
        "provider": provider,
        "vocab": 1003,
        "active": active,
        "clipped": 0.0,
        "read_passes": reads,
        "write_passes": 1.0,
        "floor_passes": active + 1,
        "fault": "",
    } | changes


TRAFFIC = Report(
    "traffic", "interpreter", ENVIRONMENT, {},
    [
        traffic_row("ours", 1.0, 2.0),
        traffic_row("ours", 0.25, 0.5),
        traffic_row("liger", 1.0, 3.0),
        traffic_row("trl", 1.0, 3.0, fault="grad is wrong"),
        traffic_row("ours", 1.0, 9.0, op="token_logprobs"),
    ],
)  # fmt: skip


@pytest.fixture
def place(tmp_path: Path) -> list[str]:
    """A README and results; the arguments that name them."""
    (tmp_path / "README.md").write_text(TEXT)
    KERNELS.write(tmp_path / "results" / "some-gpu" / "kernels.json")
    TRAFFIC.write(tmp_path / "results" / "interpreter" / "traffic.json")
    pages = []
    for name in ("readme", "reproduction", "environments", "scaling"):
        page = tmp_path / ("README.md" if name == "readme" else f"{name}.md")
        page.write_text(TEXT)
        pages += [f"--{name}", str(page)]
    return [*pages, "--results", str(tmp_path / "results")]


def cells(text: str, start: str) -> list[str]:
    (line,) = (line for line in text.splitlines() if line.startswith(f"| {start}"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_telling_cases() -> None:
    """Both directions, the first shape of an op in all its shares, the largest first, where a peer was timed too."""
    cases = [(c[0]["op"], c[0]["shape"], c[0]["active"]) for c in readme.telling(KERNELS.rows)]
    first = KERNELS.rows[0]["shape"]
    assert cases == [
        ("linear_policy_loss", first, 1.0), ("linear_policy_loss", first, 0.25), ("token_logprobs", first, 0.25)
    ]  # fmt: skip


def test_ratios_are_the_peers_time_over_ours() -> None:
    text = readme.kernels(KERNELS)
    header = cells(text, "op ")
    assert header[5:9] == ["PyTorch", "torch.compile", "Liger", "verl"], "no column without any time"
    logprobs = dict(zip(header, cells(text, "token_logprobs"), strict=True))
    assert (logprobs["ours"], logprobs["PyTorch"], logprobs["torch.compile"]) == ("10 ms", "4.00", "2.50")
    assert logprobs["verl"] == "**0.80**", "the fastest of a library; ahead of ours in bold"
    assert logprobs["Liger"] == ""
    assert (logprobs["our peak"], logprobs["leanest peer"]) == ("100 MB", "80 MB")
    loss = next(line for line in text.splitlines() if line.startswith("| linear_policy_loss"))
    assert "**0.80**" in loss
    assert "wrong" in loss
    assert "Without a time here: TRL, CCE, flash-attn, unsloth." in text


def test_peers_that_are_ahead_outside_of_the_table_are_named() -> None:
    text, shape = readme.kernels(KERNELS), KERNELS.rows[0]["shape"]
    forward, other = f"forward, {shape}, 25%, fp32 (Liger 0.80)", "both, another, 25%, fp32 (Liger 0.80)"
    assert f"outside of this table: linear_policy_loss {forward}; linear_policy_loss {other}." in text


def test_passes_beside_the_floor() -> None:
    text = readme.traffic(TRAFFIC)
    assert cells(text, "provider") == ["provider", "100% active", "25% active"]
    assert cells(text, "floor") == ["floor", "2.00", "1.25"]
    assert cells(text, "ours") == ["ours", "3.00", "1.50"]
    assert cells(text, "liger") == ["liger", "4.00", ""]
    assert cells(text, "trl") == ["trl", "wrong", ""]


def test_written_and_checked(place: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert readme.main([*place, "--check"]) == 1
    assert "make bench-report" in capsys.readouterr().err
    assert (tmp_path / "README.md").read_text() == TEXT
    text = readme.replaced(TEXT, readme.section(readme.read(tmp_path / "results"), tmp_path))
    (tmp_path / "README.md").write_text(text)
    assert readme.main([*place, "--check"]) == 1, "the other pages"
    for name in ("reproduction.md", "environments.md"):
        (tmp_path / name).write_text(readme.replaced(TEXT, "No results yet."))
    (tmp_path / "scaling.md").write_text(readme.replaced(TEXT, scaling.tables()))
    assert readme.main([*place, "--check"]) == 0
    assert text.startswith("# Title\n\nBefore.\n")
    assert text.endswith("\n\nAfter.\n")
    assert "stale" not in text
    assert "a GPU, 132 SMs; torch 2.11; 2026-01-02. All of it: [results/some-gpu/kernels.md]" in text
    assert text.index("linear_policy_loss") < text.index("Memory traffic")

    KERNELS.write(tmp_path / "results" / "other" / "kernels.json")
    assert readme.main([*place, "--check"]) == 1, "results that the README does not show"


def test_markers_must_be_there() -> None:
    for text in ("nothing", f"{readme.END}{readme.BEGIN}", TEXT + readme.BEGIN):
        with pytest.raises(ValueError, match="needs one <!-- bench:begin -->"):
            readme.replaced(text, "x")


def test_no_results(tmp_path: Path) -> None:
    assert readme.section(readme.read(tmp_path), tmp_path) == "No results yet."

"""What `--help` and `rspo settings` say of the settings."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from contextlib import suppress

import pytest

from rspo.cli import main
from rspo.cli.parser import make_parser
from rspo.cli.settings_help import describe_settings, field_meanings
from rspo.config import Config, ConfigError
from rspo.config.files import flat_settings


@pytest.fixture
def shown(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """What a command prints, white space as single spaces."""
    monkeypatch.setenv("COLUMNS", "80")

    def run(*arguments: str) -> str:
        with suppress(SystemExit):  # argparse's, after --help
            assert main(arguments) == 0
        return " ".join(capsys.readouterr().out.split())

    return run


def test_help_of_a_command_explains_its_settings(shown: Callable[..., str]) -> None:
    text = shown("export", "--help")
    assert 'policy.dtype=float32 Of the weights: "float32", "bfloat16" or "float16"' in text
    assert "policy.allow_download=false Let transformers fetch a model" in text
    assert "--seed" not in text, "which means nothing to it"
    text = shown("reward-model", "--help")
    assert "reward_model.held_out=0.1 Share of the trajectories that is not trained on" in text
    assert 'reward_model.target=task_score What the turns\' rewards should add up to, in [0, 1]: "task_score"' in text


def test_flags_that_a_command_does_not_show_are_taken(shown: Callable[..., str]) -> None:
    parsed = make_parser().parse_args(["export", "run", "--out", "model", "--seed", "3", "--env", "webshop"])
    assert (parsed.seed, parsed.env) == (3, "webshop")


@pytest.mark.parametrize("text", ["swap.k=3", "--swap.k=3"])
def test_a_setting_without_set_is_told_how(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["train", "--dry-run", text])
    assert f"unrecognized arguments: {text}; a setting is given as --set swap.k=3" in capsys.readouterr().err
    for arguments in (["train", "--stepz"], ["summary", "run", "--swap.k=3"]):
        with pytest.raises(SystemExit, match="2"):
            main(arguments)
        error = capsys.readouterr().err
        assert "unrecognized arguments" in error
        assert "--set" not in error


@pytest.mark.parametrize("value", ["{max_turns:5}", "{a: {max_turns:5}}", "[{max_turns:5}]"])
def test_a_colon_without_its_space_is_named(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--dry-run", "--set", f"env.options={value}"]) == 2
    assert "YAML wants a space after the colon of a pair: max_turns: 5" in capsys.readouterr().err


def test_every_command_and_every_flag_has_a_meaning() -> None:
    def check(parser: argparse.ArgumentParser) -> None:
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for command in action.choices.values():
                    check(command)
            else:
                assert action.help, f"{parser.prog} {action.dest}"

    check(make_parser())


def test_settings_are_explained_by_section_and_one_by_one(shown: Callable[..., str]) -> None:
    text = shown("settings")
    assert "swap The reward swap: agent B, its buffer" in text
    assert 'method=rspo "rspo", or an estimator\'s name' in text
    assert all(name.partition(".")[0] in text for name in flat_settings(Config()))
    text = shown("settings", "swap.alpha", "loss")
    assert "swap.alpha=0.125 Share of replayed data, and its weight in eq. 1; in [0, 1)." in text
    assert "swap.k" not in text
    assert "alpha_schedule" not in text
    # Of a section that explains its fields in the docstring of its class, some together.
    assert "loss.clip_low=0.2 ε below and above the centre" in text
    assert "loss.clip_high=0.2 ε below and above the centre" in text
    assert "loss.log_ratio_clamp=20.0 bound on |log r| and |log c|" in text
    assert "Raises" not in text


def test_a_name_that_is_no_setting_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["settings", "swop"]) == 2
    assert "'swop' is neither a setting nor a section; there are method, base, env" in capsys.readouterr().err
    with pytest.raises(ConfigError):
        describe_settings(["swap.alph"])


def test_most_settings_have_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are said by their names; without the source, as in an archive, none but the loss's has any."""
    monkeypatch.setenv("COLUMNS", "80")
    names = list(flat_settings(Config()))
    heads = re.findall(r"^  (\S+)=", describe_settings(names), re.MULTILINE)
    assert heads == names
    explained = [name for name in names if len(describe_settings([name])) > len(name) + 20]
    assert len(explained) > 0.8 * len(names)

    def missing(kind: object) -> str:
        raise OSError

    monkeypatch.setattr("inspect.getsource", missing)
    assert field_meanings(type(Config().swap)) == {}
    assert field_meanings(type(Config().loss))["horizon"].startswith("tokens that a sequence's sum is divided by")

"""Settings: presets, files, flags, and the errors that name what is allowed."""

from __future__ import annotations

from pathlib import Path

import pytest

from rspo.config import Config, ConfigError, default_config, paper_config
from rspo.config.files import apply_flags, load_config, preset, save_config
from rspo.runs.setting import build_env, env_arguments


def test_paper_preset_has_the_papers_settings() -> None:
    config = paper_config()
    assert (config.swap.k, config.swap.alpha, config.rollout.group_size, config.rollout.tasks) == (3, 1 / 8, 8, 16)
    assert (config.swap.buffer_tasks, config.run.steps) == (28, 150)
    assert (config.loss.clip_center, config.loss.center_cap, config.loss.clip_low) == ("shift", None, 0.2)
    assert (config.loss.kl_coef, config.loss.kl_estimator, config.optimizer.learning_rate) == (0.01, "k3", 1e-6)
    assert (config.rollout.temperature, config.evaluation.temperatures) == (1.0, (0.4,))
    assert (config.estimator.invalid_penalty, config.loss.dual_clip, config.loss.dual_clip_replay) == (0.1, 3.0, False)
    assert (config.policy.chat, config.policy.gradient_checkpointing, config.policy.fused) == ("on", True, "auto")


def test_the_paper_preset_takes_verl_agents_style_where_there_is_one() -> None:
    config = paper_config()
    assert (config.env.style, config.estimator.invalid_penalty_on) == ("verl-agent", "format")
    assert (default_config().env.style, default_config().estimator.invalid_penalty_on) == ("readable", "refused")
    for name in ("alfworld", "webshop", "rspo.envs.webshop:WebshopEnv"):
        settings = apply_flags(config, [f"env.name={name}", "env.options={max_turns: 9}"]).env
        assert env_arguments(settings) == {"prompt_style": "verl-agent", "max_turns": 9}
        said = apply_flags(config, [f"env.name={name}", "env.options={prompt_style: chat}"]).env
        assert env_arguments(said) == {"prompt_style": "chat"}, "what options say is what is taken"
        assert env_arguments(apply_flags(default_config(), [f"env.name={name}"]).env) == {}
    assert env_arguments(config.env) == {}, "household has no such style"
    assert build_env(config).prompt_style == "compact"  # type: ignore[attr-defined]


@pytest.mark.parametrize("workers", [0, 1])
def test_an_environment_is_made_in_the_configured_style(workers: int) -> None:
    pytest.importorskip("bm25s", reason="needs rspo[webshop]")
    flags = ["env.name=webshop", "env.options={data: own, nouns: simple}", f"env.workers={workers}"]
    env = build_env(apply_flags(paper_config(), flags))
    try:
        assert env.reset([0], [0])[0] == ["'Search'"]
        assert env.project("<think>so</think><action>Search[kite]</action>") == ("search[kite]", True)
    finally:
        env.close()


def test_default_preset_bounds_the_clip_center() -> None:
    assert default_config().loss.center_cap == 1.0


def test_counts_of_on_policy_and_replayed_data() -> None:
    config = Config()
    assert (config.on_policy_tasks(1 / 8), config.replay_size(1 / 8)) == (14, 16)
    assert (config.on_policy_tasks(1 / 16), config.replay_size(1 / 16)) == (15, 8)
    assert (config.on_policy_tasks(0.0), config.replay_size(0.0)) == (16, 0)


def test_alpha_schedules_decay_to_zero() -> None:
    for name in ("linear", "cosine"):
        config = apply_flags(Config(), [f"swap.alpha_schedule={name}", "run.steps=100"])
        assert config.alpha_at(0) == 0.125
        assert config.alpha_at(50) == pytest.approx(0.0625)
        assert config.alpha_at(99) < 0.002
    assert Config().alpha_at(53) == 0.125


def test_round_trip_through_yaml(tmp_path: Path) -> None:
    config = apply_flags(paper_config("grpo"), ["env.options={max_turns: 6}", "warmup.band=[0.1, 0.2]"])
    save_config(config, tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml") == config


def test_flags_are_converted_to_the_fields_types() -> None:
    config = apply_flags(Config(), ["optimizer.learning_rate=1e-4", "swap.k=5", "policy.path=null"])
    assert (config.optimizer.learning_rate, config.swap.k, config.policy.path) == (1e-4, 5, None)
    seed = 2**53 + 1  # which a float cannot hold
    assert apply_flags(config, [f"run.seed={seed}", "swap.k=4.0"]).run.seed == seed
    assert apply_flags(config, ["loss.center_cap=null"]).loss.center_cap is None


def test_a_flag_for_one_option_leaves_the_others() -> None:
    config = apply_flags(default_config("rspo"), ["env.options={max_turns: 6, prompt_style: chat}"])
    changed = apply_flags(config, ["env.options.max_turns=8", "env.options.a.b=1"])
    assert changed.env.options == {"max_turns": 8, "prompt_style": "chat", "a": {"b": 1}}
    assert type(changed.env.options["a"]) is dict
    assert apply_flags(changed, ["env.options.a.c=2"]).env.options["a"] == {"b": 1, "c": 2}
    assert apply_flags(config, ["env.options={max_turns: 8}"]).env.options == {"max_turns": 8}
    other = apply_flags(config, ["env.name=webshop", "env.options.data=own"])
    assert other.env.options == {"data": "own"}, "another environment has other options"


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("swap.alpha=1.0", r"swap\.alpha must be in \[0, 1\)"),
        ("swap.alpha=-0.1", r"swap\.alpha must be in \[0, 1\)"),
        ("rollout.group_size=1", r"rollout\.group_size must be >= 2"),
        ("rollout.group_size=2.5", r"rollout\.group_size must be of type int"),
        ("method=ppo2", r"method must be one of 'rspo', 'grpo'"),
        ("swap.sampling=best", r"swap\.sampling must be one of 'reward', 'random', 'variance'"),
        ("swap.alhpa=0.1", r"unknown setting 'swap\.alhpa' \(did you mean 'alpha'\?\).*k, alpha"),
        ("swop.alpha=0.1", r"unknown setting 'swop' \(did you mean 'swap'\?\)"),
        ("swap=3", r"swap is a section"),
        ("loss.clip_low=-1", r"loss\.clip_low must be a finite number >= 0"),
        ("loss.clip_center=left", r"loss\.clip_center must be one of"),
        ("estimator.std=maybe", r"estimator\.std must be of type bool"),
        ("optimizer.learning_rate=fast", r"optimizer\.learning_rate must be of type float"),
        ("run.steps=0", r"run\.steps must be >= 1"),
        ("run.steps=.inf", r"run\.steps must be of type int, got inf"),
        ("optimizer.eps=-1e-8", r"optimizer\.eps must be >= 0"),
        ("estimator.step_weight=.nan", r"estimator\.step_weight must be >= 0, got nan"),
        ("rewards.train=dense", r"rewards\.train must be 'outcome' with method='rspo'"),
        ("swap.alpha=0.97", r"leaves no on-policy task"),
        ("policy.fused=maybe", r"policy\.fused must be one of 'auto', 'on', 'off', got 'maybe'"),
        ("policy.device=gpu", r"policy\.device must be 'cpu', 'cuda', 'cuda:N' .*, got 'gpu'"),
        ("policy.device=cuda:first", r"policy\.device must be 'cpu', 'cuda', 'cuda:N' .*, got 'cuda:first'"),
        ("env.style=verl", r"env\.style must be one of 'readable', 'verl-agent', got 'verl'"),
        (
            "estimator.invalid_penalty_on=inadmissible",
            r"invalid_penalty_on must be one of 'format', 'refused', got 'ina",
        ),
        ("policy.chat=template", r"policy\.chat must be one of 'auto', 'on', 'off', got 'template'"),
        ("alpha", r"--set takes section\.field=value"),
    ],
)
def test_impossible_settings_are_errors_that_say_what_is_allowed(flag: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        apply_flags(default_config(), [flag])


def test_unknown_environment_preset_and_file_field(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="household"):
        build_env(apply_flags(Config(), ["env.name=housekeeping"]))
    with pytest.raises(ConfigError, match="max_turns"):
        build_env(apply_flags(Config(), ["env.options={max_turns: 0}"]))
    with pytest.raises(ConfigError, match="'default', 'paper'"):
        preset("best")
    (tmp_path / "c.yaml").write_text("rollout: {groups: 3}\n")
    with pytest.raises(ConfigError, match=r"c\.yaml: unknown setting 'rollout\.groups'"):
        load_config(tmp_path / "c.yaml")
    (tmp_path / "d.yaml").write_text("- rollout\n")
    with pytest.raises(ConfigError, match="expected a mapping"):
        load_config(tmp_path / "d.yaml")


def test_another_loss_brings_its_own_defaults() -> None:
    for flags, expected in (
        (["loss.loss=dapo"], (0.2, 0.28, "token", "token-mean")),
        (["loss.loss=gspo"], (3e-4, 4e-4, "sequence", "seq-mean-token-mean")),
        (["loss.loss=gspo", "loss.clip_low=0.1"], (0.1, 4e-4, "sequence", "seq-mean-token-mean")),
        (["loss.clip_high=0.3"], (0.2, 0.3, "token", "token-mean")),
    ):
        loss = apply_flags(default_config(), flags).loss
        assert (loss.clip_low, loss.clip_high, loss.ratio_level, loss.aggregation) == expected
        assert loss.center_cap == 1.0, "what does not depend on the loss stays"
    with pytest.raises(
        ConfigError, match=r"loss.horizon must be given with loss.aggregation='seq-mean-token-sum-norm'"
    ):
        apply_flags(default_config(), ["loss.loss=dr_grpo"])


def test_files_and_values_that_are_not_yaml(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--set 'swap.alpha=\[': the value is not YAML"):
        apply_flags(default_config(), ["swap.alpha=["])
    broken = tmp_path / "broken.yaml"
    broken.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"broken.yaml is not a YAML file"):
        load_config(broken)
    with pytest.raises(ConfigError, match=r"is not a YAML file"):
        load_config(tmp_path)

"""Any configuration of the policy loss, for hypothesis."""

from __future__ import annotations

from hypothesis import strategies as st

from rspo_kernels import PolicyLossConfig


@st.composite
def configs(draw: st.DrawFn) -> PolicyLossConfig:
    """Every option of the loss, in every combination."""
    loss = draw(st.sampled_from(["grpo", "grpo", "grpo", "ppo", "dapo", "dr_grpo", "gspo", "cispo", "sapo"]))
    levels = ["turn", "sequence", "set"] if loss == "gspo" else ["token", "token", "turn", "sequence", "set"]
    return PolicyLossConfig(
        loss=loss,
        clip_low=draw(st.sampled_from([0.0, 0.2, 0.9])),
        clip_high=draw(st.sampled_from([0.0, 0.2, 0.28, 3.0])),
        clip_center=draw(st.sampled_from(["shift", "none", "relative"])),
        center_cap=draw(st.sampled_from([None, 1.0, 0.5])),
        weight_cap=draw(st.sampled_from([None, 1.0, 2.0])),
        dual_clip=None if loss in ("cispo", "sapo") else draw(st.sampled_from([None, 3.0, 1.1])),
        dual_clip_replay=draw(st.booleans()),
        kl_coef=draw(st.sampled_from([0.0, 0.01, 1.0])),
        kl_estimator=draw(st.sampled_from(["k1", "k2", "k3"])),
        kl_weighted=draw(st.booleans()),
        entropy_coef=draw(st.sampled_from([0.0, 0.001, -0.5])),
        ratio_level=draw(st.sampled_from(levels)),
        ratio_reduction=draw(st.sampled_from(["mean", "sum"])),
        sapo_tau_positive=draw(st.sampled_from([1.0, 0.5])),
        aggregation=draw(
            st.sampled_from(["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
        ),
        horizon=7,
        log_ratio_clamp=draw(st.sampled_from([20.0, 1.0])),
    )

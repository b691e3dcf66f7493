"""Makes the golden numbers of losses and advantages out of other systems' own functions. Needs torch, TRL and verl.

    python -m venv /tmp/golden && /tmp/golden/bin/pip install torch trl
    /tmp/golden/bin/pip install tensordict omegaconf hydra-core codetiming orjson ray
    /tmp/golden/bin/pip install --no-deps verl
    /tmp/golden/bin/python scripts/make_golden_losses.py

One batch of eight ragged sequences in two groups: one has a single token, one ends at the limit, two have tokens of
others between their own, all moved since the update began (ℓ_θ against ℓ_p) and since they were sampled (ℓ_p against
ℓ_b), some far beyond the clips and caps. Each case has the loss that TRL's `GRPOTrainer._compute_loss` or a function of
`verl.trainer.ppo` gives for it and its gradient with respect to ℓ_θ, beside the settings that mean the same here.
"""

import json
from collections import defaultdict
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from trl import GRPOTrainer
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights
from verl.workers.config import ActorConfig

OUT = Path(__file__).parent.parent / "tests" / "learner" / "golden" / "losses.json"
LENGTHS = (1, 5, 9, 10, 3, 7, 2, 6)
HOLES = {2: (3, 4), 5: (1, 2, 3)}
"""By sequence: tokens that the policy did not sample."""
GROUPS = np.array([0, 0, 0, 0, 1, 1, 1, 1])
REWARDS = torch.tensor([0.0, 1.0, 0.5, 1.0, 0.25, -1.0, 0.0, 1.0])
MAX_TOKENS = 10
NEVER = 1e9
"""A dual clip that never acts; verl has no way to leave it out."""


def batch() -> dict[str, torch.Tensor]:
    """ℓ_θ, ℓ_p, ℓ_b, ℓ_ref, values, advantages of eight sequences, float32 [8, 10], and the mask."""
    rng = np.random.default_rng(20)
    shape = (len(LENGTHS), MAX_TOKENS)
    mask = np.zeros(shape)
    for row, length in enumerate(LENGTHS):
        mask[row, :length] = 1
        mask[row, list(HOLES.get(row, ()))] = 0
    current = -rng.gamma(2.0, 0.6, shape)
    proximal = current - rng.normal(0, 0.25, shape)
    behaviour = proximal - rng.normal(0, 0.5, shape)
    reference = current - rng.normal(0, 0.4, shape)
    names = {"mask": mask, "current": current, "proximal": proximal, "behaviour": behaviour, "reference": reference}
    names["values"] = rng.normal(0.3, 0.5, shape)
    names["new_values"] = names["values"] + rng.normal(0, 0.3, shape)
    names["advantages"] = np.repeat(rng.normal(0, 1, (shape[0], 1)), MAX_TOKENS, axis=1)
    return {name: torch.tensor(np.round(values, 4), dtype=torch.float32) for name, values in names.items()}


def with_gradient(loss_of: Any, at: torch.Tensor) -> dict[str, Any]:
    """The loss at a point and its gradient there."""
    point = at.clone().requires_grad_()
    loss = loss_of(point)
    loss.backward()
    assert point.grad is not None
    return {"value": loss.item(), "gradient": [[float(f"{x:.7g}") for x in row] for row in point.grad.tolist()]}


def by_verl(data: dict[str, torch.Tensor]) -> list[dict[str, Any]]:
    """Policy losses of verl, with and without its corrections."""
    aggregations = {"token": "token-mean", "sequence": "seq-mean-token-mean", "constant": "seq-mean-token-sum-norm"}

    def case(
        function: str, settings: dict[str, Any], weights: dict[str, Any] | None = None, aggregation: str = "token",
        kl: dict[str, Any] | None = None, **clips: float,
    ) -> dict[str, Any]:  # fmt: skip
        chosen = {"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": NEVER} | clips
        config = ActorConfig(
            strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, use_dynamic_bsz=True, **chosen
        )
        config.global_batch_info["loss_scale_factor"] = MAX_TOKENS
        weight = None
        if weights is not None:
            moved = data["proximal"] - data["behaviour"]
            weight = compute_rollout_correction_weights(moved, data["mask"], **weights)[0]

        def loss_of(current: torch.Tensor) -> torch.Tensor:
            arguments = (current, data["advantages"], data["mask"], aggregations[aggregation], config, weight)
            if function == "reinforce":
                return core_algos.compute_policy_loss_reinforce(data["behaviour"], *arguments)[0]
            loss = core_algos.get_policy_loss_fn(function)(data["proximal"], *arguments)[0]
            if kl is not None:
                estimate = core_algos.kl_penalty(current, data["reference"], kl["estimator"])
                loss = loss + kl["coefficient"] * core_algos.agg_loss(estimate, data["mask"], aggregations[aggregation])
            return loss

        name = f"verl: {function}, {aggregations[aggregation]}"
        return {"by": name, "settings": settings, "kl": kl} | with_gradient(loss_of, data["current"])

    none = {"correction": {"kind": "none"}}
    truncate = {"kind": "truncate", "cap": 2.0}
    token, sequence = {"rollout_is": "token"}, {"rollout_is": "sequence"}
    return [
        case("vanilla", {"preset": "rloo"} | none),
        case("vanilla", {"preset": "reinforce_pp"} | none),
        case("vanilla", {"preset": "ppo"} | none),
        case("vanilla", {"preset": "grpo"} | none, aggregation="sequence"),
        case("vanilla", {"preset": "dr_grpo"} | none, aggregation="constant"),
        case("vanilla", {"preset": "dapo"} | none, clip_ratio_high=0.28),
        case("vanilla", {"preset": "rloo", "dual_clip": 1.3} | none, clip_ratio_c=1.3),
        case("gspo", {"preset": "gspo"} | none, aggregation="sequence", clip_ratio_low=3e-4, clip_ratio_high=4e-4),
        case(
            "gspo", {"preset": "gspo", "clip_epsilon_low": 0.1, "clip_epsilon_high": 0.1} | none,
            aggregation="sequence", clip_ratio_low=0.1, clip_ratio_high=0.1,
        ),
        case("cispo", {"preset": "cispo"} | none, clip_ratio_low=1.0, clip_ratio_high=4.0),
        case("cispo", {"preset": "cispo", "clip_epsilon_high": 0.1} | none, clip_ratio_low=1.0, clip_ratio_high=0.1),
        case("reinforce", {"surrogate": "reinforce"} | none),
        case("vanilla", {"correction": truncate}, token | {"rollout_is_threshold": 2.0}),
        case("vanilla", {"correction": truncate | {"cap": 1.1}}, token | {"rollout_is_threshold": 1.1}),
        case("vanilla", {"correction": truncate | {"scope": "sequence"}}, sequence | {"rollout_is_threshold": 2.0}),
        case(
            "vanilla", {"correction": {"kind": "mask", "low": 0.5, "high": 1.5}},
            token | {"rollout_is_threshold": "0.5_1.5"},
        ),
        case(
            "vanilla", {"correction": {"kind": "mask", "low": 0.3, "high": 3.0, "scope": "sequence"}},
            sequence | {"rollout_is_threshold": "0.3_3.0"},
        ),
        case("vanilla", {"preset": "rloo"} | none, kl={"coefficient": 0.2, "estimator": "k2"}),
        case("vanilla", {"preset": "rloo"} | none, kl={"coefficient": 0.2, "estimator": "k3"}),
    ]  # fmt: skip


def by_trl(data: dict[str, torch.Tensor]) -> list[dict[str, Any]]:
    """The losses of TRL's trainer."""
    entropies = torch.full_like(data["current"], 0.5)
    gathering = SimpleNamespace(
        num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x, sync_gradients=False
    )

    def case(settings: dict[str, Any], loss_type: str, beta: float = 0.0, **more: Any) -> dict[str, Any]:
        low, high, level = more.get("low", 0.2), more.get("high", 0.2), more.get("level", "token")
        arguments = SimpleNamespace(delta=more.get("delta"), use_bias_correction_kl=False, steps_per_generation=1)
        inputs = {name: torch.zeros(8, 1) for name in ("prompt_ids", "prompt_mask")}
        inputs |= {"completion_ids": data["mask"], "completion_mask": (data["mask"].cumsum(1) >= 0).float()}
        inputs |= {
            "tool_mask": data["mask"],
            "advantages": data["advantages"][:, 0],
            "num_items_in_batch": data["mask"].sum(),
        }
        inputs |= {"old_per_token_logps": data["proximal"], "ref_per_token_logps": data["reference"]}

        def loss_of(current: torch.Tensor) -> torch.Tensor:
            trainer = SimpleNamespace(
                _get_per_token_logps_and_entropies=lambda *_, **__: (current, entropies, None),
                model=SimpleNamespace(training=True), accelerator=gathering, args=arguments,
                aux_loss_enabled=False, top_entropy_quantile=1.0, off_policy_mask_threshold=None,
                importance_sampling_level=level, loss_type=loss_type, beta=beta, epsilon_low=low, epsilon_high=high,
                use_vllm=False, max_completion_length=MAX_TOKENS, current_gradient_accumulation_steps=1,
                _entropy_bonus_enabled=False, _metrics={"train": defaultdict(list)},
            )  # fmt: skip
            return GRPOTrainer._compute_loss(trainer, None, inputs)

        found = with_gradient(loss_of, data["current"])
        return {
            "by": f"TRL: loss_type {loss_type}, {level}",
            "settings": settings | {"correction": {"kind": "none"}},
            "kl": {"coefficient": beta, "estimator": "k3"} if beta else None,
        } | found

    return [
        case({"preset": "grpo"}, "grpo"),
        case({"preset": "grpo"}, "grpo", beta=0.3),
        case({"preset": "dr_grpo"}, "dr_grpo"),
        case({"preset": "dapo"}, "dapo", high=0.28),
        case({"preset": "grpo", "dual_clip": 1.3}, "grpo", delta=1.3),
        case(
            {"preset": "gspo", "clip_epsilon_low": 0.1, "clip_epsilon_high": 0.1}, "grpo",
            low=0.1, high=0.1, level="sequence",
        ),
        case({"preset": "cispo", "clip_epsilon_high": 0.1}, "cispo", high=1.1),
    ]  # fmt: skip


def advantages(data: dict[str, torch.Tensor]) -> dict[str, list[float]]:
    """Estimates of verl for each sequence, by what they are called here; of tokens that it sampled."""
    mask = data["mask"]
    last = mask.cumsum(1).argmax(1)
    rewards = torch.zeros_like(mask)
    rewards[torch.arange(len(LENGTHS)), last] = REWARDS

    def of_sequences(estimates: tuple[torch.Tensor, torch.Tensor]) -> list[float]:
        return [float(f"{x:.7g}") for x in (estimates[0] * mask).sum(1) / mask.sum(1)]

    grpo = core_algos.compute_grpo_outcome_advantage
    return {
        "rloo": of_sequences(core_algos.compute_rloo_outcome_advantage(rewards.clone(), mask, GROUPS)),
        "grpo": of_sequences(grpo(rewards.clone(), mask, GROUPS)),
        "dr_grpo": of_sequences(grpo(rewards.clone(), mask, GROUPS, norm_adv_by_std_in_grpo=False)),
        "reinforce_pp": of_sequences(
            core_algos.compute_reinforce_plus_plus_outcome_advantage(rewards, mask, SimpleNamespace(gamma=1.0))
        ),
        "reinforce_pp_baseline": of_sequences(
            core_algos.compute_reinforce_plus_plus_baseline_outcome_advantage(rewards.clone(), mask, GROUPS)
        ),
    }


def of_values(data: dict[str, torch.Tensor]) -> dict[str, Any]:
    """GAE of verl, whitened, and its clipped value loss at values that have moved since."""
    mask, discount, gae_lambda, clip = data["mask"], 0.97, 0.9, 0.2
    rewards = torch.zeros_like(mask)
    rewards[:, 0] = 0.3
    rewards[torch.arange(len(LENGTHS)), mask.cumsum(1).argmax(1)] += REWARDS
    found, returns = core_algos.compute_gae_advantage_return(rewards, data["values"], mask, discount, gae_lambda)

    def loss(values: torch.Tensor) -> torch.Tensor:
        return core_algos.compute_value_loss(values, returns, data["values"], mask, clip)[0]

    rounded = {"rewards": rewards, "advantages": found * mask, "returns": returns * mask}
    return {
        "discount": discount,
        "gae_lambda": gae_lambda,
        "clip": clip,
        **{name: [[float(f"{x:.7g}") for x in row] for row in values.tolist()] for name, values in rounded.items()},
        "loss": with_gradient(loss, data["new_values"]),
    }


def main() -> None:
    data = batch()
    found = {
        "made_by": {name: version(name) for name in ("torch", "trl", "verl")},
        "batch": {name: [[round(x, 4) for x in row] for row in values.tolist()] for name, values in data.items()},
        "groups": GROUPS.tolist(),
        "rewards": REWARDS.tolist(),
        "max_tokens": MAX_TOKENS,
        "advantages": advantages(data),
        "values": of_values(data),
        "losses": by_verl(data) + by_trl(data),
    }
    OUT.parent.mkdir(exist_ok=True)
    lines = {name: value for name, value in found.items() if name != "losses"}
    head = ",\n".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in lines.items())
    losses = ",\n".join(json.dumps(case) for case in found["losses"])
    OUT.write_text(f'{{{head},\n"losses": [\n{losses}\n]}}\n', "utf-8")
    print(f"{OUT}: {len(found['losses'])} losses")


if __name__ == "__main__":
    main()

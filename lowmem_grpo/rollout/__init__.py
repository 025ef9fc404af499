"""Sampling answers from the live policy; one protocol, `RolloutEngine`."""

from lowmem_grpo.rollout.engine import OnGroup, OnProgress, RolloutEngine, SlotEngine
from lowmem_grpo.rollout.sampling import keyed_uniform, sample_tokens
from lowmem_grpo.rollout.slots import SlotShape

__all__ = ["OnGroup", "OnProgress", "RolloutEngine", "SlotEngine", "SlotShape", "keyed_uniform", "sample_tokens"]

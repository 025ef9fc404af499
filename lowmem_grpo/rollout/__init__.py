"""Sampling answers from the live policy; one protocol, `RolloutEngine`."""

from lowmem_grpo.rollout.engine import BatchEngine, OnProgress, RolloutEngine
from lowmem_grpo.rollout.sampling import keyed_uniform, sample_tokens

__all__ = ["BatchEngine", "OnProgress", "RolloutEngine", "keyed_uniform", "sample_tokens"]

"""The gate: before the first step, can this model learn anything from these rewards?

The base answers training prompts with the run's own sampling, and what came out is judged here. A group whose answers
all score the same teaches nothing; `forecast_dead` says how many groups will be like that, at this group size and at
others. `judge` puts figures and findings together to a verdict: "stop" where no group had any spread or no answer got
a reward, "caution" where something is likely to be wrong, else "go".

Everything here is a pure function of sampled and scored answers.
"""

from __future__ import annotations

from lowmem_grpo.gate.crossed import crossed_groups
from lowmem_grpo.gate.forecast import DeadForecast, dead_share, enough, forecast_dead
from lowmem_grpo.gate.judging import GateReport, GateSample, GateSettings, judge

__all__ = [
    "DeadForecast",
    "GateReport",
    "GateSample",
    "GateSettings",
    "crossed_groups",
    "dead_share",
    "enough",
    "forecast_dead",
    "judge",
]

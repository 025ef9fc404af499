"""Teach a small language model your own task by GRPO, on one consumer GPU, with one copy of the weights."""

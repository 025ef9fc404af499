"""Whether a run fits and how long it takes: arithmetic in seconds, or the real code on fake tensors."""

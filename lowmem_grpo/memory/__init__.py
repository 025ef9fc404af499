"""Memory techniques, one module each; a module says what it saves, what it costs and the formula of its bytes.

head      log-probs of chosen tokens from hidden states, a few rows of logits at a time, backward written out
decoded   4-bit weights kept decoded, where there is room for them
lora      adapters on frozen linear layers: only the input waits for the backward, the masters have one 16-bit copy

and two ways to measure them:

live      bytes of live tensors, counted from the operations; the same on every run
peak      peak of the allocator or of the process, as the machine saw it
"""

"""Memory techniques, one module each; a module says what it saves, what it costs and the formula of its bytes.

head       log-probs of chosen tokens from hidden states, a few rows of logits at a time, backward written out
lora       adapters on frozen linear layers: only the input waits for the backward, the masters have one 16-bit copy
tiled      MLPs some tokens at a time, in the forward and in the backward
offload    layer inputs wait for the backward in host memory
embedding  the input embedding in host memory
decoded    4-bit weights kept decoded, where there is room for them

(the 8-bit optimizer is in `optim`, 8-bit keys and values in `rollout.slots`), what keeps a run alive:

cap        how the allocator hands out the card, and a limit where the driver would spill instead of failing
oom        what counts as running out of memory, and which settings were lowered then

and ways to measure them:

live       bytes of live tensors, counted from the operations; the same on every run
trace      every allocation in order, with the module that made it
host       which tensors count as host memory where the device cannot tell
allocator  what torch's caching allocator would reserve for a trace
peak       peak of the allocator or of the process, as the machine saw it
"""

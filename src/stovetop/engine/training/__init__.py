"""Training of adapters: `trainer.py` takes data through passes, forward and backward; `loss_math.py` has the losses,
`adapter.py` the state of one training client, `optimizer.py` its step.

Read `trainer.py` first. Of the other folders it imports `kernels/`, `lora/` and `model/`.
"""

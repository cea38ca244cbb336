"""Capacity planning: a discrete-event simulation of KV memory and scheduling, without a model.

`traffic` says what arrives, `managers` how memory is given out, `step_time` how long a step takes,
`simulation` plays them against each other. `command` is `radixkv simulate` and `radixkv kv-size`.
"""

"""Megatron-Core on this machine: the only room of the house that touches `megatron.*`.

`config` describes a run without importing torch; `loop.train` carries it out.  The other
modules are what the loop calls: `distributed` (process groups), `build` (models), `data`,
`optimizer`, `checkpoints`, `signals`.  `cpu` holds what the engine needs without CUDA.
"""

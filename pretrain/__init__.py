"""Stage 1: corpus to .bin/.idx, then pretraining with Megatron-Core."""
